"""ControlNets as networks: they compute what diffusers computes, and folders that do not fit the model are refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from typer.testing import CliRunner

from engine_builder.checkpoints.controlnet import parse_controlnet
from engine_builder.checkpoints.folder import Checkpoint, CheckpointError
from engine_builder.networks.controlnet import components_of_controlnets
from engine_builder.networks.network import Network, load_network
from engine_builder.networks.network_check import check_model
from model.store.precision import FP32
from preheat.main import app
from tests.support import controlnets, toy_sd
from tests.support.repository import MODEL_FOLDER

KINDS: tuple[controlnets.Kind, ...] = ("full", "small", "mid", "union")
BATCH, HEIGHT, WIDTH = 2, 128, 192


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A ControlNet of each kind for data/tiny-sdxl."""
    root = tmp_path_factory.mktemp("controlnets")
    return {kind: controlnets.write(root / kind, MODEL_FOLDER, kind) for kind in KINDS}


def with_controlnet(folder: Path, model: Path = MODEL_FOLDER) -> Checkpoint:
    return Checkpoint(model, controlnets=(("edges", folder),))


def run(network: Network, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.inference_mode():
        outputs: tuple[torch.Tensor, ...] = network.module(*inputs)
    return outputs


def test_computes_what_diffusers_computes(folders: dict[str, Path]) -> None:
    """The residuals of a ControlNet whose first levels have no transformers. Images are tested with the others."""
    checkpoint = with_controlnet(folders["mid"])
    check_model(checkpoint, None)
    names = components_of_controlnets(checkpoint)
    networks = {name.partition(".")[0]: load_network(checkpoint, name, FP32) for name in names}
    sample, pixels = torch.randn(BATCH, 4, HEIGHT // 8, WIDTH // 8), torch.rand(1, 3, HEIGHT, WIDTH)
    text, pooled, timestep = torch.randn(BATCH, 77, 224), torch.randn(BATCH, 128), torch.tensor([500.0, 500.0])
    time_ids = torch.tensor([[HEIGHT, WIDTH, 0, 0, HEIGHT, WIDTH]] * BATCH, dtype=torch.float32)
    [control] = run(networks["controlnet_image"], pixels)
    [time_embeds] = run(networks["controlnet_time"], timestep, pooled, time_ids)
    keys_values = run(networks["controlnet_text"], text)
    scale, controls = torch.tensor([[0.7], [0.0]]), control.expand(BATCH, -1, -1, -1)
    residuals = run(networks["controlnet"], sample, time_embeds, *keys_values, controls, scale)
    reference: Any = diffusers.ControlNetModel.from_pretrained(folders["mid"])
    added = {"text_embeds": pooled, "time_ids": time_ids}
    arguments = {"controlnet_cond": pixels.expand(BATCH, -1, -1, -1), "conditioning_scale": 0.7}
    with torch.inference_mode():
        down, middle = reference(sample, timestep, text, added_cond_kwargs=added, return_dict=False, **arguments)
    for residual, expected in zip(residuals, [*down, middle], strict=True):
        torch.testing.assert_close(residual[:1], expected[:1], rtol=1e-4, atol=1e-4)
        assert not residual[1].any()  # scale 0


def test_an_image_that_does_not_use_a_network_is_unaffected_by_nan(folders: dict[str, Path]) -> None:
    network = load_network(with_controlnet(folders["full"]), "controlnet.edges", FP32)
    shapes = [[size if isinstance(size, int) else 8 for size in spec.shape[1:]] for spec in network.signature.inputs]
    inputs = [torch.full((1, *shape), torch.nan) for shape in shapes[:-1]]
    assert all(not output.any() for output in run(network, *inputs, torch.zeros(1, 1)))


Edit = Callable[[Path], object]
WEIGHTS = "diffusion_pytorch_model.safetensors"


def edit(**entries: Any) -> Edit:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | entries))

    return change


WRONG: dict[str, tuple[controlnets.Kind, Edit, str]] = {
    # name: (kind of the folder, change, words of the error)
    "another class": ("full", edit(_class_name="T2IAdapter"), "_class_name is 'T2IAdapter', expected"),
    "text width": ("full", edit(cross_attention_dim=768), "cross_attention_dim is 768, and that of .* is 224"),
    "channels": ("full", edit(block_out_channels=[320, 640]), r"block_out_channels is \[320, 640\], and that of"),
    "layers": ("full", edit(layers_per_block=2), "layers_per_block is 2, and that of the UNet"),
    "control channels": ("full", edit(conditioning_channels=1), "conditioning_channels is 1, expected 3"),
    "latents": ("full", edit(in_channels=9), "in_channels is 9, and that of the VAE's latents is 4"),
    "embedding": ("full", edit(conditioning_embedding_out_channels=[8, 16]), "divides a control image's sides by 2"),
    "pooled": ("full", edit(global_pool_conditions=True), "global_pool_conditions is True, expected False"),
    "order": ("full", edit(controlnet_conditioning_channel_order="brg"), "order is 'brg', expected 'rgb' or 'bgr'"),
    "no types": ("union", edit(num_control_type=0), "num_control_type is 0"),
    "sizes of a union": ("union", edit(num_trans_channel=320), "num_trans_channel and num_proj_channel are 320 and 64"),
    "no config": ("full", lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "no weights": ("full", lambda folder: (folder / WEIGHTS).unlink(), "has no .safetensors file"),
    "half a file": (
        "full", lambda folder: (folder / WEIGHTS).write_bytes(b"\0" * 100), "is not a complete safetensors file"
    ),
}  # fmt: skip


def test_refuses_a_folder_that_does_not_fit(folders: dict[str, Path], tmp_path: Path) -> None:
    for case, (kind, change, message) in WRONG.items():
        folder = Path(shutil.copytree(folders[kind], tmp_path / case))
        change(folder)
        with pytest.raises(CheckpointError, match=message):
            check_model(with_controlnet(folder), None)


def test_refuses_a_controlnet_of_stable_diffusion_1(tmp_path: Path) -> None:
    model = toy_sd.write(tmp_path / "sd", MODEL_FOLDER / "tokenizer", "1.5")
    folder = controlnets.write(tmp_path / "controlnet", model)
    check_model(with_controlnet(folder, model), None)
    with pytest.raises(CheckpointError, match="cross_attention_dim is 32, and that of the UNet"):
        check_model(with_controlnet(folder), None)


def test_refuses_invalid_and_repeated_names(folders: dict[str, Path]) -> None:
    for text in ("", "edges", "edges=", "=folder", "Edges=folder", "a b=folder", f"{'a' * 33}=folder"):
        with pytest.raises(CheckpointError, match="is not NAME=PATH"):
            parse_controlnet(text)
    twice = Checkpoint(MODEL_FOLDER, controlnets=(("edges", folders["full"]), ("edges", folders["small"])))
    with pytest.raises(CheckpointError, match="Two ControlNets have the name edges"):
        check_model(twice, None)


def test_the_command_refuses_a_missing_folder_and_plans(tmp_path: Path) -> None:
    build = ["build", str(MODEL_FOLDER), "--store", str(tmp_path / "store"), "--controlnet"]
    missing = CliRunner().invoke(app, [*build, f"edges={tmp_path / 'nothing'}"])
    assert isinstance(missing.exception, CheckpointError) and "has no config.json" in str(missing.exception)
    plans = CliRunner().invoke(app, [*build, f"edges={tmp_path}", "--runtime", "tensorrt"])
    assert plans.exit_code == 2
    assert "is not supported for plans" in " ".join(plans.output.split())
    assert not (tmp_path / "store" / "drafts").exists()
