"""Pools of encoded scenes: the numbers of their chunks, and the chunks that they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from tests.support.repository import REPOSITORY  # noqa: E402
from training import architecture  # noqa: E402
from training.dataset import CLASS_COUNTS, ChunkWorkers  # noqa: E402
from training.latent_pool import CHUNKS_PER_BLOCK, CHUNKS_PER_STEP, LatentPool, chunk_number  # noqa: E402
from training.render import SCENE_VECTOR_LENGTH  # noqa: E402
from training.run import TrainingRun  # noqa: E402
from training.settings import SettingsError, load_settings  # noqa: E402

pytestmark = pytest.mark.full
SETTINGS = REPOSITORY / "data" / "tiny-sdxl" / "training.toml"


@pytest.mark.parametrize(("stage", "first"), [("base", 10_000_000), ("refiner", 20_000_000)])
def test_shipped_model_keeps_its_chunk_numbers(stage: str, first: int) -> None:
    """Other numbers would be other scenes, so the training of data/tiny-sdxl would give another model."""
    settings = load_settings(SETTINGS)
    last = max(settings.base.steps, settings.refiner.steps) * CHUNKS_PER_STEP
    for index in (0, 1, 3000, last):
        assert chunk_number(stage, index) == first + index


def test_stages_never_share_a_chunk_number() -> None:
    """A long stage leaves its first block of numbers, for example when it resumes at step 10,000."""
    edges = [block * CHUNKS_PER_BLOCK for block in range(6)]
    indices = {edge + offset for edge in edges for offset in (-1, 0, 1) if edge + offset >= 0}
    numbers = [chunk_number(stage, index) for stage in ("base", "refiner") for index in indices]
    assert len(set(numbers)) == len(numbers)
    assert min(numbers) >= CHUNKS_PER_BLOCK, "the first block is the autoencoder's"


def put_scenes(count: int, capacity: int, folder: Path) -> LatentPool:
    """Put a chunk of `count` scenes into an empty pool."""
    run = TrainingRun(load_settings(SETTINGS), folder, ChunkWorkers(0))
    pool = LatentPool(run, architecture.vae().to(run.device), (64, 64), capacity)
    pool.put(
        vectors=torch.rand(count, SCENE_VECTOR_LENGTH, device=run.device),
        ids=torch.zeros(count, 1, 77, dtype=torch.int16, device=run.device),
        labels=torch.zeros(count, 1, len(CLASS_COUNTS), dtype=torch.int8, device=run.device),
        generator=torch.Generator(run.device).manual_seed(0),
    )
    return pool


def test_refuses_a_chunk_larger_than_the_pool(tmp_path: Path) -> None:
    """Two scenes of such a chunk would have one slot. A chunk may fill the pool."""
    assert put_scenes(2, capacity=2, folder=tmp_path).scene_count == 2
    with pytest.raises(SettingsError, match="A chunk has 3 scenes, but the pool of 64x64 holds 2. Lower `fresh`"):
        put_scenes(3, capacity=2, folder=tmp_path)
