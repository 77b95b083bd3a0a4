"""From a request over HTTP to a picture, on the real Truss server of this repository's own image."""

import base64
import io
import json
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image
from safetensors.torch import load_file, save

from engine_builder.local_server.server import Layout, Server, ServerFailed
from engine_builder.stores.store import open_writable_store
from model.api.request import GenerationRequest, resolve
from model.loading.load import Loaded
from model.pipeline.text_to_image import generate
from model.store.manifest import Blob, Manifest
from model.store.store import Store
from tests.conftest import READY_SECONDS
from tests.support.image_process import run_in_image

PROMPT = "a large red circle on a blue background"
SMALL = {"prompt": PROMPT, "width": 64, "height": 64, "num_inference_steps": 2, "output_format": "png"}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, trust_env=False, timeout=READY_SECONDS) as client:
        yield client


def post(client: httpx.Client, **request: object) -> httpx.Response:
    return client.post("/v1/models/model:predict", json=request)


def predict(client: httpx.Client, **request: object) -> dict[str, Any]:
    answer = post(client, **request)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def opened(data: str) -> Image.Image:
    picture = Image.open(io.BytesIO(base64.b64decode(data, validate=True)))
    picture.load()
    return picture


def pixels(data: str) -> npt.NDArray[np.uint8]:
    return np.asarray(opened(data))


def drawn_here(loaded: Loaded, **request: object) -> list[npt.NDArray[np.uint8]]:
    """What the same request gives in this process."""
    return generate(loaded.model, [resolve(GenerationRequest.model_validate(request), loaded.served)])[0]


@pytest.mark.parametrize("output_format", ["png", "jpeg", "webp"])
def test_a_prompt_becomes_a_picture(output_format: str, client: httpx.Client, loaded: Loaded) -> None:
    asked = {
        "prompt": PROMPT, "negative_prompt": "a line", "width": 192, "height": 128, "seed": 5,
        "num_inference_steps": 6, "scheduler": "DPM++ 2M Karras", "use_refiner": True,
    }  # fmt: skip
    body = predict(client, **asked, output_format=output_format)
    assert body["status"] == "success"
    assert body["data"] == body["images"][0]["data"]
    assert body["warnings"] == []
    assert body["engine"] == {"release": loaded.release, "target": loaded.target, "runtime": "aot_inductor"}
    assert {"text", "denoise", "refine", "decode", "encode"} <= body["timings"].keys()
    assert sum(body["timings"].values()) / 1000 <= body["time"] + 0.001
    [image] = body["images"]
    assert {**image, "data": ""} == {"data": "", "seed": 5, "format": output_format, "width": 192, "height": 128}
    picture = opened(image["data"])
    assert (picture.format, picture.size, picture.mode) == (output_format.upper(), (192, 128), "RGB")
    [expected] = drawn_here(loaded, **asked)
    difference = np.abs(np.asarray(picture).astype(int) - expected.astype(int))
    if output_format == "png":
        assert difference.max() <= 1  # two processes may add in another order
    else:
        assert difference.mean() < 12  # lossy, and the picture may be noise


def test_all_that_is_left_out_has_a_default(client: httpx.Client, loaded: Loaded) -> None:
    body = predict(client, prompt=PROMPT)
    [image] = body["images"]
    assert (image["width"], image["height"], image["format"]) == (256, 256, "jpeg")
    assert opened(body["data"]).size == (256, 256)
    # Guidance is the model's own default (data/tiny-sdxl/defaults.json), the others are the request's.
    defaults = {"num_inference_steps": 30, "guidance_scale": 3.0, "scheduler": "Euler", "use_refiner": False}
    again = predict(client, prompt=PROMPT, seed=image["seed"], **defaults, output_format="jpeg", quality=95)
    assert again["data"] == body["data"]


def test_the_seed_that_is_returned_draws_the_same_again(client: httpx.Client) -> None:
    first, second = (predict(client, **SMALL) for _ in range(2))
    seeds = [body["images"][0]["seed"] for body in (first, second)]
    assert seeds[0] != seeds[1] and first["data"] != second["data"]
    assert all(type(seed) is int and 0 <= seed < 2**32 for seed in seeds)
    assert predict(client, **SMALL, seed=seeds[0])["data"] == first["data"]


def test_several_images_are_those_of_their_seeds(client: httpx.Client) -> None:
    body = predict(client, **SMALL, seed=2**32 - 2, num_images=4)
    assert [image["seed"] for image in body["images"]] == [2**32 - 2, 2**32 - 1, 0, 1]
    for image in body["images"]:
        alone = predict(client, **SMALL, seed=image["seed"])
        assert np.abs(pixels(image["data"]).astype(int) - pixels(alone["data"]).astype(int)).max() <= 1


