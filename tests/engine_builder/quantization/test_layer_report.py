"""The table of `preheat build --precision fp8 --report`: shape, error and gain of each quantized layer."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from torch import nn

from engine_builder.backends.aot_inductor.compile import example_inputs
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.kernels.fp8_conv import QuantizedConv, quantize_conv
from engine_builder.kernels.fp8_linear import QuantizedLinear, quantize_linear
from engine_builder.kernels.kernel_form import plain_operations
from engine_builder.networks.network import load_network
from engine_builder.quantization.layer_report import LayerGain, gains_table, measure_gains, time_products
from engine_builder.quantization.policy import Policy
from engine_builder.quantization.quantization_plan import Quantization
from engine_builder.quantization.quantize import QuantizedLayer
from model.store.precision import FP16
from tests.support.quantization import ranges_of
from tests.support.repository import MODEL_FOLDER


class FixedTimes:
    """Fixed milliseconds of a layer by its features: wide outputs save the most, and wide inputs lose time."""

    def __init__(self) -> None:
        self.timed: list[tuple[object, ...]] = []

    def __call__(self, layer: QuantizedLinear | QuantizedConv, shape: tuple[int, ...]) -> tuple[float, float]:
        stride = layer.stride if isinstance(layer, QuantizedConv) else 0
        self.timed.append((shape, tuple(layer.weight.shape), layer.bias is not None, stride))
        outputs, inputs = layer.weight.shape[:2]
        return outputs / 16, inputs / 16


def gains_of(folder: Path, policy: Policy, times: FixedTimes) -> list[LayerGain]:
    """Return the gains of a UNet at batch 2 and 96x64."""
    network = load_network(Checkpoint(folder), "unet", FP16, "cpu")
    inputs = example_inputs(network.signature, 2, 64, 96, "cpu")
    with plain_operations():
        ranges = ranges_of(network, [inputs[spec.name] for spec in network.signature.inputs])
    return measure_gains(network, Quantization(policy, {"unet": "a key"}, {"unet": ranges}), inputs, times)


@pytest.fixture(scope="module")
def gains(toy_folder: Path) -> list[LayerGain]:
    """The gains of the toy's UNet: 384 tokens of 16 channels."""
    return gains_of(toy_folder, Policy(keep_fp16=["*.proj_in", "*.proj_out", "mid_block.*"]), FixedTimes())


def test_every_quantized_layer_has_its_shape_and_error(gains: list[LayerGain]) -> None:
    by_name = {gain.layer.name: gain for gain in gains}
    assert len(by_name) == len(gains) == 18
    assert not any(".proj_" in name or name.startswith("mid_block.") for name in by_name)
    for name, gain in by_name.items():
        assert gain.shape == (2, 384, 64 if name.endswith(".ff.net.2") else 16)
        assert 25 < gain.layer.input_decibels < 40 and 25 < gain.layer.weight_decibels < 40, "of E4M3: about 31 dB"
        assert gain.quantized_milliseconds == gain.shape[-1] / 16


def test_layers_that_save_the_least_time_come_first(gains: list[LayerGain]) -> None:
    saved = [gain.exact_milliseconds - gain.quantized_milliseconds for gain in gains]
    assert saved == sorted(saved) and len(set(saved)) > 2
    assert gains[0].layer.name.endswith(".ff.net.2") and gains[-1].layer.name.endswith(".interleaved")


def test_layers_of_equal_shapes_are_timed_once() -> None:
    """The stride of a convolution is part of its shape."""
    times = FixedTimes()
    gains = gains_of(MODEL_FOLDER, Policy(convolutions=["*"]), times)
    assert len(times.timed) == len(set(times.timed)) < len(gains)
    assert {stride for *_, stride in times.timed} == {0, 1, 2}


def test_times_both_products_of_a_layer() -> None:
    linear, conv = quantize_linear(nn.Linear(16, 16).half(), 1.0), quantize_conv(nn.Conv2d(16, 16, 3), 1.0)
    assert all(milliseconds > 0 for milliseconds in time_products(linear, (2, 3, 16)))
    assert all(milliseconds > 0 for milliseconds in time_products(conv, (1, 16, 4, 4)))


def test_table_shows_the_numbers_of_a_layer() -> None:
    gain = LayerGain(QuantizedLayer("mid.to_q", 3.0, 31.25, 30.0), (2, 384, 16), 0.3, 0.2)
    file = io.StringIO()
    Console(file=file, width=120).print(gains_table("unet", [gain]))
    assert "mid.to_q 2x384x16 31.2 dB 30.0 dB 300 us 200 us 1.50x" in " ".join(file.getvalue().split())
