"""The check of a model's folder at the start of a build or an export, before weights are read."""

import json
import os
import shutil
import socket
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from engine_builder.building.build import build
from engine_builder.checkpoints.find import find_checkpoints
from engine_builder.checkpoints.folder import Checkpoint, CheckpointError
from engine_builder.networks.network_check import check_model
from engine_builder.stores.store import open_writable_store
from preheat.main import app
from tests.engine_builder.helpers import PlanOf, drop_json_key, edit_json, edit_weights
from tests.support.repository import MODEL_FOLDER

Change = Callable[[Path], object]

UNET_WEIGHTS = "unet/diffusion_pytorch_model.safetensors"
FIRST_OF_TWO_SHARDS = "diffusion_pytorch_model-00001-of-00002.safetensors"
INDEX = "model_index.json"
TOKENIZER_CONFIG = "tokenizer/tokenizer_config.json"


def edit(file: str, **entries: Any) -> Change:
    return lambda folder: edit_json(folder / file, **entries)


def write(file: str, data: bytes) -> Change:
    return lambda folder: (folder / file).write_bytes(data)


def rename(file: str, name: str) -> Change:
    return lambda folder: (folder / file).rename((folder / file).with_name(name))


def remove(subfolder: str) -> Change:
    return lambda folder: shutil.rmtree(folder / subfolder)


def resize(file: str, size: int) -> Change:
    return lambda folder: os.truncate(folder / file, size)


def reshape_bias(folder: Path) -> None:
    edit_weights(folder / "unet", lambda tensors: tensors.update({"conv_in.bias": torch.zeros(9)}))


def add_token(folder: Path) -> None:
    file = folder / "tokenizer" / "vocab.json"
    edit_json(file, surplus=max(json.loads(file.read_text()).values()) + 100)


def drop_scaling(folder: Path) -> None:
    drop_json_key(folder / "vae" / "config.json", "scaling_factor")


def drop_class_names(folder: Path) -> None:
    for subfolder, key in (("unet", "_class_name"), ("vae", "_class_name"), ("text_encoder", "architectures")):
        drop_json_key(folder / subfolder / "config.json", key)


def add_incomplete_fp32_weights(folder: Path) -> None:
    shutil.copy(folder / UNET_WEIGHTS, folder / "unet" / "diffusion_pytorch_model.fp16.safetensors")
    (folder / UNET_WEIGHTS).rename(folder / "unet" / FIRST_OF_TWO_SHARDS)


def link_unet(folder: Path) -> None:
    (folder / "unet").rename(folder.parent / "unet")
    (folder / "unet").symlink_to(folder.parent / "unet", target_is_directory=True)