def test_a_sampler_does_not_stick(client: httpx.Client) -> None:
    plain = predict(client, **SMALL, seed=1)["data"]
    other = predict(client, **SMALL, seed=1, scheduler="Euler a")["data"]
    assert other != plain
    assert predict(client, **SMALL, seed=1)["data"] == plain
    by_class = predict(client, **SMALL, seed=1, scheduler="EulerAncestralDiscreteScheduler")["data"]
    assert by_class == other


def test_what_was_not_done_to_the_letter_is_a_warning(client: httpx.Client) -> None:
    long = "a red circle and " * 40
    body = predict(client, **(SMALL | {"prompt": long}), use_refiner=True, denoising_frac=0.999)
    assert [warning.split(":")[0] for warning in body["warnings"]] == ["prompt", "denoising_frac"]


REFUSED: list[tuple[str, dict[str, object], str]] = [
    ("prompt", {"prompt": ""}, "1 to 4000 characters"),
    ("prompt", {"prompt": "   "}, "nothing but whitespace"),
    ("prompt", {"prompt": "x" * 100_000}, "1 to 4000 characters"),
    ("prompt", {"prompt": 7}, "a string"),
    ("prompt", {"prompt": None}, "a string"),
    ("prompt", {"prompt": ["a", "b"]}, "a string"),
    ("negative_prompt", {"negative_prompt": "x" * 4001}, "0 to 4000 characters"),
    ("width", {"width": 63}, "64 to 4096"),
    ("width", {"width": 100}, "a multiple of 32 from 64 to 1024"),
    ("width", {"width": 2048}, "a multiple of 32 from 64 to 1024"),
    ("width", {"width": "256"}, "an integer"),
    ("width", {"width": 256.5}, "an integer"),
    ("height", {"height": 4097}, "64 to 4096"),
    ("height", {"height": 72}, "a multiple of 32 from 64 to 1024"),
    ("num_inference_steps", {"num_inference_steps": 0}, "1 to 100"),
    ("num_inference_steps", {"num_inference_steps": 101}, "1 to 100"),
    ("num_inference_steps", {"num_inference_steps": 51, "scheduler": "LCM"}, "1 to 50"),
    ("num_inference_steps", {"num_inference_steps": True}, "an integer"),
    ("guidance_scale", {"guidance_scale": -0.1}, "0 to 30"),
    ("guidance_scale", {"guidance_scale": 30.5}, "0 to 30"),
    ("guidance_scale", {"guidance_scale": "7.5"}, "a number"),
    ("end_cfg_frac", {"end_cfg_frac": 1.1}, "0 to 1"),
    ("scheduler", {"scheduler": "Heun"}, "DPM++ 2M SDE Karras"),
    ("scheduler", {"scheduler": "euler"}, "Euler a"),
    ("scheduler", {"scheduler": ""}, "1 to 64 characters"),
    ("use_refiner", {"use_refiner": "yes"}, "true or false"),
    ("denoising_frac", {"denoising_frac": -1}, "0 to 1"),
    ("seed", {"seed": -1}, "0 to 4294967295"),
    ("seed", {"seed": 2**32}, "0 to 4294967295"),
    ("seed", {"seed": 1.5}, "an integer"),
    ("num_images", {"num_images": 0}, "1 to 8"),
    ("num_images", {"num_images": 9}, "1 to 8"),
    ("output_format", {"output_format": "gif"}, '"png", "jpeg", "webp"'),
    ("quality", {"quality": 0}, "1 to 100"),
    ("quality", {"quality": 101}, "1 to 100"),
    ("steps", {"steps": 30}, "num_inference_steps"),
]


@pytest.mark.parametrize(
    "field, wrong, accepted", REFUSED, ids=[f"{field}-{json.dumps(wrong)[:40]}" for field, wrong, _ in REFUSED]
)
def test_what_is_not_served_is_refused(
    field: str, wrong: dict[str, object], accepted: str, client: httpx.Client
) -> None:
    answer = post(client, **(SMALL | wrong))
    assert answer.status_code == 400, answer.text
    said = answer.json()["error"]
    assert field in said and accepted in said
    assert len(answer.text) < 2_000


