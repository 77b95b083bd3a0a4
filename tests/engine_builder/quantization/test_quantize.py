"""Networks with linears in FP8: the policy, the arithmetic, and what is refused. The CPU computes the same product."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from engine_builder.backends.aot_inductor import compile as compiler
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.kernels.fp8_linear import QuantizedLinear, can_quantize, quantize_linear
from engine_builder.networks.network import Network, load_network, public_name
from engine_builder.quantization.picture_check import Fp8Unsupported, Int8Unsupported, check_target
from engine_builder.quantization.policy import BadPolicy, Policy
from engine_builder.quantization.quantize import quantize_network
from engine_builder.quantization.ranges import InputRange
from engine_builder.quantization.record import CalibrationError
from engine_builder.quantization.validation.report import ValidationReport
from engine_builder.stores.store import open_writable_store
from model.errors import PreheatError
from model.loading.target import Target
from model.store.precision import FP8, FP32, INT8, Precision
from model.weights.fp8 import E4M3_MAX, quantize
from tests.support import releases
from tests.support.quantization import decibels, ranges_of, run, unet_inputs, write_fp8_draft
from tests.support.repository import MODEL_FOLDER

# -- the arithmetic --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "bias"), [(torch.float32, True), (torch.float16, True), (torch.float16, False)])
def test_product_is_that_of_the_rounded_numbers(dtype: torch.dtype, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(64, 48, bias=bias).to(dtype).requires_grad_(False)
    inputs = torch.randn(2, 5, 64, generator=generator).to(dtype)
    quantized = quantize_linear(linear, float(inputs.abs().max()))
    assert quantized.weight.dtype == torch.float8_e4m3fn and quantized.weight.shape == (48, 64)
    rounded = quantize(inputs, quantized.input_scale).double() * quantized.input_scale.double()
    weight = quantized.weight.double() * quantized.weight_scale.double()
    exact = rounded @ weight.t() + (linear.bias.double() if bias else 0)
    found = quantized(inputs)
    assert found.dtype == dtype and found.shape == (2, 5, 48)
    assert decibels(exact, found) > (60 if dtype == torch.float16 else 100)
    assert 20 < decibels(linear(inputs), found) < 40, "E4M3 has four significant bits"


def test_inputs_beyond_the_clip_are_clipped() -> None:
    scale = torch.tensor(2.0 / E4M3_MAX)
    assert quantize(torch.tensor([1.0, 2.0, 3.0, -9.0]), scale).float().tolist() == [224.0, 448.0, 448.0, -448.0]


def test_only_linears_of_whole_tiles_are_quantized() -> None:
    suits = [(nn.Linear(32, 16), True), (nn.Linear(24, 16), False), (nn.Linear(32, 20), False),
             (nn.Conv2d(16, 16, 1), False)]  # fmt: skip
    assert [can_quantize(module) for module, _ in suits] == [expected for _, expected in suits]


# -- a policy --------------------------------------------------------------------------------------------------------

LAYERS = ["down.0.to_qkv", "down.0.proj_out", "mid.to_qkv", "mid.proj_out"]


def test_policy_keeps_the_layers_of_its_patterns(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text('keep_fp16 = ["*.proj_out", "mid.*"]\nclip = "percentile"\npercentile = 0.999\n')
    policy = Policy.read(file)
    assert policy.select(LAYERS) == ["down.0.to_qkv"]
    assert (policy.clip, policy.percentile) == ("percentile", 0.999)
    assert Policy().select(LAYERS) == LAYERS


def test_refuses_an_invalid_policy(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    for text, words in (
        (None, "is not a policy"),
        ('keep = ["*"]', "keep"),
        ('clip = "largest"', "clip"),
        ("percentile = 2.0", "percentile"),
        ("keep_fp16 = 7", "keep_fp16"),
        ("keep_fp16 = [", "is not a policy"),
    ):
        if text is not None:
            file.write_text(text)
        with pytest.raises(BadPolicy, match=words):
            Policy.read(file)
    with pytest.raises(BadPolicy, match=r"'\*\.proj_outt' of keep_fp16 matches no layer"):
        Policy(keep_fp16=["*.proj_outt"]).check_patterns(LAYERS, ())


# -- a network -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def network(toy_folder: Path) -> Network:
    return load_network(Checkpoint(toy_folder), "unet", FP32, plain=True)


@pytest.fixture(scope="module")
def ranges(network: Network) -> dict[str, InputRange]:
    return ranges_of(network, unet_inputs(network))


def test_quantizes_every_linear_but_those_of_the_policy(network: Network, ranges: dict[str, InputRange]) -> None:
    before = {name: tensor.data_ptr() for name, tensor in network.tensors().items()}
    suitable = [public_name(name) for name, module in network.module.named_modules() if can_quantize(module)]
    quantized, layers = quantize_network(network, ranges, Policy())
    assert [layer.name for layer in layers] == suitable and len(layers) > 5
    assert quantized.precision == FP8 and network.precision == FP32
    assert {name: tensor.data_ptr() for name, tensor in network.tensors().items()} == before
    assert not any(isinstance(module, QuantizedLinear) for module in network.module.modules())
    tensors = quantized.tensors()
    convolutions = {name: t for name, t in tensors.items() if t.ndim == 4}
    assert all(tensor.data_ptr() == before[name] for name, tensor in convolutions.items()), "they were copied"
    for layer in layers:
        assert tensors[f"{layer.name}.weight"].dtype == torch.float8_e4m3fn
        assert float(tensors[f"{layer.name}.input_scale"]) == pytest.approx(layer.clip / E4M3_MAX)
        assert layer.input_decibels > 25 and layer.weight_decibels > 25
    fewer, kept = quantize_network(network, ranges, Policy(keep_fp16=["*.proj_out"]))
    assert {layer.name for layer in layers} - {layer.name for layer in kept} == {
        name for name in suitable if name.endswith(".proj_out")
    }
    assert not any(t.dtype == torch.float8_e4m3fn for name, t in fewer.tensors().items() if ".proj_out." in name)


def test_quantized_network_predicts_nearly_the_same_noise(network: Network, ranges: dict[str, InputRange]) -> None:
    quantized, _ = quantize_network(network, ranges, Policy())
    with torch.inference_mode():
        [exact], [found] = (one.module(*unet_inputs(network)) for one in (network, quantized))
    assert 20 < decibels(exact, found) < 60


def test_refuses_a_calibration_of_another_network(network: Network, ranges: dict[str, InputRange]) -> None:
    [name, *_] = [layer.name for layer in quantize_network(network, ranges, Policy())[1]]
    without = {other: found for other, found in ranges.items() if other != name}
    with pytest.raises(CalibrationError, match=f"calibration of unet does not fit its layer {name}"):
        quantize_network(network, without, Policy())
    narrow = ranges | {name: InputRange.empty(3, torch.device("cpu"))}
    with pytest.raises(CalibrationError, match=f"does not fit its layer {name}"):
        quantize_network(network, narrow, Policy())


# -- the command -----------------------------------------------------------------------------------------------------


def read_report(folder: Path) -> ValidationReport:
    return ValidationReport.model_validate_json((folder / "report.json").read_bytes())


@pytest.fixture(scope="module")
def calibrated(toy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The arguments that `calibrate` and `check-fp8` share, after a calibration without a refiner."""
    folder = tmp_path_factory.mktemp("check-fp8")
    (folder / "prompts.txt").write_text("# two\n\na circle\n  a square  \n")
    arguments = [str(toy_folder), "--prompts", f"{folder}/prompts.txt", "--steps", "2", "--size", "64x64",
                 "--no-refiner", "--store", f"{folder}/store"]  # fmt: skip
    status, output = run("calibrate", *arguments)
    assert status == 0 and "unet calibrated: " in output and "2 prompts" in output and "largest outliers" in output
    assert "unet reused: " in run("calibrate", *arguments)[1]
    return arguments


