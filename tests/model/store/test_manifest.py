"""Manifests: valid ones survive writing and reading; others are refused by one line that states the fix."""

import copy
import json
from typing import Any

import pytest

from engine_builder.stores.local import WritableLocalStore
from model.errors import ManifestError
from model.store.manifest import (
    BLOB_LIMIT,
    MANIFEST_LIMIT,
    PACKAGE_LIMIT,
    SCHEMA_VERSION,
    SMALL_BLOB_LIMIT,
    Manifest,
    PreviewRecord,
)
from model.store.manifest_json import parse_constants, parse_manifest, split_name
from tests.support import releases

Entries = dict[str, Any]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return releases.draft_release(WritableLocalStore(tmp_path_factory.mktemp("store")))


@pytest.fixture
def entries(manifest: Manifest) -> Entries:
    """The manifest as JSON, to be damaged."""
    return json.loads(manifest.to_json())


def refusal(data: bytes | Entries, name: str = releases.RELEASE_NAME) -> str:
    """Return the error of a manifest that must be refused."""
    with pytest.raises(ManifestError) as caught:
        parse_manifest(data if isinstance(data, bytes) else json.dumps(data).encode(), name)
    message = str(caught.value)
    assert message.isprintable() and len(message) < 700, "it would fill a log or forge a line"
    return message


def test_written_manifest_is_read_again(manifest: Manifest) -> None:
    spaced = json.dumps(json.loads(manifest.to_json()), indent=7).encode() + b"\n \t"
    assert parse_manifest(manifest.to_json(), manifest.name) == parse_manifest(spaced, manifest.name) == manifest


def test_refuses_unsafe_release_name() -> None:
    for name in (
        "", "toy", "toy/", "/1", "toy/1/2", "../toy/1", "toy/..", "toy/.1", "toy//1", "/etc/passwd", "toy\\/1",
        "toy/1\n", "toy/1\0", "toy/ 1", "tøy/1", "toy/-1", "toy/" + "1" * 129, "~/1", "toy/%2e%2e",
    ):  # fmt: skip
        with pytest.raises(ManifestError, match="Write model/version"):
            split_name(name)


def test_splits_release_name() -> None:
    assert split_name("sdxl-base-1.0/2026.01_b") == ("sdxl-base-1.0", "2026.01_b")


NOT_JSON = (
    b"",
    b'{"schema_version": 1, "model": "toy"',
    b'{"schema_version": 1, "model": "\xff"}',
    '{"schema_version": 1}'.encode("utf-16"),
    b'{"schema_version": 1, "model": "\\ud800"}',
    b'{"schema_version": 1, "defaults": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"a":' * 100_000,
    b'{"schema_version": ' + b"1" * 100_000 + b"}",
    b'{"schema_version": 1, "x": NaN}',
    b'{"schema_version": 1} // hello',
    b"[]",
    b'"toy/1"',
    b'{"schema_version": 1}{"schema_version": 1}',
)


def test_refuses_invalid_json() -> None:
    for data in NOT_JSON:
        assert "publish" in refusal(data), data[:80]


def test_refuses_repeated_key(manifest: Manifest) -> None:
    text = manifest.to_json().decode()
    assert "a key is repeated" in refusal(text.replace('"model": "toy"', '"model": "other", "model": "toy"').encode())
    deep = text.replace('"latent_channels": 4', '"latent_channels": 4, "latent_channels": 4')
    assert "a key is repeated" in refusal(deep.encode())


def test_refuses_infinite_numbers(manifest: Manifest) -> None:
    text = manifest.to_json().decode()
    for entry in ('"vae_scaling_factor": 0.13025', '"num_inference_steps": 4', '"relative": 0.0'):
        assert entry in text
        key = entry.partition(":")[0]
        for number, words in (("NaN", "is not a JSON number"), ("-1e999", "exceeds the range of a number")):
            assert f"{number} {words}" in refusal(text.replace(entry, f"{key}: {number}").encode())


def test_refuses_large_manifest(manifest: Manifest) -> None:
    data = manifest.to_json()
    assert parse_manifest(data + b" " * (MANIFEST_LIMIT - len(data)), manifest.name) == manifest
    assert str(MANIFEST_LIMIT) in refusal(data + b" " * (MANIFEST_LIMIT + 1 - len(data)))


