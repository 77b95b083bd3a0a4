"""Copies of the toy's folder and store, for tests that change them."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from engine_builder.building.build_plan import BuildPlan
from engine_builder.commands.main import app
from engine_builder.networks.network import ModelFolder
from model.store.store import (
    Store,
    open_store,
)


@pytest.fixture
def store_copy(toy_store: Store, tmp_path: Path) -> Store:
    """A store of its own in which the toy is built and published."""
    shutil.copytree(Path(toy_store.url.removeprefix("file://")), tmp_path / "store")
    return open_store(tmp_path / "store")


@pytest.fixture
def folder_copy(toy_folder: Path, tmp_path: Path) -> Path:
    """The toy's folder, to be changed."""
    return Path(shutil.copytree(toy_folder, tmp_path / "copy"))


@pytest.fixture
def plan_of(toy_plan: BuildPlan) -> Callable[[Path, str], BuildPlan]:
    """The toy's plan for another folder under another name."""
    return lambda folder, name: replace(toy_plan, base=ModelFolder(folder), model=name)


@pytest.fixture
def edit_weights() -> Callable[[Path, Callable[[dict[str, torch.Tensor]], None]], None]:
    """Change the tensors of a part, such as folder / "unet", in place."""

    def edit(part: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
        [file] = part.glob("*.safetensors")
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})

    return edit


@pytest.fixture(scope="session")
def exported(toy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Path]:
    """The toy in fp16 through `preheat export-onnx`: a store and a folder. Not to be written to: copy them."""
    root = tmp_path_factory.mktemp("exported")
    result = CliRunner().invoke(
        app,
        ["export-onnx", str(toy_folder), "--store", str(root / "store"), "--out", str(root / "out")],
        catch_exceptions=False,
    )
    assert result.exit_code == 0, result.output
    return open_store(root / "store"), root / "out"
