"""Training at toy size on the CPU: it pauses, continues, and exports a model that diffusers can load."""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from diffusers import UNet2DConditionModel  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch import Tensor  # noqa: E402

from tests.support.repository import REPOSITORY  # noqa: E402
from training import architecture, autoencoder, diffusion, export  # noqa: E402
from training.dataset import ChunkWorkers  # noqa: E402
from training.optimizer import EmaOptimizer  # noqa: E402
from training.run import PausedError, TrainingRun  # noqa: E402
from training.settings import Settings, SettingsError, load_settings, settings_from_table  # noqa: E402
from training.train import StageError, train  # noqa: E402

TINY_SDXL = REPOSITORY / "data" / "tiny-sdxl"
STEPS = 2
DIFFUSION_WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread: more slow down networks of this size."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def settings() -> Settings:
    diffusion = {"steps": STEPS, "batch": 2, "rate": 1e-3, "pool": 2, "fresh": 2, "wordings": 2, "auxiliary": 0.1}
    return settings_from_table(
        {
            "seed": 1,
            "workers": 0,
            "checkpoint_seconds": 1000,
            "sizes": [[64, 64, 1.0]],
            "decoder": {"steps": STEPS, "batch": 2, "rate": 1e-3},
            "vae": {"steps": STEPS, "batch": 2, "window": 32, "whole_share": 0.0, "rate": 1e-3, "kl": 1e-4},
            "base": diffusion,
            "refiner": diffusion,
        }
    )


def run_in(folder: Path, settings: Settings, stop_after: float | None = None) -> TrainingRun:
    return TrainingRun(settings, folder, ChunkWorkers(0), stop_after)


def test_reads_the_committed_settings() -> None:
    settings = load_settings(TINY_SDXL / "training.toml")
    assert settings.base.steps > 1000 and settings.native_size == (256, 256)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vae": {"stepz": 1}}, r"\[vae\] has unknown keys: stepz"),
        ({"seed": None}, "settings file lacks seed"),
        ({"sizes": [[100, 256, 1.0]]}, "100x256 is not a multiple of 32"),
        ({"sizes": []}, "`sizes` is empty"),
    ],
    ids=["unknown key", "missing key", "odd size", "no size"],
)
def test_refuses_invalid_settings(change: dict[str, Any], message: str) -> None:
    table = tomllib.loads((TINY_SDXL / "training.toml").read_text())
    for key, value in change.items():
        table[key] = table[key] | value if isinstance(value, dict) else value
    table = {key: value for key, value in table.items() if value is not None}
    with pytest.raises(SettingsError, match=message):
        settings_from_table(table)


def test_pauses_and_continues(settings: Settings, tmp_path: Path) -> None:
    settings = replace(
        settings,
        vae=replace(settings.vae, steps=1),
        decoder=replace(settings.decoder, steps=0),
        refiner=replace(settings.refiner, steps=0),
    )
    pauses = []
    for _ in range(4):
        try:
            train(run_in(tmp_path, settings, stop_after=0.0))
            break
        except PausedError:
            pauses += [(path.name, int(load_file(path)["step"])) for path in tmp_path.glob("*.state.safetensors")]
    assert pauses == [("vae.state.safetensors", 1), ("base.state.safetensors", 1), ("base.state.safetensors", 2)]
    assert not list(tmp_path.glob("*.state.safetensors"))
    weights = load_file(tmp_path / "model" / "unet" / DIFFUSION_WEIGHTS)
    assert all(tensor.dtype == torch.float16 and tensor.isfinite().all() for tensor in weights.values())


def test_checkpoint_restores_weights_averages_and_moments(tmp_path: Path) -> None:
    inputs = torch.randn(8, 4)

    def new_optimizer() -> EmaOptimizer:
        torch.manual_seed(1)
        return EmaOptimizer(torch.nn.ModuleDict({"layer": torch.nn.Linear(4, 4)}), steps=100, learning_rate=1e-2)

    def update(optimizer: EmaOptimizer, count: int) -> None:
        for _ in range(count):
            optimizer.update(optimizer.networks["layer"](inputs).square().mean())

    uninterrupted, interrupted, resumed = new_optimizer(), new_optimizer(), new_optimizer()
    update(uninterrupted, 6)
    update(interrupted, 3)
    interrupted.save(tmp_path / "state.safetensors")
    resumed.load(tmp_path / "state.safetensors")
    update(resumed, 3)
    assert resumed.step == uninterrupted.step == 6
    for expected, found in zip(
        uninterrupted.weights + uninterrupted.averages, resumed.weights + resumed.averages, strict=True
    ):
        assert torch.equal(expected, found)


def test_centring_changes_the_latents_but_not_the_images() -> None:
    network = architecture.vae().eval()
    images = autoencoder.render_images(torch.rand(4, 24), (64, 64))
    with torch.no_grad():
        before = network.decode(network.encode(images).latent_dist.mean).sample
        factor = autoencoder.centre_latents(network, images)
        latents = network.encode(images).latent_dist.mean
        after = network.decode(latents).sample
    assert torch.allclose(before, after, atol=1e-4)
    assert (latents * factor).mean((0, 2, 3)).abs().max() < 1e-3
    assert torch.allclose((latents * factor).std((0, 2, 3)), torch.ones(4), atol=1e-3)


