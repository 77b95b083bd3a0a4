"""Validation of quantized models: distances, teacher forcing, layers, the report, thresholds and the contact sheet."""

import copy
import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from torch import nn

from engine_builder.building.eager_model import eager_engines, open_eager_model
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.checkpoints.release_settings import read_tokenizers
from engine_builder.networks.network import ModuleReader, Network, load_network
from engine_builder.quantization.validation import metrics
from engine_builder.quantization.validation.compare import (
    MIN_PROMPTS,
    Comparison,
    LayerPair,
    compare_models,
    validation_requests,
)
from engine_builder.quantization.validation.contact_sheet import MAX_PAIRS, SIDE, PicturePair, contact_sheet
from engine_builder.quantization.validation.layers import comparing_layers
from engine_builder.quantization.validation.metrics import NotComparable, perceptual_distance, psnr, sqnr
from engine_builder.quantization.validation.report import LayerResult, PromptResult, ValidationReport, describe
from engine_builder.quantization.validation.thresholds import BadThresholds, Thresholds, violations
from engine_builder.stores.store import WritableStore
from model.cold_start import ColdStart
from model.errors import BrokenImage
from model.images.encode import Pixels
from model.loading.load import load_release
from model.loading.target import Target
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.params import GenerationParams
from model.pipeline.spec import SDXL
from model.pipeline.text_to_image import generate
from model.store.manifest import Fp16Steps
from model.store.precision import BF16, FP32
from tests.support.linear_networks import PLAIN, linear_model, stub

pytestmark = pytest.mark.usefixtures("uncompiled_builds")


def random_picture(height: int, width: int, seed: int = 0) -> Pixels:
    """Return a smooth picture with some noise."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    smooth = 128 + 80 * np.sin(x / 9 + seed)[..., None] * np.cos(y / 7)[..., None] * np.array([1, 0.7, -0.4])
    return np.clip(smooth + rng.normal(0, 5, (height, width, 3)), 0, 255).astype(np.uint8)


def with_noise(pixels: Pixels, spread: float) -> Pixels:
    noise = np.random.default_rng(7).normal(0, spread, pixels.shape)
    return np.clip(pixels + noise, 0, 255).round().astype(np.uint8)


def constant(value: int, side: int = 64) -> Pixels:
    return np.full((side, side, 3), value, np.uint8)


# -- tensors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_sqnr_is_the_ratio_of_the_energies(dtype: torch.dtype) -> None:
    """3^2 + 4^2 = 25 against 0.5^2 = 0.25: 20 dB."""
    reference, found = torch.tensor([[3.0, 4.0]], dtype=dtype), torch.tensor([[3.0, 4.5]], dtype=dtype)
    assert sqnr(reference, found) == pytest.approx(20)


def test_sqnr_of_equal_tensors_and_without_a_signal_is_infinite() -> None:
    values = torch.randn(3, 4)
    assert sqnr(values, values.clone()) == math.inf and sqnr(torch.zeros(2), torch.zeros(2)) == math.inf
    assert sqnr(torch.zeros(2), torch.ones(2)) == -math.inf


def test_sqnr_is_exact_where_fp16_overflows_or_loses_the_error() -> None:
    reference = torch.full((4096,), 60000.0, dtype=torch.float16)
    assert sqnr(reference, -reference) == pytest.approx(-20 * math.log10(2))
    wide = torch.full((4096,), 1.0, dtype=torch.float64)
    assert sqnr(wide, wide + 1e-10) == pytest.approx(200, abs=1e-3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("is_reference", [True, False])
def test_sqnr_refuses_nan_and_infinity(value: float, is_reference: bool) -> None:
    pair = [torch.tensor([1.0, value]), torch.tensor([1.0, 2.0])]
    with pytest.raises(NotComparable, match="NaN or infinity"):
        sqnr(*(pair if is_reference else pair[::-1]))


@pytest.mark.parametrize("shapes", [((2, 3), (3, 2)), ((2,), (2, 1)), ((0,), (0,))])
def test_sqnr_refuses_other_shapes_and_empty_tensors(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(NotComparable, match="cannot be compared"):
        sqnr(torch.ones(shapes[0]), torch.ones(shapes[1]))


# -- pictures --------------------------------------------------------------------------------------------------------


def test_psnr_is_that_of_the_mean_squared_difference() -> None:
    """One of four pixels differs by 20 in all channels: the mean square is 100."""
    reference = np.zeros((2, 2, 3), np.uint8)
    found = reference.copy()
    found[1, 0] = 20
    assert psnr(reference, found) == pytest.approx(10 * math.log10(255**2 / 100))
    assert psnr(found, reference) == psnr(reference, found), "unsigned numbers must not wrap around"
    assert psnr(found, found) == math.inf and psnr(constant(0), constant(255)) == pytest.approx(0)


@pytest.mark.parametrize(
    "found", [np.zeros((2, 3, 3), np.uint8), np.zeros((2, 2, 3), np.float32), np.zeros((2, 2), np.uint8)]
)
@pytest.mark.parametrize("distance", [psnr, perceptual_distance])
def test_refuses_pictures_that_do_not_fit(distance: Callable[[Pixels, Pixels], float], found: Pixels) -> None:
    with pytest.raises(NotComparable):
        distance(np.zeros((2, 2, 3), np.uint8), found)


@pytest.mark.parametrize(("side", "scales"), [(11, 1), (21, 1), (22, 2), (64, 3), (175, 4), (176, 5), (1024, 5)])
def test_the_window_fits_into_the_last_scale(side: int, scales: int) -> None:
    assert metrics.scale_count(side) == scales
    assert side // 2 ** (scales - 1) >= metrics.WINDOW


@pytest.mark.parametrize(("side", "weight"), [(16, 1.0), (64, 0.3001 / 0.6305), (176, 0.1333 / 1.0001)])
def test_distance_of_constant_pictures_is_that_of_their_luminance(side: int, weight: float) -> None:
    """Contrast and structure are 1 at each scale, and the luminance counts with the last scale's weight."""
    c1 = 2.55**2
    luminance = (2 * 100 * 150 + c1) / (100**2 + 150**2 + c1)
    assert perceptual_distance(constant(100, side), constant(150, side)) == pytest.approx(1 - luminance**weight)


