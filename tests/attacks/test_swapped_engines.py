"""Releases whose engines are mixed up, with consistent digests, as a broken tool or an attacker could publish them.

Native code takes any tensors, so each mix-up is found from the packages and the manifest, or in the warm-up.
"""

import copy
import io
import itertools
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_builder.backends.aot_inductor.compile import write_identity
from engine_builder.stores.local import WritableLocalStore
from engine_builder.stores.store import WritableStore
from model.cold_start import ColdStart
from model.engines.aot_inductor.package import IDENTITY, Identity
from model.errors import EngineError
from model.loading.load import Loaded, load_release
from model.loading.target import detect_targets
from model.loading.warmup import warm_up
from model.store.manifest import Bucket, Signature
from tests.conftest import KEPT_STORE
from tests.support import releases
from tests.support.components import BASE_COMPONENTS, REFINER_COMPONENTS

NAME = "toy-sdxl/1"
Entries = dict[str, Any]
PAIRS = list(itertools.combinations(BASE_COMPONENTS, 2))
OTHERS = list(itertools.permutations(BASE_COMPONENTS, 2))
REBUILD = "(`preheat build`, `preheat publish`)"


@pytest.fixture(scope="module")
def copied(toy_store: WritableStore, tmp_path_factory: pytest.TempPathFactory) -> WritableLocalStore:
    """A store whose release each test rewrites; its blobs are not changed."""
    store = WritableLocalStore(tmp_path_factory.mktemp("swapped") / "store")
    manifest = toy_store.read_release(NAME)
    for digest, blob in manifest.blobs().items():
        store.put(toy_store.get(digest, blob.bytes))
    releases.write_manifest(store.root, manifest.to_json(), NAME)
    return store


@pytest.fixture
def entries(copied: WritableLocalStore, toy_store: WritableStore) -> Entries:
    """The valid manifest as JSON, to be changed."""
    return dict(json.loads(toy_store.read_release(NAME).to_json()))


def engine_of(entries: Entries, component: str) -> Entries:
    return dict(next(engine for engine in entries["engines"] if engine["component"] == component))


def replace_engine(entries: Entries, component: str, change: Entries) -> None:
    for engine in entries["engines"]:
        if engine["component"] == component:
            engine.update(copy.deepcopy(change))


def load(store: WritableLocalStore, entries: Entries, name: str = NAME) -> Loaded:
    releases.write_manifest(store.root, entries, name)
    return load_release(store, name, detect_targets(), [], ColdStart())


TAKEN: dict[str, tuple[str, ...]] = {
    "code": ("blob",),
    "code and map": ("blob", "constants"),
    "code and interface": ("blob", "constants", "signature", "bucket"),
    "record": ("blob", "constants", "signature", "bucket", "key"),
}


@pytest.mark.parametrize("taken", TAKEN.values(), ids=TAKEN)
@pytest.mark.parametrize("component, other", OTHERS)
def test_refuses_engine_of_another_component(
    component: str, other: str, taken: tuple[str, ...], copied: WritableLocalStore, entries: Entries
) -> None:
    given = engine_of(entries, other)
    replace_engine(entries, component, {name: given[name] for name in taken})
    with pytest.raises(EngineError) as caught:
        load(copied, entries)
    message = str(caught.value)
    assert f"The {component} engine " in message and f"was compiled for the {other} engine" in message
    assert REBUILD in message


def exchange_names(entries: Entries, one: str, two: str) -> None:
    """Exchange two components with their weights. All of each is consistent."""
    names = {one: two, two: one}
    for record in entries["engines"] + entries["weights"]:
        record["component"] = names.get(record["component"], record["component"])


@pytest.mark.parametrize("one, two", PAIRS)
def test_refuses_components_under_exchanged_names(
    one: str, two: str, copied: WritableLocalStore, entries: Entries
) -> None:
    exchange_names(entries, one, two)
    with pytest.raises(EngineError, match="was compiled for the") as caught:
        load(copied, entries)
    assert (one in str(caught.value) or two in str(caught.value)) and REBUILD in str(caught.value)


