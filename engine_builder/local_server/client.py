"""Client of a running server: send a request, and write the images of its response to files.

Responses come from HTTP or from the output of `truss predict`. Of a response this module knows only the images and the
error message. An image's format, and so its suffix, is read from its bytes.
"""

import base64
import binascii
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

import httpx

from model.errors import PreheatError


class CallFailed(PreheatError):
    """A request returned no image. `status`: the HTTP status, or None without an answer."""

    def __init__(self, message: str, status: int | None = None, remedy: str | None = None) -> None:
        super().__init__(message, remedy)
        self.status = status


def generate(
    url: str, request: dict[str, Any], timeout: float, progress: Callable[[dict[str, Any]], None] | None = None
) -> dict[str, Any]:
    """Send `request` to the server at `url` (without a path) and return its response. Raises CallFailed.

    With `progress` the answer is streamed: `progress` is called with each event (see `model.api.service`), and the
    response is assembled from them. `timeout` in seconds is then the longest time between two events.
    """
    try:
        local = urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")
    except ValueError as error:
        raise _invalid_url(url, error) from error
    address = f"{url.rstrip('/')}/v1/models/model:predict"
    try:
        # A proxy from the environment cannot reach this machine's loopback address.
        with httpx.Client(trust_env=not local, timeout=timeout) as client:
            if progress is None:
                return _read_response(url, client.post(address, json=request))
            with client.stream("POST", address, json=request | {"stream": True}) as answer:
                if not answer.is_success:
                    answer.read()
                    return _read_response(url, answer)
                return _assemble_response(url, answer.iter_lines(), progress)
    except httpx.TimeoutException as error:
        raise CallFailed(f"{url} gave no answer within {timeout:g} s.") from error
    except httpx.InvalidURL as error:
        raise _invalid_url(url, error) from error
    except httpx.TransportError as error:
        raise CallFailed(f"{url} cannot be reached: {error}.", remedy="Start a server with `preheat serve`.") from error


def _invalid_url(url: str, error: Exception) -> CallFailed:
    return CallFailed(f"{url!r} is not the URL of a server: {error}.")


def _read_response(url: str, answer: httpx.Response) -> dict[str, Any]:
    try:
        response = answer.json()
    except ValueError:
        response = {"error": answer.text.strip()[:500]}
    if not answer.is_success:
        raise CallFailed(f"{answer.status_code}: {_error_text(response)}", answer.status_code)
    if not isinstance(response, dict):
        raise CallFailed(f"{url} answered with {type(response).__name__}, not an object.", answer.status_code)
    return response


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
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise CallFailed(f"{url} sent an invalid event: {line[:200]!r}.") from error
    raise CallFailed(f"{url} ended its answer before the images were finished.", remedy="Look into the server's log.")


def save_images(response: dict[str, Any], out: Path) -> list[Path]:
    """Write the response's images as `out`, or as `out-1`, `out-2`, ... if there are several. Raises CallFailed.

    A suffix is replaced if it does not match the image: out.png becomes out.jpg for a JPEG.
    """
    encoded = [image.get("data") for image in response.get("images") or []] or [response.get("data")]
    if not all(isinstance(data, str) for data in encoded):
        raise CallFailed(_error_text(response))
    try:
        images = [base64.b64decode(str(data), validate=True) for data in encoded]
    except binascii.Error as error:
        raise CallFailed(f"The response's image is not base64: {error}.") from error
    stem = out.with_suffix("") if out.suffix.lower() in (".png", ".jpg", ".jpeg", ".webp") else out
    written = []
    for number, image in enumerate(images, start=1):
        suffix = _suffix_of(image)
        if suffix == ".jpg" and out.suffix.lower() == ".jpeg":
            suffix = out.suffix
        path = stem.with_name(stem.name + (f"-{number}" if len(images) > 1 else "") + suffix)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(image)
        except OSError as error:
            raise CallFailed(f"{path} cannot be written ({error.strerror}).", remedy="Name another --out.") from error
        written.append(path)
    return written


def save_predicted(output: TextIO, out: Path) -> list[Path]:
    """Write the images in the output of `truss predict`: a line of text, then the response as JSON.

    truss predict exits with 0 even if the server refused the request. Raises CallFailed for that, too.
    """
    text = output.read()
    start = text.find("{")
    try:
        response, _ = json.JSONDecoder().raw_decode(text, start) if start >= 0 else (None, 0)
    except ValueError as error:
        raise CallFailed(f"The response is cut off or not JSON: {error}.") from error
    if response is None:
        raise CallFailed(f"There is no response to save in {text.strip()[:200]!r}.")
    return save_images(response, out)


def _error_text(response: object) -> str:
    """Return the readable part of a response without an image."""
    error = response.get("error") if isinstance(response, dict) else None
    if isinstance(error, dict):
        error = error.get("message") or error
    if error:
        return error if isinstance(error, str) else json.dumps(error)
    return f"The response holds no image: {json.dumps(response)[:500]}"


def _suffix_of(image: bytes) -> str:
    if image.startswith(b"\x89PNG\r\n\x1a\n"):
        return ".png"
    if image.startswith(b"\xff\xd8\xff"):
        return ".jpg"
    if image[:4] == b"RIFF" and image[8:12] == b"WEBP":
        return ".webp"
    raise CallFailed("The response's data is not a PNG, JPEG or WebP image.")
