"""Read how an image was made from the text in its file, as a request to a server of Preheat.

Texts of three programs are read: AUTOMATIC1111's web UI and programs that write the same (the PNG chunk `parameters`,
or EXIF's UserComment), ComfyUI (the PNG chunk `prompt`, the graph as JSON) and Preheat itself. What has no field in a
request, or no value that is served, is named in a note.
"""

import io
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError
from pydantic import ValidationError

from engine_builder.error_text import cause_of
from engine_builder.files import read_file
from model.denoising.sampler_specs import SPECS
from model.errors import PreheatError
from model.images.metadata import KEYWORD, read_text
from model.request_fields import GenerationRequest

_MAX_BYTES = 64 * 2**20
_FORMATS = ("PNG", "JPEG", "WEBP")
_EXIF_IFD, _USER_COMMENT = 0x8769, 0x9286
_SETTING = re.compile(r'\s*(\w[\w \-/]*):\s*("(?:\\.|[^\\"])*"|[^,]*)(?:,|$)')
_LORA = re.compile(r"<lora:([^:<>]+)(?::([-+.\d]+))?[^<>]*>")
_OTHER_SYNTAX = re.compile(r"\bBREAK\b|\bAND\b|\[[^\[\]]*:[^\[\]]*\]|__\w+__")
_WHOLE: Callable[[str], Any] = int
# Setting of A1111 -> the request's field and its type.
_A1111 = {"Steps": ("num_inference_steps", _WHOLE), "CFG scale": ("guidance_scale", float), "Seed": ("seed", _WHOLE)}
# Settings that state no more than others, or name files.
_A1111_SILENT = ("Sampler", "Schedule type", "Size", "Model", "Model hash", "Version", "VAE", "VAE hash", "Lora hashes",
                 "TI hashes", "Hashes", "RNG")  # fmt: skip
_COMFY_FIELDS = {"steps": "num_inference_steps", "cfg": "guidance_scale", "seed": "seed", "noise_seed": "seed"}
_MAX_NODES = 10_000
Fields = dict[str, Any]


class BadImageText(PreheatError):
    """The file is not an image, or does not state how it was made."""

    remedy = "Give the file as the program wrote it: most sites and messengers remove its text."


def read_request(path: Path) -> tuple[Fields, list[str]]:
    """Return the request of an image's file, and notes about what it leaves out. Raises BadImageText."""
    texts = _texts(path)
    try:
        if KEYWORD in texts:
            own = json.loads(texts[KEYWORD])
            note = f"The release is {own['release']}. On a server of several releases add it to the request as `model`."
            return own["request"], [note]
        if "parameters" in texts:
            fields, notes = _from_a1111(texts["parameters"])
        elif "prompt" in texts:
            fields, notes = _from_comfyui(json.loads(texts["prompt"]))
        else:
            raise BadImageText(f"{path} has no text of A1111, ComfyUI or Preheat.")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadImageText(f"{path} has a text that cannot be read ({cause_of(error)[:200]}).") from error
    return _valid(fields, notes, path), notes


def _texts(path: Path) -> dict[str, str]:
    """Return the texts of a file by the keywords of PNG. Raises BadImageText."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of many pixels, which are not decoded
            with Image.open(io.BytesIO(read_file(path, _MAX_BYTES)), formats=_FORMATS) as image:
                texts = {str(key): value for key, value in image.info.items() if isinstance(value, str)}
                comment = image.getexif().get_ifd(_EXIF_IFD).get(_USER_COMMENT, b"")
                own = read_text(image)
    except UnidentifiedImageError as error:
        raise BadImageText(f"{path} is not a PNG, JPEG or WebP file.") from error
    except FileNotFoundError as error:
        raise BadImageText(f"{path} does not exist.", "Check the path.") from error
    except Exception as error:  # Pillow raises many types for a damaged file
        raise BadImageText(f"{path} cannot be read as an image ({cause_of(error)[:200]}).") from error
    if isinstance(comment, bytes) and comment.startswith(b"UNICODE\0"):
        text = comment[8:].decode("utf-16-be" if comment[8:9] == b"\0" else "utf-16-le", errors="replace")
        texts.setdefault("parameters", text)
    return texts | ({KEYWORD: own} if own.startswith("{") else {})


def _from_a1111(text: str) -> tuple[Fields, list[str]]:
    """Return the request of A1111's text: the prompt, `Negative prompt:`, and a line of settings."""
    *lines, last = text.strip().split("\n")
    if len(_SETTING.findall(last)) < 3:
        lines, last = [*lines, last], ""
    prompt, _, negative = "\n".join(lines).partition("Negative prompt:")
    settings = {name: value.strip('"') for name, value in _SETTING.findall(last)}
    fields, notes = _from_prompts(prompt.strip(), negative.strip())
    for name, (field, kind) in _A1111.items():
        if name in settings:
            fields[field] = kind(settings[name])
    if size := re.fullmatch(r"(\d{1,5})x(\d{1,5})", settings.get("Size", "")):
        fields["width"], fields["height"] = int(size[1]), int(size[2])
    schedule = settings.get("Schedule type", "Automatic").strip()
    _set_sampler(fields, notes, f"{settings.get('Sampler', '')} {'' if schedule == 'Automatic' else schedule}")
    if (skip := settings.pop("Clip skip", "1")) != "1":
        notes.append(f"Clip skip {skip} is left out: SDXL needs none, and Stable Diffusion 1 needs it less one.")
    else:
        fields["clip_skip"] = 0  # a release may have another default
    if left := [f"{name} {value}" for name, value in settings.items() if name not in (*_A1111, *_A1111_SILENT)]:
        notes.append(f"Not translated: {', '.join(left)}.")
    return fields, notes


