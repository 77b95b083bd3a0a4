"""The device buffers of a graph loop. Their shapes follow from signatures, before anything is loaded."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from model.denoising.samplers import COEFFICIENTS, KNOWN_COEFFICIENTS
from model.engines.shapes import shape_at
from model.engines.signatures import IMAGE_BIAS, IMAGE_KEYS, IMAGE_VALUES, TOKENS, control_input, residuals_of
from model.store.manifest import Signature, TensorSpec
from model.store.precision import DTYPE_BYTES, Dtype
from model.validation import MAX_STEPS

SAMPLE = "sample"  # the input of a step's networks that the loop computes: the scaled latents
# Prefixes of the names of a conditioning input's buffers: indexed by slot, and by entry of the UNet's batch.
COND_BY_SLOT, COND_BY_ENTRY = "cond ", "batch "
RESIDUAL = "residual "  # prefix of the buffers that hold the sum of the outputs of ControlNets


@dataclass(frozen=True)
class BufferShape:
    """Shape and dtype of one buffer."""

    shape: tuple[int, ...]
    dtype: Dtype = "float32"

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def conditioning_inputs(networks: Sequence[Signature]) -> dict[str, TensorSpec]:
    """Return the inputs of a step's networks that neither an earlier network nor the loop computes.

    `networks` are in the order in which they run. The loop computes `sample`.
    """
    conditioning: dict[str, TensorSpec] = {}
    computed = {SAMPLE}
    for network in networks:
        conditioning |= {spec.name: spec for spec in network.inputs if spec.name not in computed}
        computed |= {spec.name for spec in network.outputs}
    return conditioning


def control_inputs(controlnets: Mapping[str, Signature]) -> dict[str, TensorSpec]:
    """Return the inputs of ControlNets, by their names in an image's conditioning. The loop computes `sample`."""
    return {
        control_input(name, spec.name): spec
        for name, signature in controlnets.items()
        for spec in signature.inputs
        if spec.name != SAMPLE
    }


def image_inputs(unet: Signature | None) -> dict[str, TensorSpec]:
    """Return the inputs of a UNet that an image's conditioning has for IP-Adapters. None: no such UNet."""
    names = (IMAGE_KEYS, IMAGE_VALUES, IMAGE_BIAS)
    return {spec.name: spec for spec in (unet.inputs if unet else ()) if spec.name in names}


def entry_shape(spec: TensorSpec, height: int, width: int) -> tuple[int, ...]:
    """The shape of one batch entry of a tensor at `height` x `width` pixels: "height/8" is the latent's height.

    Where an engine takes any number of tokens, the shape has one.
    """
    return shape_at(spec.shape[1:], {"height": height, "width": width, TOKENS: 1})


def buffer_shapes(
    networks: Sequence[Signature],
    by_step: Collection[str],
    height: int,
    width: int,
    batches: Sequence[int],
    controlnets: Mapping[str, Signature] = MappingProxyType({}),
    image_prompted: Signature | None = None,
) -> dict[str, BufferShape]:
    """Return the buffers of a loop at `height` x `width` pixels, by name.

    `networks`: the networks that run in a step, the UNet last. `by_step`: see `model.denoising.loop.StepNetworks`.
    `batches`: the batch sizes of the UNet's engines. `controlnets`: those of the release, by name. `image_prompted`:
    the UNet of steps with an IP-Adapter; None: the release has none.

    Each image owns one latent slot and one or two conditioning slots. There are as many latent slots as the largest
    batch has entries. If an engine of batch 1 exists, there are at least two conditioning slots, because it runs twice
    for a guided image.

    Conditioning that is the same in all steps is stored twice: by slot and by batch entry. Conditioning that differs by
    step is stored by slot only.
    """
    slots, cond_slots = max(batches), max(*batches, 2 if 1 in batches else 1)
    [sample] = [spec for spec in networks[-1].inputs if spec.name == SAMPLE]
    [noise] = networks[-1].outputs
    latents = BufferShape((slots, *entry_shape(noise, height, width)))
    shapes = {
        "latents": latents,
        "previous": latents,
        "noise": latents,
        "known": latents,
        "known_noise": latents,
        "mask": BufferShape((slots, 1, *latents.shape[2:])),
        "model_input": BufferShape((slots, *entry_shape(sample, height, width)), sample.dtype),
        # The guidance scale and its rescaling are last.
        "coefficients": BufferShape((slots, MAX_STEPS, len(COEFFICIENTS + KNOWN_COEFFICIENTS) + 2)),
        "steps": BufferShape((slots,), "int64"),
        "slot_indices": BufferShape((slots,), "int64"),
        "mapping": BufferShape((2 * (cond_slots + slots),), "int64"),
    }
    residuals = [spec for signature in controlnets.values() for spec in signature.outputs]  # the same of each
    for spec in (*residuals, *(residuals_of(image_prompted) if image_prompted else ())):
        shapes[RESIDUAL + spec.name] = BufferShape((cond_slots, *entry_shape(spec, height, width)), spec.dtype)
    conditioning = conditioning_inputs(networks) | control_inputs(controlnets) | image_inputs(image_prompted)
    for name, spec in conditioning.items():
        entry = entry_shape(spec, height, width)
        if name in by_step:
            shapes[COND_BY_SLOT + name] = BufferShape((cond_slots, MAX_STEPS, *entry), spec.dtype)
        else:
            shapes[COND_BY_SLOT + name] = shapes[COND_BY_ENTRY + name] = BufferShape((cond_slots, *entry), spec.dtype)
    return shapes
