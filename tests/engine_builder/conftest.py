"""Copies of the toy's folder and store for tests that change them, and ONNX graphs of both models."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from engine_builder.backends.onnx.graph_store import load_or_export_graph
from engine_builder.building.build_plan import BuildPlan
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.commands.main import app
from engine_builder.networks.network import Network, load_network
from engine_builder.stores.store import WritableStore, open_writable_store
from model.store.precision import FP16
from tests.conftest import file_lock
from tests.engine_builder.helpers import KEPT_GRAPHS, PlanOf, folder_of
from tests.support.components import BASE_COMPONENTS, REFINER_COMPONENTS
from tests.support.repository import MODEL_FOLDER
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
    """The toy in fp16, exported by `preheat export-onnx` to a store and a folder. Do not write to them: copy them."""
    root = tmp_path_factory.mktemp("exported")
    result = CliRunner().invoke(
        app,
        ["export-onnx", str(toy_folder), "--store", str(root / "store"), "--out", str(root / "out")],
        catch_exceptions=False,
    )
    assert result.exit_code == 0, result.output
    return open_writable_store(root / "store"), root / "out"


@pytest.fixture(scope="session")
def tiny_networks() -> dict[str, Network]:
    """The networks of data/tiny-sdxl and its refiner in fp16, by component."""
    base, refiner = Checkpoint(MODEL_FOLDER), Checkpoint(MODEL_FOLDER / "refiner")
    networks = {name: load_network(base, name, FP16) for name in BASE_COMPONENTS}
    return networks | {name: load_network(refiner, name, FP16) for name in REFINER_COMPONENTS}


@pytest.fixture(scope="session")
def tiny_graphs(tiny_networks: dict[str, Network], show_progress: Callable[[str], None]) -> WritableStore:
    """A store with the ONNX graphs of `tiny_networks`. It is kept between test runs: copy it to write to it.

    The first export takes some 40 seconds.
    """
    store = open_writable_store(KEPT_GRAPHS)
    with file_lock(KEPT_GRAPHS.with_suffix(".lock")):
        for name, network in tiny_networks.items():
            show_progress(f"graphs in fp16: {name}")
            load_or_export_graph(network, store)
    return store


@pytest.fixture(scope="session")
def rtx() -> ModuleType:
    """The module of TensorRT-RTX."""
    return require_tensorrt_rtx()
