"""Copies of the toy's folder and store for tests that change them, and its ONNX export."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine_builder.building.build_plan import BuildPlan
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.commands.main import app
from engine_builder.stores.store import WritableStore, open_writable_store
from tests.builder.helpers import PlanOf, folder_of


@pytest.fixture
def store_copy(toy_store: WritableStore, tmp_path: Path) -> WritableStore:
    """A copy of the store in which the toy is built and published."""
    return open_writable_store(shutil.copytree(folder_of(toy_store), tmp_path / "store"))


@pytest.fixture
def folder_copy(toy_folder: Path, tmp_path: Path) -> Path:
    """A copy of the toy's folder."""
    return Path(shutil.copytree(toy_folder, tmp_path / "copy"))


@pytest.fixture
def plan_of(toy_plan: BuildPlan) -> PlanOf:
    """Return the toy's plan for another folder and model name."""
    return lambda folder, name: replace(toy_plan, base=Checkpoint(folder), model=name)


@pytest.fixture(scope="session")
def exported(toy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[WritableStore, Path]:
    """The toy in fp16, exported by `preheat export-onnx` to a store and a folder. Do not write to them: copy them."""
    root = tmp_path_factory.mktemp("exported")
    result = CliRunner().invoke(
        app,
        ["export-onnx", str(toy_folder), "--store", str(root / "store"), "--out", str(root / "out")],
        catch_exceptions=False,
    )
    assert result.exit_code == 0, result.output
    return open_writable_store(root / "store"), root / "out"
