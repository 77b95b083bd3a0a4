"""Networks with linears in INT8: exact products, smoothed outliers, and what is refused. The CPU computes them, too."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from engine_builder.backends.aot_inductor.compile import dynamic_bucket, engine_key
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.commands.main import app
from engine_builder.networks import blocks
from engine_builder.networks.fp8_linear import can_quantize
from engine_builder.networks.int8_linear import Int8Linear, quantize_linear, smoothing_scales
from engine_builder.networks.network import Network, load_network, public_name
from engine_builder.quantization.calibrate import observing
from engine_builder.quantization.check import Int8Unsupported, check_target
from engine_builder.quantization.plan import Quantization
from engine_builder.quantization.policy import DEFAULTS, BadPolicy, Policy
from engine_builder.quantization.quantize import quantize_layers, quantize_network
from engine_builder.quantization.ranges import InputRange
from engine_builder.quantization.validation.report import ValidationReport
from model.errors import AdapterError
from model.loading.adapters import read_adapters
from model.loading.target import Target
from model.store.precision import FP8, FP16, FP32, INT8
from model.weights.int8 import quantize
from tests.support import releases

SMOOTHED = Policy(smoothing=0.8)


def decibels(exact: torch.Tensor, found: torch.Tensor) -> float:
    error = (exact.double() - found.double()).square().sum()
    return float(10 * torch.log10(exact.double().square().sum() / error))


def observed(inputs: torch.Tensor) -> InputRange:
    found = InputRange.empty(inputs.shape[-1], torch.device("cpu"))
    found.observe(inputs, -1)
    return found


# -- the arithmetic --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_product_equals_integers_of_numpy(dtype: torch.dtype, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(96, 48, bias=bias).to(dtype).requires_grad_(False)
    inputs = torch.randn(2, 5, 96, generator=generator).to(dtype)
    scales = torch.rand(96, generator=generator) / 50 + 0.02
    quantized = quantize_linear(linear, scales)
    found = quantized(inputs)
    assert found.dtype == dtype and found.shape == (2, 5, 48)
    rows = np.clip(np.rint(inputs.float().numpy() / scales.numpy()), -127, 127).astype(np.int32)
    smoothed = linear.weight.float().numpy() * scales.numpy()
    row_scales = np.abs(smoothed).max(1) / 127
    columns = np.clip(np.rint(smoothed / row_scales[:, None]), -127, 127).astype(np.int32)
    np.testing.assert_allclose(quantized.weight.numpy(), columns, atol=1)  # a tie may round to either side
    columns = quantized.weight.detach().numpy().astype(np.int32)
    expected = (rows @ columns.T) * row_scales + (linear.bias.float().numpy() if bias else 0)
    np.testing.assert_allclose(found.float().numpy(), expected, rtol=2e-3, atol=2e-3)
    assert 28 < decibels(linear(inputs), found) < 60


def test_geglu_of_int8_linears_uses_no_kernel_of_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, whose kernel of GEGLU multiplies fp16 or E4M3, such a projection is a product of integers."""
    monkeypatch.setattr(blocks, "has_half_kernels", lambda tensor: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    linear, tokens = nn.Linear(640, 256), torch.randn(1, 4096, 640)
    projection = quantize_linear(linear, torch.full((640,), 4 / 127))
    values, gates = projection(tokens).unflatten(-1, (-1, 2)).unbind(-1)
    torch.testing.assert_close(blocks.geglu(projection, tokens), values * nn.functional.gelu(gates))


def test_rounds_to_even_and_clips() -> None:
    values = torch.tensor([0.5, 1.5, -2.5, 127.4, 500.0, -500.0])
    assert quantize(values, torch.tensor(1.0)).tolist() == [0, 2, -2, 127, 127, -127]


def test_smoothing_is_equation_4() -> None:
    weight, maxima = torch.tensor([[1.0, -4.0], [0.5, 2.0]]), torch.tensor([16.0, 1.0])
    torch.testing.assert_close(smoothing_scales(weight, maxima, 0.5), torch.tensor([4.0, 0.5]))
    torch.testing.assert_close(smoothing_scales(weight, maxima, 1.0), maxima)
    assert bool(smoothing_scales(torch.zeros(2, 2), torch.zeros(2), 0.5).isfinite().all()), "a channel of zeros"


def test_smoothing_saves_inputs_with_an_outlier_channel() -> None:
    """A norm's channel times 50, and the next linear's column divided by 50: the product is the same."""
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(256, 64).requires_grad_(False)
    inputs = torch.randn(512, 256, generator=generator)
    exact = linear(inputs)
    inputs[:, 7] *= 50
    linear.weight[:, 7] /= 50
    maxima = observed(inputs).channel_maxima
    found = {}
    for strength in (0.0, 0.8):
        smooth = torch.ones(256) if not strength else smoothing_scales(linear.weight, maxima, strength)
        found[strength] = decibels(exact, quantize_linear(linear, smooth * (maxima / smooth).max() / 127)(inputs))
    assert found[0.0] < 15 and found[0.8] > 30, found


def test_scales_are_tensors_so_that_engines_hold_no_weights() -> None:
    quantized = quantize_linear(nn.Linear(16, 32), torch.ones(16))
    names = {name for name, _ in [*quantized.named_parameters(), *quantized.named_buffers()]}
    assert names == {"weight", "bias", "weight_scale", "input_scale"}
    assert quantized.weight.dtype == torch.int8 and quantized.weight_scale.shape == (32,)


# -- a policy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [Policy(), Policy(smoothing=0.5, clip="percentile")])
def test_int8_needs_smoothing_without_a_clip(policy: Policy) -> None:
    with pytest.raises(BadPolicy, match="A policy of int8 needs smoothing"):
        policy.check_precision(INT8)


def test_fp8_has_no_smoothing() -> None:
    with pytest.raises(BadPolicy, match="A policy of fp8 has no smoothing"):
        SMOOTHED.check_precision(FP8)
    for precision, policy in DEFAULTS.items():
        policy.check_precision(precision)


def test_digests_of_fp8_stay_and_those_of_int8_differ() -> None:
    """A stored validation of FP8 from before INT8 is still found."""
    fp8 = Quantization(Policy(), {"unet": "a key"}, {})
    assert "smoothing" not in fp8.policy.entries
    assert fp8.digest == "32363e9ec637fc03e490d2fc4c3ea62b90a862985eea15b4e16befa12fbdcfaa"
    digests = {Quantization(Policy(smoothing=s), {"unet": "a key"}, {}, INT8).digest for s in (0.5, 0.8)}
    assert len(digests | {fp8.digest}) == 3


# -- a network -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def network(toy_folder: Path) -> Network:
    return load_network(Checkpoint(toy_folder), "unet", FP32, plain=True)


@pytest.fixture(scope="module")
def inputs(network: Network) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(2, 4, 8, 8, generator=generator)]
    for spec in network.signature.inputs[1:]:
        found.append(torch.randn([2, *(int(size) for size in spec.shape[1:])], generator=generator))
    return found


