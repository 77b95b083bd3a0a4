"""Images with LoRA adapters are those of diffusers, which loads the same files: at most 2 of 255 apart."""

import subprocess
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._inductor.metrics

from engine_builder.adapters.add import add_adapter
from engine_builder.stores.store import WritableStore, open_writable_store
from model.adapters.block_scales import check_scale, layer_scale
from model.adapters.layers import Scale
from model.cold_start import ColdStart
from model.deployment import ServedAdapters
from model.errors import AdapterError
from model.images.pixels import Pixels
from model.loading.load import Loaded
from model.loading.target import detect_targets
from model.pipeline.params import GenerationParams
from model.pipeline.text_to_image import generate
from tests.support.adapters import (
    CONVOLUTIONS,
    LINEARS,
    STYLES,
    Style,
    copy_store,
    module_shapes,
    random_deltas,
    write_adapter,
)
from tests.support.deployments import deployed, load_release
from tests.support.images import largest_difference
from tests.support.linear_networks import PLAIN
from tests.support.reference import Reference
from tests.support.repository import MODEL_FOLDER

TOLERANCE = 2  # of 255: float32 rounding, in another order
SPREAD = {"linears": 0.25, "convolutions": 0.14}  # of the factors: the images differ visibly, and are not noise


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
    return load_release(own, deployed(release, adapters=ServedAdapters(tuple(files))), detect_targets(), ColdStart())


@pytest.fixture(scope="module")
def reference(files: Mapping[str, Path]) -> Reference:
    """diffusers' pipelines with all adapters. Needs peft (`make setup` installs it)."""
    reference = Reference(MODEL_FOLDER)
    for name, path in files.items():
        reference.load_lora(name, path)
    return reference


def params(*loras: tuple[str, Scale]) -> GenerationParams:
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


def image(loaded: Loaded, request: GenerationParams) -> Pixels:
    [pixels], _, _ = generate(loaded.model, [request])
    return pixels


def marked(style: Style, kind: str) -> Any:
    """Each style and each kind in `make test`, all pairs in `make full`."""
    is_short = (STYLES.index(style) % 2 == 0) == (kind == "linears")
    return pytest.param(f"{style}-{kind}", marks=() if is_short else pytest.mark.full)


@pytest.mark.parametrize("name", [marked(style, kind) for style in STYLES for kind in SPREAD])
def test_image_with_one_adapter_is_that_of_diffusers(name: str, adapted: Loaded, reference: Reference) -> None:
    request = params((name, 0.8))
    generated = image(adapted, request)
    assert largest_difference(generated, reference.generate(request)) <= TOLERANCE
    assert largest_difference(generated, image(adapted, params())) > 10 * TOLERANCE


def test_image_with_three_adapters_is_that_of_diffusers(adapted: Loaded, reference: Reference) -> None:
    request = params(("kohya-linears", 0.7), ("peft-convolutions", -0.5), ("diffusers-linears", 0.4))
    generated = image(adapted, request)
    assert largest_difference(generated, reference.generate(request)) <= TOLERANCE
    alone = image(adapted, params(("kohya-linears", 0.7)))
    assert largest_difference(generated, alone) > 10 * TOLERANCE


BLOCK_SCALES: list[dict[str, Any]] = [
    {"unet": {"down": 0.2, "mid": -0.5, "up": 1.5}, "text_encoder": 0.0, "text_encoder_2": 0.5},
    {"unet": {"up": {"block_0": [1.5, -0.5]}}, "text_encoder": 0.3},
    {"unet": {"down": {"block_1": 0.0}, "mid": 0.0}},
    {"unet": -0.4},
]


def test_scales_by_block_are_those_of_diffusers(adapted: Loaded, files: Mapping[str, Path]) -> None:
    name, others = "diffusers-linears", ("kohya-linears", 0.4)
    reference = Reference(MODEL_FOLDER)  # without adapters of `conv_in`, at whose name diffusers fails
    for one in (name, others[0]):
        reference.load_lora(one, files[one])
    blocks = {f"{side}.block_{block}": count for side, count in (("down", 1), ("up", 2)) for block in range(3)}
    assert adapted.served.unet_blocks == blocks
    images = []
    for scales in BLOCK_SCALES:
        check_scale(scales)
        request = params((name, layer_scale(scales, adapted.served.unet_blocks)), others)
        images.append(image(adapted, request))
        reference.block_scales = {name: scales}
        assert largest_difference(images[-1], reference.generate(request)) <= TOLERANCE, scales
    assert min(largest_difference(*pair) for pair in combinations(images, 2)) > 2 * TOLERANCE


def test_image_without_adapters_is_unaffected(adapted: Loaded, loaded: Loaded, reference: Reference) -> None:
    for name in ("kohya-sgm-linears", "kohya-convolutions"):
        image(adapted, params((name, 1.0)))
    after = image(adapted, params())
    assert np.array_equal(after, image(loaded, params()))
    assert largest_difference(after, reference.generate(params())) <= TOLERANCE


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
        load_release(own, deployed("toy-sdxl/1", adapters=ServedAdapters(("style",))), detect_targets(), ColdStart())
