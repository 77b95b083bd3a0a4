"""Write docs/requests.md from the public schema: fields, answers, stream events, status codes.

python -m engine_builder.docs_pages.request_reference
"""

import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engine_builder.checkpoints.scheduler_config import diffusers_class
from model.api.body_limit import MAX_BODY_BYTES, MAX_TOTAL_BODY_BYTES
from model.api.body_scan import MAX_TEXT_BYTES
from model.api.describe import Description
from model.api.fair_queue import MAX_WAITING
from model.api.request import (
    ControlRequest,
    EngineInfo,
    GenerationRequest,
    GenerationResponse,
    ImageResult,
    IpAdapterRequest,
    LoraRequest,
    MaskRequest,
)
from model.api.service import HEARTBEAT_SECONDS, STATUS
from model.denoising.sampler_names import SAMPLERS
from model.images.containers import MAX_JPEG_SCAN_PIXELS, MAX_JPEG_SCANS
from model.images.inputs import (
    MAX_FILE_BYTES,
    MAX_INPUT_PIXELS,
    MAX_INPUT_SIDE,
    MAX_REQUEST_PIXELS,
)
from model.images.postprocess import RING_WIDTH
from model.validation import MAX_PROMPT_WEIGHT

PAGE = Path(__file__).resolve().parents[2] / "docs" / "requests.md"
_HEAD = """\
# Request reference

This page is generated from the schema that the server validates requests with:

    python -m engine_builder.docs_pages.request_reference

Send JSON with POST. On a local server (`preheat serve`) the address is
`http://127.0.0.1:8080/v1/models/model:predict`. A deployed model has
`https://model-MODEL_ID.api.baseten.co/production/predict` and needs the header `Authorization: Api-Key KEY`.

```sh
curl -s http://127.0.0.1:8080/v1/models/model:predict \\
  -d '{"prompt": "a red circle on a white background", "seed": 2}'
```

```python
import base64
import pathlib

import httpx

answer = httpx.post(
    "http://127.0.0.1:8080/v1/models/model:predict",
    json={"prompt": "a red circle on a white background", "seed": 2, "num_images": 2},
    timeout=300,
)
body = answer.json()
if answer.is_error:
    raise SystemExit(f"{answer.status_code}: {body['error']}")
for number, image in enumerate(body["images"]):
    pathlib.Path(f"circle-{number}.{image['format']}").write_bytes(base64.b64decode(image["data"]))
```

## Fields

Only `prompt` is required. Types are strict: `"30"` is not accepted for 30, nor 1 for true. 7 is accepted for 7.0. A
field that is not listed here is refused, and so is a value out of range. No value is changed silently. A field that is
null or missing takes its default. "The release's" means a default that the release states
([build and publish](build-and-publish.md#default-values-of-a-release)).

"""
_AFTER_FIELDS = """
For callers of the older SDXL Truss: by default the refiner is off, and all steps are guided. The older server behaved
like `"use_refiner": true, "end_cfg_frac": 0.4`.

A negative prompt that is null and one that is "" differ as in diffusers: for null, SDXL takes zeros instead of an
encoded text. Stable Diffusion 1 and 2 encode "" for null, and have no refiner. A model with an embedded guidance scale,
such as LCM-SDXL, reads no negative prompt. The answer then has a warning.

## Input images

[Image to image and inpainting](image-to-image.md) describes what strength and masks do, with pictures.

Change a picture, and repaint two parts of it. The masks are white there and black elsewhere, and have its size:

```sh
.venv/bin/preheat generate "a large blue star" --image photo.png --strength 0.6 --out changed.png
.venv/bin/preheat generate "a picture" --image photo.png --mask left.png --mask-prompt "a red circle" \\
  --mask right.png --mask-prompt "a green square" --feather 4 --composite --out repainted.png
```

The first one with `curl`, and the second one in Python:

```sh
printf '{"prompt": "a large blue star", "image": "%s", "strength": 0.6}' "$(base64 -w0 photo.png)" |
  curl -s http://127.0.0.1:8080/v1/models/model:predict -d @- > answer.json
```

```python
import base64
import pathlib

import httpx


def encode(name: str) -> str:
    return base64.b64encode(pathlib.Path(name).read_bytes()).decode()


answer = httpx.post(
    "http://127.0.0.1:8080/v1/models/model:predict",
    json={
        "prompt": "a picture",
        "image": encode("photo.png"),
        "masks": [
            {"image": encode("left.png"), "prompt": "a red circle", "feather": 4},
            {"image": encode("right.png"), "prompt": "a green square", "feather": 4},
        ],
        "composite": True,
        "output_format": "png",
    },
    timeout=300,
)
body = answer.json()
if answer.is_error:
    raise SystemExit(f"{answer.status_code}: {body['error']}")
pathlib.Path("repainted.png").write_bytes(base64.b64decode(body["data"]))
```

`image` and the image of a mask are base64 in the standard alphabet, padded and without line breaks (`base64 -w0 FILE`),
or a `data:` URL of it. Other URLs are not fetched. PNG, JPEG and WebP are accepted, recognised by their first bytes.
The URL may state any of `image/png`, `image/jpeg`, `image/jpg`, `image/pjpeg` and `image/webp`, and parameters such as
`charset`. Another media type is refused. So are more than @FILE_MIB@ MiB, @MEGAPIXELS@ megapixels or @SIDE@ pixels on
a side, animations, and truncated or damaged files. All images of a request, with its masks, control images and
reference images, may have @IN_ALL@ megapixels together. Headers are checked before pixels are decoded.

- The rotation that EXIF states is applied. The size that counts is the rotated one.
- Transparent pixels are blended with white, as most viewers show them. diffusers' `load_image` removes the
  transparency, which shows the colours that were hidden. In a mask they are blended with black, so they are kept.
- 16-bit values are divided by 256. Palettes, grey and CMYK are converted to RGB by Pillow, colours of a mask to luma.
- Colour profiles, gamma and all other metadata are ignored, as by diffusers.
- A JPEG of more than @JPEG_SCANS@ scans is refused, and one of more than @SCAN_MEGAPIXELS@ megapixels in all its scans.
  Progressive files have about 10 scans.
- Two kinds of damage are not detected. libjpeg fills the missing part of some damaged JPEGs with grey. A PNG whose
  checksums are right may have fewer rows of compressed data than its header states. The missing rows are black, or
  transparent if the PNG has an alpha channel.

`resize` uses a Lanczos filter, for masks too. `stretch` and `crop` are the modes `default` and `crop` of diffusers'
`VaeImageProcessor`, with equal pixels. Only an image that would have more than 32 megapixels before `crop` cuts it may
differ, by at most 2/255. `pad` centres the image as the mode `fill` does. Its margins repeat the outermost pixels, and
those of the masks.

`feather` blurs a mask by diffusers' `VaeImageProcessor.blur` after it was made binary. Pillow approximates the Gaussian
by three box filters. What is repainted is decided by a binary mask again: levels of at least 128, as in diffusers. A
value is refused if it leaves no such level in a mask that had one. Only `composite` blends pixels.

The latents read a mask in one of 8x8 pixels: the one whose row and column, counted from 0, are multiples of 8. A mask
that is white in none of them marks no latent to repaint, and `warnings` names it. Narrow strokes can be such a mask,
also where `feather` has made them narrower. A white part of at least 8x8 pixels always marks one.

With `composite` a pixel becomes `input + (result - input) * mask / 255`, with the largest level of all masks.

With `color_match` each channel of the result becomes `(v - m) * S / s + M`. `m` and `s` are its mean and standard
deviation in a ring around the masks, `M` and `S` those of the input image. The ring has the pixels where all masks are
0, at most @RING@ pixels from one where they are not. Both pictures show the same content there. `S / s` is limited to
0.5 to 2. This is the transfer of Reinhard et al., "Color Transfer between Images" (2001), in RGB and within the ring.

## Metadata in files

With `metadata` each file has a text: JSON with `release`, and `request`, which makes this image again on that release
once input images are in place of their digests. All fields are set there, also those that the request left to the
release, and the image's own seed. In place of each input image is `sha256:` and the digest of its file. In a PNG the
text is an iTXt chunk with the keyword `preheat`, in a JPEG or WebP the tag UserComment of EXIF. The text is not checked
by anyone and can be changed, so it proves nothing.

## Weighted prompts

With `"prompt_syntax": "weighted"`, prompts and negative prompts (of masks too) have weights and up to 4 chunks of 75
tokens. With `plain`, the default, brackets are text and the encoders read 77 tokens, begin and end included.

```json
{"prompt": "a (large:1.3) lighthouse, [clouds], ((storm)), \\\\(oil on canvas\\\\)", "prompt_syntax": "weighted"}
```

| written | weight |
|---|---|
| `(text)` | times 1.1 |
| `[text]` | divided by 1.1 |
| `(text:1.3)` | times 1.3 |
| `\\(` `\\)` `\\[` `\\]` `\\\\` | the character itself |

Brackets nest, and their factors are multiplied: `((text))` is 1.21. A bracket without an end reaches to the end of the
prompt. An end without a beginning is text. What follows a colon is text unless it is a number. A weight beyond
-@WEIGHT@ to @WEIGHT@, or a number such as `1.2.3`, is refused.

The arithmetic, for the text encoders' hidden states z [tokens, width]:

- A text is divided into fragments of one weight, and each fragment is tokenized by itself. The tokens are divided into
  chunks of 75. Each chunk gets a begin token, an end token and padding, and is encoded alone.
- Each token's z is multiplied by its weight. Begin, end and padding have weight 1. The mean of z is not restored.
- The UNet reads the z of all chunks, one after the other. The pooled text is that of the first chunk, without weights.
- An [embedding](textual-inversion.md) is never divided. If a chunk has too few tokens left for it, the chunk is padded,
  and the embedding begins the next one, as in AUTOMATIC1111's web UI.
- A text has 1, 2 or 4 chunks. A third chunk is followed by an empty one.

The grammar, the chunks and the first chunk's pooled text are the convention of AUTOMATIC1111's web UI
(`modules/prompt_parser.py`, `sd_hijack_clip.py`). The arithmetic is that of its emphasis mode "No norm"
(`sd_emphasis.py`). Preheat differs from it in these points:

- Chunks are filled to the end. The words after a comma are not moved to the next chunk.
- `BREAK`, `AND`, `[a:b:0.5]` and `[a|b]` have no meaning; see [other prompt syntaxes](#other-prompt-syntaxes).
- A third chunk is followed by an empty one.
- A backslash before any other character stays, and weights are limited.

Texts of different lengths share a batch: the keys and values of a shorter one are repeated, as ComfyUI does
(`comfy/conds.py`). The softmax divides a weight among equal keys, so attention to a repeated text is attention to the
text. An image is therefore the same alone and in any batch, and no mask is needed.

Engines for a CPU take texts of any of these lengths. On a GPU the length is part of a build:
`preheat build MODEL --text-chunks 4`. Otherwise the UNet reads one chunk, and a longer prompt is truncated with a
warning. A build with 4 chunks attends to 308 tokens for every image; what that costs on a GPU was not measured.

## Other prompt syntaxes

These constructs of other programs are read as text, and `warnings` names each of them:

| written | elsewhere it means | here |
|---|---|---|
| `<lora:NAME:0.8>`, `<lyco:NAME:0.8>` | an adapter | name adapters in the field `loras` |
| `<hypernet:NAME:0.8>` | a hypernetwork | not supported |
| `embedding:NAME` | an embedding (ComfyUI) | write the [embedding's token](textual-inversion.md) alone |
| `BREAK` | the end of a chunk | with `weighted`, a long prompt has chunks of 75 tokens |
| `a AND b` | a sum of prompts | write one prompt; `and` in lower case is text |
| `[a:b:0.5]`, `[a::0.5]`, `[:a:5]`, `[a\\|b]` | a change of the prompt between steps | write one of the texts |
| `(word:1.3)`, `((word))`, `[word]` | a weight | set `prompt_syntax` to `weighted` |
| `\\(`, `\\)`, `\\[`, `\\]` | a plain bracket | leave out the backslash, or set `prompt_syntax` to `weighted` |

The last two rows apply to `plain` only, whose encoders read the backslash, too.

Ordinary text has no warning: `AND` and `BREAK` next to another word in capitals (`BLACK AND WHITE`), ratios and times
(`(16:9)`, `[10:30]`), a label and a number (`(ISO: 100)`, `[Psalm: 23]`), and whole numbers above 2
at the end of parentheses (`(age:5)`).

## Conditioning

These fields have the names and meaning of diffusers' SDXL pipelines, except that `crop` is their
`crops_coords_top_left`.

```json
{"prompt": "a lighthouse at dusk", "original_size": [2048, 2048], "crop": [0, 0], "guidance_rescale": 0.7}
```

- `original_size`, `crop` and `target_size`: SDXL was trained with the size of each image before it was scaled, the
  corner at which it was cropped, and its final size. Height comes first. The negative prompt gets the same numbers. A
  refiner with an aesthetic score gets the crop [0, 0] for it, which is diffusers' default.
- `guidance_rescale` r, of Lin et al. 2023 (arXiv 2305.08891), section 3.4. Guidance gives a prediction g a larger
  standard deviation than the prediction c for the prompt alone. The step continues with
  g (1 + r (std(c) / std(g) - 1)). The standard deviations are those of each image. With r = 0 the step is exactly g.
- `clip_skip` k: each text encoder returns the hidden states of k layers earlier. SDXL reads the penultimate layer at
  k = 0, Stable Diffusion 1 and 2 the last one, after the final layer norm. As in diffusers, the negative prompt and the
  pooled text skip no layers. (User interfaces in which the penultimate layer of Stable Diffusion 1 is "clip skip 2"
  count from 1: subtract 1.) A release that was built before this field existed accepts only 0.
- `timesteps` and `sigmas` replace the sampler's own spacing. Send at most one of the two. `num_inference_steps` may be
  left out, or must agree. With `image`, `strength` skips the first of them.

## Samplers

`scheduler` takes a name from the left column or the name of a diffusers class. In a request
`DPMSolverMultistepScheduler` means DPM++ 2M. In a model's `scheduler_config.json` its options select the sampler.

Heun runs the UNet twice for each step except the last: `steps` in the events of a stream counts these runs. It is
refused with the refiner, because the fraction that divides base and refiner falls between the two runs of a step.
UniPC is not served. A step here reads the latents, this denoised estimate, the previous one, and noise. The corrector
of UniPC's second order (diffusers' default) reads two previous estimates.

A model that was trained for zero terminal SNR states `rescale_betas_zero_snr: true` with `prediction_type:
v_prediction` in its `scheduler_config.json`. All samplers then use the rescaled noise schedule. diffusers' Heun ignores
that entry.

| name | diffusers class |
|---|---|
"""
_RESPONSE_HEAD = """
## Response

A request that succeeds is answered with status 200 and this JSON object. Every answer except Truss's own has the header
`X-Request-Id`. It repeats the caller's `X-Request-Id` (up to 128 letters, digits and `_.:-`). Otherwise it is the
platform's `X-Baseten-Request-Id`, or a new one. The server's log has one JSON line with that id for each request that
does not ask for `describe`.

"""
_DESCRIPTION_HEAD = """
With `"describe": true` nothing is generated. The answer describes the deployment:

"""
_STREAM = """
## Streams

With `"stream": true` the answer is `application/x-ndjson`: one JSON object on each line. Refusals come first, with the
same status codes as without a stream. After status 200 these lines follow.

| `event` | other fields | when |
|---|---|---|
| `accepted` | `request_id`, `release`, `seed`, `steps`, `ahead` | first; `ahead` counts the images before it |
| `heartbeat` | `ahead` | after @HEARTBEAT@ without another event |
| `step` | `step`, `steps`, `index`, `preview` | after a step; on some a `preview` of image `index`, a JPEG in base64 |
| `image` | `index`, and the fields of one image | an image is finished |
| `done` | `status`, `time`, `timings`, `warnings`, `engine` | last, if all images are finished |
| `error` | `status`, `kind`, `error` | last, instead of `done` |

`steps` counts the steps of all images, of the base and of the refiner, for each mask. A preview follows every
`preview_every` steps of an image. If such a step is the last one of a UNet or for a mask, the preview follows the step
after it. None follows an image's last step. A `step` line with a preview is sent once the preview is encoded, and has
the number of the last step then.

`steps` is the same in all lines, and `step` never falls. If a worker ends, the unfinished images begin again at another
one. `step` lines then follow once more steps are done than before.

A preview has one pixel for each latent. Its colours come from a small map, which the build fits to the release's VAE
and whose mean error `preheat build` prints. It is 2 to 7 % of the range on the tiny model. Releases of older versions,
and those built without their GPU, have no map. Their server fits a linear one while it starts, whose colours are less
accurate: the mean error on the tiny model is 17 %.

    {"event": "accepted", "request_id": "...", "release": "sdxl/1", "seed": 7, "steps": 30, "ahead": 2}
    {"event": "heartbeat", "ahead": 1}
    {"event": "step", "step": 5, "steps": 30, "index": 0, "preview": "<base64>"}
    {"event": "image", "index": 0, "data": "<base64>", "seed": 7, "format": "jpeg", "width": 1024, "height": 1024}
    {"event": "done", "status": "success", "time": 4.2, "timings": {}, "warnings": [], "engine": {}}

## Status codes

A refusal is JSON: `{"error": ..., "kind": ...}`. `field` is added if one field is the cause. Truss's own answers have
no `kind`.

| status | `kind` | when | what to do |
|---|---|---|---|
| 200 | | the images are finished, or a stream begins | |
| 400 | | a field is missing, unknown or out of range. Truss answers; `error` names the field | change the request |
"""
_JSON_TYPES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "list[str]": "list of strings",
    "list[int]": "list of integers",
    "bool": "boolean",
    "list[ImageResult]": "list of objects",
    'Literal["success"]': "string",
    "ImageFormat": "string",
    "NotRequired[bool]": "boolean",
}
# Each kind of refusal: when it is sent, and the caller's remedy. STATUS has the codes.
_REFUSALS = {
    "refused": (
        "this deployment does not serve a field's value: a size, a sampler, LCM's number of steps, the refiner, an "
        "adapter; or an image or a mask cannot be used; or the body has more than "
        f"{MAX_TEXT_BYTES // 2**20} MiB of JSON besides base64, and is not parsed",
        "change the named field",
    ),
    "too_slow": (
        "the body stopped arriving: fewer than 64 KiB of it within 10 s",
        "repeat it with the whole body",
    ),
    "too_large": (
        f"the body has more than {MAX_BODY_BYTES // 2**20} MiB. It is not parsed",
        "send smaller images",
    ),
    "overloaded": (
        "`limits.max_queue` images are waiting, or the bodies of all requests in flight exceed "
        f"{MAX_TOTAL_BODY_BYTES // 2**20} MiB, or {MAX_WAITING} requests wait for their images or prompts to be read. "
        "The header `Retry-After` has seconds",
        "repeat it after that time",
    ),
    "cancelled": ("the client disconnected. Only the log and the metrics show it", ""),
    "broken_image": (
        "an image has NaN or infinite values. `error` names the seed",
        "report it: the VAE's precision is usually the cause",
    ),
    "overflow": (
        "an image has NaN or infinite values, and values of the request may be the cause. `error` names them and the "
        "seed, `field` the first one",
        "use smaller scales and weights",
    ),
    "adapter": (
        "a LoRA adapter cannot be read from the store",
        "report it: the store or the adapter's blobs are damaged, or the network has failed",
    ),
    "unavailable": ("the GPU failed, and the process is about to be replaced", "repeat it"),
    "deadline": (
        "the images were not finished within `limits.deadline_seconds`",
        "request fewer steps or images, or repeat it later",
    ),
}
_OTHER_ERROR = (
    "| 500 | `failed` | generation failed for another reason | search the server's log for the request's id |\n"
)
_TAIL = """
Truss answers a body that is not JSON, without a call of the model. So deeply nested JSON gets status 500. If a client
disconnects, its request is removed before the next step, waiting or running.
"""


