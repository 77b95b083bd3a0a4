"""Describe a file that is given in place of a model folder, and how diffusers converts it."""

from pathlib import Path

from safetensors import SafetensorError, safe_open

from engine_builder.checkpoints.folder import DOWNLOAD_AGAIN, CheckpointError

_FIRST_CONVOLUTION = "model.diffusion_model.input_blocks.0.0.weight"
_INPAINTING_CHANNELS = 9
# Keys without values, by which trainers mark what a UNet was trained for -> entries of scheduler_config.json.
_MARKS = {"v_pred": '"prediction_type": "v_prediction"', "ztsnr": '"rescale_betas_zero_snr": true'}


def refuse_file(path: Path, model: Path | None = None) -> CheckpointError:
    """Return the error for a file in place of a folder. `model`: the model whose VAE the file replaces, if it does."""
    if (path.parent / "config.json").is_file():
        return CheckpointError(f"{path} is a file of a folder in diffusers' layout.", f"Name the folder {path.parent}.")
    shapes = _read_shapes(path)
    if any("lora" in key.lower() for key in shapes):
        return CheckpointError(f"{path} is a LoRA adapter.", "Add it with `preheat add-lora`, or merge it with --lora.")
    if model is not None:
        command = _python("AutoencoderKL", path, f', config="{model}", subfolder="vae"')
        return CheckpointError(
            f"{path} is a single file, and --vae takes the folder of a VAE in diffusers' layout.",
            f"Convert it: {command}",
        )
    if not shapes:
        return _unreadable(path)
    if _FIRST_CONVOLUTION in shapes:
        first, is_sd = shapes.get(_FIRST_CONVOLUTION, ()), any(key.startswith("cond_stage_model.") for key in shapes)
        inpaints = len(first) == 4 and first[1] == _INPAINTING_CHANNELS
        kind = f"StableDiffusion{'' if is_sd else 'XL'}{'Inpaint' if inpaints else ''}Pipeline"
        marks = [entry for key, entry in _MARKS.items() if key in shapes]
        entries = f" Then set {' and '.join(marks)} in FOLDER/scheduler/scheduler_config.json." if marks else ""
        return CheckpointError(
            f"{path} is a single-file checkpoint, and a build reads a folder in diffusers' layout.",
            f"Convert it: {_python(kind, path)}{entries}",
        )
    return CheckpointError(
        f"{path} is not a whole model: its tensors are {', '.join(list(shapes)[:2])} and others.",
        "Name the folder of a model in diffusers' layout. A VAE is given with --vae; a UNet replaces "
        "unet/diffusion_pytorch_model.safetensors in a model's folder.",
    )


def _unreadable(path: Path) -> CheckpointError:
    """Return the error for a file that is not a complete safetensors file."""
    if path.suffix == ".safetensors":
        return CheckpointError(f"{path} is not a complete safetensors file.", DOWNLOAD_AGAIN)
    if path.suffix in (".ckpt", ".pt", ".pth", ".bin"):
        return CheckpointError(
            f"{path} may hold a pickle, which can run code. It was not opened.",
            "Use the .safetensors file of the same model, or a folder in diffusers' layout.",
        )
    return CheckpointError(f"{path} is neither a folder nor a checkpoint.", "Name a model's folder, or a Hub id.")


def _python(kind: str, path: Path, options: str = "") -> str:
    """Return a command that converts a file with a class of diffusers."""
    load = f'{kind}.from_single_file("{path}"{options})'
    return f".venv/bin/python -c 'from diffusers import {kind}; {load}.save_pretrained(\"FOLDER\")'"


def _read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a safetensors file's tensors by name; empty for a file of another format."""
    try:
        with safe_open(path, framework="pt") as file:
            return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}
    except (OSError, SafetensorError):
        return {}
