#!/usr/bin/env python3
"""Generate images with a streamed request: show the progress, and write previews while the images are denoised.

    python stream.py "a red circle on a white background" --out circle.png

Writes circle-preview-5.jpg after step 5, and so on, then circle.png. --show also prints each preview in terminals
that support iTerm2's inline images. A read waits at most --timeout seconds; the server sends a line at least every
second.

MODEL_URL or --url is the address of the model; the default is a local server. The key in BASETEN_API_KEY is sent only
over https.
"""

import argparse
import base64
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

LOCAL_URL = "http://127.0.0.1:8080/v1/models/model:predict"
FORMATS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}


class Failed(Exception):
    """The stream ended without all images, or a file could not be written."""


def read_events(url: str, request: dict[str, Any], timeout: float) -> Iterator[dict[str, Any]]:
    """Yield each event of a streamed answer. Raises Failed."""
    secure = url.startswith("https://")
    headers = {"Content-Type": "application/json"}
    if secure and (key := os.environ.get("BASETEN_API_KEY", "").strip()):
        headers["Authorization"] = f"Api-Key {key}"
    try:
        # A proxy from the environment cannot reach a local server.
        with (
            httpx.Client(headers=headers, timeout=timeout, trust_env=secure) as client,
            client.stream("POST", url, content=json.dumps(request)) as answer,
        ):
            if not answer.is_success:
                answer.read()
                raise Failed(describe_refusal(answer))
            for line in answer.iter_lines():
                yield json.loads(line)
    except httpx.TimeoutException as error:
        raise Failed(f"{url} sent nothing for {timeout:g} s. Try again, or give a longer --timeout.") from error
    except (httpx.RequestError, httpx.InvalidURL, UnicodeError) as error:
        raise Failed(f"{url} cannot be reached: {error}. Check MODEL_URL, and that the server runs.") from error
    except ValueError as error:
        raise Failed(f"{url} did not answer with lines of JSON. Check MODEL_URL.") from error


def describe_refusal(answer: httpx.Response) -> str:
    """Return the status, the server's message as a sentence, and the seconds to wait before another attempt."""
    try:
        reason = " ".join(str(answer.json()["error"]).split())
    except (ValueError, KeyError, TypeError):
        reason = answer.text.strip()[:300] or "no reason given"
    seconds = answer.headers.get("Retry-After")
    return f"{answer.status_code}: {reason.rstrip('.')}." + (f" Try again after {seconds} s." if seconds else "")


def generate(request: dict[str, Any], out: Path, url: str, timeout: float, show: bool) -> list[Path]:
    """Write previews and images as they arrive. Return the paths of the images. Raises Failed."""
    paths = []
    several = request.get("num_images", 1) != 1
    try:
        out.parent.mkdir(parents=True, exist_ok=True)  # before the request, because its images would be lost
        for event in read_events(url, request, timeout):
            match event["event"]:
                case "accepted":
                    report(f"accepted: {event['steps']} steps, {event['ahead']} images are ahead")
                case "heartbeat":
                    report(f"waiting: {event['ahead']} images are ahead")
                case "step":
                    report(f"step {event['step']} of {event['steps']}")
                    if "preview" in event:
                        preview = out.with_name(f"{out.stem}-preview-{event['step']}.jpg")
                        write_atomically(preview, base64.b64decode(event["preview"], validate=True))
                        if show:
                            print(f"\033]1337;File=inline=1:{event['preview']}\a")
                case "image":
                    path = out.with_stem(f"{out.stem}-{event['index'] + 1}") if several else out
                    write_atomically(path, base64.b64decode(event["data"], validate=True))
                    paths.append(path)
                case "error":
                    raise Failed(f"{event['status']}: {event['error']}")
                case "done":
                    report(f"done in {event['time']:.2f} s", last=True)
                    return sorted(paths)
    except OSError as error:
        raise Failed(f"{out} cannot be written: {error.strerror}. Give another --out.") from error
    except (KeyError, TypeError, ValueError) as error:
        raise Failed(f"{url} sent an invalid event. Check MODEL_URL.") from error
    raise Failed(f"{url} ended the stream before the images were finished. Try again.")


def report(text: str, last: bool = False) -> None:
    """Show the progress on one line of a terminal, or else as lines of a log."""
    start, end = ("\r\033[K", "\n" if last else "") if sys.stderr.isatty() else ("", "\n")
    print(f"{start}{text}", end=end, file=sys.stderr, flush=True)


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


def main() -> int:
    parser = argparse.ArgumentParser(description="Generate images with a streamed request.")
    parser.add_argument("prompt")
    parser.add_argument(
        "--out", type=image_path, default=Path("image.png"), help="the file; its suffix selects the format"
    )
    parser.add_argument("--fields", type=json_object, default={}, help="other fields of the request, as JSON")
    parser.add_argument("--show", action="store_true", help="print previews in the terminal (iTerm2's inline images)")
    parser.add_argument("--url", default=os.environ.get("MODEL_URL") or LOCAL_URL)
    parser.add_argument("--timeout", type=positive, default=30.0, help="seconds to wait for the next line")
    options = parser.parse_args()
    format = FORMATS[options.out.suffix.lower()]
    request = options.fields | {"prompt": options.prompt, "output_format": format, "stream": True}
    try:
        paths = generate(request, options.out, options.url, options.timeout, options.show)
    except Failed as error:
        report(f"error: {error}", last=True)
        return 1
    except KeyboardInterrupt:
        report("Interrupted.", last=True)
        return 130
    for path in paths:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
