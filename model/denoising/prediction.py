"""The prediction of one denoising step op by op: the networks of a step for images that are each at their own step."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from model.denoising.buffers import SAMPLE, entry_shape
from model.denoising.loop import Conditioning, ImageState, StepNetworks, repeat_tokens
from model.denoising.step import guide
from model.engines.shapes import DTYPES
from model.engines.signatures import KEYS_VALUES, control_input
from model.store.manifest import TensorSpec


def predict_noise(
    networks: StepNetworks, images: Sequence[ImageState], model_input: torch.Tensor, height: int, width: int
) -> torch.Tensor:
    """Return the guided prediction for the next step of each image, float32 [images, channels, height/8, width/8].

    The UNet's batch has the unconditional halves first. Each rank runs its share of it. model_input: the UNet's input
    of each image, with its extra channels if the UNet has more than latents. height, width: in pixels. Raises
    EngineError.
    """
    of_step = _Step(networks, height, width)
    guided = [index for index, image in enumerate(images) if image.guided]
    order = [*guided, *range(len(images))]
    halves = [(images[index].uncond, images[index].step) for index in guided]
    halves += [(image.cond, image.step) for image in images]
    share = networks.ranks.share(len(order))
    order = [order[entry] for entry in share]
    entries = [(conditioning, step) for conditioning, step in (halves[entry] for entry in share) if conditioning]
    tensors = {SAMPLE: model_input[torch.tensor(order, device=model_input.device)]}
    unet = networks.unet
    residuals = of_step.control([images[index] for index in order], entries, tensors[SAMPLE])
    tensors |= residuals
    if any(image.plan.image_prompts for image in images):
        assert networks.image_prompted is not None
        unet = networks.image_prompted
    elif residuals:
        assert networks.controlled is not None
        unet = networks.controlled
    for engines in (*networks.before, unet):
        inputs = {
            spec.name: tensors[spec.name].to(DTYPES[spec.dtype])
            if spec.name in tensors
            else of_step.stack(spec, spec.name, entries, model_input.device)
            for spec in engines.signature.inputs
        }
        tensors |= engines.run(inputs, height, width)
    eps = networks.ranks.gather(tensors["noise"])[: len(halves)].float()
    uncond, cond = eps[: len(guided)], eps[len(guided) :]
    if guided:
        cond = cond.clone()
        index_of_guided = torch.tensor(guided, device=eps.device)
        plans = [(images[i].plan, images[i].step) for i in guided]
        pairs = [(float(plan.guidance[step]), plan.guidance_rescale) for plan, step in plans]
        scale, rescale = torch.tensor(pairs, device=eps.device).T.reshape(2, -1, 1, 1, 1)
        cond[index_of_guided] = guide(uncond, cond[index_of_guided], scale, rescale)
    return cond


@dataclass(frozen=True)
class _Step:
    """The networks of a step at a size in pixels."""

    networks: StepNetworks
    height: int
    width: int

    def control(
        self, images: Sequence[ImageState], entries: Sequence[tuple[Conditioning, int]], sample: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return the sum of the outputs of all ControlNets that the next step uses, by name. Empty if it uses none.

        `images`: the image of each batch entry. Each ControlNet runs for the entries of the images that use it.
        """
        residuals: dict[str, torch.Tensor] = {}
        for controlnet, engines in self.networks.controlnets.items():
            users = [entry for entry, image in enumerate(images) if controlnet in image.active_controls]
            if not users:
                continue
            inputs = {
                spec.name: sample[users, : int(spec.shape[1])].to(DTYPES[spec.dtype])
                if spec.name == SAMPLE
                else self.stack(
                    spec, control_input(controlnet, spec.name), [entries[user] for user in users], sample.device
                )
                for spec in engines.signature.inputs
            }
            for name, output in engines.run(inputs, self.height, self.width).items():
                if name not in residuals:
                    residuals[name] = output.new_zeros((len(images), *output.shape[1:]))
                residuals[name][users] += output
        return residuals

    def stack(
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
            return torch.zeros(entry_shape(spec, self.height, self.width), dtype=DTYPES[spec.dtype], device=device)
        return conditioning.inputs[name][step if name in self.networks.by_step else 0]