def test_check_fp8_compares_pictures_and_writes_them(calibrated: list[str], tmp_path: Path) -> None:
    """And warns that the check is too small to publish. The release that names it shows it."""
    store = open_writable_store(calibrated[-1])
    status, output = run("check-fp8", *calibrated, "--out", tmp_path / "out")
    [digest] = store.records("validations")
    assert status in (0, 1) and "are required" not in output
    for words in (
        "final latents, SQNR",
        "unet: ",
        f"stored as validation {digest[:12]}",
        "warning `preheat publish` requires at least 32 prompts; this check has 2.",
        "warning `preheat publish` requires at least 8 steps; this check has 2.",
    ):
        assert words in output
    report = read_report(tmp_path / "out")
    assert (report.reference, report.quantized, len(report.prompts)) == ("fp32", "fp8", 2)
    assert 10 < report.summary.latents_decibels.worst < 60, "the two models are equal, or have nothing in common"
    names = {layer.name for layer in report.layers}
    assert len(names) > 5 and not any(name.endswith((".proj_in", ".proj_out")) for name in names)
    assert report.identity.keys() == {"unet", "quantization", "policy"} and report.identity["quantization"] == digest
    assert json.loads(report.identity["policy"])["keep_fp16"] == ["*.proj_in", "*.proj_out"]
    with Image.open(tmp_path / "out" / "pairs.png") as sheet:
        assert sheet.format == "PNG" and sheet.width > 3 * 64

    write_fp8_draft(store, digest)
    refused = run("publish", "toy", "--store", store.url)[1]
    for words in ("has 2 prompts; at least 32 are", "images of 2 steps; at least 8 are", "with fp32;", "on a CPU ("):
        assert words in refused
    assert run("publish", "toy", "--store", store.url, "--accept")[0] == 0
    assert run("releases", "--store", store.url, "--validation", "toy/1", "--out", tmp_path / "kept")[0] == 0
    for file in ("report.json", "pairs.png"):
        assert (tmp_path / "kept" / file).read_bytes() == (tmp_path / "out" / file).read_bytes()


