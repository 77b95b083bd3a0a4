"""Previews: the map of a release, the fit of a build, and the map that a warm-up fits."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.nn.functional import avg_pool2d

from engine_builder.building import preview_map
from engine_builder.building.eager_model import load_eager_model
from engine_builder.building.preview_map import mean_error, with_preview_map
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.networks.network import Network
from model.api.resolve import resolve
from model.loading.load import Loaded
from model.loading.served import Defaults, ServedModel, SizeList, SizeRange
from model.loading.warmup import warm_up
from model.pipeline import spec
from model.pipeline.encoded_once import EncodedOnce
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.preview import Preview, PreviewMap, fit_preview_map, preview_map_of
from model.pipeline.runner import Runner
from model.pipeline.vae import decode_latents
from model.request_fields import GenerationRequest
from model.store.manifest import ModelFacts, PreviewLayer, PreviewRecord
from model.store.precision import FP32
from tests.support.images import pixels
from tests.support.linear_networks import linear_model, stub
from tests.support.repository import REPOSITORY

TINY = REPOSITORY / "data" / "tiny-sdxl"
CPU = torch.device("cpu")
BAR = 0.07  # mean error of previews on the tiny model


def record(channels: int = 4, units: int = 3, seed: int = 0) -> PreviewRecord:
    numbers = np.random.default_rng(seed)

    def layer(inputs: int, outputs: int) -> PreviewLayer:
        rows = tuple(tuple(map(float, row)) for row in numbers.normal(size=(outputs, inputs)))
        return PreviewLayer(weight=rows, bias=tuple(map(float, numbers.normal(size=outputs))))

    return PreviewRecord(version=1, layers=(layer(9 * channels, units), layer(units, 3)), error=0.1)


def test_colours_are_those_of_the_manifests_numbers() -> None:
    """The order of the inputs is part of the manifest: channels, then rows, then columns of the neighbourhood."""
    numbers, latents = record(), np.random.default_rng(1).normal(size=(4, 3, 5)).astype(np.float32)
    padded = np.pad(latents, ((0, 0), (1, 1), (1, 1)), mode="edge")
    (weight, bias), (out_weight, out_bias) = [(np.array(one.weight), np.array(one.bias)) for one in numbers.layers]
    expected = [
        [out_weight @ np.tanh(weight @ padded[:, y : y + 3, x : x + 3].ravel() + bias) + out_bias for x in range(5)]
        for y in range(3)
    ]
    colours = preview_map_of(numbers, CPU).colours(torch.from_numpy(latents)[None])
    np.testing.assert_allclose(colours.numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_broken_latents_give_a_picture(dtype: torch.dtype) -> None:
    largest = record().model_copy(update={"layers": tuple(map(with_largest_weights, record().layers))})
    for value, numbers in itertools.product((float("nan"), float("inf"), -float("inf"), 1e30), (record(), largest)):
        latents = torch.zeros((1, 4, 6, 8), dtype=dtype)
        latents[0, 1, 2:4] = value
        assert pixels(Preview(preview_map_of(numbers, CPU), latents).encode()).shape == (6, 8, 3)
    broken = torch.full((1, 4, 6, 8), torch.nan, dtype=dtype)
    assert not pixels(Preview(preview_map_of(record(), CPU), broken).encode()).any(), "NaN is black"


def with_largest_weights(layer: PreviewLayer) -> PreviewLayer:
    weight = tuple(tuple(1e6 if one > 0 else -1e6 for one in row) for row in layer.weight)
    return PreviewLayer(weight=weight, bias=layer.bias)


def warmed_up(model: LoadedModel) -> PreviewMap:
    served = ServedModel(64, 64, SizeList(((64, 64),)), has_refiner=True, defaults=Defaults())
    with torch.inference_mode():
        return warm_up(Loaded(model, served, "line/1", "cpu", "aot_inductor", 0))


def test_warm_up_takes_the_map_of_the_release() -> None:
    numbers, plain, recorded = record(), linear_model(), linear_model()
    recorded.settings = recorded.settings.model_copy(update={"preview": numbers})
    taken, fitted = warmed_up(recorded), warmed_up(plain)
    latents = torch.randn((1, 4, 8, 8), generator=torch.Generator().manual_seed(0))
    expected = preview_map_of(numbers, CPU).colours(latents)
    assert torch.equal(taken.colours(latents), expected) and not torch.equal(fitted.colours(latents), expected)
    runs = [len(stub(model, spec.VAE_DECODER).seen) for model in (plain, recorded)]
    assert runs[0] == runs[1] + 1, "no picture is decoded to fit another map"


@pytest.fixture(scope="module")
def tiny() -> tuple[dict[str, Network], LoadedModel]:
    """The tiny model in eager PyTorch, and its networks. Its build fits a map with them."""
    return load_eager_model(Checkpoint(TINY), None, FP32, "cpu")


@torch.inference_mode()
def estimates(model: LoadedModel, prompt: str, height: int, width: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the number of each step of an image, and the latents that a preview shows after it."""
    request = GenerationRequest(
        prompt=prompt, width=width, height=height, num_inference_steps=12, seed=9, guidance_scale=3.0
    )
    served = ServedModel(width, height, SizeRange(1, 2**16, 1), has_refiner=False, defaults=Defaults())
    runner = Runner(model)
    plan = runner.plan(resolve(request, served))
    [image] = plan.images()
    key = runner.advance(plan, image, EncodedOnce([0]))
    assert key is not None
    loop = model.loop(*key)
    loop.add(image)
    while not loop.step():
        yield image.step, loop.latents(image)


