"""Publishing: drafts become one release, once."""

from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from engine_builder.releases.publish import NothingToPublish, publish
from engine_builder.stores.store import WritableStore, open_writable_store
from model.errors import CorruptBlob, ManifestError, ReleaseExists
from model.store.manifest import Manifest

OTHER = "cuda-h200-sm90-torch2.13-cu130"


def read_draft(store: WritableStore) -> Manifest:
    [name] = [name for name in store.records("drafts") if OTHER not in name]
    return Manifest.model_validate_json(store.read_record("drafts", name) or b"")


def add_draft_of_another_target(store: WritableStore, **changes: object) -> Manifest:
    """Write the draft that a build of the same source on a GPU would write."""
    draft = read_draft(store)
    engines = tuple(engine.model_copy(update={"target": OTHER, "key": engine.key[::-1]}) for engine in draft.engines)
    other = draft.model_copy(update={"engines": engines, **changes})
    store.write_record("drafts", f"toy-sdxl.{OTHER}.fp32", other.to_json())
    return other


def test_drafts_of_two_targets_become_one_release(store_copy: WritableStore) -> None:
    own = read_draft(store_copy)
    add_draft_of_another_target(store_copy)
    manifest, new = publish(store_copy, "toy-sdxl")
    assert (manifest.name, new) == ("toy-sdxl/2", True)
    assert store_copy.read_release("toy-sdxl/2") == manifest
    assert manifest.targets == tuple(sorted((own.engines[0].target, OTHER)))
    assert len(manifest.engines) == 2 * len(own.engines)
    assert {weights.component: weights for weights in manifest.weights} == {
        weights.component: weights for weights in own.weights
    }


def test_release_is_independent_of_build_order(store_copy: WritableStore) -> None:
    """It does not name the options of one draft."""
    options = dict.fromkeys(("tensorrt", "fp8", "fp8_convolutions", "int8", "lora_rank", "bands"), "{}")
    for number, builder in enumerate((read_draft(store_copy).builder, read_draft(store_copy).builder | options)):
        add_draft_of_another_target(store_copy, created="2020-01-01T00:00:00+00:00", builder=builder)
        first, is_new = publish(store_copy, "toy-sdxl")
        assert is_new == (number == 0) and not options.keys() & first.builder.keys()
        add_draft_of_another_target(store_copy, created="2099-01-01T00:00:00+00:00", builder=builder)
        assert publish(store_copy, "toy-sdxl") == (first, False)


def test_omits_a_draft_of_an_older_source(store_copy: WritableStore) -> None:
    for entry in ("source", "preset", "vae"):
        older = read_draft(store_copy).builder | {entry: "older"}
        add_draft_of_another_target(store_copy, created="2020-01-01T00:00:00+00:00", builder=older)
        said: list[str] = []
        manifest, new = publish(store_copy, "toy-sdxl", report=said.append)
        assert (manifest.name, new) == ("toy-sdxl/1", False) and OTHER not in manifest.targets
        [sentence] = said
        assert f"the build for {OTHER} of 2020-01-01T00:00" in sentence and entry.lower() in sentence.lower()


def test_release_has_the_architectures_of_all_drafts(store_copy: WritableStore) -> None:
    """A draft with an option, bands for example, has components that a newer draft lacks."""
    architectures = read_draft(store_copy).architectures | {"unet_2_bands": "0" * 64}
    add_draft_of_another_target(store_copy, created="2020-01-01T00:00:00+00:00", architectures=architectures)
    manifest, _ = publish(store_copy, "toy-sdxl")
    assert manifest.architectures == architectures


def test_refuses_engines_that_do_not_fit_together(store_copy: WritableStore) -> None:
    """As of two precisions that were built with other options or versions: the server would refuse to load them."""
    draft = read_draft(store_copy)
    engine = next(engine for engine in draft.engines if engine.component == "text_encoder")
    signature = engine.signature.model_copy(update={"inputs": engine.signature.inputs[:1]})
    other = engine.model_copy(update={"key": "0" * 64, "signature": signature})
    changed = draft.model_copy(update={"engines": (*draft.engines, other)})
    store_copy.write_record("drafts", "toy-sdxl.another.fp32", changed.to_json())
    with pytest.raises(
        ManifestError, match="text_encoder engines that take or return different tensors.*preheat build"
    ):
        publish(store_copy, "toy-sdxl")
    assert store_copy.releases() == ["toy-sdxl/1"]


