"""A loaded release: its sizes, weights and variants. What a load refuses, with the reason and the fix."""

import copy
import gc
import io
import json
import logging
import os
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from engine_builder.stores.local import WritableLocalStore
from model.cold_start import ColdStart
from model.denoising.noise_schedule import InvalidSchedule
from model.engines.signatures import UnetWidths, VaeWidths, unet_signature
from model.errors import (
    CorruptBlob,
    EngineError,
    ManifestError,
    MissingComponent,
    NoEngineForTarget,
    OutOfDeviceMemory,
    PreheatError,
    ReleaseNotLoaded,
)
from model.loading.memory import check_memory, free_host_memory, loop_bytes
from model.loading.select import select
from model.loading.served import SizeList, SizeRange
from model.loading.target import Target
from model.model import Model
from model.pipeline.loaded_model import LoadedModel
from model.settings import ServedBucket
from model.store.manifest import Bucket, Manifest, Span
from model.validation import MAX_STEPS
from tests.model.loading.helpers import (
    REBUILD,
    UNET,
    VAE_ENCODER,
    Change,
    Entries,
    change_manifest,
    load,
    make_static,
    refusal,
    without_component,
)
from tests.support import releases
from tests.support.components import BASE_COMPONENTS, REFINER_COMPONENTS, UNET_VARIANTS
from tests.support.deployments import deployed, load_release
from tests.support.releases import RELEASE_NAME, Toy, cpu_target, put_blob


def test_serves_a_release(valid_store: WritableLocalStore) -> None:
    cold_start = ColdStart()
    unknown = replace(cpu_target(), product="x86_64_v9")  # a better CPU, for which the release has no engines
    loaded = load_release(valid_store, deployed(RELEASE_NAME), [unknown, cpu_target()], cold_start)
    assert (loaded.release, loaded.target, loaded.runtime) == (RELEASE_NAME, cpu_target().key, "aot_inductor")
    assert loaded.served.sizes == SizeRange(64, 512, 8) and not loaded.served.has_refiner
    assert loaded.served.defaults.num_inference_steps == 4
    toy_bytes = sum(tensor.nbytes for tensor in releases.toy_tensors(0).values())
    assert loaded.weight_bytes == len(BASE_COMPONENTS) * toy_bytes
    assert {"resolve", "weights", "engines"} <= cold_start.phases.keys()
    for seed, name in enumerate(BASE_COMPONENTS):
        x = torch.randn(6, 4, 8, 8)  # a larger batch than the bucket's
        torch.testing.assert_close(loaded.model.engines[name].run({"x": x}, 64, 64)["y"], Toy(seed)(x)[0])


def test_refiner_shares_equal_weights(store: WritableLocalStore) -> None:
    """A text encoder with the base's weights is neither fetched nor opened a second time."""
    manifest = releases.draft_release(store, releases.compiled_toy(), refiner=True)
    second = next(record for record in manifest.weights if record.component == "text_encoder_2")
    shared_weights = tuple(
        record.model_copy(update={"blobs": second.blobs}) if record.component == "refiner_text_encoder_2" else record
        for record in manifest.weights
    )
    store.write_release(manifest.model_copy(update={"version": "2"}))
    store.write_release(manifest.model_copy(update={"version": "3", "weights": shared_weights}))
    for name, expected in (("toy/2", {}), ("toy/3", {"refiner_text_encoder_2": "text_encoder_2"})):
        selection = select(store.read_release(name), [cpu_target()], deployed())
        assert selection.shared == expected
        assert selection.engines.keys() == selection.weights.keys()
        assert selection.engines.keys() == {*BASE_COMPONENTS, *REFINER_COMPONENTS} - expected.keys()
    separate, shared = load(store, "toy/2"), load(store, "toy/3")
    assert separate.served.has_refiner and shared.served.has_refiner
    assert separate.model.engines["refiner_text_encoder_2"] is not separate.model.engines["text_encoder_2"]
    assert shared.model.engines["refiner_text_encoder_2"] is shared.model.engines["text_encoder_2"]
    assert shared.model.engines.keys() == {*BASE_COMPONENTS, *REFINER_COMPONENTS}
    count = len(separate.model.engines)
    assert shared.weight_bytes == separate.weight_bytes * (count - 1) // count


