"""A release that loads: real engines and weights of a small linear network."""

import json
import shutil
from pathlib import Path

import pytest

from engine_builder.stores.local import WritableLocalStore
from tests.model.loading.helpers import Entries
from tests.support import releases
from tests.support.releases import RELEASE_NAME


@pytest.fixture(scope="session")
def valid_store(tmp_path_factory: pytest.TempPathFactory) -> WritableLocalStore:
    """A store with the release. Do not write to it."""
    store = WritableLocalStore(tmp_path_factory.mktemp("valid") / "store")
    store.write_release(releases.draft_release(store, releases.compiled_toy()))
    return store


@pytest.fixture
def store(valid_store: WritableLocalStore, tmp_path: Path) -> WritableLocalStore:
    """A copy of the store, which a test may change."""
    return WritableLocalStore(shutil.copytree(valid_store.root, tmp_path / "store"))


@pytest.fixture
def entries(valid_store: WritableLocalStore) -> Entries:
    """The manifest as JSON, which a test may change and write with `releases.write_manifest`."""
    return dict(json.loads(valid_store.read_release(RELEASE_NAME).to_json()))
