"""`generate_loop` on a real Triton server: its images are those of the Truss server's pipeline, and broken folders are
refused with their reason."""

import base64
import importlib
import io
import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from engine_builder.stores.store import WritableStore
from engine_builder.triton_repository.loop_model import GENERATE_LOOP, REQUEST, loop_model
from engine_builder.triton_repository.write_repository import RepositoryError, read_releases, write_repository
from model.api.body_limit import MAX_BODY_BYTES
from model.api.images import resolve_with_images
from model.api.resolve import resolve
from model.cold_start import ColdStart
from model.loading.load import Loaded
from model.loading.target import detect_targets
from model.pipeline.text_to_image import generate
from model.request_fields import GenerationRequest
from preheat.local_server import triton_client as client
from preheat.local_server.client import CallFailed
from preheat.local_server.triton_client import Protocol
from preheat.main import app
from tests.support.deployments import deployed, load_release
from tests.support.triton_server import TritonServer, export, require_triton_client

STEPS = 4
PROMPTS = ("a large red circle on a blue background", "two green squares", "a small yellow triangle")


@pytest.fixture(scope="module")
def repository(store: WritableStore, release: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of `preheat export-triton`."""
    return export(store.url, [release], tmp_path_factory.mktemp("triton") / "repository", "--loop")


@pytest.fixture(scope="module")
def triton(installed: Path, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server that ignores adapters of the environment: the model's store has none."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("PREHEAT_LORAS", "style")
        server = stack.enter_context(TritonServer(installed, repository, tmp_path_factory.mktemp("server")))
        assert server.load(GENERATE_LOOP) == ""
        patch.undo()
        yield server


def request(number: int) -> dict[str, Any]:
    """Return one of ten requests, which differ in prompt, seed, sampler and guidance."""
    sampler = ("Euler", "Euler a", "DDIM", "DPM++ 2M")[number % 4]
    values: dict[str, Any] = {"prompt": PROMPTS[number % 3], "seed": number, "scheduler": sampler}
    values |= {"num_inference_steps": STEPS, "guidance_scale": 1.0 + number, "output_format": "png"}
    return values | ({"negative_prompt": "blue", "width": 128} if number % 2 else {})


def pixels(file: bytes) -> np.ndarray[Any, np.dtype[np.int16]]:
    return np.asarray(Image.open(io.BytesIO(file)), np.int16)


def expected(loaded: Loaded, values: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.int16]]:
    [image], _, _ = generate(loaded.model, [resolve(GenerationRequest(**values), loaded.served)])
    return image.astype(np.int16)


def call(triton: TritonServer, values: dict[str, Any], protocol: Protocol = "http", **options: Any) -> Any:
    return client.generate(protocol, getattr(triton, protocol), values, 60, **options)


def compare_ten_images(triton: TritonServer, loaded: Loaded) -> None:
    requests = [request(number) for number in range(10)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda values: call(triton, values), requests))
    for values, [(event, file)] in zip(requests, answers, strict=True):
        assert event["seed"] == values["seed"] and event["release"] == loaded.release
        assert np.abs(pixels(file) - expected(loaded, values)).max() <= 1


def test_images_are_those_of_the_truss_server(triton: TritonServer, loaded: Loaded) -> None:
    compare_ten_images(triton, loaded)


@pytest.mark.full
def test_sd_images_are_those_of_the_truss_server(installed: Path, sd_store: WritableStore, tmp_path: Path) -> None:
    repository = export(sd_store.url, ["toy-sd/1"], tmp_path / "repository", "--loop")
    loaded = load_release(sd_store, deployed("toy-sd/1"), detect_targets(), ColdStart())
    with TritonServer(installed, repository, tmp_path) as server:
        assert server.load(GENERATE_LOOP) == ""
        compare_ten_images(server, loaded)


def test_streams_previews_and_every_image(triton: TritonServer) -> None:
    require_triton_client()
    previews: list[Any] = []
    values = request(0) | {"stream": True, "preview_every": 2, "num_images": 2}
    images = call(triton, values, "grpc", progress=lambda event, file: previews.append((event, pixels(file).shape)))
    assert [event["seed"] for event, _ in images] == [0, 1]
    assert previews and all(shape == (32, 32, 3) for _, shape in previews)
    [(_, alone)] = call(triton, request(0) | {"seed": 1})
    assert np.abs(pixels(images[1][1]) - pixels(alone)).max() <= 1


@pytest.mark.full
def test_previews_of_requests_at_once_arrive_whole(triton: TritonServer) -> None:
    """Several threads make the previews of one request. Responses sent at once would lose their outputs."""
    require_triton_client()

    def count_previews(seed: int) -> int:
        seen: list[Any] = []
        values = {"prompt": PROMPTS[0], "seed": seed, "num_inference_steps": STEPS, "num_images": 2}
        values |= {"stream": True, "preview_every": 1}
        assert len(call(triton, values, "grpc", progress=lambda event, file: seen.append(pixels(file)))) == 2
        return len(seen)

    with ThreadPoolExecutor(3) as pool:
        assert set(pool.map(count_previews, range(60))) == {2 * (STEPS - 1)}


def test_request_of_a_client_that_left_is_cancelled(triton: TritonServer) -> None:
    require_triton_client()
    grpc = importlib.import_module("tritonclient.grpc")
    body = np.frombuffer(json.dumps({"prompt": PROMPTS[0], "num_inference_steps": 100}).encode(), np.uint8)

    def accepted() -> float:
        return triton.metric("nv_inference_exec_count", GENERATE_LOOP)

    before = accepted()
    with grpc.InferenceServerClient(triton.grpc) as caller:
        caller.start_stream(lambda result, error: None)
        tensor = grpc.InferInput(REQUEST, [len(body)], "UINT8")
        tensor.set_data_from_numpy(body)
        caller.async_stream_infer(GENERATE_LOOP, [tensor])
        end = time.monotonic() + 30
        while accepted() == before:
            assert time.monotonic() < end, "Triton did not pass the request on."
        caller.stop_stream(cancel_requests=True)
    while f"{GENERATE_LOOP}: The client left." not in triton.log.read_text():
        assert time.monotonic() < end, "The request was not cancelled."
        time.sleep(0.1)


def test_refuses_fields_versions_and_large_bodies(triton: TritonServer, release: str) -> None:
    """The version in the URL chooses the release."""
    version = release.partition("/")[2]
    [(event, _)] = call(triton, request(0), version=version)
    assert event["release"] == release
    with pytest.raises(CallFailed, match="version"):
        call(triton, request(0), version=str(int(version) + 1))
    with pytest.raises(CallFailed, match="seed: got -2, expected"):
        call(triton, {"prompt": "a", "seed": -2})
    with pytest.raises(CallFailed, match="height: 72 is not served"):
        call(triton, {"prompt": "a", "height": 72})
    require_triton_client()
    with pytest.raises(CallFailed, match="The request has more than 64 MiB"):
        call(triton, {"prompt": "a" * (MAX_BODY_BYTES + 1)}, "grpc")


def test_client_sends_an_image_and_a_mask(triton: TritonServer, loaded: Loaded, tmp_path: Path) -> None:
    image, mask, out = tmp_path / "image.png", tmp_path / "mask.png", tmp_path / "out.png"
    Image.new("RGB", (256, 256), "orange").save(image)
    Image.linear_gradient("L").save(mask)
    options = [f"--image={image}", f"--mask={mask}", "--strength=0.5", "--steps=4", "--seed=3", f"--out={out}"]
    ran = CliRunner().invoke(app, ["triton-client", PROMPTS[0], "--address", triton.http, *options])
    assert ran.exit_code == 0, ran.output
    files = [base64.b64encode(path.read_bytes()).decode() for path in (image, mask)]
    values = {"prompt": PROMPTS[0], "image": files[0], "masks": [{"image": files[1]}], "strength": 0.5, "seed": 3}
    params = resolve_with_images(GenerationRequest(**values, num_inference_steps=4), loaded.served)
    [wanted], _, _ = generate(loaded.model, [params])
    assert np.abs(pixels(out.read_bytes()) - wanted).max() <= 1


def break_bytes(folder: Path) -> None:
    blob = max(folder.glob("*/store/blobs/sha256/*"), key=lambda path: path.stat().st_size)
    content = bytearray(blob.read_bytes())
    content[len(content) // 2] ^= 1
    blob.unlink()
    blob.write_bytes(content)


def break_config(folder: Path) -> None:
    config = folder / "config.pbtxt"
    config.write_text(config.read_text().replace("TYPE_UINT8 dims: [-1] }\n]", "TYPE_UINT8 dims: [7] }\n]", 1))


@pytest.mark.parametrize(
    "damage, reason",
    [(break_bytes, "its bytes have changed"), (break_config, "input request as")],
)
def test_broken_model_names_its_reason(triton: TritonServer, damage: Any, reason: str, repository: Path) -> None:
    name = damage.__name__
    shutil.copytree(repository / GENERATE_LOOP, repository / name)
    config = repository / name / "config.pbtxt"
    config.write_text(config.read_text().replace(f'name: "{GENERATE_LOOP}"', f'name: "{name}"'))
    damage(repository / name)
    error = triton.load(name)
    assert name in error and reason in error + str(triton.index())
    assert not triton.ready(name) and triton.ready(GENERATE_LOOP)
    assert call(triton, request(1))


def test_blobs_are_linked(repository: Path, store: WritableStore, release: str) -> None:
    links = list((repository / GENERATE_LOOP).glob("*/store/blobs/sha256/*"))
    assert {link.name for link in links} == set(store.read_release(release).blobs())
    for link in links:
        assert link.samefile(store.get(link.name, link.stat().st_size))


def test_refuses_an_existing_folder(repository: Path, store: WritableStore, release: str) -> None:
    releases = read_releases(store, [release])
    with pytest.raises(RepositoryError, match="exists already"):
        write_repository(store, releases, [{1: (loop_model(), [])}], repository)