def test_loads_a_release_without_a_vae_encoder(store: WritableLocalStore, entries: Entries) -> None:
    """Releases that were built before image to image have none."""
    releases.write_manifest(store.root, entries)
    whole = load(store)
    assert whole.served.image_sizes == whole.served.sizes and "vae_encoder" in whole.model.engines
    of_other_target: Change = lambda e: e["engines"][VAE_ENCODER].update(target="cpu-other-torch1.0")  # noqa: E731
    for change in (without_component("vae_encoder"), of_other_target):
        change_manifest(store, entries, change)
        loaded = load(store)
        assert loaded.served.image_sizes is None and "vae_encoder" not in loaded.model.engines


def test_configured_buckets_limit_the_sizes(valid_store: WritableLocalStore) -> None:
    buckets = [ServedBucket(height=64, width=64, rows=2), ServedBucket(height=128, width=256, rows=2)]
    assert load(valid_store, buckets=buckets).served.sizes == SizeList(((64, 64), (256, 128)))


def test_an_engine_of_a_cold_size_is_opened_by_its_first_run(store: WritableLocalStore, entries: Entries) -> None:
    make_static(entries, (64, 64), (128, 64), component="unet")
    package = releases.compiled_toy().engine
    with zipfile.ZipFile(buffer := io.BytesIO(package), "a") as archive:
        archive.comment = b"of the larger size"
    blob = put_blob(store, buffer.getvalue())
    entries["engines"][-1]["blob"] = blob.model_dump()
    releases.write_manifest(store.root, entries)
    path, x = store.get(blob.sha256, blob.bytes), torch.randn(1, 4, 16, 8)
    buckets = [ServedBucket(height=height, width=64, rows=2, warm_up=height == 64) for height in (64, 128)]
    engine = load(store, buckets=buckets).model.engines["unet"]
    for _ in range(2):
        torch.testing.assert_close(engine.run({"x": x}, 128, 64)["y"], Toy(UNET)(x)[0])
    os.chmod(path, 0o600)
    path.write_bytes(bytes(blob.bytes))
    engine = load(store, buckets=buckets).model.engines["unet"]
    with pytest.raises(ReleaseNotLoaded, match="The unet engine of this size cannot be read. Blob .* is damaged"):
        engine.run({"x": x}, 128, 64)
    engine.run({"x": x[:, :, :8]}, 64, 64)
    path.write_bytes(buffer.getvalue())
    torch.testing.assert_close(engine.run({"x": x}, 128, 64)["y"], Toy(UNET)(x)[0])
    warm = [bucket.model_copy(update={"warm_up": True}) for bucket in buckets]
    path.write_bytes(bytes(blob.bytes))
    refusal(CorruptBlob, store, buckets=warm)


def test_each_engine_gets_the_weights_of_its_layout(store: WritableLocalStore, entries: Entries) -> None:
    second = copy.deepcopy(entries["engines"][UNET]) | {"layout": "other", "key": "0" * 64}
    second["bucket"]["rows"] = {"min": 1, "max": 9, "multiple": 1}
    blob = put_blob(store, save(releases.toy_tensors(77)))
    entries["engines"].append(second)
    entries["weights"].append(
        {"component": "unet", "precision": "fp32", "layout": "other", "blobs": [blob.model_dump()]}
    )
    releases.write_manifest(store.root, entries)
    first, other = load(store).model.engines["unet"].engines
    x = torch.randn(1, 4, 8, 8)
    torch.testing.assert_close(first.run({"x": x})["y"], Toy(UNET)(x)[0])
    torch.testing.assert_close(other.run({"x": x})["y"], Toy(77)(x)[0])