def brute_force_ssim(first: np.ndarray, second: np.ndarray) -> tuple[float, float]:
    """Return the mean of contrast and structure, and the mean SSIM, window by window. Both: [height, width]."""
    offsets = np.arange(11) - 5
    window = np.exp(-(offsets[:, None] ** 2 + offsets[None] ** 2) / (2 * 1.5**2))
    window /= window.sum()
    contrasts, similarities = [], []
    for y in range(first.shape[0] - 10):
        for x in range(first.shape[1] - 10):
            a, b = first[y : y + 11, x : x + 11], second[y : y + 11, x : x + 11]
            mean_a, mean_b = (window * a).sum(), (window * b).sum()
            variance_a, variance_b = (window * (a - mean_a) ** 2).sum(), (window * (b - mean_b) ** 2).sum()
            covariance = (window * (a - mean_a) * (b - mean_b)).sum()
            contrast = (2 * covariance + 7.65**2) / (variance_a + variance_b + 7.65**2)
            contrasts.append(contrast)
            similarities.append(contrast * (2 * mean_a * mean_b + 2.55**2) / (mean_a**2 + mean_b**2 + 2.55**2))
    return float(np.mean(contrasts)), float(np.mean(similarities))


def test_distance_is_that_of_the_definition() -> None:
    """24x31 pixels have two scales; the odd column is dropped by the second."""
    reference = random_picture(24, 31)
    found = with_noise(reference, 25)
    similarities = []
    for channel in range(3):
        a, b = (pixels[..., channel].astype(float) for pixels in (reference, found))
        halves = [plane[:24, :30].reshape(12, 2, 15, 2).mean(axis=(1, 3)) for plane in (a, b)]
        contrast, ssim = brute_force_ssim(a, b)[0], brute_force_ssim(*halves)[1]
        total = 0.0448 + 0.2856
        similarities.append(contrast ** (0.0448 / total) * ssim ** (0.2856 / total))
    assert perceptual_distance(reference, found) == pytest.approx(1 - np.mean(similarities), rel=1e-9)


@pytest.mark.parametrize("size", [(12, 40), (64, 64), (190, 201)], ids=str)
def test_distance_grows_with_noise_and_is_symmetric(size: tuple[int, int]) -> None:
    reference = random_picture(*size)
    distances = [perceptual_distance(reference, with_noise(reference, spread)) for spread in (0, 4, 16, 64)]
    assert distances[0] == pytest.approx(0, abs=1e-12) and sorted(distances) == distances
    assert all(low + 1e-3 < high <= 1 for low, high in zip(distances, distances[1:], strict=False))
    found = with_noise(reference, 16)
    assert perceptual_distance(found, reference) == pytest.approx(perceptual_distance(reference, found), rel=1e-12)


def test_distance_of_an_inverted_picture_is_at_most_one() -> None:
    """Its structure is negative, which has no power of a fraction."""
    reference = random_picture(64, 64)
    assert 0.9 < perceptual_distance(reference, 255 - reference) <= 1


def test_distance_notices_another_colour() -> None:
    red = constant(0)
    red[..., 0] = 200
    assert perceptual_distance(red, red[..., ::-1].copy()) > 0.3