NESTED_JSON = b"[" * 200_000
NO_TEXT_TIME = {"addition_embed_type": None, "projection_class_embeddings_input_dim": None}
REFUSED: dict[str, tuple[Change, str, str]] = {
    # name: (change, file or folder in the error, words of the error)
    "no unet": (remove("unet"), "", "no unet/config.json"),
    "no first text encoder": (remove("text_encoder"), "", "no text_encoder/config.json"),
    "no second text encoder": (remove("text_encoder_2"), "", "no text_encoder_2/config.json"),
    "no scheduler": (remove("scheduler"), "", "no scheduler/scheduler_config.json"),
    "no vae scaling key": (drop_scaling, "vae", "no scaling_factor"),
    "vae scaling is null": (edit("vae/config.json", scaling_factor=None), "vae/config.json", "scaling_factor is None"),
    "vae scaling is zero": (edit("vae/config.json", scaling_factor=0), "vae/config.json", "scaling_factor is 0"),
    "two native sides": (edit("unet/config.json", sample_size=[32, 32]), "defaults.json", "sample_size is [32, 32]"),
    "unet of SD 1 or 2": (edit("unet/config.json", **NO_TEXT_TIME), "unet/config.json", "addition_embed_type is None"),
    "unet for editing": (edit("unet/config.json", in_channels=8), "unet", "takes 8 channels and the VAE returns 4"),
    "pickled weights": (
        rename("vae/diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin"), "vae", "no .safetensors file",
    ),
    "index of SD 1": (
        edit(INDEX, _class_name="StableDiffusionPipeline"), "unet/config.json", "addition_embed_type is 'text_time'",
    ),
    "index of SD 3": (edit(INDEX, _class_name="StableDiffusion3Pipeline"), INDEX, "'StableDiffusion3Pipeline'"),
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
    "text encoder with a projection": (
        edit(INDEX, text_encoder=["transformers", "CLIPTextModelWithProjection"]), INDEX, "expected CLIPTextModel.",
    ),
    "index without a text encoder": (edit(INDEX, text_encoder_2=None), INDEX, 'Set "text_encoder_2": ["transformers"'),
    "index with another part": (edit(INDEX, motion_adapter=["diffusers", "X"]), INDEX, "reads this entry"),
    **{
        f"down block {name}": (edit("unet/config.json", down_block_types=["DownBlock2D", name]), "unet", name)
        for name in ("AttnDownBlock2D", "SimpleCrossAttnDownBlock2D", "ResnetDownsampleBlock2D", "KDownBlock2D",
                     "SkipDownBlock2D")
    },
    **{
        f"unet with {key} {value}": (edit("unet/config.json", **{key: value}), "unet/config.json", f"{key} is")
        for key, value in (
            ("center_input_sample", True), ("mid_block_scale_factor", 2), ("downsample_padding", 0),
            ("time_embedding_type", "fourier"), ("out_channels", 8), ("encoder_hid_dim", 16), ("conv_in_kernel", 5),
            ("class_embeddings_concat", True), ("resnet_skip_time_act", True), ("only_cross_attention", [False, True]),
            ("norm_eps", "small"), ("layers_per_block", None), ("attention_head_dim", {}), ("unknown_entry", 1),
        )
    },
    "base with five time ids": (
        edit("unet/config.json", projection_class_embeddings_input_dim=16 + 5 * 8), "unet", "embeds 5 numbers",
    ),
    "widths that are no multiple": (
        edit("unet/config.json", projection_class_embeddings_input_dim=63), "unet", "addition_time_embed_dim (8)",
    ),
    "vae with attention": (
        edit("vae/config.json", up_block_types=["AttnUpDecoderBlock2D"] * 2), "vae/config.json", "AttnUpDecoder",
    ),
    "vae of Flux": (edit("vae/config.json", shift_factor=0.1159), "vae/config.json", "shift_factor is 0.1159"),
    "text encoder with a mask": (
        edit("text_encoder/config.json", use_attention_mask=True), "text_encoder/config.json", "use_attention_mask",
    ),
    "text encoder of another kind": (
        edit("text_encoder/config.json", model_type="t5"), "text_encoder/config.json", "model_type is 't5'",
    ),
    "quantized text encoder": (
        edit("text_encoder/config.json", quantization_config={"bits": 4}), "text_encoder/config.json", "quantization",
    ),
    "unknown activation": (
        edit("text_encoder/config.json", hidden_act="swiglu"), "text_encoder/config.json", "hidden_act is 'swiglu'",
    ),
    "scheduler is unknown": (
        edit(INDEX, scheduler=["diffusers", "FlowMatchEulerDiscreteScheduler"]), "scheduler", "'FlowMatchEuler",
    ),
    **{
        f"nested {file}": (write(file, NESTED_JSON), file, "is not JSON")
        for file in (INDEX, "unet/config.json", "defaults.json", "tokenizer/vocab.json", TOKENIZER_CONFIG,
                     "text_encoder/generation_config.json", "scheduler/scheduler_config.json")
    },
    "not text": (write("unet/config.json", b"\xff\xfe"), "unet/config.json", "is not JSON"),
    "not an object": (write("unet/config.json", b"[]"), "unet/config.json", "not a JSON object"),
    "large config": (resize("unet/config.json", 100 << 20), "unet/config.json", "has 104,857,600 bytes, more than"),
    "sizes are text": (edit("text_encoder_2/config.json", hidden_size="x"), "text_encoder_2/config.json", "'x'"),
    "no levels": (edit("vae/config.json", block_out_channels=[]), "vae/config.json", "block_out_channels is []"),
    "groups are text": (edit("unet/config.json", norm_num_groups="x"), "unet/config.json", "norm_num_groups is 'x'"),
    "endless layers": (edit("unet/config.json", layers_per_block=10**9), "unet/config.json", "layers_per_block"),
    "other widths": (edit("vae/config.json", block_out_channels=[16, 16]), "vae", "config.json describes"),
    "other tensors": (reshape_bias, "unet", "the shape of conv_in.bias is [9]"),
    "half of the weights": (resize(UNET_WEIGHTS, 5000), UNET_WEIGHTS, "complete safetensors"),
    "a pointer to weights": (write(UNET_WEIGHTS, b"version https://git-lfs.github.com"), UNET_WEIGHTS, "complete"),
    "huge weights": (resize(UNET_WEIGHTS, 2**36), UNET_WEIGHTS, "bytes, more than"),
    "weights of another name": (rename(UNET_WEIGHTS, "model.safetensors"), "unet", "has no diffusion_pytorch_model"),
    "one shard of two": (rename(UNET_WEIGHTS, FIRST_OF_TWO_SHARDS), "unet", "lacks some of the files"),
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
    assert_refused(folder_copy, plan_of, tmp_path, file, words)


def assert_refused(folder: Path, plan_of: PlanOf, tmp_path: Path, file: str, words: str) -> None:
    """Assert that a build names the file, states the words and a remedy, and writes nothing."""
    with pytest.raises(CheckpointError) as refusal:
        build(plan_of(folder, "refused"), open_writable_store(tmp_path / "store"))
    message = str(refusal.value)
    assert str(folder / file) in message and words in message
    assert refusal.value.remedy and message.endswith(".")
    assert not list((tmp_path / "store").rglob("*"))


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as unix_socket, chdir(path.parent):  # a socket's path is limited to 108 bytes
        unix_socket.bind(path.name)


NOT_REGULAR_FILES: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "socket": make_socket,
    "folder": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "link loop": lambda path: path.symlink_to(path),
    "broken link": lambda path: path.symlink_to(path.parent / "missing"),
}