def test_without_a_prompt_there_is_no_picture(client: httpx.Client) -> None:
    answer = client.post("/v1/models/model:predict", json={})
    assert answer.status_code == 400
    assert "prompt" in answer.json()["error"] and "is required" in answer.json()["error"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"a cat"', b'{"prompt": NaN}', b"\xff"])
def test_a_body_that_is_no_request_is_the_client_s_error(body: bytes, client: httpx.Client) -> None:
    answer = client.post("/v1/models/model:predict", content=body, headers={"Content-Type": "application/json"})
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.json()["error"]


def test_requests_at_once_each_get_their_own_picture(client: httpx.Client) -> None:
    requests = [
        SMALL | {"seed": seed, "scheduler": scheduler, "width": width, "num_inference_steps": 2 + seed % 3}
        for seed, (scheduler, width) in enumerate([("Euler", 64), ("Euler a", 96), ("LCM", 64), ("DDIM", 128)] * 4)
    ]
    alone = [predict(client, **request)["data"] for request in requests]
    assert len(set(alone)) == len(alone)
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda request: predict(client, **request), requests))
    for body, expected in zip(together, alone, strict=True):
        assert np.abs(pixels(body["data"]).astype(int) - pixels(expected).astype(int)).max() <= 1
    assert [body["images"][0]["seed"] for body in together] == [request["seed"] for request in requests]


@pytest.mark.parametrize("path", ["/", "/v1/models/model", "/v1/models/model/loaded"])
def test_a_loaded_server_is_healthy(path: str, client: httpx.Client) -> None:
    assert client.get(path).status_code == 200


def test_the_schema_is_published(client: httpx.Client) -> None:
    schema = json.dumps(client.get("/v1/models/model/schema").json())
    assert all(field in schema for field in GenerationRequest.model_fields)


def test_the_cold_start_is_measured(client: httpx.Client) -> None:
    predict(client, **SMALL)
    metrics = client.get("/metrics/").text
    found = dict(re.findall(r'^preheat_cold_start_seconds\{phase="(\w+)"\} (\S+)$', metrics, re.MULTILINE))
    seconds = {phase: float(value) for phase, value in found.items()}
    assert {"import", "resolve", "weights", "engines", "warm_up", "first_image"} <= seconds.keys()
    assert all(value > 0 for value in seconds.values())
    parts = sum(value for phase, value in seconds.items() if phase != "first_image")
    assert seconds["first_image"] > parts - 0.01


# -- what cannot be served --------------------------------------------------------------------------------------------


def copy_release(
    store: Store, release: str, folder: Path, change: Callable[[Manifest, Store], Manifest] = lambda m, _: m
) -> Store:
    """A store of its own with one release, and nothing in common with the other: its files may be spoilt."""
    manifest, root = store.read_release(release), Path(store.url.removeprefix("file://"))
    (folder / "blobs" / "sha256").mkdir(parents=True)
    for digest in manifest.blobs():
        shutil.copy(root / "blobs" / "sha256" / digest, folder / "blobs" / "sha256")
    copied = open_writable_store(folder)
    copied.write_release(change(manifest, copied))
    return copied


def fails_to_start(layout: Layout, store: Store, release: str) -> str:
    with Server(layout, environment={"PREHEAT_STORE": store.url, "PREHEAT_RELEASE": release}) as server:
        with pytest.raises(ServerFailed) as failure:
            server.wait_ready(READY_SECONDS)
    refused, reason = str(failure.value).split(". ", 1)
    assert refused == "The server refused to start"
    return reason


def test_a_release_that_is_not_there_is_said_by_the_server(layout: Layout, store: Store, release: str) -> None:
    said = fails_to_start(layout, store, "tiny-sdxl/never")
    assert said.startswith("Release tiny-sdxl/never was not found in file://")
    assert release in said.splitlines()[0]


@pytest.mark.parametrize("component", ["unet", "vae_decoder"])
def test_a_damaged_blob_is_said_by_the_server(
    component: str, layout: Layout, store: Store, release: str, tmp_path: Path
) -> None:
    """Weights and engine alike: what was changed is never used."""
    copied = copy_release(store, release, tmp_path / "store")
    manifest = copied.read_release(release)
    if component == "unet":
        [damaged] = [engine.blob for engine in manifest.engines if engine.component == component]
    else:
        [damaged] = [record.blobs[0] for record in manifest.weights if record.component == component]
    path = tmp_path / "store" / "blobs" / "sha256" / damaged.sha256
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    said = fails_to_start(layout, copied, release)
    assert said.startswith(f"Blob {damaged.sha256[:12]} in {copied.url} is damaged")


