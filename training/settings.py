"""Settings of a training run, read from a TOML file. The names of the fields are the keys of the file."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


class SettingsError(ValueError):
    """The settings file lacks a key, has an unknown key, or has an invalid value."""


@dataclass(frozen=True)
class AutoencoderSettings:
    steps: int
    batch: int
    window: int  # side in pixels of the crops that most steps train on
    whole_share: float  # of the steps, at the end, on whole images
    rate: float  # maximum learning rate
    kl: float  # weight of the KL divergence in the loss


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
    pool: int  # encoded scenes in memory at the native size; other sizes have a sixth
    fresh: int  # scenes that are replaced at a time
    wordings: int  # captions per scene
    auxiliary: float  # weight of the auxiliary head's loss


@dataclass(frozen=True)
class Settings:
    seed: int
    workers: int  # processes that generate scenes
    checkpoint_seconds: float
    sizes: tuple[tuple[int, int, float], ...]  # height, width, share of the steps; the native size first
    vae: AutoencoderSettings
    decoder: DecoderSettings
    base: DiffusionSettings
    refiner: DiffusionSettings

    @property
    def native_size(self) -> tuple[int, int]:
        """Height and width in pixels of the images that the autoencoder is trained on."""
        return self.sizes[0][:2]


def load_settings(path: Path) -> Settings:
    """Read a TOML file. Raises SettingsError."""
    with path.open("rb") as file:
        table = tomllib.load(file)
    return settings_from_table(table)


def settings_from_table(table: dict[str, Any]) -> Settings:
    """Build settings from parsed TOML. Raises SettingsError."""
    table = dict(table)
    table["vae"] = _section(AutoencoderSettings, table.get("vae", {}), "[vae]")
    table["decoder"] = _section(DecoderSettings, table.get("decoder", {}), "[decoder]")
    table["base"] = _section(DiffusionSettings, table.get("base", {}), "[base]")
    table["refiner"] = _section(DiffusionSettings, table.get("refiner", {}), "[refiner]")
    table["sizes"] = tuple((int(h), int(w), float(share)) for h, w, share in table.get("sizes", []))
    for height, width, _ in table["sizes"]:
        if height % 32 or width % 32:
            raise SettingsError(f"Size {height}x{width} is not a multiple of 32. Choose multiples of 32 in `sizes`.")
    if not table["sizes"]:
        raise SettingsError("`sizes` is empty. Give at least one size: sizes = [[256, 256, 1.0]].")
    return _section(Settings, table, "The settings file")


def _section(kind: Any, values: dict[str, Any], name: str) -> Any:
    known = {field.name for field in fields(kind)}
    if missing := known - set(values):
        raise SettingsError(f"{name} lacks {', '.join(sorted(missing))}. Add what is missing.")
    if unknown := set(values) - known:
        raise SettingsError(
            f"{name} has unknown keys: {', '.join(sorted(unknown))}. Known: {', '.join(sorted(known))}."
        )
    return kind(**values)
