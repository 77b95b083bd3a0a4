"""Training at toy size on the CPU: it pauses, continues, and exports a model that diffusers can load."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from safetensors.torch import load_file  # noqa: E402

from tests.support.repository import REPOSITORY  # noqa: E402
from training.pictures.dataset import ChunkWorkers  # noqa: E402
from training.run import PausedError, TrainingRun  # noqa: E402
from training.settings import Settings, SettingsError, load_settings, settings_from_table  # noqa: E402
from training.train import StageError, train  # noqa: E402

TINY_SDXL = REPOSITORY / "data" / "tiny-sdxl"
STEPS = 2
pytestmark = pytest.mark.full
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


def test_refuses_invalid_settings() -> None:
    given = tomllib.loads((TINY_SDXL / "training.toml").read_text())
    for change, message in (
        ({"vae": given["vae"] | {"stepz": 1}}, r"\[vae\] has unknown keys: stepz"),
        ({"vae": {}}, r"\[vae\] lacks batch"),
        ({"sizes": [[100, 256, 1.0]]}, "100x256 is not a multiple of 32"),
        ({"sizes": []}, "`sizes` is empty"),
    ):
        with pytest.raises(SettingsError, match=message):
            settings_from_table(given | change)


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
