"""Convolutions in FP8: the arithmetic, the policy, networks, keys and reports. The CPU convolves the same numbers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engine_builder.backends.aot_inductor.compile import build_target, dynamic_bucket, engine_key
from engine_builder.backends.onnx.export_graph import graph_key
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.kernels.fp8_conv import QuantizedConv, can_quantize_conv, quantize_conv
from engine_builder.kernels.winograd import WinogradConv
from engine_builder.networks import blocks
from engine_builder.networks.network import Network, load_network
from engine_builder.quantization.policy import BadPolicy, Policy
from engine_builder.quantization.quantize import quantize_network
from engine_builder.quantization.ranges import InputRange
from model.store.precision import FP32, INT8
from model.weights.fp8 import E4M3_MAX
from tests.support.quantization import decibels, ranges_of, unet_inputs
from tests.support.repository import MODEL_FOLDER

EVERY = Policy(convolutions=["*"])

# -- the arithmetic --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "kernel", "stride", "padding"),
    [(torch.float32, 3, 1, 1), (torch.float16, 3, 2, 1), (torch.float16, 2, 1, 1), (torch.float32, 3, 1, 0)],
)
def test_convolution_is_that_of_the_rounded_numbers(dtype: torch.dtype, kernel: int, stride: int, padding: int) -> None:
    conv = nn.Conv2d(32, 48, kernel, stride, padding).to(dtype).requires_grad_(False)
    conv.weight /= 100
    conv.bias /= 100
    conv.weight[7] *= 1e6  # one scale for all channels would round the others to nothing
    inputs = torch.randn(2, 32, 7, 5).to(dtype)
    layer = quantize_conv(conv, float(inputs.abs().max()))
    assert layer.weight.dtype == torch.float8_e4m3fn and layer.weight_scale.shape == (48,)
    rounded = layer.quantize_inputs(inputs).double() * layer.input_scale.double()
    weight = layer.weight.double() * layer.weight_scale.double()[:, None, None, None]
    exact = F.conv2d(rounded, weight, conv.bias.double(), stride, padding)
    found = layer(inputs)
    assert found.dtype == dtype and torch.equal(found, layer(layer.quantize_inputs(inputs)))
    assert decibels(exact, found) > (60 if dtype == torch.float16 else 100)
    others = [channel for channel in range(48) if channel != 7]
    assert 20 < decibels(conv(inputs)[:, others], found[:, others]) < 40, "E4M3 has four significant bits"
    entry_bias, residual = torch.randn(2, 48).to(dtype), torch.randn_like(found)
    summed = layer(inputs, entry_bias, residual)
    torch.testing.assert_close(summed, found + entry_bias[:, :, None, None] + residual)


def test_channel_of_zeros_stays_zero() -> None:
    conv = nn.Conv2d(16, 16, 3).requires_grad_(False)
    conv.weight[3], conv.bias[3] = 0, 0  # type: ignore[index]
    found = quantize_conv(conv, 1.0)(torch.randn(1, 16, 4, 4))
    assert found.isfinite().all() and not found[:, 3].any()


def test_weights_in_winograds_basis_are_restored_first() -> None:
    conv = nn.Conv2d(64, 64, 3, padding=1).half()
    direct, restored = quantize_conv(conv, 2.0), quantize_conv(WinogradConv(conv), 2.0)
    assert restored.weight.is_contiguous(memory_format=torch.channels_last)
    inputs = torch.randn(1, 64, 5, 5).half()
    assert decibels(direct(inputs), restored(inputs)) > 35, "few numbers round to another neighbour"


def test_only_square_convolutions_of_many_channels() -> None:
    suitable = nn.Conv2d(32, 16, 3), nn.Conv2d(32, 16, 2, stride=2, padding=1), WinogradConv(nn.Conv2d(32, 16, 3))
    others = (
        nn.Linear(32, 16), nn.Conv2d(4, 16, 3), nn.Conv2d(32, 4, 3), nn.Conv2d(32, 16, 1), nn.Conv2d(32, 16, (3, 1)),
        nn.Conv2d(32, 16, 3, stride=(1, 2)), nn.Conv2d(32, 16, 3, padding=(1, 0)), nn.Conv2d(32, 16, 3, padding="same"),
        nn.Conv2d(32, 16, 3, dilation=2), nn.Conv2d(32, 16, 3, groups=2), nn.Conv2d(32, 16, 3, bias=False),
        nn.Conv2d(32, 16, 3, padding=1, padding_mode="reflect"),
    )  # fmt: skip
    for module in (*suitable, *others):
        assert can_quantize_conv(module) == (module in suitable), module


@pytest.mark.parametrize(("repeats", "layers"), [(1, ("conv1", "conv2")), (2, ("conv1", "conv2")), (2, ("conv2",))])
def test_resnet_passes_bias_and_residual_to_the_convolutions(repeats: int, layers: tuple[str, ...]) -> None:
    """Also where the batch of the time embedding is twice that of the pixels, as guided UNets begin.

    The pixels are repeated before the first convolution. When they were repeated after it, the compiler stored them in
    a layout that the kernels do not read.
    """
    exact = nn.Module()
    exact.norm1, exact.norm2 = nn.GroupNorm(4, 32), nn.GroupNorm(4, 48)
    exact.conv1, exact.conv2 = nn.Conv2d(32, 48, 3, padding=1), nn.Conv2d(48, 48, 3, padding=1)
    exact.conv_shortcut = nn.Conv2d(32, 48, 1)
    quantized = nn.Module()
    for name, child in exact.named_children():
        setattr(quantized, name, quantize_conv(child, 4.0) if name in layers else child)
    hidden, bias = torch.randn(2, 32, 6, 5), 3 * torch.randn(2 * repeats, 48)
    batches = []
    with torch.no_grad():
        expected = blocks.resnet(exact, hidden, bias)
        for conv in (quantized.conv1, quantized.conv2):
            conv.register_forward_pre_hook(lambda _, inputs: batches.append(inputs[0].shape[0]))
        found = blocks.resnet(quantized, hidden, bias)
    assert found.shape == expected.shape and 25 < decibels(expected, found) < 45
    assert batches == [2 * repeats] * 2


# -- the policy ------------------------------------------------------------------------------------------------------


def test_policy_quantizes_convolutions_by_name_except_kept_ones() -> None:
    """Policies without convolutions keep their digests."""
    layers = ["down.0.conv1", "down.0.conv2", "up.0.conv1"]
    policy = Policy(convolutions=["*.conv1", "down.*"], keep_fp16=["up.*"])
    assert policy.select_convolutions(layers) == ["down.0.conv1", "down.0.conv2"]
    assert Policy().select_convolutions(layers) == policy.select_convolutions(layers, of_vae=True) == []
    of_vae = Policy(vae_convolutions=["*"], keep_fp16=["up.*"]).select_convolutions(layers, of_vae=True)
    assert of_vae == layers[:2]
    assert not {"convolutions", "vae_convolutions"} & set(Policy().entries)
    assert EVERY.entries["convolutions"] == ["*"] and "vae_convolutions" not in EVERY.entries


def test_refuses_convolutions_that_match_nothing_and_int8() -> None:
    with pytest.raises(BadPolicy, match=r"'\*\.conv9' of convolutions matches no layer"):
        Policy(convolutions=["*.conv9"]).check_patterns(["mid.conv1"], ["decoder.conv9"])
    with pytest.raises(BadPolicy, match=r"'mid\.\*' of vae_convolutions matches no layer"):
        Policy(vae_convolutions=["mid.*"]).check_patterns(["mid.conv1"], ["decoder.conv1"])
    Policy(keep_fp16=["mid.*", "decoder.*"]).check_patterns(["mid.conv1"], ["decoder.conv1"])
    for entry in ("convolutions", "vae_convolutions"):
        with pytest.raises(BadPolicy, match=rf"int8 has no {entry}, but this one has \['\*'\]"):
            Policy.model_validate({entry: ["*"], "smoothing": 0.8}).check_precision(INT8)


# -- a network -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def network() -> Network:
    return load_network(Checkpoint(MODEL_FOLDER), "unet", FP32, plain=True)


@pytest.fixture(scope="module")
def ranges(network: Network) -> dict[str, InputRange]:
    return ranges_of(network, unet_inputs(network, side=16))


@pytest.fixture(scope="module")
def quantized(network: Network, ranges: dict[str, InputRange]) -> Network:
    return quantize_network(network, ranges, EVERY)[0]


def test_first_last_and_small_convolutions_stay_in_fp16(
    network: Network, ranges: dict[str, InputRange], quantized: Network
) -> None:
    convolutions = {name for name, tensor in network.tensors().items() if tensor.ndim == 4}
    kept = {name for name in convolutions if quantized.tensors()[name].dtype == torch.float32}
    assert kept == {name for name in convolutions if name.startswith("conv_") or ".conv_shortcut." in name}
    assert any(".phases." in name for name in convolutions - kept) and len(convolutions - kept) > 10
    layers = {layer.name: layer for layer in quantize_network(network, ranges, EVERY)[1]}
    for name in convolutions - kept:
        layer = layers[name.removesuffix(".weight")]
        assert layer.weight_decibels > 25 and layer.input_decibels is not None and layer.input_decibels > 25
        scale = quantized.tensors()[f"{layer.name}.input_scale"]
        assert float(scale) == pytest.approx(layer.clip / E4M3_MAX)


def test_quantized_network_predicts_nearly_the_same_noise(network: Network, quantized: Network) -> None:
    with torch.inference_mode():
        [exact], [found] = (one.module(*unet_inputs(network, side=16)) for one in (network, quantized))
    assert 15 < decibels(exact, found) < 60


def test_code_version_is_part_of_keys_of_such_networks_only(
    network: Network, ranges: dict[str, InputRange], quantized: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the entry of the policy no convolution is quantized."""
    linears = quantize_network(network, ranges, Policy())[0]
    assert linears.clips and not any(isinstance(module, QuantizedConv) for module in linears.module.modules())

    def keys() -> list[tuple[str, str]]:
        target, bucket = build_target(), dynamic_bucket(network.multiple)
        return [(engine_key(one, target, bucket), graph_key(one)) for one in (network, linears, quantized)]

    before = keys()
    monkeypatch.setattr("engine_builder.backends.aot_inductor.compile.CONV_VERSION", 99)
    monkeypatch.setattr("engine_builder.backends.onnx.export_graph.CONV_VERSION", 99)
    after = keys()
    assert before[:2] == after[:2]
    assert before[2][0] != after[2][0] and before[2][1] != after[2][1]