# -- layers ----------------------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Two linears, the first of which runs twice."""

    def __init__(self, first: float, second: float) -> None:
        super().__init__()
        self.network = nn.ModuleDict({"first": nn.Linear(1, 1, bias=False), "second": nn.Linear(1, 1, bias=False)})
        self.network["idle"] = nn.Linear(1, 1)
        for name, value in (("first", first), ("second", second)):
            nn.init.constant_(self.network[name].weight, value)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        first = self.network["first"]
        result: torch.Tensor = self.network["second"](first(values) + first(10 * values))
        return result


def test_each_layer_gets_the_reference_input() -> None:
    reference, quantized = Chain(2.0, 4.0), Chain(2.2, 4.04)
    with torch.no_grad(), comparing_layers(reference, quantized, ["second", "first"]) as errors:
        reference(torch.ones(1, 1))
    assert errors["first"].decibels == pytest.approx(20, abs=1e-3), "2.2 for 2"
    assert errors["second"].decibels == pytest.approx(40, abs=1e-3), "4.04 for 4, on the reference's input"
    assert (errors["first"].calls, errors["second"].calls) == (2, 1)
    with torch.no_grad():
        reference(torch.ones(1, 1))
    assert errors["first"].calls == 2, "hooks stay after the comparison"


def test_calls_add_up_and_the_worst_is_kept() -> None:
    """A shift of 1 is 20 dB for an output of 10, and 0 dB for an output of 1."""
    reference, quantized = nn.Sequential(nn.Linear(1, 1)), nn.Sequential(nn.Linear(1, 1))
    for network, bias in ((reference, 0.0), (quantized, 1.0)):
        nn.init.ones_(network[0].weight)
        nn.init.constant_(network[0].bias, bias)
    with torch.no_grad(), comparing_layers(reference, quantized, ["0"]) as errors:
        for value in (10.0, 1.0):
            reference(torch.tensor([[value]]))
    assert errors["0"].worst == pytest.approx(0, abs=1e-5)
    assert errors["0"].decibels == pytest.approx(10 * math.log10(101 / 2))


def test_refuses_layers_that_are_missing_or_never_called() -> None:
    reference, quantized = Chain(2.0, 4.0), Chain(2.0, 4.0)
    del quantized.network["second"]
    for name, words in (("third", "The reference has no layer third"), ("second", "The quantized network has no")):
        with pytest.raises(NotComparable, match=words), comparing_layers(reference, quantized, [name]):
            pass
    with pytest.raises(NotComparable, match=r"1 of 2 layers were never called, idle first"):
        with torch.no_grad(), comparing_layers(reference, quantized, ["first", "idle"]):
            reference(torch.ones(1, 1))


def test_names_the_layer_whose_output_is_nan() -> None:
    with pytest.raises(NotComparable, match=r"output of layer first: A tensor holds NaN"):
        reference, quantized = Chain(2.0, 4.0), Chain(math.nan, 4.0)
        with torch.no_grad(), comparing_layers(reference, quantized, ["first"]):
            reference(torch.ones(1, 1))


# -- two models ------------------------------------------------------------------------------------------------------

Make = Callable[[dict[str, Network]], LoadedModel]
PROMPTS = ("a circle", "a square", "a line")


@pytest.fixture(scope="module")
def networks(toy_folder: Path) -> dict[str, Network]:
    """The toy's networks, by component."""
    checkpoint, reader = Checkpoint(toy_folder), ModuleReader()
    names = [name for name, spec in SDXL.items() if spec.part == "base"]
    return {name: load_network(checkpoint, name, FP32, reader=reader, plain=True) for name in names}


@pytest.fixture(scope="module")
def make(toy_folder: Path) -> Make:
    """Return a function that makes a toy of networks in eager PyTorch."""
    checkpoint = Checkpoint(toy_folder)
    tokenizers = read_tokenizers(checkpoint)
    return lambda networks: open_eager_model(eager_engines(networks), checkpoint, None, tokenizers, "cpu")


def perturbed(network: Network, spread: float) -> Network:
    """Return a network with noise in its linears' weights, relative to them."""
    module = copy.deepcopy(network.module)
    generator = torch.Generator().manual_seed(1)
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and layer.weight is not None:
            noise = torch.randn(layer.weight.shape, generator=generator)
            layer.weight = nn.Parameter(layer.weight * (1 + spread * noise), requires_grad=False)
    return replace(network, module=module)


def toy_requests(prompts: tuple[str, ...] = PROMPTS) -> list[GenerationParams]:
    return validation_requests(prompts, 64, 64, steps=2, guidance=4.0, min_prompts=1)