@pytest.fixture(scope="module")
def ranges(network: Network, inputs: list[torch.Tensor]) -> dict[str, InputRange]:
    found: dict[str, InputRange] = {}
    with observing(network.module, found), torch.inference_mode():
        network.module(*inputs)
    return found


def test_quantized_network_predicts_nearly_the_same_noise(
    network: Network, inputs: list[torch.Tensor], ranges: dict[str, InputRange]
) -> None:
    quantized, layers = quantize_network(network, ranges, SMOOTHED, INT8)
    names = {public_name(name) for name, module in quantized.module.named_modules() if isinstance(module, Int8Linear)}
    suitable = {public_name(name) for name, module in network.module.named_modules() if can_quantize(module)}
    assert {layer.name for layer in layers} == names == suitable and quantized.precision == INT8
    assert all(layer.input_decibels is None and layer.weight_decibels > 35 for layer in layers)
    with torch.inference_mode():
        [exact], [found] = network.module(*inputs), quantized.module(*inputs)
    fp8, _ = quantize_network(network, ranges, Policy())
    with torch.inference_mode():
        [in_fp8] = fp8.module(*inputs)
    assert decibels(exact, in_fp8) < decibels(exact, found) < 70


def test_keys_of_engines_name_the_precision(network: Network) -> None:
    clips = {name: 1.0 for name, module in network.module.named_modules() if can_quantize(module)}
    clips = {public_name(name): clip for name, clip in clips.items()}
    target, bucket = releases.cpu_target(), dynamic_bucket(8)
    keys = {engine_key(quantize_layers(network, clips, precision), target, bucket) for precision in (FP8, INT8)}
    assert len(keys | {engine_key(network, target, bucket)}) == 3


# -- commands and servers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("capability", "suits"), [("sm75", False), ("sm80", True), ("sm86", True), ("sm90", True)])
def test_int8_needs_compute_capability_8_0(capability: str, suits: bool) -> None:
    target = Target("cuda", "gpu", capability, "torch2.11-cu130")
    if suits:
        check_target(target, INT8)
    else:
        with pytest.raises(Int8Unsupported, match=r"The GPU gpu \(sm75\) does not multiply INT8 numbers"):
            check_target(target, INT8)
    check_target(releases.cpu_target(), INT8)


def test_check_compares_pictures_in_int8(toy_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a circle\n")
    arguments = [str(toy_folder), "--prompts", f"{tmp_path}/prompts.txt", "--steps", "2", "--size", "64x64"]
    store = ["--store", f"{tmp_path}/store"]
    assert CliRunner().invoke(app, ["calibrate", *arguments, *store], catch_exceptions=False).exit_code == 0
    more = ["--quantized", "int8", "--count", "1", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["check-fp8", *arguments, *store, *more], catch_exceptions=False)
    assert "layers in INT8" in result.output, result.output
    report = ValidationReport.model_validate_json((tmp_path / "report.json").read_bytes())
    assert (report.reference, report.quantized) == ("fp32", "int8")
    assert 15 < report.summary.latents_decibels.worst < 80
    assert '"smoothing": 0.8' in report.identity["policy"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build", "--precision", "int8"], "int8 needs an NVIDIA GPU"),
        (["build", "--vae-precision", "int8"], "int8 is not supported for the VAE"),
        (["export-onnx", "--precision", "int8"], "'int8' is not supported for onnx"),
        (["check-fp8", "--quantized", "int4"], "'int4' is not fp8 or int8"),
    ],
)
def test_command_refuses(arguments: list[str], message: str, toy_folder: Path, tmp_path: Path) -> None:
    command, *options = arguments
    ran = CliRunner().invoke(app, [command, str(toy_folder), "--store", str(tmp_path / "store"), *options])
    assert ran.exit_code == 2
    assert message in " ".join(ran.output.replace("│", " ").split()), ran.output


@pytest.mark.parametrize("precision", [INT8, FP16])
def test_adapters_are_refused(precision: Any) -> None:
    selection = SimpleNamespace(engines={"unet": [SimpleNamespace(precision=precision, tensorrt=None)]})
    store = SimpleNamespace(read_adapter=lambda name: name)
    if precision == INT8:
        with pytest.raises(AdapterError, match="not merged into weights in int8"):
            read_adapters(cast(Any, store), ["style"], [], cast(Any, selection))
        assert read_adapters(cast(Any, store), [], [], cast(Any, selection)) == []
    else:
        assert read_adapters(cast(Any, store), [], [], cast(Any, selection)) == []
