"""`preheat compare`: the report of the toy next to diffusers and next to a server, and refusals."""

import base64
import io
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from PIL import Image
from typer.testing import CliRunner

from benchmarks.compare import compare_weights
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.files import NotWritable
from engine_builder.quantization.validation.contact_sheet import SIDE
from engine_builder.stores.store import WritableStore, open_writable_store
from model.errors import PreheatError, ReleaseNotFound, RequestRefused
from model.images.encode import encode_base64
from preheat.commands.compare import PROMPTS, find_newest
from preheat.local_server.client import CallFailed
from preheat.main import app
from preheat.request_list import BadRequestFile
from tests.support.http_server import HttpServer, QuietHandler

VARIANTS = ["diffusers eager", "release", "release, forecast fast", "release, fewer steps"]


def run(folder: Path, store: WritableStore, out: Path, *options: str) -> Result:
    arguments = ["compare", str(folder), "--store", store.url, "--out", str(out), "--steps", "8", "--runs", "1"]
    return CliRunner().invoke(app, [*arguments, *options])


def write_requests(folder: Path, content: Any) -> str:
    path = folder / "requests.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return f"--requests={path}"


# -- the report ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared(toy_store: WritableStore, toy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder that the command wrote, and its output. One request has a negative prompt, one another sampler."""
    folder = tmp_path_factory.mktemp("compared")
    out = folder / "report"
    entries = [{"prompt": prompt} for prompt in PROMPTS]
    entries[1]["negative_prompt"] = "a red square, noise, a photograph"
    entries[2]["scheduler"] = "DPM++ 2M Karras"
    result = run(toy_folder, toy_store, out, "--per-hour", "7.2", write_requests(folder, entries))
    assert result.exit_code == 0, result.output
    return out, result.output


@pytest.fixture(scope="module")
def report(compared: tuple[Path, str]) -> dict[str, Any]:
    return dict(json.loads((compared[0] / "report.json").read_text()))


def test_pictures_of_the_release_are_those_of_diffusers(report: dict[str, Any]) -> None:
    """Within 2 of 255 levels, as the build requires: at least 42 dB. Fewer steps give another picture."""
    assert [variant["name"] for variant in report["variants"]] == VARIANTS
    worst = [float(variant["psnr_decibels"]["worst"]) for variant in report["variants"]]
    assert worst[0] == float("inf") and worst[1] > 42 and worst[1] > worst[2] and worst[1] > worst[3]
    distances = [variant["perceptual_distance"]["worst"] for variant in report["variants"]]
    assert distances[0] == 0 and distances[1] < 1e-3 < distances[3]
    for variant in report["variants"][1:]:
        each = [float(picture["psnr_decibels"]) for picture in variant["pictures"]]
        assert len(each) == len(PROMPTS) and float(variant["psnr_decibels"]["worst"]) == min(each)


def test_forecasts_and_fewer_steps_evaluate_equally_often(compared: tuple[Path, str], report: dict[str, Any]) -> None:
    assert [variant["row"]["steps"] for variant in report["variants"]] == [8, 8, 8, 7]
    assert "7 of 8" in compared[1]


def test_states_time_memory_and_cost_of_each_load(compared: tuple[Path, str], report: dict[str, Any]) -> None:
    assert report["per_hour"] == 7.2
    printed = compared[1]
    loading = printed.index("Loading the release in FP8, if it has these engines")
    assert printed.index("release: picture 2") < loading, "for its own peak"
    for variant in report["variants"]:
        assert variant["images_per_second"] == pytest.approx(1 / variant["seconds"])
        assert variant["cost_of_1000"] == pytest.approx(variant["seconds"] * 2)  # 7.2 / 3600 * 1000
        has_load = variant["name"] in VARIANTS[:2]
        loads = [variant[name] for name in ("load_seconds", "first_image_seconds", "memory_bytes")]
        assert [value is not None for value in loads] == [has_load] * 3, variant["name"]


def test_lists_variants_that_cannot_run_with_the_reason(compared: tuple[Path, str], report: dict[str, Any]) -> None:
    assert report["unavailable"].keys() == {"release in FP8", "diffusers compiled"}
    assert "has no unet engine in fp8" in report["unavailable"]["release in FP8"]
    assert "has no unet engine in fp8" in (compared[0] / "report.html").read_text()
    assert "Not measured: diffusers compiled. Compilation takes minutes." in compared[1]