@pytest.fixture(scope="module")
def compared(networks: dict[str, Network], make: Make) -> Comparison:
    """The toy against itself with 5 % of noise in the UNet's linears."""
    other = perturbed(networks["unet"], 0.05)
    names = ["up_blocks.0.attentions.0.proj_out", "down_blocks.1.attentions.0.proj_in"]
    return compare_models(
        make(networks),
        make(networks | {"unet": other}),
        toy_requests(),
        names=("fp32", "noise"),
        layers=[LayerPair("unet", networks["unet"].module, other.module, names)],
        score=lambda pixels, prompt: prompt != "a square",
        identity={"weights": "abc"},
    )


def test_reports_every_prompt_the_worst_first(compared: Comparison) -> None:
    report = compared.report
    assert sorted(prompt.number for prompt in report.prompts) == [0, 1, 2]
    for prompt in report.prompts:
        assert prompt.prompt == PROMPTS[prompt.number] and prompt.seed == prompt.number
        assert (prompt.width, prompt.height, prompt.steps, prompt.guidance) == (64, 64, 2, 4.0)
        assert len(prompt.unet_decibels["unet"]) == 2 and all(10 < value < 60 for value in prompt.unet_decibels["unet"])
        assert 0 < prompt.latents_decibels < 60 and 10 < prompt.psnr_decibels < 80
        assert 0 < prompt.perceptual_distance < 1
    latents = [prompt.latents_decibels for prompt in report.prompts]
    assert latents == sorted(latents) and len(set(latents)) == 3
    assert [pair.number for pair in compared.pairs] == [prompt.number for prompt in report.prompts]


def test_reports_layers_the_worst_first(compared: Comparison) -> None:
    layers = compared.report.layers
    assert len(layers) == 2 and layers[0].decibels < layers[1].decibels
    for layer in layers:
        assert layer.component == "unet" and layer.calls == 3 * 2
        assert 20 < layer.worst_decibels <= layer.decibels < 35, "5 % of noise is 26 dB"


def test_reports_the_share_of_prompt_true_pictures(compared: Comparison) -> None:
    assert {prompt.prompt: prompt.quantized_true for prompt in compared.report.prompts} == {
        "a circle": True, "a square": False, "a line": True,
    }  # fmt: skip
    assert compared.report.summary.reference_true == pytest.approx(200 / 3)


def test_equal_models_have_no_distance(networks: dict[str, Network], make: Make) -> None:
    seen: list[tuple[int, int]] = []
    [prompt] = compare_models(
        make(networks), make(networks), toy_requests(PROMPTS[:1]), report=lambda *progress: seen.append(progress)
    ).report.prompts
    assert prompt.unet_decibels == {"unet": (math.inf, math.inf)}
    assert prompt.latents_decibels == prompt.psnr_decibels == math.inf
    assert prompt.perceptual_distance == pytest.approx(0, abs=1e-12)
    assert prompt.reference_true is prompt.quantized_true is None
    assert seen == [(0, 1), (1, 1)]


def test_other_text_network_changes_latents_but_no_unet_call(networks: dict[str, Network], make: Make) -> None:
    """The quantized UNet gets the reference's inputs, and generates its own picture from its own text."""
    other = make(networks | {"unet_text": perturbed(networks["unet_text"], 0.5)})
    [prompt] = compare_models(make(networks), other, toy_requests(PROMPTS[:1])).report.prompts
    assert prompt.unet_decibels == {"unet": (math.inf, math.inf)}
    assert prompt.latents_decibels < 100


def test_more_noise_is_worse_in_every_measure(networks: dict[str, Network], make: Make) -> None:
    summaries = [
        compare_models(
            make(networks), make(networks | {"unet": perturbed(networks["unet"], spread)}), toy_requests(PROMPTS[:2])
        ).report.summary
        for spread in (0.02, 0.2)
    ]
    for measure in ("unet_decibels", "latents_decibels", "psnr_decibels"):
        for statistic in ("median", "worst"):
            low, high = (getattr(getattr(summary, measure), statistic) for summary in summaries)
            assert low > high + 6, (measure, statistic)
    assert summaries[0].perceptual_distance.worst < summaries[1].perceptual_distance.worst


def test_measures_the_image_that_is_served(networks: dict[str, Network], make: Make) -> None:
    [request] = toy_requests(PROMPTS[:1])
    model = make(networks)
    [expected] = generate(model, [request])[0]
    shown: list[Pixels] = []

    def keep(pixels: Pixels, prompt: str) -> bool:
        shown.append(pixels)
        return True

    compare_models(model, make(networks), [request], score=keep)
    assert len(shown) == 2 and all(np.array_equal(pixels, expected) for pixels in shown)


