"""Manifests: valid ones survive writing and reading; others are refused by one line that states the fix."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from engine_builder.stores.local import WritableLocalStore
from model.errors import ManifestError
from model.store.manifest import (
    BLOB_LIMIT,
    MANIFEST_LIMIT,
    SCHEMA_VERSION,
    SMALL_BLOB_LIMIT,
    Bucket,
    Manifest,
    PreviewRecord,
    Span,
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
    assert parse_manifest(manifest.to_json(), manifest.name) == manifest


def test_ignores_whitespace(manifest: Manifest) -> None:
    spaced = json.dumps(json.loads(manifest.to_json()), indent=7).encode() + b"\n \t"
    assert parse_manifest(spaced, manifest.name) == manifest


@pytest.mark.parametrize(
    "name",
    [
        "", "toy", "toy/", "/1", "toy/1/2", "../toy/1", "toy/..", "toy/.", "toy/.1", "toy//1", "/etc/passwd", "toy\\/1",
        "toy/1\n", "toy/1\0", "toy/ 1", "tøy/1", "toy/-1", "toy/" + "1" * 129, "~/1", "toy/%2e%2e",
    ],
)  # fmt: skip
def test_refuses_unsafe_release_name(name: str) -> None:
    with pytest.raises(ManifestError, match="Write model/version"):
        split_name(name)


def test_splits_release_name() -> None:
    assert split_name("sdxl-base-1.0/2026.01_b") == ("sdxl-base-1.0", "2026.01_b")


NOT_JSON = {
    "empty": b"",
    "truncated": b'{"schema_version": 1, "model": "toy"',
    "not utf-8": b'{"schema_version": 1, "model": "\xff"}',
    "utf-16": '{"schema_version": 1}'.encode("utf-16"),
    "half a surrogate pair": b'{"schema_version": 1, "model": "\\ud800"}',
    "deeply nested": b'{"schema_version": 1, "defaults": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deeply nested objects": b'{"a":' * 100_000,
    "a number of 100,000 digits": b'{"schema_version": ' + b"1" * 100_000 + b"}",
    "NaN": b'{"schema_version": 1, "x": NaN}',
    "Infinity": b'{"schema_version": 1, "x": -Infinity}',
    "a comment": b'{"schema_version": 1} // hello',
    "a list": b"[]",
    "a string": b'"toy/1"',
    "two documents": b'{"schema_version": 1}{"schema_version": 1}',
}


@pytest.mark.parametrize("data", NOT_JSON.values(), ids=NOT_JSON)
def test_refuses_invalid_json(data: bytes) -> None:
    assert "publish" in refusal(data)


def test_refuses_repeated_key(manifest: Manifest) -> None:
    text = manifest.to_json().decode()
    assert "a key is repeated" in refusal(text.replace('"model": "toy"', '"model": "other", "model": "toy"').encode())
    deep = text.replace('"latent_channels": 4', '"latent_channels": 4, "latent_channels": 4')
    assert "a key is repeated" in refusal(deep.encode())


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_refuses_json_constant_in_free_entry(manifest: Manifest, number: str) -> None:
    text = manifest.to_json().decode().replace('"num_inference_steps": 4', f'"guidance_scale": {number}')
    assert f"{number} is not a JSON number" in refusal(text.encode())


def test_refuses_large_manifest(manifest: Manifest) -> None:
    data = manifest.to_json()
    assert parse_manifest(data + b" " * (MANIFEST_LIMIT - len(data)), manifest.name) == manifest
    assert str(MANIFEST_LIMIT) in refusal(data + b" " * (MANIFEST_LIMIT + 1 - len(data)))


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, 99, 10**4000])
def test_newer_schema_says_to_upgrade(entries: Entries, version: int) -> None:
    message = refusal(entries | {"schema_version": version, "key_of_the_future": {}})
    assert f"reads up to {SCHEMA_VERSION}" in message and "Upgrade Preheat" in message and "`preheat build`" in message


@pytest.mark.parametrize("version", [None, "1", 1.0, True, [1], 0, -1])
def test_refuses_invalid_schema_version(entries: Entries, version: object) -> None:
    assert "Upgrade" not in refusal(entries | {"schema_version": version})


def test_refuses_missing_schema_version(entries: Entries) -> None:
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


def set_entry(entries: Entries, path: str, value: object) -> None:
    """Set a value at a path such as engines.0.target."""
    node: Any = entries
    *parents, last = (int(part) if part.isdigit() else part for part in path.split("."))
    for part in parents:
        node = node[part]
    node[last] = value


DIGEST = "engines.0.blob.sha256"
BAD_VALUES = {
    "digest with a path": (DIGEST, "../../../../etc/passwd" + "0" * 42),
    "digest in capitals": (DIGEST, "A" * 64),
    "digest too short": (DIGEST, "0" * 63),
    "digest with a line break": (DIGEST, "0" * 64 + "\n"),
    "digest that is null": (DIGEST, None),
    "size as text": ("engines.0.blob.bytes", "17"),
    "size as a fraction": ("engines.0.blob.bytes", 17.0),
    "size that is true": ("engines.0.blob.bytes", True),
    "size below zero": ("engines.0.blob.bytes", -1),
    "size of 4,000 digits": ("engines.0.blob.bytes", 10**4000),
    "size beyond any disk": ("engines.0.blob.bytes", 2**50),
    "constants too large to read": ("engines.0.constants.bytes", SMALL_BLOB_LIMIT + 1),
    "tokenizer too large to read": ("tokenizers.tokenizer.blob.bytes", SMALL_BLOB_LIMIT + 1),
    "weights larger than a blob": ("weights.0.blobs.0.bytes", BLOB_LIMIT + 1),
    "no blob of weights": ("weights.0.blobs", []),
    "target with a path": ("engines.0.target", "../cuda"),
    "unknown runtime": ("engines.0.runtime", "pickle"),
    "unknown precision": ("weights.0.precision", "fp4"),
    "component without architecture": ("engines.0.component", "controlnet"),
    "weights without architecture": ("weights.0.component", "controlnet"),
    "model with a path": ("model", ".."),
    "other family": ("family", "sd15"),
    "engines in an object": ("engines", {}),
    "engines in a string": ("engines", "abc"),
    "span backwards": ("engines.0.bucket.rows", {"min": 4, "max": 1, "multiple": 1}),
    "span out of step": ("engines.0.bucket.rows", {"min": 1, "max": 4, "multiple": 3}),
    "span from zero": ("engines.0.bucket.rows.min", 0),
    "span beyond the limit": ("engines.0.bucket.rows.max", 2**31),
    "bucket without a size": ("engines.0.bucket.width", None),
    "no inputs": ("engines.0.signature.inputs", []),
    "no outputs": ("engines.0.signature.outputs", []),
    "size divided by zero": ("engines.0.signature.inputs.0.shape.2", "height/0"),
    "unknown symbol": ("engines.0.signature.inputs.0.shape.2", "depth"),
    "dimension of zero": ("engines.0.signature.inputs.0.shape.1", 0),
    "first dimension not rows": ("engines.0.signature.inputs.0.shape.0", 4),
    "no dimension": ("engines.0.signature.inputs.0.shape", []),
    "unknown dtype": ("engines.0.signature.inputs.0.dtype", "complex64"),
    "accuracy on no case": ("engines.0.accuracy.cases", 0),
    "native size of zero": ("settings.native_height", 0),
    "native size off the VAE's grid": ("settings.native_width", 65),
    "scale of zero": ("settings.vae_scale_factor", 0),
    "scaling by zero": ("settings.vae_scaling_factor", 0.0),
    "boolean as a number": ("settings.force_zeros_for_empty_prompt", 1),
    "token below zero": ("tokenizers.tokenizer.pad_token_id", -1),
    "prompt of zero tokens": ("tokenizers.tokenizer.max_length", 0),
    "unknown tokenizer": ("tokenizers.tokenizer_3", {}),
    "unknown scheduler": ("schedulers.third", {}),
    "scheduler that is a list": ("schedulers.base", []),
    "builder with a number": ("builder.preheat", 1),
}


@pytest.mark.parametrize(("path", "value"), BAD_VALUES.values(), ids=BAD_VALUES)
def test_refuses_bad_value(entries: Entries, path: str, value: object) -> None:
    set_entry(entries, path, value)
    message = refusal(entries)
    assert "damaged at" in message and "`preheat publish`" in message


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


BAD_PREVIEWS: dict[str, tuple[str, object]] = {
    "newer version": ("version", 2),
    "no version": ("version", None),
    "error beyond the range": ("error", 1.5),
    "one layer": ("layers", preview()["layers"][:1]),
    "three layers": ("layers", preview()["layers"] * 2),
    "no unit": ("layers.0.weight", []),
    "too many units": ("layers", preview(units=33)["layers"]),
    "other channels": ("layers", preview(channels=5)["layers"]),
    "too many channels": ("layers", preview(channels=33)["layers"]),
    "row too short": ("layers.0.weight.1", [0.25] * 35),
    "row of another layer": ("layers.1.weight.2", [1.0] * 3),
    "a missing color": ("layers.1.weight", [[-1.0] * 2] * 2),
    "a missing bias": ("layers.0.bias", [1.0]),
    "coefficient too large": ("layers.0.weight.0.0", 1.1e6),
    "coefficient as text": ("layers.0.weight.0.0", "1"),
    "coefficient that is true": ("layers.0.weight.0.0", True),
    "coefficient that is null": ("layers.1.bias.0", None),
    "unknown key": ("layers.0.pickle", "x"),
}


@pytest.mark.parametrize(("path", "value"), BAD_PREVIEWS.values(), ids=BAD_PREVIEWS)
def test_refuses_a_bad_map_for_previews(entries: Entries, path: str, value: object) -> None:
    entries["settings"]["preview"] = preview()
    assert parse_manifest(json.dumps(entries).encode(), releases.RELEASE_NAME).settings.preview is not None
    entries["settings"]["preview"] = json.loads(json.dumps(preview()))  # without shared lists
    set_entry(entries, f"settings.preview.{path}", value)
    assert "damaged at settings" in refusal(entries)


GOOD_EMBEDDINGS = {"<cat>": [5, 4], "EasyNegative": [*range(6)], "\u732b": [2**31 - 1]}
BAD_EMBEDDINGS: dict[str, object] = {
    "row below zero": {"<x>": [-1]},
    "row beyond 32 bits": {"<x>": [2**31]},
    "row with a fraction": {"<x>": [1.5]},
    "row as a float": {"<x>": [1.0]},
    "row that is true": {"<x>": [True]},
    "row as text": {"<x>": ["1"]},
    "row that is null": {"<x>": [None]},
    "rows that are a number": {"<x>": 1},
    "rows that are null": {"<x>": None},
    "no row": {"<x>": []},
    "more rows than a chunk has tokens": {"<x>": [1] * 7},
    "no token": {},
    "a list": [["<x>", [1]]],
    "too many tokens": {f"<{number}>": [1] for number in range(4097)},
    "token without a character": {"": [1]},
    "token with a space": {"a b": [1]},
    "token with a line end": {"a\n": [1]},
    "token with a control character": {"a\x1b[31m": [1]},
    "token that ends a text": {"a\0": [1]},
    "token too long": {"x" * 65: [1]},
}
UNEQUAL_EMBEDDINGS: dict[str, tuple[object, object]] = {
    "one tokenizer without": (GOOD_EMBEDDINGS, None),
    "the other without": (None, GOOD_EMBEDDINGS),
    "a token fewer": (GOOD_EMBEDDINGS, {"<cat>": [5, 4]}),
    "another token": ({"<x>": [1]}, {"<y>": [1]}),
    "another case": ({"<x>": [1]}, {"<X>": [1]}),
    "a row fewer": ({"<x>": [1, 2]}, {"<x>": [1]}),
}


def set_embeddings(entries: Entries, first: object, second: object) -> None:
    for name, embeddings in (("tokenizer", first), ("tokenizer_2", second)):
        entries["tokenizers"][name].pop("embeddings", None)
        if embeddings is not None:
            entries["tokenizers"][name]["embeddings"] = embeddings


@pytest.mark.parametrize("embeddings", BAD_EMBEDDINGS.values(), ids=BAD_EMBEDDINGS)
def test_refuses_bad_embeddings(entries: Entries, embeddings: object) -> None:
    set_embeddings(entries, embeddings, embeddings)
    assert "damaged at tokenizers.tokenizer" in refusal(entries)


def test_an_embedding_has_at_most_75_vectors(entries: Entries) -> None:
    for record in entries["tokenizers"].values():
        record["max_length"] = 77
    set_embeddings(entries, {"<x>": [1] * 75}, {"<x>": [1] * 75})
    assert parse_manifest(json.dumps(entries).encode(), releases.RELEASE_NAME).required_schema == 5
    set_embeddings(entries, {"<x>": [1] * 76}, {"<x>": [1] * 76})
    assert "more vectors than a chunk has tokens, 75" in refusal(entries)


@pytest.mark.parametrize(("first", "second"), UNEQUAL_EMBEDDINGS.values(), ids=UNEQUAL_EMBEDDINGS)
def test_refuses_unequal_embeddings(entries: Entries, first: object, second: object) -> None:
    """The text encoders would read chunks of different texts."""
    set_embeddings(entries, first, second)
    assert "the tokenizers have different embeddings" in refusal(entries)


def test_embeddings_are_written_as_they_were_read(entries: Entries) -> None:
    other = {token: [row // 2 for row in rows] for token, rows in reversed(GOOD_EMBEDDINGS.items())}
    set_embeddings(entries, GOOD_EMBEDDINGS, other)
    entries["schema_version"] = 5
    manifest = parse_manifest(json.dumps(entries).encode(), releases.RELEASE_NAME)
    assert json.loads(manifest.to_json()) == entries
    assert parse_manifest(manifest.to_json(), manifest.name).to_json() == manifest.to_json()
    found = manifest.tokenizers["tokenizer_2"].embeddings
    assert found is not None and {token: [*rows] for token, rows in found.items()} == other


def test_refuses_number_beyond_float_range(manifest: Manifest) -> None:
    text = manifest.to_json().decode()
    for entry, other in (("vae_scaling_factor", "0.13025"), ("num_inference_steps", "4")):
        assert f'"{entry}": {other}' in text
        message = refusal(text.replace(f'"{entry}": {other}', f'"{entry}": -1e999').encode())
        assert "-1e999 exceeds the range of a number" in message


def repeat_first(section: str) -> Callable[[Entries], None]:
    return lambda entries: entries[section].append(entries[section][0])


def repeat_a_blob(entries: Entries) -> None:
    blobs = entries["weights"][0]["blobs"]
    blobs.append(blobs[0])


def change_size_of_a_blob(entries: Entries) -> None:
    entries["engines"][1]["blob"] = entries["engines"][0]["blob"] | {"bytes": 1}


def add_refiner_network_without_settings(entries: Entries) -> None:
    entries["architectures"]["refiner_unet"] = entries["architectures"]["unet"]


def repeat_an_input(entries: Entries) -> None:
    inputs = entries["engines"][0]["signature"]["inputs"]
    inputs.append(inputs[0])


def remove_the_size_of_an_output(entries: Entries) -> None:
    entries["engines"][0]["signature"]["inputs"][0]["shape"] = ["rows", 4, "height/8", 8]


CONTRADICTIONS: dict[str, Callable[[Entries], None]] = {
    "engine unet|engine text_encoder": repeat_first("engines"),
    "weights text_encoder": repeat_first("weights"),
    "a blob is listed twice": repeat_a_blob,
    "has two sizes": change_size_of_a_blob,
    "networks of a refiner": add_refiner_network_without_settings,
    "two tensors have the same name": repeat_an_input,
    "a size that no input has": remove_the_size_of_an_output,
}


@pytest.mark.parametrize(("words", "contradict"), CONTRADICTIONS.items(), ids=CONTRADICTIONS)
def test_refuses_contradiction(entries: Entries, words: str, contradict: Callable[[Entries], None]) -> None:
    contradict(entries)
    assert any(word in refusal(entries) for word in words.split("|"))


def test_unknown_key_forges_no_log_line(entries: Entries) -> None:
    assert "surprise" in refusal(entries | {"surprise\n" + "x" * 10_000 + "\x1b[31m": 1})


def test_span_and_bucket_hold_their_sizes() -> None:
    span = Span(min=64, max=128, multiple=32)
    assert [side for side in range(200) if span.holds(side)] == [64, 96, 128]
    bucket = Bucket(batch=Span(min=2, max=2), height=span, width=span)
    assert bucket.holds(2, 64, 128) and not bucket.holds(1, 64, 64) and not bucket.holds(2, 65, 64)
    assert not bucket.holds(2, 64, 192)
    assert Bucket(batch=Span(min=1, max=4)).holds(3, 0, 0)


BAD_MAPS = {
    "empty": b"",
    "a list": b"[]",
    "truncated": b'{"a": ',
    "null": b"null",
    "no entry": b'{"a": null}',
    "no dtype": b'{"a": {"tensor": "a", "shape": [1]}}',
    "a list for a dtype": b'{"a": {"tensor": "a", "dtype": ["float32"], "shape": [1]}}',
    "unknown dtype": b'{"a": {"tensor": "a", "dtype": "float33", "shape": [1]}}',
    "a list for a tensor": b'{"a": {"tensor": ["a"], "dtype": "float32", "shape": [1]}}',
    "a shape as text": b'{"a": {"tensor": "a", "dtype": "float32", "shape": "44"}}',
    "a shape below zero": b'{"a": {"tensor": "a", "dtype": "float32", "shape": [-1]}}',
    "unknown key": b'{"a": {"tensor": "a", "dtype": "float32", "shape": [1], "strides": [1]}}',
    "deeply nested": b'{"a": ' + b"[" * 100_000,
}


@pytest.mark.parametrize("data", BAD_MAPS.values(), ids=BAD_MAPS)
def test_refuses_damaged_map_of_constants(data: bytes) -> None:
    with pytest.raises(ManifestError, match="map of constants is damaged at") as caught:
        parse_constants(data)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 400


def test_reads_map_of_constants() -> None:
    parsed = parse_constants(releases.toy_constants())
    assert {name: constant.shape for name, constant in parsed.items()} == {
        "a.weight": (8, 4), "a.bias": (8,), "b.weight": (4, 8), "b.bias": (4,),
    }  # fmt: skip
