"""Add embeddings of textual inversion to a release, as a new version of it. Compiles nothing.

The vectors are written to free rows of the text encoders' tables of tokens (`preheat build --embedding-rows`). The
manifest has each token with its rows. Everything else is shared with the release.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.torch import load, save
from tokenizers import Tokenizer

from engine_builder.backends.built import put_blob
from engine_builder.embeddings.read import (
    ONE_FILE_EACH,
    BadEmbedding,
    EmbeddingFiles,
    describe_width,
    open_embedding,
    read_vectors,
)
from engine_builder.releases.publish import write_once
from engine_builder.stores.store import WritableStore
from model.deployment import version_number
from model.errors import ManifestError
from model.loading.embeddings import lacking_tokens, may_differ_in_embeddings_only
from model.loading.token_tables import TOKEN_TABLE
from model.pipeline.components import FAMILIES
from model.prompts.tokenizer import open_tokenizer
from model.store.manifest import EMBEDDING_TOKEN, Manifest, TokenizerRecord, WeightsRecord

_TOKEN_REMEDY = "Choose another token: at most 64 characters, none of them a space."
_ROWS_REMEDY = "Build the model with more rows (`preheat build --embedding-rows`) and publish a new release."


def add_embeddings(
    store: WritableStore,
    release: str,
    embeddings: Mapping[str, EmbeddingFiles],
    key: Ed25519PrivateKey | None = None,
    warn: Callable[[str], None] = lambda _: None,
) -> tuple[Manifest, bool]:
    """Publish the next version of a release with these embeddings, by token. key: signs the new release.

    warn: receives a sentence if servers that follow embeddings will not take the new version over.

    Returns what `write_once` returns. Raises BadEmbedding, ReleaseNotFound, ReleaseExists, CorruptBlob or StoreError.
    """
    for token in embeddings:
        if not re.fullmatch(EMBEDDING_TOKEN, token):
            raise BadEmbedding(f"{token!r:.100} is not a token: it has spaces, or is too long.", _TOKEN_REMEDY)
    manifest = store.read_release(release)
    # Tokenizer -> the text encoders that read its ids; the first belongs to the base.
    encoders: dict[str, list[str]] = {}
    for denoiser in FAMILIES[manifest.family].denoisers:
        for component, tokenizer in denoiser.text_encoders:
            if component in manifest.architectures:
                encoders.setdefault(tokenizer, []).append(component)
    if any(engine.tensorrt for engine in manifest.engines if engine.component in sum(encoders.values(), [])):
        raise BadEmbedding(
            f"Release {release} has plans of TensorRT, which hold weights of their own.",
            "Build the model for aot_inductor with `--embedding-rows`.",
        )
    vectors = {token: read_vectors(embedding, len(encoders)) for token, embedding in embeddings.items()}
    tokenizers, weights = dict(manifest.tokenizers), list(manifest.weights)
    for tokenizer, record in manifest.tokenizers.items():
        index, components = list(encoders).index(tokenizer), encoders[tokenizer]
        of_tokens = {token: of_encoders[index] for token, of_encoders in vectors.items()}
        data = store.get(record.blob.sha256, record.blob.bytes).read_bytes()
        assigned = _assign_rows(tokenizer, data, record, of_tokens)
        rows = {
            row: vector
            for token, of_token in of_tokens.items()
            for row, vector in zip(assigned[token], of_token, strict=True)
        }
        tokenizers[tokenizer] = record.model_copy(update={"embeddings": assigned})
        for position, of_component in enumerate(weights):
            if of_component.component in components:
                weights[position] = _write_rows(store, release, of_component, rows)
    digests = json.loads(manifest.builder.get("embeddings", "{}"))
    digests |= {token: ",".join(embedding.digests) for token, embedding in embeddings.items()}
    changed = manifest.model_copy(
        update={
            "builder": manifest.builder | {"embeddings": json.dumps(digests, sort_keys=True)},
            "tokenizers": tokenizers,
            "weights": tuple(weights),
        }
    )
    changed = changed.model_copy(update={"schema_version": changed.required_schema})
    added, is_new = write_once(store, changed, private_key=key)
    followed = followed_version(store, added)
    if followed is not None and (lacking := sorted(_lacking(added, followed))):
        warn(
            f"{added.name} lacks {', '.join(lacking)} of {followed.name}, so a server with follow_embeddings that uses "
            f"{followed.name} does not take it over. To keep them, add to {followed.name} instead."
        )
    return added, is_new


def followed_version(store: WritableStore, added: Manifest) -> Manifest | None:
    """Return the version that servers which follow embeddings use before `added`, if they began with the first one.

    It is the last one that keeps the embeddings of all such versions before it. Versions that cannot be read are left
    out. Raises StoreError.
    """
    followed: Manifest | None = None
    for name in sorted(store.releases(added.model), key=version_number):
        if not -1 < version_number(name) < version_number(added.name):
            continue
        with suppress(ManifestError):
            manifest = store.read_release(name)
            if may_differ_in_embeddings_only(manifest, added):
                followed = manifest if followed is None or not _lacking(manifest, followed) else followed
    return followed


def _lacking(manifest: Manifest, earlier: Manifest) -> set[str]:
    """Return the tokens of `earlier` that `manifest` lacks, or has with other vectors or rows."""
    digests, before = (json.loads(one.builder.get("embeddings", "{}")) for one in (manifest, earlier))
    return lacking_tokens(manifest, earlier) | {token for token in before if digests.get(token) != before[token]}


def open_embeddings(options: Sequence[str]) -> dict[str, EmbeddingFiles]:
    """Read the files of "TOKEN=FILE" and "TOKEN=FILE,FILE", a file for each text encoder. Raises BadEmbedding.

    A comma in the name of a file that exists divides nothing.
    """
    files: dict[str, EmbeddingFiles] = {}
    for text in options:
        token, _, value = text.partition("=")
        paths = [value] if os.path.isfile(value) else value.split(",")  # false for a name that no file can have
        if not all(paths) or not re.fullmatch(EMBEDDING_TOKEN, token):
            raise BadEmbedding(
                f"{text!r:.100} is not TOKEN=FILE.", "Give a token without spaces, for example <cat>=cat.safetensors."
            )
        if token in files:
            raise BadEmbedding(f"The token {token!r} is given twice.", f"Choose another token. {ONE_FILE_EACH}")
        files[token] = open_embedding(list(map(Path, paths)))
    return files


def _assign_rows(
    name: str, data: bytes, record: TokenizerRecord, vectors: Mapping[str, torch.Tensor]
) -> dict[str, tuple[int, ...]]:
    """Return the rows of all embeddings of a tokenizer, also of those that the release has. Raises BadEmbedding.

    `name`, `data`: the tokenizer's name and file. `vectors`: those of each new token.
    """
    tokenizer = open_tokenizer(data, record)
    embeddings = dict(record.embeddings or {})
    # Below the first free row are the vocabulary and the embeddings of releases before schema 5, in `data`.
    used = Tokenizer.from_buffer(data).get_vocab(with_added_tokens=True).values()
    free = 1 + max(used, default=-1)
    free = max([free, *(row + 1 for rows in embeddings.values() for row in rows)])
    new: dict[str, str] = {}  # by normalized token
    for token, of_token in vectors.items():
        if (twin := new.setdefault(tokenizer.normalize(token), token)) != token:
            raise BadEmbedding(
                f"The tokens {twin!r} and {token!r} are one for the release's tokenizer, which lower-cases and "
                "normalizes prompts.",
                _TOKEN_REMEDY,
            )
        if (known := tokenizer.equal_token(token)) is not None:
            as_known = "" if known == token else f", as {known!r}"
            raise BadEmbedding(f"The token {token!r} is in the release's tokenizer already{as_known}.", _TOKEN_REMEDY)
        if len(of_token) > record.chunk_tokens:
            raise BadEmbedding(
                f"The embedding of {token!r} has {len(of_token)} vectors. A prompt is read in chunks of "
                f"{record.chunk_tokens} tokens, and an embedding is never divided.",
                f"Train it with at most {record.chunk_tokens} vectors.",
            )
        embeddings[token] = tuple(range(free, free + len(of_token)))
        free += len(of_token)
    extended = tokenizer.with_embeddings(embeddings)
    for token in vectors:
        found = extended.pieces(token)
        if [piece.ids for piece in found] != [embeddings[token]]:
            parts = ", ".join(repr(token[piece.start : piece.stop]) for piece in found)
            raise BadEmbedding(f"The release's {name} divides the token {token!r} into {parts}.", _TOKEN_REMEDY)
    return embeddings


def _write_rows(
    store: WritableStore, release: str, record: WeightsRecord, rows: Mapping[int, torch.Tensor]
) -> WeightsRecord:
    """Store a text encoder's weights with these rows of its table of tokens. Raises BadEmbedding."""
    blobs = []
    for blob in record.blobs:
        tensors = load(store.get(blob.sha256, blob.bytes).read_bytes())
        names = [name for name in tensors if name.endswith(TOKEN_TABLE)]
        for name in names:
            table = tensors[name]
            for row, vector in rows.items():
                if len(vector) != table.shape[1]:
                    raise BadEmbedding(
                        f"The embedding has vectors of {describe_width(len(vector))}, and {record.component} of "
                        f"release {release} has tokens of {describe_width(table.shape[1])}.",
                        "Give an embedding that was trained for this model, two files in the order of its encoders.",
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
