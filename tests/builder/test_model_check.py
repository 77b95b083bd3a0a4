"""The check of a model folder at the start of a build and of an export: before weights are read."""

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from engine_builder.building.build import build
from engine_builder.building.build_plan import BuildPlan
from engine_builder.checkpoints.find import find_checkpoints
from engine_builder.checkpoints.folder import Checkpoint, CheckpointError
from engine_builder.commands.main import app
from engine_builder.networks.check import check_model
from engine_builder.stores.store import open_writable_store
from tests.conftest import MODEL_FOLDER

PlanOf = Callable[[Path, str], BuildPlan]
Change = Callable[[Path], object]

UNET_WEIGHTS = "unet/diffusion_pytorch_model.safetensors"
INDEX = "model_index.json"
TOKENIZER_CONFIG = "tokenizer/tokenizer_config.json"


def edit(file: str, **entries: Any) -> Change:
    """Set entries of a JSON file."""

    def change(folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | entries))

    return change


def write(file: str, data: bytes) -> Change:
    return lambda folder: (folder / file).write_bytes(data)


def rename(file: str, name: str) -> Change:
    return lambda folder: (folder / file).rename((folder / file).with_name(name))


def reshape(folder: Path) -> None:
    tensors = load_file(folder / UNET_WEIGHTS)
    tensors["conv_in.bias"] = torch.zeros(9)
    save_file(tensors, folder / UNET_WEIGHTS, metadata={"format": "pt"})


def grow(size: int) -> Change:
    return lambda folder: os.truncate(folder / "unet" / "config.json", size)


def add_token(folder: Path) -> None:
    path = folder / "tokenizer" / "vocab.json"
    vocabulary = json.loads(path.read_text())
    path.write_text(json.dumps(vocabulary | {"surplus": max(vocabulary.values()) + 100}))


