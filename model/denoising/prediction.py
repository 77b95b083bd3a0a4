"""The prediction of one denoising step op by op: the networks of a step for images that are each at their own step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from model.denoising.buffers import SAMPLE, entry_shape
from model.denoising.cover import Cover
from model.denoising.inputs import gather_inputs, repeat_tokens
from model.denoising.loop import Conditioning, ImageState
from model.denoising.networks import Denoiser, DenoiserVariant
from model.denoising.step import guide
from model.engines.features import Input, denoiser_inputs
from model.engines.shapes import DTYPES
from model.store.manifest import TensorSpec

_Texts = Sequence[tuple[Conditioning, ImageState]]
"""A text and its image for each entry of a batch."""


def predict_noise(
    denoiser: Denoiser, cover: Cover, images: Sequence[ImageState], model_input: torch.Tensor, height: int, width: int
) -> torch.Tensor:
    """Return the guided prediction for the next step of each image, float32 [images, channels, height/8, width/8].

    The batch of a call has the unconditional halves first. Each rank runs its share of it. cover: the calls.
    model_input: the UNet's input of each image, with its extra channels if the UNet has more than latents. height,
    width: in pixels. Raises EngineError.
    """
    number, count = {image: index for index, image in enumerate(images)}, len(images)
    size = _Size(height, width)
    rows: list[int] = []  # of the unconditional halves of all images, and then of the conditional ones
    parts: list[torch.Tensor] = []
    for call in denoiser.calls(cover, images):
        entries = sorted((half, number[image]) for image, half in call.entries)
        rows += [half * count + index for half, index in entries]
        parts.append(
            size.predict(
                denoiser, call.variant, [(half, images[i]) for half, i in entries], model_input[[i for _, i in entries]]
            )
        )
    order = [rows.index(row) for row in sorted(rows)]
    eps = torch.cat(parts)[order] if len(parts) > 1 else parts[0][order]
    guided = [index for index, image in enumerate(images) if image.now.guided]
    uncond, cond = eps[: len(guided)], eps[len(guided) :]
    if not guided:
        return cond
    index_of_guided = torch.tensor(guided, device=eps.device)
    plans = [(images[index].plan, images[index].step) for index in guided]
    pairs = [(float(plan.guidance[step]), plan.guidance_rescale) for plan, step in plans]
    scale, rescale = torch.tensor(pairs, device=eps.device).T.reshape(2, -1, 1, 1, 1)
    cond[index_of_guided] = guide(uncond, cond[index_of_guided], scale, rescale)
    return cond


@dataclass(frozen=True)
class _Size:
    """Calls at a size in pixels."""

    height: int
    width: int

    def predict(
        self,
        denoiser: Denoiser,
        variant: DenoiserVariant,
        entries: Sequence[tuple[int, ImageState]],
        model_input: torch.Tensor,
    ) -> torch.Tensor:
        """Return the predictions of a call, float32 [entries, channels, height/8, width/8].

        entries: half 0 (unconditional) or 1 of an image. model_input: of each entry.
        """
        own = denoiser.ranks.share(len(entries))
        halves = [(image.cond if half else image.uncond, image) for half, image in (entries[entry] for entry in own)]
        texts = [(text, image) for text, image in halves if text is not None]
        sample = model_input[own]
        sums = self._sums(denoiser, variant, texts, sample)
        inputs = partial(self._stack, denoiser_inputs(), texts, sample, sums)
        outputs = variant.engines.run(gather_inputs(variant.engines.signature, inputs), self.height, self.width)
        return denoiser.ranks.gather(outputs["noise"])[: len(entries)].float()

    def _sums(
        self, denoiser: Denoiser, variant: DenoiserVariant, texts: _Texts, sample: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return the sums of the outputs of the networks before the denoiser, by name. Each runs for its users."""
        sums: dict[str, torch.Tensor] = {}
        for network in denoiser.before:
            users = [entry for entry, (_, image) in enumerate(texts) if network.name in image.now.networks]
            if not users or network.feature not in variant.features:
                continue
            inputs = partial(self._stack, network.inputs, [texts[user] for user in users], sample[users], {})
            given = gather_inputs(network.engines.signature, inputs, network.prefix)
            for name, output in network.engines.run(given, self.height, self.width).items():
                if name not in sums:
                    sums[name] = output.new_zeros((len(texts), *output.shape[1:]))
                sums[name][users] += output
        return sums

    def _stack(
        self,
        inputs: Sequence[Input],
        texts: _Texts,
        sample: torch.Tensor,
        sums: Mapping[str, torch.Tensor],
        spec: TensorSpec,
        name: str,
    ) -> torch.Tensor:
        """Return an input of several batch entries. An input that a conditioning lacks is zeros.

        Texts are repeated until they are as long as the longest, or as the engine requires.
        """
        if spec.name == SAMPLE:
            return sample[:, : int(spec.shape[1])]
        if name in sums:
            return sums[name]
        one = next(one for one in inputs if one.matches(spec.name))
        tensors = [self._entry(one, spec, name, text, image, sample.device) for text, image in texts]
        if one.repeats:
            required = spec.shape[1]
            tokens = required if isinstance(required, int) else max(len(tensor) for tensor in tensors)
            tensors = [repeat_tokens(tensor, tokens) for tensor in tensors]
        return torch.stack(tensors)

    def _entry(
        self, one: Input, spec: TensorSpec, name: str, text: Conditioning, image: ImageState, device: torch.device
    ) -> torch.Tensor:
        found = (image.cond if one.scope == "image" else text).inputs.get(name)
        if found is None:
            return torch.zeros(entry_shape(spec, self.height, self.width), dtype=DTYPES[spec.dtype], device=device)
        return found[image.step if one.by_step else 0]
