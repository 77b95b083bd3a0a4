"""Convolutions in FP8: the arithmetic, the policy, networks, keys and reports. The CPU convolves the same numbers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engine_builder.backends.aot_inductor.compile import build_target, dynamic_bucket, engine_key
from engine_builder.backends.onnx.export import graph_key
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.networks import blocks
from engine_builder.networks.fp8_conv import QuantizedConv, can_quantize_conv, quantize_conv
from engine_builder.networks.fp8_conv_tiles import choose_tiles
from engine_builder.networks.network import Network, load_network
from engine_builder.networks.winograd import WinogradConv
from engine_builder.quantization.calibrate import observing
from engine_builder.quantization.layer_report import measure_gains, time_products
from engine_builder.quantization.plan import Quantization
from engine_builder.quantization.policy import BadPolicy, Policy
from engine_builder.quantization.quantize import quantize_network
from engine_builder.quantization.ranges import InputRange
from model.store.precision import FP16, FP32, INT8
from model.weights.fp8 import E4M3_MAX
from tests.support.repository import MODEL_FOLDER

EVERY = Policy(convolutions=["*"])


def decibels(exact: torch.Tensor, found: torch.Tensor) -> float:
    error = (exact.double() - found.double()).square().sum()
    return float(10 * torch.log10(exact.double().square().sum() / error))


# -- the arithmetic --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 1, 1), (3, 2, 1), (2, 1, 1), (3, 1, 0)])
def test_convolution_is_that_of_the_rounded_numbers(dtype: torch.dtype, kernel: int, stride: int, padding: int) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(32, 48, kernel, stride, padding).to(dtype).requires_grad_(False)
    conv.weight[7] *= 1000  # one scale for all channels would round the others to nothing
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
    torch.manual_seed(0)
    conv = nn.Conv2d(64, 64, 3, padding=1).half()
    direct, restored = quantize_conv(conv, 2.0), quantize_conv(WinogradConv(conv), 2.0)
    assert restored.weight.is_contiguous(memory_format=torch.channels_last)
    inputs = torch.randn(1, 64, 5, 5).half()
    assert decibels(direct(inputs), restored(inputs)) > 35, "few numbers round to another neighbour"


@pytest.mark.parametrize(
    ("module", "suits"),
    [
        (nn.Conv2d(32, 16, 3), True),
        (nn.Conv2d(32, 16, 2, stride=2, padding=1), True),
        (nn.Conv2d(4, 16, 3), False),
        (nn.Conv2d(32, 4, 3), False),
        (nn.Conv2d(32, 16, 1), False),
        (nn.Conv2d(32, 16, (3, 1)), False),
        (nn.Conv2d(32, 16, 3, stride=(1, 2)), False),
        (nn.Conv2d(32, 16, 3, padding=(1, 0)), False),
        (nn.Conv2d(32, 16, 3, padding="same"), False),
        (nn.Conv2d(32, 16, 3, dilation=2), False),
        (nn.Conv2d(32, 16, 3, groups=2), False),
        (nn.Conv2d(32, 16, 3, padding=1, padding_mode="reflect"), False),
        (nn.Conv2d(32, 16, 3, bias=False), False),
        (WinogradConv(nn.Conv2d(32, 16, 3)), True),
        (nn.Linear(32, 16), False),
    ],
)
def test_only_square_convolutions_of_many_channels(module: nn.Module, suits: bool) -> None:
    assert can_quantize_conv(module) == suits


@pytest.mark.parametrize("layers", [("conv1", "conv2"), ("conv2",)])
@pytest.mark.parametrize("repeats", [1, 2])
def test_resnet_passes_bias_and_residual_to_the_convolutions(repeats: int, layers: tuple[str, ...]) -> None:
    """Also where the batch of the time embedding is twice that of the pixels, as guided UNets begin.

    The pixels are repeated before the first convolution. When they were repeated after it, the compiler stored them in
    a layout that the kernels do not read.
    """
    torch.manual_seed(0)
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


# -- the tiles -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pixels", "depth", "channels", "capability", "tiles"),
    [
        (2 * 128 * 128, 320, 320, (9, 0), "256x128x64 w8 s4"),
        (2 * 64 * 64, 320, 640, (9, 0), "128x128x64 w8 s4"),
        (2 * 64 * 64, 640, 640, (9, 0), "128x128x128 w8 s3"),
        (2 * 32 * 32, 640, 640, (9, 0), "64x128x128 w4 s4"),
        (2 * 32 * 32, 2560, 1280, (9, 0), "128x256x128 w8 s3"),
        (2 * 38 * 26, 1280, 1280, (9, 0), "128x256x128 w8 s3"),
        (512 * 512, 256, 256, (9, 0), "128x256x128 w8 s3"),
        (2 * 128 * 128, 640, 320, (9, 0), "256x128x128 w8 s3"),
        (1024 * 1024, 256, 128, (10, 0), "256x128x128 w8 s3"),
        (2 * 32 * 32, 2560, 1280, (8, 9), "128x128x128 w8 s3"),
        (1024 * 1024, 256, 128, (12, 0), "128x128x128 w8 s3"),
        (2 * 128 * 128, 320, 320, (8, 9), "128x128x64 w8 s4"),
    ],
)
def test_tiles_of_fp8_convolutions_by_shape_and_gpu(
    pixels: int, depth: int, channels: int, capability: tuple[int, int], tiles: str
) -> None:
    """On an H100 the fastest that were measured. Other GPUs have less shared memory."""
    assert str(choose_tiles(pixels, depth, channels, capability)) == tiles


# -- the policy ------------------------------------------------------------------------------------------------------


def test_policy_quantizes_convolutions_by_name_except_kept_ones() -> None:
    layers = ["down.0.conv1", "down.0.conv2", "up.0.conv1"]
    policy = Policy(convolutions=["*.conv1", "down.*"], keep_fp16=["up.*"])
    assert policy.select_convolutions(layers) == ["down.0.conv1", "down.0.conv2"]
    assert Policy().select_convolutions(layers) == []
    assert policy.select_convolutions(layers, of_vae=True) == []
    of_vae = Policy(vae_convolutions=["*"], keep_fp16=["up.*"]).select_convolutions(layers, of_vae=True)
    assert of_vae == [layer for layer in layers if not layer.startswith("up.")]


def test_policies_without_convolutions_keep_their_digests() -> None:
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
def inputs(network: Network) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {"sample": torch.randn(2, 4, 16, 16, generator=generator)}
    for spec in network.signature.inputs[1:]:
        found[spec.name] = torch.randn([2, *(int(size) for size in spec.shape[1:])], generator=generator)
    return found


@pytest.fixture(scope="module")
def ranges(network: Network, inputs: dict[str, torch.Tensor]) -> dict[str, InputRange]:
    found: dict[str, InputRange] = {}
    with observing(network.module, found), torch.inference_mode():
        network.module(*inputs.values())
    return found


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


def test_without_the_entry_no_convolution_is_quantized(network: Network, ranges: dict[str, InputRange]) -> None:
    linears = quantize_network(network, ranges, Policy())[0]
    assert not any(isinstance(module, QuantizedConv) for module in linears.module.modules())
    assert linears.clips


def test_quantized_network_predicts_nearly_the_same_noise(
    network: Network, inputs: dict[str, torch.Tensor], quantized: Network
) -> None:
    with torch.inference_mode():
        [exact], [found] = network.module(*inputs.values()), quantized.module(*inputs.values())
    assert 15 < decibels(exact, found) < 60


def test_code_version_is_part_of_keys_of_such_networks_only(
    network: Network, ranges: dict[str, InputRange], quantized: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keys() -> list[tuple[str, str]]:
        networks = (network, quantize_network(network, ranges, Policy())[0], quantized)
        target, bucket = build_target(), dynamic_bucket(network.multiple)
        return [(engine_key(one, target, bucket), graph_key(one)) for one in networks]

    before = keys()
    monkeypatch.setattr("engine_builder.backends.aot_inductor.compile.CONV_VERSION", 99)
    monkeypatch.setattr("engine_builder.backends.onnx.export.CONV_VERSION", 99)
    after = keys()
    assert before[:2] == after[:2]
    assert before[2][0] != after[2][0] and before[2][1] != after[2][1]


def test_report_times_convolutions_of_different_strides(inputs: dict[str, torch.Tensor]) -> None:
    """Layers of equal shapes are timed once, and the stride is part of the shape."""
    network = load_network(Checkpoint(MODEL_FOLDER), "unet", FP16)
    half = {name: tensor.half() for name, tensor in inputs.items()}
    found: dict[str, InputRange] = {}
    with observing(network.module, found), torch.inference_mode():
        network.module(*half.values())
    timed: list[tuple[int, ...]] = []

    def time_layer(module: object, shape: tuple[int, ...]) -> tuple[float, float]:
        if isinstance(module, QuantizedConv):
            timed.append((*shape, *module.weight.shape, module.stride))
        return 1.0, 0.5

    gains = measure_gains(network, Quantization(EVERY, {"unet": "key"}, {"unet": found}), half, time_layer)
    convolutions = [gain for gain in gains if len(gain.shape) == 4]
    assert len(timed) == len(set(timed)) < len(convolutions)
    assert {stride for *_, stride in timed} == {1, 2}
    assert all(
        milliseconds > 0 for milliseconds in time_products(quantize_conv(nn.Conv2d(16, 16, 3), 1.0), (1, 16, 4, 4))
    )
