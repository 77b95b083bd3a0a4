"""The device buffers of a graph loop. Their shapes follow from signatures, before anything is loaded."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from model.denoising.loop_schedule import ROW_WIDTH, STATE
from model.engines.features import Input
from model.engines.shapes import shape_at
from model.engines.signatures import TOKENS
from model.errors import EngineError
from model.store.manifest import Signature, TensorSpec
from model.store.precision import DTYPE_BYTES, Dtype
from model.validation import MAX_STEPS

SAMPLE = "sample"  # the input of a step's networks that the loop computes: the scaled latents
# Prefixes of the names of buffers: of conditioning by slot and by entry of a call, of sums, and of mappings.
BY_SLOT, BY_ENTRY, SUM, MAPPING = "slot ", "entry ", "sum ", "mapping "
MAPPING_ROWS = 3  # conditioning slot, latent slot and output row of each entry


@dataclass(frozen=True)
class BufferShape:
    """Shape and dtype of one buffer."""

    shape: tuple[int, ...]
    dtype: Dtype = "float32"

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class NetworkShape:
    """The facts of a network of a step that its buffers depend on.

    name: unique among the networks of a loop.
    batches: of its engines, on all ranks together.
    inputs: the inputs that its signature may have in addition to `sample`.
    prefix: of their names in a conditioning.
    """

    name: str
    signature: Signature
    batches: tuple[int, ...]
    inputs: tuple[Input, ...]
    prefix: str = ""

    @property
    def conditioning(self) -> dict[str, tuple[TensorSpec, Input]]:
        """The inputs that an image's conditioning has, by their names there."""
        return {self.prefix + spec.name: (spec, one) for spec, one in self._matched() if not one.added}

    @property
    def sums(self) -> list[TensorSpec]:
        """The inputs to which other networks add their outputs."""
        return [spec for spec, one in self._matched() if one.added]

    def _matched(self) -> Iterator[tuple[TensorSpec, Input]]:
        return ((spec, one) for spec in self.signature.inputs for one in self.inputs if one.matches(spec.name))


def entry_shape(spec: TensorSpec, height: int, width: int) -> tuple[int, ...]:
    """Return the shape of one batch entry of a tensor at `height` x `width` pixels: "height/8" is the latent's height.

    For an engine that takes any number of tokens, the shape has one token.
    """
    return shape_at(spec.shape[1:], {"height": height, "width": width, TOKENS: 1})


def slot_counts(networks: Sequence[NetworkShape]) -> tuple[int, int]:
    """Return the numbers of latent slots and conditioning slots of a loop. The first network is the plain denoiser.

    Each image owns one latent slot and one or two conditioning slots. A loop has a slot of each kind for each entry of
    the plain denoiser's largest batch. It has at least two conditioning slots: an engine of batch 1 runs twice for a
    guided image.
    """
    largest = max(networks[0].batches)
    return largest, max(largest, 2)


def buffer_shapes(networks: Sequence[NetworkShape], height: int, width: int) -> dict[str, BufferShape]:
    """Return the buffers of a loop at `height` x `width` pixels, by name.

    `networks`: the plain denoiser, its variants, and the networks before it.

    Conditioning that is the same in all steps is stored twice: by slot and by entry of a call. Conditioning that
    differs by step is stored by slot only. Raises EngineError if networks take an input of different shapes.
    """
    latent_slots, cond_slots = slot_counts(networks)
    plain = networks[0].signature
    [sample] = [spec for spec in plain.inputs if spec.name == SAMPLE]
    [noise] = plain.outputs
    latent = entry_shape(noise, height, width)
    latents = BufferShape((latent_slots, *latent))
    shapes = {
        "state": BufferShape((latent_slots, STATE, *latent)),
        "noise": latents,
        "known": latents,
        "known_noise": latents,
        "mask": BufferShape((latent_slots, 1, *latent[1:])),
        "model_input": BufferShape((latent_slots, *entry_shape(sample, height, width)), sample.dtype),
        # The last row of this buffer, and of the sums, is never read: the entries that pad a batch write to it.
        "predictions": BufferShape((cond_slots + 1, *latent), noise.dtype),
        # The guidance scale and its rescaling are last.
        "coefficients": BufferShape((latent_slots, MAX_STEPS, ROW_WIDTH + 2)),
        "steps": BufferShape((latent_slots,), "int64"),
        "slot_indices": BufferShape((latent_slots,), "int64"),
        "pairs": BufferShape((2, latent_slots), "int64"),
    }
    for network in networks:
        shapes[MAPPING + network.name] = BufferShape((MAPPING_ROWS, max(network.batches)), "int64")
        entries = max(network.batches)
        for spec in network.sums:
            _enlarge(shapes, SUM + spec.name, entries + 1, spec, height, width)
        for name, (spec, one) in network.conditioning.items():
            slots, entry = latent_slots if one.scope == "image" else cond_slots, entry_shape(spec, height, width)
            by_slot = BufferShape((slots, *([MAX_STEPS] if one.by_step else []), *entry), spec.dtype)
            if shapes.setdefault(BY_SLOT + name, by_slot) != by_slot:
                raise EngineError(
                    f"The engines of a step at {width}x{height} take {name} of different shapes or dtypes.",
                    "Build all of them with the same options, for example --text-chunks, and publish a new release.",
                )
            if not one.by_step:
                _enlarge(shapes, BY_ENTRY + name, entries, spec, height, width)
    return shapes


def _enlarge(
    shapes: dict[str, BufferShape], name: str, entries: int, spec: TensorSpec, height: int, width: int
) -> None:
    """Give a buffer at least `entries` entries of a tensor."""
    before = shapes[name].shape[0] if name in shapes else 0
    shapes[name] = BufferShape((max(before, entries), *entry_shape(spec, height, width)), spec.dtype)
