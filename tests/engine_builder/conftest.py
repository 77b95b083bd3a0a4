"""Copies of the toy's folder and store for tests that change them, and ONNX graphs of both models."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from engine_builder.building.build_plan import BuildPlan
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.stores.store import WritableStore, open_writable_store
from preheat.main import app
from tests.conftest import file_lock
from tests.engine_builder.helpers import KEPT_GRAPHS, PlanOf, folder_of
from tests.support.tensorrt_rtx import require_tensorrt_rtx


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
    """The toy in fp16, exported by `preheat export-onnx` to a store and a folder. Do not write to them: copy them.

    The graphs are kept between test runs. The first export takes some 30 seconds.
    """
    root = tmp_path_factory.mktemp("exported")
    arguments = ["export-onnx", str(toy_folder), "--store", str(KEPT_GRAPHS), "--out", str(root / "out")]
    with file_lock(KEPT_GRAPHS.with_suffix(".lock")):
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return open_writable_store(shutil.copytree(KEPT_GRAPHS, root / "store")), root / "out"


@pytest.fixture(scope="session")
def rtx() -> ModuleType:
    """The module of TensorRT-RTX."""
    return require_tensorrt_rtx()
