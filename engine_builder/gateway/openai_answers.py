"""Events of Preheat's servers -> answers of OpenAI's Images API (see `openai_requests` for the definition).

Answers have one more key, `preheat`: the seeds, the server's warnings, the milliseconds by stage, and the engine.
Tokens are not counted: `usage` is 0.
"""

import json
import time
from collections.abc import AsyncIterator
from typing import Any

from engine_builder.gateway.backend_answers import Event
from engine_builder.gateway.backends import Accepted
from engine_builder.gateway.errors import ApiError
from engine_builder.gateway.openai_requests import ImageCall
from model.api.resolve import DEFAULT_INPAINT_STRENGTH, DEFAULT_STRENGTH

_NO_USAGE = {
    "input_tokens": 0,
    "input_tokens_details": {"image_tokens": 0, "text_tokens": 0},
    "output_tokens": 0,
    "total_tokens": 0,
}
_ALL_STEPS = 100  # no request has more


def preview_every(call: ImageCall, description: Event) -> int:
    """Return `preview_every` for a call's number of partial images: the steps between them, 0 for none."""
    if not call.partial_images or description.get("safety") == "blank":  # which refuses previews
        return 0
    steps = call.native.get("num_inference_steps", description["defaults"]["num_inference_steps"])
    default = DEFAULT_INPAINT_STRENGTH if "masks" in call.native else DEFAULT_STRENGTH
    strength = call.native.get("strength", default if "image" in call.native else 1.0)
    return min(_ALL_STEPS, max(1, int(steps * strength) // (call.partial_images + 1)))


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


async def server_sent_events(call: ImageCall, accepted: Accepted) -> AsyncIterator[str]:
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
                yield ": waiting\n\n"  # a comment keeps the connection open
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


def _event(name: str, data: Event) -> str:
    return f"event: {name}\ndata: {json.dumps({'type': name, **data})}\n\n"
