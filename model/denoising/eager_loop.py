"""The denoising loop op by op, in the smallest buckets that hold the active images. Runs on any device."""

from typing import NamedTuple

import torch

from model.denoising.buffers import SAMPLE, entry_shape
from model.denoising.cover import Cover, Kind, StepCosts
from model.denoising.loop import ImageState, has_room
from model.denoising.loop_schedule import KEPT, NOISE, PREVIOUS, STATE, X, device_rows
from model.denoising.networks import Denoiser
from model.denoising.prediction import predict_noise
from model.denoising.step import advance, draw_noise, keep_known
from model.denoising.step_plan import StepNeeds


class _Tensors(NamedTuple):
    """The tensors of an active image.

    state: float32 [1, STATE, channels, height/8, width/8]. rows: float32 [evaluations, ROW_WIDTH].
    """

    state: torch.Tensor
    rows: torch.Tensor

    @property
    def latents(self) -> torch.Tensor:
        """A view of the latents, [1, channels, height/8, width/8]."""
        return self.state[:, X]


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
        state = image.latents.new_zeros((1, STATE, *image.latents.shape[1:]))
        state[:, X] = image.latents
        rows = torch.from_numpy(device_rows(image.plan.schedule, image.plan.steps)).to(state.device)
        self._tensors[image] = _Tensors(state, rows)
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
        images, tensors = self.images, [self._tensors[image] for image in self.images]
        rows = [one.rows[image.step] for image, one in zip(images, tensors, strict=True)]
        scaled = torch.cat([row[0] * one.latents for row, one in zip(rows, tensors, strict=True)])
        predictions = predict_noise(self._denoiser, cover, images, self._model_input(scaled), self._height, self._width)
        finished = []
        for image, one, row, prediction in zip(images, tensors, rows, torch.split(predictions, 1), strict=True):
            if (noise := draw_noise(image, one.latents.shape[1:])) is not None:
                one.state[:, NOISE] = noise.to(one.state.device)
            position = torch.tensor([image.step % KEPT], device=one.state.device)
            advance(one.state, prediction, position, row[1:-2].reshape(1, 2, STATE))
            if image.known is not None:
                keep_known(one.latents, image.known, row[-2:], out=one.latents)
            image.step += 1
            if image.step == image.plan.steps:
                image.latents = one.latents.clone()
                finished.append(image)
        for image in finished:
            self.remove(image)
        return finished

    def latents(self, image: ImageState) -> torch.Tensor:
        return self._tensors[image].state[:, PREVIOUS].clone()

    def _model_input(self, scaled: torch.Tensor) -> torch.Tensor:
        """Return the UNet's input of each image: its scaled latents, and its extra channels if the UNet has more."""
        [sample] = [spec for spec in self._denoiser.plain.engines.signature.inputs if spec.name == SAMPLE]
        channels, *sides = entry_shape(sample, self._height, self._width)
        missing = (1, channels - scaled.shape[1], *sides)
        if not missing[1]:
            return scaled
        extra = [scaled.new_zeros(missing) if i.extra_channels is None else i.extra_channels for i in self.images]
        return torch.cat([scaled, torch.cat(extra)], dim=1)
