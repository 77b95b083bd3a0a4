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

from engine_builder.building.eager_model import eager_engines, load_eager_model, open_eager_model
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.checkpoints.release_settings import read_tokenizers
from engine_builder.networks.network import ModuleReader, Network, load_network
from engine_builder.quantization.validation.compare import (
    MIN_PROMPTS,
    Comparison,
    LayerPair,
    compare_models,
    validation_requests,
)
from engine_builder.quantization.validation.contact_sheet import MAX_PAIRS, SIDE, PicturePair, contact_sheet
from engine_builder.quantization.validation.distances import NotComparable, perceptual_distance, psnr, sqnr
from engine_builder.quantization.validation.layers import comparing_layers
from engine_builder.quantization.validation.report import LayerResult, PromptResult, ValidationReport, describe
from engine_builder.quantization.validation.thresholds import BadThresholds, Thresholds, violations
from model.errors import BrokenImage
from model.images.pixels import Pixels
from model.loading.load import Loaded
from model.pipeline.components import FAMILIES
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.params import GenerationParams
from model.pipeline.text_to_image import generate
from model.store.manifest import Fp16Steps
from model.store.precision import BF16, FP32
from tests.support.linear_networks import PLAIN, linear_model, stub
from tests.support.quantization import prompt_result, report_of
from tests.support.repository import MODEL_FOLDER


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


# -- tensors and pictures --------------------------------------------------------------------------------------------


def test_sqnr_is_the_ratio_of_the_energies() -> None:
    """Also where fp16 overflows or loses the error. 3^2 + 4^2 = 25 against 0.5^2 = 0.25: 20 dB."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        reference, found = torch.tensor([[3.0, 4.0]], dtype=dtype), torch.tensor([[3.0, 4.5]], dtype=dtype)
        assert sqnr(reference, found) == pytest.approx(20), dtype
    large = torch.full((4096,), 60000.0, dtype=torch.float16)
    assert sqnr(large, -large) == pytest.approx(-20 * math.log10(2))
    wide = torch.full((4096,), 1.0, dtype=torch.float64)
    assert sqnr(wide, wide + 1e-10) == pytest.approx(200, abs=1e-3)
    assert sqnr(wide, wide.clone()) == sqnr(torch.zeros(2), torch.zeros(2)) == math.inf
    assert sqnr(torch.zeros(2), torch.ones(2)) == -math.inf


def test_distances_refuse_what_cannot_be_compared() -> None:
    finite = torch.tensor([1.0, 2.0])
    for value in (math.nan, math.inf):
        broken = torch.tensor([1.0, value])
        for pair in ((finite, broken), (broken, finite)):
            with pytest.raises(NotComparable, match="NaN or infinity"):
                sqnr(*pair)
    for shapes in (((2, 3), (3, 2)), ((2,), (2, 1)), ((0,), (0,))):
        with pytest.raises(NotComparable, match="cannot be compared"):
            sqnr(torch.ones(shapes[0]), torch.ones(shapes[1]))
    picture = np.zeros((2, 2, 3), np.uint8)
    others = np.zeros((2, 3, 3), np.uint8), np.zeros((2, 2, 3), np.float32), np.zeros((2, 2), np.uint8)
    for distance in (psnr, perceptual_distance):
        for other in others:
            with pytest.raises(NotComparable):
                distance(picture, other)
    with pytest.raises(NotComparable, match="smaller than the window of 11 pixels"):
        perceptual_distance(constant(0, 10), constant(0, 10))


def test_psnr_is_that_of_the_mean_squared_difference() -> None:
    """One of four pixels differs by 20 in all channels: the mean square is 100."""
    reference = np.zeros((2, 2, 3), np.uint8)
    found = reference.copy()
    found[1, 0] = 20
    assert psnr(reference, found) == pytest.approx(10 * math.log10(255**2 / 100))
    assert psnr(found, reference) == psnr(reference, found), "unsigned numbers must not wrap around"
    assert psnr(found, found) == math.inf and psnr(constant(0), constant(255)) == pytest.approx(0)


def test_distance_of_constant_pictures_is_that_of_their_luminance() -> None:
    """Contrast and structure are 1 at each scale, and the luminance counts with the last scale's weight."""
    c1 = 2.55**2
    luminance = (2 * 100 * 150 + c1) / (100**2 + 150**2 + c1)
    for side, weight in ((16, 1.0), (64, 0.3001 / 0.6305), (175, 0.2363 / 0.8668), (176, 0.1333 / 1.0001)):
        found = perceptual_distance(constant(100, side), constant(150, side))
        assert found == pytest.approx(1 - luminance**weight), side


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
    assert perceptual_distance(found, reference) == pytest.approx(perceptual_distance(reference, found), rel=1e-12)


