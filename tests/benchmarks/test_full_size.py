"""The command that prepares and measures full-size models: order, failures, and a repeated call. On commands that write
files in place of builds; the real plan is only checked for what it names. And models with random weights."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from typer.main import get_command

from benchmarks.full_size import Work, make_parser, plan, run_all, write_config
from engine_builder.checkpoints import random_models
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.checkpoints.release_settings import read_model_facts
from engine_builder.networks.network import load_network
from engine_builder.networks.network_check import check_model
from model.store.precision import FP16
from preheat.main import app
from tests.support.adapters import module_shapes
from tests.support.components import BASE_COMPONENTS, REFINER_COMPONENTS
from tests.support.repository import MODEL_FOLDER

NARROW_TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def work(folder: Path, name: str, needs: Sequence[str], *words: str) -> Work:
    """Return work whose commands each append a word to a file. The word "fails" fails after that."""
    code = "open({!r}, 'a').write('{} '); print('of {}'); 1 / {}"
    file = str(folder / "order.txt")
    commands = [("timeit", "-n1", "-r1", code.format(file, word, word, int(word != "fails"))) for word in words]
    return Work(name, tuple(commands), tuple(needs))


def order(folder: Path) -> list[str]:
    return (folder / "order.txt").read_text().split()


def test_work_waits_for_what_it_needs(tmp_path: Path) -> None:
    prepared = [
        work(tmp_path, "model", (), "model"),
        work(tmp_path, "unused", (), "unused"),
        work(tmp_path, "release", ["model"], "build", "publish"),
    ]
    measured = [work(tmp_path, name, ["release"], name) for name in ("text", "images")]
    assert run_all(tmp_path, prepared, measured)
    assert order(tmp_path) == ["model", "build", "publish", "text", "images"]
    assert "publish" in (tmp_path / "logs" / "release-1.txt").read_text()
    assert run_all(tmp_path, prepared, [*measured, work(tmp_path, "controls", ["release"], "controls")])
    assert order(tmp_path)[5:] == ["controls"], "what has succeeded is not run again"


def test_failure_stops_only_what_needs_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepared = [
        work(tmp_path, "broken", (), "fails", "never"),
        work(tmp_path, "intact", (), "intact"),
    ]
    measured = [work(tmp_path, "first", ["broken"], "first"), work(tmp_path, "second", ["intact"], "second")]
    assert not run_all(tmp_path, prepared, measured)
    assert order(tmp_path) == ["fails", "intact", "second"]
    printed = capsys.readouterr().out
    assert "broken: failed after" in printed and "\n  of fails" in printed
    assert "first: skipped, because broken failed" in printed
    (tmp_path / "order.txt").write_text("")
    assert run_all(tmp_path, [work(tmp_path, "broken", (), "repaired"), prepared[1]], measured)
    assert order(tmp_path) == ["repaired", "first"]


def parse(arguments: list[str]) -> None:
    """Parse a command line of `preheat`, and check its files. Fails for unknown options and missing files."""
    command: Any = get_command(app)
    context = command.make_context("preheat", [], resilient_parsing=True)
    while hasattr(command, "get_command"):
        name, *arguments = arguments
        command = command.get_command(context, name)
        assert command is not None, name
    command.make_context(name, arguments)


def test_plan_names_the_size_and_gpus(tmp_path: Path) -> None:
    def planned(*arguments: str) -> tuple[list[Work], list[Work]]:
        prepared, measured = plan(make_parser().parse_args([str(tmp_path), *arguments]))
        for one in (*prepared, *measured):
            assert set(one.needs) <= {other.name for other in prepared}
        return prepared, measured

    prepared, measured = planned("--size", "256x256")
    builds = [" ".join(command) for one in prepared for command in one.commands if "build" in command]
    assert len(builds) == 9 and "--size 256x256@2 --controlnet full=" in builds[0] and "--lora-rank 32" in builds[1]
    assert [one.name for one in measured] == [
        "text", "compare", "images", "controls", "image-prompts", "adapters", "sd-text", "load", "load-fp8", "releases",
        "soak",
    ]  # fmt: skip
    write_config(make_parser().parse_args([str(tmp_path)]).config, tmp_path / "config.yaml", "256x128", 16)
    settings = yaml.safe_load((tmp_path / "config.yaml").read_text())["model_metadata"]["preheat"]
    assert settings["buckets"] == [{"height": 128, "width": 256, "rows": 16}] and settings["workers"] == 1
    for one in (*prepared, *measured):
        for module, *arguments in one.commands:
            if module == "preheat":
                parse(arguments)
    [fp8] = [one for one in prepared if any("--policy" in command for command in one.commands)]
    assert [command[1] for command in fp8.commands] == ["calibrate", "check-fp8", "build", "publish"]
    prepared, measured = planned("--gpus", "2")
    shared = [" ".join(command) for command in measured[-1].commands]
    assert measured[-1].needs == ("sdxl-bands",) and prepared[-1].needs == ("sdxl-model",)
    assert len(shared) == 4 and sum("--bands 2" in command for command in shared) == 2
    assert sum("--size 2048x2048" in command for command in shared) == 2


def test_random_sdxl_writes_the_same_loadable_folder_twice(tmp_path: Path) -> None:
    """Narrow networks stand for SDXL's. Every component of base and refiner is loaded."""
    narrow = {"block_out_channels": (32, 64, 64), "attention_head_dim": (1, 2, 2), "cross_attention_dim": 64}
    narrow |= {"transformer_layers_per_block": 1, "addition_time_embed_dim": 8}
    unet = random_models.UNET | narrow | {"projection_class_embeddings_input_dim": 32 + 6 * 8}
    text = NARROW_TEXT | {"projection_dim": 32}
    configs = {
        "unet": unet,
        "refiner_unet": unet | {"cross_attention_dim": 32, "projection_class_embeddings_input_dim": 32 + 5 * 8},
        "vae": random_models.VAE | {"block_out_channels": (32, 32, 32, 32)},
        "text_encoder": random_models.TEXT_ENCODER | text,
        "text_encoder_2": random_models.TEXT_ENCODER_2 | text,
    }
    for folder in ("one", "two"):
        random_models.write_sdxl(tmp_path / folder, MODEL_FOLDER, refiner=True, configs=configs)
    for name in BASE_COMPONENTS + REFINER_COMPONENTS:
        subfolder = "refiner" if name in REFINER_COMPONENTS else "."
        first, second = (load_network(Checkpoint(tmp_path / one / subfolder), name, FP16) for one in ("one", "two"))
        assert first.tensors().keys() == second.tensors().keys() and first.tensors()
        for tensor, same in zip(first.tensors().values(), second.tensors().values(), strict=True):
            assert torch.equal(tensor, same)


