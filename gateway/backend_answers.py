"""Check events, descriptions and refusals of a backend once, so that all other code can rely on them.

A backend may be broken, or something else may answer in its place, such as a proxy. `InvalidAnswer` states what is
wrong with an answer. Fields that no table here names are passed on, as newer servers may have more.
"""

import asyncio
import base64
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import httpx
from pydantic import (
    AfterValidator,
    AllowInfNan,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    create_model,
)
from typing_extensions import TypeAliasType

from gateway.bounded_reading import SMALL_LINE_BYTES, HeldLines, InvalidAnswer, LineReader
from gateway.errors import ApiError
from model.api.describe import Description
from model.store.manifest_json import MAX_RELEASE_NAME
from model.validation import LARGEST_SIDE, MAX_STEPS, SEED_COUNT, ImageFormat

MAX_EVENTS = 200_000  # of one answer; the most steps of a request are 12,800, and heartbeats come every second
_MAX_RETRY_SECONDS = 3600  # a longer Retry-After is a mistake
MAX_MEMBERS = 20_000  # values in one line or description; an image is one long text
BYTES_PER_PIXEL = 6  # of an image in base64; a JPEG of noise has 5.5, a PNG file at most 4
ACCEPT_SECONDS = 600.0  # until the first event; a replica may have to start
EVENT_SECONDS = 60.0  # until each further event; servers send a heartbeat every second
_UNKNOWN_PIXELS = 2048**2  # of a release whose description states no sizes
Event = dict[str, Any]
T = TypeVar("T")


def _check_base64(text: str) -> str:
    base64.b64decode(text, validate=True)  # raises ValueError
    return text


# Python's parser would accept NaN, a number that overflows, and half of a surrogate pair, which cannot be sent on.
_Json = TypeAliasType(
    "_Json", "None | bool | int | Annotated[float, AllowInfNan(False)] | str | list[_Json] | dict[str, _Json]"
)
_OBJECT: TypeAdapter[Event] = TypeAdapter(dict[str, _Json], config=ConfigDict(strict=True))
_Count = Annotated[int, Field(ge=0, le=2**31)]
_Pixels = Annotated[int, Field(ge=1, le=2 * LARGEST_SIDE)]
_Seed = Annotated[int, Field(ge=0, lt=SEED_COUNT)]
_File = Annotated[str, Field(min_length=1), AfterValidator(_check_base64)]
_Name = Annotated[str, Field(min_length=1, max_length=MAX_RELEASE_NAME)]
_Text = Annotated[str, Field(min_length=1, max_length=2**14)]


class _Checked(BaseModel):
    model_config = ConfigDict(strict=True)


class _Accepted(_Checked):
    event: Literal["accepted"]
    request_id: str = ""
    release: str = ""
    seed: _Seed
    steps: _Count
    ahead: _Count = 0


class _Heartbeat(_Checked):
    event: Literal["heartbeat"]
    ahead: _Count = 0


class _Step(_Checked):
    event: Literal["step"]
    step: _Count
    steps: _Count
    preview: _File = ""


class _Image(_Checked):
    event: Literal["image"]
    index: _Count
    data: _File
    seed: _Seed
    format: ImageFormat
    width: _Pixels
    height: _Pixels
    flagged: bool = False


class _Done(_Checked):
    event: Literal["done"]
    status: Literal["success"] = "success"
    time: float = 0
    timings: dict[str, float] = {}
    warnings: list[str] = []
    engine: dict[str, str] = {}


class _Error(_Checked):
    error: _Text
    kind: Annotated[str, Field(max_length=64)] | None = None
    field: Annotated[str, Field(max_length=256)] | None = None


class _ErrorEvent(_Error):
    event: Literal["error"]
    status: Annotated[int, Field(ge=400, le=599)] = 500


_EVENT: TypeAdapter[Any] = TypeAdapter(
    Annotated[_Accepted | _Heartbeat | _Step | _Image | _Done | _ErrorEvent, Field(discriminator="event")]
)


class _Defaults(_Checked):
    num_inference_steps: Annotated[int, Field(ge=1, le=MAX_STEPS)]


class _Sizes(_Checked):
    sizes: list[Annotated[list[_Pixels], Field(min_length=2, max_length=2)]] = []
    max: _Pixels = 1

    def pixels(self) -> int:
        """Return the pixels of the largest size."""
        return max([self.max**2, *(width * height for width, height in self.sizes)])


# All fields of a description are checked. Only those that the gateway itself uses are required.
_DESCRIPTION: Any = create_model(
    "_DESCRIPTION",
    __base__=_Checked,
    **{name: (kind | None, None) for name, kind in get_type_hints(Description).items()}
    | {
        "release": (_Name, ...),
        "models": (list[_Name] | None, None),
        "defaults": (_Defaults, ...),
        "sizes": (_Sizes | None, None),
        "image_sizes": (_Sizes | None, None),
    },
)  # type: ignore[call-overload]


