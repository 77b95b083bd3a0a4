"""The conditioner of the unrolled pipeline: all that follows from a request before its first step."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from engine_builder.triton_repository.serving.pipeline_model import PipelineModel, Tensors
from engine_builder.triton_repository.unrolled import (
    COEFFICIENT_ROWS,
    CONTROL_BY_STEP,
    CONTROL_IMAGE,
    CONTROL_MODE,
    CONTROL_SCALE,
    DRAWS,
    END,
    INPUT_IMAGE,
    KNOWN,
    KNOWN_NOISE,
    LATENT_MASK,
    MASK,
    NEGATIVE_GIVEN,
    OF_TEXTS,
    POOLED,
    STRENGTH,
    control_specs,
    control_tensor,
    controls_of,
    hidden_name,
    shortest_decimal,
    takes_image,
)
from model.denoising.buffers import entry_shape
from model.denoising.loop import ImageState, Known
from model.denoising.loop_schedule import LoopSchedule, device_rows
from model.engines.engine import EngineSet
from model.engines.shapes import DTYPES
from model.engines.signatures import KEYS_VALUES, control_input
from model.errors import RequestRefused
from model.pipeline.encoded_once import EncodedOnce
from model.pipeline.image_to_image import draw_latents, prepare_from_image
from model.pipeline.params import Control, GenerationParams, Mask
from model.pipeline.prompt import encode_prompt
from model.pipeline.request_plan import PassPlan, plan_request
from model.pipeline.spec import UNET
from model.store.manifest import Signature
from model.validation import RANDOM_SEED, SEED_COUNT

_IN_TENSOR = "-"  # in place of an image's text in a request
_GUIDED = 2.0  # a guidance scale for which both texts are encoded; the conditioning does not depend on its value


class _Elsewhere(EngineSet):
    """Stands for a component that runs in another model: a text encoder returns the outputs it had there."""

    def __init__(self, component: str, signature: Signature) -> None:
        self.component, self.signature = component, signature
        self.outputs: Tensors = {}  # [texts, ...]

    def run(self, inputs: Mapping[str, torch.Tensor], height: int = 0, width: int = 0) -> Tensors:
        count = len(inputs["input_ids"])
        return {name: tensor[:count] for name, tensor in self.outputs.items()}


class Condition(PipelineModel):
    """Encoded texts, seed, guidance scale and an input image -> the first latents, and the conditioning of all steps.

    An image whose input image leaves it fewer steps has rows of zeros after its last one.
    """

    def _open(self, name: str, config: Mapping[str, Any], args: Mapping[str, str]) -> None:
        super()._open(name, config, args)
        signatures = {engine.component: engine.signature for engine in self.manifest.engines}
        encoders = [encoder for encoder, _ in self.model.family.base.text_encoders]
        self._encoders = {encoder: _Elsewhere(encoder, signatures[encoder]) for encoder in encoders}
        self.model.engines |= self._encoders | {UNET: _Elsewhere(UNET, signatures[UNET])}

    def run(self, inputs: Tensors) -> Tensors:
        images = [self._condition({name: tensor[index] for name, tensor in inputs.items()})
                  for index in range(len(inputs["seed"]))]  # fmt: skip
        return {name: torch.stack([image[name] for image in images]) for name in images[0]}

    def _condition(self, tensors: Tensors) -> Tensors:
        for name, encoder in self._encoders.items():
            encoder.outputs = {"hidden_states": tensors[hidden_name(name)]}
            if POOLED in {spec.name for spec in encoder.signature.outputs}:
                encoder.outputs[POOLED] = tensors[POOLED]
        params = self._params(tensors)
        guidance = plan_request(self.model, params).first.step_plan.guidance
        # Both texts are encoded also for a request without guidance, so that all requests have equal shapes.
        request = plan_request(self.model, params if self.texts == 1 else replace(params, guidance_scale=_GUIDED))
        [plan], [image] = request.passes, request.images()
        encoded = encode_prompt(self.model, plan, self.model.family.base)
        conditioning = [text.inputs for text in encoded if text is not None]
        start, draws = self._start(plan, image)
        schedule = image.plan.schedule
        rows = torch.from_numpy(device_rows(schedule, self.steps))
        return (
            start
            | self._controls(conditioning)
            | {
                "previous": torch.zeros_like(start["latents"]),
                "step": torch.zeros(1, dtype=torch.int32),
                COEFFICIENT_ROWS: rows,  # [steps, ROW_WIDTH]
                DRAWS: self._pad(_draws_before(schedule, draws)),
                END: torch.tensor([len(schedule)], dtype=torch.int32),
                "keys_values": torch.cat([text["keys_values"] for text in conditioning]),  # [texts, tokens, width]
                "time_embeds": torch.stack([self._pad(text["time_embeds"]) for text in conditioning]),
                "guidance": self._pad(torch.from_numpy(np.array(guidance))),
            }
        )

    def _params(self, tensors: Tensors) -> GenerationParams:
        """Return the parameters of an image. Raises RequestRefused."""
        fields: dict[str, Any] = {
            "negative_prompt": "" if int(tensors[NEGATIVE_GIVEN]) else None,
            "seed": int(tensors["seed"]),
            "guidance_scale": _number(tensors["guidance_scale"]),
        }
        if fields["seed"] == RANDOM_SEED:
            raise RequestRefused(
                "seed",
                f"got -1, expected an integer from 0 to {SEED_COUNT - 1}: each step reads it, so it is not random.",
            )
        for name in (STRENGTH, MASK):
            if name in tensors and INPUT_IMAGE not in tensors:
                raise RequestRefused(name, f"needs {INPUT_IMAGE}, which is missing. Send it, or leave {name} out.")
        if INPUT_IMAGE in tensors:
            fields["image"] = _IN_TENSOR
        if STRENGTH in tensors:
            fields["strength"] = _number(tensors[STRENGTH])
        if MASK in tensors:
            fields["masks"] = [{"image": _IN_TENSOR}]
        controls = [control for name in controls_of(self.manifest) for control in _control(name, tensors)]
        try:
            params = self.params(**fields, **({"controls": controls} if controls else {}))
        except RequestRefused as error:
            raise _of_tensor(error, [control["name"] for control in controls]) from error
        used = tuple(
            Control(
                control["name"],
                _levels(tensors[f"{CONTROL_IMAGE}.{control['name']}"]),
                control.get("scale", 1.0),
                0.0,
                1.0,
                control.get("mode"),
            )
            for control in controls
        )
        params = replace(params, controls=used)
        if INPUT_IMAGE in tensors:
            params = replace(params, image=_levels(tensors[INPUT_IMAGE]))
        if MASK in tensors:
            mask = Mask(_levels(tensors[MASK]), params.prompt, params.negative_prompt, params.strength)
            params = replace(params, masks=(mask,))
        return params

    def _controls(self, conditioning: Sequence[Tensors]) -> Tensors:
        """Return the inputs of all ControlNets by their names in a conditioning; zeros of one that is not used."""
        tensors: Tensors = {}
        for controlnet in controls_of(self.manifest):
            for spec in control_specs(self.manifest, controlnet):
                name = control_input(controlnet, spec.name)
                by_step = spec.name in CONTROL_BY_STEP
                of_texts = []
                for inputs in conditioning:
                    rows = inputs.get(name)
                    if rows is None:
                        shape = entry_shape(spec, self.height, self.width)
                        if spec.name == KEYS_VALUES:
                            shape = inputs[KEYS_VALUES].shape[1:2] + shape[1:]
                        rows = torch.zeros(1, *shape, dtype=DTYPES[spec.dtype], device=self.model.device)
                        rows = rows.expand(self.steps if by_step else 1, *shape)
                    of_texts.append(self._pad(rows) if by_step else rows[0])
                stacked = torch.stack(of_texts) if spec.name in OF_TEXTS else of_texts[0]
                tensors[control_tensor(controlnet, spec.name)] = stacked
        return tensors

    def _start(self, plan: PassPlan, image: ImageState) -> tuple[Tensors, int]:
        """Return the first latents, what steps keep of an input image, and how often noise was drawn for them."""
        if plan.source is None:
            latents, draws = plan.init_sigma * draw_latents(self.model, plan, image), 1
        else:
            prepare_from_image(self.model, plan, plan.source, image, EncodedOnce([0]))
            image.wait_for_inputs()
            latents, draws = image.latents, 2 + (plan.source.mask is not None)
        start = {"latents": latents[0]}
        if takes_image(self.manifest):
            nothing = torch.zeros_like(latents)
            known = image.known or Known(nothing, nothing, torch.ones_like(latents[:, :1]))
            start |= {KNOWN: known.latents[0], KNOWN_NOISE: known.noise[0], LATENT_MASK: known.mask[0]}
        return start, draws

    def _pad(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows of steps [own steps, ...] as those of all steps, with zeros."""
        padding = rows.new_zeros(self.steps - len(rows), *rows.shape[1:])
        return torch.cat([rows, padding])


