#!/usr/bin/env python3
"""Generate images with a streamed request: show the progress, and write previews while the images are denoised.

    python stream.py "a red circle on a white background" --out circle.png

Writes circle-preview-5.jpg after step 5, and so on, then circle.png. --show also prints each preview in terminals
that support iTerm2's inline images. A read waits at most --timeout seconds; the server sends a line at least every
second.

MODEL_URL or --url is the address of the model; the default is a local server. The key in BASETEN_API_KEY is sent only
over https.
"""

import base64
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from client import (  # type: ignore[import-not-found]  # of this folder
    FORMATS,
    Failed,
    add_image_options,
    connection,
    exit_status,
    failures_of,
    make_parser,
    positive,
    read_reason,
    write_atomically,
)


def read_events(url: str, request: dict[str, Any], timeout: float) -> Iterator[dict[str, Any]]:
    """Yield each event of a streamed answer. Raises Failed."""
    try:
        with (
            failures_of(url, f"sent nothing for {timeout:g} s. Try again"),
            httpx.Client(timeout=timeout, **connection(url)) as client,
            client.stream("POST", url, content=json.dumps(request)) as answer,
        ):
            if not answer.is_success:
                answer.read()
                raise Failed(describe_refusal(answer))
            for line in answer.iter_lines():
                yield json.loads(line)
    except ValueError as error:
        raise Failed(f"{url} did not answer with lines of JSON. Check MODEL_URL.") from error


def describe_refusal(answer: httpx.Response) -> str:
    """Return the status, the server's message as a sentence, and the seconds to wait before another attempt."""
    seconds = answer.headers.get("Retry-After")
    return f"{answer.status_code}: {read_reason(answer).rstrip('.')}." + (
        f" Try again after {seconds} s." if seconds else ""
    )


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


def main() -> int:
    parser = make_parser("Generate images with a streamed request.")
    add_image_options(parser)
    parser.add_argument("--show", action="store_true", help="print previews in the terminal (iTerm2's inline images)")
    parser.add_argument("--timeout", type=positive, default=30.0, help="seconds to wait for the next line")
    options = parser.parse_args()
    format = FORMATS[options.out.suffix.lower()]
    request = options.fields | {"prompt": options.prompt, "output_format": format, "stream": True}
    for path in generate(request, options.out, options.url, options.timeout, options.show):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main, show=lambda text: report(text, last=True)))
