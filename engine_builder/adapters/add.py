"""Add an adapter to a store: match its file with a release's layers, and write its parts and its record.

The record names layers of the checkpoint and fits every release that has them. The release is only read to learn the
names and shapes of its layers. An engine's map of constants has them, so no weights are fetched.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.torch import save

from engine_builder.adapters.bad_adapter import BadAdapter
from engine_builder.adapters.read import AdapterFile, open_adapter, read_changes
from engine_builder.backends.built import put_blob
from engine_builder.building.weights import group_tensors
from engine_builder.releases.signing import sign_adapter
from engine_builder.stores.store import WritableStore
from model.adapters.changes import Change
from model.adapters.layers import COMPONENTS, Layer, find_layers
from model.errors import AdapterExists, ManifestError, PreheatError, StoreError
from model.store.adapter_forms import stored_shape
from model.store.adapter_record import AdapterLayer, AdapterRecord
from model.store.keys import adapter_key
from model.store.manifest import Manifest
from model.store.manifest_json import parse_constants
from model.store.store import Store

_MAX_NAMED = 5  # unreadable releases in one message


def add_adapter(
    store: WritableStore,
    name: str,
    path: Path,
    release: str | None = None,
    key: Ed25519PrivateKey | None = None,
    warn: Callable[[str], None] = lambda _: None,
    add_embeddings: Callable[[AdapterFile], None] | None = None,
) -> tuple[AdapterRecord, str, bool]:
    """Add the adapter of a file under `name`. Returns its record, a release that it fits, and False if it existed.

    release: the release that it must fit; None: any of the store's. key: signs the record.
    warn: receives sentences about what of the file is left out. add_embeddings: is called for a file that fits, before
    the adapter is written; None: its embeddings are left out.

    Raises BadAdapter, AdapterExists for another adapter of that name, ReleaseNotFound, or StoreError.
    """
    adapter_key(name)  # refuses an unsafe name before the file is read
    file = open_adapter(path)
    fitting, layers, changes = _match(store, file, release)
    for warning in (*file.warnings, *(file.left_out if add_embeddings is None else ())):
        warn(warning)
    if add_embeddings is not None:
        add_embeddings(file)
    record = AdapterRecord(
        name=name,
        source=hashlib.sha256(file.data).hexdigest(),
        layers={layer: _record_layer(change, layers[layer].shape) for layer, change in changes.items()},
        blobs=tuple(
            put_blob(store, save(tensors))
            for tensors in group_tensors(
                {
                    f"{layer}.{role}": tensor.contiguous()
                    for layer, change in changes.items()
                    for role, tensor in change.parts.items()
                }
            )
        ),
    )
    record = record.model_copy(update={"schema_version": record.required_schema})
    if key is not None:
        record = sign_adapter(record, key)
    try:
        store.write_adapter(record)
    except AdapterExists:
        existing = store.read_adapter(name)
        if existing.model_copy(update={"signature": record.signature}) != record or (key and existing != record):
            raise
        return existing, fitting, False
    return record, fitting, True


def _record_layer(change: Change, shape: tuple[int, ...]) -> AdapterLayer:
    """Return a change's entry in the record. shape: of the layer's tensor."""
    shape = stored_shape(shape)
    if change.is_low_rank:
        return AdapterLayer(rank=len(change.parts["down"]), scale=change.scale, shape=shape)
    parts = {role: tuple(tensor.shape) for role, tensor in change.parts.items()}
    return AdapterLayer(form=change.form, parts=parts, scale=change.scale, shape=shape)


def release_layers(store: Store, manifest: Manifest) -> dict[str, Layer]:
    """Return the layers of a release that adapters may change, by the constants of its engines."""
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for component in COMPONENTS:
        engine = next((engine for engine in manifest.engines if engine.component == component), None)
        if engine is not None:
            constants = parse_constants(store.get(engine.constants.sha256, engine.constants.bytes).read_bytes())
            shapes[component] = {constant.tensor: constant.shape for constant in constants.values()}
    return find_layers(shapes)


def _match(
    store: WritableStore, file: AdapterFile, release: str | None
) -> tuple[str, dict[str, Layer], dict[str, Change]]:
    """Return a release that the adapter fits, the newest first, its layers, and the changes by layer.

    Unreadable releases are skipped. If no other one fits, the error names them.
    """
    names = [release] if release else store.releases()
    if not names:
        raise BadAdapter(
            f"{store.url} has no release, so the adapter cannot be compared with one.",
            "Publish the model first (`preheat publish`).",
        )
    tried: set[tuple[tuple[str, str], ...]] = set()
    failures: list[BadAdapter] = []
    unreadable: list[PreheatError] = []
    for name in reversed(names):
        try:
            manifest = store.read_release(name)
        except (ManifestError, StoreError) as error:
            if release:
                raise
            unreadable.append(error)
            continue
        architecture = tuple(sorted(manifest.architectures.items()))
        if architecture in tried:
            continue
        tried.add(architecture)
        try:
            layers = release_layers(store, manifest)
            return name, layers, read_changes(file, layers)
        except BadAdapter as error:
            failures.append(error)
        except (ManifestError, StoreError) as error:  # of its map of constants
            if release:
                raise
            tried.discard(architecture)  # an intact release of this architecture may follow
            unreadable.append(error)
    if not unreadable:
        raise failures[0]
    reasons = " ".join(str(error.args[0]) for error in [*failures[:1], *unreadable[:_MAX_NAMED]])
    raise BadAdapter(
        f"{file.path} fits no release of {store.url} that can be read. {reasons}",
        "Repair those releases (`preheat verify`), or name one that the adapter fits (`--release`).",
    )