def test_distance_grows_with_noise_up_to_one() -> None:
    """An inverted picture's structure is negative, which has no power of a fraction."""
    reference = random_picture(190, 201)
    distances = [perceptual_distance(reference, with_noise(reference, spread)) for spread in (0, 4, 16, 64)]
    assert distances[0] == pytest.approx(0, abs=1e-12)
    assert all(low + 1e-3 < high <= 1 for low, high in zip(distances, distances[1:], strict=False))
    assert 0.9 < perceptual_distance(reference, 255 - reference) <= 1
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


@pytest.mark.parametrize(
    ("names", "second", "words"),
    [
        (["third"], 4.0, "The reference has no layer third"),
        (["extra"], 4.0, "The quantized network has no layer extra"),
        (["first", "idle"], 4.0, "1 of 2 layers were never called, idle first"),
        (["second"], math.nan, "output of layer second: A tensor holds NaN"),
    ],
)
def test_names_a_layer_that_cannot_be_compared(names: list[str], second: float, words: str) -> None:
    reference, quantized = Chain(2.0, 4.0), Chain(2.0, second)
    reference.network["extra"] = nn.Linear(1, 1)
    with pytest.raises(NotComparable, match=words), torch.no_grad():
        with comparing_layers(reference, quantized, names):
            reference(torch.ones(1, 1))


# -- two models ------------------------------------------------------------------------------------------------------

Make = Callable[[dict[str, Network]], LoadedModel]
PROMPTS = ("a circle", "a square", "a line")


@pytest.fixture(scope="module")
def networks(toy_folder: Path) -> dict[str, Network]:
    """The toy's networks, by component."""
    checkpoint, reader = Checkpoint(toy_folder), ModuleReader()
    names = [spec.name for spec in FAMILIES["sdxl"].specs("base")]
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


def toy_requests(prompts: tuple[str, ...] = PROMPTS[:1]) -> list[GenerationParams]:
    return validation_requests(prompts, 64, 64, steps=2, guidance=4.0, min_prompts=1)


