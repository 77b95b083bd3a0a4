"""Prompts -> what conditions a UNet. All that depends on text, sizes and timesteps is computed here, once a request."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from model.cuda.streams import to_device
from model.denoising.loop import Conditioning
from model.denoising.noise_schedule import Floats
from model.denoising.samplers import SamplerSchedule, pad_schedules
from model.engines import components
from model.engines.shapes import DTYPES, TIMESTEP_COND, timestep_cond_width
from model.pipeline.guidance import embed_guidance, guidance_by_step, scale_by_step
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.params import GenerationParams

AESTHETIC_SCORE, NEGATIVE_AESTHETIC_SCORE = 6.0, 2.5  # diffusers' defaults for the refiner

CfgConditioning = tuple[Conditioning, Conditioning | None]
"""Conditional and unconditional; no unconditional one where no step is guided."""


def embeds_guidance(model: LoadedModel, refiner: bool) -> bool:
    """True if the UNet was distilled to take the guidance scale as an input. It then runs once a step, and no negative
    prompt reaches it."""
    time = model.engines[components.REFINER_UNET_TIME if refiner else components.UNET_TIME]
    return timestep_cond_width(time.signature) > 0


def is_guided(model: LoadedModel, params: GenerationParams, refiner: bool, begin: int = 0) -> bool:
    """True if the UNet that begins with step `begin` takes two batch entries for each image, until guidance ends."""
    return bool((guidance_by_step(params)[begin:] > 1).any()) and not embeds_guidance(model, refiner)


def encode_prompt(
    model: LoadedModel, params: GenerationParams, schedule: SamplerSchedule, refiner: bool = False
) -> CfgConditioning:
    """Condition the base, or the refiner, on a request, for all of its images and for the steps of `schedule`.

    Runs on the text stream; the current stream may read the result.
    """
    with model.text_stream.run_after():
        encoded = _encode_prompt(model, params, schedule, refiner)
    conditionings = [one for one in encoded if one is not None]
    model.text_stream.release_to_current(
        tensor for one in conditionings for tensor in (one.keys_values, one.time_embeds)
    )
    return encoded


def _time_ids(model: LoadedModel, params: GenerationParams, refiner: bool) -> tuple[list[float], list[float]]:
    """Sizes (and aesthetic score) of the conditional and the unconditional half."""
    size = [float(params.height), float(params.width)]
    before = [*size, 0.0, 0.0]
    if refiner and model.settings.refiner is not None and model.settings.refiner.requires_aesthetics_score:
        return [*before, AESTHETIC_SCORE], [*before, NEGATIVE_AESTHETIC_SCORE]
    return [*before, *size], [*before, *size]


def _encode_prompt(
    model: LoadedModel, params: GenerationParams, schedule: SamplerSchedule, refiner: bool
) -> CfgConditioning:
    """Encode the prompt and, where a step is guided, its counterpart for guidance.

    The base takes the penultimate states of both text encoders, the refiner those of the second; the pooled projection
    is always the second's. As in diffusers, a UNet that embeds the guidance scale has no unconditional half.
    """
    settings = model.settings.refiner if refiner else model.settings
    assert settings is not None
    begin = params.num_inference_steps - schedule.steps if refiner else 0
    scales = scale_by_step(params)[begin:]
    guided = is_guided(model, params, refiner, begin)
    zero_negative = params.negative_prompt is None and settings.force_zeros_for_empty_prompt
    texts = [params.prompt]
    if guided and not zero_negative:
        texts.append(params.negative_prompt or "")
    second = components.TEXT_ENCODER_2
    if refiner and not model.shares_text_encoder_2:
        second = components.REFINER_TEXT_ENCODER_2
    encoded = _encode_texts(model, second, "tokenizer_2", texts)
    hidden, pooled = encoded["hidden_states"], encoded["pooled"]
    if not refiner:
        # Queued after the second encoder, which is the larger by far and has been running meanwhile.
        with model.first_text_stream.run_after():
            first = _encode_texts(model, components.TEXT_ENCODER, "tokenizer", texts)["hidden_states"]
        model.first_text_stream.release_to_current([first])
        hidden = torch.cat([first.to(hidden.dtype), hidden], dim=-1)
    if guided and zero_negative:
        hidden = torch.cat([hidden, torch.zeros_like(hidden)])
        pooled = torch.cat([pooled, torch.zeros_like(pooled)])
    time_ids = _time_ids(model, params, refiner)
    cond, *uncond = _conditionings(model, refiner, hidden, pooled, time_ids, schedule, scales)
    return cond, replace(uncond[0], is_zero=zero_negative) if uncond else None


def _conditionings(
    model: LoadedModel,
    refiner: bool,
    hidden: torch.Tensor,
    pooled: torch.Tensor,
    time_ids: Sequence[list[float]],
    schedule: SamplerSchedule,
    scales: Floats,
) -> list[Conditioning]:
    """One for each text: hidden [texts, tokens, width], pooled [texts, width], and that text's `time_ids`.

    `scales`: the guidance scale of each step, for a UNet that embeds it.
    """
    text = model.engines[components.REFINER_UNET_TEXT if refiner else components.UNET_TEXT]
    time = model.engines[components.REFINER_UNET_TIME if refiner else components.UNET_TIME]
    dtype = DTYPES[text.signature.inputs[0].dtype]
    keys_values = text.run({"encoder_hidden_states": hidden.to(dtype)})["keys_values"]
    steps = max(1, schedule.steps)  # a request may leave one of its two UNets without steps
    timesteps = to_device(torch.from_numpy(pad_schedules([schedule], steps)[0][0]), model.device)
    width = timestep_cond_width(time.signature)
    guidance = {}
    if width:
        guidance[TIMESTEP_COND] = to_device(embed_guidance(np.resize(scales, steps), width).to(dtype), model.device)
    made = []
    for index in range(len(hidden)):
        embedded = time.run(
            {
                "timestep": timesteps,
                "text_embeds": pooled[index].to(dtype).expand(steps, -1),
                "time_ids": to_device(torch.tensor(time_ids[index]), model.device).expand(steps, -1),
                **guidance,
            }
        )
        made.append(Conditioning(keys_values[index : index + 1], embedded["time_embeds"]))
    return made


def _encode_texts(model: LoadedModel, component: str, tokenizer: str, texts: list[str]) -> dict[str, torch.Tensor]:
    ids = [model.tokenizers[tokenizer].encode(text)[0] for text in texts]
    return model.engines[component].run({"input_ids": to_device(torch.tensor(ids), model.device)})