def test_no_release_configured_is_said_by_the_server(layout: Layout) -> None:
    with Server(layout, environment={"PREHEAT_STORE": "", "PREHEAT_RELEASE": ""}) as server:
        refusal = r"\AThe server refused to start\. No store is configured\. Set model_metadata\.preheat\.store"
        with pytest.raises(ServerFailed, match=refusal):
            server.wait_ready(READY_SECONDS)


@pytest.fixture(scope="module")
def broken_server(
    layout: Layout, store: Store, release: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Path]]:
    """Serves weights that give NaN for one prompt in two: the text encoder's embedding of one token holds one."""
    folder = tmp_path_factory.mktemp("broken")

    def spoil(manifest: Manifest, store: Store) -> Manifest:
        [record] = [record for record in manifest.weights if record.component == "text_encoder"]
        [blob] = record.blobs
        tensors = load_file(store.get(blob.sha256, blob.bytes))
        [embedding] = [name for name in tensors if name.endswith("token_embedding.weight")]
        tensors[embedding][token_of_circle(store, manifest)] = float("nan")
        data = save(tensors)
        spoilt = record.model_copy(update={"blobs": (Blob(sha256=store.put_bytes(data), bytes=len(data)),)})
        weights = tuple(spoilt if other == record else other for other in manifest.weights)
        return manifest.model_copy(update={"weights": weights})

    copied = copy_release(store, release, folder / "store", spoil)
    environment = {"PREHEAT_STORE": copied.url, "PREHEAT_RELEASE": release}
    with Server(layout, environment=environment, log=folder / "server.log") as server:
        server.wait_ready(READY_SECONDS)
        yield server, folder / "server.log"


def token_of_circle(store: Store, manifest: Manifest) -> list[int]:
    """The tokens that only a prompt with a circle in it has."""
    from model.pipeline.tokenizer import ClipTokenizer, TokenizerSettings

    record = manifest.tokenizers["tokenizer"]
    settings = TokenizerSettings(record.max_length, record.bos_token_id, record.eos_token_id, record.pad_token_id)
    tokenizer = ClipTokenizer(store.get(record.blob.sha256, record.blob.bytes).read_bytes(), settings)
    common = set(tokenizer.encode("warm up")[0]) | set(tokenizer.encode("line")[0])
    return sorted(set(tokenizer.encode("circle")[0]) - common)


def test_a_picture_that_is_not_numbers_is_an_error_with_its_seed(broken_server: tuple[Server, Path]) -> None:
    server, log = broken_server
    with httpx.Client(base_url=server.url, trust_env=False, timeout=READY_SECONDS) as client:
        answer = post(client, **(SMALL | {"prompt": "circle", "seed": 987654}))
        assert answer.status_code == 500
        assert "NaN or infinite" in answer.json()["error"] and "987654" in answer.json()["error"]
        assert "preheat build --vae-precision" in answer.json()["error"]
        assert "data" not in answer.json()
        said = log.read_text()
        assert "broken_image" in said and "987654" in said
        # The next one is served: what was broken was that request's.
        predict(client, **(SMALL | {"prompt": "line"}))


DRAWS_ONE = """
    import asyncio, json, sys

    from model.model import Model
    from model.api.request import GenerationRequest
    from starlette.requests import Request
    import yaml

    model = Model(config=yaml.safe_load(open("config.yaml")))
    model.load()
    model.load()  # Truss may call it again
    request = GenerationRequest(prompt="a circle", use_refiner=True, num_inference_steps=4)
    http = Request({"type": "http", "headers": []}, lambda: asyncio.Event().wait())
    body = json.loads(asyncio.run(model.predict(request, http)).body)
    print(json.dumps({"status": body["status"], "modules": sorted(sys.modules)}))
"""


def test_serving_imports_no_model_library(layout: Layout, store: Store, release: str) -> None:
    """What only the builder and the tests need costs seconds of every cold start."""
    ran = run_in_image(DRAWS_ONE, layout, store, release)
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout.splitlines()[-1])
    assert result["status"] == "success"
    modules = set(result["modules"])
    assert {"torch", "tokenizers", "model.pipeline.text_to_image"} <= modules
    # torch imports torch.export itself; what it must not come to is the compiler.
    unwanted = {
        "diffusers", "transformers", "accelerate", "huggingface_hub", "engine_builder", "boto3", "torch._inductor",
        "torch._dynamo", "triton", "scipy", "tests",
    }  # fmt: skip
    assert sorted(modules & unwanted) == []
