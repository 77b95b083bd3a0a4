"""Releases with swapped engines or tokenizers and consistent digests, as a broken tool or an attacker publishes them.

Native code takes any tensors. So each swap must be detected from the packages and the manifest, or in the warm-up.
"""

import copy
import io
import itertools
import json
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
from model.engines.aot_inductor.package import IDENTITY, Identity, check_identity
from model.errors import EngineError, MissingComponent
from model.loading.load import Loaded
from model.loading.target import detect_targets
from model.loading.warmup import warm_up
from model.store.manifest import Bucket, EngineRecord, Signature
from tests.support import releases
from tests.support.components import BASE_COMPONENTS
from tests.support.deployments import deployed, load_release

NAME = "toy-sdxl/1"
Entries = dict[str, Any]
FIX = "(`preheat build`, `preheat publish`)"
NEXT = dict(zip(BASE_COMPONENTS, (*BASE_COMPONENTS[1:], BASE_COMPONENTS[0]), strict=True))
"""Each component, and another one."""


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
        return load_release(self.store, deployed(self.name), detect_targets(), ColdStart())


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


@pytest.fixture
def toy(toy_copy: Release) -> Release:
    return Release(toy_copy.store, copy.deepcopy(toy_copy.entries))


@pytest.fixture
def nameless(toy: Release) -> Release:
    """The toy with packages that do not name their component."""
    for engine in toy.entries["engines"]:
        engine["blob"] = releases.put_blob(toy.store, without_component_name(toy.package(engine))).model_dump()
    return toy


# What an engine of one component gets from an engine of another.
SWAPPED_ENTRIES = {
    "code": ("blob",),
    "code and map": ("blob", "constants"),
    "code and interface": ("blob", "constants", "signature", "bucket"),
    "record": ("blob", "constants", "signature", "bucket", "key"),
}
each_swap = pytest.mark.parametrize("swapped", SWAPPED_ENTRIES.values(), ids=SWAPPED_ENTRIES)


def swap(release: Release, component: str, other: str, swapped: tuple[str, ...]) -> None:
    source = release.engine(other)
    release.update_engines(component, {name: source[name] for name in swapped})


def test_identity_tells_all_pairs_of_components_apart(toy: Release) -> None:
    for component, other in itertools.permutations(BASE_COMPONENTS, 2):
        source, code = toy.engine(other), toy.package(toy.engine(other))
        for swapped in SWAPPED_ENTRIES.values():
            record = EngineRecord.model_validate(toy.engine(component) | {name: source[name] for name in swapped})
            with pytest.raises(EngineError, match=f"The {component} engine .* compiled for the {other} engine"):
                check_identity(record, code, set(BASE_COMPONENTS) - {component})


@each_swap
def test_refuses_engine_of_another_component(swapped: tuple[str, ...], toy_copy: Release) -> None:
    for component, other in list(NEXT.items())[::3]:
        toy = Release(toy_copy.store, copy.deepcopy(toy_copy.entries))
        swap(toy, component, other, swapped)
        with pytest.raises(EngineError) as caught:
            toy.load()
        message = str(caught.value)
        assert f"The {component} engine " in message and f"was compiled for the {other} engine" in message
        assert FIX in message


def test_refuses_components_under_exchanged_names(toy: Release) -> None:
    toy.exchange_names("unet", "vae_decoder")
    with pytest.raises(EngineError, match="was compiled for the"):
        toy.load()


@each_swap
def test_refuses_nameless_engine_of_another_component(swapped: tuple[str, ...], nameless: Release) -> None:
    intact = copy.deepcopy(nameless.entries)
    for component, other in NEXT.items() if swapped == ("blob",) else [("unet", "vae_decoder")]:
        nameless.entries = copy.deepcopy(intact)
        swap(nameless, component, other, swapped)
        with pytest.raises(EngineError, match=component) as caught:
            nameless.load()
        assert FIX in str(caught.value)


def test_warm_up_refuses_exchanged_nameless_engines(nameless: Release) -> None:
    intact = copy.deepcopy(nameless.entries)
    with torch.inference_mode():
        warm_up(nameless.load())
        for one, two in NEXT.items():
            nameless.entries = copy.deepcopy(intact)
            nameless.exchange_names(one, two)
            with pytest.raises(EngineError) as caught:
                warm_up(nameless.load())
            message = str(caught.value)
            assert (one in message or two in message) and FIX in message


@each_swap
def test_refuses_exchange_of_base_and_refiner(
    swapped: tuple[str, ...], store: WritableStore, release: str, tmp_path: Path
) -> None:
    """Both have the same kind of network, with other weights and sizes."""
    assert isinstance(store, WritableLocalStore)
    (tmp_path / "blobs").symlink_to(store.root / "blobs")
    tiny = Release(WritableLocalStore(tmp_path), json.loads(store.read_release(release).to_json()), release)
    base, refiner = tiny.engine("unet"), tiny.engine("refiner_unet")
    tiny.update_engines("refiner_unet", {name: base[name] for name in swapped})
    tiny.update_engines("unet", {name: refiner[name] for name in swapped})
    with pytest.raises(EngineError, match="unet") as caught:
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


CHANGED_IDENTITIES: tuple[tuple[Callable[[Identity], Identity], str], ...] = (
    (with_other_bucket, "The unet engine .*compiled for another bucket.*`preheat build`"),
    (with_other_signature, "The unet engine .*compiled for other inputs or outputs.*`preheat build`"),
    (without_signature, f"unet engine cannot be opened .its {IDENTITY} is damaged"),
)


def test_refuses_package_with_another_identity(toy: Release, tmp_path: Path) -> None:
    """Native code checks no size: an engine of another bucket would read beyond its inputs."""
    identity = identity_of_unet(toy)
    for change, words in CHANGED_IDENTITIES:
        set_identity_of_unet(toy, change(identity), tmp_path)
        with pytest.raises(EngineError, match=words):
            toy.load()
    set_identity_of_unet(toy, identity, tmp_path)
    assert toy.load().release == NAME


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


ENCODERS = {"tokenizer": "text_encoder", "tokenizer_2": "text_encoder_2"}


@pytest.mark.parametrize("tokenizer", ENCODERS)
def test_refuses_ids_without_a_row(tokenizer: str, toy_copy: Release) -> None:
    """Native code ends the process for such an id, at the first prompt that has it."""
    encoder = ENCODERS[tokenizer]
    rows = rows_of(toy_copy, encoder)
    for change, beyond in ((embed, 0), (embed, 2**31 - 2000), (extend_vocabulary, 0), (extend_vocabulary, 100)):
        toy = Release(toy_copy.store, copy.deepcopy(toy_copy.entries))
        change(toy, tokenizer, rows + beyond)
        with pytest.raises(MissingComponent) as caught:
            toy.load()
        words = f"The {tokenizer} of release {NAME} has the id {rows + beyond}, in its vocabulary or its embeddings"
        assert words in str(caught.value) and f"{encoder} has {rows} rows" in str(caught.value)
        assert FIX in str(caught.value)
    toy = Release(toy_copy.store, copy.deepcopy(toy_copy.entries))
    embed(toy, tokenizer, rows - 1)
    assert toy.load().release == NAME
