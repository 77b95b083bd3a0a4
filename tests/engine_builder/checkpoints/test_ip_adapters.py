"""IP-Adapters as networks: they compute what diffusers computes, and files that do not fit the model are refused."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CLIPVisionModelWithProjection
from typer.testing import CliRunner

from engine_builder.checkpoints.folder import Checkpoint, CheckpointError, IpAdapterFiles
from engine_builder.checkpoints.ip_adapter import parse_ip_adapters
from engine_builder.checkpoints.random_models import IP_ADAPTER_KINDS, ip_adapter_shapes
from engine_builder.networks.network import Network, load_network
from engine_builder.networks.network_check import check_model
from model.engines.signatures import IMAGE_BIAS, IMAGE_KEYS, image_slots
from model.store.precision import FP16, FP32
from preheat.main import app
from tests.support import ip_adapters, toy_sd
from tests.support.repository import MODEL_FOLDER

KINDS: tuple[ip_adapters.Kind, ...] = ("plain", "plus", "full")
ENCODER_TOKENS = 1 + (ip_adapters.SIDE // ip_adapters.PATCH) ** 2


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An IP-Adapter of each kind for data/tiny-sdxl, and their image encoder."""
    root = tmp_path_factory.mktemp("ip-adapters")
    ip_adapters.write_encoder(root / "image_encoder")
    for seed, kind in enumerate(KINDS):
        ip_adapters.write_adapter(root / f"{kind}.safetensors", MODEL_FOLDER, kind, seed)
    return root


def with_adapter(path: Path, encoder: Path, model: Path = MODEL_FOLDER, images: int = 2) -> Checkpoint:
    return Checkpoint(model, ip_adapters=(IpAdapterFiles("style", path, encoder),), ip_images=images)


def run(network: Network, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.inference_mode():
        outputs: tuple[torch.Tensor, ...] = network.module(*inputs)
    return outputs


def test_computes_what_diffusers_computes(root: Path) -> None:
    """The noise that a UNet with the tokens of two images of a full adapter predicts. Images are tested with others."""
    checkpoint = with_adapter(root / "full.safetensors", root / "image_encoder")
    check_model(checkpoint, None)
    names = ("image_encoder.style", "ip_adapter.style", "unet_ip", "unet_time", "unet_text")
    networks = {name: load_network(checkpoint, name, FP32) for name in names}
    assert image_slots(networks["unet_ip"].signature) == (1, 2 * ENCODER_TOKENS)
    pixels = torch.randn(2, 3, ip_adapters.SIDE, ip_adapters.SIDE)
    keys, values = run(networks["ip_adapter.style"], *run(networks["image_encoder.style"], pixels))
    sample, text, pooled = torch.randn(1, 4, 16, 24), torch.randn(1, 77, 224), torch.randn(1, 128)
    timestep, time_ids = torch.tensor([500.0]), torch.tensor([[128.0, 192, 0, 0, 128, 192]])
    [embeds] = run(networks["unet_time"], timestep, pooled, time_ids)
    [keys_values] = run(networks["unet_text"], text)
    slots = [tensor.reshape(1, 1, 2 * ENCODER_TOKENS, -1) for tensor in (keys, 0.7 * values)]
    bias = torch.zeros(1, 1, 2 * ENCODER_TOKENS)
    [predicted] = run(networks["unet_ip"], sample, embeds, keys_values, *slots, bias)

    unet: Any = diffusers.UNet2DConditionModel.from_pretrained(MODEL_FOLDER / "unet")
    encoder: Any = CLIPVisionModelWithProjection.from_pretrained(root / "image_encoder")
    state: dict[str, dict[str, torch.Tensor]] = {"image_proj": {}, "ip_adapter": {}}
    for name, tensor in load_file(root / "full.safetensors").items():
        part, _, own_name = name.partition(".")
        state[part][own_name] = tensor
    with torch.inference_mode():
        unet._load_ip_adapter_weights([state])
        for processor in unet.attn_processors.values():
            if hasattr(processor, "scale"):
                processor.scale = [0.7]
        features = encoder(pixels, output_hidden_states=True).hidden_states[-2]
        added = {"text_embeds": pooled, "time_ids": time_ids, "image_embeds": [features[None]]}
        [expected] = unet(sample, timestep, text, added_cond_kwargs=added, return_dict=False)
    torch.testing.assert_close(predicted, expected, rtol=1e-4, atol=1e-4)


def test_the_unet_has_a_slot_for_each_adapter(root: Path) -> None:
    files = [IpAdapterFiles(kind, root / f"{kind}.safetensors", root / "image_encoder") for kind in KINDS]
    checkpoint = Checkpoint(MODEL_FOLDER, ip_adapters=tuple(files), ip_images=3)
    network = load_network(checkpoint, "unet_ip", FP16, device="meta")
    shapes = {spec.name: spec.shape for spec in network.signature.inputs}
    assert shapes[IMAGE_BIAS] == ("rows", 3, 3 * ENCODER_TOKENS)
    assert shapes[IMAGE_KEYS][:3] == shapes[IMAGE_BIAS]


Edit = Callable[[Path], None]


def edit_config(**entries: Any) -> Edit:
    def change(folder: Path) -> None:
        path = folder / "image_encoder" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | entries))

    return change


def edit_file(change_tensors: Callable[[dict[str, torch.Tensor]], object]) -> Edit:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "style.safetensors")
        change_tensors(tensors)
        save_file(tensors, folder / "style.safetensors")

    return change


def rename(old: str, new: str) -> Edit:
    return edit_file(lambda tensors: tensors.update({new: tensors.pop(old)}))


