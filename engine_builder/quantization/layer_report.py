"""The error and the gain of each quantized layer of a UNet, to decide which layers a policy keeps in fp16."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor, nn

from engine_builder.building.graph_timing import time_on_gpu
from engine_builder.kernels.fp8_conv import QuantizedConv
from engine_builder.kernels.fp8_linear import QuantizedLinear
from engine_builder.kernels.int8_linear import Int8Linear
from engine_builder.kernels.kernel_form import plain_operations
from engine_builder.networks.network import Network, public_name
from engine_builder.quantization.quantization_plan import Quantization
from engine_builder.quantization.quantize import QuantizedLayer

_WARM_UPS, _RUNS = 3, 20
_QUANTIZED = (QuantizedLinear, Int8Linear, QuantizedConv)
_QuantizedModule = QuantizedLinear | Int8Linear | QuantizedConv


@dataclass(frozen=True)
class LayerGain:
    """One quantized layer, and the milliseconds of its product alone: without and with quantization.

    shape: of its input.
    """

    layer: QuantizedLayer
    shape: tuple[int, ...]
    exact_milliseconds: float
    quantized_milliseconds: float


def time_products(layer: _QuantizedModule, shape: tuple[int, ...]) -> tuple[float, float]:
    """Return the milliseconds of the product in half precision and in 8 bits, on random inputs that are 8-bit already.

    shape: of the inputs. A convolution in half precision is that of PyTorch, also where engines in fp16 use Winograd's.
    """
    weight = layer.weight.to(layer.dtype)
    inputs = torch.randn(shape, device=weight.device).to(layer.dtype)
    if isinstance(layer, QuantizedConv):
        inputs = inputs.contiguous(memory_format=torch.channels_last)
        exact = partial(F.conv2d, inputs, weight, layer.bias, layer.stride, layer.padding)
    else:
        exact = partial(F.linear, inputs, weight, layer.bias)
    quantized = layer.quantize_inputs(inputs)
    with torch.inference_mode():
        return _milliseconds(exact, weight.is_cuda), _milliseconds(lambda: layer(quantized), weight.is_cuda)


def measure_gains(
    network: Network,
    quantization: Quantization,
    inputs: Mapping[str, Tensor],
    time_layer: Callable[[_QuantizedModule, tuple[int, ...]], tuple[float, float]] = time_products,
) -> list[LayerGain]:
    """Quantize a UNet in half precision, and time each quantized layer at the shape that it gets from `inputs`.

    time_layer: returns the milliseconds of a layer without and with quantization.
    Returns the layers that save the least time first. Layers of equal shapes are timed once.
    """
    quantized, layers = quantization.apply(network)
    shapes = _input_shapes(quantized, inputs)
    times: dict[tuple[object, ...], tuple[float, float]] = {}
    gains = []
    for layer in layers:
        module = _find(quantized.module, layer.name)
        stride = module.stride if isinstance(module, QuantizedConv) else 1
        key = (shapes[layer.name], module.weight.shape, module.bias is None, stride)
        if key not in times:
            times[key] = time_layer(module, shapes[layer.name])
        gains.append(LayerGain(layer, shapes[layer.name], *times[key]))
    return sorted(gains, key=lambda gain: (gain.exact_milliseconds - gain.quantized_milliseconds, gain.layer.name))


def gains_table(component: str, gains: list[LayerGain]) -> Table:
    """Return the gains as a table for a console."""
    table = Table(box=SIMPLE_HEAD, title=f"{component}: quantized layers, those that save the least time first")
    table.add_column("layer", overflow="fold")
    for heading in ("input", "inputs,\nSQNR", "weights,\nSQNR", "fp16", "8 bits", "gain"):
        table.add_column(heading, justify="right", no_wrap=True)
    for gain in gains:
        before, after = gain.exact_milliseconds, gain.quantized_milliseconds
        table.add_row(
            gain.layer.name, "x".join(map(str, gain.shape)), _decibels(gain.layer.input_decibels),
            _decibels(gain.layer.weight_decibels), f"{1000 * before:.0f} us", f"{1000 * after:.0f} us",
            f"{before / after:.2f}x",
        )  # fmt: skip
    return table


def _decibels(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.1f} dB"


def _input_shapes(network: Network, inputs: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each quantized layer's input in one run of the network."""
    shapes: dict[str, tuple[int, ...]] = {}

    def observer(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, given: shapes.__setitem__(name, tuple(given[0].shape))

    handles = [
        module.register_forward_pre_hook(observer(public_name(name)))
        for name, module in network.module.named_modules()
        if isinstance(module, _QUANTIZED)
    ]
    try:
        with torch.inference_mode(), plain_operations():
            network.module(*(inputs[spec.name] for spec in network.signature.inputs))
    finally:
        for handle in handles:
            handle.remove()
    return shapes


def _find(module: nn.Module, layer: str) -> _QuantizedModule:
    found = next(child for name, child in module.named_modules() if public_name(name) == layer)
    assert isinstance(found, _QUANTIZED)
    return found


def _milliseconds(work: Callable[[], object], on_gpu: bool) -> float:
    """Return the median of some runs after warm-ups. On a GPU they run in a CUDA graph, without the host's time."""
    if on_gpu:
        return statistics.median(time_on_gpu([work])) / 1000
    milliseconds = []
    for number in range(_WARM_UPS + _RUNS):
        started = time.perf_counter()
        work()
        if number >= _WARM_UPS:
            milliseconds.append((time.perf_counter() - started) * 1000)
    return statistics.median(milliseconds)
