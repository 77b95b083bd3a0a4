"""Compare each layer of a quantized network with the same layer of the reference, on the reference's inputs."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine_builder.kernels.kernel_form import plain_operations
from engine_builder.networks.network import public_name
from engine_builder.quantization.validation.distances import NotComparable, decibels, energies


@dataclass
class LayerError:
    """The energies of a layer's outputs and of their errors, summed over its calls. `worst`: dB of its worst call."""

    signal: float = 0.0
    error: float = 0.0
    worst: float = float("inf")
    calls: int = 0

    def add(self, signal: float, error: float) -> None:
        """Add one call."""
        self.signal, self.error, self.calls = self.signal + signal, self.error + error, self.calls + 1
        self.worst = min(self.worst, decibels(signal, error))

    @property
    def decibels(self) -> float:
        """The SQNR of all calls together."""
        return decibels(self.signal, self.error)


@contextmanager
def comparing_layers(
    reference: nn.Module, quantized: nn.Module, names: Collection[str]
) -> Iterator[dict[str, LayerError]]:
    """Compare layers while the reference runs. Yields the errors by name, which each call of the reference updates.

    Each quantized layer gets the reference layer's input (teacher forcing), so the errors of earlier layers do not
    count. `names`: of layers of both modules, without the prefix of a wrapper. The reference runs its plain operations,
    because the Triton kernels call no layer.

    Raises NotComparable for a name that a module lacks, for NaN, and at the end for a layer that was never called.
    """
    errors = {name: LayerError() for name in names}
    layers, others = _by_public_name(reference), _by_public_name(quantized)
    for name in names:
        if name not in layers or name not in others:
            side = "quantized network" if name in layers else "reference"
            raise NotComparable(f"The {side} has no layer {name}.")
    handles = [layers[name].register_forward_hook(_hook(name, others[name], errors[name])) for name in names]
    try:
        with plain_operations():
            yield errors
    finally:
        for handle in handles:
            handle.remove()
    if idle := [name for name, error in errors.items() if not error.calls]:
        raise NotComparable(f"{len(idle)} of {len(errors)} layers were never called, {idle[0]} first.")


def _hook(name: str, quantized: nn.Module, errors: LayerError) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
    def compare(_: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        with torch.inference_mode():
            found = quantized(*inputs)
        try:
            errors.add(*energies(output, found))
        except NotComparable as error:
            raise NotComparable(f"The output of layer {name}: {error.args[0]}", error.remedy) from error

    return compare


def _by_public_name(network: nn.Module) -> dict[str, nn.Module]:
    return {public_name(name): module for name, module in network.named_modules()}
