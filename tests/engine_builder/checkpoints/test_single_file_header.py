"""The header of a single file: which family it is of, or what it is in place of a checkpoint."""

import inspect
import resource
import struct
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_builder.checkpoints.folder import CheckpointError
from engine_builder.checkpoints.single_file_families import FAMILIES
from engine_builder.checkpoints.single_file_header import read_single_file
from engine_builder.networks.quiet import quiet_libraries
from tests.support.published_configs import PUBLISHED
from tests.support.single_files import full_size, write_header

UNET, VAE = "model.diffusion_model.input_blocks.0.0.weight", "first_stage_model.decoder.conv_in.weight"
CLIP, BIG = "conditioner.embedders.0.transformer.text_model.x.weight", "conditioner.embedders.1.model.text_projection"
SDXL = {UNET: (320, 4, 3, 3), "model.diffusion_model.label_emb.0.0.weight": (8, 8), VAE: (4, 4), CLIP: (4,), BIG: (4,)}
SD = {UNET: (320, 4, 3, 3), VAE: (4, 4), "cond_stage_model.transformer.text_model.x.weight": (4,)}
SD2 = {UNET: (320, 4, 3, 3), VAE: (4, 4), "cond_stage_model.model.text_projection": (4,)}
PUBLISHED_ENCODER_H = PUBLISHED["SDXL's second text encoder"][2] | {
    "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24,
    "projection_dim": 1024,
}  # fmt: skip
# Family -> the family of its names, and the published configs of its networks.
FULL_SIZE: dict[str, tuple[str, dict[str, Any]]] = {
    "sdxl": ("sdxl", {"unet": "SDXL", "vae": "SDXL's VAE", "text_encoder": "SDXL's first text encoder",
                      "text_encoder_2": "SDXL's second text encoder"}),
    "sdxl-inpainting": ("sdxl", {"unet": "SDXL for inpainting", "vae": "SDXL's VAE",
                                 "text_encoder": "SDXL's first text encoder",
                                 "text_encoder_2": "SDXL's second text encoder"}),
    "sdxl-refiner": ("sdxl-refiner", {"unet": "SDXL's refiner", "vae": "SDXL's VAE",
                                      "text_encoder_2": "SDXL's second text encoder"}),
    "sd-1.5": ("sd-1.5", {"unet": "1.5", "vae": "1.5's VAE", "text_encoder": "SDXL's first text encoder"}),
    "sd-2.1": ("sd-2.1", {"unet": "2.1", "vae": "1.5's VAE", "text_encoder": None}),
}  # fmt: skip


def make(name: str | None) -> Any:
    """Make the network of a published config on the current device."""
    import diffusers
    import transformers

    kind, _, entries = PUBLISHED[name] if name else ("CLIPTextModelWithProjection", "sd", PUBLISHED_ENCODER_H)
    entries = {key: value for key, value in entries.items() if not key.startswith("_")}
    if kind.startswith("CLIP"):
        return getattr(transformers, kind)(transformers.CLIPTextConfig(**entries))
    return getattr(diffusers, kind).from_config(entries)


@cache
def published_tensors(name: str) -> dict[str, Any]:
    family, configs = FULL_SIZE[name]
    makers: dict[str, Callable[[], Any]] = {part: partial(make, config) for part, config in configs.items()}
    with quiet_libraries():
        return full_size(makers, family)


def write(folder: Path, shapes: dict[str, tuple[int, ...]], dtype: str = "F16", **metadata: str) -> Path:
    return write_header(folder / "x.safetensors", {name: (dtype, shape) for name, shape in shapes.items()}, **metadata)


def _averaged(key: str) -> str:
    """Return the name of a UNet's averaged weight, in which trainers leave out the dots."""
    prefix = "model.diffusion_model."
    return key if not key.startswith(prefix) else f"model_ema.diffusion_model{key[len(prefix) :].replace('.', '')}"


