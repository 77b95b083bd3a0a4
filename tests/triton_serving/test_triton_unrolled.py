"""The unrolled pipeline on a real Triton server: its images, its batches, its versions, and broken models."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from engine_builder.commands.main import app
from engine_builder.local_server.client import CallFailed
from engine_builder.stores.store import WritableStore
from engine_builder.triton_repository.client import Protocol, generate_pixels
from engine_builder.triton_repository.export import RepositoryError, read_releases
from engine_builder.triton_repository.unrolled import unrolled_repository
from model.api.request import GenerationRequest
from model.api.resolve import resolve
from model.cold_start import ColdStart
from model.loading.load import Loaded, load_release
from model.loading.target import detect_targets
from model.pipeline.text_to_image import generate
from tests.support.triton_server import TritonServer, export, require_triton_client

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


def call(
    triton: TritonServer, values: dict[str, Any], protocol: Protocol = "http", model: str = PIPELINE, version: str = ""
) -> Pixels:
    address = getattr(triton, protocol)
    return generate_pixels(protocol, address, model, **values, timeout=60, version=version).astype(np.int16)


def expected(loaded: Loaded, values: dict[str, Any]) -> Pixels:
    params = resolve(GenerationRequest(**values, num_inference_steps=STEPS), loaded.served)
    [image], _, _ = generate(loaded.model, [params])
    return image.astype(np.int16)


def test_images_are_those_of_the_truss_server(triton: TritonServer, loaded: Loaded) -> None:
    for values in map(request, range(10)):
        assert np.abs(call(triton, values) - expected(loaded, values)).max() <= 1


def test_grpc_returns_the_same_image(triton: TritonServer) -> None:
    require_triton_client()
    assert (call(triton, request(1), "grpc") == call(triton, request(1))).all()


def test_merges_requests_into_batches(triton: TritonServer) -> None:
    requests = [request(0) | {"seed": seed, "guidance_scale": 2.0 + seed} for seed in range(8)]
    alone = [call(triton, values) for values in requests]
    names = ("nv_inference_count", "nv_inference_exec_count")
    before = [triton.metric(name, "denoiser") for name in names]
    with ThreadPoolExecutor(len(requests)) as pool:
        together = list(pool.map(lambda values: call(triton, values), requests))
    images, runs = (triton.metric(name, "denoiser") - count for name, count in zip(names, before, strict=True))
    assert images == 8 * STEPS and runs <= images / 2
    for one, merged in zip(alone, together, strict=True):
        assert np.abs(one - merged).max() <= 1


def test_sd_images_are_those_of_the_truss_server(installed: Path, sd_store: WritableStore, tmp_path: Path) -> None:
    """Each step of an ancestral sampler draws noise. Triton's stateless step draws it again from the seed."""
    manifest = sd_store.read_release("toy-sd/1")
    defaults = manifest.defaults | {"scheduler": "Euler a"}
    sd_store.write_release(manifest.model_copy(update={"version": "3", "defaults": defaults}))
    repository = export(sd_store.url, ["toy-sd/3"], tmp_path / "repository", f"--steps={STEPS}")
    loaded = load_release(sd_store, "toy-sd/3", detect_targets(), [], ColdStart())
    with TritonServer(installed, repository, tmp_path) as server:
        assert server.load(PIPELINE) == ""
        for values in map(request, range(10)):
            assert np.abs(call(server, values) - expected(loaded, values)).max() <= 1


def predict_noise(triton: TritonServer, version: int) -> list[float]:
    """Return the prediction of one version of the UNet for latents of 1."""
    config = httpx.get(f"http://{triton.http}/v2/models/denoiser/config", trust_env=False).json()
    inputs = []
    for entry in config["input"]:
        shape = [1, *map(int, entry["dims"])]
        data = [int(entry["name"] == "latents")] * int(np.prod(shape))
        datatype = entry["data_type"].removeprefix("TYPE_")
        inputs.append({"name": entry["name"], "shape": shape, "datatype": datatype, "data": data})
    url = f"http://{triton.http}/v2/models/denoiser/versions/{version}/infer"
    answer = httpx.post(url, json={"inputs": inputs}, timeout=60, trust_env=False).json()
    assert answer["model_version"] == str(version)
    data: list[float] = answer["outputs"][0]["data"]
    return data


