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
import json
import math
import os
import random
import sys
from pathlib import Path
from typing import Any

import httpx

LOCAL_URL = "http://127.0.0.1:8080/v1/models/model:predict"
REPEATABLE = (429, 503)  # the queue is full; the replica is unavailable
MAX_ATTEMPTS = 5
MAX_WAIT_SECONDS = 60.0  # before one attempt; the longest Retry-After of a Preheat server


class Failed(Exception):
    """A request returned no image, or it could not be saved."""


async def send(client: httpx.AsyncClient, url: str, request: dict[str, Any]) -> bytes:
    """Return the image of one request. Raises Failed."""
    try:
        for attempt in range(1, MAX_ATTEMPTS + 1):
            answer = await client.post(url, content=json.dumps(request))
            retry_after = answer.headers.get("Retry-After", "")
            seconds = float(retry_after) if retry_after.isdecimal() else float(2 ** (attempt - 1))
            if answer.status_code not in REPEATABLE or attempt == MAX_ATTEMPTS or seconds > MAX_WAIT_SECONDS:
                break
            # The random part spreads the attempts of requests that are refused at the same moment.
            await asyncio.sleep(seconds + random.random())
    except httpx.TimeoutException as error:
        raise Failed(f"{url} gave no answer in time. Request less, or give a longer --timeout.") from error
    except (httpx.RequestError, httpx.InvalidURL, UnicodeError) as error:
        raise Failed(f"{url} cannot be reached: {error}. Check MODEL_URL, and that the server runs.") from error
    try:
        body = answer.json()
        if answer.is_success:
            return base64.b64decode(body["images"][0]["data"], validate=True)
        reason = " ".join(str(body["error"]).split())
    except (ValueError, KeyError, TypeError, IndexError) as error:
        if answer.is_success:
            raise Failed("The answer holds no image. Check that MODEL_URL is a Preheat model.") from error
        reason = answer.text.strip()[:300] or "no reason given"
    raise Failed(f"{answer.status_code}: {reason}")


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
    secure = url.startswith("https://")
    headers = {"Content-Type": "application/json"}
    if secure and (key := os.environ.get("BASETEN_API_KEY", "").strip()):
        headers["Authorization"] = f"Api-Key {key}"
    failed, slots = 0, asyncio.Semaphore(concurrency)
    # A proxy from the environment cannot reach a local server.
    client = httpx.AsyncClient(headers=headers, timeout=httpx.Timeout(timeout, connect=10), trust_env=secure)
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


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that other programs never see a part of it."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def json_object(text: str) -> dict[str, Any]:
    """Parse --fields."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def count(text: str) -> int:
    """Parse --concurrency."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


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
    parser = argparse.ArgumentParser(description="Generate one image for each prompt.")
    parser.add_argument("prompts", nargs="+", metavar="prompt")
    parser.add_argument("--out", type=Path, default=Path("images"), help="the folder of the images")
    parser.add_argument("--concurrency", type=count, default=4, help="largest number of requests in flight")
    parser.add_argument("--fields", type=json_object, default={}, help="other fields of every request, as JSON")
    parser.add_argument("--url", default=os.environ.get("MODEL_URL") or LOCAL_URL)
    # Longer than a server's deadline (300 s by default), so that the server can report its deadline.
    parser.add_argument("--timeout", type=positive, default=330.0, help="seconds to wait for one answer")
    options = parser.parse_args()
    one_png = {"num_images": 1, "output_format": "png"}
    requests = [options.fields | one_png | {"prompt": prompt} for prompt in options.prompts]
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        failed = asyncio.run(generate_all(requests, options.out, options.url, options.concurrency, options.timeout))
    except OSError as error:
        print(f"error: {options.out} cannot be made: {error.strerror}. Give another --out.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted. The requests in flight are cancelled.", file=sys.stderr)
        return 130
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