@pytest.mark.parametrize("name", FULL_SIZE)
def test_recognizes_each_family_at_full_size(name: str, tmp_path: Path) -> None:
    tensors = published_tensors(name)
    found = read_single_file(write_header(tmp_path / "x.safetensors", tensors))
    assert found.family is FAMILIES[name] and not found.missing
    assert set(found.networks) == set(FULL_SIZE[name][1])
    if name == "sdxl":
        edm = tensors | {"edm_mean": ("F32", (1, 4, 1, 1)), "edm_std": ("F32", (1, 4, 1, 1))}
        found = read_single_file(write_header(tmp_path / "x.safetensors", edm))
        assert found.family is FAMILIES["playground-v2.5"]
    averaged = {_averaged(key): info for key, info in tensors.items()}
    found = read_single_file(write_header(tmp_path / "x.safetensors", averaged | {"model_ema.decay": ("F32", ())}))
    assert found.family is FAMILIES[name] and found.header.names.keys() == tensors.keys() | {"model_ema.decay"}
    wrapped = {f"state_dict.{key}": info for key, info in averaged.items()}
    found = read_single_file(write_header(tmp_path / "x.safetensors", wrapped))
    assert found.family is FAMILIES[name] and found.header.names.keys() == tensors.keys()
    if name in ("sdxl", "sd-2.1"):  # the UNet alone is known by the width of the text that it reads
        alone = {key: info for key, info in tensors.items() if key.startswith("model.")}
        for prefix in ("model.diffusion_model.", ""):
            renamed = {key.replace("model.diffusion_model.", prefix): info for key, info in alone.items()}
            found = read_single_file(write_header(tmp_path / "x.safetensors", renamed))
            assert found.family is FAMILIES[name] and "vae" in found.missing and "text_encoder" in found.missing
            for before in ("", "diffusion_model.", prefix):  # of the marks of v-prediction
                marks = {f"{before}{mark}": ("F32", (0,)) for mark in ("v_pred", "ztsnr")}
                found = read_single_file(write_header(tmp_path / "x.safetensors", renamed | marks))
                assert found.scheduler == {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}
                assert not any("v_pred" in warning for warning in found.warnings)


@pytest.mark.parametrize(
    "keys, metadata, expected",
    [
        ((), {}, {}),
        (("v_pred",), {}, {"prediction_type": "v_prediction"}),
        (("v_pred", "ztsnr"), {}, {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}),
        (("ztsnr",), {}, {"rescale_betas_zero_snr": True}),
        ((), {"modelspec.prediction_type": "v"}, {"prediction_type": "v_prediction"}),
        ((), {"modelspec.prediction_type": "epsilon"}, {}),
        ((), {"modelspec.predict_key": "v"}, {"prediction_type": "v_prediction"}),  # as ComfyUI saves it
        ((), {"modelspec.prediction_type": "v-Prediction"}, {"prediction_type": "v_prediction"}),
        ((), {"ss_v_parameterization": "True"}, {"prediction_type": "v_prediction"}),
        (("model.v_pred",), {}, {"prediction_type": "v_prediction"}),
    ],
)
def test_reads_what_trainers_state(
    keys: tuple[str, ...], metadata: dict[str, str], expected: dict[str, Any], tmp_path: Path
) -> None:
    found = read_single_file(write(tmp_path, SDXL | dict.fromkeys(keys, (0,)), **metadata))
    assert found.scheduler == expected and found.warnings == ()


def test_warns_of_statements_that_are_unclear(tmp_path: Path) -> None:
    contradiction = write(tmp_path, SDXL | {"v_pred": (0,)}, **{"modelspec.prediction_type": "epsilon"})
    found = read_single_file(contradiction)
    assert found.scheduler == {"prediction_type": "v_prediction"} and "The key is used" in found.warnings[0]
    found = read_single_file(write(tmp_path, SDXL, **{"modelspec.prediction_type": "flow"}))
    assert found.scheduler == {} and "prediction_type 'flow', which is unknown and was not used" in found.warnings[0]
    found = read_single_file(write(tmp_path, SD2, **{"modelspec.predict_key": "epsilon"}))
    assert found.scheduler == {"prediction_type": "epsilon"} and found.warnings == ()
    found = read_single_file(write(tmp_path, SD2))
    assert found.scheduler == {} and "does not state what its UNet predicts" in found.warnings[0]
    stated = read_single_file(write(tmp_path, SD2, **{"modelspec.architecture": "stable-diffusion-v2-512"}))
    assert stated.scheduler == {"prediction_type": "epsilon"} and stated.warnings == ()
    found = read_single_file(write(tmp_path, SD | {"something.else": (4,)}))
    assert "has the tensors something.else, which no network" in found.warnings[0]


