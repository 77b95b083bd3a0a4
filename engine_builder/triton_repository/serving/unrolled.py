"""The models of the unrolled pipeline inside of Triton, except the conditioner. Each opens only the components that it
runs.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from engine_builder.triton_repository.config import TritonConfigError
from engine_builder.triton_repository.serving.pipeline_model import PipelineModel, Tensors
from engine_builder.triton_repository.unrolled import (
    COEFFICIENT_ROWS,
    CONTROL_BY_STEP,
    DRAWS,
    END,
    KNOWN,
    KNOWN_NOISE,
    LATENT_MASK,
    NEGATIVE_GIVEN,
    OF_TEXTS,
    POOLED,
    TOKENS,
    control_specs,
    control_tensor,
    controls_of,
    hidden_name,
)
from model.denoising.cover import StepCosts
from model.denoising.loop import Conditioning, ImageState, Known
from model.denoising.loop_schedule import KEPT, NOISE, PREVIOUS, STATE, X, loop_schedule
from model.denoising.prediction import predict_noise
from model.denoising.samplers import sampler_schedule
from model.denoising.step import advance, keep_known
from model.denoising.step_plan import StepPlan, needs_by_step
from model.engines.shapes import DTYPES
from model.engines.signatures import CONTROL_SCALE as CONTROL_SCALE_INPUT
from model.engines.signatures import KEYS_VALUES, control_input
from model.errors import RequestRefused
from model.images.encode import broken_image, to_levels
from model.pipeline.spec import UNET
from model.pipeline.vae import decode_latents
from model.prompts.weighted_prompt import plain_chunks
from model.store.manifest import Signature


class Tokenize(PipelineModel):
    """prompt, negative_prompt -> the ids of each tokenizer, and 1 if a negative prompt was given."""

    def run(self, inputs: Tensors) -> Tensors:
        negatives = inputs.get("negative_prompt")
        tokens = []
        for index, prompt in enumerate(inputs["prompt"]):
            negative = None if negatives is None else _text(negatives[index], "negative_prompt")
            params = self.params(prompt=_text(prompt, "prompt"), negative_prompt=negative)
            texts = [params.prompt, params.negative_prompt or ""][: self.texts]
            tokenizers = self.model.tokenizers.values()
            ids = [[plain_chunks(tokenizer, text).ids[0] for text in texts] for tokenizer in tokenizers]
            tokens.append(torch.tensor(ids))
        given = torch.full((len(tokens), 1), int(negatives is not None), dtype=torch.int32)
        return {TOKENS: torch.stack(tokens), NEGATIVE_GIVEN: given}


class EncodeTexts(PipelineModel):
    """tokens -> the hidden states of each text encoder, and the last one's pooled text."""

    def run(self, inputs: Tensors) -> Tensors:
        tokens, names = inputs[TOKENS], list(self.model.tokenizers)  # [images, tokenizers, texts, tokens]
        outputs: Tensors = {}
        encoders = self.model.family.base.text_encoders
        for encoder, tokenizer in encoders:
            engines = self.model.engines[encoder]
            ids = tokens[:, names.index(tokenizer)]
            encoded = engines.run(_encoder_inputs(engines.signature, ids.flatten(0, 1)))
            by_image = {name: tensor.reshape(*ids.shape[:2], *tensor.shape[1:]) for name, tensor in encoded.items()}
            outputs[hidden_name(encoder)] = by_image["hidden_states"]
            if encoder == encoders[-1][0] and POOLED in by_image:
                outputs[POOLED] = by_image[POOLED]
        return outputs


def _encoder_inputs(signature: Signature, ids: torch.Tensor) -> Tensors:
    """Return the inputs of a text encoder. Choices among its layers are one-hot; the first is the default."""
    inputs = {"input_ids": ids.contiguous()}
    for spec in signature.inputs:
        if spec.name not in inputs:
            chosen = torch.zeros((len(ids), *map(int, spec.shape[1:])), dtype=DTYPES[spec.dtype], device=ids.device)
            chosen[:, 0] = 1
            inputs[spec.name] = chosen
    return inputs