def page() -> str:
    """Return the text of docs/requests.md."""
    schema = GenerationRequest.model_json_schema()
    parts = [_HEAD, *_fields(schema)]
    entries = {
        "masks": MaskRequest, "loras": LoraRequest, "controls": ControlRequest, "ip_adapters": IpAdapterRequest
    }  # fmt: skip
    for field, model in entries.items():
        parts += [f"\nOne entry of `{field}`:\n\n", *_fields(schema["$defs"][model.__name__])]
    limits = {
        "FILE_MIB": MAX_FILE_BYTES // 2**20,
        "MEGAPIXELS": MAX_INPUT_PIXELS // 10**6,
        "IN_ALL": MAX_REQUEST_PIXELS // 10**6,
        "SIDE": f"{MAX_INPUT_SIDE:,}",
        "JPEG_SCANS": MAX_JPEG_SCANS,
        "SCAN_MEGAPIXELS": MAX_JPEG_SCAN_PIXELS // 10**6,
        "RING": RING_WIDTH,
        "WEIGHT": MAX_PROMPT_WEIGHT,
    }
    parts.append(re.sub("@([A-Z_]+)@", lambda found: str(limits[found[1]]), _AFTER_FIELDS))
    parts += [f"| {name} | {', '.join(_classes(name)) or '-'} |\n" for name in SAMPLERS]
    parts.append(_RESPONSE_HEAD)
    parts += [_record(GenerationResponse), "\nOne entry of `images`:\n\n", _record(ImageResult)]
    parts += ["\n`engine`:\n\n", _record(EngineInfo)]
    parts += [_DESCRIPTION_HEAD, _record(Description)]
    parts.append(_STREAM.replace("@HEARTBEAT@", f"{HEARTBEAT_SECONDS:g} s"))
    last_500 = max(kind for status, kind in STATUS.values() if status == 500)
    for status, kind in sorted(STATUS.values()):
        when, remedy = _REFUSALS[kind]
        parts.append(f"| {status} | `{kind}` | {when} | {remedy} |\n")
        parts += [_OTHER_ERROR] if kind == last_500 else []
    return "".join([*parts, _TAIL])


