"""Networks with linears in FP8: the policy, the arithmetic, and what is refused. The CPU computes the same product."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.commands.main import app
from engine_builder.networks.fp8_linear import QuantizedLinear, can_quantize, quantize_linear
from engine_builder.networks.network import Network, load_network, public_name
from engine_builder.quantization.calibrate import observing
from engine_builder.quantization.policy import BadPolicy, Policy
from engine_builder.quantization.quantize import quantize_network
from engine_builder.quantization.ranges import InputRange
from engine_builder.quantization.record import CalibrationError
from engine_builder.quantization.validation.report import ValidationReport
from model.store.precision import FP8, FP32
from model.weights.fp8 import E4M3_MAX, quantize

Inputs = list[torch.Tensor]


def decibels(exact: torch.Tensor, found: torch.Tensor) -> float:
    error = (exact.double() - found.double()).square().sum()
    return float(10 * torch.log10(exact.double().square().sum() / error))


# -- the arithmetic --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
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


def test_scales_are_tensors_so_that_engines_hold_no_weights() -> None:
    quantized = quantize_linear(nn.Linear(16, 16), 1.0)
    names = {name for name, _ in [*quantized.named_parameters(), *quantized.named_buffers()]}
    assert names == {"weight", "bias", "weight_scale", "input_scale"}


@pytest.mark.parametrize(
    ("module", "suits"),
    [(nn.Linear(32, 16), True), (nn.Linear(24, 16), False), (nn.Linear(32, 20), False), (nn.Conv2d(16, 16, 1), False)],
)
def test_only_linears_of_whole_tiles_are_quantized(module: nn.Module, suits: bool) -> None:
    assert can_quantize(module) == suits


# -- a policy --------------------------------------------------------------------------------------------------------

LAYERS = ["down.0.to_qkv", "down.0.proj_out", "mid.to_qkv", "mid.proj_out"]


def test_policy_keeps_the_layers_of_its_patterns(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text('keep_fp16 = ["*.proj_out", "mid.*"]\nclip = "percentile"\npercentile = 0.999\n')
    policy = Policy.read(file)
    assert policy.select(LAYERS) == ["down.0.to_qkv"]
    assert (policy.clip, policy.percentile) == ("percentile", 0.999)
    assert Policy().select(LAYERS) == LAYERS


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('keep = ["*"]', "keep"),
        ('clip = "largest"', "clip"),
        ("percentile = 2.0", "percentile"),
        ("keep_fp16 = 7", "keep_fp16"),
        ("keep_fp16 = [", "is not a policy"),
    ],
)
def test_refuses_an_invalid_policy(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text(text)
    with pytest.raises(BadPolicy, match=words):
        Policy.read(file)


def test_refuses_a_missing_policy(tmp_path: Path) -> None:
    with pytest.raises(BadPolicy, match="is not a policy"):
        Policy.read(tmp_path / "none.toml")


def test_refuses_a_pattern_that_matches_nothing() -> None:
    with pytest.raises(BadPolicy, match=r"'\*\.proj_outt' of keep_fp16 matches no layer"):
        Policy(keep_fp16=["*.proj_outt"]).check_patterns(LAYERS, ())


# -- a network -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def network(toy_folder: Path) -> Network:
    return load_network(Checkpoint(toy_folder), "unet", FP32, plain=True)


@pytest.fixture(scope="module")
def inputs(network: Network) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(2, 4, 8, 8, generator=generator)]
    for spec in network.signature.inputs[1:]:
        found.append(torch.randn([2, *(int(size) for size in spec.shape[1:])], generator=generator))
    return found


@pytest.fixture(scope="module")
def ranges(network: Network, inputs: Inputs) -> dict[str, InputRange]:
    found: dict[str, InputRange] = {}
    with observing(network.module, found), torch.inference_mode():
        network.module(*inputs)
    return found


def test_quantizes_every_linear_but_those_of_the_policy(network: Network, ranges: dict[str, InputRange]) -> None:
    before = {name: tensor.data_ptr() for name, tensor in network.tensors().items()}
    suitable = [public_name(name) for name, module in network.module.named_modules() if can_quantize(module)]
    quantized, layers = quantize_network(network, ranges, Policy())
    assert [layer.name for layer in layers] == suitable and len(layers) > 5
    assert quantized.precision == FP8 and network.precision == FP32
    assert {name: tensor.data_ptr() for name, tensor in network.tensors().items()} == before
    assert not any(isinstance(module, QuantizedLinear) for module in network.module.modules())
    convolutions = {name: t for name, t in quantized.tensors().items() if t.ndim == 4}
    assert all(tensor.data_ptr() == before[name] for name, tensor in convolutions.items()), "they were copied"
    for layer in layers:
        tensors = quantized.tensors()
        assert tensors[f"{layer.name}.weight"].dtype == torch.float8_e4m3fn
        assert float(tensors[f"{layer.name}.input_scale"]) == pytest.approx(layer.clip / E4M3_MAX)
        assert layer.input_decibels > 25 and layer.weight_decibels > 25
    fewer, kept = quantize_network(network, ranges, Policy(keep_fp16=["*.proj_out"]))
    assert {layer.name for layer in layers} - {layer.name for layer in kept} == {
        name for name in suitable if name.endswith(".proj_out")
    }
    assert not any(t.dtype == torch.float8_e4m3fn for name, t in fewer.tensors().items() if ".proj_out." in name)


def test_quantized_network_predicts_nearly_the_same_noise(
    network: Network, inputs: Inputs, ranges: dict[str, InputRange]
) -> None:
    quantized, _ = quantize_network(network, ranges, Policy())
    with torch.inference_mode():
        [exact], [found] = network.module(*inputs), quantized.module(*inputs)
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


@pytest.fixture(scope="module")
def calibrated(toy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The arguments that `calibrate` and `check-fp8` share, after a calibration."""
    folder = tmp_path_factory.mktemp("check-fp8")
    (folder / "prompts.txt").write_text("a circle\na square\n")
    arguments = [str(toy_folder), "--prompts", f"{folder}/prompts.txt", "--steps", "2", "--size", "64x64",
                 "--store", f"{folder}/store"]  # fmt: skip
    assert CliRunner().invoke(app, ["calibrate", *arguments], catch_exceptions=False).exit_code == 0
    return arguments


