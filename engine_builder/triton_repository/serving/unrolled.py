"""The models of the unrolled pipeline inside of Triton. Each opens only the components that it runs.

A model takes the tensors of all merged requests at once, with the images along the first dimension.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from engine_builder.triton_repository.config import TritonConfigError, check_config
from engine_builder.triton_repository.serving.backend import (
    as_triton_error,
    error_response,
    open_release,
    read_tensor,
    refusal,
    response,
)
from engine_builder.triton_repository.unrolled import (
    NEGATIVE_GIVEN,
    POOLED,
    TOKENS,
    components_of_model,
    hidden_name,
    texts_of,
    unrolled_models,
)
from model.api.request import GenerationRequest
from model.api.resolve import resolve
from model.cold_start import ColdStart
from model.denoising.samplers import KNOWN_COEFFICIENTS, pad_schedules, sampler_schedule
from model.denoising.step import advance, guide
from model.engines.engine import EngineSet
from model.engines.shapes import DTYPES
from model.engines.signatures import KEYS_VALUES
from model.errors import RequestRefused
from model.images.encode import broken_image, to_levels
from model.loading.load import load_release
from model.loading.runtimes import find_targets, runtime_cache_folder
from model.pipeline.decode import decode_latents
from model.pipeline.image_to_image import draw_latents
from model.pipeline.params import GenerationParams
from model.pipeline.plan import plan_request
from model.pipeline.prompt import encode_prompt
from model.pipeline.spec import BASE, UNET
from model.settings import read_settings
from model.store.manifest import Signature

Tensors = dict[str, torch.Tensor]
_GUIDED = 2.0  # a guidance scale for which both texts are encoded; the conditioning does not depend on its value


class PipelineModel:
    """Triton's `TritonPythonModel` of one model of the pipeline. Subclasses implement `run`."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Open the components of the model. Raises what Triton reports as the reason why it is unavailable."""
        try:
            self._open(args["model_name"], json.loads(args["model_config"]), args)
        except Exception as error:
            raise as_triton_error(args["model_name"], error) from error

    def _open(self, name: str, config: Mapping[str, Any], args: Mapping[str, str]) -> None:
        settings = read_settings()
        if settings.safety != "off":
            raise TritonConfigError(
                f"PREHEAT_SAFETY is {settings.safety}, and the unrolled pipeline has no safety checker.",
                "Use the loop (`preheat export-triton --loop`), or set PREHEAT_SAFETY=off.",
            )
        store, release = open_release(args)
        self.manifest = store.read_release(release)
        try:
            steps = int(config["parameters"]["steps"]["string_value"])
        except (KeyError, ValueError) as error:
            raise TritonConfigError(f"config.pbtxt of {name} has no number in its parameter steps.") from error
        expected = unrolled_models(self.manifest, steps)[name]
        check_config(config, expected)
        self.inputs, self.texts = expected.inputs, texts_of(self.manifest)
        targets = find_targets(settings.runtime)
        loaded = load_release(
            store,
            release,
            targets,
            settings.buckets,
            ColdStart(),
            settings.public_key,
            runtime_cache_folder(settings.store_options().cache_folder, targets),
            settings.served_precision,
            components=components_of_model(name, self.manifest),
        )
        self.model, self.served = loaded.model, loaded.served
        self.height, self.width = self.served.native_height, self.served.native_width
        self.schedule = sampler_schedule(self.served.defaults.scheduler, steps, self.model.noise_schedules["base"])
        # [steps, 9], in the order of COEFFICIENTS and KNOWN_COEFFICIENTS
        self.coefficients = torch.from_numpy(pad_schedules([self.schedule], steps)[1][0]).to(self.model.device)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Run all merged requests at once, and return their responses. After an error each is run alone."""
        try:
            parts = [{tensor.name: read_tensor(request, tensor.name) for tensor in self.inputs} for request in requests]
            counts = [len(next(tensor for tensor in part.values() if tensor is not None)) for part in parts]
            names = [name for name, tensor in parts[0].items() if tensor is not None]
            with torch.inference_mode():
                device = self.model.device
                merged = {name: torch.cat([_present(part[name]).to(device) for part in parts]) for name in names}
                outputs = self.run(merged)
                divided = {name: torch.split(tensor, counts) for name, tensor in outputs.items()}
                return [
                    response({name: tensors[index].clone() for name, tensors in divided.items()})
                    for index in range(len(requests))
                ]
        except Exception as error:
            if len(requests) > 1:
                return [answer for request in requests for answer in self.execute([request])]
            return [error_response(error)]

    def run(self, inputs: Tensors) -> Tensors:
        """Return the outputs of merged requests. All tensors have the images along the first dimension."""
        raise NotImplementedError

    def params(self, **fields: Any) -> GenerationParams:
        """Return the parameters of an image with the pipeline's steps and size. Raises RequestRefused."""
        values: dict[str, Any] = {
            "prompt": "-",
            "use_refiner": False,
            "prompt_syntax": "plain",
            "num_inference_steps": self.schedule.steps,
        } | fields
        try:
            return resolve(GenerationRequest(**values), self.served)
        except ValidationError as error:
            raise refusal(error) from error