def test_reads_wrapped_and_old_names(tmp_path: Path) -> None:
    found = read_single_file(write(tmp_path, {f"state_dict.{name}": shape for name, shape in SDXL.items()}))
    assert found.family is FAMILIES["sdxl"] and not found.missing
    old = {name.replace("text_model.x", "encoder.layers.0.x"): shape for name, shape in SD.items()}
    found = read_single_file(write(tmp_path, old))
    assert (
        not found.missing and "cond_stage_model.transformer.text_model.encoder.layers.0.x.weight" in found.header.names
    )


@pytest.mark.parametrize(
    "shapes, words",
    [
        ({"lora_unet_down_blocks_0.lora_down.weight": (4, 4)}, "is a LoRA adapter"),
        ({"unet.up_blocks.0.attentions.0.to_q.lora_A.weight": (4, 4)}, "is a LoRA adapter"),
        (SDXL | {"lora_unet_x.lora_up.weight": (4, 4)}, "is a LoRA adapter"),
        ({"emb_params": (2, 768)}, "is an embedding of textual inversion"),
        ({"clip_l": (2, 768), "clip_g": (2, 1280)}, "is an embedding of textual inversion"),
        ({"control_model.input_blocks.0.0.weight": (4, 4)}, "is a ControlNet"),
        ({"controlnet_cond_embedding.conv_in.weight": (4, 4), "down_blocks.0.resnets.0.x": (4,)}, "is a ControlNet"),
        ({"lora_controlnet": (0,), "input_blocks.0.0.up": (4, 4)}, "is a ControlNet"),
        ({"image_proj.proj.weight": (4, 4), "ip_adapter.1.to_k_ip.weight": (4, 4)}, "is an IP-Adapter"),
        ({"model.diffusion_model.joint_blocks.0.x_block.attn.qkv.weight": (4, 4)}, "is a Stable Diffusion 3"),
        ({"double_blocks.0.img_attn.norm.key_norm.scale": (4,)}, "is a FLUX model"),
        ({"transformer_blocks.0.attn.to_q.weight": (4, 4)}, "is a diffusion transformer"),
        ({"model.0.weight": (64, 3, 3, 3), "model.1.sub.0.RDB1.conv1.0.weight": (4, 4)}, "is an upscaler"),
        ({"conv_first.weight": (64, 3, 3, 3), "body.0.rdb1.conv1.weight": (4, 4)}, "is an upscaler"),
        ({"decoder.conv_in.weight": (4, 4), "encoder.conv_in.weight": (4, 4)}, "is a VAE alone.*with --vae"),
        ({VAE: (4, 4)}, "is a VAE alone"),
        ({"down_blocks.0.resnets.0.conv1.weight": (4, 4)}, "is the UNet of a model in diffusers' names"),
        ({"text_model.encoder.layers.0.layer_norm1.weight": (4,)}, "is a text encoder alone"),
        ({"cond_stage_model.model.text_projection": (4, 4)}, "is a text encoder alone"),
        ({"down_blocks.0.motion_modules.0.x": (4,)}, "is a motion module"),
        (SDXL | {"edm_vpred.sigma_max": ()}, "is a CosXL"),
        (SDXL | {"scaled_fp8": (0,)}, "is a model with quantized weights"),
        (SD | {UNET: (320, 7, 3, 3), "model.diffusion_model.label_emb.weight": (4, 4)}, "x4 upscaler"),
        (SDXL | {UNET: (320, 8, 3, 3)}, "a model that is not supported: its UNet takes 8 channels"),
        ({UNET: (320, 4, 3, 3), "conditioner.embedders.0.model.ln_final.bias": (4,)}, "is not supported.*no sizes"),
        ({"a.b": (4,), "c.d": (4,), "e": (1,)}, "is not a whole model: it has the tensors a.b, c.d and 1 others"),
        ({}, "is not a whole model: it has no tensors"),
    ],
)
def test_refuses_other_files_by_what_they_are(shapes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words) as refused:
        read_single_file(write(tmp_path, shapes))
    assert refused.value.remedy