def test_static_engines_serve_their_common_sizes(store: WritableLocalStore, entries: Entries) -> None:
    make_static(entries, (64, 64), (128, 64), component="unet")
    releases.write_manifest(store.root, entries)
    assert load(store).served.sizes == SizeList(((64, 64), (64, 128)))
    make_static(entries, (64, 64), (64, 256), component="vae_decoder")
    releases.write_manifest(store.root, entries)
    assert load(store).served.sizes == SizeList(((64, 64),))


def test_incomplete_vae_encoder_limits_only_images(store: WritableLocalStore, entries: Entries) -> None:
    for component in ("unet", "vae_decoder"):
        make_static(entries, (64, 64), (128, 64), component=component)
    make_static(entries, (64, 64), (256, 256), component="vae_encoder")
    releases.write_manifest(store.root, entries)
    served = load(store).served
    assert served.sizes == SizeList(((64, 64), (64, 128))) and served.image_sizes == SizeList(((64, 64),))
    both = [ServedBucket(height=height, width=64, rows=2) for height in (64, 128)]
    assert load(store, buckets=both).served.image_sizes == SizeList(((64, 64),))
    make_static(entries, (256, 256), component="vae_encoder")
    releases.write_manifest(store.root, entries)
    for buckets in ([], both):
        served = load(store, buckets=buckets).served
        assert served.sizes == SizeList(((64, 64), (64, 128))) and served.image_sizes is None


def test_loads_variants_with_their_unet(store: WritableLocalStore, entries: Entries) -> None:
    plain = load(store)
    make_static(entries, (64, 64), (128, 64), component="unet")
    small, _ = [engine for engine in entries["engines"] if engine["component"] == "unet"]
    other_bucket = small | {"bucket": small["bucket"] | {"rows": {"min": 4, "max": 4, "multiple": 1}}}
    [weights] = [record for record in entries["weights"] if record["component"] == "unet"]
    for index, name in enumerate(UNET_VARIANTS):
        # Only the first one fits an engine of the UNet.
        for number, engine in enumerate((small, small | {"precision": "bf16"}, other_bucket)):
            entries["engines"].append(engine | {"component": name, "key": f"{number:062d}f{index}"})
        entries["weights"].append(weights | {"component": name})
        entries["architectures"][name] = entries["architectures"]["unet"]
    releases.write_manifest(store.root, entries)
    loaded = load(store)
    unet = loaded.model.engines["unet"]
    assert [engine.component for engine in unet.engines] == ["unet"] * 2
    paired = loaded.model.engines["unet_guided"]
    [engine] = paired.of_size(64, 64)
    assert engine.bucket == Bucket.model_validate(small["bucket"]) and engine.component == "unet_guided"
    assert paired.of_size(128, 64) == []
    assert loaded.weight_bytes == plain.weight_bytes  # the UNet's weights count once
    assert loaded.served.sizes == SizeList(((64, 64), (64, 128)))  # variants do not limit the sizes
    assert loaded.model.engines.keys() - plain.model.engines.keys() == {"unet_guided"}
    assert plain.model.engines.keys() == {*BASE_COMPONENTS}


def test_ignores_the_unconditional_unet_of_an_earlier_build(store: WritableLocalStore, entries: Entries) -> None:
    """Builds had it up to commit 0084eaf, for a single guided image. Its blobs are not read: here they are missing."""
    plain = load(store)
    [unet] = [engine for engine in entries["engines"] if engine["component"] == "unet"]
    [weights] = [record for record in entries["weights"] if record["component"] == "unet"]
    missing = {"blob": unet["blob"] | {"sha256": "0" * 64}, "constants": unet["constants"] | {"sha256": "1" * 64}}
    entries["engines"].append(unet | missing | {"component": "unet_unconditional", "key": "0" * 64})
    entries["weights"].append(weights | {"component": "unet_unconditional"})
    entries["architectures"]["unet_unconditional"] = entries["architectures"]["unet"]
    releases.write_manifest(store.root, entries)
    loaded = load(store)
    assert loaded.model.engines.keys() == plain.model.engines.keys()
    assert [engine.component for engine in loaded.model.engines["unet"].engines] == ["unet"]
    assert loaded.weight_bytes == plain.weight_bytes and loaded.served.sizes == plain.served.sizes