def test_compares_engines_of_another_precision(networks: dict[str, Network], make: Make, toy_folder: Path) -> None:
    """The inputs are converted to the quantized UNet's types."""
    half = {name: load_network(Checkpoint(toy_folder), name, BF16, plain=True) for name in networks}
    [prompt] = compare_models(make(networks), make(half), toy_requests(PROMPTS[:1])).report.prompts
    assert all(20 < value < 60 for value in prompt.unet_decibels["unet"])


def test_compares_compiled_engines(
    toy_store: WritableStore, target: Target, networks: dict[str, Network], make: Make
) -> None:
    compiled = load_release(toy_store, "toy-sdxl/1", [target], buckets=[], cold_start=ColdStart()).model
    [prompt] = compare_models(make(networks), compiled, toy_requests(PROMPTS[:1])).report.prompts
    assert all(80 < value < math.inf for value in prompt.unet_decibels["unet"]) and prompt.psnr_decibels > 50


def test_compares_both_unets_and_leaves_the_models_as_they_were() -> None:
    reference, quantized = linear_model(), linear_model()
    before = [dict(model.engines) for model in (reference, quantized)]
    request = replace(PLAIN, use_refiner=True)
    [prompt] = compare_models(reference, quantized, [request]).report.prompts
    assert {name: len(calls) for name, calls in prompt.unet_decibels.items()} == {"unet": 2, "refiner_unet": 2}
    for model, engines in zip((reference, quantized), before, strict=True):
        assert model.engines == engines and model.loops == {}


@pytest.mark.parametrize(
    ("use_refiner", "first", "last", "compared"),
    [(False, 1, 0, [1, 2, 3]), (False, 1, 2, [1]), (False, 3, 3, []), (True, 1, 0, [1]), (False, 0, 0, [0, 1, 2, 3])],
)
def test_steps_in_fp16_are_not_compared(use_refiner: bool, first: int, last: int, compared: list[int]) -> None:
    """Of four steps, or of two of each UNet. An FP8 UNet may even fail in steps that do not run on it."""
    reference, quantized = linear_model(), linear_model()
    request = replace(PLAIN, use_refiner=use_refiner)
    names = ["unet", "refiner_unet"][: 1 + use_refiner]
    quantized.fp16_engines = {name: linear_model().engines[name] for name in names}
    quantized.fp16_steps = Fp16Steps(first=first, last=last)
    report = compare_models(reference, quantized, [request]).report
    assert {unet: len(calls) for unet, calls in report.prompts[0].unet_decibels.items()} == dict.fromkeys(
        names, len(compared)
    )
    for name in names:
        seen, exact = stub(quantized, name).seen, stub(reference, name).seen
        assert len(seen) == 2 * len(compared), "in the comparison, and in the image of the model alone"
        for call, step in zip(seen[: len(compared)], compared, strict=True):
            assert call.keys() == exact[step].keys()
            assert all(torch.equal(tensor, exact[step][entry]) for entry, tensor in call.items())
    assert (report.summary.unet_decibels is None) == (not compared)


def test_runs_op_by_op_where_the_model_has_other_loops() -> None:
    """A CUDA graph would hide the calls of the UNet."""
    reference = linear_model()
    reference.loops["unet", 64, 96] = object()  # type: ignore[assignment]
    [prompt] = compare_models(reference, linear_model(), [PLAIN]).report.prompts
    assert len(prompt.unet_decibels["unet"]) == 4


def test_keeps_thumbnails_of_the_worst_prompts_only() -> None:
    requests = [replace(PLAIN, seed=seed, num_inference_steps=1) for seed in range(MAX_PAIRS + 3)]
    other = linear_model()
    other.settings = other.settings.model_copy(update={"vae_scaling_factor": 0.4})
    compared = compare_models(linear_model(), other, requests)
    assert len(compared.report.prompts) == MAX_PAIRS + 3
    assert [pair.number for pair in compared.pairs] == [p.number for p in compared.report.prompts[:MAX_PAIRS]]


# -- refusals --------------------------------------------------------------------------------------------------------


def test_refuses_too_few_prompts() -> None:
    assert len(validation_requests(["a"] * MIN_PROMPTS, 64, 64)) == 32
    with pytest.raises(NotComparable, match="at least 32 prompts; 31 were given"):
        validation_requests(["a"] * (MIN_PROMPTS - 1), 64, 64)
    with pytest.raises(NotComparable, match="at least 1 prompts; 0 were given"):
        validation_requests([], 64, 64, min_prompts=0)


@pytest.mark.parametrize(
    ("requests", "words"),
    [([], "no request"), ([replace(PLAIN, num_images=2)], "'one two three' has 2 images")],
    ids=["none", "two images"],
)
def test_refuses_requests_that_are_not_one_image(requests: list[GenerationParams], words: str) -> None:
    with pytest.raises(NotComparable, match=words):
        compare_models(linear_model(), linear_model(), requests)