def test_page_holds_all_pictures_and_loads_nothing(compared: tuple[Path, str]) -> None:
    page = (compared[0] / "report.html").read_text()
    sources = re.findall(r'src="([^"]*)"', page)
    assert len(sources) == len(PROMPTS) * (len(VARIANTS) + len(VARIANTS) - 1)
    for source in sources:
        kind, data = re.fullmatch(r"data:image/(jpeg|png);base64,(.+)", source).groups()  # type: ignore[union-attr]
        with Image.open(io.BytesIO(base64.b64decode(data, validate=True))) as image:
            assert image.format == kind.upper() and image.size == ((64, 64) if kind == "jpeg" else (SIDE, SIDE))
    assert "http" not in page and all(prompt in page for prompt in PROMPTS)
    with Image.open(compared[0] / "pictures.png") as sheet:
        assert sheet.width > len(VARIANTS) * SIDE and sheet.height > 2 * len(PROMPTS) * SIDE


def test_states_whether_the_weights_are_those_of_the_release(
    compared: tuple[Path, str], toy_store: WritableStore, toy_folder: Path, tmp_path: Path
) -> None:
    assert "toy-sdxl/1 was built from these weights." in compared[1]
    manifest, changed = toy_store.read_release("toy-sdxl/1"), Path(shutil.copytree(toy_folder, tmp_path / "changed"))
    assert compare_weights(manifest, Checkpoint(changed), None) is None
    with (changed / "unet" / "diffusion_pytorch_model.safetensors").open("r+b") as file:
        file.seek(-1, io.SEEK_END)
        file.write(b"\x01")
    assert "was not built from the files" in str(compare_weights(manifest, Checkpoint(changed), None))
    merged = manifest.model_copy(update={"builder": manifest.builder | {"adapters": "[]"}})
    assert "merged adapters" in str(compare_weights(merged, Checkpoint(toy_folder), None))


# -- a server as the reference ---------------------------------------------------------------------------------------


class GreySquares(HttpServer):
    """Answers each request with a grey picture of its size. `format` None: that of the request."""

    def __init__(self, format: Any = None) -> None:
        received = self.received = []  # type: list[dict[str, Any]]

        class Handler(QuietHandler):
            def do_POST(self) -> None:
                fields = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                received.append(fields)
                pixels = np.full((fields["height"], fields["width"], 3), 128, np.uint8)
                data = encode_base64(pixels, format or fields["output_format"], 95)
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps({"images": [{"data": data}]}).encode())

        super().__init__(Handler)
        self.url = f"http://127.0.0.1:{self.port}"


@pytest.fixture
def server() -> Iterator[GreySquares]:
    with GreySquares() as running:
        yield running


def test_compares_with_a_server(
    server: GreySquares, toy_store: WritableStore, toy_folder: Path, tmp_path: Path
) -> None:
    """The server gets every resolved field, so that its own defaults do not count."""
    entries = [{"prompt": "a circle", "guidance_scale": 2, "seed": 9}, {"prompt": "a square", "width": 128}]
    options = ["--against", server.url, write_requests(tmp_path, entries)]
    result = run(toy_folder, toy_store, tmp_path / "out", *options)
    assert result.exit_code == 0, result.output
    first, second, *_ = server.received
    assert (first["seed"], first["guidance_scale"], first["num_inference_steps"], first["width"]) == (9, 2, 8, 64)
    assert (first["scheduler"], first["forecast"], first["use_refiner"]) == ("Euler", "off", False)
    assert (second["seed"], second["width"], second["guidance_scale"]) == (2, 128, 7.5)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [variant["name"] for variant in report["variants"]] == ["server", *VARIANTS[1:]]
    assert report["variants"][0]["row"]["gpu"] == "unknown" and report["variants"][0]["memory_bytes"] is None
    assert float(report["variants"][1]["psnr_decibels"]["median"]) < 42, "a grey square is another picture"
    assert "whose weights were not compared" in result.output
    assert "cost" not in result.output and report["variants"][0]["cost_of_1000"] is None


