"""Networks with linears in INT8: exact products, smoothed outliers, and what is refused. The CPU computes them, too."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from engine_builder.backends.aot_inductor.compile import dynamic_bucket, engine_key
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.kernels.fp8_linear import can_quantize
from engine_builder.kernels.int8_linear import Int8Linear, quantize_linear, smoothing_scales
from engine_builder.networks import blocks
from engine_builder.networks.network import load_network, public_name
from engine_builder.quantization.policy import DEFAULTS, BadPolicy, Policy
from engine_builder.quantization.quantization_plan import Quantization
from engine_builder.quantization.quantize import quantize_network
from model.deployment import ServedAdapters
from model.errors import AdapterError
from model.loading.adapters import read_adapters
from model.store.precision import FP8, FP16, FP32, INT8
from model.weights.int8 import quantize
from tests.support import releases
from tests.support.deployments import deployed
from tests.support.quantization import decibels, observed, ranges_of, run, unet_inputs

SMOOTHED = Policy(smoothing=0.8)


@pytest.mark.parametrize(("dtype", "bias"), [(torch.float32, True), (torch.float16, True), (torch.float16, False)])
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


def test_int8_needs_smoothing_without_a_clip_and_fp8_has_none() -> None:
    for policy in (Policy(), Policy(smoothing=0.5, clip="percentile")):
        with pytest.raises(BadPolicy, match="A policy of int8 needs smoothing"):
            policy.check_precision(INT8)
    with pytest.raises(BadPolicy, match="A policy of fp8 has no smoothing"):
        SMOOTHED.check_precision(FP8)
    for precision, default in DEFAULTS.items():
        default.check_precision(precision)


def test_digests_of_fp8_stay_and_those_of_int8_differ() -> None:
    """A stored validation of FP8 from before INT8 is still found."""
    fp8 = Quantization(Policy(), {"unet": "a key"}, {})
    assert fp8.digest == "32363e9ec637fc03e490d2fc4c3ea62b90a862985eea15b4e16befa12fbdcfaa"
    digests = {Quantization(Policy(smoothing=s), {"unet": "a key"}, {}, INT8).digest for s in (0.5, 0.8)}
    assert len(digests | {fp8.digest}) == 3


def test_quantized_network_predicts_nearly_the_same_noise(toy_folder: Path) -> None:
    """All linears are quantized, with a smaller error than in FP8, in an engine of its own."""
    network = load_network(Checkpoint(toy_folder), "unet", FP32, plain=True)
    inputs = unet_inputs(network)
    ranges = ranges_of(network, inputs)
    quantized, layers = quantize_network(network, ranges, SMOOTHED, INT8)
    names = {public_name(name) for name, module in quantized.module.named_modules() if isinstance(module, Int8Linear)}
    suitable = {public_name(name) for name, module in network.module.named_modules() if can_quantize(module)}
    assert {layer.name for layer in layers} == names == suitable and quantized.precision == INT8
    assert all(layer.input_decibels is None and layer.weight_decibels > 35 for layer in layers)
    fp8, _ = quantize_network(network, ranges, Policy())
    with torch.inference_mode():
        [exact], [found], [in_fp8] = (one.module(*inputs) for one in (network, quantized, fp8))
    assert decibels(exact, in_fp8) < decibels(exact, found) < 70
    target, bucket = releases.cpu_target(), dynamic_bucket(8)
    assert len({engine_key(one, target, bucket) for one in (network, quantized, fp8)}) == 3


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("build", ["--precision", "int8"], "int8 needs an NVIDIA GPU"),
        ("build", ["--vae-precision", "int8"], "int8 is not supported for the VAE"),
        ("export-onnx", ["--precision", "int8"], "'int8' is not supported for onnx"),
        ("check-fp8", ["--quantized", "int4"], "'int4' is not fp8 or int8"),
    ],
)
def test_command_refuses(command: str, options: list[str], message: str, toy_folder: Path, tmp_path: Path) -> None:
    status, output = run(command, toy_folder, "--store", tmp_path / "store", *options)
    assert status == 2 and message in " ".join(output.replace("│", " ").split()), output


def test_adapters_are_refused() -> None:
    store: Any = SimpleNamespace(read_adapter=lambda name: name)
    int8, fp16 = (
        cast(Any, SimpleNamespace(engines={"unet": [SimpleNamespace(precision=precision, tensorrt=None)]}))
        for precision in (INT8, FP16)
    )
    with pytest.raises(AdapterError, match="not merged into weights in int8"):
        read_adapters(store, deployed(adapters=ServedAdapters(("style",))), int8)
    assert read_adapters(store, deployed(), int8) == read_adapters(store, deployed(), fp16) == []
