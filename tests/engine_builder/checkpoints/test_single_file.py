"""Files in place of folders, and files of other names: the refusal says what the file is, and how it can be built."""

import ast
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine_builder.checkpoints.find import find_checkpoints
from engine_builder.checkpoints.folder import Checkpoint, CheckpointError, weight_files
from tests.support.repository import MODEL_FOLDER

UNET = "model.diffusion_model.input_blocks.0.0.weight"
XL = {UNET: (8, 4, 3, 3), "conditioner.embedders.1.model.text_projection": (4, 4)}
FILES: dict[str, dict[str, tuple[int, ...]]] = {
    "sdxl": XL,
    "vpred": XL | {"v_pred": (0,), "ztsnr": (0,)},
    "inpaint": XL | {UNET: (8, 9, 3, 3)},
    "sd": {UNET: (8, 4, 3, 3), "cond_stage_model.transformer.text_model.final_layer_norm.weight": (4,)},
    "vae": {"decoder.conv_out.weight": (3, 8, 3, 3), "encoder.conv_in.weight": (8, 3, 3, 3)},
    "lora": {"lora_unet_down_blocks_0.lora_down.weight": (4, 4)},
}


def write(folder: Path, name: str) -> Path:
    path = folder / f"{name}.safetensors"
    save_file({key: torch.zeros(shape) for key, shape in FILES[name].items()}, path)
    return path


def command_of(remedy: str) -> tuple[str, str]:
    """Return the class and the keyword arguments of the conversion in a remedy, which must be a command."""
    command = re.search(r"\.venv/bin/python -c '[^']*'", remedy)
    assert command is not None, remedy
    imported, loaded = ast.parse(shlex.split(command[0])[2]).body
    assert isinstance(imported, ast.ImportFrom) and isinstance(loaded, ast.Expr)
    return imported.names[0].name, ast.unparse(loaded)


def test_single_file_checkpoint_is_named_as_such(tmp_path: Path) -> None:
    for name, kind in {
        "sdxl": "StableDiffusionXLPipeline",
        "vpred": "StableDiffusionXLPipeline",
        "inpaint": "StableDiffusionXLInpaintPipeline",
        "sd": "StableDiffusionPipeline",
    }.items():
        (tmp_path / name).mkdir()
        path = write(tmp_path / name, name)
        for model in (path, path.parent):  # the file, or its folder
            with pytest.raises(CheckpointError) as refused:
                find_checkpoints(str(model), None)
            assert f"{path} is a single-file checkpoint" in str(refused.value)
            class_name, call = command_of(refused.value.remedy)
            assert class_name == kind and f"from_single_file('{path}').save_pretrained('FOLDER')" in call
            marks = '"prediction_type": "v_prediction" and "rescale_betas_zero_snr": true in FOLDER/scheduler'
            assert (marks in refused.value.remedy) == (name == "vpred")


def test_pickled_checkpoint_is_refused_unopened(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    path.write_bytes(b"\x80\x02pickled")
    with pytest.raises(CheckpointError, match=r"model.ckpt may hold a pickle.*not opened.*the \.safetensors file"):
        find_checkpoints(str(path), None)


def test_single_file_vae_is_named_as_such(tmp_path: Path) -> None:
    """Converted with the model's own config: from the file alone, diffusers takes that of Stable Diffusion 1."""
    for name in ("vae", "sdxl"):
        path = write(tmp_path, name)
        with pytest.raises(CheckpointError, match=rf"{path} is a single file, and --vae takes the folder") as refused:
            find_checkpoints(str(MODEL_FOLDER), None, vae=str(path))
        class_name, call = command_of(refused.value.remedy)
        assert class_name == "AutoencoderKL" and f"config='{MODEL_FOLDER}', subfolder='vae'" in call


def test_other_files_are_named_as_such(tmp_path: Path) -> None:
    unet = MODEL_FOLDER / "unet" / "diffusion_pytorch_model.safetensors"
    for path, words in (
        (write(tmp_path, "vae"), "is not a whole model: its tensors are decoder"),
        (write(tmp_path, "lora"), "is a LoRA adapter. Add it"),
        (unet, rf"Name the folder {unet.parent}\.$"),
    ):
        with pytest.raises(CheckpointError, match=words):
            find_checkpoints(str(path), None)


def test_weights_of_another_name_can_be_renamed(tmp_path: Path) -> None:
    right = "diffusion_pytorch_model.safetensors"
    names: tuple[str, ...]
    for number, (names, remedy) in enumerate(
        (
            (("model.safetensors",), f"Rename model.safetensors to {right}."),
            (("a.safetensors", "b.safetensors"), f"Rename the file of this network to {right}."),
            (("diffusion_pytorch_model.bin",), "Load the model in diffusers and write it with save_pretrained"),
            ((), "Download the model again, completely."),
        )
    ):
        folder = tmp_path / f"{number}" / "unet"
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).touch()
        with pytest.raises(CheckpointError) as refused:
            weight_files(Checkpoint(folder.parent), "unet")
        assert remedy in refused.value.remedy
        if "Rename" in remedy:
            (folder / names[0]).rename(folder / right)
            assert weight_files(Checkpoint(folder.parent), "unet")


def test_damaged_config_can_be_corrected(tmp_path: Path) -> None:
    shutil.copytree(MODEL_FOLDER / "scheduler", tmp_path / "scheduler")
    for text, words in {
        '{"steps": 4,}': "is not JSON: .* line 1 .*Correct the file, or download the model again.",
        "[]": "is not a JSON object. Correct the file",
    }.items():
        (tmp_path / "scheduler" / "scheduler_config.json").write_text(text)
        with pytest.raises(CheckpointError, match=words):
            Checkpoint(tmp_path).config("scheduler", "scheduler_config.json")
