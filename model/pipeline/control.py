"""Encode what a request gives to ControlNets: the control images, once for all images and both halves of guidance."""

from collections.abc import Mapping, Sequence

import torch

from model.cuda.streams import to_device
from model.engines.shapes import DTYPES
from model.engines.signatures import CONTROL, CONTROL_SCALE, CONTROL_TYPE, KEYS_VALUES, control_input, control_types
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.request_plan import ControlPlan
from model.pipeline.spec import CONTROLNET_IMAGE, CONTROLNET_TEXT, CONTROLNET_TIME


def condition_controlnet(
    model: LoadedModel,
    name: str,
    plan: ControlPlan,
    hidden: torch.Tensor,
    chunks: Sequence[int],
    times: Sequence[Mapping[str, torch.Tensor]],
) -> list[dict[str, torch.Tensor]]:
    """Return the inputs of a ControlNet for each text, by their names in a conditioning. Call it on the text stream.

    hidden: the chunks of all texts, [chunks, tokens, width]. chunks: their number for each text.
    times: for each text the inputs of a time network, [steps, ...]. If there is one of them, it is that of every text.
    """
    time, image = model.engines[f"{CONTROLNET_TIME}.{name}"], model.engines[f"{CONTROLNET_IMAGE}.{name}"]
    control_type = _control_type(model, control_types(time.signature), plan.mode)  # [1, types]
    of_type = {} if control_type is None else {CONTROL_TYPE: control_type}
    # The arithmetic of diffusers' `VaeImageProcessor(do_normalize=False).preprocess`.
    pixels = to_device(plan.levels, model.device).permute(2, 0, 1)[None].float().div_(255).contiguous()
    dtype = DTYPES[image.signature.inputs[0].dtype]
    shared = {
        CONTROL: image.run({"pixels": pixels.to(dtype)} | of_type, *pixels.shape[-2:])[CONTROL],
        CONTROL_SCALE: to_device(torch.from_numpy(plan.scales), model.device)[:, None],  # [steps, 1]
    }
    steps = len(plan.scales)
    expanded = {name: tensor.expand(steps, -1) for name, tensor in of_type.items()}
    time_embeds = [time.run({**of_text, **expanded})["time_embeds"] for of_text in times]
    keys_values: Sequence[torch.Tensor] | None = None
    if (text := model.engines.get(f"{CONTROLNET_TEXT}.{name}")) is not None:
        of_chunks = text.run({"encoder_hidden_states": hidden.to(dtype)})[KEYS_VALUES]
        keys_values = [of_text.flatten(0, 1)[None] for of_text in torch.split(of_chunks, list(chunks))]
    conditionings = []
    for index in range(len(chunks)):
        inputs = shared | {"time_embeds": time_embeds[min(index, len(time_embeds) - 1)]}
        if keys_values is not None:
            inputs[KEYS_VALUES] = keys_values[index]
        conditionings.append({control_input(name, key): tensor for key, tensor in inputs.items()})
    return conditionings


def _control_type(model: LoadedModel, types: int, mode: int | None) -> torch.Tensor | None:
    """Return 1 for the control image's type and 0 for the others, float32 [1, types]. None without types."""
    if not types:
        return None
    assert mode is not None and mode < types
    one_hot = torch.zeros(1, types)
    one_hot[0, mode] = 1
    return to_device(one_hot, model.device)
