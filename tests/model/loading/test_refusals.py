"""Releases that a load refuses, with the reason and the fix, before any blob is read: also for a lack of memory."""

import copy
import shutil
from pathlib import Path

import pytest
import torch

from engine_builder.stores.local import WritableLocalStore
from model.denoising.noise_schedule import InvalidSchedule
from model.engines.signatures import Widths, unet_signature
from model.errors import CorruptBlob, EngineError, ManifestError, MissingComponent, NoEngineForTarget, OutOfDeviceMemory
from model.loading.memory import check_memory, free_host_memory, loop_bytes
from model.loading.select import select
from model.loading.target import Target
from model.settings import ServedBucket
from model.store.manifest import Bucket, Manifest, Span
from model.validation import MAX_STEPS
from tests.model.loading.helpers import (
    REBUILD,
    UNET,
    Change,
    Entries,
    change_manifest,
    make_static,
    refusal,
    without_component,
)
from tests.support import releases
from tests.support.components import REFINER_COMPONENTS
from tests.support.releases import RELEASE_NAME, cpu_target


@pytest.fixture
def store(store: WritableLocalStore) -> WritableLocalStore:
    """The store without its blobs."""
    shutil.rmtree(store.root / "blobs")
    return store


def test_valid_release_needs_its_blobs(store: WritableLocalStore) -> None:
    """The refusals below are not caused by the missing blobs."""
    assert "is missing" in refusal(CorruptBlob, store)


def test_no_engine_for_the_target(store: WritableLocalStore) -> None:
    message = refusal(NoEngineForTarget, store, targets=[Target("cuda", "h200", "sm90", "torch2.13-cu130")])
    assert "cuda-h200-sm90-torch2.13-cu130" in message and f"has engines for {cpu_target().key}" in message
    assert "`preheat build` on such a machine" in message and "`preheat publish`" in message


NO_ENGINE: tuple[tuple[Change, str], ...] = (
    (lambda e: e["engines"].pop(2), "for its unet"),
    (lambda e: e["engines"].clear(), "has engines for nothing"),
    (lambda e: e["engines"][UNET].update(runtime="tensorrt"), "no unet engine"),
)
LAYOUT = "no fp32 weights of unet in layout plain"
REFINER = {"force_zeros_for_empty_prompt": True, "requires_aesthetics_score": False}
MISSING: tuple[tuple[Change, str], ...] = (
    (without_component("text_encoder"), "lacks text_encoder."),
    (without_component("vae_decoder"), "lacks vae_decoder."),
    (lambda e: e["weights"].pop(1), "lacks text_encoder_2."),
    (lambda e: e["tokenizers"].pop("tokenizer_2"), "lacks tokenizer_2."),
    (lambda e: e["schedulers"].pop("base"), "lacks base scheduler."),
    (lambda e: e["weights"][UNET].update(precision="fp16"), LAYOUT),
    (lambda e: e["weights"][UNET].update(layout="fused"), LAYOUT),
    (lambda e: e["settings"].update(refiner=REFINER), f"lacks {', '.join(REFINER_COMPONENTS)}, refiner scheduler"),
)
INVALID: tuple[tuple[Change, str, type[ManifestError]], ...] = (
    (lambda e: e["defaults"].update(use_refiner=True), "`preheat build --refiner`", ManifestError),
    (lambda e: e["defaults"].update(num_inference_steps=1000), "num_inference_steps", ManifestError),
    (lambda e: e["defaults"].update(scheduler="UniPC"), "scheduler", ManifestError),
    (lambda e: e["defaults"].update(colour="red"), "colour", ManifestError),
    (lambda e: e["schedulers"]["base"].update(prediction_type="sample"), "prediction_type", InvalidSchedule),
    (lambda e: e["schedulers"]["base"].update(beta_start="0.1"), "beta_start", InvalidSchedule),
    (lambda e: e["schedulers"]["base"].pop("beta_end"), "beta_end", ManifestError),
    (lambda e: e["schedulers"]["base"].update(steps_offset=10**400), "steps_offset", InvalidSchedule),
)


def test_refuses_missing_engines_parts_and_invalid_defaults(store: WritableLocalStore, entries: Entries) -> None:
    cases = [(change, NoEngineForTarget, words, "`preheat build`") for change, words in NO_ENGINE]
    cases += [(change, MissingComponent, words, REBUILD) for change, words in MISSING]
    cases += [(change, kind, words, "") for change, words, kind in INVALID]
    for change, kind, words, fix in cases:
        change_manifest(store, entries, change)
        refused = refusal(kind, store)
        assert words in refused and fix in refused


@pytest.mark.parametrize("component", ["unet", "unet_guided"], ids=["engine", "variant"])
def test_engines_with_different_signatures(store: WritableLocalStore, entries: Entries, component: str) -> None:
    second = copy.deepcopy(entries["engines"][UNET]) | {"component": component, "key": "0" * 64}
    second["signature"]["outputs"][0]["name"] = "other"
    entries["engines"].append(second)
    if component != "unet":
        entries["weights"].append(entries["weights"][UNET] | {"component": component})
        entries["architectures"][component] = entries["architectures"]["unet"]
    releases.write_manifest(store.root, entries)
    assert "unet engines of release toy/1 differ" in refusal(EngineError, store)


def test_configured_bucket_that_is_not_built(store: WritableLocalStore) -> None:
    buckets = [ServedBucket(height=64, width=64, rows=2), ServedBucket(height=768, width=1024, rows=2)]
    message = refusal(NoEngineForTarget, store, buckets=buckets)
    assert "1024x768 with a batch of at most 2" in message and "`preheat build --size 1024x768@2`" in message
    assert "remove that bucket from the config" in message


def test_configured_buckets_without_the_native_size(store: WritableLocalStore) -> None:
    message = refusal(NoEngineForTarget, store, buckets=[ServedBucket(height=128, width=128, rows=2)])
    assert "default size of release toy/1, 64x64, is not loaded" in message
    assert "128x128" in message and "config's buckets" in message


def test_components_without_a_common_size(store: WritableLocalStore, entries: Entries) -> None:
    make_static(entries, (64, 64), component="unet")
    make_static(entries, (128, 128), component="vae_decoder")
    releases.write_manifest(store.root, entries)
    message = refusal(NoEngineForTarget, store)
    assert "64x64" in message and "`preheat build`" in message


GPU = torch.device("cuda:0")


def weight_bytes(manifest: Manifest) -> int:
    return sum({blob.sha256: blob.bytes for record in manifest.weights for blob in record.blobs}.values())


def test_refuses_weights_beyond_the_memory_of_a_gpu(store: WritableLocalStore) -> None:
    manifest = store.read_release(RELEASE_NAME)
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