class PredictNoise(PipelineModel):
    """Latents, step and conditioning -> the guided prediction of the UNet. Zeros for images whose steps have ended."""

    def _open(self, name: str, config: Mapping[str, Any], args: Mapping[str, str]) -> None:
        super()._open(name, config, args)
        if UNET in self.model.fp16_engines and self.model.fp16_steps.exist:
            raise TritonConfigError(
                f"Some steps of release {self.served.release} run in fp16 and others in 8 bits, and the unrolled "
                "pipeline has one UNet.",
                "Use the loop (`preheat export-triton --loop`), or set PREHEAT_PRECISION=fp16.",
            )
        self._denoiser = self.model.denoiser(UNET, self.height, self.width)
        self._costs = StepCosts(self._denoiser.options(self.height, self.width, in_graphs=False))
        controls = controls_of(self.manifest)
        self._scales = {name: control_tensor(name, CONTROL_SCALE_INPUT) for name in controls}
        self._control_keys = [(name, spec.name) for name in controls for spec in control_specs(self.manifest, name)]
        # An image's state has these, but the prediction does not read them.
        self._generator = torch.Generator("cpu")
        self._schedule = loop_schedule(
            sampler_schedule(self.served.defaults.scheduler, self.steps, self.model.noise_schedules["base"])
        )

    def run(self, inputs: Tensors) -> Tensors:
        self.check_steps(inputs)
        active = (inputs["step"] < inputs[END])[:, 0]
        noise = torch.zeros_like(inputs["latents"])
        if active.any():
            noise[active] = self._predict({name: tensor[active] for name, tensor in inputs.items()})
        return {"noise": noise}

    def _predict(self, inputs: Tensors) -> torch.Tensor:
        latents, steps = inputs["latents"], inputs["step"][:, 0].long()  # [images, channels, height/8, width/8]
        images = [self._image(index, inputs) for index in range(len(latents))]
        rows = inputs[COEFFICIENT_ROWS][torch.arange(len(latents), device=latents.device), steps]
        cover = self._costs.cheapest(self._denoiser.counts(images))
        model_input = rows[:, 0].reshape(-1, 1, 1, 1) * latents
        return predict_noise(self._denoiser, cover, images, model_input, self.height, self.width)

    def _image(self, index: int, inputs: Tensors) -> ImageState:
        """Return the state of one image before its next step."""
        cond, *uncond = (Conditioning(self._inputs_of_text(index, text, inputs)) for text in range(self.texts))
        guidance = inputs["guidance"][index].cpu().numpy()
        uses = {name: inputs[scale][index, :, 0].cpu().numpy() != 0 for name, scale in self._scales.items()}
        plan = StepPlan(
            self._schedule,
            guidance,
            self.served.defaults.guidance_rescale,
            np.where(guidance > 1, self.texts, 1).astype(np.int8),
            False,
            np.arange(self.steps),
            needs_by_step((), uses, self.steps),
            uses,
            np.zeros(self.steps, np.bool_),
        )
        step, negative = int(inputs["step"][index]), uncond[0] if uncond else None
        return ImageState(index, self._generator, plan, cond=cond, uncond=negative, step=step)

    def _inputs_of_text(self, index: int, text: int, inputs: Tensors) -> Tensors:
        """Return the inputs of the networks for a text of an image, [steps, ...], or [1, ...] for all steps."""
        found = {KEYS_VALUES: inputs[KEYS_VALUES][index, text][None], "time_embeds": inputs["time_embeds"][index, text]}
        for name, key in self._control_keys:
            rows = inputs[control_tensor(name, key)][index]
            rows = rows[text] if key in OF_TEXTS else rows
            found[control_input(name, key)] = rows if key in CONTROL_BY_STEP else rows[None]
        return found


class TakeStep(PipelineModel):
    """Latents and the predicted noise -> the latents of the next step."""

    def run(self, inputs: Tensors) -> Tensors:
        self.check_steps(inputs)
        x, step = inputs["latents"], inputs["step"]
        images, steps = torch.arange(len(x), device=x.device), step[:, 0].long()
        draws = inputs[DRAWS][images, steps]
        drawn = [_draw(int(seed), int(before), x.shape[1:]) for seed, before in zip(inputs["seed"], draws, strict=True)]
        rows = inputs[COEFFICIENT_ROWS][images, steps]
        state = x.new_zeros((len(x), STATE, *x.shape[1:]))
        state[:, X], state[:, PREVIOUS], state[:, NOISE] = x, inputs["previous"], torch.stack(drawn).to(x.device)
        advance(state, inputs["noise"], steps % KEPT, rows[:, 1:-2].reshape(-1, 2, STATE))
        x, previous = state[:, X].contiguous(), state[:, PREVIOUS].contiguous()
        if KNOWN in inputs:
            known = Known(inputs[KNOWN], inputs[KNOWN_NOISE], inputs[LATENT_MASK])
            keep_known(x, known, rows.T[-2:].reshape(2, -1, 1, 1, 1), out=x)
        return {"latents": x, "previous": previous, "step": step + 1}


def _draw(seed: int, before: int, shape: torch.Size) -> torch.Tensor:
    """Draw the noise of a step. The draws before it are repeated, so that no state is kept between steps.

    before: their number; -1: the step draws none, and its noise is zeros.
    """
    if before < 0:
        return torch.zeros(shape)
    generator = torch.Generator("cpu").manual_seed(seed)
    for _ in range(before):
        torch.randn(shape, generator=generator)
    return torch.randn(shape, generator=generator)


class DecodeLatents(PipelineModel):
    """Latents -> pixels, nominally in [-1, 1]."""

    def run(self, inputs: Tensors) -> Tensors:
        return {"pixels": decode_latents(self.model, inputs["latents"])}


class PostProcess(PipelineModel):
    """Pixels -> uint8 [height, width, 3]. An image with NaN or infinity is an error."""

    def run(self, inputs: Tensors) -> Tensors:
        levels, finite = to_levels(inputs["pixels"])
        broken = [index for index, is_finite in enumerate(finite.tolist()) if not is_finite]
        if broken:
            raise broken_image(broken, len(finite))
        return {"image": levels}


def _text(content: torch.Tensor, field: str) -> str:
    """Return the text of an UINT8 tensor. Raises RequestRefused."""
    try:
        return bytes(content.cpu().numpy()).decode()
    except UnicodeDecodeError as error:
        raise RequestRefused(field, f"byte {error.start + 1} is not UTF-8. Send UTF-8.") from error
