"""`preheat bench latency` as its user calls it: what was asked for is measured, and so are its peers."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from typer.testing import CliRunner

from engine_builder.benchmarks import bench, peers
from engine_builder.commands.main import app
from engine_builder.networks.network import (
    ModelFolder,
    ModelFolderError,
)
from engine_builder.releases.signing import public_key
from model.api.request import GenerationSettings
from model.errors import PreheatError, RequestRefused, UntrustedRelease
from model.images.encode import Pixels
from model.store.store import Store
from tests.stand_ins.line_networks import PLAIN

PIPELINE, DRAW = peers.diffusers_pipeline, peers.draw_by_diffusers
WHO = ("toy-sdxl/1", "diffusers eager", "diffusers compiled")


def latency(store: Store, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "toy-sdxl/1", "--store", store.url, "--warm-ups", "0", *arguments])


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each peer whether it is to be compiled; here it is not, for that takes minutes."""
    calls: list[bool] = []

    def pipeline(folder: ModelFolder, precision: str, is_compiled: bool) -> Any:
        calls.append(is_compiled)
        return PIPELINE(folder, precision, False)

    monkeypatch.setattr(peers, "diffusers_pipeline", pipeline)
    return calls


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[GenerationSettings]:
    """What the peers have drawn."""
    found: list[GenerationSettings] = []

    def draw(pipeline: Any, like: GenerationSettings) -> list[Pixels]:
        found.append(like)
        return DRAW(pipeline, like)

    monkeypatch.setattr(peers, "draw_by_diffusers", draw)
    return found


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers' own, of numpy 2
def test_the_size_the_guidance_and_both_peers_are_measured(
    toy_store: Store, toy_folder: Path, compiled: list[bool], drawn: list[GenerationSettings], tmp_path: Path
) -> None:
    out = tmp_path / "rows.json"
    result = latency(
        toy_store, "--size", "128x64", "--guidance-scale", "1", "--steps", "3", "--runs", "2",
        "--peer", str(toy_folder), "--compiled", "--out", str(out),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())
    assert rows == json.loads(result.stdout.splitlines()[-1])
    assert [row["case"] for row in rows] == [f"{who} 128x64" for who in WHO]
    assert {(row["steps"], row["runs"], row["unit"]) for row in rows} == {(3, 2, "ms")}
    assert compiled == [False, True]
    assert len(drawn) == 2 * 3  # of either the counted runs of its one turn, and one before them
    assert {(like.width, like.height, like.guidance_scale) for like in drawn} == {(128, 64, 1.0)}