DEEP = b"[" * 200_000
REFUSED: dict[str, tuple[Change, str, str]] = {
    # name: (change, file or folder in the error, words of the error)
    "index of SD 1": (edit(INDEX, _class_name="StableDiffusionPipeline"), INDEX, "'StableDiffusionPipeline'"),
    "index without a class": (edit(INDEX, _class_name=None), INDEX, "_class_name is None"),
    "index with a class 3": (edit(INDEX, _class_name=3), INDEX, "_class_name is 3"),
    "index names Flux": (edit(INDEX, unet=["diffusers", "FluxTransformer2DModel"]), INDEX, "class of unet is 'Flux"),
    "index names T5": (edit(INDEX, text_encoder_2=["transformers", "T5EncoderModel"]), INDEX, "text_encoder_2 is 'T5"),
    "index with a text for a flag": (edit(INDEX, force_zeros_for_empty_prompt="no"), INDEX, "true or false"),
    "unet of Flux": (edit("unet/config.json", _class_name="FluxTransformer2DModel"), "unet/config.json", "'Flux"),
    "unet class is a list": (edit("unet/config.json", _class_name=[]), "unet/config.json", "_class_name is []"),
    "tiny vae": (edit("vae/config.json", _class_name="AutoencoderTiny"), "vae/config.json", "expected AutoencoderKL"),
    "text encoder is T5": (
        edit("text_encoder/config.json", architectures=["T5EncoderModel"]), "text_encoder/config.json", "'T5Enc",
    ),
    "scheduler is unknown": (
        edit("scheduler/scheduler_config.json", _class_name="PNDMScheduler"), "scheduler", "'PNDMScheduler'",
    ),
    **{
        f"nested {file}": (write(file, DEEP), file, "is not JSON")
        for file in (INDEX, "unet/config.json", "defaults.json", "tokenizer/vocab.json", TOKENIZER_CONFIG,
                     "text_encoder/generation_config.json", "scheduler/scheduler_config.json")
    },
    "not text": (write("unet/config.json", b"\xff\xfe"), "unet/config.json", "is not JSON"),
    "not an object": (write("unet/config.json", b"[]"), "unet/config.json", "not a JSON object"),
    "large config": (grow(100 << 20), "unet/config.json", "has 104,857,600 bytes, more than"),
    "sizes are text": (edit("text_encoder_2/config.json", hidden_size="x"), "text_encoder_2/config.json", "'x'"),
    "no levels": (edit("vae/config.json", block_out_channels=[]), "vae/config.json", "block_out_channels is []"),
    "groups are text": (edit("unet/config.json", norm_num_groups="x"), "unet/config.json", "does not describe a UNet"),
    "endless layers": (edit("unet/config.json", layers_per_block=10**9), "unet/config.json", "layers_per_block"),
    "other widths": (edit("vae/config.json", block_out_channels=[16, 16]), "vae", "config.json describes"),
    "other tensors": (reshape, "unet", "the shape of conv_in.bias is [9]"),
    "half of the weights": (lambda f: os.truncate(f / UNET_WEIGHTS, 5000), UNET_WEIGHTS, "complete safetensors"),
    "a pointer to weights": (write(UNET_WEIGHTS, b"version https://git-lfs.github.com"), UNET_WEIGHTS, "complete"),
    "huge weights": (lambda f: os.truncate(f / UNET_WEIGHTS, 2**36), UNET_WEIGHTS, "bytes, more than"),
    "weights of another name": (rename(UNET_WEIGHTS, "model.safetensors"), "unet", "has no diffusion_pytorch_model"),
    "one shard of two": (
        rename(UNET_WEIGHTS, "diffusion_pytorch_model-00001-of-00002.safetensors"), "unet", "lacks some of the files",
    ),
    "tokenizer without merges": (lambda f: (f / "tokenizer/merges.txt").unlink(), "tokenizer", "lacks merges.txt"),
    "tokenizer with odd merges": (write("tokenizer/merges.txt", b"#version: 0.2\na b c d\n"), "tokenizer", "Merges"),
    "tokenizer with a list": (write("tokenizer/vocab.json", b"[1]"), "tokenizer", "tokenizer"),
    "tokenizer of 50 tokens": (edit(TOKENIZER_CONFIG, model_max_length=50), "tokenizer", "as 50 tokens"),
    "tokenizer length is text": (edit(TOKENIZER_CONFIG, model_max_length="x"), "tokenizer", "does not limit"),
    "tokenizer of another model": (add_token, "tokenizer", "the vocabulary in"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_before_weights_are_read(case: str, folder_copy: Path, plan_of: PlanOf, tmp_path: Path) -> None:
    change, file, words = REFUSED[case]
    change(folder_copy)
    refuses(folder_copy, plan_of, tmp_path, file, words)


def refuses(folder: Path, plan_of: PlanOf, tmp_path: Path, file: str, words: str) -> None:
    with pytest.raises(CheckpointError) as refusal:
        build(plan_of(folder, "refused"), open_writable_store(tmp_path / "store"))
    message = str(refusal.value)
    assert f"{folder}/{file}" in message and words in message
    assert refusal.value.remedy and message.endswith(".")
    assert not list((tmp_path / "store").rglob("*"))


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's path has at most 108 characters
        try:
            one.bind(path.name)
        finally:
            os.chdir(here)


KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": make_pipe,
    "socket": make_socket,
    "folder": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "link loop": lambda path: path.symlink_to(path),
    "broken link": lambda path: path.symlink_to(path.parent / "missing"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "file", [INDEX, "unet/config.json", UNET_WEIGHTS, "tokenizer/merges.txt", TOKENIZER_CONFIG, "vae/other.json"]
)
def test_refuses_what_is_not_a_regular_file(
    file: str, kind: str, folder_copy: Path, plan_of: PlanOf, tmp_path: Path
) -> None:
    (folder_copy / file).unlink(missing_ok=True)
    KINDS[kind](folder_copy / file)
    refuses(folder_copy, plan_of, tmp_path, file, "missing file" if kind == "broken link" and "json" in file else "")


@pytest.fixture
def with_refiner(tmp_path: Path) -> Iterator[Path]:
    yield Path(shutil.copytree(MODEL_FOLDER, tmp_path / "model"))


@pytest.mark.parametrize(
    "change, file",
    [
        (edit("refiner/model_index.json", _class_name="FluxPipeline"), "refiner/model_index.json"),
        (edit("refiner/unet/config.json", _class_name="UNet2DModel"), "refiner/unet/config.json"),
        (write("refiner/vae/config.json", DEEP), "refiner/vae/config.json"),
        (lambda folder: os.truncate(folder / "refiner" / UNET_WEIGHTS, 100), f"refiner/{UNET_WEIGHTS}"),
        (edit("refiner/text_encoder_2/config.json", vocab_size=3), "refiner/text_encoder_2"),
    ],
)
def test_refuses_a_wrong_refiner(change: Change, file: str, with_refiner: Path) -> None:
    change(with_refiner)
    with pytest.raises(CheckpointError) as refusal:
        check_model(*find_checkpoints(str(with_refiner), None))
    assert f"{with_refiner}/{file}" in str(refusal.value)


def test_a_pipe_for_the_refiners_index_is_not_skipped(with_refiner: Path) -> None:
    index = with_refiner / "refiner" / "model_index.json"
    index.unlink()
    os.mkfifo(index)
    with pytest.raises(CheckpointError, match="refiner/model_index.json cannot be read: it is not a regular file"):
        check_model(*find_checkpoints(str(with_refiner), None))


@pytest.mark.parametrize("command", [["build", "--precision", "fp32"], ["export-onnx"]], ids=["build", "export-onnx"])
def test_commands_check_first(command: list[str], folder_copy: Path, tmp_path: Path) -> None:
    edit(INDEX, _class_name="StableDiffusionPipeline")(folder_copy)
    result = CliRunner().invoke(app, [*command, str(folder_copy), "--store", str(tmp_path / "store")])
    assert isinstance(result.exception, CheckpointError)
    assert "'StableDiffusionPipeline'" in str(result.exception)


@pytest.mark.parametrize(
    "name",
    [
        "StableDiffusionXLPipeline",
        "StableDiffusionXLImg2ImgPipeline",
        "StableDiffusionXLInpaintPipeline",
        "StableDiffusionXLControlNetPipeline",
        ["lpw_stable_diffusion_xl", "SDXLLongPromptWeightingPipeline"],
    ],
)
def test_accepts_sdxl_pipelines(name: Any, folder_copy: Path) -> None:
    edit(INDEX, _class_name=name)(folder_copy)
    check_model(Checkpoint(folder_copy), None)


ACCEPTED: dict[str, Change] = {
    "old config without a class": lambda folder: [
        (folder / sub / "config.json").write_text(
            json.dumps({k: v for k, v in json.loads((folder / sub / "config.json").read_text()).items() if k != key})
        )
        for sub, key in (("unet", "_class_name"), ("vae", "_class_name"), ("text_encoder", "architectures"))
    ],
    "fast tokenizer": edit(INDEX, tokenizer=["transformers", "CLIPTokenizerFast"]),
    "half of the weights beside fp16": lambda folder: (
        shutil.copy(folder / UNET_WEIGHTS, folder / "unet" / "diffusion_pytorch_model.fp16.safetensors"),
        rename(UNET_WEIGHTS, "diffusion_pytorch_model-00001-of-00002.safetensors")(folder),
    ),
    "a pipe of another name": lambda folder: os.mkfifo(folder / "unet" / "README.md"),
    "links to files": lambda folder: (
        (folder / "unet").rename(folder.parent / "unet"),
        (folder / "unet").symlink_to(folder.parent / "unet", target_is_directory=True),
    ),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_accepts_other_folders(case: str, folder_copy: Path) -> None:
    ACCEPTED[case](folder_copy)
    check_model(Checkpoint(folder_copy), None)
