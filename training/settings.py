"""Settings of a training run, read from a TOML file."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


class SettingsError(ValueError):
    """The settings file lacks a key, has one too many, or holds a value that cannot be used."""


@dataclass(frozen=True)
class VaeSettings:
    steps: int
    batch: int
    window: int
    whole_share: float
    rate: float
    kl: float


@dataclass(frozen=True)
class DecoderSettings:
    steps: int
    batch: int
    rate: float


@dataclass(frozen=True)
class DiffusionSettings:
    steps: int
    batch: int
    rate: float
    pool: int
    fresh: int
    wordings: int
    auxiliary: float


@dataclass(frozen=True)
class Settings:
    seed: int
    workers: int
    checkpoint_seconds: float
    sizes: tuple[tuple[int, int, float], ...]
    vae: VaeSettings
    decoder: DecoderSettings
    base: DiffusionSettings
    refiner: DiffusionSettings


def load(path: Path) -> Settings:
    with path.open("rb") as file:
        table = tomllib.load(file)
    return from_table(table)


def from_table(table: dict[str, Any]) -> Settings:
    table = dict(table)
    table["vae"] = _section(VaeSettings, table.get("vae", {}), "vae")
    table["decoder"] = _section(DecoderSettings, table.get("decoder", {}), "decoder")
    table["base"] = _section(DiffusionSettings, table.get("base", {}), "base")
    table["refiner"] = _section(DiffusionSettings, table.get("refiner", {}), "refiner")
    table["sizes"] = tuple((int(h), int(w), float(share)) for h, w, share in table.get("sizes", []))
    for height, width, _ in table["sizes"]:
        if height % 32 or width % 32:
            raise SettingsError(f"sizes must be multiples of 32, not {height}x{width}")
    if not table["sizes"]:
        raise SettingsError("sizes is empty; give at least [[256, 256, 1.0]]")
    return _section(Settings, table, "the file")


def _section(kind: Any, values: dict[str, Any], name: str) -> Any:
    known = {field.name for field in fields(kind)}
    if missing := known - set(values):
        raise SettingsError(f"{name} lacks {', '.join(sorted(missing))}")
    if unknown := set(values) - known:
        raise SettingsError(f"{name} has unknown keys: {', '.join(sorted(unknown))}")
    return kind(**values)