def test_two_unets_are_served_side_by_side(both_versions: TritonServer) -> None:
    assert all(both_versions.ready("denoiser", version) for version in (1, 2))
    assert predict_noise(both_versions, 1) != predict_noise(both_versions, 2)
    for name, version in ((PIPELINE, 2), (f"{PIPELINE}_v1", 1)):
        config = (both_versions.repository / name / "config.pbtxt").read_text()
        assert set(re.findall(r"model_version: (\d+)", config)) == {str(version)}


def test_client_writes_an_image(triton: TritonServer, tmp_path: Path) -> None:
    out, values = tmp_path / "image.png", request(0)
    arguments = ["triton-client", values["prompt"], "--address", triton.http, "--model", PIPELINE, "--out", str(out)]
    ran = CliRunner().invoke(app, [*arguments, "--seed=0", "--guidance-scale=0.5"])
    assert ran.exit_code == 0, ran.output
    assert (np.asarray(Image.open(out), np.int16) == call(triton, values)).all()


def test_refuses_an_invalid_seed(triton: TritonServer) -> None:
    with pytest.raises(CallFailed, match="seed: got -1, expected an integer"):
        call(triton, request(0) | {"seed": -1})
    assert call(triton, request(0)).any()


def test_missing_blob_fails_with_its_reason(triton: TritonServer, repository: Path) -> None:
    blob = max((repository / "vae_decoder").glob("*/store/blobs/sha256/*"), key=lambda path: path.stat().st_size)
    before = call(triton, request(0))
    moved = blob.rename(repository.parent / blob.name)
    config = repository / "vae_decoder" / "config.pbtxt"
    config.write_text(config.read_text() + "\n")  # Triton loads a model again only if it has changed
    error = triton.load("vae_decoder")
    moved.rename(blob)
    assert "vae_decoder" in error and blob.name[:12] in error
    assert triton.ready("denoiser") and triton.load("vae_decoder") == ""
    assert (call(triton, request(0)) == before).all()


def test_edited_config_fails_with_its_reason(triton: TritonServer, repository: Path) -> None:
    config = repository / "scheduler_step" / "config.pbtxt"
    text = config.read_text()
    for old, new, reason in (
        ('{ name: "step" data_type: TYPE_INT32 dims: [1] },\n', '{ name: "step" data_type: TYPE_INT32 dims: [2] },\n',
         "input step as"),
        ('string_value: "4"', 'string_value: "four"', "no number in its parameter steps"),
    ):  # fmt: skip
        assert old in text
        config.write_text(text.replace(old, new))
        error = triton.load("scheduler_step")
        config.write_text(text)
        assert "scheduler_step" in error and reason in error
        assert triton.ready("denoiser")


@pytest.mark.parametrize("steps", [0, 1001])
def test_refuses_a_number_of_steps(steps: int, store: WritableStore, release: str) -> None:
    with pytest.raises(RepositoryError, match=f"{steps} steps are not possible"):
        unrolled_repository(read_releases(store, [release]), steps)


def test_every_model_links_only_its_own_weights(repository: Path, store: WritableStore, release: str) -> None:
    weights = {w.component: set(w.identity) for w in store.read_release(release).weights}
    for name in MODELS:
        linked = {path.name for path in (repository / name).glob("*/store/blobs/sha256/*")}
        assert (weights["unet"] <= linked) == (name == "denoiser")
        assert (weights["vae_decoder"] <= linked) == (name == "vae_decoder")