def parse_description(data: bytes) -> Event:
    """Return a description (`model.api.describe`). Raises InvalidAnswer."""
    found = _parse(data, "its description")
    _validate(_DESCRIPTION.model_validate, found, "its description")
    return found


def max_line_bytes(request: Event, description: Event) -> int:
    """Return the most bytes of a line in the answer to a request: the bytes of an image, and a margin for texts."""
    if "width" in request and "height" in request:
        pixels: int = request["width"] * request["height"]
    else:
        known = [description.get(name) for name in ("sizes", "image_sizes")]
        pixels = max((_Sizes.model_validate(sizes).pixels() for sizes in known if sizes), default=_UNKNOWN_PIXELS)
    upscale: int = request.get("upscale", 1)
    return SMALL_LINE_BYTES + BYTES_PER_PIXEL * min(pixels, LARGEST_SIDE**2) * upscale**2


def retry_after(answer: httpx.Response) -> int:
    """Return the seconds of a server's Retry-After, 1 if it has none."""
    value = answer.headers.get("Retry-After", "")
    return min(max(int(value), 1), _MAX_RETRY_SECONDS) if value.isdecimal() and len(value) < 6 else 1


def parse_refusal(status: int, data: bytes) -> ApiError:
    """Return the error of a server's refusal {"error", "kind", "field"}, in OpenAI's form. Raises InvalidAnswer."""
    if not 400 <= status <= 599:
        raise InvalidAnswer(f"its status is {status}")
    body = _parse(data, f"its body of status {status}")
    _validate(_Error.model_validate, body, f"its body of status {status}")
    return _refusal(status, body)


def _refusal(status: int, body: Event) -> ApiError:
    return ApiError(status, body["error"], body.get("field"), body.get("kind"))


async def read_events(
    answer: httpx.Response, images: int, max_bytes: int, held: HeldLines
) -> AsyncGenerator[Event, None]:
    """Yield the events of a stream, from "accepted" to "done", with exactly the `images` requested ones.

    Raises ApiError for the event "error", and if all answers hold too much; InvalidAnswer; EOFError if the stream ends
    before "done"; TimeoutError if an event is late; httpx.HTTPError.
    """
    finished: set[int] = set()
    async with aclosing(LineReader(answer, max_bytes, held)) as lines:
        for number in range(MAX_EVENTS):
            if (line := await lines.read(EVENT_SECONDS if number else ACCEPT_SECONDS)) is None:
                raise EOFError
            what, problem = f"its line {number + 1}", ""
            try:
                if len(line) > SMALL_LINE_BYTES:  # an image of 64 MiB would block the event loop for half a second
                    event = await asyncio.to_thread(_parse_event, line, what)
                else:
                    event = _parse_event(line, what)
            except InvalidAnswer as error:
                problem = str(error)
            del line  # an image is held once
            if problem:  # not raised above: the frames of an error would hold the line
                raise InvalidAnswer(problem)
            kind = event["event"]
            if kind == "error":
                raise _refusal(event.get("status", 500), event)
            if (kind == "accepted") != (number == 0):
                raise InvalidAnswer(f"its line {number + 1} is {kind!r}")
            if kind == "image":
                index = event["index"]
                if index in finished or index >= images:
                    raise InvalidAnswer(f"it has image {index} {'twice' if index in finished else f'of {images}'}")
                finished.add(index)
            if kind == "done" and len(finished) < images:
                raise InvalidAnswer(f"it has {len(finished)} of {images} images")
            yield event
            if kind == "done":
                return
            await asyncio.sleep(0)  # other requests run, however fast the events arrive
    raise InvalidAnswer(f"it has more than {MAX_EVENTS} events")


def _parse_event(line: bytes, what: str) -> Event:
    """Return an event with the defaults of "done"."""
    event = _parse(line, what)
    checked = _validate(_EVENT.validate_python, event, what)
    return checked.model_dump() | event if isinstance(checked, _Done) else event


def _parse(data: bytes, what: str) -> Event:
    # A text in base64 has none of these, so few of them bound the objects that the parser makes.
    if sum(data.count(mark) for mark in (b",", b"[", b"{")) > MAX_MEMBERS:
        raise InvalidAnswer(f"{what} has more than {MAX_MEMBERS} values")
    return _validate(_OBJECT.validate_json, data, what)


def _validate(validate: Callable[[Any], T], value: Any, what: str) -> T:
    """Return `validate(value)`. Raises InvalidAnswer with the first problem, which has at most some 300 characters."""
    try:
        return validate(value)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, problem["loc"]))
        raise InvalidAnswer(
            f"{what} is not valid: {f'{place}: '[:100] if place else ''}{problem['msg'][:200]}"
        ) from error