def loaded_models() -> list[LoadedModel]:
    return [tracked for tracked in gc.get_objects() if isinstance(tracked, LoadedModel)]


class FailureHandler(logging.Handler):
    """Records the error and the number of further loaded models at each log line of a failed load."""

    def __init__(self) -> None:
        super().__init__()
        self.before = loaded_models()  # of other tests: kept, so that no other model gets the id of one of them
        self.errors: list[str] = []
        self.counts: list[int] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.errors.append(json.loads(record.getMessage())["error"])
        self.counts.append(len({id(model) for model in loaded_models()} - {id(model) for model in self.before}))


@pytest.fixture
def failures() -> Iterator[FailureHandler]:
    handler, logger = FailureHandler(), logging.getLogger("preheat")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def test_memory_of_a_failed_load_is_freed_before_the_next(
    valid_store: WritableLocalStore, failures: FailureHandler
) -> None:
    """The release loads, and its warm-up fails, because its networks are not an SDXL's."""
    model = Model(config={"model_metadata": {"preheat": {"store": valid_store.url, "release": RELEASE_NAME}}})
    for _ in range(2):
        gc.disable()  # so that only the load itself frees the memory
        with suppress(PreheatError):
            model.load()
    assert failures.counts == [1, 1]
    assert [error.partition(".")[0] for error in failures.errors] == ["The text_encoder engines cannot be used"] * 2


@pytest.fixture
def empty_store(store: WritableLocalStore) -> WritableLocalStore:
    """The store without its blobs."""
    shutil.rmtree(store.root / "blobs")
    return store


def test_valid_release_needs_its_blobs(empty_store: WritableLocalStore) -> None:
    """The refusals below are not caused by the missing blobs."""
    assert "is missing" in refusal(CorruptBlob, empty_store)


def test_no_engine_for_the_target(empty_store: WritableLocalStore) -> None:
    message = refusal(NoEngineForTarget, empty_store, targets=[Target("cuda", "h200", "sm90", "torch2.13-cu130")])
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
    (lambda e: e["defaults"].update(clip_skip=31), "clip_skip: 31 is not accepted", ManifestError),
    (lambda e: e["defaults"].update(colour="red"), "colour", ManifestError),
    (lambda e: e["schedulers"]["base"].update(prediction_type="sample"), "prediction_type", InvalidSchedule),
    (lambda e: e["schedulers"]["base"].update(beta_start="0.1"), "beta_start", InvalidSchedule),
    (lambda e: e["schedulers"]["base"].pop("beta_end"), "beta_end", ManifestError),
    (lambda e: e["schedulers"]["base"].update(steps_offset=10**400), "steps_offset", InvalidSchedule),
)


def test_refuses_missing_engines_parts_and_invalid_defaults(empty_store: WritableLocalStore, entries: Entries) -> None:
    cases = [(change, NoEngineForTarget, words, "`preheat build`") for change, words in NO_ENGINE]
    cases += [(change, MissingComponent, words, REBUILD) for change, words in MISSING]
    cases += [(change, kind, words, "") for change, words, kind in INVALID]
    for change, kind, words, fix in cases:
        change_manifest(empty_store, entries, change)
        refused = refusal(kind, empty_store)
        assert words in refused and fix in refused


