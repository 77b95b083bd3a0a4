"""Releases with swapped engines or tokenizers and consistent digests, as a broken tool or an attacker publishes them.

Native code takes any tensors. So each swap must be detected from the packages and the manifest, or in the warm-up.
"""

import copy
import io
import itertools
import json
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from engine_builder.backends.aot_inductor.compile import write_identity
from engine_builder.stores.local import WritableLocalStore
from engine_builder.stores.store import WritableStore
from model.cold_start import ColdStart
from model.engines.aot_inductor.package import IDENTITY, Identity
from model.errors import EngineError, MissingComponent
from model.loading.load import Loaded, load_release
from model.loading.target import detect_targets
from model.loading.warmup import warm_up
from model.store.manifest import Bucket, Signature
from tests.support import releases
from tests.support.components import BASE_COMPONENTS, REFINER_COMPONENTS

NAME = "toy-sdxl/1"
Entries = dict[str, Any]
PAIRS = list(itertools.combinations(BASE_COMPONENTS, 2))
ORDERED_PAIRS = list(itertools.permutations(BASE_COMPONENTS, 2))
FIX = "(`preheat build`, `preheat publish`)"


@dataclass
class Release:
    """A store, and a manifest as JSON that a test changes."""

    store: WritableLocalStore
    entries: Entries
    name: str = NAME

    def engine(self, component: str) -> Entries:
        """Return the first engine of a component."""
        return dict(next(engine for engine in self.entries["engines"] if engine["component"] == component))

    def update_engines(self, component: str, changes: Entries) -> None:
        """Change entries of all engines of a component."""
        for engine in self.entries["engines"]:
            if engine["component"] == component:
                engine.update(copy.deepcopy(changes))

    def exchange_names(self, one: str, two: str) -> None:
        """Exchange the names of two components, with their weights. Each of them stays consistent."""
        new_names = {one: two, two: one}
        for record in self.entries["engines"] + self.entries["weights"]:
            record["component"] = new_names.get(record["component"], record["component"])

    def package(self, engine: Entries) -> bytes:
        return self.store.get(engine["blob"]["sha256"], engine["blob"]["bytes"]).read_bytes()

    def load(self) -> Loaded:
        releases.write_manifest(self.store.root, self.entries, self.name)
        return load_release(self.store, self.name, detect_targets(), [], ColdStart())


@pytest.fixture(scope="module")
def toy_copy(toy_store: WritableStore, tmp_path_factory: pytest.TempPathFactory) -> Release:
    """The toy in a store of this module."""
    store = WritableLocalStore(tmp_path_factory.mktemp("swapped") / "store")
    manifest = toy_store.read_release(NAME)
    for digest, blob in manifest.blobs().items():
        store.put(toy_store.get(digest, blob.bytes))
    return Release(store, json.loads(manifest.to_json()))


