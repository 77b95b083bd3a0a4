#!/usr/bin/env python3
"""Generate images with one request to a Preheat server, and write them to files.

    python generate.py "a red circle on a white background" --out circle.png --fields '{"seed": 2}'

MODEL_URL or --url is the address of the model; the default is a local server. The key in BASETEN_API_KEY is sent only
over https. The request is repeated, a limited number of times, if the queue is full (429) or the replica is unavailable
(503).
"""

import base64
import json
import random
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import httpx
from client import (  # type: ignore[import-not-found]  # of this folder
    ANSWER_SECONDS,
    FORMATS,
    Failed,
    add_image_options,
    connection,
    exit_status,
    failures_of,
    make_parser,
    positive,
    read_reason,
    wait_seconds,
    write_atomically,
)


def send(url: str, request: dict[str, Any], timeout: float) -> dict[str, Any]:
    """Return the response to `request`. Raises Failed. `timeout` in seconds is the longest wait for one answer."""
    timeouts = httpx.Timeout(timeout, connect=10)
    with failures_of(url, f"gave no answer within {timeout:g} s. Request less"):
        with httpx.Client(timeout=timeouts, **connection(url)) as client:
            for attempt in count(1):
                answer = client.post(url, content=json.dumps(request))
                if (seconds := wait_seconds(answer, attempt)) is None:
                    break
                print(f"{describe_refusal(answer)} Waiting {seconds:g} s.", file=sys.stderr)
                # The random part spreads the attempts of clients that are refused at the same moment.
                time.sleep(seconds + random.random())
    if not answer.is_success:
        raise Failed(describe_refusal(answer))
    try:
        response: dict[str, Any] = answer.json()
    except ValueError as error:
        raise Failed(f"{url} did not answer with JSON. Check MODEL_URL.") from error
    return response


def describe_refusal(answer: httpx.Response) -> str:
    """Return the status, the server's message as a sentence, and a remedy."""
    text = f"{answer.status_code}: {read_reason(answer).rstrip('.')}."
    if answer.status_code == 400:
        # The answer has the key `field` if the deployment refuses a value. Otherwise the message names the field.
        try:
            text += f" Change the field {answer.json()['field']}."
        except (ValueError, KeyError, TypeError):
            text += " Change the request."
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


def main() -> int:
    parser = make_parser("Generate images with one request.")
    add_image_options(parser)
    parser.add_argument("--timeout", type=positive, default=ANSWER_SECONDS, help="seconds to wait for one answer")
    options = parser.parse_args()
    for path in generate(options.prompt, options.out, options.fields, options.url, options.timeout):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
