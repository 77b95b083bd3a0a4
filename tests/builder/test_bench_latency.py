"""`preheat bench latency` as its user calls it: what was asked for is measured, and so are its peers."""

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from engine_builder.benchmarks import bench
from engine_builder.commands.main import app
from model.errors import RequestRefused
from model.image import Pixels
from model.request import GenerationSettings
from model.store import Store

PEER = bench.diffusers_work
WHO = ("toy-sdxl/1", "diffusers eager", "diffusers compiled")


def latency(store: Store, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "toy-sdxl/1", "--store", store.url, "--warm-ups", "0", *arguments])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[GenerationSettings, bool]]:
    """What each peer is to draw, and whether it is to be compiled; here it is not, for that takes minutes."""
    calls: list[tuple[GenerationSettings, bool]] = []

    def peer(folder: Path, like: GenerationSettings, precision: str, compiled: bool = False) -> bench.Work:
        calls.append((like, compiled))
        return PEER(folder, like, precision)

    monkeypatch.setattr(bench, "diffusers_work", peer)
    return calls


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers' own, of numpy 2
def test_the_size_the_guidance_and_both_peers_are_measured(
    toy_store: Store, toy_folder: Path, asked: list[tuple[GenerationSettings, bool]], tmp_path: Path
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
    assert [compiled for _, compiled in asked] == [False, True]
    assert {(like.width, like.height, like.guidance_scale) for like, _ in asked} == {(128, 64, 1.0)}


def test_they_take_turns_once_each_is_warm() -> None:
    drawn: list[str] = []

    def drawing(name: str, stage: float) -> bench.Work:
        def work() -> dict[str, float]:
            drawn.append(name)
            return {"stage": stage + len(drawn)}

        return work

    (ours, our_stages), (theirs, _) = bench.measure([drawing("ours", 0.0), drawing("theirs", 100.0)], 2, 3)
    assert drawn == ["ours"] * 2 + ["theirs"] * 2 + ["ours", "theirs"] * 3
    assert len(ours) == len(theirs) == 3
    assert our_stages == {"stage": 7.0}  # the fifth, seventh and ninth of all


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers' own, of numpy 2
def test_all_pictures_are_encoded_alike(
    toy_store: Store, toy_folder: Path, asked: list[tuple[GenerationSettings, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[tuple[object, ...]] = []

    def encode(pixels: Pixels, *settings: object) -> str:
        encoded.append((pixels.shape, pixels.dtype.name, *settings))
        return ""

    monkeypatch.setattr(bench, "encode_base64", encode)
    assert latency(toy_store, "--steps", "1", "--runs", "2", "--images", "3", "--peer", str(toy_folder)).exit_code == 0
    [(like, _)] = asked
    expected = ((like.height, like.width, 3), "uint8", like.output_format, like.quality)
    assert encoded == [expected] * 2 * 2 * 3


def test_no_peer_is_measured_unless_it_is_named(toy_store: Store, asked: list[tuple[GenerationSettings, bool]]) -> None:
    result = latency(toy_store, "--steps", "1", "--runs", "1")
    assert result.exit_code == 0 and len(json.loads(result.stdout.splitlines()[-1])) == 1 and not asked
    refused = latency(toy_store, "--compiled")
    assert refused.exit_code == 2 and "--peer" in refused.output


@pytest.mark.parametrize("size, said", [("128", "WIDTHxHEIGHT"), ("101x64", "101")])
def test_a_size_that_is_none_is_refused(size: str, said: str, toy_store: Store) -> None:
    result = latency(toy_store, "--size", size, "--runs", "1")
    assert result.exit_code != 0 and said in result.output + str(result.exception)


@pytest.mark.parametrize("option, field", [("--guidance-scale", "guidance_scale"), ("--steps", "num_inference_steps")])
def test_what_no_request_may_ask_for_is_refused_before_anything_is_loaded(option: str, field: str) -> None:
    result = CliRunner().invoke(app, ["bench", "no-such/1", option, "999"])
    assert isinstance(result.exception, RequestRefused) and result.exception.field == field
    assert "got 999" in str(result.exception)