@pytest.fixture(scope="module")
def compared(networks: dict[str, Network], make: Make) -> Comparison:
    """The toy against itself with 5 % of noise in the UNet's linears."""
    other = perturbed(networks["unet"], 0.05)
    names = ["up_blocks.0.attentions.0.proj_out", "down_blocks.1.attentions.0.proj_in"]
    return compare_models(
        make(networks),
        make(networks | {"unet": other}),
        toy_requests(PROMPTS),
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
        assert prompt.quantized_true == (prompt.prompt != "a square")
    latents = [prompt.latents_decibels for prompt in report.prompts]
    assert latents == sorted(latents) and len(set(latents)) == 3
    assert [pair.number for pair in compared.pairs] == [prompt.number for prompt in report.prompts]
    assert report.summary.reference_true == pytest.approx(200 / 3)
    assert report.identity == {"weights": "abc"} and not report.is_of_gpu


def test_reports_layers_the_worst_first(compared: Comparison) -> None:
    layers = compared.report.layers
    assert len(layers) == 2 and layers[0].decibels < layers[1].decibels
    for layer in layers:
        assert layer.component == "unet" and layer.calls == 3 * 2
        assert 20 < layer.worst_decibels <= layer.decibels < 35, "5 % of noise is 26 dB"


def test_equal_models_have_no_distance(networks: dict[str, Network], make: Make) -> None:
    """The pictures that are measured are those that are served."""
    model = make(networks)
    seen: list[tuple[int, int]] = []
    shown: list[Pixels] = []

    def keep(pixels: Pixels, prompt: str) -> bool:
        shown.append(pixels)
        return True

    [prompt] = compare_models(
        model, make(networks), toy_requests(), score=keep, report=lambda *progress: seen.append(progress)
    ).report.prompts
    assert prompt.unet_decibels == {"unet": (math.inf, math.inf)}
    assert prompt.latents_decibels == prompt.psnr_decibels == math.inf
    assert prompt.perceptual_distance == pytest.approx(0, abs=1e-12)
    assert seen == [(0, 1), (1, 1)]
    [expected] = generate(model, toy_requests())[0]
    assert len(shown) == 2 and all(np.array_equal(pixels, expected) for pixels in shown)


def test_other_text_network_changes_latents_but_no_unet_call(networks: dict[str, Network], make: Make) -> None:
    """The quantized UNet gets the reference's inputs, and generates its own picture from its own text."""
    other = make(networks | {"unet_text": perturbed(networks["unet_text"], 0.5)})
    [prompt] = compare_models(make(networks), other, toy_requests()).report.prompts
    assert prompt.unet_decibels == {"unet": (math.inf, math.inf)}
    assert prompt.latents_decibels < 100
    assert prompt.reference_true is prompt.quantized_true is None


def test_compares_engines_of_another_precision(networks: dict[str, Network], make: Make, toy_folder: Path) -> None:
    """The inputs are converted to the quantized UNet's types."""
    half = {name: load_network(Checkpoint(toy_folder), name, BF16, plain=True) for name in networks}
    [prompt] = compare_models(make(networks), make(half), toy_requests()).report.prompts
    assert all(20 < value < 60 for value in prompt.unet_decibels["unet"])


def test_compares_compiled_engines(loaded: Loaded) -> None:
    eager = load_eager_model(Checkpoint(MODEL_FOLDER), Checkpoint(MODEL_FOLDER / "refiner"), FP32, "cpu")[1]
    [prompt] = compare_models(eager, loaded.model, toy_requests()).report.prompts
    assert all(80 < value < math.inf for value in prompt.unet_decibels["unet"]) and prompt.psnr_decibels > 50


def test_compares_both_unets_and_leaves_the_models_as_they_were() -> None:
    """Also where the model has CUDA graphs, which would hide the calls of the UNet."""
    reference, quantized = linear_model(), linear_model()
    graphs = {("unet", 64, 96): object()}
    reference.loops = dict(graphs)  # type: ignore[arg-type]
    before = [dict(model.engines) for model in (reference, quantized)]
    request = replace(PLAIN, use_refiner=True)
    [prompt] = compare_models(reference, quantized, [request]).report.prompts
    assert {name: len(calls) for name, calls in prompt.unet_decibels.items()} == {"unet": 2, "refiner_unet": 2}
    assert [model.engines for model in (reference, quantized)] == before
    assert reference.loops == graphs and quantized.loops == {}


@pytest.mark.parametrize(
    ("use_refiner", "first", "last", "compared"),
    [(False, 1, 0, [1, 2, 3]), (False, 1, 2, [1]), (False, 3, 3, []), (True, 1, 0, [1])],
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


def test_keeps_thumbnails_of_the_worst_prompts_only() -> None:
    requests = [replace(PLAIN, seed=seed, num_inference_steps=1) for seed in range(MAX_PAIRS + 3)]
    other = linear_model()
    other.settings = other.settings.model_copy(update={"vae_scaling_factor": 0.4})
    compared = compare_models(linear_model(), other, requests)
    assert len(compared.report.prompts) == MAX_PAIRS + 3
    assert [pair.number for pair in compared.pairs] == [p.number for p in compared.report.prompts[:MAX_PAIRS]]


# -- refusals --------------------------------------------------------------------------------------------------------


def test_refuses_models_and_requests_that_do_not_fit() -> None:
    assert len(validation_requests(["a"] * MIN_PROMPTS, 64, 64)) == 32
    for count, least in ((MIN_PROMPTS - 1, MIN_PROMPTS), (0, 0)):
        words = f"at least {max(1, least)} prompts; {count} were given"
        with pytest.raises(NotComparable, match=words):
            validation_requests(["a"] * count, 64, 64, min_prompts=least)
    without_refiner, elsewhere = linear_model(), linear_model()
    del without_refiner.engines["refiner_unet"]
    elsewhere.device = torch.device("meta")
    for other, requests, words in (
        (linear_model(), [], "no request"),
        (linear_model(), [replace(PLAIN, num_images=2)], "'one two three' has 2 images"),
        (without_refiner, [PLAIN], "inputs or outputs of refiner_unet"),
        (elsewhere, [PLAIN], "on cpu and meta"),
    ):
        with pytest.raises(NotComparable, match=words):
            compare_models(linear_model(), other, requests)


def test_names_the_call_and_the_picture_with_nan() -> None:
    """A call's number is that of its step."""
    broken, after_fp16, black = linear_model(), linear_model(), linear_model()
    stub(broken, "unet").poison = (2, math.nan)
    after_fp16.fp16_engines, after_fp16.fp16_steps = {"unet": linear_model().engines["unet"]}, Fp16Steps(first=1)
    stub(after_fp16, "unet").poison = (0, math.nan)
    stub(black, "vae_decoder").poison = (0, math.nan)
    for model, kind, words in (
        (broken, NotComparable, "Call 2 of unet: A tensor holds NaN"),
        (after_fp16, NotComparable, "Call 1 of unet: A tensor holds NaN"),
        (black, BrokenImage, "'one two three' by fp8 has NaN"),
    ):
        with pytest.raises(kind, match=words):
            compare_models(linear_model(), model, [PLAIN], names=("fp16", "fp8"))


# -- the report ------------------------------------------------------------------------------------------------------


def test_report_survives_json(compared: Comparison) -> None:
    """JSON has no infinity. Without a UNet call in 8 bits there is no summary of them."""
    infinite = prompt_result(latents_decibels=math.inf, unet_decibels={"unet": (-math.inf, 1.0)})
    for report in (compared.report, report_of(infinite), report_of(prompt_result(unet_decibels={"unet": ()}))):
        written = report.model_dump_json()
        assert ValidationReport.model_validate_json(written) == report
        json.loads(written, parse_constant=pytest.fail)
    assert json.loads(written)["summary"]["unet_decibels"] is None
    [entry] = json.loads(report_of(infinite).model_dump_json())["prompts"]
    assert entry["latents_decibels"] == "Infinity" and entry["unet_decibels"]["unet"] == ["-Infinity", 1.0]
    with pytest.raises(ValueError, match="NaN is not a measurement"):
        prompt_result(psnr_decibels=math.nan)
    with pytest.raises(ValueError, match="at least 1 item"):
        report_of(prompts=())


def test_median_is_the_worse_of_the_middle_two() -> None:
    values = (10.0, 20.0, 30.0, math.inf)
    prompts = [
        prompt_result(i, latents_decibels=value, perceptual_distance=i / 10, unet_decibels={"unet": (value, 50.0)})
        for i, value in enumerate(values)
    ]
    summary = report_of(*prompts).summary
    assert summary.unet_decibels is not None
    for spread, expected in (
        (summary.latents_decibels, (20.0, 10.0)),
        (summary.perceptual_distance, (0.2, 0.3)),
        (summary.unet_decibels, (50.0, 10.0)),
    ):
        assert (spread.median, spread.worst) == expected


def text_of(report: ValidationReport) -> str:
    file = io.StringIO()
    Console(file=file, width=200).print(describe(report))
    return file.getvalue()


def test_table_shows_the_summary_and_the_worst_layers() -> None:
    layers = tuple(LayerResult(component="unet", name=f"layer{i}", decibels=20.0 + i, worst_decibels=10.0 + i, calls=1)
                   for i in range(9))  # fmt: skip
    prompts = (prompt_result(0, reference_true=True, quantized_true=False), prompt_result(1, latents_decibels=math.inf))
    text = text_of(report_of(*prompts, layers=layers))
    for words in ("fp8 against fp16: 2 prompts, a GPU", "30.0 dB", "0.0100", "100.0 % -> 0.0 %", "-100.0 points"):
        assert words in text
    assert "layer4" in text and "layer5" not in text


@pytest.mark.parametrize("name", ["[/red]", "\x1b[31mred", "line\nbreak"])
def test_report_of_an_untrusted_release_is_shown_safely(name: str) -> None:
    layer = LayerResult(component="unet", name=name, decibels=9.0, worst_decibels=8.0, calls=1)
    text = text_of(report_of(layers=(layer,), device=name, quantized=name))
    assert "\x1b" not in text and name.split("\n")[0].split("\x1b")[-1] in text


# -- thresholds ------------------------------------------------------------------------------------------------------


def with_bad_prompt(**changes: object) -> ValidationReport:
    """Return a report of 32 good prompts, with changes to the first."""
    return report_of(prompt_result(0, **changes), *map(prompt_result, range(1, 32)))


def test_good_report_has_no_violations() -> None:
    assert violations(report_of(), Thresholds()) == []
    assert violations(with_bad_prompt(latents_decibels=math.inf, psnr_decibels=math.inf), Thresholds()) == []
    limits = Thresholds(min_latents_decibels_worst=30.0, max_perceptual_distance_worst=0.01)
    assert violations(report_of(), limits) == [], "a limit itself is kept"


def test_each_threshold_has_a_sentence() -> None:
    for entry, limit, words in (
        ("min_prompts", 33, "The report has 32 prompts; at least 33 are required."),
        ("min_steps", 9, "The report has images of 8 steps; at least 9 are required."),
        ("min_unet_decibels_median", 35.5, "median SQNR of UNet calls is 30.00 dB; at least 35.5 dB"),
        ("min_unet_decibels_worst", 30.5, "worst SQNR of UNet calls is 30.00 dB; at least 30.5 dB"),
        ("min_latents_decibels_median", 31.0, "median SQNR of final latents is 30.00 dB; at least 31 dB"),
        ("min_latents_decibels_worst", 31.0, "worst SQNR of final latents is 30.00 dB; at least 31 dB"),
        ("min_psnr_decibels_median", 36.0, "median PSNR of pictures is 35.00 dB; at least 36 dB"),
        ("min_psnr_decibels_worst", 36.0, "worst PSNR of pictures is 35.00 dB; at least 36 dB"),
        ("max_perceptual_distance_median", 0.005, "median perceptual distance of pictures is 0.0100; at most 0.005"),
        ("max_perceptual_distance_worst", 0.005, "worst perceptual distance of pictures is 0.0100; at most 0.005"),
    ):
        [found] = violations(report_of(), Thresholds.model_validate({entry: limit}))
        assert words in found and found.endswith(".")


def test_one_bad_prompt_violates_only_the_worst() -> None:
    distances = {"latents_decibels": -3.0, "psnr_decibels": 4.0, "perceptual_distance": 0.9}
    found = violations(with_bad_prompt(**distances, unet_decibels={"unet": (2.0,)}), Thresholds())
    assert len(found) == 4 and all(text.startswith("The worst ") for text in found)
    found = violations(with_bad_prompt(steps=7), Thresholds())
    assert found == ["The report has images of 7 steps; at least 8 are required."]
    report = report_of(*(prompt_result(number, unet_decibels={"unet": ()}) for number in range(32)))
    assert violations(report, Thresholds()) == ["The report has no UNet call in 8 bits, because all steps ran in fp16."]


@pytest.mark.parametrize(("lost", "refused"), [(4, False), (5, True)])
def test_loss_of_prompt_true_pictures(lost: int, refused: bool) -> None:
    """4 of 400 are exactly 1 percentage point. A picture that only the quantized model gets right counts for it."""
    verdicts = [(True, False)] * (lost + 1) + [(False, True)] + [(True, True)] * (398 - lost)
    prompts = [prompt_result(i, reference_true=a, quantized_true=b) for i, (a, b) in enumerate(verdicts)]
    found = violations(report_of(*prompts), Thresholds())
    assert bool(found) == refused
    if refused:
        assert "fell by 1.25 percentage points, from 99.75 to 98.50 %; at most 1 points" in found[0]


def test_reads_a_file_of_thresholds(tmp_path: Path) -> None:
    file = tmp_path / "thresholds.toml"
    file.write_text("min_psnr_decibels_median = 31\n")
    assert Thresholds.read(file) == Thresholds(min_psnr_decibels_median=31.0)
    assert Thresholds.for_check(2, 4) == Thresholds(min_prompts=2, min_steps=4)
    assert Thresholds.for_check(64, 20) == Thresholds()
    for content, words in (
        (b"min_psnr = 3.0", "min_psnr, is not a known field|min_psnr: is not a known field"),
        (b"min_prompts = 0", "min_prompts: got 0, expected an integer of at least 1"),
        (b"min_latents_decibels_median = nan", "min_latents_decibels_median"),
        (b"max_perceptual_distance_worst = 2.0", "from 0.0 to 1.0|from 0 to 1"),
        (b"[", "is not a file of thresholds"),
        (b"\xff", "is not a file of thresholds"),
    ):
        file.write_bytes(content)
        with pytest.raises(BadThresholds, match=words):
            Thresholds.read(file)
    with pytest.raises(BadThresholds, match="is not a file of thresholds"):
        Thresholds.read(tmp_path / "missing.toml")


# -- the contact sheet -----------------------------------------------------------------------------------------------

GAP = 4  # pixels between the pictures of a pair
PAIR_WIDTH = 3 * SIDE + 2 * GAP
SECOND = 8 + PAIR_WIDTH + 8  # the left edge of the second pair


def sheet_of(prompts: list[PromptResult], pairs: list[PicturePair]) -> np.ndarray:
    image = Image.open(io.BytesIO(contact_sheet(report_of(*prompts), pairs)))
    assert image.format == "PNG" and image.mode == "RGB"
    return np.asarray(image)


def pair_of(number: int, reference: int, quantized: int) -> PicturePair:
    return PicturePair.of(number, constant(reference), constant(quantized))


def test_sheet_has_reference_quantized_and_amplified_difference() -> None:
    sheet = sheet_of([prompt_result(5), prompt_result(2)], [pair_of(2, 50, 60), pair_of(5, 100, 90)])
    row = sheet[8 + SIDE // 2, :, 0]
    levels = [[int(row[left + place * (SIDE + GAP) + SIDE // 2]) for place in range(3)] for left in (8, SECOND)]
    assert levels == [[100, 90, 80], [50, 60, 80]], "the report's first prompt comes first"
    caption = sheet[8 + SIDE : 8 + SIDE + 32, 8 : 8 + PAIR_WIDTH]
    assert (caption < 100).any(), "the prompt and the distances are written below"
    assert pair_of(0, 100, 132).difference.max() == 255 and pair_of(0, 131, 100).difference.min() == 248
    for height, width in ((32, 16), (1000, 3), (300, 700)):
        pair = PicturePair.of(0, random_picture(height, width), random_picture(height, width, 1))
        assert {max(pixels.shape[:2]) for pixels in (pair.reference, pair.quantized, pair.difference)} == {SIDE}


def test_sheet_shows_the_worst_32_prompts() -> None:
    pairs = [pair_of(number, number, number) for number in reversed(range(40))]
    sheet = sheet_of([prompt_result(number) for number in range(40)], pairs)
    row_height = SIDE + 32 + 8
    assert sheet.shape == (16 * row_height + 8, 2 * (PAIR_WIDTH + 8) + 8, 3)
    assert sheet[8 + 15 * row_height + SIDE // 2, SECOND + SIDE // 2].tolist() == [31, 31, 31]


def test_sheet_writes_any_prompt_below_its_pair() -> None:
    for prompt in ("word " * 500, "一个红色的圆", "two\nlines \u202e\0", "x" * 3000):
        prompts = [prompt_result(0, prompt=prompt), prompt_result(1)]
        sheet = sheet_of(prompts, [pair_of(0, 0, 0), pair_of(1, 255, 255)])
        assert (sheet[8 : 8 + SIDE, SECOND : SECOND + SIDE] == 255).all(), "text covers a picture"
        assert (sheet[8 + SIDE :, SECOND - 8 : SECOND] == 211).all(), "text is wider than its pair"
    two, one = (sheet_of([prompt_result(prompt=text)], [pair_of(0, 0, 0)]) for text in ("two\n lines", "two lines"))
    assert np.array_equal(two, one)
