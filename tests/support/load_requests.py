"""Requests of load tests that share batches in every combination, and the images of their answers."""

import json
from collections.abc import Sequence
from typing import Any

import httpx

from tests.support.images import Pixels, largest_difference, pixels

REQUESTS: list[dict[str, Any]] = [
    {
        "prompt": ["a red circle", "two green squares on white", "a blue line"][number % 3],
        "width": [64, 96, 128][number % 3], "height": [64, 96][number % 2],
        "scheduler": ["Euler", "Euler a", "DDIM", "DPM++ 2M", "DPM++ 2M SDE Karras"][number % 5],
        "num_inference_steps": 2 + number % 4, "guidance_scale": [7.5, 1.0][number % 2],
        "use_refiner": number % 4 == 0, "num_images": 1 + number % 2, "seed": number, "output_format": "png",
    }
    for number in range(24)
]  # fmt: skip
"""Prompts, sizes, samplers, steps and guidance."""


def decoded_images(answer: httpx.Response) -> list[Pixels]:
    """Return the images of a successful answer, with or without streaming, in the order of their seeds."""
    if answer.headers["Content-Type"] != "application/x-ndjson":
        return [pixels(image["data"]) for image in answer.json()["images"]]
    events = [json.loads(line) for line in answer.text.splitlines()]
    assert events[-1]["event"] == "done", events[-1]
    images = [event for event in events if event["event"] == "image"]
    return [pixels(image["data"]) for image in sorted(images, key=lambda image: image["index"])]


def problem_of(answer: httpx.Response, expected: Sequence[Pixels]) -> str:
    """Return what is wrong with an answer, or ""."""
    if answer.status_code != 200:
        return f"{answer.status_code} {answer.text[:200]}"
    images = decoded_images(answer)
    is_equal = len(images) == len(expected) and max(map(largest_difference, images, expected)) <= 1
    return "" if is_equal else f"another image: {str(answer.request.content)[:200]}"
