"""Pools of encoded scenes: the numbers of their chunks, and the chunks that they refuse."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from tests.support.repository import REPOSITORY  # noqa: E402
from training.pictures.latent_pool import CHUNKS_PER_BLOCK, CHUNKS_PER_STEP, chunk_number  # noqa: E402
from training.settings import load_settings  # noqa: E402

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
