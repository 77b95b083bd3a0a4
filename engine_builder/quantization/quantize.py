"""Turn a network in fp16 into one whose linears, or also convolutions, have 8 bits, by a policy and a calibration."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from engine_builder.kernels.fp8_conv import can_quantize_conv, conv_weight, quantize_conv
from engine_builder.kernels.fp8_linear import can_quantize, quantize_linear
from engine_builder.kernels.int8_linear import quantize_linear as quantize_linear_to_int8
from engine_builder.kernels.int8_linear import smoothing_scales
from engine_builder.kernels.winograd import WinogradConv
from engine_builder.networks.network import Network, public_name
from engine_builder.quantization.policy import BadPolicy, Policy
from engine_builder.quantization.ranges import InputRange, bin_centers, to_e4m3
from engine_builder.quantization.record import CalibrationError
from model.pipeline.spec import VAE_DECODER
from model.store.precision import FP8, INT8, Precision
from model.weights.int8 import INT8_MAX


@dataclass(frozen=True)
class QuantizedLayer:
    """One layer of a quantized network.

    clip: the absolute input that is mapped to the largest number of 8 bits, in INT8 the input after smoothing.
    input_decibels, weight_decibels: the ratio of the signal to the error of the quantization, of the counted inputs and
    of the weights. Inputs in INT8 have none: a calibration counts them before smoothing.
    """

    name: str
    clip: float
    input_decibels: float | None
    weight_decibels: float


def quantize_network(
    network: Network, ranges: Mapping[str, InputRange], policy: Policy, precision: Precision = FP8
) -> tuple[Network, list[QuantizedLayer]]:
    """Return the network in FP8 or INT8, and its quantized layers in order. The given network is not changed.

    ranges: of the network's inputs by layer. Raises CalibrationError if a layer has no range, and BadPolicy if no layer
    is quantized.
    """
    clips, smoothing = {}, {}
    weights = _selected_weights(network, policy)
    if not weights:
        raise BadPolicy(f"The policy quantizes no layer of {network.component}.")
    for layer, weight in weights.items():
        observed = ranges.get(layer)
        if observed is None or len(observed.channel_maxima) != weight.shape[1]:
            raise CalibrationError(f"The calibration of {network.component} does not fit its layer {layer}.")
        if policy.smoothing is None:
            clips[layer] = observed.clip(policy.clip, policy.percentile)
        else:
            maxima = observed.channel_maxima.to(weight.device)
            smoothing[layer] = smoothing_scales(weight, maxima, policy.smoothing)
            clips[layer] = float((maxima / smoothing[layer]).max())
    quantized = quantize_layers(network, clips, precision, smoothing)
    tensors = quantized.tensors()
    layers = []
    for layer, clip in clips.items():
        weight, scale = (tensors[f"{layer}.{name}"].double() for name in ("weight", "weight_scale"))
        exact = weights[layer].double()
        if precision == INT8:
            exact = exact * tensors[f"{layer}.input_scale"].double()
        if scale.ndim:  # one for each output
            scale = scale.reshape(-1, *[1] * (exact.ndim - 1))
        input_decibels = None if precision == INT8 else _input_decibels(ranges[layer], clip)
        layers.append(QuantizedLayer(layer, clip, input_decibels, _decibels(exact, weight * scale)))
    return quantized, layers


def quantize_layers(
    network: Network,
    clips: Mapping[str, float],
    precision: Precision = FP8,
    smoothing: Mapping[str, torch.Tensor] | None = None,
) -> Network:
    """Return the network with the layers of `clips` in FP8 or INT8. The given network is not changed.

    clips: by layer, the absolute input that is mapped to the largest number of 8 bits. smoothing: of INT8, by layer,
    what each input channel is divided by before that, float32 [in]; default: 1.
    """
    module = copy.deepcopy(network.module, {id(tensor): tensor for tensor in network.module.parameters()})
    for name, layer in list(module.named_modules()):
        if (clip := clips.get(public_name(name))) is not None:
            parent, _, leaf = name.rpartition(".")
            replacement: nn.Module
            if isinstance(layer, nn.Conv2d | WinogradConv):
                assert precision == FP8
                replacement = quantize_conv(layer, clip)
            else:
                assert isinstance(layer, nn.Linear)
                if precision == INT8:
                    channels = (smoothing or {}).get(public_name(name), torch.ones(layer.in_features))
                    replacement = quantize_linear_to_int8(layer, channels * (clip / INT8_MAX))
                else:
                    replacement = quantize_linear(layer, clip)
            setattr(module.get_submodule(parent), leaf, replacement)
    return replace(network, module=module, precision=precision, clips=dict(clips))


def _selected_weights(network: Network, policy: Policy) -> dict[str, torch.Tensor]:
    """Return the weights of the layers that a policy quantizes, in the order of the network's modules."""
    modules = {public_name(name): module for name, module in network.module.named_modules()}
    is_vae = network.component == VAE_DECODER
    linears = () if is_vae else policy.select(name for name, module in modules.items() if can_quantize(module))
    convolutions = policy.select_convolutions(
        (name for name, module in modules.items() if can_quantize_conv(module)), of_vae=is_vae
    )
    selected = {*linears, *convolutions}
    weights = {}
    for name, module in modules.items():
        if name in selected:
            weights[name] = (
                conv_weight(module) if isinstance(module, nn.Conv2d | WinogradConv) else module.weight.detach()
            )
    return weights


def _input_decibels(observed: InputRange, clip: float) -> float:
    centers, counts = bin_centers(), observed.counts.cpu().double()
    error = (counts * (to_e4m3(centers, clip) - centers).square()).sum()
    return _ratio((counts * centers.square()).sum(), error)


def _decibels(exact: torch.Tensor, rounded: torch.Tensor) -> float:
    return _ratio(exact.square().sum(), (rounded - exact).square().sum())


def _ratio(signal: torch.Tensor, error: torch.Tensor) -> float:
    return float(10 * torch.log10(signal / error)) if float(error) else float("inf")
