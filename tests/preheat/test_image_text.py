"""The texts that programs write into their images, as requests."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from typer.testing import CliRunner

from preheat.image_text import BadImageText, read_request
from preheat.main import app

A1111 = """score_9, (red circle:1.2) <lora:style:0.8>, [clouds:sun:0.5]
second line
Negative prompt: worst quality,
blurry
Steps: 25, Sampler: DPM++ 2M, Schedule type: Karras, CFG scale: 6.5, Seed: 123, Size: 832x1216, Model: pony, \
Model hash: 67ab2fd8ec, Clip skip: 2, Denoising strength: 0.4, Version: v1.10.1"""
EXPECTED = {
    "prompt": "score_9, (red circle:1.2) , [clouds:sun:0.5]\nsecond line", "prompt_syntax": "weighted",
    "negative_prompt": "worst quality,\nblurry", "loras": [{"name": "style", "scale": 0.8}], "num_inference_steps": 25,
    "guidance_scale": 6.5, "seed": 123, "width": 832, "height": 1216, "scheduler": "DPM++ 2M Karras",
}  # fmt: skip
COMFYUI: dict[str, Any] = {
    "3": {"class_type": "KSampler", "inputs": {
        "seed": 7, "steps": 28, "cfg": 5.0, "sampler_name": "euler_ancestral", "scheduler": "normal", "denoise": 1.0,
        "model": ["10", 0], "positive": ["6", 0], "negative": ["7", 0], "latent_image": ["5", 0]}},
    "4": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "noob.safetensors"}},
    "5": {"class_type": "EmptyLatentImage", "inputs": {"width": 1024, "height": 768, "batch_size": 1}},
    "6": {"class_type": "CLIPTextEncode", "inputs": {"text": "a red circle", "clip": ["10", 1]}},
    "7": {"class_type": "CLIPTextEncode", "inputs": {"text": "blurry", "clip": ["10", 1]}},
    "10": {"class_type": "LoraLoader", "inputs": {
        "lora_name": "folder/style.safetensors", "strength_model": 0.5, "strength_clip": 1.0, "model": ["4", 0],
        "clip": ["4", 1]}},
}  # fmt: skip


def png(path: Path, **texts: str) -> Path:
    info = PngInfo()
    for key, text in texts.items():
        info.add_itxt(key, text)
    Image.new("RGB", (8, 8)).save(path, pnginfo=info)
    return path


def test_reads_a1111(tmp_path: Path) -> None:
    fields, notes = read_request(png(tmp_path / "x.png", parameters=A1111))
    assert fields == EXPECTED
    assert [note.split(" ")[0] for note in notes] == ["Text", "Clip", "Not"] and "Denoising strength 0.4" in notes[2]
    exif = Image.Exif()
    exif.get_ifd(0x8769)[0x9286] = b"UNICODE\0" + A1111.encode("utf-16-be")
    for suffix in ("jpg", "webp"):
        Image.new("RGB", (8, 8)).save(tmp_path / f"x.{suffix}", exif=exif.tobytes())
        assert read_request(tmp_path / f"x.{suffix}")[0] == EXPECTED


def test_reads_comfyui(tmp_path: Path) -> None:
    fields, notes = read_request(png(tmp_path / "x.png", prompt=json.dumps(COMFYUI), workflow="{}"))
    assert notes == [] and fields == {
        "prompt": "a red circle", "prompt_syntax": "weighted", "negative_prompt": "blurry", "num_inference_steps": 28,
        "guidance_scale": 5.0, "seed": 7, "width": 1024, "height": 768, "scheduler": "Euler a",
        "loras": [{"name": "style", "scale": 0.5}],
    }  # fmt: skip


def test_notes_what_is_not_served(tmp_path: Path) -> None:
    text = "a cat\nSteps: 20, Sampler: UniPC, CFG scale: 7, Seed: 99999999999, Size: 64x64"
    fields, notes = read_request(png(tmp_path / "x.png", parameters=text))
    assert fields["prompt"] == "a cat" and "scheduler" not in fields and "seed" not in fields
    assert "The sampler UniPC is not served" in notes[0] and "seed 99999999999 is not valid" in notes[1]


def test_command_prints_json_alone(tmp_path: Path) -> None:
    own = {"release": "x/1", "request": {"prompt": "a cat", "seed": 1}}
    result = CliRunner().invoke(app, ["request", str(png(tmp_path / "x.png", preheat=json.dumps(own)))])
    assert json.loads(result.stdout) == own["request"] and "The release is x/1" in result.stderr
    result = CliRunner().invoke(app, ["request", str(png(tmp_path / "x.png", parameters=A1111))])
    assert json.loads(result.stdout) == EXPECTED and "Clip skip 2" in result.stderr


@pytest.mark.parametrize("texts, words", [
    ({}, "has no text of A1111, ComfyUI or Preheat"), ({"prompt": "{"}, "cannot be read"),
    ({"prompt": "[]"}, "cannot be read"), ({"prompt": "{}"}, "its graph has no KSampler"),
    ({"prompt": "[" * 100_000}, "cannot be read"), ({"preheat": "{}"}, "cannot be read"),
    ({"parameters": "a\nSteps: x, Sampler: Euler, CFG scale: 7"}, "cannot be read"),
    ({"parameters": "Steps: 1, Sampler: Euler, CFG scale: 7"}, "states no valid prompt"),
])  # fmt: skip
def test_refuses_other_texts(texts: dict[str, str], words: str, tmp_path: Path) -> None:
    with pytest.raises(BadImageText, match=words):
        read_request(png(tmp_path / "x.png", **texts))


def test_refuses_what_is_no_image(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_text("text")
    for name, words in (
        ("none.png", r"none\.png does not exist\. Check the path"),
        ("x.png", "is not a PNG, JPEG or WebP"),
    ):
        with pytest.raises(BadImageText, match=words):
            read_request(tmp_path / name)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    generator, path = random.Random(0), tmp_path / "x.png"
    for number in range(300):
        original = png(path, parameters=A1111, prompt=json.dumps(COMFYUI)).read_bytes()
        data = bytearray(original[: generator.randint(0, len(original))] if number % 2 else original)
        for _ in range(generator.randint(0, 5)):
            if data:
                data[generator.randrange(len(data))] = generator.randrange(256)
        path.write_bytes(data)
        try:
            assert read_request(path)[0]["prompt"]
        except BadImageText as error:
            assert str(path) in str(error)