def _present(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor


class Tokenize(PipelineModel):
    """prompt, negative_prompt -> the ids of each tokenizer, and 1 if a negative prompt was given."""

    def run(self, inputs: Tensors) -> Tensors:
        negatives = inputs.get("negative_prompt")
        tokens = []
        for index, prompt in enumerate(inputs["prompt"]):
            negative = None if negatives is None else _text(negatives[index], "negative_prompt")
            params = self.params(prompt=_text(prompt, "prompt"), negative_prompt=negative)
            texts = [params.prompt, params.negative_prompt or ""][: self.texts]
            ids = [[tokenizer.encode(text)[0] for text in texts] for tokenizer in self.model.tokenizers.values()]
            tokens.append(torch.tensor(ids))
        given = torch.full((len(tokens), 1), int(negatives is not None), dtype=torch.int32)
        return {TOKENS: torch.stack(tokens), NEGATIVE_GIVEN: given}


class EncodeTexts(PipelineModel):
    """tokens -> the hidden states of each text encoder, and the last one's pooled text."""

    def run(self, inputs: Tensors) -> Tensors:
        tokens, names = inputs[TOKENS], list(self.model.tokenizers)  # [images, tokenizers, texts, tokens]
        outputs: Tensors = {}
        encoders = BASE.encoders(self.model.engines)
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
    """Return the inputs of a text encoder. Those that choose among its layers are one-hot; the first is the default."""
    inputs = {"input_ids": ids.contiguous()}
    for spec in signature.inputs:
        if spec.name not in inputs:
            chosen = torch.zeros((len(ids), *map(int, spec.shape[1:])), dtype=DTYPES[spec.dtype], device=ids.device)
            chosen[:, 0] = 1
            inputs[spec.name] = chosen
    return inputs


class _Encoded(EngineSet):
    """Stands for a text encoder that has run in another model: returns its outputs."""

    def __init__(self, component: str, signature: Signature) -> None:
        self.component, self.signature = component, signature
        self.outputs: Tensors = {}  # [texts, ...]

    def run(self, inputs: Mapping[str, torch.Tensor], height: int = 0, width: int = 0) -> Tensors:
        count = len(inputs["input_ids"])
        return {name: tensor[:count] for name, tensor in self.outputs.items()}


class Condition(PipelineModel):
    """Encoded texts, seed and guidance scale -> the first latents, and the conditioning of all steps."""

    def _open(self, name: str, config: Mapping[str, Any], args: Mapping[str, str]) -> None:
        super()._open(name, config, args)
        signatures = {engine.component: engine.signature for engine in self.manifest.engines}
        encoders = [encoder for encoder, _ in BASE.encoders(self.manifest.architectures)]
        self._encoders = {encoder: _Encoded(encoder, signatures[encoder]) for encoder in encoders}
        self.model.engines |= self._encoders

    def run(self, inputs: Tensors) -> Tensors:
        images = [self._condition({name: tensor[index] for name, tensor in inputs.items()})
                  for index in range(len(inputs["seed"]))]  # fmt: skip
        return {name: torch.stack([image[name] for image in images]) for name in images[0]}

    def _condition(self, image: Tensors) -> Tensors:
        for name, encoder in self._encoders.items():
            encoder.outputs = {"hidden_states": image[hidden_name(name)]}
            if POOLED in {spec.name for spec in encoder.signature.outputs}:
                encoder.outputs[POOLED] = image[POOLED]
        params = self.params(
            negative_prompt="" if int(image[NEGATIVE_GIVEN]) else None,
            seed=int(image["seed"]),
            guidance_scale=float(image["guidance_scale"]),
        )
        guidance = next(iter(plan_request(self.model, params).denoise.values())).guidance
        # Both texts are encoded also for a request without guidance, so that all requests have equal shapes.
        plan = plan_request(self.model, params if self.texts == 1 else replace(params, guidance_scale=_GUIDED))
        conditionings = [text for text in encode_prompt(self.model, plan, BASE) if text is not None]
        latents = plan.init_sigma * draw_latents(self.model, plan, plan.images()[0])[0]
        conditioning = [text.inputs for text in conditionings]
        return {
            "latents": latents,
            "previous": torch.zeros_like(latents),
            "step": torch.zeros(1, dtype=torch.int32),
            "keys_values": torch.cat([text["keys_values"] for text in conditioning]),  # [texts, tokens, width]
            "time_embeds": torch.stack([text["time_embeds"] for text in conditioning]),  # [texts, steps, width]
            "guidance": torch.from_numpy(np.array(guidance)),
        }


class PredictNoise(PipelineModel):
    """Latents, step and conditioning -> the guided prediction of the UNet."""

    def run(self, inputs: Tensors) -> Tensors:
        latents, steps = inputs["latents"], inputs["step"][:, 0].long()  # [images, channels, height/8, width/8]
        images = torch.arange(len(latents), device=latents.device)
        sample = self.coefficients[steps, 0].reshape(-1, 1, 1, 1) * latents
        halves = range(self.texts)  # the prompt first; a batch of the UNet has the unconditional halves first
        entries = {
            "sample": torch.cat([sample for _ in halves]),
            "time_embeds": torch.cat([inputs["time_embeds"][images, half, steps] for half in reversed(halves)]),
            "keys_values": torch.cat([inputs["keys_values"][:, half] for half in reversed(halves)]),
        }
        engines = self.model.engines[UNET]
        required = next(spec.shape[1] for spec in engines.signature.inputs if spec.name == KEYS_VALUES)
        if isinstance(required, int):  # a UNet that was built for longer prompts
            entries[KEYS_VALUES] = entries[KEYS_VALUES].repeat(1, required // entries[KEYS_VALUES].shape[1], 1)
        typed = {spec.name: entries[spec.name].to(DTYPES[spec.dtype]) for spec in engines.signature.inputs}
        noise = engines.run(typed, self.height, self.width)["noise"].float()
        if self.texts == 1:
            return {"noise": noise}
        scale = inputs["guidance"][images, steps].reshape(-1, 1, 1, 1)
        rescale = torch.where(scale > 1, self.served.defaults.guidance_rescale, 0.0)
        return {"noise": guide(noise[: len(latents)], noise[len(latents) :], scale, rescale)}


class TakeStep(PipelineModel):
    """Latents and the predicted noise -> the latents of the next step."""

    def run(self, inputs: Tensors) -> Tensors:
        x, previous, steps = inputs["latents"].clone(), inputs["previous"].clone(), inputs["step"]
        drawn = [
            self._draw(int(seed), int(step), x.shape[1:]) for seed, step in zip(inputs["seed"], steps, strict=True)
        ]
        columns = self.coefficients[steps[:, 0].long()].T.reshape(-1, len(x), 1, 1, 1)
        update = columns[1 : -len(KNOWN_COEFFICIENTS)]
        advance(x, previous, inputs["noise"], torch.stack(drawn).to(x.device), list(update))
        return {"latents": x, "previous": previous, "step": steps + 1}

    def _draw(self, seed: int, step: int, shape: torch.Size) -> torch.Tensor:
        """Draw the noise of a step. All draws before it are repeated, so that no state is kept between steps."""
        draws = self.schedule.draws_noise
        if not draws[step]:
            return torch.zeros(shape)
        generator = torch.Generator("cpu").manual_seed(seed)
        for _ in range(1 + int(draws[:step].sum())):  # the first is that of the latents
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
