"""Requests with prompts of other lengths and other conditioning share a batch over HTTP."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np

from tests.support.images import Pixels, file_of, largest_difference, pixels
from tests.support.predictions import SMALL, predict

TOLERANCE = 1  # of 255
REQUEST = SMALL | {"num_inference_steps": 12, "seed": 5, "guidance_scale": 15.0}
LONG = ("a large red circle, " * 20) + "(a green square:1.3)"


def photo() -> Pixels:
    return np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)


def mask() -> dict[str, Any]:
    levels = np.zeros((64, 64), np.uint8)
    levels[16:48, 16:48] = 255
    return {"image": file_of(levels), "prompt": LONG}


WEIGHTED = {"prompt_syntax": "weighted"}
REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weights": WEIGHTED | {"prompt": "a (large:1.3) [red] circle"},
    "two chunks": WEIGHTED | {"prompt": LONG},
    "four chunks": WEIGHTED | {"prompt": LONG + "red, " * 60, "negative_prompt": "[blue]"},
    "long negative prompt": WEIGHTED | {"negative_prompt": LONG},
    "image": WEIGHTED | {"prompt": LONG, "image": file_of(photo()), "strength": 0.8},
    "mask": WEIGHTED | {"image": file_of(photo()), "masks": [mask()]},
    "clip_skip": {"clip_skip": 1},
    "sizes": {"original_size": [32, 48], "crop": [8, 16], "target_size": [512, 256]},
    "guidance_rescale": {"guidance_rescale": 1.0},
    "timesteps": {"timesteps": [980, 700, 400, 100], "num_inference_steps": None},
    "sigmas": {"sigmas": [14.0, 5.0, 1.0, 0.2, 0.0], "num_inference_steps": None},
    "Heun": {"scheduler": "Heun"},
    "image with Heun": {"scheduler": "Heun", "image": file_of(photo()), "strength": 0.5},
    "refiner": WEIGHTED | {"prompt": LONG, "use_refiner": True},
}


def test_images_are_the_same_alone_and_together(client: httpx.Client) -> None:
    requests = [REQUEST | fields for fields in REQUESTS.values()]
    alone = [pixels(predict(client, **request)["data"]) for request in requests]
    with ThreadPoolExecutor(len(requests)) as pool:
        bodies = list(pool.map(lambda request: predict(client, **request), requests))
    for name, expected, body in zip(REQUESTS, alone, bodies, strict=True):
        assert not body.get("warnings"), name
        assert largest_difference(pixels(body["data"]), expected) <= TOLERANCE, name
    for name, image in zip(REQUESTS, alone, strict=True):
        assert name == "plain" or largest_difference(image, alone[0]) > TOLERANCE, name
