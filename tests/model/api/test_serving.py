"""From a request over HTTP to an image, on the real Truss server of this repository's own image."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from model.api.resolve import resolve
from model.errors import ConfigError, PreheatError, ReleaseNotFound
from model.loading.load import Loaded
from model.model import Model
from model.pipeline.text_to_image import generate
from model.request_fields import GenerationRequest
from model.store.store import Store
from tests.support.images import Pixels, largest_difference, open_image, pixels
from tests.support.predictions import PREDICT_PATH, PROMPT, SMALL, post, predict

REFINED = {
    "prompt": PROMPT, "negative_prompt": "a line", "width": 192, "height": 128, "seed": 5, "num_inference_steps": 6,
    "scheduler": "DPM++ 2M Karras", "use_refiner": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def refined_image(loaded: Loaded) -> Pixels:
    """The image of REFINED, generated in this process."""
    [image] = generate(loaded.model, [resolve(GenerationRequest.model_validate(REFINED), loaded.served)])[0]
    return image


@pytest.mark.parametrize("output_format", ["png", "jpeg", "webp"])
def test_returns_the_image_of_generate(
    output_format: str, client: httpx.Client, loaded: Loaded, refined_image: Pixels
) -> None:
    body = predict(client, **REFINED, output_format=output_format)
    assert body["status"] == "success"
    assert body["data"] == body["images"][0]["data"]
    assert body["warnings"] == []
    assert body["engine"] == {"release": loaded.release, "target": loaded.target, "runtime": "aot_inductor"}
    assert {"text", "denoise", "refine", "decode", "encode"} <= body["timings"].keys()
    assert sum(body["timings"].values()) / 1000 <= body["time"] + 0.001
    [entry] = body["images"]
    assert {**entry, "data": ""} == {"data": "", "seed": 5, "format": output_format, "width": 192, "height": 128}
    image = open_image(entry["data"])
    assert (image.format, image.size, image.mode) == (output_format.upper(), (192, 128), "RGB")
    if output_format == "png":
        assert largest_difference(np.asarray(image), refined_image) <= 1  # two processes may add in another order
    else:
        assert np.abs(np.asarray(image).astype(int) - refined_image.astype(int)).mean() < 12  # lossy


def test_empty_fields_have_defaults(client: httpx.Client) -> None:
    body = predict(client, prompt=PROMPT)
    [image] = body["images"]
    assert (image["width"], image["height"], image["format"]) == (256, 256, "jpeg")
    assert open_image(body["data"]).size == (256, 256)
    # Guidance is the model's own default (data/tiny-sdxl/defaults.json), the others are the request's.
    defaults = {"num_inference_steps": 30, "guidance_scale": 3.0, "scheduler": "Euler", "use_refiner": False}
    explicit = predict(client, prompt=PROMPT, seed=image["seed"], **defaults, output_format="jpeg", quality=95)
    assert explicit["data"] == body["data"]


def test_answers_a_request_of_the_truss_example(client: httpx.Client) -> None:
    """All fields that the example reads, and the three keys of its answer."""
    fields = {"prompt": PROMPT, "negative_prompt": None, "use_refiner": True, "num_inference_steps": 4, "seed": 3}
    fields |= {"denoising_frac": 0.8, "end_cfg_frac": 0.4, "guidance_scale": 7.5, "scheduler": "DPM++ 2M Karras"}
    body = predict(client, **fields)
    assert body["status"] == "success" and isinstance(body["time"], float)
    assert open_image(body["data"]).format == "JPEG"
    without_guidance = predict(client, **fields | {"end_cfg_frac": 0.0})
    assert body["data"] != without_guidance["data"]


def test_returned_seed_gives_the_same_image(client: httpx.Client) -> None:
    first, second = (predict(client, **SMALL) for _ in range(2))
    seeds = [body["images"][0]["seed"] for body in (first, second)]
    assert seeds[0] != seeds[1] and first["data"] != second["data"]
    assert all(type(seed) is int and 0 <= seed < 2**32 for seed in seeds)
    assert predict(client, **SMALL, seed=seeds[0])["data"] == first["data"]


def test_images_of_a_request_have_successive_seeds(client: httpx.Client) -> None:
    body = predict(client, **SMALL, seed=2**32 - 2, num_images=4)
    assert [image["seed"] for image in body["images"]] == [2**32 - 2, 2**32 - 1, 0, 1]
    for image in body["images"]:
        alone = predict(client, **SMALL, seed=image["seed"])
        assert largest_difference(pixels(image["data"]), pixels(alone["data"])) <= 1


def test_warns_of_a_truncated_prompt_and_an_unused_refiner(client: httpx.Client) -> None:
    long = "a red circle and " * 40
    body = predict(client, **(SMALL | {"prompt": long}), use_refiner=True, denoising_frac=0.999)
    assert [warning.split(":")[0] for warning in body["warnings"]] == ["prompt", "denoising_frac"]


def test_refuses_what_is_not_served(client: httpx.Client) -> None:
    """tests/model/api/test_request.py has all fields and their limits."""
    for field, wrong, accepted in (
        ("prompt", {"prompt": None}, "1 to 4000 characters"),
        ("prompt", {"prompt": "x" * 100_000}, "1 to 4000 characters"),
        ("width", {"width": 63}, "64 to 4096"),
        ("width", {"width": 2048}, "a multiple of 32 from 64 to 1024"),
        ("num_inference_steps", {"num_inference_steps": 51, "scheduler": "LCM"}, "1 to 50"),
        ("scheduler", {"scheduler": "UniPC"}, "DPM++ 2M SDE Karras"),
        ("steps", {"steps": 30}, "num_inference_steps"),
    ):
        response = post(client, **(SMALL | wrong))
        assert response.status_code == 400, response.text
        assert field in response.json()["error"] and accepted in response.json()["error"]
        assert len(response.text) < 2_000
    for body in (b"", b"{", b"[]", b"{}", b'"a cat"', b'{"prompt": NaN}', b"\xff"):
        response = client.post(PREDICT_PATH, content=body, headers={"Content-Type": "application/json"})
        assert 400 <= response.status_code < 500 and response.json()["error"], body


def test_concurrent_requests_get_their_own_images(client: httpx.Client) -> None:
    requests = [
        SMALL | {"seed": seed, "scheduler": scheduler, "width": width, "num_inference_steps": 2 + seed % 3}
        for seed, (scheduler, width) in enumerate([("Euler", 64), ("Euler a", 96), ("LCM", 64), ("DDIM", 128)] * 4)
    ]
    alone = [predict(client, **request)["data"] for request in requests]
    assert len(set(alone)) == len(alone)
    with ThreadPoolExecutor(8) as threads:
        concurrent = list(threads.map(lambda request: predict(client, **request), requests))
    for body, expected in zip(concurrent, alone, strict=True):
        assert largest_difference(pixels(body["data"]), pixels(expected)) <= 1
    assert [body["images"][0]["seed"] for body in concurrent] == [request["seed"] for request in requests]


def test_loaded_server_is_healthy_and_publishes_its_schema(client: httpx.Client) -> None:
    for path in ("/", "/v1/models/model", "/v1/models/model/loaded"):
        assert client.get(path).status_code == 200
    schema = json.dumps(client.get("/v1/models/model/schema").json())
    assert all(field in schema for field in GenerationRequest.model_fields)


def test_measures_the_cold_start(client: httpx.Client) -> None:
    predict(client, **SMALL)
    metrics = client.get("/metrics/").text
    assert re.search(r"^preheat_host_memory_bytes \d\.\d+e\+08$", metrics, re.MULTILINE), "hundreds of MB"
    samples = re.findall(r'^preheat_cold_start_seconds\{phase="(\w+)"\} (\S+)$', metrics, re.MULTILINE)
    seconds = {phase: float(value) for phase, value in samples}
    in_turns = {"import", "resolve", "weights", "engines", "warm_up"}  # "stream" and parts of the warm-up overlap them
    assert in_turns | {"first_image"} <= seconds.keys()
    assert all(value > 0 for value in seconds.values())
    assert seconds["first_image"] > sum(seconds[phase] for phase in in_turns) - 0.01


# -- what cannot be served --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missing", "error", "message"),
    [
        ("store", ConfigError, r"\ANo store is configured\. Set model_metadata\.preheat\.store"),
        ("release", ConfigError, r"\ANo release is configured\. Set model_metadata\.preheat\.release"),
        (None, ReleaseNotFound, r"\ARelease tiny-sdxl/never was not found in file://.*tiny-sdxl/"),
    ],
    ids=["no store", "no release", "unknown release"],
)
def test_load_reports_a_release_that_is_missing(
    missing: str | None, error: type[PreheatError], message: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PREHEAT_STORE", raising=False)
    monkeypatch.delenv("PREHEAT_RELEASE", raising=False)
    settings = {"store": store.url, "release": "tiny-sdxl/never"}
    settings.pop(missing or "", None)
    with pytest.raises(error, match=message):
        Model(config={"model_metadata": {"preheat": settings}}).load()