def test_starts_from_an_exported_model(settings: Settings, tmp_path: Path) -> None:
    """The encoder and the networks of a stage without steps stay the same, bit for bit."""
    start, out = tmp_path / "start", tmp_path / "out"
    export.export_model(export.random_networks(3), start)
    defaults = json.loads((start / "defaults.json").read_text())
    assert defaults == architecture.DEFAULTS == json.loads((TINY_SDXL / "defaults.json").read_text())
    out.mkdir()
    train(run_in(out, replace(settings, base=replace(settings.base, steps=0))), start_from=start)

    def changed(file: str, prefix: str = "") -> bool:
        before, after = load_file(start / file), load_file(out / "model" / file)
        return any(not torch.equal(before[key], after[key]) for key in before if key.startswith(prefix))

    assert not changed(f"unet/{DIFFUSION_WEIGHTS}") and not changed("text_encoder_2/model.safetensors")
    assert not changed(f"vae/{DIFFUSION_WEIGHTS}", "encoder.")
    assert changed(f"vae/{DIFFUSION_WEIGHTS}", "decoder.") and changed(f"refiner/unet/{DIFFUSION_WEIGHTS}")


def test_separate_runs_may_train_the_stages(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(StageError, match="decoder needs stage vae"):
        train(run_in(tmp_path, settings), stages=["decoder"])
    for stage in ("vae", "base", "decoder"):
        train(run_in(tmp_path, settings), stages=[stage])
        assert not (tmp_path / "model").exists()
    train(run_in(tmp_path, settings), stages=["refiner"])
    for network, stage in (("unet", "base"), ("vae", "decoder")):
        result = load_file(tmp_path / f"{stage}.safetensors")
        for key, tensor in load_file(tmp_path / "model" / network / DIFFUSION_WEIGHTS).items():
            assert torch.equal(result[f"{network}.{key}"].half(), tensor), key


def test_refiner_learns_what_the_base_predicts(settings: Settings, tmp_path: Path) -> None:
    networks = export.random_networks()
    torch.manual_seed(0)
    noised, timesteps = torch.randn(4, 4, 8, 8), torch.tensor([10, 60, 120, 200])

    @torch.no_grad()
    def predict(network: UNet2DConditionModel, *time_ids: float) -> Tensor:
        """Predict without a caption."""
        added = {"text_embeds": torch.zeros(4, architecture.TEXT_WIDTH_2), "time_ids": torch.tensor([time_ids] * 4)}
        states = torch.zeros(4, 77, network.config.cross_attention_dim)
        prediction: Tensor = network(noised, timesteps, states, added_cond_kwargs=added, return_dict=False)[0]
        return prediction

    def difference() -> float:
        base, refiner = networks.unet.eval(), networks.refiner_unet.eval()
        error = predict(base, 64, 64, 0, 0, 64, 64) - predict(refiner, 64, 64, 0, 0, 6)
        return float(error.square().mean())

    before = difference()
    settings = replace(settings, refiner=replace(settings.refiner, steps=10, rate=3e-3))
    diffusion.train_refiner(run_in(tmp_path, settings), networks)
    assert difference() < 0.6 * before


def test_refiner_starts_with_the_weights_of_the_base() -> None:
    networks = export.random_networks(4)
    refiner, base = networks.refiner_unet, networks.unet
    before = copy.deepcopy(refiner.state_dict())
    diffusion.start_from_base(refiner, base)
    after, source = refiner.state_dict(), base.state_dict()
    common = ("conv_in", "down_blocks.0", "down_blocks.1.resnets", "up_blocks.2", "time_embedding", "conv_out")
    equal = [name for name in after if name.startswith(common)]
    assert equal and all(torch.equal(after[name], source[name]) for name in equal)
    deepest = "mid_block.resnets.0.conv1.weight"
    assert after[deepest].shape != source[deepest].shape and torch.equal(after[deepest], before[deepest])
    keys = "down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k.weight"
    assert torch.equal(after[keys], source[keys][:, architecture.TEXT_WIDTH_1 :])
    above_deepest = "up_blocks.1.resnets.0.conv1.weight"  # inputs: the deepest level, then 96 channels of the skip
    assert not after[above_deepest][:, :-96].any()
    assert torch.equal(after[above_deepest][:, -96:], source[above_deepest][:, -96:])

    def embed(network: UNet2DConditionModel, *time_ids: float) -> Tensor:
        embedded_ids = network.add_time_proj(torch.tensor(time_ids)).flatten()
        pooled = torch.linspace(-1, 1, architecture.TEXT_WIDTH_2)
        embedding: Tensor = network.add_embedding.linear_1(torch.cat([pooled, embedded_ids])[None])
        return embedding

    best, worst = embed(refiner, 256, 256, 0, 0, 6), embed(refiner, 256, 256, 0, 0, 2)
    assert torch.equal(best, worst), "the aesthetic score has an effect"
    assert torch.allclose(best, embed(base, 256, 256, 0, 0, 256, 256), atol=1e-6)
