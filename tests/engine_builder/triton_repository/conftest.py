"""Fixtures of the tests on a real Triton server."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_builder.building.build import build
from engine_builder.building.build_plan import BuildPlan
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.releases.publish import publish
from engine_builder.stores.store import WritableStore, open_writable_store
from model.loading.target import Target
from model.store.precision import FP32
from tests.conftest import KEPT_TOYS, file_lock
from tests.support import toy_sd
from tests.support.repository import MODEL_FOLDER, REPOSITORY
from tests.support.triton_server import require_triton

INSTALLED = REPOSITORY / ".preheat" / "tritonserver-2.51"


@pytest.fixture(scope="session")
def installed() -> Path:
    """The folder of Triton's programs."""
    with file_lock(INSTALLED.with_suffix(".lock")):
        return require_triton(INSTALLED)


@pytest.fixture(scope="session")
def sd_store(
    target: Target, tmp_path_factory: pytest.TempPathFactory, show_progress: Callable[[str], None]
) -> WritableStore:
    """A store with two toys of Stable Diffusion 1.5: toy-sd/1 and toy-sd/2. Their engines are kept between runs."""
    root = tmp_path_factory.mktemp("triton-sd")
    plans = []
    for seed in (0, 1):
        folder = toy_sd.write(root / f"toy-{seed}", MODEL_FOLDER / "tokenizer", "1.5", seed)
        plans.append(BuildPlan("toy-sd", Checkpoint(folder), None, target, FP32))
    with file_lock(KEPT_TOYS.with_suffix(".lock")):
        kept = open_writable_store(KEPT_TOYS)
        build(plans[0], kept, lambda component, activity, *_: show_progress(f"toy SD: {component}: {activity}"))
        shutil.copytree(KEPT_TOYS, root / "store")
    store = open_writable_store(root / "store")
    publish(store, "toy-sd")
    build(plans[1], store)  # compiles nothing: the networks are the same
    publish(store, "toy-sd")
    return store