def test_newer_schema_says_to_upgrade(entries: Entries) -> None:
    for version in (SCHEMA_VERSION + 1, 10**4000):
        message = refusal(entries | {"schema_version": version, "key_of_the_future": {}})
        assert f"reads up to {SCHEMA_VERSION}" in message and "Upgrade Preheat" in message
        assert "`preheat build`" in message


def test_refuses_invalid_schema_version(entries: Entries) -> None:
    for version in (None, "1", 1.0, True, [1], 0, -1):
        assert "Upgrade" not in refusal(entries | {"schema_version": version})
    del entries["schema_version"]
    assert "schema_version" in refusal(entries)


def test_refuses_manifest_of_another_release(entries: Entries) -> None:
    message = refusal(entries, "toy/2")
    assert "manifest of toy/2 is that of toy/1" in message and "`preheat publish`" in message


def test_refuses_every_unknown_key(entries: Entries) -> None:
    """Adds one to each object of the manifest, except where keys are data."""
    free_form = {"builder", "defaults", "schedulers", "architectures"}
    refused = 0

    def visit(node: Any, path: tuple[str, ...]) -> None:
        nonlocal refused
        if isinstance(node, dict) and not free_form & set(path):
            node["surprise"] = 1
            assert "surprise" in refusal(entries), path
            del node["surprise"]
            refused += 1
        for key, child in list(node.items() if isinstance(node, dict) else enumerate(node)):
            if isinstance(child, dict | list):
                visit(child, (*path, str(key)))

    visit(entries, ())
    assert refused > 50


def test_refuses_field_name_in_place_of_key(entries: Entries) -> None:
    """`Bucket.batch` is "rows" in JSON. An older server would refuse "batch", so every server does."""
    bucket = entries["engines"][0]["bucket"]
    bucket["batch"] = bucket.pop("rows")
    assert "damaged at engines.0.bucket.rows" in refusal(entries)


def test_requires_every_key(entries: Entries) -> None:
    for key in sorted(entries.keys() - {"defaults"}):
        assert key in refusal({kept: value for kept, value in entries.items() if kept != key})


ENGINE, SIGNATURE = "engines.0", "engines.0.signature"
BAD_VALUES: dict[str, list[object]] = {
    f"{ENGINE}.blob.sha256": ["../../../../etc/passwd" + "0" * 42, "A" * 64, "0" * 63, "0" * 64 + "\n", None],
    f"{ENGINE}.blob.bytes": ["17", 17.0, True, -1, 10**4000, 2**50],
    f"{ENGINE}.constants.bytes": [SMALL_BLOB_LIMIT + 1],
    "tokenizers.tokenizer.blob.bytes": [SMALL_BLOB_LIMIT + 1],
    "weights.0.blobs.0.bytes": [BLOB_LIMIT + 1],
    "weights.0.blobs": [[]],
    f"{ENGINE}.target": ["../cuda"],
    f"{ENGINE}.runtime": ["pickle"],
    "weights.0.precision": ["fp4"],
    f"{ENGINE}.component": ["controlnet"],  # without an architecture
    "weights.0.component": ["controlnet"],
    "model": [".."],
    "family": ["sd15"],
    "engines": [{}, "abc"],
    f"{ENGINE}.bucket.rows": [{"min": 4, "max": 1, "multiple": 1}, {"min": 1, "max": 4, "multiple": 3}],
    f"{ENGINE}.bucket.rows.min": [0],
    f"{ENGINE}.bucket.rows.max": [2**31],
    f"{ENGINE}.bucket.width": [None],
    f"{SIGNATURE}.inputs": [[]],
    f"{SIGNATURE}.outputs": [[]],
    f"{SIGNATURE}.inputs.0.shape": [[]],
    f"{SIGNATURE}.inputs.0.shape.0": [4],  # not rows
    f"{SIGNATURE}.inputs.0.shape.1": [0],
    f"{SIGNATURE}.inputs.0.shape.2": ["height/0", "depth"],
    f"{SIGNATURE}.inputs.0.dtype": ["complex64"],
    f"{ENGINE}.accuracy.cases": [0],
    "settings.native_height": [0],
    "settings.native_width": [65],
    "settings.vae_scale_factor": [0],
    "settings.vae_scaling_factor": [0.0],
    "settings.force_zeros_for_empty_prompt": [1],
    "tokenizers.tokenizer.pad_token_id": [-1],
    "tokenizers.tokenizer.max_length": [0],
    "tokenizers.tokenizer_3": [{}],
    "schedulers.third": [{}],
    "schedulers.base": [[]],
    "builder.preheat": [1],
}


