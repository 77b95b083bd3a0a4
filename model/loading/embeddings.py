"""Embeddings of later versions of a release, for a server that runs.

`preheat add-embedding` publishes the next version of a release, which differs in two things: free rows of the text
encoders' tables of tokens have the vectors, and the tokenizers have their tokens. A server of the earlier version can
take over both. Its own prompts read none of these rows.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from model.deployment import Deployment, version_number
from model.errors import ConfigError
from model.loading.load import read_blobs
from model.loading.select import Selection, select
from model.loading.target import Target
from model.loading.token_tables import TOKEN_TABLE, check_token_ids, text_encoders, token_tables
from model.pipeline.components import FAMILIES
from model.prompts.tokenizer import ClipTokenizer
from model.store.manifest import Blob, Manifest, WeightsKey, WeightsRecord
from model.store.signature import check_signature
from model.store.store import Store
from model.weights.slot import WeightSlot
from model.weights.stream import Tensors, tensors_in


@dataclass(frozen=True)
class NewEmbeddings:
    """What a later version of a release adds.

    selection: of that version. tokenizers: all of them, by name. tables: the text encoders' tables of tokens on the
    host, by their weights' key and by name.
    """

    selection: Selection
    tokenizers: Mapping[str, ClipTokenizer]
    tables: Mapping[WeightsKey, Tensors]

    @property
    def tokens(self) -> list[str]:
        """The tokens of all embeddings of that version."""
        records = self.selection.manifest.tokenizers.values()
        return sorted({token for record in records for token in record.embeddings or {}})

    def write(self, slot: WeightSlot) -> None:
        """Write the tables into weights on the device."""
        for key, tables in self.tables.items():
            for name, table in tables.items():
                slot.tensors[key][name].copy_(table)


def later_versions(store: Store, manifest: Manifest) -> list[str]:
    """Return the later versions of a release, the lowest number first. Raises StoreError."""
    names = store.releases(manifest.model)
    return sorted(
        (name for name in names if version_number(name) > version_number(manifest.name)),
        key=version_number,
    )


def read_embeddings(
    store: Store,
    name: str,
    current: Selection,
    deployment: Deployment,
    targets: Sequence[Target],
    tokenizers: Mapping[str, ClipTokenizer],
    shared: Collection[str] = (),
) -> NewEmbeddings | None:
    """Return what the later version `name` adds to the release `current`; None if it differs in more than embeddings.

    `tokenizers`: those of `current`. `shared`: the digests of weights that other releases of the server use too.

    Raises what reading and checking a release raises, and ConfigError for tables that other releases use too.
    """
    manifest = store.read_release(name)
    if not may_differ_in_embeddings_only(manifest, current.manifest):
        return None
    check_signature(manifest, deployment.public_keys)
    later = select(manifest, targets, deployment).only(deployment.components)
    if later.shared != current.shared:
        return None
    encoders = dict(text_encoders(current))
    if lacking_tokens(manifest, current.manifest):
        return None
    own = {record.key: record for record in current.streamed_weights()}
    tables: dict[WeightsKey, Tensors] = {}
    for record in later.streamed_weights():
        key = record.key
        if record.component not in encoders or key in tables or own[key].blobs == record.blobs:
            continue
        if any(blob.sha256 in shared for blob in _differing(own[key], record)):
            raise ConfigError(
                f"The embeddings of {name} need a restart: other releases of this server have the same text encoders.",
                "Serve that version in place of the earlier one.",
            )
        first_free = 1 + tokenizers[encoders[record.component]].largest_id
        before, after = (_read(store, _differing(*pair)) for pair in ((own[key], record), (record, own[key])))
        if before.keys() != after.keys() or not all(
            _is_equal(before[tensor], after[tensor], first_free if tensor.endswith(TOKEN_TABLE) else None)
            for tensor in before
        ):
            return None
        tables[key] = {tensor: table for tensor, table in after.items() if tensor.endswith(TOKEN_TABLE)}
    extended = {name: tokenizers[name].with_embeddings(_embeddings(manifest, name)) for name in tokenizers}
    check_token_ids(later, extended, read_blobs(store, token_tables(later), later))
    return NewEmbeddings(later, extended, tables)


def may_differ_in_embeddings_only(one: Manifest, other: Manifest) -> bool:
    """True if two versions of a release are equal but for their embeddings and the weights of their text encoders."""
    return _without_embeddings(one) == _without_embeddings(other)


def lacking_tokens(manifest: Manifest, earlier: Manifest) -> set[str]:
    """Return the tokens of the embeddings of `earlier` that `manifest` lacks, or has in other rows."""
    both = [(_embeddings(earlier, name), _embeddings(manifest, name)) for name in manifest.tokenizers]
    return {token for before, after in both for token, rows in before.items() if after.get(token) != rows}


def _embeddings(manifest: Manifest, tokenizer: str) -> dict[str, tuple[int, ...]]:
    return manifest.tokenizers[tokenizer].embeddings or {}  # type: ignore[index]


def _without_embeddings(manifest: Manifest) -> Manifest:
    """Return a manifest without what versions with other embeddings differ in."""
    encoders = {name for one in FAMILIES[manifest.family].denoisers for name, _ in one.text_encoders}
    return manifest.model_copy(
        update={
            **{"version": "", "created": "", "builder": {}, "signature": None, "schema_version": 1},
            "tokenizers": {
                name: record.model_copy(update={"embeddings": None}) for name, record in manifest.tokenizers.items()
            },
            "weights": tuple(record for record in manifest.weights if record.component not in encoders),
        }
    )


def _differing(record: WeightsRecord, other: WeightsRecord) -> Iterator[Blob]:
    """Yield the blobs of `record` that `other` does not have."""
    return (blob for blob in record.blobs if blob not in other.blobs)


def _read(store: Store, blobs: Iterator[Blob]) -> Tensors:
    """Return the tensors of verified blobs, on the host."""
    found: Tensors = {}
    for blob in blobs:
        buffer = bytearray(blob.bytes)
        store.read(blob.sha256, memoryview(buffer))
        found |= tensors_in(buffer, blob)
    return found


def _is_equal(one: torch.Tensor, other: torch.Tensor, rows: int | None) -> bool:
    """True if two tensors are equal; of tables of tokens, their first rows."""
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one[:rows], other[:rows])
