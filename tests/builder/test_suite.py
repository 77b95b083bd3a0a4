"""The benchmark suite: one row per case, a line for cases that are not served, peers on the same weights."""

import time
from pathlib import Path

import pytest
import torch

from engine_builder.benchmarks import bench, suite
from engine_builder.benchmarks.rows import make_row
from engine_builder.benchmarks.suite import Case
from engine_builder.checkpoints import random_sdxl
from engine_builder.checkpoints.folder import Checkpoint, CheckpointError
from engine_builder.networks.network import load_network
from model.api.request import GenerationRequest, resolve
from model.images.encode import Pixels
from model.loading.load import Loaded
from model.store.precision import FP16
from tests.support.components import BASE_COMPONENTS, REFINER_COMPONENTS

REPOSITORY = Path(__file__).parents[2]


def test_one_row_per_served_case(loaded: Loaded, toy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = (
        Case("first", 2, 2, side=64),
        Case("few-step", 2, 1, "LCM", 1.0, side=64),
        Case("many", 3, 2, images=2, side=64, throughput=True),
        Case("too-large", 2, 2, side=4096),
    )
    monkeypatch.setattr(suite, "CASES", cases)
    lines: list[str] = []
    rows = list(suite.run(loaded, None, lines.append))
    assert [(row.case, row.unit, row.runs, row.steps, row.batch) for row in rows] == [
        ("first", "ms", 2, 2, 1),
        ("few-step", "ms", 2, 1, 1),
        ("many", "images/s", 3, 2, 2),
    ]
    assert [line.partition(":")[0] for line in lines] == ["first", "few-step", "many", "too-large"]
    assert "skipped" in lines[3] and "4096" in lines[3]


def test_peers_are_interleaved_with_the_first_case(
    loaded: Loaded, toy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # compiling takes minutes
    monkeypatch.setattr(suite, "CASES", (Case("first", 1, 2, side=64),))
    rows = list(suite.run(loaded, str(toy_folder), lambda line: None))
    assert [(row.case, row.runs, row.steps) for row in rows] == [
        ("first", 1, 2),
        ("first, in turns with diffusers", 10, 2),
        ("first, diffusers eager", 10, 2),
        ("first, diffusers compiled", 10, 2),
    ]
    monkeypatch.setattr(suite, "bench_release", lambda *_: pytest.fail("measured"))
    with pytest.raises(CheckpointError):
        list(suite.run(loaded, "no such folder", lambda line: None))


def test_offline_waits_for_the_last_encoding(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[float] = []

    def slowly(pixels: Pixels, *settings: object) -> str:
        time.sleep(0.5)
        encoded.append(time.perf_counter())
        return ""

    monkeypatch.setattr(bench, "encode_base64", slowly)
    request = GenerationRequest(prompt="a circle", width=64, height=64, num_inference_steps=1, num_images=2)
    started = time.perf_counter()
    totals = bench.generate_offline(loaded, [resolve(request, loaded.served)], 0, min_runs=3)
    assert len(encoded) == 3 * 2 and len(totals) == 3
    # No speed is asserted, only that the times add up to the end of the last encoding.
    assert sum(totals) / 1000 > max(encoded) - started - 0.1


def test_images_per_second_count_the_batch() -> None:
    row = make_row("case", [1000.0, 2000.0, 4000.0], "ms", "float16", 20, 8)
    rate = suite.to_images_per_second(row)
    assert (rate.unit, rate.p50, rate.p99) == ("images/s", 4.0, 2.0)


def test_random_sdxl_writes_a_loadable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real script on narrow networks: every component of base and refiner loads, twice the same."""
    narrow = {"block_out_channels": (32, 64, 64), "attention_head_dim": (1, 2, 2), "cross_attention_dim": 64}
    narrow |= {"transformer_layers_per_block": 1, "addition_time_embed_dim": 8}
    unet = random_sdxl.UNET | narrow | {"projection_class_embeddings_input_dim": 32 + 6 * 8}
    refiner = unet | {"cross_attention_dim": 32, "projection_class_embeddings_input_dim": 32 + 5 * 8}
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    monkeypatch.setattr(random_sdxl, "UNET", unet)
    monkeypatch.setattr(random_sdxl, "REFINER_UNET", refiner)
    monkeypatch.setattr(random_sdxl, "VAE", random_sdxl.VAE | {"block_out_channels": (32, 32, 32, 32)})
    for name in ("TEXT_ENCODER", "TEXT_ENCODER_2"):
        monkeypatch.setattr(random_sdxl, name, getattr(random_sdxl, name) | text | {"projection_dim": 32})
    for folder in ("one", "two"):
        random_sdxl.write(tmp_path / folder, REPOSITORY / "data" / "tiny-sdxl", refiner=True)
    for name in BASE_COMPONENTS + REFINER_COMPONENTS:
        subfolder = "refiner" if name in REFINER_COMPONENTS else "."
        first, second = (load_network(Checkpoint(tmp_path / one / subfolder), name, FP16) for one in ("one", "two"))
        assert first.tensors().keys() == second.tensors().keys() and first.tensors()
        for tensor, same in zip(first.tensors().values(), second.tensors().values(), strict=True):
            assert torch.equal(tensor, same)