def test_previews_of_the_tiny_model_have_its_colours(tiny: tuple[dict[str, Network], LoadedModel]) -> None:
    """At early and late steps, and several sizes, none of which the fit has seen."""
    networks, model = tiny
    cases = {
        "two green squares on a white background": (128, 192),
        "three yellow stars on a purple background": (192, 128),
    }
    latents = [
        one.clone()
        for prompt, size in cases.items()
        for step, one in estimates(model, prompt, *size)
        if step in (2, 6, 11)
    ]
    examples = [example(model, one) for one in latents]
    old = mean_error(fit_preview_map(model, 128, 128), examples)
    inputs = {"vae_decoder": [{"latents": one / model.settings.vae_scaling_factor} for one in latents]}
    facts = with_preview_map(model.settings, model.family, networks, inputs)
    assert facts.preview is not None
    assert facts.preview.error <= BAR, "the build prints it"
    assert mean_error(preview_map_of(facts.preview, CPU), examples) <= BAR < old
    assert len(facts.preview.model_dump_json()) < 20_000, "each server reads it"
    assert ModelFacts.model_validate_json(facts.model_dump_json()) == facts


@torch.inference_mode()
def example(model: LoadedModel, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return latents, avg_pool2d(decode_latents(model, latents), model.settings.vae_scale_factor).clamp(-1, 1)


def test_has_no_map_for_a_vae_without_colours(
    tiny: tuple[dict[str, Network], LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pictures that overflow, or too many channels. A server fits its linear map then."""
    networks, model = tiny
    inputs = {"vae_decoder": [{"latents": torch.zeros((1, 4, 8, 8))}]}
    wide = model.settings.model_copy(update={"latent_channels": 33})
    assert with_preview_map(wide, model.family, networks, inputs) is wide
    monkeypatch.setattr(preview_map, "_PICTURES", 8)
    bias = next(tensor for name, tensor in networks["vae_decoder"].module.named_parameters() if "conv_out.bias" in name)
    monkeypatch.setattr(bias, "data", torch.full_like(bias, torch.nan))
    assert with_preview_map(model.settings, model.family, networks, inputs) is model.settings