def test_they_take_turns_of_a_few_runs_of_which_the_first_is_not_counted() -> None:
    drawn: list[str] = []

    def drawing(name: str, stage: float) -> bench.Work:
        def work() -> dict[str, float]:
            drawn.append(name)
            return {"stage": stage + len(drawn)}

        return work

    (ours, our_stages), (theirs, _) = bench.measure([drawing("ours", 0.0), drawing("theirs", 100.0)], 2, 6)
    turns = ["ours"] * 5 + ["theirs"] * 5 + ["ours"] * 3 + ["theirs"] * 3
    assert drawn == ["ours"] * 2 + ["theirs"] * 2 + turns
    assert len(ours) == len(theirs) == 6
    assert our_stages == {"stage": 8.5}  # the 6th to 9th of all, the 16th and the 17th
    drawn.clear()
    [(alone, _)] = bench.measure([drawing("ours", 0.0)], 2, 6)
    assert drawn == ["ours"] * 8 and len(alone) == 6


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers' own, of numpy 2
def test_all_pictures_are_encoded_alike(
    toy_store: Store,
    toy_folder: Path,
    compiled: list[bool],
    drawn: list[GenerationSettings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoded: list[tuple[object, ...]] = []

    def encode(pixels: Pixels, *settings: object) -> str:
        encoded.append((pixels.shape, pixels.dtype.name, *settings))
        return ""

    monkeypatch.setattr(bench, "encode_base64", encode)
    assert latency(toy_store, "--steps", "1", "--runs", "2", "--images", "3", "--peer", str(toy_folder)).exit_code == 0
    like = drawn[0]
    expected = ((like.height, like.width, 3), "uint8", like.output_format, like.quality)
    assert encoded == [expected] * 2 * 3 * 3


def test_no_peer_is_measured_unless_it_is_named(toy_store: Store, compiled: list[bool]) -> None:
    result = latency(toy_store, "--steps", "1", "--runs", "1")
    assert result.exit_code == 0 and len(json.loads(result.stdout.splitlines()[-1])) == 1 and not compiled
    refused = latency(toy_store, "--compiled")
    assert refused.exit_code == 2 and "--peer" in refused.output


def test_a_peer_that_would_draw_otherwise_is_refused(toy_store: Store, toy_folder: Path, tmp_path: Path) -> None:
    like = replace(PLAIN, scheduler="Euler")
    assert peers.find_peer(str(toy_folder), like).root == toy_folder
    for changes, field in (
        ({"use_refiner": True}, "use_refiner"),
        ({"end_cfg_frac": 0.4}, "end_cfg_frac"),
        ({"scheduler": "LCM"}, "scheduler"),
    ):
        with pytest.raises(RequestRefused) as refused:
            peers.find_peer(str(toy_folder), replace(like, **changes))  # type: ignore[arg-type]
        assert refused.value.field == field
    assert peers.find_peer(str(toy_folder), replace(like, end_cfg_frac=0.4, guidance_scale=1.0)).root == toy_folder
    for named, said in ((tmp_path / "none", "There is no folder"), (tmp_path, "has no model_index.json")):
        result = latency(toy_store, "--steps", "1", "--runs", "1", "--peer", str(named))
        assert isinstance(result.exception, ModelFolderError) and said in str(result.exception)


def test_a_folder_whose_files_are_a_variant_is_read_as_a_build_reads_it(toy_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "variant"
    shutil.copytree(toy_folder, folder)
    for path in folder.glob("*/*.safetensors"):
        path.rename(path.with_name(f"{path.stem}.fp16.safetensors"))
    assert PIPELINE(ModelFolder(folder), "float32", False).unet.dtype == torch.float32


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers' own, of numpy 2
def test_a_compiled_decoder_that_overflows_in_fp16_stays_in_fp32(
    toy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """diffusers would move it there and back for each picture: memory that no CUDA graph finds again."""
    folder = tmp_path / "overflows"
    shutil.copytree(toy_folder, folder)
    config = json.loads((folder / "vae" / "config.json").read_text())
    (folder / "vae" / "config.json").write_text(json.dumps(config | {"force_upcast": True}))
    monkeypatch.setattr(torch, "compile", lambda work, **_: work)
    pipeline = PIPELINE(ModelFolder(folder), "float16", True)
    before = [tensor.data_ptr() for tensor in pipeline.vae.parameters()]
    for _ in range(2):
        DRAW(pipeline, replace(PLAIN, width=64, num_inference_steps=1))
    assert [tensor.data_ptr() for tensor in pipeline.vae.parameters()] == before
    assert (pipeline.vae.dtype, pipeline.unet.dtype) == (torch.float32, torch.float16)


def test_a_gpu_without_room_for_the_peers_is_said(
    toy_store: Store, toy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(peers, "diffusers_pipeline", full)
    result = latency(toy_store, "--steps", "1", "--runs", "1", "--peer", str(toy_folder))
    assert isinstance(result.exception, PreheatError) and "without --compiled" in str(result.exception)


def test_what_is_measured_is_trusted_first(toy_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREHEAT_PUBLIC_KEY", str(public_key(Ed25519PrivateKey.generate())))
    with pytest.raises(UntrustedRelease):
        bench.load_here(toy_store, "toy-sdxl/1")


@pytest.mark.parametrize(
    "arguments",
    [
        ("bench", "toy-sdxl/1", "--runs", "0"),
        ("bench", "cold-start", "toy-sdxl/1", "--runs", "0"),
        ("bench", "cold-start", "toy-sdxl/1", "--config", "nowhere.yaml"),
        ("serve", "toy-sdxl/1", "--config", "nowhere.yaml"),
        ("serve", "toy-sdxl/1", "--port", "99999"),
        ("load", "toy-sdxl/1", "--clients", "1,x"),
        ("load", "toy-sdxl/1", "--clients", "0"),
        ("plan-replicas", "constant:1", "--curve", "1:1", "--p99", "9", "--cold-start", "-10"),
        ("plan-replicas", "constant:1", "--curve", "1:1", "--p99", "9", "--cold-start", "1", "--steps", "0"),
        ("plan-replicas", "constant:1", "--curve", "1:1", "--p99", "9", "--cold-start", "1", "--max-replica", "0"),
        ("report", "nowhere"),
    ],
    ids=" ".join,
)
def test_an_option_that_cannot_be_is_said_at_once(arguments: tuple[str, ...], toy_store: Store) -> None:
    store = [] if arguments[0] in ("plan-replicas", "report") else ["--store", toy_store.url]
    result = CliRunner().invoke(app, [*arguments, *store])
    assert result.exit_code == 2 and "Usage:" in result.output


@pytest.mark.parametrize("size, said", [("128", "WIDTHxHEIGHT"), ("101x64", "101")])
def test_a_size_that_is_none_is_refused(size: str, said: str, toy_store: Store) -> None:
    result = latency(toy_store, "--size", size, "--runs", "1")
    assert result.exit_code != 0 and said in result.output + str(result.exception)


@pytest.mark.parametrize("option, field", [("--guidance-scale", "guidance_scale"), ("--steps", "num_inference_steps")])
def test_what_no_request_may_ask_for_is_refused_before_anything_is_loaded(option: str, field: str) -> None:
    result = CliRunner().invoke(app, ["bench", "no-such/1", option, "999"])
    assert isinstance(result.exception, RequestRefused) and result.exception.field == field
    assert "got 999" in str(result.exception)