def _fields(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a table of a model's fields."""
    yield "| field | type | default | meaning |\n|---|---|---|---|\n"
    for name, field in schema["properties"].items():
        default = "required" if name in schema["required"] else _default(field)
        meaning, _, stated = str(field["description"]).partition(" Default: ")
        yield f"| `{name}` | {_type(field)} | {stated.rstrip('.') or default} | {meaning} |\n"


def _type(field: Mapping[str, Any]) -> str:
    """Return a field's type and range in words. Null is left out, because every optional field accepts it."""
    choices = [choice for choice in field.get("anyOf", [field]) if choice.get("type") != "null"]
    (choice,) = choices
    if "enum" in choice:
        return " or ".join(f"`{value}`" for value in choice["enum"])
    if "maxLength" in choice:
        return f"string, {choice.get('minLength', 0)} to {choice['maxLength']:,} characters"
    if choice["type"] == "array":
        least, most, items = choice.get("minItems", 0), choice["maxItems"], choice["items"]
        kind = "objects" if "$ref" in items else f"{items['type']}s{_bounds(items)}"
        return f"list of {least if least == most else f'{least} to {most}'} {kind}"
    return f"{choice['type']}{_bounds(choice)}"


def _bounds(field: Mapping[str, Any]) -> str:
    if "maximum" in field:
        return f", {field['minimum']} to {field['maximum']}"
    return f", at least {field['minimum']}" if "minimum" in field else ""


def _default(field: Mapping[str, Any]) -> str:
    value = field["default"]
    return f"`{str(value).lower()}`" if isinstance(value, bool) else "null" if value is None else f"`{value}`"


def _classes(sampler: str) -> list[str]:
    """Return the diffusers classes and options of a sampler."""
    name, settings = diffusers_class(sampler, is_edm=False)
    options = ", ".join(
        f"`{key}` {f'`{value}`' if isinstance(value, str) else value}" for key, value in settings.items()
    )
    return [f"`{name}` with {options}" if options else f"`{name}`"]


def _record(record: type) -> str:
    """Return a table of a TypedDict's keys, from its source: name, type and comment."""
    keys = re.findall(r"^    (\w+): ([^#\n]+?)(?:  # (.+))?$", inspect.getsource(record), re.MULTILINE)
    lines = [f"| `{name}` | {_JSON_TYPES.get(kind, 'object')} | {comment} |\n" for name, kind, comment in keys]
    return "".join(["| key | type | meaning |\n|---|---|---|\n", *lines])


def main() -> None:
    PAGE.write_text(page())
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
