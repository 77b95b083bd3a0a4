"""The state of an image, and the contract of a denoising loop: images of one size on one UNet, each at its own step.

Each image's result is independent of the other images in the batch. Loops do not depend on requests, prompts, queues or
HTTP: `model.pipeline` makes the image states and chooses the implementation.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from model.cuda.streams import Outputs
from model.denoising.cover import Cover, Kind, StepCosts
from model.denoising.step_plan import StepNeeds, StepPlan
from model.images.pending import PendingImage

LOCAL = {"local": True}
"""Metadata of a field that no loop reads: other ranks get its default."""
_NO_LATENTS = torch.empty(0)


@dataclass
class Conditioning:
    """Inputs of a step's networks by name, in their dtypes.

    An input is [1, ...] for all steps, or [steps, ...] if it differs by step. A missing input is zeros.
    """

    inputs: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Known:
    """An image that inpainting keeps outside of a mask.

    latents, noise: float32 [1, channels, height/8, width/8]. mask: float32 [1, 1, height/8, width/8], 1 where the image
    is repainted, 0 where it is kept.
    """

    latents: torch.Tensor
    noise: torch.Tensor
    mask: torch.Tensor


@dataclass(eq=False)
class ImageState:
    """One image from its request to its pixels: the only lasting record of it.

    index: its position among the images of its request.
    pass_index: the number of finished passes, if the request repaints several masks one after the other.
    generator: CPU generator with the image's seed. Initial latents and then each step's noise are drawn from it, as in
        diffusers.
    plan, step: the steps of the loop that the image is in or waits for, and the number of finished ones.
    stage: the number of the runner's stages that it has begun.
    latents: float32 [1, channels, height/8, width/8]. While the image is in a loop, these are those it joined with.
    known: what each step keeps of an image outside of a mask; None: nothing.
    extra_channels: for a UNet with more input channels than latents, its last channels, [1, channels, height/8,
        width/8]. None: zeros.
    inputs: work on another stream that makes the tensors above; None: the current stream may read them.
    cond, uncond: the UNet's conditioning; `uncond` is None if no step is guided.
    checks: by what a stage made, bool [1], true if it is finite; see `model.pipeline.overflow`.
    result: the result of the last finished pass, if another one follows: uint8 [height, width, 3], and bool [checks] of
        all passes so far.
    pixels: the decoded image, once decoding is queued.
    """

    index: int
    generator: torch.Generator
    plan: StepPlan
    latents: torch.Tensor = _NO_LATENTS
    cond: Conditioning = field(default_factory=Conditioning)
    uncond: Conditioning | None = None
    step: int = 0
    stage: int = 0
    pass_index: int = 0
    known: Known | None = None
    extra_channels: torch.Tensor | None = None
    inputs: Outputs | None = field(default=None, metadata=LOCAL)
    checks: dict[str, torch.Tensor] = field(default_factory=dict, metadata=LOCAL)
    result: Outputs | None = field(default=None, metadata=LOCAL)
    pixels: PendingImage | None = field(default=None, metadata=LOCAL)

    @property
    def inputs_ready(self) -> bool:
        """True if a loop that the image joins does not wait for work on another stream."""
        return self.inputs is None or self.inputs.ready()

    def wait_for_inputs(self) -> None:
        """Make the current stream wait for the work on another stream that makes the image's tensors."""
        if self.inputs is not None:
            self.inputs.release_to_current()
            self.inputs = None

    @property
    def now(self) -> StepNeeds:
        """What the next step needs."""
        return self.plan.by_step[self.step]


class Loop(Protocol):
    """Images of one size being denoised on one UNet. Used from one thread.

    Do not read `image.latents` until `step` has returned the image.
    """

    capacity: int
    """The most slots of its images, see `StepNeeds`; may be lowered while the loop is empty."""
    images: list[ImageState]
    """The active images, in order of joining."""

    @property
    def costs(self) -> StepCosts:
        """What the calls of a step cost. They may be replaced while the loop is empty."""

    def add(self, image: ImageState) -> None:
        """Add an image with at least one step left, for which the loop has room (`has_room`).

        The current stream waits for the image's inputs (`ImageState.wait_for_inputs`). The loop copies the image's
        state, and may clear its conditioning.
        """

    def remove(self, image: ImageState) -> None:
        """Drop an image before the next step. Other images are unaffected."""

    def kind(self, needs: StepNeeds) -> Kind:
        """Return what a step needs of a call here. Raises EngineError if no engine has its features."""

    def cover(self) -> Cover:
        """Return the cheapest calls for the next step."""

    def step(self, cover: Cover | None = None) -> list[ImageState]:
        """Run one step of all active images, each at its own `image.step`, which is then incremented.

        cover: the calls of the step; None: `self.cover()`. Returns the finished images, removed from the loop,
        with the result in `image.latents`. May return before the device has finished: the work is queued on the current
        stream.
        """

    def latents(self, image: ImageState) -> torch.Tensor:
        """Return a copy of the image's denoised estimate [1, channels, height/8, width/8], for previews.

        Before its first step these are zeros.
        """


def slots(images: Iterable[ImageState]) -> int:
    """Return the slots that these images take in a loop."""
    return sum(image.now.slots for image in images)


def has_room(loop: Loop, needed: int) -> bool:
    """True if an image that takes so many slots may join.

    An empty loop takes any image: one that needs more than the largest batch runs each step in several calls.
    """
    return not loop.images or slots(loop.images) + needed <= loop.capacity