def test_refuses_a_server_without_png(toy_store: WritableStore, toy_folder: Path, tmp_path: Path) -> None:
    with GreySquares("jpeg") as server:
        result = run(toy_folder, toy_store, tmp_path / "out", "--against", server.url)
    assert isinstance(result.exception, CallFailed) and "not a PNG" in str(result.exception)
    assert not (tmp_path / "out").exists()


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", r"requests.json cannot be read as JSON"),
        ("[" * 200_000, r"cannot be read as JSON"),
        ({}, r"is not a list of 1 to 32 requests"),
        ([], r"is not a list of 1 to 32 requests"),
        ([{"prompt": "a circle"}, 3], r"request 2 is not a JSON object"),
        ([{"prompt": "a circle"}, {"seed": 3}], r"request 2, prompt: is required"),
        ([{"prompt": "a circle", "guidance_scale": 99}], r"request 1, guidance_scale: got 99"),
        ([{"prompt": "a circle", "step": 9}], r"request 1, step: is not a known field"),
        ([{"prompt": "a circle", "num_images": 2}], r"request 1, num_images: is not compared. Leave it out"),
        ([{"prompt": "a circle", "loras": []}], r"request 1, loras: is not compared"),
    ],
)
def test_refuses_invalid_requests(
    content: Any, message: str, toy_store: WritableStore, toy_folder: Path, tmp_path: Path
) -> None:
    result = run(toy_folder, toy_store, tmp_path / "out", write_requests(tmp_path, content))
    assert isinstance(result.exception, BadRequestFile) and re.search(message, str(result.exception)), result.exception


@pytest.mark.parametrize(
    "entry, field",
    [
        ({"width": 4096}, "width"),
        ({"guidance_end": 0.5}, "guidance_end"),
        ({"guidance_rescale": 0.5}, "guidance_rescale"),
    ],
)
def test_refuses_requests_that_are_not_served(
    entry: dict[str, Any], field: str, toy_store: WritableStore, toy_folder: Path, tmp_path: Path
) -> None:
    entries = [{"prompt": "a circle"}, {"prompt": "a square", **entry}]
    result = run(toy_folder, toy_store, tmp_path / "out", write_requests(tmp_path, entries))
    assert isinstance(result.exception, RequestRefused) and result.exception.field == f"request 2, {field}"


def refuse(error: type[PreheatError], message: str, result: Result) -> None:
    assert isinstance(result.exception, error) and re.search(message, str(result.exception)), result.exception


def test_refuses_a_missing_release(toy_store: WritableStore, toy_folder: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(toy_folder, tmp_path / "other"))
    commands = r"has no release of other\. Run `preheat build .*other --store .*` and `preheat publish other --store"
    refuse(ReleaseNotFound, commands, run(other, toy_store, tmp_path / "out"))
    missing = run(toy_folder, toy_store, tmp_path / "out", "--release", "toy-sdxl/7")
    refuse(ReleaseNotFound, "Release toy-sdxl/7 was not found", missing)


def test_takes_the_newest_numbered_release(toy_store: WritableStore, toy_folder: Path, tmp_path: Path) -> None:
    """The highest number, not the last in the alphabet. Other versions need --release."""
    store = open_writable_store(shutil.copytree(toy_store.url.removeprefix("file://"), tmp_path / "store"))
    manifest = store.read_release("toy-sdxl/1")
    for version in ("9", "10", "test"):
        store.write_release(manifest.model_copy(update={"version": version}))
    assert find_newest(store, str(toy_folder)) == "toy-sdxl/10"
    for version in ("1", "9", "10"):
        (tmp_path / "store" / "releases" / "toy-sdxl" / f"{version}.json").unlink()
    refuse(
        ReleaseNotFound, "no numbered release of toy-sdxl. .*toy-sdxl/test", run(toy_folder, store, tmp_path / "out")
    )


def test_keeps_a_folder_that_is_not_empty(toy_store: WritableStore, toy_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    refuse(NotWritable, "is not empty. Name another folder with --out", run(toy_folder, toy_store, tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt"]


def test_refuses_compiled_diffusers_with_a_server(toy_store: WritableStore, toy_folder: Path, tmp_path: Path) -> None:
    result = run(toy_folder, toy_store, tmp_path / "out", "--compiled", "--against", "http://127.0.0.1:9")
    assert result.exit_code == 2 and "needs --against diffusers" in result.output
