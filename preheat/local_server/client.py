"""Send a request to a running server, and write the images of its response to files.

Responses come from HTTP or from the output of `truss predict`. This module reads only the images and the error message
of a response. An image's bytes give its format, and so its suffix.
"""

import base64
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import httpx

from engine_builder.error_text import cause_of
from engine_builder.files import check_writable, write_file
from gateway.endpoint import BASETEN_KEY_VARIABLE, KEY_VARIABLE, Endpoint, parse_endpoint
from model.errors import PreheatError

MAX_TIMEOUT_SECONDS = 86_400
_CONNECT_SECONDS = 30.0
_START_POLL_SECONDS = 5.0  # between two requests to a model that is starting
_STARTING = (503, 502, 504)  # answered for a model that is starting: by its server, or by the platform in front of it
_MAX_CHECKED_PATHS = 64  # no server returns more images
_PIPE_REMEDY = "Pipe the whole answer into `preheat save`."


class CallFailed(PreheatError):
    """A request returned no image. `status`: the HTTP status, or None without an answer."""

    def __init__(self, message: str, status: int | None = None, remedy: str | None = None) -> None:
        super().__init__(message, remedy)
        self.status = status


def generate(
    server: str | Endpoint,
    request: dict[str, Any],
    timeout: float,
    progress: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Send `request` to a server (a URL needs no key) and return its response. Raises CallFailed or BadEndpoint.

    With `progress` the answer is streamed: `progress` is called with each event (see `model.api.service`), and the
    response is assembled from them. `timeout` in seconds is then the longest time between two events. A model that is
    not ready is asked again within `timeout`, each time after the event "starting" with its `reason`.
    """
    if not 0 < timeout <= MAX_TIMEOUT_SECONDS:  # also refuses NaN
        raise CallFailed(f"A timeout of {timeout:g} s is not possible.", remedy=f"Wait 1 to {MAX_TIMEOUT_SECONDS} s.")
    body = _encode(request if progress is None else request | {"stream": True})
    endpoint = parse_endpoint(server, variables={}) if isinstance(server, str) else server
    try:
        return _send(endpoint, body, timeout, progress)
    except CallFailed as error:
        raise CallFailed(endpoint.hide_key(error.args[0]), error.status, error.remedy) from None


def _send(
    endpoint: Endpoint, body: bytes, timeout: float, progress: Callable[[dict[str, Any]], None] | None
) -> dict[str, Any]:
    url, deadline = endpoint.url, time.monotonic() + timeout
    timeouts = httpx.Timeout(timeout, connect=min(timeout, _CONNECT_SECONDS))
    try:
        # A proxy from the environment cannot reach this machine's loopback address.
        with httpx.Client(trust_env=not endpoint.is_local, timeout=timeouts, headers=endpoint.headers) as client:
            while True:
                with client.stream("POST", endpoint.predict_url, content=body) as answer:
                    if answer.is_success and progress is not None:
                        return _assemble_response(url, answer.iter_lines(), progress)
                    answer.read()
                    wait = _seconds_until_ready(endpoint, answer)
                    if wait is None or time.monotonic() + wait >= deadline:
                        return _read_response(endpoint, answer)
                if progress is not None:
                    progress({"event": "starting", "reason": f"{answer.status_code} {answer.reason_phrase}".strip()})
                time.sleep(wait)
    except httpx.ConnectTimeout as error:
        raise _unreachable(endpoint, "no connection in time") from error
    except httpx.TimeoutException as error:
        raise CallFailed(
            f"{url} gave no answer within {timeout:g} s.",
            remedy="Give a longer --timeout: a model that has scaled to zero takes minutes to start."
            if endpoint.is_deployed
            else "Give a longer --timeout, or read the server's log.",
        ) from error
    except httpx.RequestError as error:
        raise _unreachable(endpoint, cause_of(error)) from error


def _unreachable(endpoint: Endpoint, cause: str) -> CallFailed:
    return CallFailed(
        f"{endpoint.url} cannot be reached: {cause}.",
        remedy="Start a server with `preheat serve`, or give the URL of a running one."
        if endpoint.is_local
        else "Check the URL, and that this machine can reach that host.",
    )


def _seconds_until_ready(endpoint: Endpoint, answer: httpx.Response) -> float | None:
    """Return the seconds to wait for a model that is starting, or None for any other answer.

    Truss and its platform answer for such a model. A server of Preheat states a `kind`, and is not asked again.
    """
    if answer.status_code not in (_STARTING if endpoint.is_deployed else _STARTING[:1]):
        return None
    try:
        content = answer.json()
    except (ValueError, RecursionError):
        content = None
    if isinstance(content, dict) and "kind" in content:
        return None
    seconds = answer.headers.get("Retry-After", "")
    return max(1, int(seconds)) if seconds.isdecimal() and len(seconds) < 4 else _START_POLL_SECONDS


def _encode(request: dict[str, Any]) -> bytes:
    """Return the request as JSON. Raises CallFailed for a value that JSON cannot hold."""
    for name, value in request.items():
        try:
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError as error:
            raise CallFailed(f"{name}: the text is not valid UTF-8.", remedy="Type it again.") from error
        except ValueError as error:
            shown = value if isinstance(value, float) else "one of its values"
            raise CallFailed(f"{name}: {shown} is not a finite number.", remedy="Give a number.") from error
    return json.dumps(request, ensure_ascii=False).encode()


def _read_response(endpoint: Endpoint, answer: httpx.Response) -> dict[str, Any]:
    try:
        response = answer.json()
    except (ValueError, RecursionError):
        response = {"error": " ".join(answer.text.split())[:500] or answer.reason_phrase}
    if answer.is_redirect:
        raise CallFailed(
            f"{endpoint.url} redirects to {answer.headers.get('Location')}.", answer.status_code, "Give that URL."
        )
    if not answer.is_success:
        text = f"{answer.status_code}: {_error_text(response)}".rstrip(".")
        raise CallFailed(f"{text}.", answer.status_code, _remedy(endpoint, answer))
    if not isinstance(response, dict):
        raise CallFailed(f"{endpoint.url} answered with {type(response).__name__}, not an object.", answer.status_code)
    return response


def _remedy(endpoint: Endpoint, answer: httpx.Response) -> str:
    variable = f"{BASETEN_KEY_VARIABLE} or {KEY_VARIABLE}" if endpoint.is_deployed else KEY_VARIABLE
    match answer.status_code:
        case 401 | 403:
            return (
                f"Check the key in {variable}." if endpoint.key else f"Set the variable {variable}, or give --api-key."
            )
        case 404 | 405 if "error" not in answer.text:
            return f"{endpoint.predict_url} is not the `predict` of a model: check the URL."
        case 404:
            return "Check the URL, and which deployment it names." if endpoint.is_deployed else ""
        case 502 | 503 | 504 if _seconds_until_ready(endpoint, answer) is not None:
            return "The model was not ready in time. Give a longer --timeout, or read the server's log."
        case 429 if seconds := answer.headers.get("Retry-After"):
            return f"Try again in {seconds} s."
    return ""


def _assemble_response(url: str, lines: Iterator[str], progress: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    images: dict[int, dict[str, Any]] = {}
    for line in lines:
        try:
            event = json.loads(line)
            kind = event.pop("event")
            if kind == "image":
                images[event.pop("index")] = event
            elif kind == "error":
                raise CallFailed(f"{event['status']}: {_error_text(event)}", event["status"])
            elif kind == "done":
                ordered = [images[index] for index in sorted(images)]
                return {**event, "images": ordered, "data": ordered[0]["data"]}
            progress({"event": kind, **event})
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise CallFailed(f"{url} sent an invalid event: {line[:200]!r}.") from error
    raise CallFailed(f"{url} ended its answer before the images were finished.", remedy="Read the server's log.")


def check_output_paths(out: Path, suffix: str, count: int) -> None:
    """Raise NotWritable if images could not be saved as `out`. Call it before they are requested."""
    check_writable(out)
    for path in _paths(out, [suffix] * max(1, min(count, _MAX_CHECKED_PATHS))):
        check_writable(path)


def save_images(response: dict[str, Any], out: Path) -> list[Path]:
    """Write the response's images as `out`, or as `out-1`, `out-2`, ... if there are several.

    A suffix that does not match the image is replaced: out.png becomes out.jpg for a JPEG. Writes nothing unless all
    images are valid and all paths can be written. Raises CallFailed and NotWritable.
    """
    images = decode_images(response)
    paths = _paths(out, [_suffix_of(image) for image in images])
    for path in (out, *paths):
        check_writable(path)
    for path, image in zip(paths, images, strict=True):
        write_file(path, image)
    return paths


def decode_images(response: dict[str, Any]) -> list[bytes]:
    """Return the files of the images in a response, of a server or of OpenAI's API (`b64_json`). Raises CallFailed."""
    if "event" in response:
        raise CallFailed("The answer is a stream of events.", remedy="Leave `stream` out of the request.")
    data = response.get("data")
    entries = response.get("images") or (data if isinstance(data, list) else [{"data": data}])
    if not isinstance(entries, list) or not entries:
        raise CallFailed(f"The server returned no image: {_error_text(response)}")
    values = [entry.get("data", entry.get("b64_json")) if isinstance(entry, dict) else None for entry in entries]
    encoded = [value for value in values if isinstance(value, str)]
    if len(encoded) < len(entries):
        raise CallFailed(f"The server returned no image: {_error_text(response)}")
    try:
        return [base64.b64decode(data, validate=True) for data in encoded]
    except ValueError as error:
        raise CallFailed(f"The response's image is not base64: {error}.") from error


def _paths(out: Path, suffixes: list[str]) -> list[Path]:
    """Return the path of each image, numbered if there are several. An image suffix of `out` is replaced."""
    stem = out.with_suffix("") if out.suffix.lower() in (".png", ".jpg", ".jpeg", ".webp") else out
    numbers = [f"-{number}" for number in range(1, len(suffixes) + 1)] if len(suffixes) > 1 else [""]
    jpeg_suffix = out.suffix if out.suffix.lower() == ".jpeg" else ".jpg"
    return [
        stem.with_name(stem.name + number + (jpeg_suffix if suffix == ".jpg" else suffix))
        for number, suffix in zip(numbers, suffixes, strict=True)
    ]


def save_predicted(output: IO[bytes], out: Path) -> list[Path]:
    """Write the images in the output of `truss predict`: a line of text, then the response as JSON.

    `truss predict` exits with 0 even if the server refused the request. Raises CallFailed for a refused request or an
    invalid response, and NotWritable.
    """
    text = output.read().decode(errors="replace")
    start = text.find("{")
    try:
        response, _ = json.JSONDecoder().raw_decode(text, start) if start >= 0 else (None, 0)
    except (ValueError, RecursionError) as error:
        raise CallFailed(f"The response is cut off or not JSON: {error}.", remedy=_PIPE_REMEDY) from error
    if response is None:
        raise CallFailed(f"Found no response to save in {text.strip()[:200]!r}.", remedy=_PIPE_REMEDY)
    return save_images(response, out)


def _error_text(response: object) -> str:
    """Return the error message of a response. Without a message, return a clause that quotes its JSON."""
    error = response.get("error") if isinstance(response, dict) else None
    if isinstance(error, dict):
        error = error.get("message") or error
    if error:
        return error if isinstance(error, str) else json.dumps(error)
    return f"its response is {json.dumps(response)[:500]}"


def _suffix_of(image: bytes) -> str:
    if image.startswith(b"\x89PNG\r\n\x1a\n"):
        return ".png"
    if image.startswith(b"\xff\xd8\xff"):
        return ".jpg"
    if image[:4] == b"RIFF" and image[8:12] == b"WEBP":
        return ".webp"
    raise CallFailed("The response's data is not a PNG, JPEG or WebP image.")