def test_check_fp8_compares_pictures_and_writes_them(calibrated: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["check-fp8", *calibrated, "--count", "2", "--out", str(tmp_path)])
    assert "final latents, SQNR" in result.output and "unet: " in result.output, result.output
    report = ValidationReport.model_validate_json((tmp_path / "report.json").read_bytes())
    assert (report.reference, report.quantized, len(report.prompts)) == ("fp32", "fp8", 2)
    assert 10 < report.summary.latents_decibels.worst < 60, "the two models are equal, or have nothing in common"
    names = {layer.name for layer in report.layers}
    assert len(names) > 5 and not any(name.endswith((".proj_in", ".proj_out")) for name in names)
    assert report.identity.keys() == {"unet", "quantization", "policy"}
    with Image.open(tmp_path / "pairs.png") as sheet:
        assert sheet.width > 3 * 64


def test_check_fp8_fails_for_a_threshold_that_is_not_kept(calibrated: list[str], tmp_path: Path) -> None:
    (tmp_path / "thresholds.toml").write_text("min_prompts = 1\nmin_latents_decibels_median = 90.0\n")
    arguments = ["check-fp8", *calibrated, "--count", "1", "--thresholds", str(tmp_path / "thresholds.toml")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "refused The median SQNR of final latents is" in result.output.replace("\n", " ")


def test_check_fp8_takes_a_policy(calibrated: list[str], tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text('keep_fp16 = ["down_blocks.*", "up_blocks.*"]\n')
    arguments = ["check-fp8", *calibrated, "--count", "1", "--policy", str(tmp_path / "policy.toml")]
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "out")])
    report = ValidationReport.model_validate_json((tmp_path / "out" / "report.json").read_bytes())
    assert {layer.name.partition(".")[0] for layer in report.layers} == {"mid_block"}, result.output


def test_check_fp8_runs_the_first_steps_on_the_model_itself(calibrated: list[str], tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text("fp16_steps = { first = 1, last = 1 }\n")  # of two steps
    arguments = ["check-fp8", *calibrated, "--count", "1", "--policy", str(tmp_path / "policy.toml")]
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "out")])
    report = ValidationReport.model_validate_json((tmp_path / "out" / "report.json").read_bytes())
    assert report.summary.latents_decibels.worst == float("inf"), result.output
    assert report.prompts[0].unet_decibels == {"unet": ()} and report.summary.unet_decibels is None
    assert result.exit_code == 1 and "UNet calls, SQNR" not in result.output
    assert "The report has no UNet call in 8 bits, because all steps ran in fp16." in " ".join(result.output.split())


def test_check_fp8_needs_a_calibration(calibrated: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["check-fp8", *calibrated[:-1], str(tmp_path / "empty")])
    assert isinstance(result.exception, CalibrationError)
    assert "no intact calibration of this model's unet. Run `preheat calibrate`" in str(result.exception)
