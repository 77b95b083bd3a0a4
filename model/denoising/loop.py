"""The contract of a denoising loop: images of one size on one UNet, each at its own step, joining between steps.

Each image's result is independent of the other images in the batch. Loops know nothing of requests, prompts, queues or
HTTP; `model.pipeline` makes the image states and chooses the implementation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from model.denoising.samplers import SamplerSchedule


@dataclass
class Conditioning:
    """What conditions the UNet, in its precision: `keys_values` [1, tokens, width] of the text and `time_embeds`
    [steps, width] of each step. `is_zero`: there is no text, not even an empty one, and keys and values are zeros."""

    keys_values: torch.Tensor
    time_embeds: torch.Tensor
    is_zero: bool = False


@dataclass(eq=False)
class ImageState:
    """One image being denoised. `guidance` [steps] is 1 from the first unguided step on; `step` counts finished steps.

    latents: float32 [1, channels, height/8, width/8], the start and, once the image has finished, the result. The
    generator has the image's seed. It is drawn from as diffusers does: the initial latents, then each step's noise.
    """

    latents: torch.Tensor
    schedule: SamplerSchedule
    guidance: NDArray[np.float32]
    generator: torch.Generator
    cond: Conditioning
    uncond: Conditioning | None
    step: int = 0

    @property
    def guided(self) -> bool:
        """True if the next step is guided and so takes two batch entries of the UNet."""
        return self.uncond is not None and bool(self.guidance[self.step] > 1)

    @property
    def unet_batch(self) -> int:
        """Batch entries of the UNet that the next step takes; never more than the step before."""
        return 2 if self.guided else 1


class Loop(Protocol):
    """Images of one size being denoised on one UNet. Used from one thread.

    Do not read `image.latents` until `step` has returned the image.
    """

    capacity: int
    """The largest UNet batch of its images; may be lowered while the loop is empty."""
    efficient_batch: int
    """The largest UNet batch that still improves throughput (`model.scheduling.admission`), once it is measured."""
    images: list[ImageState]
    """The active images, in order of joining."""

    def add(self, image: ImageState) -> None:
        """Add an image at step 0 that has steps and for which there is room (`has_room`). The loop copies its state and
        may take its conditioning from it."""

    def remove(self, image: ImageState) -> None:
        """Drop an image before the next step. Other images are unaffected."""

    def step(self) -> list[ImageState]:
        """Run one step of all active images, each at its own `image.step`, which is then incremented.

        Returns the finished images, removed from the loop, with the result in `image.latents`. May return before the
        device has finished: the work is queued on the current stream.
        """

    def latents(self, image: ImageState) -> torch.Tensor:
        """A copy of the image's denoised estimate [1, channels, height/8, width/8], for previews; zeros before its
        first step."""


def unet_batch(images: Sequence[ImageState]) -> int:
    """The UNet batch of the next step of these images."""
    return sum(image.unet_batch for image in images)


def has_room(loop: Loop, needed: int) -> bool:
    """True if an image that takes `needed` batch entries may join. An empty loop takes any image: one that needs more
    than the largest batch runs its steps in several calls."""
    return not loop.images or unet_batch(loop.images) + needed <= loop.capacity