def renamed(package: bytes, folder: str) -> bytes:
    """Return a package with another top folder, as one that says nothing about itself."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(package)) as old, zipfile.ZipFile(buffer, "w") as new:
        for name in old.namelist():
            new.writestr(f"{folder}/{name.partition('/')[2]}", old.read(name))
    return buffer.getvalue()


@pytest.fixture(scope="module")
def nameless(
    copied: WritableLocalStore, toy_store: WritableStore, tmp_path_factory: pytest.TempPathFactory
) -> tuple[WritableLocalStore, Entries]:
    """A store and a manifest whose packages do not name their component."""
    store = WritableLocalStore(shutil.copytree(copied.root, tmp_path_factory.mktemp("nameless") / "store"))
    entries = json.loads(toy_store.read_release(NAME).to_json())
    for engine in entries["engines"]:
        package = renamed(store.get(engine["blob"]["sha256"], engine["blob"]["bytes"]).read_bytes(), "package")
        engine["blob"] = releases.put_blob(store, package).model_dump()
    return store, entries


@pytest.fixture
def nameless_entries(nameless: tuple[WritableLocalStore, Entries]) -> Entries:
    return copy.deepcopy(nameless[1])


def test_loads_packages_that_name_no_component(
    nameless: tuple[WritableLocalStore, Entries], nameless_entries: Entries
) -> None:
    with torch.inference_mode():
        warm_up(load(nameless[0], nameless_entries))


@pytest.mark.parametrize("taken", TAKEN.values(), ids=TAKEN)
@pytest.mark.parametrize("component, other", OTHERS)
def test_refuses_nameless_engine_of_another_component(
    component: str,
    other: str,
    taken: tuple[str, ...],
    nameless: tuple[WritableLocalStore, Entries],
    nameless_entries: Entries,
) -> None:
    given = engine_of(nameless_entries, other)
    replace_engine(nameless_entries, component, {name: given[name] for name in taken})
    with pytest.raises(EngineError, match=component) as caught:
        load(nameless[0], nameless_entries)
    assert REBUILD in str(caught.value)


@pytest.mark.parametrize("one, two", PAIRS)
def test_warm_up_refuses_exchanged_nameless_engines(
    one: str, two: str, nameless: tuple[WritableLocalStore, Entries], nameless_entries: Entries
) -> None:
    exchange_names(nameless_entries, one, two)
    with pytest.raises(EngineError) as caught, torch.inference_mode():
        warm_up(load(nameless[0], nameless_entries))
    assert (one in str(caught.value) or two in str(caught.value)) and REBUILD in str(caught.value)


@pytest.mark.parametrize("taken", TAKEN.values(), ids=TAKEN)
@pytest.mark.parametrize("component", [name for name in REFINER_COMPONENTS if name != "refiner_text_encoder_2"])
def test_refuses_exchange_of_base_and_refiner(
    component: str, taken: tuple[str, ...], store: WritableStore, release: str, tmp_path: Path
) -> None:
    """Both are of one kind, and differ in their weights and sizes."""
    linked = WritableLocalStore(tmp_path)
    (tmp_path / "blobs").symlink_to(KEPT_STORE / "blobs")
    entries = json.loads(store.read_release(release).to_json())
    base = component.removeprefix("refiner_")
    records = engine_of(entries, base), engine_of(entries, component)
    for name, given in zip((component, base), records, strict=True):
        replace_engine(entries, name, {key: given[key] for key in taken})
    with pytest.raises(EngineError, match=base) as caught:
        load(linked, entries, release)
    assert REBUILD in str(caught.value)


def changed_bucket(identity: Identity) -> Identity:
    return identity.model_copy(update={"bucket": Bucket(batch=identity.bucket.batch)})


def changed_signature(identity: Identity) -> Identity:
    outputs = tuple(spec.model_copy(update={"dtype": "float16"}) for spec in identity.signature.outputs)
    return Identity(bucket=identity.bucket, signature=Signature(inputs=identity.signature.inputs, outputs=outputs))


IDENTITIES: dict[str, tuple[Callable[[Identity], Identity], str]] = {
    "bucket": (changed_bucket, "compiled for another bucket"),
    "signature": (changed_signature, "compiled for other inputs or outputs"),
}


def with_identity(store: WritableLocalStore, entries: Entries, identity: Identity, folder: Path) -> None:
    """Give the UNet of a manifest a package that states this identity, as a build writes it."""
    engine = engine_of(entries, "unet")
    package = folder / f"unet-{engine['key'][:12]}.pt2"
    given = store.get(engine["blob"]["sha256"], engine["blob"]["bytes"]).read_bytes()
    with zipfile.ZipFile(io.BytesIO(given)) as old, zipfile.ZipFile(package, "w") as new:
        for name in old.namelist():
            if not name.endswith(f"/{IDENTITY}"):
                new.writestr(name, old.read(name))
    write_identity(package, identity)
    replace_engine(entries, "unet", {"blob": releases.put_blob(store, package.read_bytes()).model_dump()})


def identity_of(entries: Entries) -> Identity:
    engine = engine_of(entries, "unet")
    return Identity.model_validate({"bucket": engine["bucket"], "signature": engine["signature"]})


def test_loads_package_with_the_identity_of_its_record(
    copied: WritableLocalStore, entries: Entries, tmp_path: Path
) -> None:
    with_identity(copied, entries, identity_of(entries), tmp_path)
    assert load(copied, entries).release == NAME


@pytest.mark.parametrize("change, words", IDENTITIES.values(), ids=IDENTITIES)
def test_refuses_record_that_changes_what_was_compiled(
    change: Callable[[Identity], Identity], words: str, copied: WritableLocalStore, entries: Entries, tmp_path: Path
) -> None:
    """Native code checks no size: an engine of another bucket would read beyond its inputs."""
    with_identity(copied, entries, change(identity_of(entries)), tmp_path)
    with pytest.raises(EngineError, match=f"The unet engine .*{words}.*`preheat build`"):
        load(copied, entries)


def test_refuses_damaged_identity(copied: WritableLocalStore, entries: Entries, tmp_path: Path) -> None:
    identity = identity_of(entries)
    with_identity(copied, entries, identity.model_construct(bucket=identity.bucket), tmp_path)
    with pytest.raises(EngineError, match=f"unet engine cannot be opened .its {IDENTITY} is damaged"):
        load(copied, entries)
