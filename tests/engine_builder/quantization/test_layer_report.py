"""The table of `preheat build --precision fp8 --report`: shape, error and gain of each quantized layer."""

import io

import pytest
import torch
from rich.console import Console
from torch import nn

from engine_builder.backends.aot_inductor.compile import example_inputs
from engine_builder.building.build_plan import BuildPlan
from engine_builder.networks.fp8_linear import QuantizedLinear, quantize_linear
from engine_builder.networks.kernel_form import plain_operations
from engine_builder.networks.network import load_network
from engine_builder.quantization.calibrate import observing
from engine_builder.quantization.layer_report import LayerGain, gains_table, measure_gains, time_products
from engine_builder.quantization.plan import Quantization
from engine_builder.quantization.policy import Policy
from engine_builder.quantization.quantize import QuantizedLayer
from engine_builder.quantization.ranges import InputRange
from model.store.precision import FP16


class FixedTimes:
    """Fixed milliseconds of a layer by its features: wide outputs save the most, and wide inputs lose time."""

    def __init__(self) -> None:
        self.timed: list[tuple[int, int, bool]] = []  # inputs, outputs, with a bias

    def __call__(self, linear: QuantizedLinear, shape: tuple[int, ...]) -> tuple[float, float]:
        outputs, inputs = linear.weight.shape
        assert shape == (2, 384, inputs)
        self.timed.append((inputs, outputs, linear.bias is not None))
        return outputs / 16, inputs / 16


@pytest.fixture(scope="module")
def times() -> FixedTimes:
    return FixedTimes()


@pytest.fixture(scope="module")
def gains(toy_plan: BuildPlan, times: FixedTimes) -> list[LayerGain]:
    """The gains of the toy's UNet at batch 2 and 96x64, which are 384 tokens of 16 channels."""
    network = load_network(toy_plan.base, "unet", FP16, "cpu")
    inputs = example_inputs(network.signature, 2, 64, 96, "cpu")
    ranges: dict[str, InputRange] = {}
    with torch.inference_mode(), plain_operations(), observing(network.module, ranges):
        network.module(*(inputs[spec.name] for spec in network.signature.inputs))
    policy = Policy(keep_fp16=["*.proj_in", "*.proj_out", "mid_block.*"])
    return measure_gains(network, Quantization(policy, {"unet": "a key"}, {"unet": ranges}), inputs, times)


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


def test_layers_of_equal_shapes_are_timed_once(gains: list[LayerGain], times: FixedTimes) -> None:
    assert len(times.timed) == len(set(times.timed)) == 5 < len(gains)


def test_times_both_products_of_a_layer() -> None:
    linear = quantize_linear(nn.Linear(16, 16).half(), 1.0)
    assert all(milliseconds > 0 for milliseconds in time_products(linear, (2, 3, 16)))


def test_table_shows_the_numbers_of_a_layer() -> None:
    gain = LayerGain(QuantizedLayer("mid.to_q", 3.0, 31.25, 30.0), (2, 384, 16), 0.3, 0.2)
    console = Console(file=io.StringIO(), width=120)
    console.print(gains_table("unet", [gain]))
    assert isinstance(console.file, io.StringIO)
    cells = "mid.to_q 2x384x16 31.2 dB 30.0 dB 300 us 200 us 1.50x"
    assert cells in " ".join(console.file.getvalue().split())