def _from_comfyui(graph: Mapping[str, Any]) -> tuple[Fields, list[str]]:
    """Return the request of the first KSampler in ComfyUI's graph, with what its inputs lead to."""
    nodes = {
        key: node for key, node in graph.items() if isinstance(node, dict) and isinstance(node.get("inputs"), dict)
    }
    samplers = [node["inputs"] for node in nodes.values() if str(node.get("class_type")).startswith("KSampler")]
    samplers = [inputs for inputs in samplers if "positive" in inputs]
    if not samplers or len(nodes) > _MAX_NODES:
        raise ValueError("its graph has no KSampler")
    inputs = samplers[0]
    prompts = [_first(nodes, inputs.get(name), ("text", "text_g", "positive")) for name in ("positive", "negative")]
    fields, notes = _from_prompts(*(text if isinstance(text, str) else "" for text in prompts))
    fields |= {
        field: inputs[name] for name, field in _COMFY_FIELDS.items() if isinstance(inputs.get(name), int | float)
    }
    for name in ("width", "height"):
        if isinstance(side := _first(nodes, inputs.get("latent_image"), (name,)), int):
            fields[name] = side
    sampler, schedule = str(inputs.get("sampler_name")), str(inputs.get("scheduler"))
    served = [
        one for one in SPECS.values() if sampler in one.comfy and schedule == ("karras" if one.karras else "normal")
    ]
    _set_sampler(fields, notes, served[0].name if served else f"{sampler} {schedule}")
    loras = [
        {"name": Path(str(node["lora_name"])).stem, "scale": node.get("strength_model", 1.0)}
        for node in _upstream(nodes, inputs.get("model"))
        if "lora_name" in node
    ]
    if loras:
        fields["loras"] = loras
    if len(samplers) > 1:
        notes.append(f"The graph has {len(samplers)} samplers; only the first is translated.")
    if inputs.get("denoise", 1) != 1:
        notes.append(f"Not translated: denoise {inputs['denoise']}, which needs an input image (`strength`).")
    return fields, notes


def _upstream(nodes: Mapping[str, Any], link: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the inputs of the nodes that a link [node, output] leads to, nearest first."""
    waiting, seen = [link], set[str]()
    while waiting:
        link = waiting.pop(0)
        if isinstance(link, list) and link and str(link[0]) in nodes and str(link[0]) not in seen:
            seen.add(str(link[0]))
            inputs = nodes[str(link[0])]["inputs"]
            yield inputs
            waiting += inputs.values()


def _first(nodes: Mapping[str, Any], link: Any, names: tuple[str, ...]) -> Any:
    """Return the nearest input of one of these names that is a value and no link."""
    for inputs in _upstream(nodes, link):
        for name in names:
            if isinstance(inputs.get(name), str | int):
                return inputs[name]
    return None


def _from_prompts(prompt: str, negative: str) -> tuple[Fields, list[str]]:
    """Return the fields of prompts in A1111's syntax, which ComfyUI's is a part of."""
    loras = [{"name": name, "scale": float(scale or 1)} for name, scale in _LORA.findall(prompt)]
    notes = []
    if other := _OTHER_SYNTAX.findall(f"{prompt} {negative}"):
        notes.append(f"Text here, and not an instruction: {', '.join(dict.fromkeys(other))}.")
    fields: Fields = {"prompt": _LORA.sub("", prompt).strip(), "prompt_syntax": "weighted"}
    return fields | ({"negative_prompt": negative} if negative else {}) | ({"loras": loras} if loras else {}), notes


def _set_sampler(fields: Fields, notes: list[str], name: str) -> None:
    name = name.strip()
    if name in SPECS:
        fields["scheduler"] = name
    elif name:
        notes.append(f"The sampler {name} is not served, so the release's own is used. Served: {', '.join(SPECS)}.")


def _valid(fields: Fields, notes: list[str], path: Path) -> Fields:
    """Return the fields that a request accepts; a note names each of the others. Raises BadImageText."""
    try:
        GenerationRequest.model_validate(fields)
    except ValidationError as error:
        bad = {str(problem["loc"][0]) if problem["loc"] else "" for problem in error.errors()}
        if "prompt" in bad or not bad <= fields.keys():
            raise BadImageText(f"{path} states no valid prompt.") from error
        notes += [f"{name} {json.dumps(fields[name])[:80]} is not valid in a request." for name in sorted(bad)]
        return _valid({name: value for name, value in fields.items() if name not in bad}, notes, path)
    return fields
