"""Single files: converted to the folder that they came from, once, or refused with a fix that helps."""

import hashlib
import json
import random
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from engine_builder.building.eager_model import load_eager_model, resolve_for
from engine_builder.checkpoints.find import find_checkpoints
from engine_builder.checkpoints.folder import Checkpoint, CheckpointError, weight_files
from engine_builder.checkpoints.release_settings import read_noise_schedules, read_tokenizers
from engine_builder.checkpoints.scheduler_config import read_scheduler
from engine_builder.checkpoints.single_file import plan_conversion
from engine_builder.checkpoints.single_file_families import FAMILIES
from engine_builder.checkpoints.single_file_header import read_header
from engine_builder.networks.network import load_network
from engine_builder.networks.network_check import check_configs
from engine_builder.networks.quiet import quiet_libraries
from engine_builder.stores.store import WritableStore
from model.denoising.noise_schedule import NoiseSchedule
from model.images.pixels import Pixels
from model.pipeline.params import GenerationParams, Mask
from model.pipeline.text_to_image import generate
from model.request_fields import GenerationRequest
from model.store.manifest_json import split_name
from model.store.precision import FP32
from preheat.commands.build_arguments import default_name, parse_plan
from preheat.console import notify
from tests.engine_builder.checkpoints.test_single_file_header import FULL_SIZE, published_tensors
from tests.support import single_files, toy_sd
from tests.support.images import largest_difference
from tests.support.reference import Reference
from tests.support.repository import MODEL_FOLDER
from tests.support.uncompiled import publish_uncompiled