def test_refuses_models_of_other_components_or_devices() -> None:
    other = linear_model()
    del other.engines["refiner_unet"]
    with pytest.raises(NotComparable, match="inputs or outputs of refiner_unet"):
        compare_models(linear_model(), other, [PLAIN])
    elsewhere = linear_model()
    elsewhere.device = torch.device("meta")
    with pytest.raises(NotComparable, match="on cpu and meta"):
        compare_models(linear_model(), elsewhere, [PLAIN])


def test_names_the_call_and_the_picture_with_nan() -> None:
    broken = linear_model()
    stub(broken, "unet").poison = (2, math.nan)
    with pytest.raises(NotComparable, match="Call 2 of unet: A tensor holds NaN"):
        compare_models(linear_model(), broken, [PLAIN])
    broken = linear_model()
    broken.fp16_engines, broken.fp16_steps = {"unet": linear_model().engines["unet"]}, Fp16Steps(first=1)
    stub(broken, "unet").poison = (0, math.nan)
    with pytest.raises(NotComparable, match="Call 1 of unet: A tensor holds NaN"):
        compare_models(linear_model(), broken, [PLAIN])
    black = linear_model()
    stub(black, "vae_decoder").poison = (0, math.nan)
    with pytest.raises(BrokenImage, match="'one two three' by fp8 has NaN"):
        compare_models(linear_model(), black, [PLAIN], names=("fp16", "fp8"))


# -- the report ------------------------------------------------------------------------------------------------------


def prompt_result(number: int = 0, **changes: object) -> PromptResult:
    entries: dict[str, object] = {
        "number": number, "prompt": f"prompt {number}", "negative_prompt": None, "seed": number, "width": 64,
        "height": 64, "steps": 8, "guidance": 4.0, "sampler": "Euler", "unet_decibels": {"unet": (40.0, 30.0)},
        "latents_decibels": 30.0, "psnr_decibels": 35.0, "perceptual_distance": 0.01,
    }  # fmt: skip
    return PromptResult.model_validate(entries | changes)


def report_of(*prompts: PromptResult, layers: tuple[LayerResult, ...] = ()) -> ValidationReport:
    return ValidationReport(
        reference="fp16", quantized="fp8", device="a GPU", torch="2.11", prompts=prompts, layers=layers
    )


def test_report_survives_json(compared: Comparison) -> None:
    written = compared.report.model_dump_json()
    assert ValidationReport.model_validate_json(written) == compared.report
    assert json.loads(written)["summary"]["latents_decibels"]["worst"] == compared.report.prompts[0].latents_decibels
    assert compared.report.identity == {"weights": "abc"} and not compared.report.is_of_gpu


def test_report_writes_infinity_as_text() -> None:
    report = report_of(prompt_result(latents_decibels=math.inf, unet_decibels={"unet": (-math.inf, 1.0)}))
    written = report.model_dump_json()
    [entry] = json.loads(written, parse_constant=pytest.fail)["prompts"]
    assert entry["latents_decibels"] == "Infinity" and entry["unet_decibels"]["unet"] == ["-Infinity", 1.0]
    assert ValidationReport.model_validate_json(written) == report


def test_report_refuses_nan_and_no_prompts() -> None:
    with pytest.raises(ValueError, match="NaN is not a measurement"):
        prompt_result(psnr_decibels=math.nan)
    with pytest.raises(ValueError, match="at least 1 item"):
        report_of()


def test_median_is_the_worse_of_the_middle_two() -> None:
    values = (10.0, 20.0, 30.0, math.inf)
    prompts = [
        prompt_result(i, latents_decibels=value, perceptual_distance=i / 10, unet_decibels={"unet": (value, 50.0)})
        for i, value in enumerate(values)
    ]
    summary = report_of(*prompts).summary
    assert (summary.latents_decibels.median, summary.latents_decibels.worst) == (20.0, 10.0)
    assert (summary.perceptual_distance.median, summary.perceptual_distance.worst) == (0.2, 0.3)
    assert summary.unet_decibels is not None
    assert (summary.unet_decibels.median, summary.unet_decibels.worst) == (50.0, 10.0)


def test_table_shows_the_summary_and_the_worst_layers() -> None:
    layers = tuple(LayerResult(component="unet", name=f"layer{i}", decibels=20.0 + i, worst_decibels=10.0 + i, calls=1)
                   for i in range(9))  # fmt: skip
    prompts = (prompt_result(0, reference_true=True, quantized_true=False), prompt_result(1, latents_decibels=math.inf))
    console = Console(file=io.StringIO(), width=100)
    console.print(describe(report_of(*prompts, layers=layers)))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for words in ("fp8 against fp16: 2 prompts, a GPU", "30.0 dB", "0.0100", "100.0 % -> 0.0 %", "-100.0 points"):
        assert words in text
    assert "layer4" in text and "layer5" not in text


