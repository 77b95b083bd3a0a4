"""Add embeddings of textual inversion to a release, as a new version of it. Compiles nothing.

The vectors are written to free rows of the text encoders' tables of tokens (`preheat build --embedding-rows`), and the
tokens to the tokenizers. A token of several vectors is as many tokens: "token", "token_1", "token_2", as in diffusers.
Everything else is shared with the release.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.torch import load, save
from tokenizers import AddedToken, Tokenizer

from engine_builder.backends.built import put_blob
from engine_builder.embeddings.read import BadEmbedding, read_embedding
from engine_builder.releases.signing import sign
from engine_builder.stores.store import WritableStore
from model.pipeline.spec import BASE, REFINER
from model.store.manifest import Manifest, WeightsRecord
from model.store.manifest_json import split_name
from model.store.store import Store

_TABLE = "embeddings.token_embedding.weight"  # the end of its name, in every text encoder
_TOKEN = re.compile(r"[^\s\x00-\x1f]{1,64}")
_ROWS_REMEDY = "Build the model with more rows (`preheat build --embedding-rows`) and publish a new release."


def add_embeddings(
    store: WritableStore, release: str, files: Mapping[str, Path], key: Ed25519PrivateKey | None = None
) -> Manifest:
    """Publish the next version of a release with the embeddings of these files, by token. Returns its manifest.

    key: signs the new release. Raises BadEmbedding, ReleaseNotFound, CorruptBlob or StoreError.
    """
    manifest = store.read_release(release)
    # Tokenizer -> the text encoders that read its ids; the first belongs to the base.
    encoders: dict[str, list[str]] = {}
    for denoiser in (BASE, REFINER):
        for component, tokenizer in denoiser.encoders(manifest.architectures):
            encoders.setdefault(tokenizer, []).append(component)
    if any(engine.tensorrt for engine in manifest.engines if engine.component in sum(encoders.values(), [])):
        raise BadEmbedding(
            f"Release {release} has plans of TensorRT, which hold weights of their own.",
            "Build the model for aot_inductor with `--embedding-rows`.",
        )
    vectors = {token: read_embedding(path, len(encoders)) for token, path in files.items()}
    tokenizers, weights = dict(manifest.tokenizers), list(manifest.weights)
    for tokenizer, record in manifest.tokenizers.items():
        index, components = list(encoders).index(tokenizer), encoders[tokenizer]
        data, rows = _add_tokens(
            store.get(record.blob.sha256, record.blob.bytes).read_bytes(),
            {token: of_encoders[index] for token, of_encoders in vectors.items()},
        )
        tokenizers[tokenizer] = record.model_copy(update={"blob": put_blob(store, data)})
        for position, of_component in enumerate(weights):
            if of_component.component in components:
                weights[position] = _write_rows(store, release, of_component, rows)
    added = json.loads(manifest.builder.get("embeddings", "{}"))
    added |= {token: hashlib.sha256(path.read_bytes()).hexdigest() for token, path in files.items()}
    changed = manifest.model_copy(
        update={
            "version": _next_version(store, manifest.model),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "builder": manifest.builder | {"embeddings": json.dumps(added, sort_keys=True)},
            "tokenizers": tokenizers,
            "weights": tuple(weights),
            "signature": None,
        }
    )
    if key is not None:
        changed = sign(changed, key)
    store.write_release(changed)
    return changed


def parse_embedding(text: str) -> tuple[str, Path]:
    """Parse "TOKEN=FILE". Raises BadEmbedding."""
    token, _, path = text.partition("=")
    if not path or not _TOKEN.fullmatch(token):
        raise BadEmbedding(
            f"{text!r:.100} is not TOKEN=FILE.", "Give a token without spaces, for example <cat>=cat.safetensors."
        )
    return token, Path(path)


def _add_tokens(data: bytes, vectors: Mapping[str, torch.Tensor]) -> tuple[bytes, dict[int, torch.Tensor]]:
    """Add tokens to a tokenizer.json. Returns the new file, and the vector of each new id."""
    tokenizer = Tokenizer.from_buffer(data)
    rows = {}
    for token, of_token in vectors.items():
        for number, vector in enumerate(of_token):
            name = f"{token}_{number}" if number else token
            if tokenizer.token_to_id(name) is not None:
                raise BadEmbedding(
                    f"The token {name!r} is in the release's tokenizer already.", "Choose another token."
                )
            tokenizer.add_tokens([AddedToken(name, normalized=True, special=False)])
            identity = tokenizer.token_to_id(name)
            assert identity is not None
            rows[identity] = vector
    return tokenizer.to_str().encode(), rows


def _write_rows(
    store: WritableStore, release: str, record: WeightsRecord, rows: Mapping[int, torch.Tensor]
) -> WeightsRecord:
    """Store a text encoder's weights with these rows of its table of tokens. Raises BadEmbedding."""
    blobs = []
    for blob in record.blobs:
        tensors = load(store.get(blob.sha256, blob.bytes).read_bytes())
        names = [name for name in tensors if name.endswith(_TABLE)]
        for name in names:
            table = tensors[name]
            for row, vector in rows.items():
                if len(vector) != table.shape[1]:
                    raise BadEmbedding(
                        f"The embedding has vectors of width {len(vector)}, and {record.component} of release "
                        f"{release} has tokens of width {table.shape[1]}."
                    )
                if row >= len(table):
                    raise BadEmbedding(
                        f"Release {release} has no free row for {len(rows)} vectors: {record.component} has rows for "
                        f"{len(table) - min(rows)} more.",
                        _ROWS_REMEDY,
                    )
                table[row] = vector.to(table.dtype)
        blobs.append(put_blob(store, save(tensors)) if names else blob)
    return record.model_copy(update={"blobs": tuple(blobs)})


def _next_version(store: Store, model: str) -> str:
    """Return the next whole number after the versions of a model."""
    versions = [version for _, version in map(split_name, store.releases(model))]
    return str(max((int(version) for version in versions if version.isdigit()), default=0) + 1)