def test_random_sd_writes_a_folder_that_passes_the_check(tmp_path: Path) -> None:
    """Narrow networks stand for those of Stable Diffusion 1.5."""
    configs = {
        "unet": random_models.SD_CONFIGS["unet"] | {"block_out_channels": (32, 64, 64, 64), "cross_attention_dim": 32},
        "vae": random_models.SD_CONFIGS["vae"] | {"block_out_channels": (32, 32, 32, 32)},
        "text_encoder": random_models.SD_CONFIGS["text_encoder"] | NARROW_TEXT,
    }
    random_models.write_sd(tmp_path / "sd", MODEL_FOLDER, configs=configs)
    folder = Checkpoint(tmp_path / "sd")
    check_model(folder, None)
    assert (folder.family, read_model_facts(folder, None).native_width) == ("sd", 512)


def test_random_controlnets_have_sdxls_levels() -> None:
    for kind in ("full", "mid", "small"):
        entries = random_models.controlnet_config(kind)
        assert entries["block_out_channels"] == random_models.UNET["block_out_channels"]
        assert len(entries["down_block_types"]) == len(random_models.UNET["down_block_types"])
    assert not any("CrossAttn" in name for name in random_models.controlnet_config("small")["down_block_types"])


@pytest.mark.parametrize("kind", random_models.LORA_KINDS)
def test_random_loras_fit_the_model(kind: random_models.LoraKind, tmp_path: Path) -> None:
    """data/tiny-sdxl stands for SDXL."""
    names = ("unet", "text_encoder", "text_encoder_2")
    files = {name: json.loads((MODEL_FOLDER / name / "config.json").read_text()) for name in names}
    configs = {name: {key: file[key] for key in file if not key.startswith("_")} for name, file in files.items()}
    random_models.write_lora(tmp_path, kind, rank=3, configs=configs)
    tensors, shapes = load_file(tmp_path / f"{kind}.safetensors"), module_shapes(MODEL_FOLDER)
    assert {key.partition(".")[0] for key in tensors} == ({"unet"} if kind == "unet" else set(names))
    changed = {key.removesuffix(".lora_A.weight") for key in tensors if key.endswith(".lora_A.weight")}
    assert len(tensors) == 2 * len(changed) and changed <= shapes.keys()
    for name in changed:
        up, down = (tensors[f"{name}.lora_{part}.weight"] for part in "BA")
        assert (up @ down).shape == shapes[name] and down.dtype == torch.float16
