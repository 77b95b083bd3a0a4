"""The benchmark suite: a row for each served case, a line for each other, peers on the same weights."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine_builder.benchmarks import peers, suite
from engine_builder.benchmarks.rows import make_row
from engine_builder.benchmarks.suite import Case
from engine_builder.checkpoints import random_sd, random_sdxl
from engine_builder.checkpoints.folder import Checkpoint, CheckpointError
from engine_builder.checkpoints.release_settings import read_model_facts
from engine_builder.networks.check import check_model
from engine_builder.networks.network import load_network
from model.loading.load import Loaded
from model.loading.served import SizeList
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.spec import TEXT_ENCODER, TEXT_ENCODER_FINAL
from model.store.precision import FP16
from tests.support.components import BASE_COMPONENTS, REFINER_COMPONENTS
from tests.support.linear_networks import PLAIN, linear_model
from tests.support.repository import MODEL_FOLDER


def test_one_row_per_served_case(loaded: Loaded) -> None:
    cases = (
        Case("first", 2, 2, side=64),
        Case("few-step", 2, 1, "LCM", 1.0, side=64),
        Case("many", 3, 2, images=2, side=64, throughput=True),
        Case("too-large", 2, 2, side=4096),
    )
    lines: list[str] = []
    rows = list(suite.run(loaded, None, lines.append, cases))
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
    rows = list(suite.run(loaded, str(toy_folder), lambda line: None, [Case("first", 1, 2, side=64)]))
    assert [(row.case, row.runs, row.steps) for row in rows] == [
        ("first", 1, 2),
        ("first, in turns with diffusers", 10, 2),
        ("first, diffusers eager", 10, 2),
        ("first, diffusers compiled", 10, 2),
    ]


def test_finds_the_peer_before_measuring(loaded: Loaded) -> None:
    lines: list[str] = []
    with pytest.raises(CheckpointError):
        list(suite.run(loaded, "no such folder", lines.append, [Case("first", 1, 2, side=64)]))
    assert lines == []


def test_images_per_second_count_the_batch() -> None:
    row = make_row("case", [1000.0, 2000.0, 4000.0], "ms", "float16", 20, 8)
    rate = suite.to_images_per_second(row)
    assert (rate.unit, rate.p50, rate.p99) == ("images/s", 4.0, 2.0)


def test_random_sdxl_writes_the_same_loadable_folder_twice(tmp_path: Path) -> None:
    """Narrow networks stand for SDXL's. Every component of base and refiner is loaded."""
    narrow = {"block_out_channels": (32, 64, 64), "attention_head_dim": (1, 2, 2), "cross_attention_dim": 64}
    narrow |= {"transformer_layers_per_block": 1, "addition_time_embed_dim": 8}
    unet = random_sdxl.UNET | narrow | {"projection_class_embeddings_input_dim": 32 + 6 * 8}
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text |= {"projection_dim": 32}
    configs = {
        "unet": unet,
        "refiner_unet": unet | {"cross_attention_dim": 32, "projection_class_embeddings_input_dim": 32 + 5 * 8},
        "vae": random_sdxl.VAE | {"block_out_channels": (32, 32, 32, 32)},
        "text_encoder": random_sdxl.TEXT_ENCODER | text,
        "text_encoder_2": random_sdxl.TEXT_ENCODER_2 | text,
    }
    for folder in ("one", "two"):
        random_sdxl.write(tmp_path / folder, MODEL_FOLDER, refiner=True, configs=configs)
    for name in BASE_COMPONENTS + REFINER_COMPONENTS:
        subfolder = "refiner" if name in REFINER_COMPONENTS else "."
        first, second = (load_network(Checkpoint(tmp_path / one / subfolder), name, FP16) for one in ("one", "two"))
        assert first.tensors().keys() == second.tensors().keys() and first.tensors()
        for tensor, same in zip(first.tensors().values(), second.tensors().values(), strict=True):
            assert torch.equal(tensor, same)


def test_random_sd_writes_a_folder_that_passes_the_check(tmp_path: Path) -> None:
    """Narrow networks stand for those of Stable Diffusion 1.5."""
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    configs = {
        "unet": random_sd.UNET | {"block_out_channels": (32, 64, 64, 64), "cross_attention_dim": 32},
        "vae": random_sd.CONFIGS["vae"] | {"block_out_channels": (32, 32, 32, 32)},
        "text_encoder": random_sd.CONFIGS["text_encoder"] | text,
    }
    random_sd.write(tmp_path / "sd", MODEL_FOLDER / "tokenizer", configs=configs)
    folder = Checkpoint(tmp_path / "sd")
    check_model(folder, None)
    assert (folder.family, read_model_facts(folder, None).native_width) == ("sd", 512)
    # The peer of a benchmark runs the release's sampler, not PNDM.
    pipeline = peers.diffusers_pipeline(folder, "float32", False)
    assert type(pipeline.scheduler).__name__ == "EulerDiscreteScheduler"
    assert peers.find_peer(str(folder.root), replace(PLAIN, scheduler="Euler")).root == folder.root


def test_cases_are_those_of_the_family(loaded: Loaded) -> None:
    def cases_of(model: LoadedModel) -> list[str]:
        lines: list[str] = []
        no_size = replace(loaded.served, sizes=SizeList(()))
        assert not list(suite.run(replace(loaded, model=model, served=no_size), None, lines.append))
        return [line.partition(":")[0] for line in lines]

    sdxl = linear_model()
    sd = replace(sdxl, engines=sdxl.engines | {TEXT_ENCODER_FINAL: sdxl.engines[TEXT_ENCODER]})
    assert cases_of(sdxl) == [case.name for case in suite.CASES]
    assert cases_of(sd) == [case.name for case in suite.SD_CASES]
