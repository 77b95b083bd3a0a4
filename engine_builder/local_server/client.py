"""The client's side: send a request to a running server, and write the pictures of a response to files.

Takes responses from HTTP or from the output of `truss predict`. Knows of the response only where its pictures
and its error message are; what a picture is, and so its suffix, is read from its bytes.
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
    """A request got no picture. `status` is the HTTP status, None where no answer came or none is known."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def generate(
    url: str, request: dict[str, Any], timeout: float, progress: Callable[[dict[str, Any]], None] | None = None
) -> dict[str, Any]:
    """Send `request` to the server at `url` (without a path) and return its response.

    With `progress` the answer is streamed: it is called with each line that comes (`model.api.service` says which there
    are), and the response is put together from them. `timeout` is then the longest silence.
    """
    try:
        local = urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")
    except ValueError as error:
        raise _no_url(url, error) from error
    address = f"{url.rstrip('/')}/v1/models/model:predict"
    try:
        # A proxy from the environment cannot reach this machine's own loopback address.
        with httpx.Client(trust_env=not local, timeout=timeout) as client:
            if progress is None:
                return _response(url, client.post(address, json=request))
            with client.stream("POST", address, json=request | {"stream": True}) as answer:
                if not answer.is_success:
                    answer.read()
                    return _response(url, answer)
                return _gather(url, answer.iter_lines(), progress)
    except httpx.TimeoutException as error:
        raise CallFailed(f"{url} gave no answer within {timeout:g} s.") from error
    except httpx.InvalidURL as error:
        raise _no_url(url, error) from error
    except httpx.TransportError as error:
        raise CallFailed(f"{url} cannot be reached: {error}. Start a server with `preheat serve`.") from error


def _no_url(url: str, error: Exception) -> CallFailed:
    return CallFailed(f"{url!r} is no URL of a server: {error}.")


def _response(url: str, answer: httpx.Response) -> dict[str, Any]:
    try:
        response = answer.json()
    except ValueError:
        response = {"error": answer.text.strip()[:500]}
    if not answer.is_success:
        raise CallFailed(f"{answer.status_code}: {_error(response)}", answer.status_code)
    if not isinstance(response, dict):
        raise CallFailed(f"{url} answered with {type(response).__name__}, not an object.", answer.status_code)
    return response


def _gather(url: str, lines: Iterator[str], progress: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The response that a stream of lines amounts to."""
    images: dict[int, dict[str, Any]] = {}
    for line in lines:
        try:
            told = json.loads(line)
            event = told.pop("event")
            if event == "image":
                images[told.pop("index")] = told
            elif event == "error":
                raise CallFailed(f"{told['status']}: {_error(told)}", told["status"])
            elif event == "done":
                ordered = [images[index] for index in sorted(images)]
                return {**told, "images": ordered, "data": ordered[0]["data"]}
            progress({"event": event, **told})
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise CallFailed(f"{url} sent a line that is no news of a picture: {line[:200]!r}.") from error
    raise CallFailed(f"{url} ended its answer before the picture was finished; its log may say why.")


def save_images(response: dict[str, Any], out: Path) -> list[Path]:
    """Write the response's pictures as `out`, or as `out-1`, `out-2`, ... where there are several.

    A suffix that is not the picture's own is put right: out.png becomes out.jpg for a JPEG.
    """
    encoded = [image.get("data") for image in response.get("images") or []] or [response.get("data")]
    if not all(isinstance(data, str) for data in encoded):
        raise CallFailed(_error(response))
    try:
        pictures = [base64.b64decode(str(data), validate=True) for data in encoded]
    except binascii.Error as error:
        raise CallFailed(f"The response's picture is not base64: {error}.") from error
    stem = out.with_suffix("") if out.suffix.lower() in (".png", ".jpg", ".jpeg", ".webp") else out
    written = []
    for number, picture in enumerate(pictures, start=1):
        suffix = _suffix(picture)
        if suffix == ".jpg" and out.suffix.lower() == ".jpeg":
            suffix = out.suffix
        path = stem.with_name(stem.name + (f"-{number}" if len(pictures) > 1 else "") + suffix)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(picture)
        except OSError as error:
            raise CallFailed(f"{path} cannot be written ({error.strerror}): name another place with --out.") from error
        written.append(path)
    return written


def save_predicted(output: TextIO, out: Path) -> list[Path]:
    """Write the pictures found in what `truss predict` prints: a line for people, then the response as JSON.

    truss predict exits with 0 where the server refused, too; an error in place of a picture is raised here.
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


def _error(response: object) -> str:
    """The readable part of a response that holds no picture."""
    error = response.get("error") if isinstance(response, dict) else None
    if isinstance(error, dict):
        error = error.get("message") or error
    if error:
        return error if isinstance(error, str) else json.dumps(error)
    return f"The response holds no picture: {json.dumps(response)[:500]}"


def _suffix(picture: bytes) -> str:
    if picture.startswith(b"\x89PNG\r\n\x1a\n"):
        return ".png"
    if picture.startswith(b"\xff\xd8\xff"):
        return ".jpg"
    if picture[:4] == b"RIFF" and picture[8:12] == b"WEBP":
        return ".webp"
    raise CallFailed("The response's data is not a PNG, JPEG or WebP picture.")
