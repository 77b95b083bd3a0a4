"""Manifests that an attacker wrote: unsafe names and digests, repeated keys, huge, nested or contradictory JSON."""

import json

import pytest

from model.errors import ManifestError
from model.store.manifest import BLOB_LIMIT, ENGINE_LIMIT, MANIFEST_LIMIT, SMALL_BLOB_LIMIT
from tests.attacks.conftest import Victim, in_folder_and_bucket
from tests.support import releases

STEPS = b'"num_inference_steps": 4'


@pytest.mark.parametrize(
    "digest",
    ["../" * 20 + "0000", "../../../outside", "/etc/passwd", "0" * 63 + "/", "0" * 64 + "\0", "0" * 62 + "..", ""],
)
@pytest.mark.parametrize("entry", ["blob", "constants"])
def test_refuses_digest_that_is_a_path(victim: Victim, digest: str, entry: str) -> None:
    victim.entries["engines"][0][entry]["sha256"] = digest
    victim.refused(ManifestError, f"damaged at engines.0.{entry}.sha256")


@pytest.mark.parametrize(
    "name",
    [
        "..", "../unet", "/etc/passwd", "unet/../../x", "unet\\..\\x", ".hidden", "unet\n", "", "x" * 200,
        "un\u202eet",
    ],
)  # fmt: skip
def test_refuses_unsafe_names_in_manifest(victim: Victim, name: str) -> None:
    for table, key in (
        ("engines", "component"), ("engines", "target"), ("engines", "layout"), ("weights", "component"),
    ):  # fmt: skip
        before = victim.entries[table][0][key]
        victim.entries[table][0][key] = name
        victim.refused(ManifestError, f"damaged at {table}.0.{key}")
        victim.entries[table][0][key] = before
    for key in ("model", "version"):
        before = victim.entries[key]
        victim.entries[key] = name
        victim.refused(ManifestError, f"damaged at {key}")
        victim.entries[key] = before
    victim.entries["architectures"][name] = "0" * 64
    victim.refused(ManifestError, "damaged at architectures")


@pytest.mark.parametrize(
    "name",
    [
        "../../outside", "toy/../../../outside", "/etc/passwd", "toy/1/../1", "toy/%2e%2e", "toy\\1", "toy/1\0",
        "toy/1\nx",
    ],
)  # fmt: skip
def test_refuses_unsafe_release_name(victim: Victim, name: str) -> None:
    victim.refused(ManifestError, "is not a release name. Write model/version", name)


@in_folder_and_bucket
def test_refuses_manifest_under_another_name(victim: Victim) -> None:
    """A copy under a newer version would bring a withdrawn release back."""
    releases.write_manifest(victim.store.root, victim.manifest.to_json(), "toy/2")
    victim.refused(ManifestError, "manifest of toy/2 is that of toy/1", "toy/2")


@pytest.mark.parametrize(
    "version, words",
    [(2, "has schema 2"), (10**30, "reads up to 1"), (0, "damaged"), (-1, "damaged"), ("1", "states no"),
     (1.0, "states no"), (True, "states no"), (None, "states no")],
)  # fmt: skip
def test_refuses_other_schema(victim: Victim, version: object, words: str) -> None:
    victim.entries["schema_version"] = version
    victim.refused(ManifestError, words)


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e400"])
@pytest.mark.parametrize("entry", [b'"vae_scaling_factor": 0.13025', STEPS, b'"relative": 0.0'])
def test_refuses_infinite_numbers(victim: Victim, number: bytes, entry: bytes) -> None:
    text = victim.manifest.to_json()
    assert entry in text
    victim.raw = text.replace(entry, entry.partition(b":")[0] + b": " + number)
    victim.refused(ManifestError, number.decode())


def test_refuses_repeated_keys(victim: Victim) -> None:
    """One parser uses the first value and another the last, so a check could see another value than the use."""
    text = victim.manifest.to_json()
    digest = victim.manifest.engines[0].blob.sha256.encode()
    for found, doubled in (
        (b'"model": "toy"', b'"model": "toy", "model": "toy"'),
        (b'"sha256": "' + digest + b'"', b'"sha256": "' + digest + b'", "sha256": "' + b"0" * 64 + b'"'),
    ):
        assert found in text
        victim.raw = text.replace(found, doubled)
        victim.refused(ManifestError, "a key is repeated")


@pytest.mark.parametrize("opening, closing", [(b"[", b"]"), (b'{"a":', b"}")])
def test_refuses_deep_nesting(victim: Victim, opening: bytes, closing: bytes) -> None:
    """A recursive parser would exhaust the stack and end the process."""
    deep = opening * 200_000 + b"1" + closing * 200_000
    victim.raw = victim.manifest.to_json().replace(STEPS, b'"num_inference_steps": ' + deep)
    victim.refused(ManifestError, "is not JSON")
    victim.raw = deep
    victim.refused(ManifestError, "is not JSON")


def test_refuses_nesting_that_the_parser_accepts(victim: Victim) -> None:
    victim.raw = victim.manifest.to_json().replace(STEPS, b'"num_inference_steps": ' + b"[" * 150 + b"]" * 150)
    victim.refused(ManifestError, "num_inference_steps")


@in_folder_and_bucket
def test_refuses_huge_manifest_unread(victim: Victim) -> None:
    text = json.dumps(victim.entries).encode()
    victim.raw = text[:-1] + b" " * (20 * MANIFEST_LIMIT) + b"}"
    victim.refused(ManifestError, f"has more than {MANIFEST_LIMIT} bytes")


@in_folder_and_bucket
def test_refuses_many_small_entries(victim: Victim) -> None:
    victim.entries["builder"] = {str(number): "" for number in range(400_000)}
    victim.refused(ManifestError, f"has more than {MANIFEST_LIMIT} bytes")


@in_folder_and_bucket
@pytest.mark.parametrize("size", [ENGINE_LIMIT + 1, 2**50, 2**63, 10**400, -1])
def test_refuses_huge_engine(victim: Victim, size: int) -> None:
    for engine in victim.entries["engines"]:
        engine["blob"]["bytes"] = size
    victim.refused(ManifestError, "damaged at engines.0")


@in_folder_and_bucket
def test_refuses_huge_blobs_that_are_read_into_memory(victim: Victim) -> None:
    victim.entries["weights"][0]["blobs"][0]["bytes"] = BLOB_LIMIT + 1
    victim.refused(ManifestError, f"a blob of weights has more than {BLOB_LIMIT} bytes")
    victim.entries["weights"][0]["blobs"][0]["bytes"] = 1
    victim.entries["tokenizers"]["tokenizer"]["blob"]["bytes"] = SMALL_BLOB_LIMIT + 1
    victim.refused(ManifestError, f"the tokenizer has more than {SMALL_BLOB_LIMIT} bytes")


def test_control_characters_forge_no_log_line(victim: Victim) -> None:
    victim.entries['x\n{"event": "loaded"}\x1b[2J\u202e' + "y" * 5000] = 1
    victim.refused(ManifestError, "damaged at x")