def without_component_name(package: bytes) -> bytes:
    """Return a package whose top folder does not name its component."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(package)) as old, zipfile.ZipFile(buffer, "w") as new:
        for name in old.namelist():
            new.writestr(f"package/{name.partition('/')[2]}", old.read(name))
    return buffer.getvalue()


@pytest.fixture(scope="module")
def nameless_copy(toy_copy: Release, tmp_path_factory: pytest.TempPathFactory) -> Release:
    """The toy in a store of this module, with packages that do not name their component."""
    store = WritableLocalStore(shutil.copytree(toy_copy.store.root, tmp_path_factory.mktemp("nameless") / "store"))
    entries = copy.deepcopy(toy_copy.entries)
    for engine in entries["engines"]:
        engine["blob"] = releases.put_blob(store, without_component_name(toy_copy.package(engine))).model_dump()
    return Release(store, entries)


@pytest.fixture
def toy(toy_copy: Release) -> Release:
    return Release(toy_copy.store, copy.deepcopy(toy_copy.entries))


@pytest.fixture
def nameless(nameless_copy: Release) -> Release:
    return Release(nameless_copy.store, copy.deepcopy(nameless_copy.entries))


# What an engine of one component gets from an engine of another.
SWAPPED_ENTRIES: dict[str, tuple[str, ...]] = {
    "code": ("blob",),
    "code and map": ("blob", "constants"),
    "code and interface": ("blob", "constants", "signature", "bucket"),
    "record": ("blob", "constants", "signature", "bucket", "key"),
}
each_swap = pytest.mark.parametrize("swapped", SWAPPED_ENTRIES.values(), ids=SWAPPED_ENTRIES)


@each_swap
@pytest.mark.parametrize("component, other", ORDERED_PAIRS)
def test_refuses_engine_of_another_component(
    component: str, other: str, swapped: tuple[str, ...], toy: Release
) -> None:
    source = toy.engine(other)
    toy.update_engines(component, {name: source[name] for name in swapped})
    with pytest.raises(EngineError) as caught:
        toy.load()
    message = str(caught.value)
    assert f"The {component} engine " in message and f"was compiled for the {other} engine" in message
    assert FIX in message


@pytest.mark.parametrize("one, two", PAIRS)
def test_refuses_components_under_exchanged_names(one: str, two: str, toy: Release) -> None:
    toy.exchange_names(one, two)
    with pytest.raises(EngineError, match="was compiled for the") as caught:
        toy.load()
    assert (one in str(caught.value) or two in str(caught.value)) and FIX in str(caught.value)


def test_loads_packages_that_name_no_component(nameless: Release) -> None:
    with torch.inference_mode():
        warm_up(nameless.load())


@each_swap
@pytest.mark.parametrize("component, other", ORDERED_PAIRS)
def test_refuses_nameless_engine_of_another_component(
    component: str, other: str, swapped: tuple[str, ...], nameless: Release
) -> None:
    source = nameless.engine(other)
    nameless.update_engines(component, {name: source[name] for name in swapped})
    with pytest.raises(EngineError, match=component) as caught:
        nameless.load()
    assert FIX in str(caught.value)


@pytest.mark.parametrize("one, two", PAIRS)
def test_warm_up_refuses_exchanged_nameless_engines(one: str, two: str, nameless: Release) -> None:
    nameless.exchange_names(one, two)
    with pytest.raises(EngineError) as caught, torch.inference_mode():
        warm_up(nameless.load())
    assert (one in str(caught.value) or two in str(caught.value)) and FIX in str(caught.value)


@each_swap
@pytest.mark.parametrize("component", [name for name in REFINER_COMPONENTS if name != "refiner_text_encoder_2"])
def test_refuses_exchange_of_base_and_refiner(
    component: str, swapped: tuple[str, ...], store: WritableStore, release: str, tmp_path: Path
) -> None:
    """Both have the same kind of network, with other weights and sizes."""
    assert isinstance(store, WritableLocalStore)
    (tmp_path / "blobs").symlink_to(store.root / "blobs")
    tiny = Release(WritableLocalStore(tmp_path), json.loads(store.read_release(release).to_json()), release)
    base = component.removeprefix("refiner_")
    engines = tiny.engine(base), tiny.engine(component)
    for target, source in zip((component, base), engines, strict=True):
        tiny.update_engines(target, {name: source[name] for name in swapped})
    with pytest.raises(EngineError, match=base) as caught:
        tiny.load()
    assert FIX in str(caught.value)


# -- the identity in a package: the bucket and the signature that it was compiled for ---------------------------------


def identity_of_unet(release: Release) -> Identity:
    engine = release.engine("unet")
    return Identity.model_validate({"bucket": engine["bucket"], "signature": engine["signature"]})


def set_identity_of_unet(release: Release, identity: Identity, folder: Path) -> None:
    """Replace the UNet's package with one that has this identity, as a build writes it."""
    engine = release.engine("unet")
    package = folder / f"unet-{engine['key'][:12]}.pt2"
    with zipfile.ZipFile(io.BytesIO(release.package(engine))) as old, zipfile.ZipFile(package, "w") as new:
        for name in old.namelist():
            if not name.endswith(f"/{IDENTITY}"):
                new.writestr(name, old.read(name))
    write_identity(package, identity)
    release.update_engines("unet", {"blob": releases.put_blob(release.store, package.read_bytes()).model_dump()})


def with_other_bucket(identity: Identity) -> Identity:
    return identity.model_copy(update={"bucket": Bucket(batch=identity.bucket.batch)})


def with_other_signature(identity: Identity) -> Identity:
    outputs = tuple(spec.model_copy(update={"dtype": "float16"}) for spec in identity.signature.outputs)
    return Identity(bucket=identity.bucket, signature=Signature(inputs=identity.signature.inputs, outputs=outputs))


