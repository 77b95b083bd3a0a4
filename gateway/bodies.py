"""The bodies of requests: JSON objects and forms. Malformed ones and those that arrived in part are refused.

Parsing runs in a worker thread. Megabytes of base64 are copied into the parsed values, not parsed as JSON: the parser
would hold the interpreter lock meanwhile, and one wide character in such a text would make it four times as large.
"""

import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from gateway.apis.openai import Files
from gateway.errors import ApiError, api_error, object_of, refused
from model.api.body_limit import CLIENT, SCAN
from model.api.body_scan import MAX_TEXT_BYTES
from model.api.fair_queue import PreparationQueues
from model.errors import Overloaded

MAX_IMAGE_FILES = 16  # of one request; OpenAI's limit
_TEXT_PRICE = 32  # of a byte of JSON besides base64, relative to a byte that is copied
_MAX_PARTS = 64  # of a form
_MAX_DEPTH = 16  # of a JSON value; a request has 5
_FILES = ("image", "image[]", "mask")
_ENTRY = re.compile(r"(\w+)\[\]\[(\w+)\]")  # of a list of objects, as the package `openai` writes it
_ENCODINGS = ("", "7bit", "8bit", "binary")  # of a part; all of them leave its bytes as they are
_CHARSETS = ("", "utf-8", "us-ascii")
FormFields = dict[str, str | list[dict[str, str]]]
"""The texts of a form by name, or a list of objects of texts."""
T = TypeVar("T")


class Bodies:
    """Reads bodies. Clients take turns in parsing, and small bodies do not wait for large ones."""

    def __init__(self) -> None:
        self._queues = PreparationQueues()

    async def json_object(self, http: Request) -> dict[str, Any]:
        """Return the JSON object of a request. Raises ApiError."""
        if not http.headers.get("Content-Type", "").lower().startswith("application/json"):
            raise refused(None, "Send JSON with the header `Content-Type: application/json`.", "invalid_content_type")
        body = await _read(http)
        runs = http.scope[SCAN].finish()
        text_bytes = len(body) - sum(stop - start for start, stop in runs)
        price = _TEXT_PRICE * text_bytes + len(body)
        return await self._parsed(http, price, partial(parse_json_object, body, runs))

    async def form(self, http: Request) -> tuple[FormFields, Files]:
        """Return the text fields and the files of a multipart request. Raises ApiError."""
        content_type = http.headers.get("Content-Type", "")
        if not content_type.lower().startswith("multipart/form-data"):
            raise refused(None, "Send the image as multipart/form-data.", "invalid_content_type")
        body = await _read(http)
        return await self._parsed(http, len(body), partial(parse_form, content_type, body))

    async def _parsed(self, http: Request, price: int, parse: Callable[[], T]) -> T:
        try:
            [parsed] = await self._queues.images(price).run(http.scope[CLIENT], [(price, parse)])
        except Overloaded as error:
            raise api_error(error) from error
        return parsed


async def _read(http: Request) -> bytearray:
    body = bytearray()
    async for part in http.stream():
        body += part
    return body


def parse_json_object(body: bytes | bytearray, runs: list[tuple[int, int]]) -> dict[str, Any]:
    """Return the object of a body whose long texts of base64 are at `runs` (see `JsonScan`). Raises ApiError.

    The runs are replaced by short words before the rest is parsed, and put back afterwards.
    """
    token = secrets.token_hex(16)
    word = re.compile(rf"{token}([0-9]+)x")
    pieces: list[bytes | bytearray] = []
    spans: list[tuple[int, int]] = []
    end = 0
    for start, stop in runs:
        while body[stop - 1] == ord("\\"):  # it belongs to the next character
            stop -= 1
        pieces += (body[end:start], f"{token}{len(spans)}x".encode())
        spans.append((start, stop))
        end = stop
    pieces.append(body[end:])

    def text_of(match: re.Match[str]) -> str:
        start, stop = spans[int(match[1])]
        run = body[start:stop]
        text: str = json.loads(b'"%s"' % run) if b"\\" in run else run.decode("ascii")
        return text

    def restored(value: Any, depth: int = 0) -> Any:
        if isinstance(value, str):
            if token not in value:
                return value
            if not value.isascii():
                raise _invalid("A long text of base64 has other characters in it.")
            return word.sub(text_of, value)
        if depth == _MAX_DEPTH:
            raise _invalid(f"Its values are nested more than {_MAX_DEPTH} deep.")
        if isinstance(value, dict):
            return {restored(name, depth): restored(entry, depth + 1) for name, entry in value.items()}
        return [restored(entry, depth + 1) for entry in value] if isinstance(value, list) else value

    try:
        text = b"".join(pieces).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _invalid("It is not UTF-8.") from error
    try:
        given = restored(json.loads(text, object_pairs_hook=object_of, parse_constant=_refuse_constant))
    except RecursionError as error:
        raise _invalid("Its values are nested too deeply.") from error
    except ValueError as error:
        raise _invalid() from error
    if not isinstance(given, dict):
        raise refused(None, "The body is not a JSON object.", "invalid_json")
    return given


def _refuse_constant(name: str) -> float:
    raise _invalid(f"{name} is not a JSON number.")


def _invalid(cause: str = "") -> ApiError:
    return refused(None, f"The body is not valid JSON. {cause}".strip(), "invalid_json")