@pytest.mark.parametrize("component", ["unet", "unet_guided"], ids=["engine", "variant"])
def test_engines_with_different_signatures(empty_store: WritableLocalStore, entries: Entries, component: str) -> None:
    second = copy.deepcopy(entries["engines"][UNET]) | {"component": component, "key": "0" * 64}
    second["signature"]["outputs"][0]["name"] = "other"
    entries["engines"].append(second)
    if component != "unet":
        entries["weights"].append(entries["weights"][UNET] | {"component": component})
        entries["architectures"][component] = entries["architectures"]["unet"]
    releases.write_manifest(empty_store.root, entries)
    assert "unet engines of release toy/1 differ" in refusal(EngineError, empty_store)


def test_configured_bucket_that_is_not_built(empty_store: WritableLocalStore) -> None:
    buckets = [ServedBucket(height=64, width=64, rows=2), ServedBucket(height=768, width=1024, rows=2)]
    message = refusal(NoEngineForTarget, empty_store, buckets=buckets)
    assert "1024x768 with a batch of at most 2" in message and "`preheat build --size 1024x768@2`" in message
    assert "remove that bucket from the config" in message


def test_configured_buckets_without_the_native_size(empty_store: WritableLocalStore) -> None:
    message = refusal(NoEngineForTarget, empty_store, buckets=[ServedBucket(height=128, width=128, rows=2)])
    assert "default size of release toy/1, 64x64, is not loaded" in message
    assert "128x128" in message and "config's buckets" in message


def test_components_without_a_common_size(empty_store: WritableLocalStore, entries: Entries) -> None:
    make_static(entries, (64, 64), component="unet")
    make_static(entries, (128, 128), component="vae_decoder")
    releases.write_manifest(empty_store.root, entries)
    message = refusal(NoEngineForTarget, empty_store)
    assert "64x64" in message and "`preheat build`" in message


GPU = torch.device("cuda:0")


def weight_bytes(manifest: Manifest) -> int:
    return sum({blob.sha256: blob.bytes for record in manifest.weights for blob in record.blobs}.values())


def test_refuses_weights_beyond_the_memory_of_a_gpu(empty_store: WritableLocalStore) -> None:
    manifest = empty_store.read_release(RELEASE_NAME)
    selection = select(manifest, [cpu_target()], deployed())
    check_memory(GPU, selection, free=weight_bytes(manifest))
    with pytest.raises(OutOfDeviceMemory, match="use a GPU with more memory"):
        check_memory(GPU, selection, free=weight_bytes(manifest) - 1)


def test_refuses_weights_beyond_the_memory_of_a_cpu(empty_store: WritableLocalStore, entries: Entries) -> None:
    """Otherwise the kernel would kill the server during the load. The blobs do not exist, so none is read."""
    blobs = [{"sha256": f"{number:064x}", "bytes": 2**28} for number in range(8000)]
    entries["weights"][0]["blobs"] = blobs
    releases.write_manifest(empty_store.root, entries)
    message = refusal(OutOfDeviceMemory, empty_store)
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
    empty_store, target = WritableLocalStore(tmp_path), Target("cuda", "h200", "sm90", "torch2.13-cu130")
    widths = UnetWidths(
        VaeWidths(latent_channels=4, scale=8), tokens=77, pooled_width=8, context_width=16, time_ids=6,
        time_embeds_width=1280, keys_values_width=166_400,
    )  # fmt: skip
    draft = releases.draft_release(empty_store)
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
    assert buffers < loop_bytes({"unet": [*unets, variant]}) < buffers + 1000  # a mapping of its own
    assert 1.5 * buffers < loop_bytes({"unet": unets}, ranks=2) <= 2 * buffers
    engines = tuple(engine.model_copy(update={"target": target.key}) for engine in (*others, *unets))
    manifest = draft.model_copy(update={"engines": engines})
    selection = select(manifest, [target], deployed())
    check_memory(GPU, selection, free=weight_bytes(manifest) + buffers)
    with pytest.raises(OutOfDeviceMemory, match="Configure smaller batches .* or fewer sizes"):
        check_memory(GPU, selection, free=weight_bytes(manifest) + buffers - 1)
