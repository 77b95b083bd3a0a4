"""The denoising loop op by op, in the smallest buckets that hold the active images. Runs on any device."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from model.denoising.buffers import SAMPLE, entry_shape
from model.denoising.cover import Cover, Kind, StepCosts
from model.denoising.loop import ImageState, has_room
from model.denoising.networks import Denoiser
from model.denoising.prediction import predict_noise
from model.denoising.samplers import KNOWN_COEFFICIENTS, pad_schedules
from model.denoising.step import advance, draw_noise, keep_known
from model.denoising.step_plan import StepNeeds


@dataclass
class _Tensors:
    """The tensors of an active image. `coefficients` are on the host.

    x, previous: float32 [1, channels, height/8, width/8]; coefficients: [steps, 9].
    """

    x: torch.Tensor
    previous: torch.Tensor
    coefficients: NDArray[np.float32]


class EagerLoop:
    """Implements `model.denoising.loop.Loop`."""

    def __init__(self, denoiser: Denoiser, height: int, width: int) -> None:
        """`height` and `width` in pixels. Raises EngineError if no engine of the denoiser serves them."""
        self.capacity = denoiser.ranks.size * denoiser.plain.engines.max_batch(height, width)
        self.costs = StepCosts(denoiser.options(height, width, in_graphs=False))
        self.images: list[ImageState] = []
        self._denoiser = denoiser
        self._height, self._width = height, width
        self._tensors: dict[ImageState, _Tensors] = {}

    def add(self, image: ImageState) -> None:
        assert image.step < image.plan.steps and has_room(self, image.now.slots)
        image.wait_for_inputs()
        coefficients = pad_schedules([image.plan.schedule], image.plan.steps)[1][0]
        self._tensors[image] = _Tensors(image.latents.clone(), torch.zeros_like(image.latents), coefficients)
        self.images.append(image)

    def remove(self, image: ImageState) -> None:
        self.images.remove(image)
        del self._tensors[image]

    def kind(self, needs: StepNeeds) -> Kind:
        return self._denoiser.kind(needs)

    def cover(self) -> Cover:
        return self.costs.cheapest(self._denoiser.counts(self.images))

    @torch.inference_mode()
    def step(self, cover: Cover | None = None) -> list[ImageState]:
        cover = self.cover() if cover is None else cover
        images, states = self.images, [self._tensors[image] for image in self.images]
        x = torch.cat([state.x for state in states])  # float32 [images, channels, height/8, width/8]
        previous = torch.cat([state.previous for state in states])
        of_steps = [state.coefficients[image.step] for image, state in zip(images, states, strict=True)]
        coefficients = torch.from_numpy(np.stack(of_steps)).to(x.device)  # [images, 9]
        c_in, *update = coefficients.T.reshape(-1, len(images), 1, 1, 1)
        update, keep = update[: -len(KNOWN_COEFFICIENTS)], update[-len(KNOWN_COEFFICIENTS) :]
        eps = predict_noise(self._denoiser, cover, images, self._model_input(c_in * x), self._height, self._width)
        advance(x, previous, eps, draw_noise(images, x), update)
        for index, image in enumerate(images):
            if image.known is not None:
                entry = slice(index, index + 1)
                keep_known(x[entry], image.known, [coefficient[entry] for coefficient in keep], out=x[entry])
        finished = []
        for image, state, *tensors in zip(images, states, torch.split(x, 1), torch.split(previous, 1), strict=True):
            state.x, state.previous = tensors
            image.step += 1
            if image.step == image.plan.steps:
                image.latents = state.x
                finished.append(image)
        for image in finished:
            self.remove(image)
        return finished

    def latents(self, image: ImageState) -> torch.Tensor:
        return self._tensors[image].previous.clone()

    def _model_input(self, scaled: torch.Tensor) -> torch.Tensor:
        """Return the UNet's input of each image: its scaled latents, and its extra channels if the UNet has more."""
        [sample] = [spec for spec in self._denoiser.plain.engines.signature.inputs if spec.name == SAMPLE]
        channels, *sides = entry_shape(sample, self._height, self._width)
        missing = (1, channels - scaled.shape[1], *sides)
        if not missing[1]:
            return scaled
        extra = [scaled.new_zeros(missing) if i.extra_channels is None else i.extra_channels for i in self.images]
        return torch.cat([scaled, torch.cat(extra)], dim=1)
