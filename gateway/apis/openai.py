"""OpenAI's Images API: its requests -> requests of Preheat, and events of Preheat's servers -> its answers.

The definition is that of the gpt-image models in OpenAI's API on 2026-11-25, as the types of its Python package
openai 3.57.0 state it (`ImageGenerateParams`, `ImageEditParams`, `ImageCreateVariationParams`). A parameter that has no
meaning here is refused unless it has the value that changes nothing. Some of Preheat's own fields are accepted too
(`extra_body` of the client): see EXTRA_FIELDS.

Answers have one more key, `preheat`: the seeds, the server's warnings, the milliseconds by stage, and the engine.
Tokens are not counted: `usage` is 0.
"""

import base64
import io
import json
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from PIL import Image
from pydantic import ValidationError

from gateway.backend_answers import Event
from gateway.backends import Accepted
from gateway.errors import ApiError, object_of, refused
from model.api.json_bytes import json_bytes
from model.api.resolve import DEFAULT_INPAINT_STRENGTH, DEFAULT_STRENGTH
from model.errors import RequestRefused
from model.images.containers import Container, InvalidFile, read_container
from model.images.inputs import MAX_INPUT_PIXELS, read_image, to_8_bits, turn_upright
from model.request_fields import OPENAI, GenerationRequest, marked, value_type
from model.validation import MAX_IMAGES, MAX_PROMPT_CHARACTERS, MAX_STEPS, format_value

MAX_PARTIAL_IMAGES = 3
MAX_ALPHA_WEBP_PIXELS = 16_000_000  # Pillow's decoder of WebP holds four copies of the pixels
VARIATION_PROMPT, VARIATION_STRENGTH = "a picture", 0.6  # a variation has no prompt, so its guidance is off
EXTRA_FIELDS = marked(OPENAI)
_PARAMETERS = {
    "prompt", "model", "n", "size", "quality", "background", "moderation", "output_format", "output_compression",
    "response_format", "stream", "partial_images", "user", "safety_identifier", *EXTRA_FIELDS,
}  # fmt: skip
# Parameters of OpenAI's models that have no counterpart, and the values of those that change nothing.
_UNSUPPORTED = ("style", "complexity", "frame_count", "frame_duration_ms", "svg", "markup", "input_fidelity")
_NEUTRAL = {"quality": ("auto", "standard"), "background": ("auto", "opaque"), "moderation": ("auto", "low")}
# Text fields of a form that hold JSON, also in the objects of a list.
_TYPED = (
    {"scale"}
    | {"n", "output_compression", "partial_images", "stream"}
    | {name for name in EXTRA_FIELDS if value_type(GenerationRequest.model_fields[name].annotation) is not str}
)
_FORMATS = ("png", "jpeg", "webp")
_SIZE = re.compile(r"([0-9]{1,5})x([0-9]{1,5})")
_NO_USAGE = {
    "input_tokens": 0,
    "input_tokens_details": {"image_tokens": 0, "text_tokens": 0},
    "output_tokens": 0,
    "total_tokens": 0,
}


@dataclass(frozen=True)
class ImageCall:
    """A checked request. `native`: the request to Preheat; `model`: the named release, or None.

    `partial_images`: how many previews a stream has. `as_url`: images are returned as `data:` URLs.
    """

    kind: str  # image_generation or image_edit, as OpenAI names the events
    native: dict[str, Any]
    model: str | None
    stream: bool
    partial_images: int
    as_url: bool
    safety_identifier: str | None

    @property
    def output_format(self) -> str:
        """png, jpeg or webp."""
        return str(self.native["output_format"])


@dataclass(frozen=True)
class Files:
    """The files of a multipart request."""

    images: tuple[bytes, ...] = ()
    mask: bytes | None = None


def generation(values: Mapping[str, Any]) -> ImageCall:
    """Return the call of `POST /v1/images/generations`. Raises ApiError."""
    return _call("image_generation", values, Files())


def edit(values: Mapping[str, Any], files: Files) -> ImageCall:
    """Return the call of `POST /v1/images/edits`. Raises ApiError.

    A mask is repainted where its alpha is 0, and `composite` keeps all other pixels. Without a mask file the image's
    own alpha is the mask, as in DALL-E 2. An image without a pixel of alpha 0 has no mask.
    """
    return _call("image_edit", values, files, alpha_is_mask=True)


