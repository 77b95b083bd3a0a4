"""The device buffers of a graph loop. Their shapes follow from the UNet's signature, before anything is loaded."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from model.denoising.samplers import COEFFICIENTS
from model.store.manifest import Signature
from model.store.precision import DTYPE_BYTES, Dtype
from model.validation import MAX_STEPS


@dataclass(frozen=True)
class BufferShape:
    """Shape and dtype of one buffer."""

    shape: tuple[int, ...]
    dtype: Dtype = "float32"

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def buffer_shapes(signature: Signature, height: int, width: int, batches: Sequence[int]) -> dict[str, BufferShape]:
    """The buffers of a loop at `height` x `width` pixels, by name. `batches`: the batch sizes of the UNet's engines.

    Each image owns one latent slot and one or two conditioning slots. There are as many latent slots as the largest
    batch has entries. There are two conditioning slots at least where an engine of batch 1 exists: it then runs twice
    for a guided image.
    """
    slots, cond_slots = max(batches), max(*batches, 2 if 1 in batches else 1)
    inputs = {spec.name: spec for spec in signature.inputs}
    sample, time_embeds, keys_values = (inputs[name] for name in ("sample", "time_embeds", "keys_values"))
    pixels = {"height": height, "width": width}
    sides = [int(size) if isinstance(size, int) else _side(size, pixels) for size in sample.shape[1:]]
    latents = BufferShape((slots, *sides))
    text = BufferShape((cond_slots, *map(int, keys_values.shape[1:])), keys_values.dtype)
    return {
        "latents": latents,
        "previous": latents,
        "noise": latents,
        "model_input": BufferShape(latents.shape, sample.dtype),
        "coefficients": BufferShape((slots, MAX_STEPS, len(COEFFICIENTS) + 1)),  # the guidance scale is last
        "steps": BufferShape((slots,), "int64"),
        "slot_indices": BufferShape((slots,), "int64"),
        "time_embeds": BufferShape((cond_slots, MAX_STEPS, *map(int, time_embeds.shape[1:])), time_embeds.dtype),
        "keys_values": text,
        "batch_keys_values": text,
        "mapping": BufferShape((2 * (cond_slots + slots),), "int64"),
    }


def _side(dimension: str, pixels: dict[str, int]) -> int:
    """ "height/8" -> the latent's height."""
    symbol, _, divisor = dimension.partition("/")
    return pixels[symbol] // int(divisor or 1)
