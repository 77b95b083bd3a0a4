"""The denoising loop op by op, in the smallest bucket that holds the active images. Runs on any device."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from model.denoising.loop import ImageState, has_room
from model.denoising.samplers import pad_schedules
from model.denoising.step import advance, draw_noise, guide
from model.engines.engine import EngineSet
from model.engines.shapes import DTYPES


@dataclass
class _Tensors:
    """An active image. x, previous: [1, channels, height/8, width/8]; coefficients [steps, 7], on the host."""

    x: torch.Tensor
    previous: torch.Tensor
    coefficients: NDArray[np.float32]


class EagerLoop:
    """Implements `model.denoising.loop.Loop`."""

    def __init__(self, unet: EngineSet, height: int, width: int) -> None:
        """`height` and `width` in pixels. Raises EngineError where no engine of `unet` serves them."""
        self.capacity = self.efficient_batch = unet.max_batch(height, width)
        self.images: list[ImageState] = []
        self._unet = unet
        self._height, self._width = height, width
        self._tensors: dict[ImageState, _Tensors] = {}

    def add(self, image: ImageState) -> None:
        assert image.step == 0 and image.schedule.steps and has_room(self, image.unet_batch)
        coefficients = pad_schedules([image.schedule], image.schedule.steps)[1][0]
        self._tensors[image] = _Tensors(image.latents.clone(), torch.zeros_like(image.latents), coefficients)
        self.images.append(image)

    def remove(self, image: ImageState) -> None:
        self.images.remove(image)
        del self._tensors[image]

    @torch.inference_mode()
    def step(self) -> list[ImageState]:
        images, states = self.images, [self._tensors[image] for image in self.images]
        x = torch.cat([state.x for state in states])  # float32 [images, channels, height/8, width/8]
        previous = torch.cat([state.previous for state in states])
        rows = [state.coefficients[image.step] for image, state in zip(images, states, strict=True)]
        coefficients = torch.from_numpy(np.stack(rows)).to(x.device)  # [images, 7]
        c_in, *update = coefficients.T.reshape(-1, len(images), 1, 1, 1)
        eps = self._predict_noise(c_in * x)
        advance(x, previous, eps, draw_noise(images, x), update)
        finished = []
        for image, state, *now in zip(images, states, torch.split(x, 1), torch.split(previous, 1), strict=True):
            state.x, state.previous = now
            image.step += 1
            if image.step == image.schedule.steps:
                image.latents = state.x
                finished.append(image)
        for image in finished:
            self.remove(image)
        return finished

    def latents(self, image: ImageState) -> torch.Tensor:
        return self._tensors[image].previous.clone()

    def _predict_noise(self, model_input: torch.Tensor) -> torch.Tensor:
        """The UNet's guided prediction for each image, float32. The batch starts with the unconditional halves."""
        guided = [index for index, image in enumerate(self.images) if image.guided]
        order = torch.tensor([*guided, *range(len(self.images))], device=model_input.device)
        pairs = [(self.images[index].uncond, self.images[index].step) for index in guided]
        pairs += [(image.cond, image.step) for image in self.images]
        texts = [(text, step) for text, step in pairs if text is not None]
        dtype = DTYPES[self._unet.signature.outputs[0].dtype]
        eps = self._unet.run(
            {
                "sample": model_input[order].to(dtype),
                "time_embeds": torch.stack([text.time_embeds[step] for text, step in texts]),
                "keys_values": torch.cat([text.keys_values for text, _ in texts]),
            },
            self._height,
            self._width,
        )["noise"].float()
        uncond, cond = eps[: len(guided)], eps[len(guided) :]
        if guided:
            cond = cond.clone()
            at = torch.tensor(guided, device=eps.device)
            scales = [float(self.images[index].guidance[self.images[index].step]) for index in guided]
            scale = torch.tensor(scales, device=eps.device).reshape(-1, 1, 1, 1)
            cond[at] = guide(uncond, cond[at], scale)
        return cond