def test_check_fp8_fails_for_a_threshold_that_is_not_kept(calibrated: list[str], tmp_path: Path) -> None:
    limits = tmp_path / "thresholds.toml"
    limits.write_text("min_prompts = 1\nmin_steps = 1\nmin_latents_decibels_median = 90.0\n")
    status, output = run("check-fp8", *calibrated, "--count", "1", "--thresholds", limits)
    assert status == 1 and "refused The median SQNR of final latents is" in output and "preheat publish" not in output


def test_later_check_of_a_policy_replaces_the_stored_one(calibrated: list[str], tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text('keep_fp16 = ["down_blocks.*", "up_blocks.*"]\n')
    store = open_writable_store(calibrated[-1])
    before = set(store.records("validations"))
    for count in (2, 1):
        run("check-fp8", *calibrated, "--policy", tmp_path / "policy.toml", "--count", count, "--out", tmp_path)
        report = read_report(tmp_path)
        assert {layer.name.partition(".")[0] for layer in report.layers} == {"mid_block"}
        assert len(report.prompts) == count
        [digest] = set(store.records("validations")) - before
        assert report.identity["quantization"] == digest


def test_check_fp8_runs_the_first_steps_on_the_model_itself(calibrated: list[str], tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text("fp16_steps = { first = 1, last = 1 }\n")  # of two steps
    arguments = ["--count", 1, "--policy", tmp_path / "policy.toml", "--out", tmp_path]
    status, output = run("check-fp8", *calibrated, *arguments)
    report = read_report(tmp_path)
    assert report.summary.latents_decibels.worst == float("inf"), output
    assert report.prompts[0].unet_decibels == {"unet": ()} and report.summary.unet_decibels is None
    assert status == 1 and "UNet calls, SQNR" not in output
    assert "The report has no UNet call in 8 bits, because all steps ran in fp16." in output


def test_check_compares_pictures_in_int8(calibrated: list[str], tmp_path: Path) -> None:
    output = run("check-fp8", *calibrated, "--quantized", "int8", "--count", 1, "--out", tmp_path)[1]
    report = read_report(tmp_path)
    assert "layers in INT8" in output and (report.reference, report.quantized) == ("fp32", "int8")
    assert 15 < report.summary.latents_decibels.worst < 80
    assert '"smoothing": 0.8' in report.identity["policy"]


def test_check_fp8_needs_a_calibration(calibrated: list[str], tmp_path: Path) -> None:
    output = run("check-fp8", *calibrated[:-1], tmp_path / "empty")[1]
    assert "no intact calibration of this model's unet. Run `preheat calibrate`" in output


def test_no_refiner_leaves_out_the_models_own(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a circle\n")
    arguments = [MODEL_FOLDER, "--prompts", tmp_path / "prompts.txt", "--steps", "1", "--size", "64x64",
                 "--store", tmp_path / "store", "--no-refiner"]  # fmt: skip
    status, output = run("calibrate", *arguments)
    assert status == 0 and "unet calibrated" in output and "refiner_unet" not in output
    run("check-fp8", *arguments, "--out", tmp_path)
    assert read_report(tmp_path).identity.keys() == {"unet", "quantization", "policy"}
    assert "has no intact calibration of this model's refiner_unet" in run("check-fp8", *arguments[:-1])[1]


@pytest.mark.parametrize("command", ["calibrate", "check-fp8"])
def test_no_refiner_contradicts_a_refiner(command: str, toy_folder: Path) -> None:
    status, output = run(command, toy_folder, "--refiner", toy_folder, "--no-refiner")
    assert status == 2 and "contradicts --refiner" in output


@pytest.mark.parametrize(
    ("precision", "refusal", "fewer", "enough"),
    [(FP8, Fp8Unsupported, ["sm80", "sm86"], ["sm89", "sm90", "sm100", "sm120"]),
     (INT8, Int8Unsupported, ["sm75"], ["sm80", "sm86", "sm90"])],
)  # fmt: skip
def test_8_bits_need_a_compute_capability(
    precision: Precision, refusal: type[PreheatError], fewer: list[str], enough: list[str]
) -> None:
    for capability in (*fewer, *enough):
        target = Target("cuda", "gpu", capability, "torch2.11-cu130")
        if capability in enough:
            check_target(target, precision)
            continue
        words = rf"The GPU gpu \({capability}\) does not multiply {precision.name.upper()} numbers"
        with pytest.raises(refusal, match=words):
            check_target(target, precision)
    check_target(releases.cpu_target(), precision)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Make this machine appear to have a GPU. Returns a function of its product and compute capability."""

    def pretend(product: str, capability: str) -> None:
        target = Target("cuda", product, capability, "torch2.11-cu130")
        monkeypatch.setattr(compiler, "build_target", lambda: target)

    return pretend


def test_check_fp8_refuses_a_gpu_or_precision_before_any_work(on_gpu: Callable[[str, str], None]) -> None:
    arguments = ["check-fp8", "no-model", "--prompts", "no-prompts.txt"]
    on_gpu("a100", "sm80")
    status, output = run(*arguments)
    assert status == 1 and "The GPU a100 (sm80) does not multiply FP8 numbers." in output
    on_gpu("h100", "sm90")
    status, output = run(*arguments, "--precision", "fp32")
    assert status == 2 and "--precision" in output and "are fp16 or bf16" in output