def _draws_before(schedule: LoopSchedule, start: int) -> torch.Tensor:
    """Return how often each step must draw noise before its own, int32 [steps]; -1: it draws none.

    start: draws of the first latents.
    """
    draws = torch.from_numpy(np.array(schedule.draws_noise))
    before = start + torch.cumsum(draws, 0) - draws.long()
    return torch.where(draws, before, -1).int()


def _control(name: str, tensors: Tensors) -> list[dict[str, Any]]:
    """Return the use of a ControlNet as the request's field has it. Empty without a control image."""
    fields: dict[str, Any] = {"name": name, "image": _IN_TENSOR}
    for field, kind, number in (("scale", CONTROL_SCALE, _number), ("mode", CONTROL_MODE, int)):
        if (tensor := tensors.get(f"{kind}.{name}")) is not None:
            fields[field] = number(tensor)
    if f"{CONTROL_IMAGE}.{name}" in tensors:
        return [fields]
    if len(fields) > 2:
        raise RequestRefused(f"{CONTROL_IMAGE}.{name}", "is missing, but the ControlNet has other inputs. Send it.")
    return []


def _of_tensor(error: RequestRefused, controlnets: Sequence[str]) -> RequestRefused:
    """Return a refusal that names the ensemble's tensor in place of the request's field."""
    reason = str(error).removeprefix(f"{error.field}: ")
    part, _, rest = error.field.partition(".")
    if part == "controls" and rest:
        number, _, field = rest.partition(".")
        return RequestRefused(f"control_{field}.{controlnets[int(number)]}", reason)
    return RequestRefused({"image": INPUT_IMAGE, "masks": MASK}.get(part, error.field), reason)


def _number(tensor: torch.Tensor) -> float:
    """Return an FP32 number as the decimal that was sent."""
    return shortest_decimal(tensor.item())


def _levels(tensor: torch.Tensor) -> Any:
    """Return an UINT8 tensor as an array of its own."""
    return np.array(tensor.cpu().numpy())