def variation(values: Mapping[str, Any], files: Files) -> ImageCall:
    """Return the call of `POST /v1/images/variations`. Raises ApiError."""
    values = {"prompt": VARIATION_PROMPT, "strength": VARIATION_STRENGTH, "guidance_scale": 1.0, **values}
    if values.get("stream"):
        raise refused("stream", "variations are not streamed.")
    if files.mask is not None:
        raise refused("mask", "variations have no mask. `POST /v1/images/edits` takes one.")
    return _call("image_edit", values, files)


def decoding_price(files: Files) -> int:
    """Return the pixels that `edit` decodes at most, by the headers of the files. Damaged ones count as nothing."""
    price = 0
    for file in (*files.images[:1], *([] if files.mask is None else [files.mask])):
        with suppress(InvalidFile):
            container = read_container(file)
            price = max(price, container.width * container.height)
    return min(price, MAX_INPUT_PIXELS)  # larger ones are refused undecoded


def parse_form(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a form's text fields, which have no types: numbers, booleans and JSON are parsed.

    `fields`: texts, or lists of objects of texts.
    """
    values: dict[str, Any] = {}
    for name, text in fields.items():
        values[name] = [parse_form(entry) for entry in text] if isinstance(text, list) else text
        if name in _TYPED and isinstance(text, str):
            with suppress(ValueError, RecursionError):  # text is refused later, with what is expected
                values[name] = json.loads(text, object_pairs_hook=object_of)
    return values


def _call(kind: str, given: Mapping[str, Any], files: Files, alpha_is_mask: bool = False) -> ImageCall:
    for name in given:
        if name not in _PARAMETERS and name not in _UNSUPPORTED:
            hint = " `POST /v1/models/model:predict` takes it." if name in GenerationRequest.model_fields else ""
            raise ApiError(400, f"Unknown parameter: {format_value(name)}.{hint}", name[:64], "unknown_parameter")
    values = {name: value for name, value in given.items() if value is not None}
    for name in _UNSUPPORTED:
        if name in values:
            raise refused(name, "is not supported here. Leave it out.", "unsupported_parameter")
    for name, accepted in _NEUTRAL.items():
        if name in values and values[name] not in accepted:
            choices = " or ".join(json.dumps(value) for value in accepted)
            hint = " The number of steps is `num_inference_steps`." if name == "quality" else ""
            raise refused(name, f"got {format_value(values[name])}, expected {choices}.{hint}")
    if "prompt" not in values:
        raise ApiError(400, "Missing required parameter: 'prompt'.", "prompt", "missing_required_parameter")
    stream, count = _boolean(values, "stream"), _integer(values, "n", 1, MAX_IMAGES, 1)
    partial = _integer(values, "partial_images", 0, MAX_PARTIAL_IMAGES, 0)
    if "partial_images" in values and partial and not stream:
        raise refused("partial_images", "needs `stream`.")
    if stream and count > 1:
        raise refused("n", f"{count} images cannot be streamed, because an event does not name its image. Set 1.")
    for name in ("user", "safety_identifier", "model"):
        if name in values and not isinstance(values[name], str):
            raise refused(name, f"got {format_value(values[name])}, expected a string.", "invalid_type")
    native: dict[str, Any] = {"prompt": values["prompt"], "num_images": count}
    native |= _file_format(values) | _size(values)
    native |= {name: values[name] for name in EXTRA_FIELDS if name in values}
    if kind == "image_edit":
        native |= _input_files(files, alpha_is_mask)
    elif bad := [name for name in ("strength", "resize") if name in values]:
        raise refused(bad[0], "needs an image, so it is not accepted for generations.")
    _check(native)
    return ImageCall(
        kind,
        native,
        values.get("model"),
        stream,
        partial,
        _choice(values, "response_format", ("b64_json", "url")) == "url",
        values.get("safety_identifier") or values.get("user"),
    )


def _check(native: dict[str, Any]) -> None:
    """Refuse what no server would accept, before one is asked."""
    try:
        GenerationRequest.model_validate(native)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name, prompt = str(problem["loc"][0]), native["prompt"]
        is_long = name == "prompt" and isinstance(prompt, str) and len(prompt) > MAX_PROMPT_CHARACTERS
        code = "string_above_max_length" if is_long else "invalid_value"
        raise refused("output_compression" if name == "quality" else name, f"{problem['msg']}.", code) from error


def _file_format(values: Mapping[str, Any]) -> dict[str, Any]:
    name = _choice(values, "output_format", _FORMATS)
    if "output_compression" not in values:
        return {"output_format": name, "quality": 100}
    level = _integer(values, "output_compression", 0, 100, 100)
    if name == "png" and level < 100:
        raise refused(
            "output_compression", f"{level} is not accepted for png. Set 100, or `output_format` jpeg or webp."
        )
    return {"output_format": name, "quality": max(1, level)}


def _size(values: Mapping[str, Any]) -> dict[str, int]:
    size = values.get("size", "auto")
    if size == "auto":
        return {}
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is None:
        raise refused("size", f'got {format_value(size)}, expected "auto" or WIDTHxHEIGHT, for example 1024x1024.')
    return {"width": int(match[1]), "height": int(match[2])}


def _input_files(files: Files, alpha_is_mask: bool) -> dict[str, Any]:
    if not files.images:
        raise ApiError(400, "Missing required parameter: 'image'.", "image", "missing_required_parameter")
    if len(files.images) > 1:
        raise refused("image", f"{len(files.images)} images were sent. One is accepted.")
    image = base64.b64encode(files.images[0]).decode()
    container = _read(image, "image").container
    mask = None
    if files.mask is not None:
        mask = _mask_of_file(files.mask)
    elif alpha_is_mask:
        mask = _transparent_parts(container, "image")
    return {"image": image} if mask is None else {"image": image, "masks": [{"image": mask}], "composite": True}


def _mask_of_file(file: bytes) -> str:
    container = _read(base64.b64encode(file).decode(), "mask").container
    if container.format != "png":
        raise refused("mask", f"got a {container.format.upper()} file, expected a PNG file.")
    mask = _transparent_parts(container, "mask")
    if mask is None:
        raise refused("mask", "no pixel has alpha 0, so nothing would be edited. The parts to edit have alpha 0.")
    return mask


def _transparent_parts(container: Container, name: str) -> str | None:
    """Return a mask of Preheat's: white where alpha is 0, black elsewhere. None: no pixel has alpha 0.

    The mask is an upright PNG in base64. Only files that state transparency are decoded. Raises ApiError.
    """
    try:
        with Image.open(io.BytesIO(container.pixel_data), formats=[container.format.upper()]) as decoded:
            if not decoded.has_transparency_data:
                return None
            if container.format == "webp" and decoded.width * decoded.height > MAX_ALPHA_WEBP_PIXELS:
                raise refused(
                    name,
                    f"a transparent WebP file may have {MAX_ALPHA_WEBP_PIXELS // 10**6} megapixels. Send it as PNG, or "
                    "send a mask.",
                )
            levels = to_8_bits(decoded, container.depth)
            if "A" not in levels.getbands():
                levels = levels.convert("RGBA")
            alpha = turn_upright(levels.getchannel("A"), container)
    except ApiError:
        raise
    except Exception as error:  # Pillow raises many types for damaged data
        kind = container.format.upper()
        raise refused(name, f"the {kind} file is truncated or damaged: its pixels cannot be decoded.") from error
    white = alpha.point(lambda level: 255 if level == 0 else 0, "1")  # a bit for each pixel of the file
    if white.getbbox() is None:
        return None
    encoded = io.BytesIO()
    white.save(encoded, "PNG", compress_level=1)
    return base64.b64encode(encoded.getvalue()).decode()


def _read(data: str, name: str) -> Any:
    try:
        return read_image(data, name)
    except RequestRefused as error:
        raise ApiError(400, str(error), name, "invalid_image") from error


def _choice(values: Mapping[str, Any], name: str, accepted: tuple[str, ...]) -> str:
    value = values.get(name, accepted[0])
    if value not in accepted:
        choices = ", ".join(json.dumps(choice) for choice in accepted)
        raise refused(name, f"got {format_value(value)}, expected one of {choices}.")
    return str(value)


def _boolean(values: Mapping[str, Any], name: str) -> bool:
    value = values.get(name, False)
    if not isinstance(value, bool):
        raise refused(name, f"got {format_value(value)}, expected true or false.", "invalid_type")
    return value


def _integer(values: Mapping[str, Any], name: str, least: int, most: int, default: int) -> int:
    value = values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise refused(name, f"got {format_value(value)}, expected an integer from {least} to {most}.", "invalid_type")
    if not least <= value <= most:
        code = "integer_above_max_value" if value > most else "integer_below_min_value"
        raise refused(name, f"got {format_value(value)}, expected an integer from {least} to {most}.", code)
    return value


def preview_every(call: ImageCall, description: Event) -> int:
    """Return `preview_every` for a call's number of partial images: the steps between them, 0 for none."""
    if not call.partial_images or description.get("safety") == "blank":  # which refuses previews
        return 0
    steps = call.native.get("num_inference_steps", description["defaults"]["num_inference_steps"])
    default = DEFAULT_INPAINT_STRENGTH if "masks" in call.native else DEFAULT_STRENGTH
    strength = call.native.get("strength", default if "image" in call.native else 1.0)
    return min(MAX_STEPS, max(1, int(steps * strength) // (call.partial_images + 1)))


def answer(call: ImageCall, events: list[Event]) -> Event:
    """Return the body of an answer without a stream."""
    images = sorted((event for event in events if event["event"] == "image"), key=lambda event: event["index"])
    data = [{"url": _data_url(image)} if call.as_url else {"b64_json": image["data"]} for image in images]
    body: Event = {
        "created": int(time.time()),
        "background": "opaque",
        "data": data,
        "output_format": call.output_format,
        "size": f"{images[0]['width']}x{images[0]['height']}",
        "usage": _NO_USAGE,
        "preheat": _details(images, events[-1]),
    }
    return body | _identifier(call)


async def server_sent_events(call: ImageCall, accepted: Accepted) -> AsyncIterator[bytes]:
    """Yield the events of a streamed answer: previews, then the image, or an error."""
    common = {"created_at": int(time.time()), "background": "opaque", "quality": "auto"}
    previews, images = 0, []
    try:
        async for event in accepted.events:
            if event["event"] == "step" and "preview" in event and previews < call.partial_images:
                # A preview is a small JPEG, whatever the format of the image.
                partial = {"b64_json": event["preview"], "partial_image_index": previews, "output_format": "jpeg"}
                yield _event(f"{call.kind}.partial_image", {**common, **partial, "size": call_size(call)})
                previews += 1
            elif event["event"] == "image":
                images.append(event)
            elif event["event"] == "heartbeat":
                yield b": waiting\n\n"  # a comment keeps the connection open
            elif event["event"] == "done":
                size = f"{images[0]['width']}x{images[0]['height']}"
                final = {"b64_json": images[0]["data"], "output_format": call.output_format, "size": size}
                details = {"usage": _NO_USAGE, "preheat": _details(images, event), **_identifier(call)}
                yield _event(f"{call.kind}.completed", {**common, **final, **details})
    except ApiError as error:
        yield _event("error", error.body())


def call_size(call: ImageCall) -> str:
    """Return the requested size as OpenAI writes it."""
    native = call.native
    return f"{native['width']}x{native['height']}" if "width" in native else "auto"


def model(name: str) -> Event:
    """Return an entry of `GET /v1/models`. Releases have no date of creation, so it is 0."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "preheat"}


def _details(images: list[Event], done: Event) -> Event:
    details = {key: done.get(key) for key in ("warnings", "timings", "engine")}
    flagged = {"flagged": [image.get("flagged", False) for image in images]} if "flagged" in images[0] else {}
    return {"seeds": [image["seed"] for image in images], **flagged, **details}


def _identifier(call: ImageCall) -> dict[str, Any]:
    return {} if call.safety_identifier is None else {"safety_identifier": call.safety_identifier}


def _data_url(image: Event) -> str:
    return f"data:image/{image['format']};base64,{image['data']}"


def _event(name: str, data: Event) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), json_bytes({"type": name, **data}))