@pytest.mark.parametrize("file", [INDEX, UNET_WEIGHTS, "tokenizer/merges.txt", "vae/other.json"])
def test_refuses_what_is_not_a_regular_file(file: str, folder_copy: Path, plan_of: PlanOf, tmp_path: Path) -> None:
    path = folder_copy / file
    for kind, make in NOT_REGULAR_FILES.items():
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        make(path)
        words = "missing file" if kind == "broken link" and "json" in file else ""
        assert_refused(folder_copy, plan_of, tmp_path, file, words)


def pipe_for_index(folder: Path) -> None:
    (folder / "refiner" / INDEX).unlink()
    os.mkfifo(folder / "refiner" / INDEX)


@pytest.fixture
def tiny_copy(tmp_path: Path) -> Path:
    """A copy of data/tiny-sdxl, which has a refiner."""
    return Path(shutil.copytree(MODEL_FOLDER, tmp_path / "model"))


@pytest.mark.parametrize(
    "change, file",
    [
        (pipe_for_index, "refiner/model_index.json"),
        (edit("refiner/model_index.json", _class_name="FluxPipeline"), "refiner/model_index.json"),
        (edit("refiner/unet/config.json", _class_name="UNet2DModel"), "refiner/unet/config.json"),
        (write("refiner/vae/config.json", NESTED_JSON), "refiner/vae/config.json"),
        (resize(f"refiner/{UNET_WEIGHTS}", 100), f"refiner/{UNET_WEIGHTS}"),
        (edit("refiner/text_encoder_2/config.json", vocab_size=3), "refiner/text_encoder_2"),
    ],
)
def test_refuses_a_wrong_refiner(change: Change, file: str, tiny_copy: Path) -> None:
    change(tiny_copy)
    with pytest.raises(CheckpointError) as refusal:
        check_model(*find_checkpoints(str(tiny_copy), None))
    assert f"{tiny_copy}/{file}" in str(refusal.value)


@pytest.mark.parametrize("command", [["build", "--precision", "fp32"], ["export-onnx"]], ids=["build", "export-onnx"])
def test_commands_check_first(command: list[str], folder_copy: Path, tmp_path: Path) -> None:
    edit(INDEX, _class_name="FluxPipeline")(folder_copy)
    result = CliRunner().invoke(app, [*command, str(folder_copy), "--store", str(tmp_path / "store")])
    assert isinstance(result.exception, CheckpointError)
    assert "'FluxPipeline'" in str(result.exception)


COMMUNITY = ["lpw_stable_diffusion_xl", "SDXLLongPromptWeightingPipeline"]
ACCEPTED: dict[str, Change] = {
    "pipeline for images": edit(INDEX, _class_name="StableDiffusionXLImg2ImgPipeline"),
    "pipeline for ControlNets": edit(INDEX, _class_name="StableDiffusionXLControlNetPipeline"),
    "community pipeline": edit(INDEX, _class_name=COMMUNITY),
    "old configs without a class": drop_class_names,
    "fast tokenizer": edit(INDEX, tokenizer=["transformers", "CLIPTokenizerFast"]),
    "incomplete fp32 weights beside fp16": add_incomplete_fp32_weights,
    "a pipe that is not read": lambda folder: os.mkfifo(folder / "unet" / "README.md"),
    "links to folders": link_unet,
    "swish, which is silu": edit("unet/config.json", act_fn="swish"),
    "entries of an averaged network": edit("unet/config.json", decay=0.9999, use_ema_warmup=False),
    "entries of text generation": edit("text_encoder/config.json", num_beams=1, top_k=50, torchscript=False),
    "an unknown entry of null": edit("unet/config.json", unknown_entry=None),
    "no entry that has a default": lambda folder: drop_json_key(folder / "unet/config.json", "center_input_sample"),
}


def test_accepts_other_folders(toy_folder: Path, tmp_path: Path) -> None:
    for case, change in ACCEPTED.items():
        folder = Path(shutil.copytree(toy_folder, tmp_path / case / "model"))
        change(folder)
        check_model(Checkpoint(folder), None)