def refuse_each(entries: Entries, values: dict[str, list[object]], words: str) -> None:
    """Set each value at its path in a copy of the manifest, which must be refused."""
    for path, refused in values.items():
        for value in refused:
            changed = copy.deepcopy(entries)
            releases.set_entry(changed, path, value)
            message = refusal(changed)
            assert words in message and "`preheat publish`" in message, (path, str(value)[:80])


def test_refuses_bad_values(entries: Entries) -> None:
    refuse_each(entries, BAD_VALUES, "damaged at")


def preview(channels: int = 4, units: int = 2) -> Entries:
    """A map for previews, as JSON."""
    row = [0.25] * (9 * channels)
    layers = [{"weight": [row] * units, "bias": [1e6] * units}, {"weight": [[-1.0] * units] * 3, "bias": [0.0] * 3}]
    return {"version": 1, "layers": layers, "error": 0.05}


def with_preview(manifest: Manifest) -> Manifest:
    record = PreviewRecord.model_validate(preview())
    return manifest.model_copy(update={"settings": manifest.settings.model_copy(update={"preview": record})})


def test_map_for_previews_is_an_optional_section(manifest: Manifest, entries: Entries) -> None:
    changed = with_preview(manifest)
    assert parse_manifest(changed.to_json(), changed.name) == changed
    assert (manifest.required_schema, changed.required_schema) == (1, 5)
    assert "preview" not in entries["settings"]
    assert json.loads(changed.to_json()) == entries | {"settings": entries["settings"] | {"preview": preview()}}
    older = parse_manifest(manifest.to_json(), manifest.name)
    assert older.to_json() == manifest.to_json() and b"preview" not in older.signed_bytes()
    assert b"preview" in parse_manifest(changed.to_json(), changed.name).signed_bytes()


BAD_PREVIEWS: dict[str, list[object]] = {
    "version": [2, None],
    "error": [1.5],
    "layers": [
        preview()["layers"][:1], preview()["layers"] * 2, preview(units=33)["layers"], preview(channels=5)["layers"],
        preview(channels=33)["layers"],
    ],
    "layers.0.weight": [[]],
    "layers.0.weight.1": [[0.25] * 35],
    "layers.1.weight.2": [[1.0] * 3],
    "layers.1.weight": [[[-1.0] * 2] * 2],
    "layers.0.bias": [[1.0]],
    "layers.0.weight.0.0": [1.1e6, "1", True],
    "layers.1.bias.0": [None],
    "layers.0.pickle": ["x"],
}  # fmt: skip


def test_refuses_a_bad_map_for_previews(entries: Entries) -> None:
    entries["settings"]["preview"] = preview()
    entries = json.loads(json.dumps(entries))  # without shared lists
    assert parse_manifest(json.dumps(entries).encode(), releases.RELEASE_NAME).settings.preview is not None
    refuse_each(entries, {f"settings.preview.{path}": bad for path, bad in BAD_PREVIEWS.items()}, "damaged at settings")


GOOD_EMBEDDINGS = {"<cat>": [5, 4], "EasyNegative": [*range(6)], "\u732b": [2**31 - 1]}
BAD_EMBEDDINGS: tuple[object, ...] = (
    *({"<x>": [row]} for row in (-1, 2**31, 1.5, 1.0, True, "1", None)),
    *({"<x>": rows} for rows in (1, None, [], [1] * 7)),  # 7: more rows than a chunk has tokens
    {},
    [["<x>", [1]]],
    {f"<{number}>": [1] for number in range(4097)},
    *({token: [1]} for token in ("", "a b", "a\n", "a\x1b[31m", "a\0", "x" * 65)),
)
UNEQUAL_EMBEDDINGS: tuple[tuple[object, object], ...] = (
    (GOOD_EMBEDDINGS, None),
    (None, GOOD_EMBEDDINGS),
    (GOOD_EMBEDDINGS, {"<cat>": [5, 4]}),
    ({"<x>": [1]}, {"<y>": [1]}),
    ({"<x>": [1]}, {"<X>": [1]}),
    ({"<x>": [1, 2]}, {"<x>": [1]}),
)


def set_embeddings(entries: Entries, first: object, second: object) -> None:
    for name, embeddings in (("tokenizer", first), ("tokenizer_2", second)):
        entries["tokenizers"][name].pop("embeddings", None)
        if embeddings is not None:
            entries["tokenizers"][name]["embeddings"] = embeddings