PROMPT = "a red circle"
FAMILY_NAMES = (
    "sdxl", "sdxl-inpainting", "sdxl-refiner", "playground-v2.5", "sd-1.5", "sd-1.5-inpainting", "sd-2.1"
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse connections: without a folder of configs, diffusers asks the Hub."""

    def refuse(*_: Any) -> None:
        raise AssertionError("a conversion connects to a host")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small model folder of each family."""
    root, tokenizer = tmp_path_factory.mktemp("folders"), MODEL_FOLDER / "tokenizer"
    folders = {
        "sdxl": MODEL_FOLDER,
        "sdxl-inpainting": copy_model(root / "inpaint"),
        "sdxl-refiner": MODEL_FOLDER / "refiner",
        "playground-v2.5": copy_model(root / "playground"),
        "sd-1.5": toy_sd.write(root / "sd15", tokenizer, "1.5"),
        "sd-1.5-inpainting": toy_sd.write(root / "sd15-inpaint", tokenizer, "1.5", channels=9),
        "sd-2.1": toy_sd.write(root / "sd21", tokenizer, "2.1"),
    }
    take_masks(folders["sdxl-inpainting"] / "unet")
    edit(folders["playground-v2.5"] / "scheduler" / "scheduler_config.json", FAMILIES["playground-v2.5"].scheduler)
    edit(folders["sdxl-inpainting"] / "model_index.json", {"_class_name": "StableDiffusionXLInpaintPipeline"})
    edit(folders["sd-1.5-inpainting"] / "model_index.json", {"_class_name": "StableDiffusionInpaintPipeline"})
    return folders


def copy_model(folder: Path) -> Path:
    """Copy the demo model. Its text encoders have different widths, by which diffusers tells them apart in a file."""
    return Path(shutil.copytree(MODEL_FOLDER, folder, ignore=shutil.ignore_patterns("refiner")))


def take_masks(unet: Path) -> None:
    """Give a UNet of 4 channels the 5 channels of a mask and a masked image."""
    weights = single_files.read_weights(unet)
    [path] = unet.glob("*.safetensors")
    first, generator = weights["conv_in.weight"], torch.Generator().manual_seed(0)
    added = torch.randn((len(first), 5, *first.shape[2:]), generator=generator) * first.std()
    save_file(weights | {"conv_in.weight": torch.cat((first, added), 1)}, path, {"format": "pt"})
    edit(unet / "config.json", {"in_channels": 9})


def edit(path: Path, entries: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def write(folder: Path, family: str, path: Path, **options: Any) -> Path:
    extra = {"edm_mean": torch.zeros(1, 4, 1, 1), "edm_std": torch.ones(1, 4, 1, 1)} if family[0] == "p" else {}
    names = {"playground-v2.5": "sdxl"}.get(family, family.removesuffix("-inpainting"))
    return single_files.write(folder, names, path, extra | options.pop("extra", {}), **options)


def convert(path: Path, config: Path, **options: Any) -> Path:
    return find_checkpoints(str(path), None, config=str(config), cache=path.parent / "cache", **options)[0].root


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a model folder, by subfolder and name."""
    return {
        f"{name}.{key.removeprefix('text_model.')}": one
        for name in ("unet", "vae", "text_encoder", "text_encoder_2")
        for key, one in single_files.read_weights(folder / name).items()
    }


def picture(checkpoint: Checkpoint, refiner: Checkpoint | None = None) -> tuple[Pixels, GenerationParams]:
    _, model = load_eager_model(checkpoint, refiner, FP32, "cpu")
    side = max(64, checkpoint.size_step())
    request = GenerationRequest.model_validate(
        {
            "prompt": PROMPT, "width": side, "height": side, "num_inference_steps": 2, "seed": 3, "guidance_scale": 3.0,
            "use_refiner": refiner is not None, "scheduler": read_scheduler(checkpoint).sampler,
        }
    )  # fmt: skip
    params = resolve_for(model, request)
    if checkpoint.unet_widths().extra_channels:
        photo = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
        levels = np.zeros((side, side), np.uint8)
        levels[: side // 2] = 255
        params = replace(params, image=photo, masks=(Mask(levels, PROMPT, None, 1.0),))
    return generate(model, [params])[0][0], params


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_converted_model_is_the_folder_it_came_from(family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = folders[family]
    found = convert(write(folder, family, tmp_path / "x.safetensors"), folder)
    ours, theirs = tensors(found), tensors(folder)
    assert ours.keys() == theirs.keys()
    assert [key for key, one in theirs.items() if not torch.equal(one, ours[key])] == []
    base = Checkpoint(MODEL_FOLDER)
    is_refiner = family == "sdxl-refiner"
    pairs = [(base, Checkpoint(one)) if is_refiner else (Checkpoint(one), None) for one in (folder, found)]
    check_configs(*pairs[1])
    images = [picture(*pair)[0] for pair in pairs]
    assert np.array_equal(*images) and images[0].std() > 1


def test_refiner_may_be_a_file(tmp_path: Path) -> None:
    base = write(MODEL_FOLDER, "sdxl", tmp_path / "base.safetensors")
    refiner = write(MODEL_FOLDER / "refiner", "sdxl-refiner", tmp_path / "refiner.safetensors")
    found = find_checkpoints(str(base), str(refiner), config=str(MODEL_FOLDER), cache=tmp_path / "cache")
    assert found[1] is not None and found[1].root != found[0].root
    check_configs(*found)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_picture_is_that_of_from_single_file(family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """diffusers reads the file with the same configs, and generates the picture with its own pipelines."""
    import diffusers

    folder = folders[family]
    path = write(folder, family, tmp_path / "x.safetensors")
    found, theirs = Checkpoint(convert(path, folder)), tmp_path / "theirs"
    kind = getattr(diffusers, Checkpoint(folder).index["_class_name"])
    options: dict[str, Any] = {"add_watermarker": False} if "XL" in kind.__name__ else {"safety_checker": None}
    is_refiner = family == "sdxl-refiner"
    if is_refiner:
        shutil.copytree(MODEL_FOLDER, theirs, ignore=shutil.ignore_patterns("refiner"))
    with quiet_libraries():
        pipeline = kind.from_single_file(str(path), config=str(folder), local_files_only=True, **options)
        saved = theirs / "refiner" if is_refiner else theirs
        pipeline.save_pretrained(saved)
        # A saved config states the defaults of its class as if they were the model's.
        shutil.copy(folder / "scheduler" / "scheduler_config.json", saved / "scheduler")
        pair = (Checkpoint(MODEL_FOLDER), found) if is_refiner else (found, None)
        ours, params = picture(*pair)
        expected = Reference(theirs).generate(params)
    assert largest_difference(ours, expected) <= 2


@pytest.mark.parametrize("name", FULL_SIZE)
def test_full_size_files_fit_the_shipped_configs(name: str, tmp_path: Path) -> None:
    """The header alone is converted, so that no weights are needed. Damaged networks are named."""
    path, tensors = tmp_path / "x.safetensors", published_tensors(name)
    plan = plan_conversion(single_files.write_header(path, tensors))
    assert plan.copied == {} and {f"{part}/config.json" for part in FULL_SIZE[name][1]} <= plan.files.keys()
    removed, key = dict(tensors), "model.diffusion_model.out.2.weight"
    del removed[key]
    changed = tensors | {key: ("F16", (5, *tensors[key][1][1:]))}
    unread = tensors | {"model.diffusion_model.time_embed.cond_proj.weight": ("F16", (4, 4))}
    many = tensors | {f"model.diffusion_model.input_blocks.{number}.0.x": ("F16", (1,)) for number in range(9)}
    for damaged, words in (
        (removed, "its unet lacks conv_out.weight"),
        (many, "its unet has .* tensors, and its config describes"),  # refused before a conversion of hours
        (changed, "its unet has other shapes in conv_out.weight"),
        (unread, "its unet also has model.diffusion_model.time_embed.cond_proj.weight, which nothing reads"),
    ):
        with pytest.raises(CheckpointError, match=f"is a single-file checkpoint of .*{words}.*--config"):
            plan_conversion(single_files.write_header(path, damaged))


def test_changed_headers_are_refused_without_traceback(folders: dict[str, Path], tmp_path: Path) -> None:
    """Each of the tensors of a small file, removed, of another shape or another type, is missed and named."""
    generator = random.Random(0)
    for family in ("sdxl", "sd-1.5", "sd-2.1"):
        path = write(folders[family], family, tmp_path / "x.safetensors")
        with safe_open(path, framework="pt") as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}
        whole = {key: ("F32", shape) for key, shape in shapes.items()}
        read = [key for key in read_header(path).read if "." in key]
        shapes_of = ((), (0,), (0, 2**62), (1,), (3, 3), (2, 3, 4), (1, 1, 1, 1))
        for key in generator.sample(read, 12):
            others = [shape for shape in shapes_of if shape != shapes[key]]
            for changed in (
                {name: info for name, info in whole.items() if name != key},
                whole | {key: ("F32", generator.choice(others))},
                whole | {key: ("U8", shapes[key])},
                {name.replace(key, f"{key}.x"): info for name, info in whole.items()},
            ):
                single_files.write_header(path, changed)
                with pytest.raises(CheckpointError) as refused:
                    plan_conversion(path, folders[family])
                assert str(path) in str(refused.value) and refused.value.remedy, key


def test_tokenizers_and_noise_of_the_shipped_configs(tmp_path: Path) -> None:
    marks = {"v_pred": ("F32", (0,)), "ztsnr": ("F32", (0,))}
    path = single_files.write_header(tmp_path / "x.safetensors", published_tensors("sdxl") | marks)
    for name, data in plan_conversion(path).files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.family == "sdxl" and checkpoint.unet_widths().context_width == 2048
    pads = {name: tokenizer.settings.pad_token_id for name, tokenizer in read_tokenizers(checkpoint).items()}
    assert pads == {"tokenizer": 49407, "tokenizer_2": 0}
    schedule = read_noise_schedules(checkpoint, None)["base"]
    assert isinstance(schedule, NoiseSchedule)
    assert schedule.prediction_type == "v_prediction" and schedule.rescale_betas_zero_snr


@pytest.mark.parametrize("dtype, stored", [
    (torch.float16, torch.float16), (torch.bfloat16, torch.bfloat16), (torch.float64, torch.float32),
    (torch.float8_e4m3fn, torch.float16), (torch.float8_e5m2, torch.float16),
])  # fmt: skip
def test_types_keep_their_values(
    dtype: torch.dtype, stored: torch.dtype, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = folders["playground-v2.5"]
    found = tensors(convert(write(folder, "sdxl", tmp_path / "x.safetensors", dtype=dtype), folder))
    for key, one in tensors(folder).items():
        assert found[key].dtype == stored and torch.equal(found[key].double(), one.to(dtype).double()), key


def test_averaged_weights_are_read_where_a_file_has_no_others(folders: dict[str, Path], tmp_path: Path) -> None:
    folder, prefix = folders["sd-1.5"], "model.diffusion_model."
    whole = write(folder, "sd-1.5", tmp_path / "x.safetensors")
    with safe_open(whole, framework="pt") as file:
        plain = {key: file.get_tensor(key) for key in file.keys()}
    flat = {key: f"model_ema.diffusion_model{key.removeprefix(prefix).replace('.', '')}" for key in plain}
    averaged = {flat[key] if key.startswith(prefix) else key: one for key, one in plain.items()}
    both = plain | {flat[key]: one + 1 for key, one in plain.items() if key.startswith(prefix)}
    for number, file_tensors in enumerate((averaged, both)):
        path = tmp_path / f"{number}.safetensors"
        save_file(file_tensors | {"model_ema.decay": torch.zeros(1)}, path)
        found = tensors(convert(path, folder))
        assert all(torch.equal(found[key], one) for key, one in tensors(folder).items()), path


def test_converts_a_file_once(folders: dict[str, Path], tmp_path: Path) -> None:
    folder, said = folders["playground-v2.5"], list[str]()
    extra = {"ztsnr": torch.zeros(0), "model_ema.decay": torch.zeros(1), "model_ema.x": torch.zeros(8)}
    path = write(folder, "sdxl", tmp_path / "x.safetensors", extra=extra, wrapper="state_dict.")
    (tmp_path / "cache" / "x.tmp").mkdir(parents=True)
    found = convert(path, folder, report=said.append)
    assert [line for line in said if "converting" in line][0] == "x.safetensors: converting unet (1 of 4)"
    assert hashlib.sha256(path.read_bytes()).hexdigest() in found.name
    times = {file: file.stat().st_mtime_ns for file in found.rglob("*")}
    renamed = path.rename(tmp_path / "y.safetensors")
    assert convert(renamed, folder, report=said.append) == found and "was converted before" in said[-1]
    assert times == {file: file.stat().st_mtime_ns for file in found.rglob("*")}
    # Another config, or another file, is another model.
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    edit(other / "unet" / "config.json", {"sample_size": 16})
    assert convert(renamed, other) != found


def test_what_seems_wrong_is_a_warning(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(folders["sd-2.1"], "sd-2.1", tmp_path / "x.safetensors")
    for _ in range(2):  # also if it was converted before
        convert(path, folders["sd-2.1"], report=notify)
        printed = " ".join(capsys.readouterr().out.split())
        assert printed.startswith("warning ") and "does not state what its UNet predicts" in printed


def test_interrupted_conversion_leaves_no_folder(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = folders["sd-1.5"]
    path = write(folder, "sd-1.5", tmp_path / "x.safetensors")

    def interrupt(sentence: str, is_warning: bool = False) -> None:
        if "converting vae" in sentence:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(path, folder, report=interrupt)
    assert [entry.name for entry in (tmp_path / "cache").iterdir() if entry.suffix != ".lock"] == []
    assert (convert(path, folder) / "vae" / "config.json").is_file()
    (tmp_path / "full").write_bytes(b"")
    with pytest.raises(CheckpointError, match="cannot be converted to .*/full: .*Free space"):
        find_checkpoints(str(path), None, config=str(folder), cache=tmp_path / "full")


def test_release_is_that_of_the_folder(
    toy_folder: Path, toy_store: WritableStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arguments of `preheat build FILE --config FOLDER` lead to the same weights, facts and defaults."""
    monkeypatch.setattr("engine_builder.checkpoints.single_file.CACHE", tmp_path / "cache")
    path = write(toy_folder, "sdxl", tmp_path / "My model (v1).safetensors")
    plan = parse_plan(str(path), config=str(toy_folder))
    assert plan.model == "My-model-v1" and plan.base.root.parent == tmp_path / "cache"
    store = publish_uncompiled(plan, tmp_path / "store")
    ours, theirs = store.read_release("My-model-v1/1"), toy_store.read_release("toy-sdxl/1")
    assert ours.weights == theirs.weights and ours.settings == theirs.settings and ours.defaults == theirs.defaults
    assert ours.tokenizers == theirs.tokenizers and ours.schedulers == theirs.schedulers


def test_missing_networks_name_the_option_that_adds_them(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = folders["sd-2.1"]
    without = write(folder, "sd-2.1", tmp_path / "x.safetensors", without=("vae", "text_encoder"))
    whole_tensors = published_tensors("sdxl")
    for missing, prefix, remedy in (("vae", "first_stage_model.", "--vae FILE"), ("text_encoder", "cond", "--config")):
        tensors_left = {key: info for key, info in whole_tensors.items() if not key.startswith(prefix)}
        path = single_files.write_header(tmp_path / "bare.safetensors", tensors_left)
        with pytest.raises(
            CheckpointError, match=f"checkpoint of Stable Diffusion XL, and it has no {missing}.*{remedy}"
        ):
            find_checkpoints(str(path), None, cache=tmp_path / "cache")
    # The folder of --config has them, also in several files. Those of networks that the file has are not used.
    assert tensors(convert(without, folder)).keys() == tensors(folder).keys()
    index = {"metadata": {}, "weight_map": {"conv_in.weight": "diffusion_pytorch_model-00001-of-00002.safetensors"}}
    shutil.copytree(folder, sharded := tmp_path / "sharded")
    (sharded / "unet" / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    assert load_network(Checkpoint(convert(without, sharded)), "unet", FP32).tensors()
    # --vae, as a file of a VAE and as a checkpoint
    no_vae = write(folder, "sd-2.1", tmp_path / "no_vae.safetensors", without=("vae",))
    config = json.loads((folder / "vae" / "config.json").read_text())
    named = single_files.vae_names(single_files.read_weights(folder / "vae"), config)
    vae = {name: one.contiguous() for name, one in named}
    save_file(vae, tmp_path / "vae.safetensors")
    save_file({f"vae.{name}": one for name, one in vae.items()}, tmp_path / "prefixed.safetensors")
    whole = write(folder, "sd-2.1", tmp_path / "whole.safetensors")
    for given in (tmp_path / "vae.safetensors", tmp_path / "prefixed.safetensors", whole):
        base, _ = find_checkpoints(str(no_vae), None, str(given), config=str(folder), cache=tmp_path / "cache")
        assert base.vae is not None and tensors(base.vae.parent)["vae.decoder.conv_in.weight"].ndim == 4
        assert np.array_equal(picture(base)[0], picture(Checkpoint(folder))[0])


def test_vae_files_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for tensors, words in (
        ({"decoder.conv_out.weight": (3, 8, 3, 3)}, "the file of a VAE, but its vae lacks encoder.conv_in.*a VAE of"),
        ({"lora_x.lora_up.weight": (4, 4)}, "is a LoRA adapter"),
        ({"something": (4, 4)}, "has no VAE"),
    ):
        single_files.write_header(path, {name: ("F16", shape) for name, shape in tensors.items()})
        with pytest.raises(CheckpointError, match=words):
            find_checkpoints(str(MODEL_FOLDER), None, vae=str(path), cache=tmp_path / "cache")


def test_refuses_names_with_a_fix(tmp_path: Path) -> None:
    file = write(MODEL_FOLDER, "sdxl", tmp_path / "x.safetensors", without=("unet", "vae"))
    weights = MODEL_FOLDER / "unet" / "diffusion_pytorch_model.safetensors"
    (tmp_path / "model.ckpt").write_bytes(b"\x80\x02pickled")
    for name, options, words in (
        (str(weights), {}, rf"Name the folder {weights.parent}\.$"),
        (str(tmp_path), {}, f"has no model_index.json, but single files: x.safetensors.*for example {file}"),
        (str(MODEL_FOLDER), {"config": str(MODEL_FOLDER)}, "Leave out --config"),
        (str(file), {"config": "owner/model"}, "owner/model is not a folder"),
        (str(file), {"config": "a\0b"}, "is not a folder"),
        ("owner/model/folder/model.ckpt", {}, "may hold a pickle.*not downloaded"),
        (str(tmp_path / "missing.safetensors"), {}, "neither a folder nor a file nor a Hub id"),
        (str(file), {}, "is a text encoder alone"),
    ):
        with pytest.raises(CheckpointError, match=words):
            find_checkpoints(name, None, **options)  # type: ignore[arg-type]


def test_pickled_checkpoint_is_refused_unopened(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    for data in (b"\x80\x02pickled", b"anything"):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"model.ckpt .*a pickle.*not opened.*the \.safetensors file"):
            find_checkpoints(str(path), None)


@pytest.mark.parametrize("name, expected", [
    ("/x/waiNSFW v1.4 (SDXL).safetensors", "waiNSFW-v1.4-SDXL"), ("owner/model/sd_xl.safetensors", "sd_xl"),
    ("\u6f22\u5b57.safetensors", "model"), ("owner/model", "model"), ("a" * 200 + ".safetensors", "a" * 128),
])  # fmt: skip
def test_default_name_is_one_of_the_store(name: str, expected: str) -> None:
    assert default_name(name) == expected
    assert split_name(f"{expected}/1") == (expected, "1")


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


def test_renamed_unet_is_named_before_defaults(tmp_path: Path) -> None:
    """The name of the published UNet of Lightning, in a folder whose defaults.json contradicts the preset."""
    folder = Path(shutil.copytree(MODEL_FOLDER, tmp_path / "copy"))
    name = "sdxl_lightning_4step_unet.safetensors"
    (folder / "unet" / "diffusion_pytorch_model.safetensors").rename(folder / "unet" / name)
    with pytest.raises(CheckpointError, match=f"Rename {name} to diffusion_pytorch_model.safetensors"):
        check_configs(*find_checkpoints(str(folder), None, preset="lightning-4"))


def test_damaged_config_can_be_corrected(tmp_path: Path) -> None:
    shutil.copytree(MODEL_FOLDER / "scheduler", tmp_path / "scheduler")
    for text, words in {
        '{"steps": 4,}': "is not JSON: .* line 1 .*Correct the file, or download the model again.",
        "[]": "is not a JSON object. Correct the file",
    }.items():
        (tmp_path / "scheduler" / "scheduler_config.json").write_text(text)
        with pytest.raises(CheckpointError, match=words):
            Checkpoint(tmp_path).config("scheduler", "scheduler_config.json")
