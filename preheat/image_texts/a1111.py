"""The text of AUTOMATIC1111's web UI: the prompt, `Negative prompt:`, and a line of settings."""

import re
from collections.abc import Callable
from typing import Any

from model.denoising.sampler_specs import SPECS
from preheat.image_texts.fields import Translation

_SETTING = re.compile(r'\s*(\w[\w \-/]*):\s*("(?:\\.|[^\\"])*"|[^,]*)(?:,|$)')
_MIN_SETTINGS = 3  # of a line that is not part of a prompt
_NEGATIVE = re.compile(r"^Negative prompt:", re.MULTILINE)
_LORA = re.compile(r"<lora:([^:<>]+)((?::[^:<>]*)*)>")
_WHOLE: Callable[[str], Any] = int
# Setting -> the request's field and its type.
_FIELDS = {"Steps": ("num_inference_steps", _WHOLE), "CFG scale": ("guidance_scale", float), "Seed": ("seed", _WHOLE)}
# Settings that state no more than others, or name files.
_SILENT = ("Sampler", "Schedule type", "Size", "Model", "Model hash", "Version", "VAE", "VAE hash", "Lora hashes",
           "TI hashes", "Hashes", "RNG")  # fmt: skip


def translate(text: str) -> Translation:
    """Return the request of a text. Raises ValueError."""
    lines, found = text.strip().split("\n"), Translation()
    last = next((at for at in reversed(range(len(lines))) if lines[at].startswith("Steps:")), None)
    if last is None and _SETTING.match(lines[-1]) and len(_SETTING.findall(lines[-1])) >= _MIN_SETTINGS:
        last = len(lines) - 1  # of another program, whose settings may be in another order
    # Extensions write lines after the settings, such as the template of dynamic prompts.
    after = [] if last is None else lines[last + 1 :]
    settings = {} if last is None else {name: value.strip('"') for name, value in _SETTING.findall(lines[last])}
    prompt, *negative = _NEGATIVE.split("\n".join(lines[:last]), maxsplit=1)
    found.set_prompts(_LORA.sub("", prompt).strip(), "".join(negative).strip())
    for name, options in _LORA.findall(prompt):
        _add_lora(found, name, options.split(":")[1:])
    for name, (field, kind) in _FIELDS.items():
        try:
            found.fields |= {field: kind(settings[name])} if name in settings else {}
        except ValueError:
            found.notes.append(f"{name} {settings[name]} is not a number.")
    if size := re.fullmatch(r"(\d{1,5})x(\d{1,5})", settings.get("Size", "")):
        found.fields["width"], found.fields["height"] = int(size[1]), int(size[2])
    schedule = settings.get("Schedule type", "Automatic").strip()
    sampler = f"{settings.get('Sampler', '')} {'' if schedule == 'Automatic' else schedule}".strip()
    found.set_sampler(sampler, sampler if sampler in SPECS else None)
    if (skip := settings.pop("Clip skip", "1")) != "1":
        found.notes.append(f"Clip skip {skip} is left out: SDXL needs none, and Stable Diffusion 1 needs it less one.")
    else:
        found.fields["clip_skip"] = 0  # a release may have another default
    left = [f"{name} {value}" for name, value in settings.items() if name not in (*_FIELDS, *_SILENT)]
    if left := left + [line for line in after if line.strip()]:
        found.notes.append(f"Not translated: {', '.join(left)}.")
    return found


def _add_lora(found: Translation, name: str, options: list[str]) -> None:
    """Add an adapter of a prompt. Its options are the scales of the text encoders and of the UNet, in this order or by
    name (`te=`, `unet=`), as in A1111's extension of LoRA.
    """
    named = {key: value for key, sign, value in (option.partition("=") for option in options) if sign}
    in_order = [option for option in options if "=" not in option]
    text = named.pop("te", in_order[0] if in_order else "1")
    unet = named.pop("unet", in_order[1] if len(in_order) > 1 else text)
    try:
        found.add_lora(name, float(unet), float(text))
    except ValueError:
        found.notes.append(f"The adapter {name} is left out: its scale {':'.join(options)} is not a number.")
    if left := [f"{key}={value}" for key, value in named.items()] + in_order[2:]:
        found.notes.append(f"Not translated for the adapter {name}: {', '.join(left)}.")
