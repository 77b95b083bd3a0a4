"""A loop that runs the first and last steps of an image on one UNet, and the steps between on another.

An 8-bit UNet is least exact where the noise is strongest and where details appear. The same UNet in fp16 can run these
steps. Each UNet has a loop of its own, and images move from one to the other between two steps. So the images that are
at the same kind of step share a batch, and an image's result does not depend on the others.
"""

import torch

from model.denoising.loop import Conditioning, ImageState, Loop


class MixedLoop:
    """Implements `model.denoising.loop.Loop`. A step of it is a step of each inner loop that has images."""

    def __init__(self, outer: Loop, inner: Loop, first: int, last: int) -> None:
        """`outer` runs the `first` and the `last` steps of an image, `inner` all others."""
        self.capacity = self.efficient_batch = min(outer.capacity, inner.capacity)
        self.images: list[ImageState] = []
        self._outer, self._inner = outer, inner
        self._first, self._last = first, last
        self._loop_of: dict[ImageState, Loop] = {}
        # A loop may clear the conditioning. It is kept here for images that will move to the other loop.
        self._texts: dict[ImageState, tuple[Conditioning, Conditioning | None]] = {}

    def add(self, image: ImageState) -> None:
        self._enter(image, (image.cond, image.uncond))
        self.images.append(image)

    def remove(self, image: ImageState) -> None:
        if image in self._loop_of[image].images:  # not after an error of the other loop, or while it moved
            self._loop_of[image].remove(image)
        self._forget(image)

    def take(self, image: ImageState) -> None:
        self._loop_of[image].take(image)
        self._forget(image)

    def step(self) -> list[ImageState]:
        finished = [image for loop in (self._outer, self._inner) if loop.images for image in loop.step()]
        for image in finished:
            self._forget(image)
        for image in self.images:
            if self._loop_of[image] is not self._next_loop(image):
                self._loop_of[image].take(image)
                texts = image.cond, image.uncond = self._texts.pop(image)
                self._enter(image, texts)
        return finished

    def latents(self, image: ImageState) -> torch.Tensor:
        return self._loop_of[image].latents(image)

    def _next_loop(self, image: ImageState) -> Loop:
        is_outer = image.step < self._first or image.step >= image.plan.steps - self._last
        return self._outer if is_outer else self._inner

    def _moves_later(self, image: ImageState) -> bool:
        last_inner = image.plan.steps - self._last - 1
        if self._next_loop(image) is self._inner:
            return self._last > 0
        return image.step < self._first <= last_inner

    def _enter(self, image: ImageState, texts: tuple[Conditioning, Conditioning | None]) -> None:
        loop = self._next_loop(image)
        loop.add(image)
        image.denoised = None
        self._loop_of[image] = loop
        if self._moves_later(image):
            self._texts[image] = texts

    def _forget(self, image: ImageState) -> None:
        self.images.remove(image)
        del self._loop_of[image]
        self._texts.pop(image, None)
