"""Encode prompts into the conditioning of a UNet.

Everything that depends on text, sizes and timesteps is computed here, once per request and UNet.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch

from model.adapters.changes import AdapterChanges
from model.adapters.layers import Scale
from model.adapters.packing import add_to_keys_values, pack
from model.cuda.streams import to_device
from model.denoising.loop import Conditioning
from model.engines.shapes import DTYPES
from model.engines.signatures import (
    CLIP_SKIP,
    KEYS_VALUES,
    TIMESTEP_COND,
    clip_skip_columns,
    timestep_cond_width,
)
from model.pipeline.control import condition_controlnet
from model.pipeline.guidance import embed_guidance
from model.pipeline.image_prompt import condition_image_prompts
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.request_plan import CfgConditioning, DenoisePlan, PassPlan
from model.pipeline.spec import Denoiser


def encode_prompt(
    model: LoadedModel, request: PassPlan, denoiser: Denoiser, changes: Sequence[tuple[AdapterChanges, Scale]] = ()
) -> CfgConditioning:
    """Condition a UNet on a pass of a request, for all of its images and steps. `changes`: of its packed adapters.

    Runs on the text stream; the current stream may read the result.
    """
    plan = request.denoise[denoiser.unet]
    with model.text_stream.run_after():
        hidden, pooled, chunks = _encode_texts(
            model, request, denoiser, texts=1 + (plan.guided and not plan.step_plan.zero_negative)
        )
        if plan.guided and plan.step_plan.zero_negative:
            hidden, chunks = torch.cat([hidden, torch.zeros_like(hidden[:1])]), [*chunks, 1]
            pooled = None if pooled is None else torch.cat([pooled, torch.zeros_like(pooled)])
        cond, *uncond = _conditionings(model, denoiser, plan, hidden, pooled, chunks, changes)
    # The library may drop the adapters as soon as the request has begun.
    model.text_stream.keep(part for adapter, _ in changes for one in adapter.values() for part in one.parts.values())
    conditionings = [cond, *uncond]
    model.text_stream.release_to_current(tensor for text in conditionings for tensor in text.inputs.values())
    return cond, uncond[0] if uncond else None


def _encode_texts(
    model: LoadedModel, request: PassPlan, denoiser: Denoiser, texts: int
) -> tuple[torch.Tensor, torch.Tensor | None, list[int]]:
    """Encode the prompt and, with `texts` 2, the negative prompt.

    Returns the weighted hidden states that the family makes of its text encoders' for the chunks of all texts
    [chunks, tokens, width], the pooled projection of each text's first chunk [texts, width] (None without one), and the
    number of chunks of each text.
    """

    def run(component: str, tokenizer: str) -> dict[str, torch.Tensor]:
        engines, encoded_texts = model.engines[component], request.texts[tokenizer][:texts]
        inputs = {"input_ids": torch.tensor([ids for text in encoded_texts for ids in text.ids])}
        if layers := clip_skip_columns(engines.signature):
            # As in diffusers, the negative prompt skips no layers.
            skipped = [request.params.clip_skip, 0][:texts]
            by_chunk = [skip for skip, text in zip(skipped, encoded_texts, strict=True) for _ in text.ids]
            inputs[CLIP_SKIP] = torch.nn.functional.one_hot(torch.tensor(by_chunk), layers)
        outputs = engines.run({name: to_device(tensor, model.device) for name, tensor in inputs.items()})
        if any(text.weights for text in encoded_texts):
            by_token = [row for text in encoded_texts for row in text.weights or [[1.0] * len(ids) for ids in text.ids]]
            states = outputs["hidden_states"]
            weights = to_device(torch.tensor(by_token), model.device)[:, :, None]
            outputs = {**outputs, "hidden_states": (states.float() * weights).to(states.dtype)}
        return outputs

    def run_on_stream(component: str, tokenizer: str) -> dict[str, torch.Tensor]:
        if model.family.components[component].stream == "text":
            return run(component, tokenizer)
        with model.first_text_stream.run_after():
            outputs = run(component, tokenizer)
        model.first_text_stream.release_to_current(outputs.values())
        return outputs

    chunks = [len(text.ids) for text in request.texts[denoiser.text_encoders[-1][1]][:texts]]
    hidden, pooled = model.family.encode_prompt(denoiser, run_on_stream)
    if pooled is not None:
        pooled = torch.stack([pooled[first] for first in accumulate(chunks[:-1], initial=0)])
    return hidden, pooled, chunks


def _conditionings(
    model: LoadedModel,
    denoiser: Denoiser,
    plan: DenoisePlan,
    hidden: torch.Tensor,
    pooled: torch.Tensor | None,
    chunks: Sequence[int],
    changes: Sequence[tuple[AdapterChanges, Scale]],
) -> Sequence[Conditioning]:
    """Return the conditioning of each text, from hidden [chunks, tokens, width] and pooled [texts, width].

    `chunks`: the number of chunks of each text. Without pooled text the embeddings of time are those of every text.
    `changes`: of adapters that the UNet takes as inputs, with their scales.
    """
    text, time = model.engines[denoiser.text], model.engines[denoiser.time]
    dtype = DTYPES[text.signature.inputs[0].dtype]
    keys_values = text.run({"encoder_hidden_states": hidden.to(dtype)})[KEYS_VALUES]
    packed: dict[str, torch.Tensor] = {}
    if changes:
        assert model.adapters is not None and model.adapters.packing is not None
        keys_values = add_to_keys_values(keys_values, hidden, model.adapters.layers, changes)
        packed = pack(model.adapters.packing, changes, dtype)
    steps = plan.step_plan.steps
    shared = {"timestep": to_device(torch.tensor(plan.step_plan.schedule.timesteps, dtype=torch.float32), model.device)}
    times = [shared]  # the inputs of time networks for each text; one of them if they do not depend on the text
    if pooled is not None:
        numbers = [to_device(torch.tensor(one, dtype=torch.float32), model.device) for one in plan.time_ids]
        of_texts = [model.family.time_inputs(*of_text) for of_text in zip(pooled.to(dtype), numbers, strict=False)]
        times = [shared | {name: one.expand(steps, -1) for name, one in of_text.items()} for of_text in of_texts]
    guidance = {}
    if width := timestep_cond_width(time.signature):
        guidance[TIMESTEP_COND] = to_device(embed_guidance(plan.scales, width).to(dtype), model.device)
    time_embeds = [time.run(of_text | guidance)["time_embeds"] for of_text in times]
    conditionings = [
        Conditioning(
            {
                KEYS_VALUES: of_text.flatten(0, 1)[None],
                "time_embeds": time_embeds[min(index, len(time_embeds) - 1)],
                **packed,
            }
        )
        for index, of_text in enumerate(torch.split(keys_values, list(chunks)))
    ]
    for name, control in plan.controls.items():
        of_texts = condition_controlnet(model, name, control, hidden, chunks, times)
        for conditioning, inputs in zip(conditionings, of_texts, strict=True):
            conditioning.inputs.update(inputs)
    if plan.image_prompts:
        of_halves = condition_image_prompts(model, plan.image_prompts, guided=len(conditionings) > 1)
        for conditioning, inputs in zip(conditionings, of_halves, strict=True):
            conditioning.inputs.update(inputs)
    return conditionings
