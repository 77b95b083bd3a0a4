"""A release with UNets for bands of an image."""

import shutil
from collections.abc import Callable
from dataclasses import replace

import pytest

from engine_builder.building.build import build
from engine_builder.building.build_plan import BuildPlan
from engine_builder.releases.publish import publish
from engine_builder.stores.store import WritableStore, open_writable_store
from model.cold_start import ColdStart
from model.loading.load import Loaded
from model.loading.target import detect_targets
from tests.conftest import KEPT_TOYS, file_lock, make_build_report
from tests.support.deployments import deployed, load_release
from tests.support.ranks import BAND_RELEASE, BANDS


@pytest.fixture(scope="session")
def band_store(
    toy_plan: BuildPlan, tmp_path_factory: pytest.TempPathFactory, show_progress: Callable[[str], None]
) -> WritableStore:
    """A store with the toy, built with UNets for two, four and eight bands, as toy-bands/1."""
    plan = replace(toy_plan, model="toy-bands", bands=(BANDS, 4, 8))
    folder = tmp_path_factory.mktemp("band-store") / "store"
    with file_lock(KEPT_TOYS.with_suffix(".lock")):
        build(plan, open_writable_store(KEPT_TOYS), make_build_report(show_progress, "toy store"))
        shutil.copytree(KEPT_TOYS, folder, ignore=shutil.ignore_patterns("drafts"))
    store = open_writable_store(folder)
    build(plan, store)
    publish(store, "toy-bands")
    return store


@pytest.fixture(scope="session")
def whole(band_store: WritableStore) -> Loaded:
    return load_release(band_store, deployed(BAND_RELEASE), detect_targets(), ColdStart())
