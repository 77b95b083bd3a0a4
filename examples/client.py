"""What the Python programs of this folder share: the connection, refusals, files, and options of the command line."""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

LOCAL_URL = "http://127.0.0.1:8080/v1/models/model:predict"
FORMATS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}
REPEATABLE = (429, 503)  # the queue is full; the replica is unavailable
MAX_ATTEMPTS = 5
MAX_WAIT_SECONDS = 60.0  # before one attempt; the longest Retry-After of a Preheat server
# Longer than a server's deadline (300 s by default), so that the server can report its deadline.
ANSWER_SECONDS = 330.0


class Failed(Exception):
    """A request returned no images, or they could not be saved."""


def connection(url: str) -> dict[str, Any]:
    """Return arguments of an httpx client for a model: the key is sent only over https."""
    secure = url.startswith("https://")
    headers = {"Content-Type": "application/json"}
    if secure and (key := os.environ.get("BASETEN_API_KEY", "").strip()):
        headers["Authorization"] = f"Api-Key {key}"
    # A proxy from the environment cannot reach a local server.
    return {"headers": headers, "trust_env": secure}


@contextmanager
def failures_of(url: str, late: str = "gave no answer in time. Request less") -> Iterator[None]:
    """Raise Failed for a failed connection. `late`: what is said of the URL after a timeout."""
    try:
        yield
    except httpx.TimeoutException as error:
        raise Failed(f"{url} {late}, or give a longer --timeout.") from error
    except (httpx.RequestError, httpx.InvalidURL, UnicodeError) as error:
        raise Failed(f"{url} cannot be reached: {error}. Check MODEL_URL, and that the server runs.") from error


def wait_seconds(answer: httpx.Response, attempt: int) -> float | None:
    """Return the seconds to wait before the next attempt: Retry-After, or 1, 2, 4, ... without one. None: the last."""
    retry_after = answer.headers.get("Retry-After", "")
    seconds = float(retry_after) if retry_after.isdecimal() else float(2 ** (attempt - 1))
    if answer.status_code not in REPEATABLE or attempt == MAX_ATTEMPTS or seconds > MAX_WAIT_SECONDS:
        return None
    return seconds


def read_reason(answer: httpx.Response) -> str:
    """Return the message of an answer without images."""
    try:
        return " ".join(str(answer.json()["error"]).split())
    except (ValueError, KeyError, TypeError):
        return answer.text.strip()[:300] or "no reason given"


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that other programs never see a part of it."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def image_path(text: str) -> Path:
    """Parse --out. Its suffix selects the format."""
    path = Path(text)
    if path.suffix.lower() not in FORMATS:
        raise argparse.ArgumentTypeError(f"{text!r} must end in {', '.join(FORMATS)}")
    return path


def json_object(text: str) -> dict[str, Any]:
    """Parse --fields."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def positive(text: str) -> float:
    """Parse --timeout."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def make_parser(description: str, requests: str = "the request") -> argparse.ArgumentParser:
    """Return a parser with the options of every program, except --timeout. `requests`: what --fields belong to."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--fields", type=json_object, default={}, help=f"other fields of {requests}, as JSON")
    parser.add_argument("--url", default=os.environ.get("MODEL_URL") or LOCAL_URL)
    return parser


def add_image_options(parser: argparse.ArgumentParser) -> None:
    """Add the prompt and --out of a program that sends one request."""
    parser.add_argument("prompt")
    parser.add_argument(
        "--out", type=image_path, default=Path("image.png"), help="the file; its suffix selects the format"
    )


def print_error(text: str) -> None:
    print(text, file=sys.stderr)


def exit_status(
    program: Callable[[], int],
    interrupted: str = "Interrupted.",
    show: Callable[[str], None] = print_error,
) -> int:
    """Run a program and return its exit status. A failure and Ctrl-C are one line on standard error."""
    try:
        return program()
    except Failed as error:
        show(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        show(interrupted)
        return 130