def without_signature(identity: Identity) -> Identity:
    return identity.model_construct(bucket=identity.bucket)


CHANGED_IDENTITIES: dict[str, tuple[Callable[[Identity], Identity], str]] = {
    "bucket": (with_other_bucket, "The unet engine .*compiled for another bucket.*`preheat build`"),
    "signature": (with_other_signature, "The unet engine .*compiled for other inputs or outputs.*`preheat build`"),
    "damaged": (without_signature, f"unet engine cannot be opened .its {IDENTITY} is damaged"),
}


def test_loads_package_with_its_identity(toy: Release, tmp_path: Path) -> None:
    set_identity_of_unet(toy, identity_of_unet(toy), tmp_path)
    assert toy.load().release == NAME


@pytest.mark.parametrize("change, words", CHANGED_IDENTITIES.values(), ids=CHANGED_IDENTITIES)
def test_refuses_package_with_another_identity(
    change: Callable[[Identity], Identity], words: str, toy: Release, tmp_path: Path
) -> None:
    """Native code checks no size: an engine of another bucket would read beyond its inputs."""
    set_identity_of_unet(toy, change(identity_of_unet(toy)), tmp_path)
    with pytest.raises(EngineError, match=words):
        toy.load()


# -- ids of tokens that the text encoders' tables lack ----------------------------------------------------------------


def rows_of(release: Release, encoder: str) -> int:
    """Return the number of rows of a text encoder's table of tokens."""
    blob = release.engine(encoder)["constants"]
    constants = json.loads(release.store.get(blob["sha256"], blob["bytes"]).read_bytes()).values()
    [rows] = [entry["shape"][0] for entry in constants if entry["tensor"].endswith("token_embedding.weight")]
    return int(rows)


def embed(release: Release, tokenizer: str, last_id: int) -> None:
    """Give all tokenizers an embedding, the last vector of one of them in this row."""
    for name, record in release.entries["tokenizers"].items():
        record["embeddings"] = {"<x>": [2, last_id if name == tokenizer else 3]}


def extend_vocabulary(release: Release, tokenizer: str, last_id: int) -> None:
    """Replace a tokenizer by one with more tokens, up to this id."""
    record = release.entries["tokenizers"][tokenizer]
    extended = Tokenizer.from_file(str(release.store.get(record["blob"]["sha256"], record["blob"]["bytes"])))
    vocabulary = extended.get_vocab(with_added_tokens=True)
    extended.add_tokens([f"<new{id}>" for id in range(max(vocabulary.values()), last_id)])
    assert max(extended.get_vocab(with_added_tokens=True).values()) == last_id
    record["blob"] = releases.put_blob(release.store, extended.to_str().encode()).model_dump()


UNKNOWN_IDS: dict[str, tuple[Callable[[Release, str, int], None], int]] = {
    "embedding just outside": (embed, 0),
    "embedding": (embed, 100_000),
    "embedding at the limit of 32 bits": (embed, 2**31 - 2000),
    "vocabulary": (extend_vocabulary, 0),
    "larger vocabulary": (extend_vocabulary, 100),
}
ENCODERS = {"tokenizer": "text_encoder", "tokenizer_2": "text_encoder_2"}


@pytest.mark.parametrize("tokenizer", ENCODERS)
@pytest.mark.parametrize("change, beyond", UNKNOWN_IDS.values(), ids=UNKNOWN_IDS)
def test_refuses_ids_without_a_row(
    change: Callable[[Release, str, int], None], beyond: int, tokenizer: str, toy: Release
) -> None:
    """Native code ends the process for such an id, at the first prompt that has it."""
    encoder = ENCODERS[tokenizer]
    rows = rows_of(toy, encoder)
    change(toy, tokenizer, rows + beyond)
    with pytest.raises(MissingComponent) as caught:
        toy.load()
    words = f"The {tokenizer} of release {NAME} has the id {rows + beyond}, in its vocabulary or its embeddings"
    assert words in str(caught.value) and f"{encoder} has {rows} rows" in str(caught.value)
    assert FIX in str(caught.value)


@pytest.mark.parametrize("tokenizer", ENCODERS)
def test_loads_an_embedding_in_the_last_row(tokenizer: str, toy: Release) -> None:
    embed(toy, tokenizer, rows_of(toy, ENCODERS[tokenizer]) - 1)
    assert toy.load().release == NAME
