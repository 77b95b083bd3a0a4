"""Releases that do not fit into memory are refused before any blob is read."""

from pathlib import Path

import pytest
import torch

from engine_builder.stores.local import WritableLocalStore
from model.engines.signatures import Widths, unet_signature
from model.errors import OutOfDeviceMemory
from model.loading.memory import check_memory, free_host_memory, loop_bytes
from model.loading.select import select
from model.loading.target import Target
from model.store.manifest import Bucket, Manifest, Span
from model.validation import MAX_STEPS
from tests.model.loading.helpers import Entries, refusal
from tests.support import releases
from tests.support.releases import RELEASE_NAME, cpu_target

GPU = torch.device("cuda:0")


def weight_bytes(manifest: Manifest) -> int:
    return sum({blob.sha256: blob.bytes for record in manifest.weights for blob in record.blobs}.values())


def test_refuses_weights_beyond_the_memory_of_a_gpu(valid_store: WritableLocalStore) -> None:
    manifest = valid_store.read_release(RELEASE_NAME)
    selection = select(manifest, [cpu_target()], [])
    check_memory(GPU, selection, free=weight_bytes(manifest))
    with pytest.raises(OutOfDeviceMemory, match="use a GPU with more memory"):
        check_memory(GPU, selection, free=weight_bytes(manifest) - 1)


def test_refuses_weights_beyond_the_memory_of_a_cpu(store: WritableLocalStore, entries: Entries) -> None:
    """Otherwise the kernel would kill the server during the load. The blobs do not exist, so none is read."""
    blobs = [{"sha256": f"{number:064x}", "bytes": 2**28} for number in range(8000)]
    entries["weights"][0]["blobs"] = blobs
    releases.write_manifest(store.root, entries)
    message = refusal(OutOfDeviceMemory, store)
    assert "The weights take 2000.0 GiB, and this machine has " in message and "container's limit" in message


def test_free_memory_is_the_least_of_machine_and_container(tmp_path: Path) -> None:
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    assert free_host_memory(meminfo, cgroup) is None
    meminfo.write_text("MemTotal:  900 kB\nMemAvailable:  500 kB\nHugePages_Total:  0\nSwapFree:  100 kB\n")
    assert free_host_memory(meminfo, cgroup) == 600 * 1024
    cgroup.mkdir()
    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text("300000\n")
    (cgroup / "memory.stat").write_text("anon 100000\nactive_file 30000\ninactive_file 50000\n")
    assert free_host_memory(meminfo, cgroup) == 600 * 1024
    (cgroup / "memory.max").write_text("400000\n")
    assert free_host_memory(meminfo, cgroup) == 180_000
    (cgroup / "memory.max").write_text("900000000\n")
    assert free_host_memory(meminfo, cgroup) == 600 * 1024


def test_counts_the_buffers_of_all_loops(tmp_path: Path) -> None:
    """Two sizes, each with its largest batch. The variants of a UNet use the buffers of its loop."""
    store, target = WritableLocalStore(tmp_path), Target("cuda", "h200", "sm90", "torch2.13-cu130")
    widths = Widths(
        tokens=77, text_width=8, text_width_2=8, pooled_width=8, context_width=16, latent_channels=4, time_ids=6,
        vae_scale=8, time_embeds_width=1280, keys_values_width=166_400,
    )  # fmt: skip
    draft = releases.draft_release(store)
    others = [engine for engine in draft.engines if engine.component != "unet"]
    [dynamic] = [engine for engine in draft.engines if engine.component == "unet"]
    unets = []
    for batch, side in ((1, 64), (2, 64), (8, 64), (4, 128)):
        sides = Span(min=side, max=side)
        bucket = Bucket(batch=Span(min=batch, max=batch), height=sides, width=sides)
        changes = {"key": f"{len(unets):064x}", "bucket": bucket, "signature": unet_signature(widths, "float32")}
        unets.append(dynamic.model_copy(update=changes))
    buffers = loop_bytes({"unet": unets})
    texts = (8 + 4) * (2 * 77 * 166_400 + MAX_STEPS * 1280) * 4
    assert texts < buffers < 1.01 * texts

    variant = unets[-1].model_copy(update={"component": "unet_guided"})
    assert loop_bytes({"unet": [*unets, variant]}) == buffers
    assert 1.5 * buffers < loop_bytes({"unet": unets}, ranks=2) <= 2 * buffers

    engines = tuple(engine.model_copy(update={"target": target.key}) for engine in (*others, *unets))
    manifest = draft.model_copy(update={"engines": engines})
    selection = select(manifest, [target], [])
    check_memory(GPU, selection, free=weight_bytes(manifest) + buffers)
    with pytest.raises(OutOfDeviceMemory, match="Configure smaller batches .* or fewer sizes"):
        check_memory(GPU, selection, free=weight_bytes(manifest) + buffers - 1)