# -- thresholds ------------------------------------------------------------------------------------------------------


def many(**changes: object) -> ValidationReport:
    """Return a report of 32 good prompts, with changes to the first."""
    return report_of(prompt_result(0, **changes), *(prompt_result(number) for number in range(1, 32)))


def test_good_report_has_no_violations() -> None:
    assert violations(many(), Thresholds()) == []
    assert violations(many(latents_decibels=math.inf, psnr_decibels=math.inf), Thresholds()) == []


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"min_prompts": 33}, "The report has 32 prompts; at least 33 are required."),
        ({"min_steps": 9}, "The report has images of 8 steps; at least 9 are required."),
        ({"min_unet_decibels_median": 35.5}, "median SQNR of UNet calls is 30.00 dB; at least 35.5 dB"),
        ({"min_unet_decibels_worst": 30.5}, "worst SQNR of UNet calls is 30.00 dB; at least 30.5 dB"),
        ({"min_latents_decibels_median": 31.0}, "median SQNR of final latents is 30.00 dB; at least 31 dB"),
        ({"min_latents_decibels_worst": 31.0}, "worst SQNR of final latents is 30.00 dB; at least 31 dB"),
        ({"min_psnr_decibels_median": 36.0}, "median PSNR of pictures is 35.00 dB; at least 36 dB"),
        ({"min_psnr_decibels_worst": 36.0}, "worst PSNR of pictures is 35.00 dB; at least 36 dB"),
        ({"max_perceptual_distance_median": 0.005}, "median perceptual distance of pictures is 0.0100; at most 0.005"),
        ({"max_perceptual_distance_worst": 0.005}, "worst perceptual distance of pictures is 0.0100; at most 0.005"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_each_threshold_has_a_sentence(limits: dict[str, float], words: str) -> None:
    found = [text for text in violations(many(), Thresholds.model_validate(limits)) if words in text]
    assert len(found) == 1 and found[0].endswith(".")


def test_one_bad_prompt_violates_only_the_worst() -> None:
    bad = {
        "latents_decibels": -3.0,
        "psnr_decibels": 4.0,
        "perceptual_distance": 0.9,
        "unet_decibels": {"unet": (2.0,)},
    }
    found = violations(many(**bad), Thresholds())
    assert len(found) == 4 and all(text.startswith("The worst ") for text in found)


def test_report_without_a_step_in_8_bits_measures_nothing() -> None:
    report = report_of(*(prompt_result(number, unet_decibels={"unet": ()}) for number in range(32)))
    assert violations(report, Thresholds()) == ["The report has no UNet call in 8 bits, because all steps ran in fp16."]
    written = report.model_dump_json()
    assert json.loads(written)["summary"]["unet_decibels"] is None
    assert ValidationReport.model_validate_json(written) == report


def test_limits_themselves_are_kept() -> None:
    limits = Thresholds(min_latents_decibels_worst=30.0, max_perceptual_distance_worst=0.01)
    assert violations(many(), limits) == []


@pytest.mark.parametrize(("lost", "refused"), [(4, False), (5, True)])
def test_loss_of_prompt_true_pictures(lost: int, refused: bool) -> None:
    """4 of 400 are exactly 1 percentage point. A picture that only the quantized model gets right counts for it."""
    verdicts = [(True, False)] * (lost + 1) + [(False, True)] + [(True, True)] * (398 - lost)
    prompts = [prompt_result(i, reference_true=a, quantized_true=b) for i, (a, b) in enumerate(verdicts)]
    found = violations(report_of(*prompts), Thresholds())
    assert bool(found) == refused
    if refused:
        assert "fell by 1.25 percentage points, from 99.75 to 98.50 %; at most 1 points" in found[0]


def test_one_image_of_fewer_steps_violates_the_limit() -> None:
    assert violations(many(steps=7), Thresholds()) == ["The report has images of 7 steps; at least 8 are required."]


@pytest.mark.parametrize(
    ("prompts", "steps", "limits"),
    [(2, 4, Thresholds(min_prompts=2, min_steps=4)), (64, 20, Thresholds()), (32, 7, Thresholds(min_steps=7))],
)
def test_small_check_keeps_the_limits_of_its_extent(prompts: int, steps: int, limits: Thresholds) -> None:
    assert Thresholds.for_check(prompts, steps) == limits


def test_reads_a_file_of_thresholds(tmp_path: Path) -> None:
    file = tmp_path / "thresholds.toml"
    file.write_text("min_psnr_decibels_median = 31\n")
    assert Thresholds.read(file) == Thresholds(min_psnr_decibels_median=31.0)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"min_psnr = 3.0", "min_psnr, is not a known field|min_psnr: is not a known field"),
        (b"min_prompts = 0", "min_prompts: got 0, expected an integer of at least 1"),
        (b'max_true_loss_points = "1"', "max_true_loss_points: got"),
        (b"min_latents_decibels_median = nan", "min_latents_decibels_median"),
        (b"max_perceptual_distance_worst = 2.0", "from 0.0 to 1.0|from 0 to 1"),
        (b"[", "is not a file of thresholds"),
        (b"\xff", "is not a file of thresholds"),
        (None, "is not a file of thresholds"),
    ],
)
def test_refuses_a_bad_file_of_thresholds(content: bytes | None, words: str, tmp_path: Path) -> None:
    file = tmp_path / "thresholds.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(BadThresholds, match=words):
        Thresholds.read(file)


