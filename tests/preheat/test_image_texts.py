"""The texts that programs write into their images, as requests."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from typer.testing import CliRunner

from preheat.image_texts.read import BadImageText, read_request
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
        "loras": [{"name": "style", "scale": {"unet": 0.5, "text_encoder": 1.0, "text_encoder_2": 1.0}}],
    }  # fmt: skip


def changed(**nodes: dict[str, Any]) -> str:
    """Return COMFYUI with other inputs or classes of nodes, whose keys have no leading "n"."""
    graph: dict[str, Any] = json.loads(json.dumps(COMFYUI))
    for key, inputs in nodes.items():
        node = graph.setdefault(key.removeprefix("n"), {"inputs": {}})
        node["class_type"] = inputs.pop("class_type", node.get("class_type"))
        node["inputs"] |= inputs
    return json.dumps(graph)


CONTROLNET = {"class_type": "ControlNetApplyAdvanced", "positive": ["6", 0], "negative": ["7", 0], "image": ["12", 0]}
OTHER_GRAPHS = (
    # nodes; fields that differ from COMFYUI; the words of the notes
    ({"n3": {"positive": ["11", 0], "negative": ["11", 1]}, "n11": CONTROLNET, "n12": {"class_type": "LoadImage"}},
     {}, ("Not translated: ControlNetApplyAdvanced, LoadImage",)),
    ({"n3": {"negative": ["11", 0]}, "n11": {"class_type": "ConditioningZeroOut", "conditioning": ["6", 0]}},
     {"negative_prompt": None}, ()),
    ({"n3": {"seed": ["11", 0]}, "n11": {"class_type": "Seed (rgthree)", "seed": 9}}, {"seed": 9}, ()),
    ({"n3": {"seed": ["11", 0]}, "n11": {"class_type": "Random", "least": 1, "most": 9}}, {"seed": None},
     ("seed, which another node computes", "Random")),
    ({"n3": {"class_type": "KSamplerAdvanced", "end_at_step": 20}}, {}, ("end_at_step 20",)),
    ({"n3": {"class_type": "KSamplerAdvanced", "start_at_step": 0, "end_at_step": 10000, "add_noise": "enable"}},
     {}, ()),
    ({"n6": {"text": "a [small] \\[red\\] circle <lora:z:1>"}},
     {"prompt": "a \\[small\\] \\[red\\] circle <lora:z:1>"}, ()),
    ({"n6": {"text": ["11", 0]}, "n11": {"class_type": "PrimitiveString", "value": "a cat"}}, {"prompt": "a cat"}, ()),
    ({"n6": {"class_type": "CLIPTextEncodeSDXL", "text_g": "a red circle", "text_l": "x"}}, {},
     ("'x', a text for one",)),
    ({"n5": {"batch_size": 4}}, {}, ("batch_size 4",)),
    ({"n3": {"latent_image": ["11", 0]}, "n11": {"class_type": "VAEEncode", "pixels": ["12", 0]},
      "n12": {"class_type": "LoadImage"}}, {"width": None, "height": None}, ("VAEEncode, LoadImage",)),
    ({"n10": {"class_type": "LoraStack"}}, {"loras": None}, ("LoraStack",)),
    ({"n10": {"class_type": "LoraLoaderModelOnly"}},
     {"loras": [{"name": "style", "scale": {"unet": 0.5, "text_encoder": 0, "text_encoder_2": 0}}]}, ()),
    ({"n10": {"strength_clip": 0.5}}, {"loras": [{"name": "style", "scale": 0.5}]}, ()),
    ({"n10": {"strength_model": ["11", 0]}, "n11": {"class_type": "Random"}}, {"loras": None}, ("LoraLoader, Random",)),
    ({"n10": {"lora_name": "SDXL\\ink.safetensors"}},
     {"loras": [{"name": "ink", "scale": {"unet": 0.5, "text_encoder": 1.0, "text_encoder_2": 1.0}}]}, ()),
    ({"n10": {"lora_name": ["11", 0]}, "n11": {"class_type": "Random"}}, {"loras": None}, ("LoraLoader, Random",)),
    ({"n10": {"strength_model": True}}, {"loras": None}, ("LoraLoader",)),
    ({"n6": {"text": ["11", 0]}, "n11": {"class_type": "StringReplace", "string": "a cat", "find": "cat"}}, None, ()),
    ({"n3": {"steps": ["11", 0]}, "n11": {"class_type": "IntMath", "value": 5, "other": 7}},
     {"num_inference_steps": None}, ("steps, which another node computes", "IntMath")),
    ({"n3": {"positive": ["11", 0], "latent_image": ["12", 0]}, "n11": {"class_type": "Reroute", "": ["6", 0]},
      "n12": {"class_type": "Reroute", "": ["5", 0]}}, {}, ()),
    ({"n3": {"positive": ["11", 0], "negative": ["11", 1]},
      "n11": {"class_type": "Efficient Loader", "positive": "a cat", "negative": "x"}},
     {"prompt": "a cat", "negative_prompt": "x"}, ("Efficient Loader",)),
    # a positive with a ControlNet, and the same without text as the negative
    ({"n3": {"positive": ["11", 0], "negative": ["13", 0]}, "n13": {"class_type": "ConditioningZeroOut",
      "conditioning": ["11", 0]}, "n11": {"class_type": "ControlNetApply", "conditioning": ["6", 0]}},
     {"negative_prompt": None}, ("Not translated: ControlNetApply",)),
    # what is before conditioning without text changes nothing
    ({"n3": {"negative": ["13", 0]}, "n13": {"class_type": "ConditioningZeroOut", "conditioning": ["14", 0]},
      "n14": {"class_type": "ControlNetApply", "conditioning": ["6", 0]}}, {"negative_prompt": None}, ()),
    ({"n3": {"positive": ["3", 0], "negative": ["99", 0]}}, None, ()),
    # the second pass comes first in the file
    ({"n1": {**COMFYUI["3"]["inputs"], "class_type": "KSampler", "seed": 8, "latent_image": ["2", 0]},
      "n2": {"class_type": "LatentUpscale", "samples": ["3", 0], "width": 2048, "height": 2048}},
     {}, ("2 samplers. Only the first pass is translated: node 3",)),
)  # fmt: skip


@pytest.mark.parametrize("nodes, differing, words", OTHER_GRAPHS)
def test_other_graphs_are_translated_or_noted(
    nodes: dict[str, Any], differing: dict[str, Any] | None, words: tuple[str, ...], tmp_path: Path
) -> None:
    graph = json.loads(changed(**json.loads(json.dumps(nodes))))
    in_order = json.dumps(dict(sorted(graph.items(), key=lambda node: int(node[0]))))
    if differing is None:
        with pytest.raises(BadImageText, match="states no valid prompt"):
            read_request(png(tmp_path / "x.png", prompt=in_order))
        return
    expected = {**read_request(png(tmp_path / "x.png", prompt=json.dumps(COMFYUI)))[0], **differing}
    fields, notes = read_request(png(tmp_path / "x.png", prompt=in_order))
    assert fields == {name: value for name, value in expected.items() if value is not None}
    assert len(notes) == len(words) and all(word in note for word, note in zip(words, notes, strict=True))


@pytest.mark.parametrize("prompt, loras, words", [
    ("a <lora:x>", [{"name": "x", "scale": 1.0}], ()),
    ("a <lora:x:0.5:0.8>", [{"name": "x", "scale": {"unet": 0.8, "text_encoder": 0.5, "text_encoder_2": 0.5}}], ()),
    ("a <lora:x:te=0.5:unet=0.8>",
     [{"name": "x", "scale": {"unet": 0.8, "text_encoder": 0.5, "text_encoder_2": 0.5}}], ()),
    ("a <lora:x:1:lbw=OUTALL>", [{"name": "x", "scale": 1.0}], ("for the adapter x: lbw=OUTALL",)),
    ("a <lora:x:1> <lora:x:0.5>", [{"name": "x", "scale": 1.0}], ("x is there twice",)),
    ("a <lora:x:15>", None, ("loras", "not valid in a request")), ("a <lora:x:strong>", None, ("x is left out",)),
])  # fmt: skip
def test_loras_of_a_prompt(prompt: str, loras: Any, words: tuple[str, ...], tmp_path: Path) -> None:
    text = f"{prompt}\nSteps: 20, Sampler: Euler, CFG scale: 7, Seed: 1"
    fields, notes = read_request(png(tmp_path / "x.png", parameters=text))
    assert fields["prompt"] == "a" and fields.get("loras") == loras and all(word in " ".join(notes) for word in words)
    assert bool(notes) == bool(words)


def test_lines_of_a1111(tmp_path: Path) -> None:
    settings = "Steps: 20, Sampler: Euler, CFG scale: 7, Seed: 1"
    text = f'a sign with "Negative prompt: x"\n{settings}\nTemplate: {{a|b}}, (hat:1.2), (red dress:1.3), (c:1)'
    fields, notes = read_request(png(tmp_path / "x.png", parameters=text))
    assert fields["prompt"] == 'a sign with "Negative prompt: x"' and "negative_prompt" not in fields
    assert fields["num_inference_steps"] == 20 and "Template: {a|b}, (hat" in notes[0]
    for alone in ("(a:1.2), (b:1.3), (c:1.1),\ncastle", "castle,\n(a:1.2), (b:1.3), (c:1.1)"):
        assert read_request(png(tmp_path / "x.png", parameters=alone))[0]["prompt"] == alone
    exif = Image.Exif()
    for prompt in ("a café", "猫"):
        exif.get_ifd(0x8769)[0x9286] = b"UNICODE\0" + text.replace("a sign", prompt).encode("utf-16-be")
        Image.new("RGB", (8, 8)).save(tmp_path / "x.jpg", exif=exif.tobytes())
        assert read_request(tmp_path / "x.jpg")[0]["prompt"].startswith(prompt)


def test_files_of_a_request_of_preheat_are_digests(tmp_path: Path) -> None:
    request = {"prompt": "a", "image": "sha256:ab", "masks": [{"image": "sha256:cd"}]}
    own = {"release": "x/1", "request": request}
    fields, notes = read_request(png(tmp_path / "x.png", preheat=json.dumps(own)))
    assert fields == request and "digests: image, masks.0.image" in notes[1]


def test_notes_what_is_not_served(tmp_path: Path) -> None:
    text = "a cat\nSteps: 20, Sampler: UniPC, CFG scale: 7, Seed: 99999999999, Size: 64x64"
    fields, notes = read_request(png(tmp_path / "x.png", parameters=text))
    assert fields["prompt"] == "a cat" and "scheduler" not in fields and "seed" not in fields
    fields, more = read_request(png(tmp_path / "x.png", parameters=text.replace("20", "20.5")))
    assert fields["prompt"] == "a cat" and more[0] == "Steps 20.5 is not a number."
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
    ({"preheat": '{"release": 3, "request": "x"}'}, "no request with a prompt"), ({"preheat": "[]"}, "cannot be read"),
    ({"parameters": f"{'a' * 4001}\nSteps: 1, Sampler: Euler, CFG scale: 7"}, "states no valid prompt .*4,?000"),
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
