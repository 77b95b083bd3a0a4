"""Turn a network in fp16 into one whose linears compute in FP8, by a policy and a calibration."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from engine_builder.networks.network import Network, public_name
from engine_builder.quantization.linear import QuantizedLinear, can_quantize, quantize_linear
from engine_builder.quantization.policy import Policy
from engine_builder.quantization.ranges import InputRange, bin_centers, to_e4m3
from engine_builder.quantization.record import CalibrationError
from model.store.precision import FP8


@dataclass(frozen=True)
class QuantizedLayer:
    """One layer of a quantized network.

    clip: the absolute input that is mapped to E4M3's largest number. input_decibels, weight_decibels: the ratio of the
    signal to the error of the quantization, of the counted inputs and of the weights.
    """

    name: str
    clip: float
    input_decibels: float
    weight_decibels: float


def quantize_network(
    network: Network, ranges: Mapping[str, InputRange], policy: Policy
) -> tuple[Network, list[QuantizedLayer]]:
    """Return the network in FP8, and its quantized layers in order. The given network is not changed.

    ranges: of the network's inputs by layer. Raises CalibrationError if a layer has no range.
    """
    module = copy.deepcopy(network.module, {id(tensor): tensor for tensor in network.module.parameters()})
    linears = {public_name(name): name for name, layer in module.named_modules() if can_quantize(layer)}
    layers = []
    for public in policy.select(linears):
        linear = module.get_submodule(linears[public])
        assert isinstance(linear, nn.Linear)
        observed = ranges.get(public)
        if observed is None or len(observed.channel_maxima) != linear.in_features:
            raise CalibrationError(f"The calibration of {network.component} does not fit its layer {public}.")
        clip = observed.clip(policy.clip, policy.percentile)
        quantized = quantize_linear(linear, clip)
        _replace(module, linears[public], quantized)
        layers.append(
            QuantizedLayer(public, clip, _input_decibels(observed, clip), _weight_decibels(linear, quantized))
        )
    return replace(network, module=module, precision=FP8), layers


def _replace(module: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(parent), leaf, layer)


def _input_decibels(observed: InputRange, clip: float) -> float:
    centers, counts = bin_centers(), observed.counts.cpu().double()
    error = (counts * (to_e4m3(centers, clip) - centers).square()).sum()
    return _decibels((counts * centers.square()).sum(), error)


def _weight_decibels(linear: nn.Linear, quantized: QuantizedLinear) -> float:
    exact = linear.weight.detach().double()
    error = quantized.weight.double() * quantized.weight_scale.double() - exact
    return _decibels(exact.square().sum(), error.square().sum())


def _decibels(signal: torch.Tensor, error: torch.Tensor) -> float:
    return float(10 * torch.log10(signal / error)) if float(error) else float("inf")
