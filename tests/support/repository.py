"""Folders of this repository."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL_FOLDER = REPOSITORY / "data" / "tiny-sdxl"
PACKAGES = ("model", "engine_builder", "gateway", "benchmarks", "preheat")
