#!/usr/bin/env python3
"""Generate images with one request to a Preheat server, and write them to files.

    python generate.py "a red circle on a white background" --out circle.png --fields '{"seed": 2}'

MODEL_URL or --url is the address of the model; the default is a local server. The key in BASETEN_API_KEY is sent only
over https. The request is repeated, a limited number of times, if the queue is full (429) or the replica is unavailable
(503).
"""

import argparse
import base64
import json
import math
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import httpx

LOCAL_URL = "http://127.0.0.1:8080/v1/models/model:predict"
FORMATS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}
REPEATABLE = (429, 503)
MAX_ATTEMPTS = 5
MAX_WAIT_SECONDS = 60.0  # before one attempt; the longest Retry-After of a Preheat server


class Failed(Exception):
    """The request returned no images, or they could not be saved."""


def send(url: str, request: dict[str, Any], timeout: float) -> dict[str, Any]:
    """Return the response to `request`. Raises Failed. `timeout` in seconds is the longest wait for one answer."""
    secure = url.startswith("https://")
    headers = {"Content-Type": "application/json"}
    if secure and (key := os.environ.get("BASETEN_API_KEY", "").strip()):
        headers["Authorization"] = f"Api-Key {key}"
    try:
        # A proxy from the environment cannot reach a local server.
        with httpx.Client(headers=headers, timeout=httpx.Timeout(timeout, connect=10), trust_env=secure) as client:
            for attempt in range(1, MAX_ATTEMPTS + 1):
                answer = client.post(url, content=json.dumps(request))
                if answer.status_code not in REPEATABLE or attempt == MAX_ATTEMPTS:
                    break
                seconds = wait_seconds(answer, attempt)
                if seconds > MAX_WAIT_SECONDS:
                    break
                print(f"{describe_refusal(answer)} Waiting {seconds:g} s.", file=sys.stderr)
                # The random part spreads the attempts of clients that are refused at the same moment.
                time.sleep(seconds + random.random())
    except httpx.TimeoutException as error:
        raise Failed(f"{url} gave no answer within {timeout:g} s. Request less, or give a longer --timeout.") from error
    except (httpx.RequestError, httpx.InvalidURL, UnicodeError) as error:
        raise Failed(f"{url} cannot be reached: {error}. Check MODEL_URL, and that the server runs.") from error
    if not answer.is_success:
        raise Failed(describe_refusal(answer))
    try:
        response: dict[str, Any] = answer.json()
    except ValueError as error:
        raise Failed(f"{url} did not answer with JSON. Check MODEL_URL.") from error
    return response


def wait_seconds(answer: httpx.Response, attempt: int) -> float:
    """Return the seconds to wait before the next attempt: Retry-After, or 1, 2, 4, ... without one."""
    retry_after = answer.headers.get("Retry-After", "")
    return float(retry_after) if retry_after.isdecimal() else float(2 ** (attempt - 1))


def describe_refusal(answer: httpx.Response) -> str:
    """Return the status, the server's message as a sentence, and a remedy."""
    try:
        body = answer.json()
        reason = " ".join(str(body["error"]).split())
    except (ValueError, KeyError, TypeError):
        body, reason = {}, answer.text.strip()[:300] or "no reason given"
    text = f"{answer.status_code}: {reason.rstrip('.')}."
    if answer.status_code == 400:
        # The answer has the key `field` if the deployment refuses a value. Otherwise the message names the field.
        text += f" Change the field {body['field']}." if "field" in body else " Change the request."
    elif answer.status_code in (401, 403):
        text += " Check BASETEN_API_KEY."
    elif answer.status_code == 404:
        text += " Check MODEL_URL."
    elif answer.status_code >= 500 and (request_id := answer.headers.get("X-Request-Id")):
        text += f" The request's id in the server's log is {request_id}."
    return text


def decode_images(response: dict[str, Any]) -> list[bytes]:
    """Return the bytes of each image's file, in the order of their seeds. Raises Failed."""
    try:
        images = [base64.b64decode(image["data"], validate=True) for image in response["images"]]
    except (KeyError, TypeError, ValueError):
        images = []
    if not images:
        raise Failed("The answer holds no images. Check that MODEL_URL is a Preheat model.")
    return images


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that other programs never see a part of it."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def generate(prompt: str, out: Path, fields: dict[str, Any], url: str, timeout: float) -> list[Path]:
    """Request images, and return the paths: `out`, or `out-1`, `out-2`, ... if several. Raises Failed."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)  # before the request, because its images would be lost
        request = fields | {"prompt": prompt, "output_format": FORMATS[out.suffix.lower()]}
        response = send(url, request, timeout)
        images = decode_images(response)
        paths = [out.with_stem(f"{out.stem}-{number}") for number in range(1, len(images) + 1)]
        paths = paths if len(images) > 1 else [out]
        for path, image in zip(paths, images, strict=True):
            write_atomically(path, image)
    except OSError as error:
        raise Failed(f"{out} cannot be written: {error.strerror}. Give another --out.") from error
    for warning in response.get("warnings", []):
        print(f"warning: {warning}", file=sys.stderr)
    return paths


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


def main() -> int:
    parser = argparse.ArgumentParser(description="Generate images with one request.")
    parser.add_argument("prompt")
    parser.add_argument(
        "--out", type=image_path, default=Path("image.png"), help="the file; its suffix selects the format"
    )
    parser.add_argument("--fields", type=json_object, default={}, help="other fields of the request, as JSON")
    parser.add_argument("--url", default=os.environ.get("MODEL_URL") or LOCAL_URL)
    # Longer than a server's deadline (300 s by default), so that the server can report its deadline.
    parser.add_argument("--timeout", type=positive, default=330.0, help="seconds to wait for one answer")
    options = parser.parse_args()
    try:
        for path in generate(options.prompt, options.out, options.fields, options.url, options.timeout):
            print(path)
    except Failed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