@pytest.mark.parametrize(
    "data, words",
    [
        (b"PK\x03\x04archive/data.pkl", "a zip file or a pickle, which can run code; it was not opened"),
        (b"\x80\x02}q\x00.", "is a pickle, which can run code"),
        (b"GGUF\x03\x00\x00\x00", "is a GGUF file"),
        (b"<!DOCTYPE html><html>", "is a web page. .*login"),
        (b'{"error":"Unauthorized"}', "is a JSON text"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS"),
        (b"", "is not a complete safetensors file"),
        (struct.pack("<Q", 2**62) + b"{}", "is not a complete safetensors file"),
    ],
)
@pytest.mark.parametrize("suffix", (".safetensors", ".ckpt"))
def test_refuses_other_formats_by_name(data: bytes, words: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_bytes(data)
    is_named = suffix == ".safetensors" or data[:1] not in (b"", b"\0")
    with pytest.raises(CheckpointError, match=words if is_named else "may hold a pickle"):
        read_single_file(path)


def test_shipped_configs_are_those_of_the_models() -> None:
    """A network of a shipped config has the entries of the published one, and the libraries' defaults."""
    for name, (_, configs) in FULL_SIZE.items():
        files = FAMILIES[name].files()
        for part, config in configs.items():
            kind = PUBLISHED[config][0] if config else "CLIPTextModel"
            published = _complete(kind, PUBLISHED[config][2] if config else PUBLISHED_ENCODER_H)
            # 2.1 uses 23 of its 24 layers, and no projection. The VAE of 1.5 has no entries that are newer.
            unlike = {None: {"num_hidden_layers", "projection_dim"}, "1.5's VAE": {"sample_size", "force_upcast"}}
            differing = unlike.get(config, set()) | ({"sample_size"} if name == "sd-2.1" and part == "vae" else set())
            shipped = _complete(kind, files[f"{part}/config.json"])
            changed = {key for key in published | shipped if published.get(key) != shipped.get(key)}
            assert changed == differing, (name, part)


def _complete(kind: str, entries: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a config with the defaults of the library, without null for false and tuples for lists."""
    import diffusers
    import transformers

    if kind.startswith("CLIP"):
        found = transformers.CLIPTextConfig(**entries).to_dict()
        ignored = {"architectures", "dropout", "dtype", "torch_dtype", "transformers_version"}
        return {key: value for key, value in found.items() if key not in ignored}
    parameters = inspect.signature(getattr(diffusers, kind).__init__).parameters
    values = {key: entries.get(key, one.default) for key, one in parameters.items() if key != "self"}
    return {
        key: list(value) if isinstance(value, tuple) else (value or None if value is False else value)
        for key, value in values.items()
    }


def test_thousand_damaged_headers_are_refused_quickly(tmp_path: Path) -> None:
    """Headers with changed bytes, cut files and mixed tensors: read as a family, or refused within two seconds."""
    base = published_tensors("sdxl")
    small = dict(list(base.items())[:300]) | {name: ("F16", shape) for name, shape in SDXL.items()}
    mixed = [
        {"lora_x.lora_up.weight": (4, 4)},
        {"clip_l": (2, 768)},
        {"control_model.x": (4,)},
        {"double_blocks.0.x": ()},
    ]
    path = tmp_path / "x.safetensors"
    generator = torch.Generator().manual_seed(0)

    def draw(most: int) -> int:
        return int(torch.randint(0, most, (), generator=generator))

    refused = 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(1000):
        kept = {name: info for name, info in small.items() if draw(10) or name == UNET}
        if number % 4 == 0:
            kept |= {name: ("F16", shape) for name, shape in mixed[draw(len(mixed))].items()}
        if number % 5 == 0:
            kept = dict(list(kept.items())[: draw(len(kept)) + 1])
        write_header(path, kept)
        with path.open("rb") as file:
            data = bytearray(file.read(200_000))
        if number % 2:
            for _ in range(draw(8) + 1):
                data[draw(min(len(data), 8 + 30_000))] = draw(256)
        if number % 3:
            data = data[: draw(len(data)) + 1] if number % 3 == 1 else data
            path.write_bytes(data)
        elif number % 2:
            with path.open("r+b") as file:
                file.write(data)
        started = time.perf_counter()
        try:
            assert read_single_file(path).family.title
        except CheckpointError as error:
            refused += 1
            assert str(path) in str(error) and error.remedy and len(str(error)) < 1500
        assert time.perf_counter() - started < 2
    assert refused > 500
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 300_000  # KiB
