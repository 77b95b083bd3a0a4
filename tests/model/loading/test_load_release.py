"""A loaded release: its target, sizes, weights, variants and graphs."""

import copy
import gc
import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save

from engine_builder.stores.local import WritableLocalStore
from model.cold_start import ColdStart
from model.errors import PreheatError
from model.loading.load import load_release
from model.loading.select import select
from model.loading.served import SizeList, SizeRange
from model.model import Model
from model.pipeline.loaded_model import LoadedModel
from model.settings import ServedBucket
from model.store.manifest import Bucket
from tests.model.loading.helpers import (
    UNET,
    VAE_ENCODER,
    Change,
    Entries,
    change_manifest,
    load,
    make_static,
    without_component,
)
from tests.support import releases
from tests.support.components import BASE_COMPONENTS, REFINER_COMPONENTS, UNET_VARIANTS
from tests.support.releases import RELEASE_NAME, Toy, cpu_target, put_blob


def test_serves_a_release(valid_store: WritableLocalStore) -> None:
    cold_start = ColdStart()
    unknown = replace(cpu_target(), product="x86_64_v9")  # a better CPU, for which the release has no engines
    loaded = load_release(valid_store, RELEASE_NAME, [unknown, cpu_target()], [], cold_start)
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
        selection = select(store.read_release(name), [cpu_target()], [])
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
    [engine] = unet.of_size(64, 64, guided=True)
    assert engine.bucket == Bucket.model_validate(small["bucket"]) and engine.component == "unet_guided"
    assert unet.of_size(128, 64, guided=True) == []
    assert loaded.weight_bytes == plain.weight_bytes  # the UNet's weights count once
    assert loaded.served.sizes == SizeList(((64, 64), (64, 128)))  # variants do not limit the sizes
    assert loaded.model.engines.keys() == plain.model.engines.keys() == {*BASE_COMPONENTS}
    assert not plain.model.engines["unet"].guided


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


def count_loaded_models() -> int:
    return sum(isinstance(tracked, LoadedModel) for tracked in gc.get_objects())


class FailureHandler(logging.Handler):
    """Records the error and the number of loaded models at each log line of a failed load."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[str] = []
        self.loaded_models: list[int] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.errors.append(json.loads(record.getMessage())["error"])
        self.loaded_models.append(count_loaded_models())


@pytest.fixture
def failures() -> Iterator[FailureHandler]:
    handler, logger = FailureHandler(), logging.getLogger("preheat")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def test_memory_of_a_failed_load_is_freed_before_the_next(
    valid_store: WritableLocalStore, failures: FailureHandler
) -> None:
    """The release loads, and its warm-up fails, because its networks are not those of an SDXL."""
    gc.collect()
    before = count_loaded_models()
    model = Model(config={"model_metadata": {"preheat": {"store": valid_store.url, "release": RELEASE_NAME}}})
    for _ in range(2):
        gc.disable()  # so that only the load itself frees the memory
        with suppress(PreheatError):
            model.load()
    assert [number - before for number in failures.loaded_models] == [1, 1]
    assert [error.partition(".")[0] for error in failures.errors] == ["The text_encoder engines cannot be used"] * 2