FACE_ID = rename("image_proj.proj.weight", "image_proj.proj.0.weight")
WRONG: dict[str, tuple[Edit, str]] = {
    "no file": (lambda folder: (folder / "style.safetensors").unlink(), "is not a complete safetensors file"),
    "half a file": (
        lambda folder: (folder / "style.safetensors").write_bytes(b"\0" * 100), "is not a complete safetensors file"
    ),
    "face id": (FACE_ID, "is an IP-Adapter FaceID. It reads the embedding of a face by insightface"),
    "another kind of file": (edit_file(lambda tensors: tensors.clear()), "has no projection of images that is known"),
    "no attention": (
        edit_file(lambda tensors: tensors.pop("ip_adapter.1.to_v_ip.weight")),
        r"ip_adapter.1.to_v_ip.weight is missing, and that of the UNet is",
    ),
    "another UNet": (
        edit_file(lambda tensors: tensors.update({"ip_adapter.3.to_k_ip.weight": torch.zeros(8, 16)})),
        r"ip_adapter.3.to_k_ip.weight has the shape \[8, 16\], and that of the UNet is",
    ),
    "no norm": (edit_file(lambda tensors: tensors.pop("image_proj.norm.bias")), "a projection of images that is not"),
    "another encoder": (edit_config(projection_dim=32), "reads features of width 24, and projection_dim of"),
    "no encoder": (lambda folder: (folder / "image_encoder" / "config.json").unlink(), "config.json exists"),
    "no weights of the encoder": (
        lambda folder: (folder / "image_encoder" / "model.safetensors").unlink(), "has no .safetensors file"
    ),
    "weights of another encoder": (edit_config(intermediate_size=99), "the shape of"),
}  # fmt: skip


def test_refuses_files_that_do_not_fit(root: Path, tmp_path: Path) -> None:
    for case, (change, message) in WRONG.items():
        folder = tmp_path / case
        shutil.copytree(root / "image_encoder", folder / "image_encoder")
        shutil.copy(root / "plain.safetensors", folder / "style.safetensors")
        change(folder)
        with pytest.raises(CheckpointError, match=message):
            check_model(with_adapter(folder / "style.safetensors", folder / "image_encoder"), None)


def test_refuses_stable_diffusion_1_and_equal_names(root: Path, tmp_path: Path) -> None:
    model = toy_sd.write(tmp_path / "sd", MODEL_FOLDER / "tokenizer", "1.5")
    with pytest.raises(CheckpointError, match="IP-Adapters are supported for Stable Diffusion XL"):
        check_model(with_adapter(root / "plain.safetensors", root / "image_encoder", model), None)
    checkpoint = with_adapter(root / "plain.safetensors", root / "image_encoder")
    with pytest.raises(CheckpointError, match="Two IP-Adapters have the name style"):
        check_model(replace(checkpoint, ip_adapters=2 * checkpoint.ip_adapters), None)


def test_refuses_options_that_are_not_name_and_path() -> None:
    for text in ("", "style", "style=", "=file", "Style=file", f"{'a' * 33}=file"):
        with pytest.raises(CheckpointError, match="is not NAME=PATH"):
            parse_ip_adapters([text], [], Checkpoint(MODEL_FOLDER))


def test_finds_the_image_encoder(root: Path, tmp_path: Path) -> None:
    """Next to the file, or where an option names it."""
    base = Checkpoint(MODEL_FOLDER)
    [found] = parse_ip_adapters([f"style={root / 'plus.safetensors'}"], [], base)
    assert found.encoder.resolve() == root / "image_encoder"
    texts = [f"{name}={tmp_path / 'a.safetensors'}" for name in ("a", "b")]
    with pytest.raises(CheckpointError, match=r"image encoder of .*a.safetensors was not found. Searched"):
        parse_ip_adapters(texts, [], base)
    assert [files.encoder for files in parse_ip_adapters(texts, ["one"], base)] == [Path("one"), Path("one")]
    assert [files.encoder for files in parse_ip_adapters(texts, ["x", "y"], base)] == [Path("x"), Path("y")]
    with pytest.raises(CheckpointError, match="3 image encoders were given for 2 IP-Adapters"):
        parse_ip_adapters(texts, ["x", "y", "z"], base)


def test_the_command_refuses_before_it_builds(root: Path, tmp_path: Path) -> None:
    build = ["build", str(MODEL_FOLDER), "--store", str(tmp_path / "store")]
    adapter = ["--ip-adapter", f"style={root / 'plain.bin'}"]
    pickled = CliRunner().invoke(app, [*build, *adapter])
    message = "plain.bin is not a .safetensors file.*Use the .safetensors file of the same repository"
    assert isinstance(pickled.exception, CheckpointError) and re.search(message, str(pickled.exception))
    for options, message in (
        ([*adapter, "--runtime", "tensorrt"], "is not supported for plans"),
        (["--image-encoder", str(root)], "needs --ip-adapter"),
        ([*adapter, "--ip-images", "17"], "less than or equal to 16"),
    ):
        refused = CliRunner().invoke(app, [*build, *options])
        assert refused.exit_code == 2
        assert message in " ".join(refused.output.replace("│", " ").split())
    assert not (tmp_path / "store" / "drafts").exists()


def test_random_adapters_have_the_shapes_of_public_ones() -> None:
    plain, plus = (ip_adapter_shapes(kind) for kind in IP_ADAPTER_KINDS)
    assert plain["image_proj.proj.weight"] == (8192, 1024) and plus["image_proj.latents"] == (1, 16, 1280)
    for shapes in (plain, plus):
        numbers = {int(name.split(".")[1]) for name in shapes if name.startswith("ip_adapter.")}
        assert numbers == set(range(1, 140, 2))  # 70 cross-attentions
