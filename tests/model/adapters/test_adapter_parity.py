"""Images with LoRA adapters are those of diffusers, which loads the same files: at most 2 of 255 apart."""

import logging
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._inductor.metrics

from engine_builder.adapters.add import add_adapter
from engine_builder.stores.store import WritableStore, open_writable_store
from model.cold_start import ColdStart
from model.errors import AdapterError
from model.images.encode import Pixels
from model.loading.adapters import ServedAdapters
from model.loading.load import Loaded, load_release
from model.loading.target import detect_targets
from model.pipeline.params import GenerationParams
from model.pipeline.text_to_image import generate
from tests.support.adapters import (
    CONVOLUTIONS,
    LINEARS,
    STYLES,
    copy_store,
    module_shapes,
    random_deltas,
    write_adapter,
)
from tests.support.linear_networks import PLAIN
from tests.support.reference import Reference
from tests.support.repository import MODEL_FOLDER

TOLERANCE = 2  # of 255: float32 rounding, in another order
SPREAD = {"linears": 0.25, "convolutions": 0.14}  # of the factors: the images differ visibly, and are not noise


@pytest.fixture(scope="module", autouse=True)
def quiet_diffusers() -> Iterator[None]:
    """diffusers logs a line for each scheduler setting, and for each adapter without factors for a network."""
    logger = logging.getLogger("diffusers")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """An adapter of each key format and kind of layer, by name."""
    folder, shapes = tmp_path_factory.mktemp("adapters"), module_shapes(MODEL_FOLDER)
    files = {}
    for seed, style in enumerate(STYLES):
        for kind, pattern in (("linears", LINEARS), ("convolutions", CONVOLUTIONS)):
            deltas = random_deltas(shapes, pattern, 4, seed, SPREAD[kind])
            files[f"{style}-{kind}"] = write_adapter(folder / f"{style}-{kind}.safetensors", deltas, style)
    return files


@pytest.fixture(scope="module")
def adapted(
    store: WritableStore, release: str, files: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Loaded:
    """The tiny model with all adapters."""
    own = open_writable_store(copy_store(store, tmp_path_factory.mktemp("store") / "store"))
    for name, path in files.items():
        add_adapter(own, name, path)
    return load_release(own, release, detect_targets(), [], ColdStart(), adapters=ServedAdapters(tuple(files)))


@pytest.fixture(scope="module")
def reference(files: Mapping[str, Path]) -> Reference:
    """diffusers' pipelines with all adapters. Needs peft (`make setup` installs it)."""
    reference = Reference(MODEL_FOLDER)
    for name, path in files.items():
        reference.load_lora(name, path)
    return reference


def params(*loras: tuple[str, float]) -> GenerationParams:
    return replace(
        PLAIN,
        prompt="a large red circle on a blue background",
        width=128,
        height=128,
        num_inference_steps=4,
        guidance_scale=5.0,
        seed=7,
        loras=tuple(sorted(loras)),
    )


def difference(one: Pixels, other: Pixels) -> int:
    assert one.shape == other.shape
    return int(np.abs(one.astype(int) - other.astype(int)).max())


def image(loaded: Loaded, request: GenerationParams) -> Pixels:
    [pixels], _, _ = generate(loaded.model, [request])
    return pixels


@pytest.mark.parametrize("kind", SPREAD)
@pytest.mark.parametrize("style", STYLES)
def test_image_with_one_adapter_is_that_of_diffusers(
    style: str, kind: str, adapted: Loaded, reference: Reference
) -> None:
    request = params((f"{style}-{kind}", 0.8))
    generated = image(adapted, request)
    assert difference(generated, reference.generate(request)) <= TOLERANCE
    assert difference(generated, image(adapted, params())) > 10 * TOLERANCE


def test_image_with_three_adapters_is_that_of_diffusers(adapted: Loaded, reference: Reference) -> None:
    request = params(("kohya-linears", 0.7), ("peft-convolutions", -0.5), ("diffusers-linears", 0.4))
    generated = image(adapted, request)
    assert difference(generated, reference.generate(request)) <= TOLERANCE
    alone = image(adapted, params(("kohya-linears", 0.7)))
    assert difference(generated, alone) > 10 * TOLERANCE


def test_image_without_adapters_is_unaffected(adapted: Loaded, loaded: Loaded, reference: Reference) -> None:
    for name in ("kohya-sgm-linears", "kohya-convolutions"):
        image(adapted, params((name, 1.0)))
    after = image(adapted, params())
    assert np.array_equal(after, image(loaded, params()))
    assert difference(after, reference.generate(params())) <= TOLERANCE


def test_swaps_compile_nothing(adapted: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines, loops and addresses stay, no process is started, and nothing is generated by the compiler."""
    started: list[object] = []
    image(adapted, params())
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **_: started.append(args))
    engines = {name: list(engines.engines) for name, engines in adapted.model.engines.items()}
    loops, generated = dict(adapted.model.loops), torch._inductor.metrics.generated_kernel_count
    for name in SPREAD:
        image(adapted, params((f"kohya-{name}", 0.8)))
    assert {name: list(engines.engines) for name, engines in adapted.model.engines.items()} == engines
    assert adapted.model.loops == loops and started == []
    assert torch._inductor.metrics.generated_kernel_count == generated


def test_adapter_of_another_model_is_refused_at_load(
    store: WritableStore, toy_store: WritableStore, files: Mapping[str, Path], tmp_path: Path
) -> None:
    """A record that fits one release does not have to fit another."""
    own = open_writable_store(copy_store(toy_store, tmp_path / "store"))
    other = open_writable_store(copy_store(store, tmp_path / "other"))
    record, _, _ = add_adapter(other, "style", files["kohya-linears"])
    for blob in record.blobs:
        own.put(other.get(blob.sha256, blob.bytes))
    own.write_adapter(record)
    with pytest.raises(AdapterError, match="Adapter style does not fit release toy-sdxl/1: it changes .* Remove it"):
        load_release(own, "toy-sdxl/1", detect_targets(), [], ColdStart(), adapters=ServedAdapters(("style",)))
