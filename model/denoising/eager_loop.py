"""The denoising loop op by op, in the smallest bucket that holds the active images. Runs on any device."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from model.denoising.buffers import SAMPLE, entry_shape
from model.denoising.loop import Conditioning, ImageState, StepNetworks, has_room, repeat_tokens
from model.denoising.samplers import KNOWN_COEFFICIENTS, pad_schedules
from model.denoising.step import advance, draw_noise, guide, keep_known
from model.engines.shapes import DTYPES
from model.engines.signatures import KEYS_VALUES, control_input
from model.store.manifest import TensorSpec


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

    def __init__(self, networks: StepNetworks, height: int, width: int) -> None:
        """`height` and `width` in pixels. Raises EngineError if no engine of the UNet serves them."""
        self.capacity = self.efficient_batch = networks.unet.max_batch(height, width)
        self.images: list[ImageState] = []
        self._networks = networks
        self._height, self._width = height, width
        self._tensors: dict[ImageState, _Tensors] = {}

    def add(self, image: ImageState) -> None:
        assert image.step < image.schedule.steps and has_room(self, image.unet_batch)
        image.wait_for_inputs()
        coefficients = pad_schedules([image.schedule], image.schedule.steps)[1][0]
        previous = torch.zeros_like(image.latents) if image.denoised is None else image.denoised.clone()
        self._tensors[image] = _Tensors(image.latents.clone(), previous, coefficients)
        self.images.append(image)

    def remove(self, image: ImageState) -> None:
        self.images.remove(image)
        del self._tensors[image]

    def take(self, image: ImageState) -> None:
        image.latents, image.denoised = self._tensors[image].x, self._tensors[image].previous
        self.remove(image)

    @torch.inference_mode()
    def step(self) -> list[ImageState]:
        images, states = self.images, [self._tensors[image] for image in self.images]
        x = torch.cat([state.x for state in states])  # float32 [images, channels, height/8, width/8]
        previous = torch.cat([state.previous for state in states])
        of_steps = [state.coefficients[image.step] for image, state in zip(images, states, strict=True)]
        coefficients = torch.from_numpy(np.stack(of_steps)).to(x.device)  # [images, 9]
        c_in, *update = coefficients.T.reshape(-1, len(images), 1, 1, 1)
        update, keep = update[: -len(KNOWN_COEFFICIENTS)], update[-len(KNOWN_COEFFICIENTS) :]
        eps = self._predict_noise(self._model_input(c_in * x))
        advance(x, previous, eps, draw_noise(images, x), update)
        for index, image in enumerate(images):
            if image.known is not None:
                entry = slice(index, index + 1)
                keep_known(x[entry], image.known, [coefficient[entry] for coefficient in keep], out=x[entry])
        finished = []
        for image, state, *tensors in zip(images, states, torch.split(x, 1), torch.split(previous, 1), strict=True):
            state.x, state.previous = tensors
            image.step += 1
            if image.step == image.schedule.steps:
                image.latents = state.x
                finished.append(image)
        for image in finished:
            self.remove(image)
        return finished

    def latents(self, image: ImageState) -> torch.Tensor:
        return self._tensors[image].previous.clone()

    def _model_input(self, scaled: torch.Tensor) -> torch.Tensor:
        """Return the UNet's input of each image: its scaled latents, and its extra channels if the UNet has more."""
        [sample] = [spec for spec in self._networks.unet.signature.inputs if spec.name == SAMPLE]
        channels, *sides = entry_shape(sample, self._height, self._width)
        missing = (1, channels - scaled.shape[1], *sides)
        if not missing[1]:
            return scaled
        extra = [scaled.new_zeros(missing) if i.extra_channels is None else i.extra_channels for i in self.images]
        return torch.cat([scaled, torch.cat(extra)], dim=1)

    def _predict_noise(self, model_input: torch.Tensor) -> torch.Tensor:
        """Return the guided prediction for each image, float32. The UNet's batch has the unconditional halves first."""
        guided = [index for index, image in enumerate(self.images) if image.guided]
        order = [*guided, *range(len(self.images))]
        halves = [(self.images[index].uncond, self.images[index].step) for index in guided]
        halves += [(image.cond, image.step) for image in self.images]
        entries = [(conditioning, step) for conditioning, step in halves if conditioning is not None]
        tensors = {SAMPLE: model_input[torch.tensor(order, device=model_input.device)]}
        unet = self._networks.unet
        residuals = self._control([self.images[index] for index in order], entries, tensors[SAMPLE])
        tensors |= residuals
        if any(image.image_prompt for image in self.images):
            assert self._networks.image_prompted is not None
            unet = self._networks.image_prompted
        elif residuals:
            assert self._networks.controlled is not None
            unet = self._networks.controlled
        for engines in (*self._networks.before, unet):
            inputs = {
                spec.name: tensors[spec.name].to(DTYPES[spec.dtype])
                if spec.name in tensors
                else self._stack(spec, spec.name, entries, model_input.device)
                for spec in engines.signature.inputs
            }
            tensors |= engines.run(inputs, self._height, self._width)
        eps = tensors["noise"].float()
        uncond, cond = eps[: len(guided)], eps[len(guided) :]
        if guided:
            cond = cond.clone()
            index_of_guided = torch.tensor(guided, device=eps.device)
            images = [self.images[index] for index in guided]
            pairs = [(float(image.guidance[image.step]), image.guidance_rescale) for image in images]
            scale, rescale = torch.tensor(pairs, device=eps.device).T.reshape(2, -1, 1, 1, 1)
            cond[index_of_guided] = guide(uncond, cond[index_of_guided], scale, rescale)
        return cond

    def _control(
        self, images: Sequence[ImageState], entries: Sequence[tuple[Conditioning, int]], sample: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return the sum of the outputs of all ControlNets that the next step uses, by name. Empty if it uses none.

        `images`: the image of each batch entry. Each ControlNet runs for the entries of the images that use it.
        """
        residuals: dict[str, torch.Tensor] = {}
        for controlnet, engines in self._networks.controlnets.items():
            users = [entry for entry, image in enumerate(images) if controlnet in image.active_controls]
            if not users:
                continue
            inputs = {
                spec.name: sample[users, : int(spec.shape[1])].to(DTYPES[spec.dtype])
                if spec.name == SAMPLE
                else self._stack(
                    spec, control_input(controlnet, spec.name), [entries[user] for user in users], sample.device
                )
                for spec in engines.signature.inputs
            }
            for name, output in engines.run(inputs, self._height, self._width).items():
                if name not in residuals:
                    residuals[name] = output.new_zeros((len(images), *output.shape[1:]))
                residuals[name][users] += output
        return residuals

    def _stack(
        self, spec: TensorSpec, name: str, entries: Sequence[tuple[Conditioning, int]], device: torch.device
    ) -> torch.Tensor:
        """Return a conditioning input of several batch entries, each a conditioning and its step.

        Texts are repeated until they are as long as the longest, or as the engine requires.
        """
        tensors = [self._entry(spec, name, conditioning, step, device) for conditioning, step in entries]
        if spec.name == KEYS_VALUES:
            required = spec.shape[1]
            tokens = required if isinstance(required, int) else max(len(tensor) for tensor in tensors)
            tensors = [repeat_tokens(tensor, tokens) for tensor in tensors]
        return torch.stack(tensors)

    def _entry(
        self, spec: TensorSpec, name: str, conditioning: Conditioning, step: int, device: torch.device
    ) -> torch.Tensor:
        """Return one batch entry of a conditioning input."""
        if name not in conditioning.inputs:
            return torch.zeros(entry_shape(spec, self._height, self._width), dtype=DTYPES[spec.dtype], device=device)
        return conditioning.inputs[name][step if name in self._networks.by_step else 0]