def test_refuses_weights_of_another_form(store_copy: WritableStore) -> None:
    """As of two targets that were built by different versions: the older engines would not fit the newer weights."""
    [*weights, last] = read_draft(store_copy).weights
    other = last.model_copy(update={"blobs": (last.blobs[0].model_copy(update={"sha256": "0" * 64}),)})
    add_draft_of_another_target(store_copy, created="2020-01-01T00:00:00+00:00", weights=(*weights, other))
    with pytest.raises(ManifestError, match=rf"{last.component} in different forms\. Build for {OTHER} again"):
        publish(store_copy, "toy-sdxl")
    assert store_copy.releases() == ["toy-sdxl/1"]


def test_other_numbers_for_previews_make_no_release(store_copy: WritableStore) -> None:
    """Each build fits it again, so other numbers alone make no other release."""
    draft, published = read_draft(store_copy), store_copy.read_release("toy-sdxl/1")
    fitted = draft.settings.preview
    assert fitted is not None and published.settings.preview == fitted and published.schema_version == 5
    colours = fitted.layers[1].model_copy(update={"bias": (0.0,) * 3})
    again = fitted.model_copy(update={"layers": (fitted.layers[0], colours)})
    [name] = store_copy.records("drafts")
    for preview, is_new in ((again, False), (None, True)):
        settings = draft.settings.model_copy(update={"preview": preview})
        store_copy.write_record("drafts", name, draft.model_copy(update={"settings": settings}).to_json())
        manifest, new = publish(store_copy, "toy-sdxl")
        assert new == is_new and (manifest.settings.preview == fitted) != is_new


def test_refuses_an_existing_name(store_copy: WritableStore) -> None:
    before = store_copy.read_release("toy-sdxl/1")
    assert publish(store_copy, "toy-sdxl/1") == publish(store_copy, "toy-sdxl") == (before, False)
    with pytest.raises(ReleaseExists, match="toy-sdxl/1 is already published"):
        publish(store_copy, "toy-sdxl/1", Ed25519PrivateKey.generate())
    assert store_copy.read_release("toy-sdxl/1") == before and store_copy.releases() == ["toy-sdxl/1"]
    assert publish(store_copy, "toy-sdxl/summer")[0].version == "summer"
    assert publish(store_copy, "toy-sdxl/010")[1]
    assert publish(store_copy, "toy-sdxl")[0].version == "010"
    add_draft_of_another_target(store_copy)
    with pytest.raises(ReleaseExists, match="toy-sdxl/010 is already published"):
        publish(store_copy, "toy-sdxl/010")
    assert publish(store_copy, "toy-sdxl")[0].version == "11"


def test_refuses_invalid_names_and_missing_builds(tmp_path: Path, store_copy: WritableStore) -> None:
    for name in ("", "../x", "toy-sdxl/../x", "a/b/c", "toy sdxl"):
        with pytest.raises(ManifestError, match="is not a release name"):
            publish(store_copy, name)
    with pytest.raises(NothingToPublish, match="has no draft of toy-sdxl. Run `preheat build` first"):
        publish(open_writable_store(tmp_path / "empty"), "toy-sdxl")
    with pytest.raises(NothingToPublish, match="no draft of another"):
        publish(store_copy, "another")


class StoreWithDeletedDraft:
    """A store that lists a draft which another process deletes before it is read."""

    def __init__(self, store: WritableStore) -> None:
        self.store = store

    def records(self, kind: str) -> list[str]:
        return ["toy-sdxl.deleted.fp32", *self.store.records(kind)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def test_names_a_damaged_draft_of_this_model_only(store_copy: WritableStore) -> None:
    store_copy.write_record("drafts", "another.cpu.fp32", b'{"model": 1}')
    assert publish(StoreWithDeletedDraft(store_copy), "toy-sdxl/2")[1]
    store_copy.write_record("drafts", "toy-sdxl.other.fp32", b'{"model": 1}')
    with pytest.raises(ManifestError, match="draft toy-sdxl.other.fp32 .* is damaged"):
        publish(store_copy, "toy-sdxl")


def test_refuses_missing_or_damaged_blobs(store_copy: WritableStore) -> None:
    blob = read_draft(store_copy).weights[0].blobs[0]
    path = store_copy.get(blob.sha256, blob.bytes)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    for _ in ("damaged", "missing"):
        with pytest.raises(CorruptBlob):
            publish(store_copy, "toy-sdxl/2")
        path.unlink(missing_ok=True)
    assert store_copy.releases() == ["toy-sdxl/1"]
