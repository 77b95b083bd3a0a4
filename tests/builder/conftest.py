"""Copies of the toy's folder and store for tests that change them."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from engine_builder.building.build_plan import BuildPlan
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.commands.main import app
from engine_builder.stores.store import WritableStore, open_writable_store


@pytest.fixture
def store_copy(toy_store: WritableStore, tmp_path: Path) -> WritableStore:
    """A copy of the store in which the toy is built and published."""
    shutil.copytree(Path(toy_store.url.removeprefix("file://")), tmp_path / "store")
    return open_writable_store(tmp_path / "store")


@pytest.fixture
def folder_copy(toy_folder: Path, tmp_path: Path) -> Path:
    """A copy of the toy's folder."""
    return Path(shutil.copytree(toy_folder, tmp_path / "copy"))


@pytest.fixture
def plan_of(toy_plan: BuildPlan) -> Callable[[Path, str], BuildPlan]:
    """Make the toy's plan for another folder and model name."""
    return lambda folder, name: replace(toy_plan, base=Checkpoint(folder), model=name)


@pytest.fixture
def edit_weights() -> Callable[[Path, Callable[[dict[str, torch.Tensor]], None]], None]:
    """Change the tensors of a subfolder, such as folder / "unet", in place."""

    def edit(subfolder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
        [file] = subfolder.glob("*.safetensors")
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})

    return edit


@pytest.fixture(scope="session")
def exported(toy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[WritableStore, Path]:
    """The toy in fp16 through `preheat export-onnx`: a store and a folder. Do not write to them: copy them."""
    root = tmp_path_factory.mktemp("exported")
    result = CliRunner().invoke(
        app,
        ["export-onnx", str(toy_folder), "--store", str(root / "store"), "--out", str(root / "out")],
        catch_exceptions=False,
    )
    assert result.exit_code == 0, result.output
    return open_writable_store(root / "store"), root / "out"
