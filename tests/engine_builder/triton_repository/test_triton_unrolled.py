"""The unrolled pipeline on a real Triton server: its images, its batches, its versions, and broken models."""

import base64
import io
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from typer.testing import CliRunner

from engine_builder.stores.store import WritableStore
from engine_builder.triton_repository.unrolled import shortest_decimal, unrolled_models, unrolled_repository
from engine_builder.triton_repository.write_repository import RepositoryError, read_releases
from model.api.images import resolve_with_images
from model.cold_start import ColdStart
from model.loading.load import Loaded
from model.loading.target import detect_targets
from model.pipeline.text_to_image import generate
from model.request_fields import GenerationRequest
from preheat.local_server.client import CallFailed
from preheat.local_server.triton_client import Protocol, generate_pixels
from preheat.main import app
from tests.support.deployments import deployed, load_release
from tests.support.triton_server import TritonServer, export

STEPS = 4
PIPELINE = f"generate_{STEPS}_pipeline"
MODELS = ("tokenizer", "text_encoders", "conditioner", "denoiser", "scheduler_step", "vae_decoder", "postprocessor")
PROMPTS = ("a large red circle on a blue background", "two green squares", "a small yellow triangle")
Pixels = np.ndarray[Any, np.dtype[np.int16]]


@pytest.fixture(scope="module")
def repository(store: WritableStore, release: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(store.url, [release], tmp_path_factory.mktemp("triton") / "repository", f"--steps={STEPS}")


@pytest.fixture(scope="module")
def triton(installed: Path, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    with TritonServer(installed, repository, tmp_path_factory.mktemp("server")) as server:
        assert server.load(PIPELINE) == ""  # with the models that it calls
        yield server


@pytest.fixture(scope="module")
def both_versions(
    installed: Path, sd_store: WritableStore, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """A server of the UNets of toy-sd/1 and toy-sd/2 side by side."""
    work = tmp_path_factory.mktemp("versions")
    repository = export(sd_store.url, ["toy-sd/1", "toy-sd/2"], work / "repository", f"--steps={STEPS}")
    with TritonServer(installed, repository, work) as server:
        assert server.load("denoiser") == ""
        yield server


def request(number: int) -> dict[str, Any]:
    """Return one of ten requests, which differ in prompt, seed, guidance and negative prompt."""
    values: dict[str, Any] = {"prompt": PROMPTS[number % 3], "seed": number, "guidance_scale": 0.5 + number}
    return values | ({"negative_prompt": ("blue", "")[number // 2 % 2]} if number % 2 else {})


def picture(number: int, height: int = 256, width: int = 256) -> NDArray[np.uint8]:
    """Return a picture with a gradient and a rectangle, which differ by number."""
    columns = np.linspace(0, 255, width, dtype=np.uint8)
    pixels = np.stack([np.tile(columns, (height, 1)), np.full((height, width), 40 * number, np.uint8)] * 2, axis=-1)
    pixels[height // 4 : height // 2, width // 4 : width // 2] = (200, 30, 10 * number, 0)
    return np.ascontiguousarray(pixels[..., :3])


def with_image(number: int, height: int = 256, width: int = 256) -> dict[str, Any]:
    """Return one of six requests with an image. The last three repaint a part of it."""
    values = request(number) | {"input_image": picture(number, height, width)}
    if strength := (None, 0.5, 0.8, None, 0.6, 1.0)[number]:
        values["strength"] = np.array([strength], np.float32)
    if number >= 3:
        values["mask"] = np.zeros((height, width), np.uint8)
        values["mask"][:, width // 2 :] = 255
    return values


def with_controls(number: int, side: int) -> dict[str, Any]:
    """Return one of three requests with ControlNets of control/1, one of them with an image, too."""
    names = (("edges",), ("small", "union"), ("edges", "depth"))[number]
    values = with_image(1, side, side) if number == 2 else request(number)
    for place, name in enumerate(names):
        values[f"control_image.{name}"] = picture(number + place, side, side)
        if number == 1:
            values[f"control_scale.{name}"] = np.array([0.25 + 0.5 * place], np.float32)
    return values | ({"control_mode.union": np.array([1], np.int32)} if number == 1 else {})


def is_input(name: str) -> bool:
    """True if a value of a request is one of the ensemble's optional tensors."""
    return name in ("input_image", "mask", "strength") or name.startswith("control_")


def call(
    triton: TritonServer, values: dict[str, Any], protocol: Protocol = "http", model: str = PIPELINE, version: str = ""
) -> Pixels:
    address, fields = getattr(triton, protocol), {name: value for name, value in values.items() if not is_input(name)}
    inputs = {name: content for name, content in values.items() if is_input(name)}
    pixels = generate_pixels(protocol, address, model, **fields, timeout=60, version=version, inputs=inputs)
    return pixels.astype(np.int16)


def expected(loaded: Loaded, values: dict[str, Any]) -> Pixels:
    fields = {name: value for name, value in values.items() if not is_input(name)}
    if "input_image" in values:
        fields["image"] = png(values["input_image"])
    if "mask" in values:
        fields["masks"] = [{"image": png(values["mask"])}]
    if "strength" in values:
        fields["strength"] = float(str(values["strength"][0]))  # as JSON has it
    controls: dict[str, dict[str, Any]] = {}
    for key, content in values.items():
        if key.startswith("control_"):
            field, _, name = key.removeprefix("control_").partition(".")
            value = png(content) if field == "image" else content[0].item()
            controls.setdefault(name, {"name": name})[field] = value
    if controls:
        fields["controls"] = list(controls.values())
    params = resolve_with_images(GenerationRequest(**fields, num_inference_steps=STEPS), loaded.served)
    [image], _, _ = generate(loaded.model, [params])
    return image.astype(np.int16)


def png(pixels: NDArray[np.uint8]) -> str:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return base64.b64encode(file.getvalue()).decode()


def test_images_are_those_of_the_truss_server(triton: TritonServer, loaded: Loaded) -> None:
    for values in map(request, range(10)):
        assert np.abs(call(triton, values) - expected(loaded, values)).max() <= 1


def compare_alone_and_merged(server: TritonServer, loaded: Loaded, requests: list[dict[str, Any]]) -> list[Pixels]:
    """Compare images of requests that Triton gets one after the other and at once. Returns those of the former."""
    alone = [call(server, values) for values in requests]
    names = ("nv_inference_count", "nv_inference_exec_count")
    before = [server.metric(name, "scheduler_step") for name in names]
    with ThreadPoolExecutor(len(requests)) as pool:
        together = list(pool.map(lambda values: call(server, values), requests))
    steps, runs = (server.metric(name, "scheduler_step") - count for name, count in zip(names, before, strict=True))
    assert steps == STEPS * len(requests) and runs < steps
    assert "requests merged" not in server.log.read_text()  # a merged batch failed, and its requests ran alone
    for values, one, merged in zip(requests, alone, together, strict=True):
        assert np.abs(one - expected(loaded, values)).max() <= 1
        assert np.abs(one - merged).max() <= 1
    return alone


@pytest.mark.full
def test_images_from_images_are_those_of_the_truss_server(triton: TritonServer, loaded: Loaded) -> None:
    """Alone, and merged with images of other strengths and of text only."""
    alone = compare_alone_and_merged(triton, loaded, [*map(with_image, range(6)), request(0)])
    assert np.abs(alone[0] - alone[-1]).max() > 50  # the image counts


@pytest.mark.full
def test_images_with_controls_are_those_of_the_truss_server(
    installed: Path, compiled_control_store: WritableStore, tmp_path: Path
) -> None:
    """Alone, and merged with images of other ControlNets and without one."""
    repository = export(compiled_control_store.url, ["control/1"], tmp_path / "repository", f"--steps={STEPS}")
    loaded = load_release(compiled_control_store, deployed("control/1"), detect_targets(), ColdStart())
    side = loaded.served.native_height
    requests = [*(with_controls(number, side) for number in range(3)), request(0)]
    with TritonServer(installed, repository, tmp_path) as server:
        assert server.load(PIPELINE) == ""
        alone = compare_alone_and_merged(server, loaded, requests)
        assert np.abs(alone[0] - alone[-1]).max() > 1  # the ControlNet counts
        for name, content, reason in (
            ("control_scale.edges", np.ones(1, np.float32), "control_image.edges: is missing"),
            ("control_image.union", picture(0, side, side), "control_mode.union: is missing"),
            ("control_image.edges", picture(0, 2 * side, side), "control_image.edges"),
        ):
            with pytest.raises(CallFailed, match=re.escape(reason)):
                call(server, request(0) | {name: content})


@pytest.mark.full
def test_refuses_what_an_image_lacks(triton: TritonServer) -> None:
    for fields, reason in (
        ({"strength": np.array([0.5], np.float32)}, "strength: needs input_image"),
        ({"mask": np.zeros((256, 256), np.uint8)}, "mask: needs input_image"),
        ({"input_image": picture(0), "strength": np.array([0.1], np.float32)}, "strength: 0.1"),
        ({"input_image": picture(0), "strength": np.array([2.0], np.float32)}, "strength: got 2"),
        ({"input_image": picture(0, 64, 64)}, "input_image"),
    ):
        with pytest.raises(CallFailed, match=re.escape(reason)):
            call(triton, request(0) | fields)


@pytest.mark.full
def test_merges_requests_into_batches(triton: TritonServer, loaded: Loaded) -> None:
    requests = [request(0) | {"seed": seed, "guidance_scale": 2.0 + seed} for seed in range(8)]
    before = triton.metric("nv_inference_exec_count", "denoiser")
    compare_alone_and_merged(triton, loaded, requests)
    runs = triton.metric("nv_inference_exec_count", "denoiser") - before
    assert runs <= len(requests) * STEPS * 1.5, "one run for each image alone, and at most half as many together"


@pytest.mark.full
def test_sd_images_are_those_of_the_truss_server(installed: Path, sd_store: WritableStore, tmp_path: Path) -> None:
    """Each step of an ancestral sampler draws noise. Triton's stateless step draws it again from the seed."""
    manifest = sd_store.read_release("toy-sd/1")
    defaults = manifest.defaults | {"scheduler": "Euler a"}
    sd_store.write_release(manifest.model_copy(update={"version": "3", "defaults": defaults}))
    repository = export(sd_store.url, ["toy-sd/3"], tmp_path / "repository", f"--steps={STEPS}")
    loaded = load_release(sd_store, deployed("toy-sd/3"), detect_targets(), ColdStart())
    with TritonServer(installed, repository, tmp_path) as server:
        assert server.load(PIPELINE) == ""
        size = loaded.served.native_height, loaded.served.native_width
        for values in [*map(request, range(10)), *(with_image(number, *size) for number in range(6))]:
            assert np.abs(call(server, values) - expected(loaded, values)).max() <= 1


def predict_noise(triton: TritonServer, version: int, **changed: int) -> httpx.Response:
    """Ask one version of the UNet, chosen by the URL, for the first step of latents of 1. `changed`: other inputs."""
    config = httpx.get(f"http://{triton.http}/v2/models/denoiser/config", trust_env=False).json()
    inputs = []
    for entry in config["input"]:
        name, shape = entry["name"], [1, *map(int, entry["dims"])]
        value = changed.get(name, int(name in ("latents", "coefficients", "end")))
        data = [value] * int(np.prod(shape))
        inputs.append(
            {"name": name, "shape": shape, "datatype": entry["data_type"].removeprefix("TYPE_"), "data": data}
        )
    url = f"http://{triton.http}/v2/models/denoiser/versions/{version}/infer"
    return httpx.post(url, json={"inputs": inputs}, timeout=60, trust_env=False)


def test_numbers_are_the_decimals_that_were_sent() -> None:
    """0.7 of 10 steps are 7, but the FP32 number is a little less than 0.7."""
    for number in (0.7, 0.02, 0.9999, 7.5, 1.0):
        assert shortest_decimal(float(np.float32(number))) == number


@pytest.mark.full
def test_two_unets_are_served_side_by_side(both_versions: TritonServer) -> None:
    answers = [predict_noise(both_versions, version).json() for version in (1, 2)]
    assert [answer["model_version"] for answer in answers] == ["1", "2"]
    assert answers[0]["outputs"][0]["data"] != answers[1]["outputs"][0]["data"]
    for name, version in ((PIPELINE, 2), (f"{PIPELINE}_v1", 1)):
        config = (both_versions.repository / name / "config.pbtxt").read_text()
        assert set(re.findall(r"model_version: (\d+)", config)) == {str(version)}
    for name, value in (("step", STEPS), ("step", -1), ("end", STEPS + 1)):
        answer = predict_noise(both_versions, 1, **{name: value})
        assert answer.status_code >= 400 and f"{name}: is not" in answer.json()["error"]


@pytest.mark.full
def test_client_repaints_an_image(triton: TritonServer, tmp_path: Path) -> None:
    out, image, mask, values = tmp_path / "out.png", tmp_path / "image.png", tmp_path / "mask.png", with_image(4)
    Image.fromarray(values["input_image"]).save(image)
    Image.fromarray(values["mask"]).save(mask)
    options = [f"--image={image}", f"--mask={mask}", "--strength=0.6", "--seed=4", "--guidance-scale=4.5"]
    arguments = [
        "triton-client",
        values["prompt"],
        "--address",
        triton.http,
        "--triton-model",
        PIPELINE,
        "--out",
        str(out),
    ]
    ran = CliRunner().invoke(app, [*arguments, *options])
    assert ran.exit_code == 0, ran.output
    assert (np.asarray(Image.open(out), np.int16) == call(triton, values)).all()


@pytest.mark.full
def test_refuses_to_load_with_a_safety_setting(
    installed: Path, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREHEAT_SAFETY", "flag")
    with TritonServer(installed, repository, tmp_path) as server:
        assert "PREHEAT_SAFETY is flag, and the unrolled pipeline has no safety checker" in server.load("vae_decoder")


def test_refuses_a_number_of_steps(store: WritableStore, release: str) -> None:
    for steps in (0, 1001):
        with pytest.raises(RepositoryError, match=f"{steps} steps are not possible"):
            unrolled_repository(read_releases(store, [release]), steps)


def test_refuses_a_release_that_forecasts_by_default(store: WritableStore, release: str) -> None:
    manifest = store.read_release(release)
    changed = manifest.model_copy(update={"defaults": {**manifest.defaults, "scheduler": "Euler", "forecast": "fast"}})
    with pytest.raises(RepositoryError, match="forecasts some of the steps by default"):
        unrolled_models(changed, 4)


def test_every_model_links_only_its_own_weights(repository: Path, store: WritableStore, release: str) -> None:
    weights = {w.component: set(w.identity) for w in store.read_release(release).weights}
    for name in MODELS:
        linked = {path.name for path in (repository / name).glob("*/store/blobs/sha256/*")}
        assert (weights["unet"] <= linked) == (name == "denoiser")
        assert (weights["vae_decoder"] <= linked) == (name == "vae_decoder")