@dataclass
class _Part:
    """A part of a form."""

    headers: dict[str, str] = field(default_factory=dict)
    name: str = ""
    is_file: bool = False
    has_file_name: bool = False
    data: list[bytes] = field(default_factory=list)


class _FormReader:
    """Collects the parts of a multipart body."""

    def __init__(self, boundary: bytes) -> None:
        self.parts: list[_Part] = []
        self._header = [bytearray(), bytearray()]  # name, value
        self._is_whole = False
        self._text_bytes = 0
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._add,
                "on_end": self._end,
            },
        )

    def read(self, body: bytes | bytearray) -> None:
        """Read a whole body. Raises ApiError."""
        try:
            self._parser.write(body)  # type: ignore[arg-type]  # it only searches and slices
        except FormParserError as error:
            raise _invalid_form("A line between its parts is malformed.") from error
        if not self._is_whole:
            raise _invalid_form("It ends before its last boundary, so it was cut off.")

    def _begin(self) -> None:
        if len(self.parts) == _MAX_PARTS:
            raise _invalid_form(f"It has more than {_MAX_PARTS} parts.")
        self.parts.append(_Part())

    def _end_header(self) -> None:
        name, value = (text.decode("latin-1") for text in self._header)
        self.parts[-1].headers[name.lower()] = value
        self._header = [bytearray(), bytearray()]

    def _end_headers(self) -> None:
        part = self.parts[-1]
        kind, options = parse_options_header(part.headers.get("content-disposition"))
        if kind != b"form-data" or not options.get(b"name"):
            raise _invalid_form("One of its parts has no name.")
        part.name = _decoded(options[b"name"], "The name of a part")
        part.is_file, part.has_file_name = b"filename" in options, bool(options.get(b"filename"))
        encoding = part.headers.get("content-transfer-encoding", "").strip().lower()
        if encoding not in _ENCODINGS:
            raise refused(part.name[:64], f"has the encoding {encoding[:60]!r}. Send its bytes as they are.")
        if part.is_file and part.name not in _FILES:
            raise ApiError(400, f"Unknown file: {part.name[:64]!r}.", part.name[:64], "unknown_parameter")
        if not part.is_file and part.name in _FILES:
            raise refused(part.name, "got text, expected a file.", "invalid_type")
        if part.is_file and sum(other.is_file for other in self.parts) > MAX_IMAGE_FILES + 1:
            raise _invalid_form(f"It has more than {MAX_IMAGE_FILES} images.")

    def _add(self, data: bytes, start: int, end: int) -> None:
        part = self.parts[-1]
        if not part.is_file:
            self._text_bytes += end - start
            if self._text_bytes > MAX_TEXT_BYTES:
                raise _invalid_form(f"Apart from files it has more than {MAX_TEXT_BYTES // 2**20} MiB.")
        part.data.append(bytes(memoryview(data)[start:end]))

    def _end(self) -> None:
        self._is_whole = True


def parse_form(content_type: str, body: bytes | bytearray) -> tuple[FormFields, Files]:
    """Return the text fields and the files of a multipart body. Raises ApiError.

    Fields `list[][key]` are the objects of a list: the n-th one with a key is of the n-th object.
    """
    _, options = parse_options_header(content_type)
    if not options.get(b"boundary"):
        raise _invalid_form("The header Content-Type states no boundary.")
    try:
        reader = _FormReader(options[b"boundary"])
    except FormParserError as error:
        raise _invalid_form("Its boundary is too long.") from error
    reader.read(body)
    fields: FormFields = {}
    columns: dict[str, dict[str, list[str]]] = {}
    images: list[bytes] = []
    masks: list[bytes] = []
    for part in reader.parts:
        if part.is_file and not part.has_file_name and not any(part.data):
            continue  # what a browser sends for an input without a file
        if part.is_file:
            (masks if part.name == "mask" else images).append(b"".join(part.data))
        elif entry := _ENTRY.fullmatch(part.name):
            columns.setdefault(entry[1], {}).setdefault(entry[2], []).append(_text_of(part))
        elif part.name in fields:
            raise refused(part.name[:64], "is given twice.")
        else:
            fields[part.name] = _text_of(part)
    for name, of_keys in columns.items():
        if name in fields:
            raise refused(name[:64], "is given twice.")
        if len({len(texts) for texts in of_keys.values()}) > 1:
            raise refused(name[:64], "its objects have different keys. Send the list as one field of JSON.")
        fields[name] = [dict(zip(of_keys, texts, strict=True)) for texts in zip(*of_keys.values(), strict=True)]
    if len(masks) > 1:
        raise refused("mask", "is given twice.")
    return fields, Files(tuple(images), masks[0] if masks else None)


def _text_of(part: _Part) -> str:
    _, options = parse_options_header(part.headers.get("content-type"))
    charset = options.get(b"charset", b"").decode("latin-1").lower()
    if charset not in _CHARSETS:
        raise refused(part.name[:64], f"has the charset {charset[:60]!r}. Send UTF-8.")
    return _decoded(b"".join(part.data), part.name[:64])


def _decoded(text: bytes | bytearray, name: str) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise _invalid_form(f"{name} is not UTF-8.") from error


def _invalid_form(cause: str) -> ApiError:
    return refused(None, f"The form is not valid multipart/form-data. {cause}", "invalid_form")