def test_refuses_bad_embeddings(entries: Entries) -> None:
    for embeddings in BAD_EMBEDDINGS:
        set_embeddings(entries, embeddings, embeddings)
        assert "damaged at tokenizers.tokenizer" in refusal(entries), str(embeddings)[:80]


def test_an_embedding_has_at_most_75_vectors(entries: Entries) -> None:
    for record in entries["tokenizers"].values():
        record["max_length"] = 77
    set_embeddings(entries, {"<x>": [1] * 75}, {"<x>": [1] * 75})
    assert parse_manifest(json.dumps(entries).encode(), releases.RELEASE_NAME).required_schema == 5
    set_embeddings(entries, {"<x>": [1] * 76}, {"<x>": [1] * 76})
    assert "more vectors than a chunk has tokens, 75" in refusal(entries)


def test_refuses_unequal_embeddings(entries: Entries) -> None:
    """The text encoders would read chunks of different texts."""
    for first, second in UNEQUAL_EMBEDDINGS:
        set_embeddings(entries, first, second)
        assert "the tokenizers have different embeddings" in refusal(entries), (first, second)


def test_embeddings_are_written_as_they_were_read(entries: Entries) -> None:
    other = {token: [row // 2 for row in rows] for token, rows in reversed(GOOD_EMBEDDINGS.items())}
    set_embeddings(entries, GOOD_EMBEDDINGS, other)
    entries["schema_version"] = 5
    manifest = parse_manifest(json.dumps(entries).encode(), releases.RELEASE_NAME)
    assert json.loads(manifest.to_json()) == entries
    assert parse_manifest(manifest.to_json(), manifest.name).to_json() == manifest.to_json()
    found = manifest.tokenizers["tokenizer_2"].embeddings
    assert found is not None and {token: [*rows] for token, rows in found.items()} == other


def test_refuses_contradictions(entries: Entries) -> None:
    engine, weights = entries["engines"][0], entries["weights"]
    inputs, blobs = engine["signature"]["inputs"], weights[0]["blobs"]
    other_size = entries["engines"][1] | {"blob": engine["blob"] | {"bytes": 1}}
    odd_shape = inputs[0] | {"shape": ["rows", 4, "height/8", 8]}
    contradictions: dict[str, tuple[str, object]] = {
        "engine text_encoder": ("engines", [*entries["engines"], engine]),
        "weights text_encoder": ("weights", [*weights, weights[0]]),
        "a blob is listed twice": ("weights.0.blobs", [*blobs, blobs[0]]),
        "the engine has more than": ("engines.0.blob.bytes", PACKAGE_LIMIT + 1),
        "has two sizes": ("engines.1", other_size),
        "networks of a refiner": ("architectures.refiner_unet", entries["architectures"]["unet"]),
        "two tensors have the same name": ("engines.0.signature.inputs", [*inputs, inputs[0]]),
        "a size that no input has": ("engines.0.signature.inputs.0", odd_shape),
    }
    for words, (path, value) in contradictions.items():
        refuse_each(entries, {path: [value]}, words)


def test_unknown_key_forges_no_log_line(entries: Entries) -> None:
    assert "surprise" in refusal(entries | {"surprise\n" + "x" * 10_000 + "\x1b[31m": 1})


def test_refuses_damaged_map_of_constants() -> None:
    entry = b'{"a": {"tensor": %s, "dtype": %s, "shape": %s}}'
    for data in (
        b"", b"[]", b'{"a": ', b"null", b'{"a": null}', b'{"a": ' + b"[" * 100_000,
        b'{"a": {"tensor": "a", "shape": [1]}}',
        b'{"a": {"tensor": "a", "dtype": "float32", "shape": [1], "strides": [1]}}',
        entry % (b'"a"', b'["float32"]', b"[1]"), entry % (b'"a"', b'"float33"', b"[1]"),
        entry % (b'["a"]', b'"float32"', b"[1]"), entry % (b'"a"', b'"float32"', b'"44"'),
        entry % (b'"a"', b'"float32"', b"[-1]"),
    ):  # fmt: skip
        with pytest.raises(ManifestError, match="map of constants is damaged at") as caught:
            parse_constants(data)
        assert str(caught.value).isprintable() and len(str(caught.value)) < 400
