"""Previews: the map of a release, the fit of a build, and the map that a warm-up fits."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import avg_pool2d, interpolate

from engine_builder.building.eager_model import load_eager_model
from engine_builder.building.preview_map import mean_error, with_preview_map
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.networks.network import Network
from model.api.request import GenerationRequest
from model.api.resolve import resolve
from model.loading.load import Loaded
from model.loading.served import Defaults, ServedModel, SizeList, SizeRange
from model.loading.warmup import warm_up
from model.pipeline import spec
from model.pipeline.decode import decode_latents
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.preview import Preview, PreviewMap, fit_preview_map, preview_map_of
from model.pipeline.runner import Runner
from model.store.manifest import ModelFacts, PreviewLayer, PreviewRecord, Signature, TensorSpec
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


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_broken_latents_give_a_picture(value: float, dtype: torch.dtype) -> None:
    latents = torch.zeros((1, 4, 6, 8), dtype=dtype)
    latents[0, 1, 2:4] = value
    largest = record().model_copy(update={"layers": tuple(scaled(layer, 1e6) for layer in record().layers)})
    for preview_map in (preview_map_of(record(), CPU), preview_map_of(largest, CPU)):
        assert pixels(Preview(preview_map, latents).encode()).shape == (6, 8, 3)


def scaled(layer: PreviewLayer, factor: float) -> PreviewLayer:
    return PreviewLayer(
        weight=tuple(tuple(max(-1e6, min(1e6, factor * one)) for one in row) for row in layer.weight), bias=layer.bias
    )


def with_record(model: LoadedModel, numbers: PreviewRecord) -> LoadedModel:
    return replace(model, settings=model.settings.model_copy(update={"preview": numbers}))


def warmed_up(model: LoadedModel) -> PreviewMap:
    served = ServedModel(64, 64, SizeList(((64, 64),)), has_refiner=True, defaults=Defaults())
    with torch.inference_mode():
        return warm_up(Loaded(model, served, "line/1", "cpu", "aot_inductor", 0))


def test_warm_up_takes_the_map_of_the_release() -> None:
    numbers, plain, recorded = record(), linear_model(), linear_model()
    preview_map, fitted = warmed_up(with_record(recorded, numbers)), warmed_up(plain)
    latents = torch.randn((1, 4, 8, 8), generator=torch.Generator().manual_seed(0))
    expected = preview_map_of(numbers, CPU).colours(latents)
    assert torch.equal(preview_map.colours(latents), expected) and not torch.equal(fitted.colours(latents), expected)
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
    key = runner.advance(plan, image)
    assert key is not None
    loop = model.loop(*key)
    loop.add(image)
    while not loop.step():
        yield image.step, loop.latents(image)


def test_previews_of_the_tiny_model_have_its_colours(tiny: tuple[dict[str, Network], LoadedModel]) -> None:
    """At early and late steps, and several sizes, none of which the fit has seen."""
    networks, model = tiny
    cases = {
        "a large red circle on a white background": (256, 256),
        "two green squares on a white background": (256, 256),
        "three yellow stars on a purple background": (192, 320),
        "a small blue triangle on an orange background": (128, 128),
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
    facts = with_preview_map(model.settings, networks, inputs)
    assert facts.preview is not None
    assert facts.preview.error <= BAR, "the build prints it"
    assert mean_error(preview_map_of(facts.preview, CPU), examples) <= BAR < old
    assert len(facts.preview.model_dump_json()) < 20_000, "each server reads it"
    assert ModelFacts.model_validate_json(facts.model_dump_json()) == facts


@torch.inference_mode()
def example(model: LoadedModel, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return latents, avg_pool2d(decode_latents(model, latents), model.settings.vae_scale_factor).clamp(-1, 1)


class WideEncoder(nn.Module):
    """[batch, 3, height, width] -> moments [batch, 2 * channels, height/8, width/8]: mixed colours, no deviation."""

    def __init__(self, channels: int, value: float = 0.0) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn((channels, 3), generator=torch.Generator().manual_seed(0)))
        self.value = value

    def forward(self, given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        means = torch.einsum("ck,bkhw->bchw", self.mix, avg_pool2d(given, 8)) + self.value
        return (torch.cat([means, torch.full_like(means, -30)], dim=1),)


class WideDecoder(WideEncoder):
    """The inverse of WideEncoder, but for the size of the picture's details."""

    def forward(self, given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        colours = torch.einsum("kc,bchw->bkhw", torch.linalg.pinv(self.mix), given) + self.value
        return (interpolate(colours, scale_factor=8),)


def wide(channels: int, value: float = 0.0, normalized: bool = True) -> tuple[ModelFacts, dict[str, Network]]:
    """The facts and the networks of a VAE of so many channels. `value` is added to its outputs."""
    facts = linear_model().settings.model_copy(
        update={"latent_channels": channels, "vae_scale_factor": 8, "vae_scaling_factor": 0.5}
        | ({"latents_mean": (0.7,) * channels, "latents_std": (3.0,) * channels} if normalized else {})
    )
    picture, latents = ("rows", 3, "height", "width"), ("rows", channels, "height/8", "width/8")
    shapes = {
        "vae_encoder": ("pixels", picture, "moments", ("rows", 2 * channels, "height/8", "width/8")),
        "vae_decoder": ("latents", latents, "pixels", picture),
    }
    networks = {}
    for name, (given, given_shape, made, made_shape) in shapes.items():
        signature = Signature(
            inputs=(TensorSpec(name=given, dtype="float32", shape=given_shape),),
            outputs=(TensorSpec(name=made, dtype="float32", shape=made_shape),),
        )
        module = (WideEncoder if name == "vae_encoder" else WideDecoder)(channels, value)
        networks[name] = Network(name, module, signature, {}, FP32, "plain", 8)
    return facts, networks


@pytest.mark.parametrize(("channels", "normalized"), [(4, True), (8, False), (16, True), (32, False)])
def test_fits_any_vae_with_few_numbers(channels: int, normalized: bool) -> None:
    facts, networks = wide(channels, normalized=normalized)
    corners = torch.rand((1, 3, 3, 4), generator=torch.Generator().manual_seed(2)) * 1.6 - 0.8
    picture = interpolate(corners, (8 * 48, 8 * 64), mode="bilinear")
    latents = networks["vae_encoder"].module(picture)[0][:, :channels]
    fitted = with_preview_map(facts, networks, {"vae_decoder": [{"latents": latents.detach()}]}).preview
    assert fitted is not None and fitted.error < 0.06
    assert len(fitted.layers[0].weight[0]) == 9 * channels and len(fitted.layers[0].weight) == 32


def test_error_leaves_out_generated_images_that_are_broken() -> None:
    facts, networks = wide(4)
    latents = torch.rand((3, 4, 8, 8), generator=torch.Generator().manual_seed(0))
    broken = latents.clone()
    broken[1, 0, 0, 0], broken[2, 3, 1, 4] = float("nan"), float("inf")
    errors = []
    for inputs in (latents[:1], broken):
        fitted = with_preview_map(facts, networks, {"vae_decoder": [{"latents": inputs}]}).preview
        assert fitted is not None
        errors.append(fitted.error)
    assert errors[0] == errors[1] > 0


@pytest.mark.parametrize(("channels", "value"), [(33, 0.0), (4, float("nan")), (4, float("inf"))])
def test_has_no_map_for_a_vae_without_colours(channels: int, value: float) -> None:
    """Too many channels, or pictures that overflow. A server fits its linear map then."""
    facts, networks = wide(channels, value)
    latents = torch.zeros((1, channels, 8, 8))
    assert with_preview_map(facts, networks, {"vae_decoder": [{"latents": latents}]}) is facts