# -- the contact sheet -----------------------------------------------------------------------------------------------


GAP = 4  # pixels between the pictures of a pair
PAIR_WIDTH = 3 * SIDE + 2 * GAP


def pair_of(number: int, reference: int, quantized: int) -> PicturePair:
    return PicturePair.of(number, constant(reference), constant(quantized))


def open_sheet(data: bytes) -> np.ndarray:
    image = Image.open(io.BytesIO(data))
    assert image.format == "PNG" and image.mode == "RGB"
    return np.asarray(image)


def test_sheet_has_reference_quantized_and_amplified_difference() -> None:
    report = report_of(prompt_result(5), prompt_result(2))
    sheet = open_sheet(contact_sheet(report, [pair_of(2, 50, 60), pair_of(5, 100, 90)]))
    row = 8 + SIDE // 2
    levels = [int(sheet[row, 8 + position * (SIDE + GAP) + SIDE // 2, 0]) for position in range(3)]
    assert levels == [100, 90, 80], "the report's first prompt comes first"
    second = 8 + PAIR_WIDTH + 8
    assert [int(sheet[row, second + position * (SIDE + GAP) + SIDE // 2, 0]) for position in range(3)] == [50, 60, 80]
    caption = sheet[8 + SIDE : 8 + SIDE + 32, 8 : 8 + PAIR_WIDTH]
    assert (caption < 100).any(), "the prompt and the distances are written below"


def test_sheet_shows_the_worst_32_prompts() -> None:
    prompts = [prompt_result(number) for number in range(40)]
    pairs = [pair_of(number, number, number) for number in reversed(range(40))]
    sheet = open_sheet(contact_sheet(report_of(*prompts), pairs))
    row_height = SIDE + 32 + 8
    assert sheet.shape == (16 * row_height + 8, 2 * (PAIR_WIDTH + 8) + 8, 3)
    last = sheet[8 + 15 * row_height + SIDE // 2, 8 + PAIR_WIDTH + 8 + SIDE // 2]
    assert last.tolist() == [31, 31, 31]


@pytest.mark.parametrize("prompt", ["word " * 500, "一个红色的圆", "two\nlines \u202e\0", "x" * 3000], ids=range(4))
def test_sheet_writes_any_prompt_below_its_pair(prompt: str) -> None:
    report = report_of(prompt_result(0, prompt=prompt), prompt_result(1))
    pairs = [pair_of(0, 0, 0), PicturePair.of(1, constant(255), constant(255))]
    sheet = open_sheet(contact_sheet(report, pairs))
    second = 8 + PAIR_WIDTH + 8
    assert (sheet[8 : 8 + SIDE, second : second + SIDE] == 255).all(), "text covers a picture"
    assert (sheet[8 + SIDE :, second - 8 : second] == 211).all(), "text is wider than its pair"


def test_sheet_writes_a_prompt_of_two_lines_in_one() -> None:
    sheets = [
        contact_sheet(report_of(prompt_result(0, prompt=prompt)), [pair_of(0, 0, 0)])
        for prompt in ("two\n lines", "two lines")
    ]
    assert sheets[0] == sheets[1]


def test_large_differences_are_white() -> None:
    assert pair_of(0, 100, 132).difference.max() == 255 and pair_of(0, 131, 100).difference.min() == 248


@pytest.mark.parametrize(("height", "width"), [(32, 16), (1000, 3), (300, 700)])
def test_thumbnails_fit_into_their_cell(height: int, width: int) -> None:
    pair = PicturePair.of(0, random_picture(height, width), random_picture(height, width, 1))
    for pixels in (pair.reference, pair.quantized, pair.difference):
        assert max(pixels.shape[:2]) == SIDE and pixels.dtype == np.uint8
    assert open_sheet(contact_sheet(report_of(prompt_result(0)), [pair])).shape[0] == 8 + SIDE + 32 + 8
