#!/usr/bin/env python3
"""Generate one image for each of several prompts, a limited number of them concurrently.

    python generate_async.py "a red circle" "a blue star" "two green squares" --out images --concurrency 2

Images are reported in the order of the prompts: images/1.png is the first prompt's. A prompt that fails does not stop
the others. Ctrl-C closes every connection, and the server then cancels those requests.

MODEL_URL or --url is the address of the model; the default is a local server. The key in BASETEN_API_KEY is sent only
over https.
"""

import argparse
import asyncio
import base64
import itertools
import json
import random
import sys
from pathlib import Path
from typing import Any

import httpx
from client import (  # type: ignore[import-not-found]  # of this folder
    ANSWER_SECONDS,
    Failed,
    connection,
    exit_status,
    failures_of,
    make_parser,
    positive,
    read_reason,
    wait_seconds,
    write_atomically,
)


async def send(client: httpx.AsyncClient, url: str, request: dict[str, Any]) -> bytes:
    """Return the image of one request. Raises Failed."""
    with failures_of(url):
        for attempt in itertools.count(1):
            answer = await client.post(url, content=json.dumps(request))
            if (seconds := wait_seconds(answer, attempt)) is None:
                break
            # The random part spreads the attempts of requests that are refused at the same moment.
            await asyncio.sleep(seconds + random.random())
    if not answer.is_success:
        raise Failed(f"{answer.status_code}: {read_reason(answer)}")
    try:
        return base64.b64decode(answer.json()["images"][0]["data"], validate=True)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise Failed("The answer holds no image. Check that MODEL_URL is a Preheat model.") from error


async def generate(
    client: httpx.AsyncClient, url: str, request: dict[str, Any], out: Path, slots: asyncio.Semaphore
) -> Path | Failed:
    """Return the path of the written file, or the error."""
    try:
        async with slots:
            image = await send(client, url, request)
        write_atomically(out, image)
    except OSError as error:
        return Failed(f"{out} cannot be written: {error.strerror}. Give another --out.")
    except Failed as error:
        return error
    return out


async def generate_all(requests: list[dict[str, Any]], folder: Path, url: str, concurrency: int, timeout: float) -> int:
    """Print each image's file in the order of `requests`. Return the number of requests that failed."""
    failed, slots = 0, asyncio.Semaphore(concurrency)
    client = httpx.AsyncClient(timeout=httpx.Timeout(timeout, connect=10), **connection(url))
    # Ctrl-C cancels this function. The group then cancels its tasks, and each closes its connection.
    async with client, asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(generate(client, url, request, folder / f"{number}.png", slots))
            for number, request in enumerate(requests, 1)
        ]
        for number, task in enumerate(tasks, 1):
            result = await task
            if isinstance(result, Failed):
                failed += 1
                print(f"error: prompt {number}: {result}", file=sys.stderr)
            else:
                print(result, flush=True)
    return failed


def count(text: str) -> int:
    """Parse --concurrency."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def main() -> int:
    parser = make_parser("Generate one image for each prompt.", "every request")
    parser.add_argument("prompts", nargs="+", metavar="prompt")
    parser.add_argument("--out", type=Path, default=Path("images"), help="the folder of the images")
    parser.add_argument("--concurrency", type=count, default=4, help="largest number of requests in flight")
    parser.add_argument("--timeout", type=positive, default=ANSWER_SECONDS, help="seconds to wait for one answer")
    options = parser.parse_args()
    one_png = {"num_images": 1, "output_format": "png"}
    requests = [options.fields | one_png | {"prompt": prompt} for prompt in options.prompts]
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Failed(f"{options.out} cannot be made: {error.strerror}. Give another --out.") from error
    failed = asyncio.run(generate_all(requests, options.out, options.url, options.concurrency, options.timeout))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(exit_status(main, "Interrupted. The requests in flight are cancelled."))
