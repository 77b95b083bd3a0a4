"""Manifests that an attacker wrote: unsafe names and digests, repeated keys, huge or nested JSON, other signatures."""

import base64
import json
import shutil
from collections.abc import Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from engine_builder.releases import signing
from model.errors import CorruptBlob, ManifestError, UntrustedRelease
from model.store.manifest import BLOB_LIMIT, ENGINE_LIMIT, MANIFEST_LIMIT, SCHEMA_VERSION, SMALL_BLOB_LIMIT
from tests.attacks.conftest import AttackedRelease, from_folder_and_bucket
from tests.support import releases

STEPS = b'"num_inference_steps": 4'
UNSAFE_DIGESTS = [
    "../" * 20 + "0000", "../../../outside", "/etc/passwd", "0" * 63 + "/", "0" * 64 + "\0", "0" * 62 + "..", "",
]  # fmt: skip
UNSAFE_NAMES = [
    "..", "../unet", "/etc/passwd", "unet/../../x", "unet\\..\\x", ".hidden", "unet\n", "", "x" * 200, "un\u202eet",
]  # fmt: skip
UNSAFE_RELEASE_NAMES = [
    "../../outside", "toy/../../../outside", "/etc/passwd", "toy/1/../1", "toy/%2e%2e", "toy\\1", "toy/1\0",
    "toy/1\nx",
]  # fmt: skip
HUGE_SIZES = [ENGINE_LIMIT + 1, 2**50, 2**63, 10**400, -1]
INVALID_ENTRIES: dict[str, list[Any]] = {
    "engines.0.blob.sha256": UNSAFE_DIGESTS,
    "engines.0.constants.sha256": UNSAFE_DIGESTS,
    "engines.0.component": UNSAFE_NAMES,
    "engines.0.target": UNSAFE_NAMES,
    "engines.0.layout": UNSAFE_NAMES,
    "weights.0.component": UNSAFE_NAMES,
    "model": UNSAFE_NAMES,
    "version": UNSAFE_NAMES,
    "engines.0.blob.bytes": HUGE_SIZES,
}


def set_entry(entries: Any, path: str, value: Any) -> None:
    """Set the entry at a path such as engines.0.blob.sha256."""
    *parents, last = path.split(".")
    for name in parents:
        entries = entries[int(name) if isinstance(entries, list) else name]
    entries[last] = value


@pytest.mark.parametrize("path, values", INVALID_ENTRIES.items(), ids=INVALID_ENTRIES)
def test_refuses_unsafe_entry(attacked: AttackedRelease, path: str, values: list[Any]) -> None:
    for value in values:
        set_entry(attacked.entries, path, value)
        attacked.assert_refused(ManifestError, f"damaged at {path}")


@pytest.mark.parametrize(("inputs", "units"), [(36, 10**5), (10**6, 1), (0, 1), (9, 2)])
def test_refuses_a_huge_map_for_previews(attacked: AttackedRelease, inputs: int, units: int) -> None:
    """It would take the memory and the time of every preview."""
    layers = [
        {"weight": [[0.5] * inputs] * units, "bias": [0.5] * units},
        {"weight": [[0.5] * units] * 3, "bias": [0.5] * 3},
    ]
    attacked.entries["settings"]["preview"] = {"version": 1, "layers": layers, "error": 0.0}
    attacked.assert_refused(ManifestError, "manifest")


@pytest.mark.parametrize("name", UNSAFE_NAMES)
def test_refuses_unsafe_key(attacked: AttackedRelease, name: str) -> None:
    attacked.entries["architectures"][name] = "0" * 64
    attacked.assert_refused(ManifestError, "damaged at architectures")


@pytest.mark.parametrize("name", UNSAFE_RELEASE_NAMES)
def test_refuses_unsafe_release_name(attacked: AttackedRelease, name: str) -> None:
    attacked.assert_refused(ManifestError, "is not a release name. Write model/version", name)


@from_folder_and_bucket
def test_refuses_manifest_under_another_name(attacked: AttackedRelease) -> None:
    """A copy under a newer version would bring a withdrawn release back."""
    releases.write_manifest(attacked.store.root, attacked.manifest.to_json(), "toy/2")
    attacked.assert_refused(ManifestError, "manifest of toy/2 is that of toy/1", "toy/2")


@pytest.mark.parametrize(
    "version, words",
    [
        (SCHEMA_VERSION + 1, f"has schema {SCHEMA_VERSION + 1}"), (10**30, f"reads up to {SCHEMA_VERSION}"),
        (0, "damaged"), (-1, "damaged"), ("1", "states no"),
        (1.0, "states no"), (True, "states no"), (None, "states no"),
    ],
)  # fmt: skip
def test_refuses_other_schema(attacked: AttackedRelease, version: object, words: str) -> None:
    attacked.entries["schema_version"] = version
    attacked.assert_refused(ManifestError, words)


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e400"])
@pytest.mark.parametrize("entry", [b'"vae_scaling_factor": 0.13025', STEPS, b'"relative": 0.0'])
def test_refuses_infinite_number(attacked: AttackedRelease, number: bytes, entry: bytes) -> None:
    text = attacked.manifest.to_json()
    assert entry in text
    attacked.manifest_bytes = text.replace(entry, entry.partition(b":")[0] + b": " + number)
    attacked.assert_refused(ManifestError, number.decode())


@pytest.mark.parametrize("key, second", [("model", "toy"), ("sha256", "0" * 64)])
def test_refuses_repeated_key(attacked: AttackedRelease, key: str, second: str) -> None:
    """One parser uses the first value and another the last, so a check could see another value than the use."""
    text = attacked.manifest.to_json().decode()
    first = {"model": "toy", "sha256": attacked.manifest.engines[0].blob.sha256}[key]
    entry = f'"{key}": "{first}"'
    assert entry in text
    attacked.manifest_bytes = text.replace(entry, f'{entry}, "{key}": "{second}"').encode()
    attacked.assert_refused(ManifestError, "a key is repeated")


@pytest.mark.parametrize("opening, closing", [(b"[", b"]"), (b'{"a":', b"}")], ids=["lists", "objects"])
def test_refuses_deep_nesting(attacked: AttackedRelease, opening: bytes, closing: bytes) -> None:
    """A recursive parser would exhaust the stack and end the process."""
    deep = opening * 200_000 + b"1" + closing * 200_000
    for manifest in (deep, attacked.manifest.to_json().replace(STEPS, b'"num_inference_steps": ' + deep)):
        attacked.manifest_bytes = manifest
        attacked.assert_refused(ManifestError, "is not JSON")


def test_refuses_nesting_that_the_parser_accepts(attacked: AttackedRelease) -> None:
    nested = b'"num_inference_steps": ' + b"[" * 150 + b"]" * 150
    attacked.manifest_bytes = attacked.manifest.to_json().replace(STEPS, nested)
    attacked.assert_refused(ManifestError, "num_inference_steps")


def pad_with_spaces(manifest: bytes) -> bytes:
    return manifest[:-1] + b" " * (20 * MANIFEST_LIMIT) + b"}"


def add_small_entries(manifest: bytes) -> bytes:
    return json.dumps(json.loads(manifest) | {"builder": {str(number): "" for number in range(400_000)}}).encode()


@from_folder_and_bucket
@pytest.mark.parametrize("enlarge", [pad_with_spaces, add_small_entries])
def test_refuses_huge_manifest(attacked: AttackedRelease, enlarge: Callable[[bytes], bytes]) -> None:
    attacked.manifest_bytes = enlarge(json.dumps(attacked.entries).encode())
    attacked.assert_refused(ManifestError, f"has more than {MANIFEST_LIMIT} bytes")


@pytest.mark.parametrize(
    "path, size, words",
    [
        ("weights.0.blobs.0.bytes", BLOB_LIMIT + 1, f"a blob of weights has more than {BLOB_LIMIT} bytes"),
        ("tokenizers.tokenizer.blob.bytes", SMALL_BLOB_LIMIT + 1, f"the tokenizer has more than {SMALL_BLOB_LIMIT}"),
        ("engines.0.constants.bytes", SMALL_BLOB_LIMIT + 1, f"map of constants has more than {SMALL_BLOB_LIMIT}"),
    ],
    ids=["weights", "tokenizer", "map of constants"],
)
def test_refuses_blob_too_large_for_memory(attacked: AttackedRelease, path: str, size: int, words: str) -> None:
    set_entry(attacked.entries, path, size)
    attacked.assert_refused(ManifestError, words)


def test_control_characters_forge_no_log_line(attacked: AttackedRelease) -> None:
    attacked.entries['x\n{"event": "loaded"}\x1b[2J\u202e' + "y" * 5000] = 1
    attacked.assert_refused(ManifestError, "damaged at x")


# -- signatures ------------------------------------------------------------------------------------------------------


@pytest.fixture
def key(attacked: AttackedRelease) -> Ed25519PrivateKey:
    """The key that signed the release and that the deployment trusts."""
    key = Ed25519PrivateKey.generate()
    attacked.keys = [signing.public_key(key)]
    attacked.entries = json.loads(signing.sign(attacked.manifest, key).to_json())
    assert attacked.load().release == "toy/1"
    return key


def signature_by(key: Ed25519PrivateKey, attacked: AttackedRelease, **changes: str) -> dict[str, Any]:
    """Sign the manifest with some entries changed, and return the signature."""
    signature = signing.sign(attacked.manifest.model_copy(update=changes), key).signature
    assert signature is not None
    return signature.model_dump()


def test_refuses_missing_signature(attacked: AttackedRelease, key: Ed25519PrivateKey) -> None:
    del attacked.entries["signature"]
    attacked.assert_refused(UntrustedRelease, "is not signed")
    attacked.entries["signature"] = None
    attacked.assert_refused(UntrustedRelease, "is not signed")


def test_refuses_damaged_signature(attacked: AttackedRelease, key: Ed25519PrivateKey) -> None:
    signature = attacked.entries["signature"]["ed25519"]
    for damaged in ("", "AAAA", "A" * 88, signature[:-1], 7):
        attacked.entries["signature"]["ed25519"] = damaged
        attacked.assert_refused(ManifestError, "damaged at signature.ed25519")


def test_refuses_signature_of_another_release(attacked: AttackedRelease, key: Ed25519PrivateKey) -> None:
    attacked.entries["signature"] = signature_by(key, attacked, version="2")
    attacked.assert_refused(UntrustedRelease, "does not match this manifest")


def test_refuses_older_release_under_newer_name(attacked: AttackedRelease, key: Ed25519PrivateKey) -> None:
    releases.write_manifest(attacked.store.root, attacked.entries, "toy/2")
    attacked.assert_refused(ManifestError, "manifest of toy/2 is that of toy/1", "toy/2")
    releases.write_manifest(attacked.store.root, attacked.entries | {"version": "2"}, "toy/2")
    attacked.assert_refused(UntrustedRelease, "does not match this manifest", "toy/2")


def test_refuses_untrusted_key_under_trusted_id(attacked: AttackedRelease, key: Ed25519PrivateKey) -> None:
    signature = signature_by(Ed25519PrivateKey.generate(), attacked)
    attacked.entries["signature"] = signature
    attacked.assert_refused(UntrustedRelease, f"is signed by {signature['key_id']}. This deployment")
    attacked.entries["signature"] = signature | {"key_id": attacked.keys[0].key_id}
    attacked.assert_refused(UntrustedRelease, "does not match this manifest")


def test_refuses_signature_of_the_file_bytes(attacked: AttackedRelease, key: Ed25519PrivateKey) -> None:
    signature = base64.b64encode(key.sign(attacked.manifest.to_json())).decode()
    attacked.entries["signature"]["ed25519"] = signature
    attacked.assert_refused(UntrustedRelease, "does not match this manifest")


def test_refuses_swapped_digests(attacked: AttackedRelease, key: Ed25519PrivateKey) -> None:
    """Both blobs are correct and signed, but each is listed for the other component."""
    first, third = attacked.entries["weights"][0], attacked.entries["weights"][2]
    first["blobs"], third["blobs"] = third["blobs"], first["blobs"]
    attacked.assert_refused(UntrustedRelease, "does not match this manifest")


@from_folder_and_bucket
def test_checks_blobs_of_signed_release(attacked: AttackedRelease, key: Ed25519PrivateKey) -> None:
    shutil.rmtree(attacked.cache, ignore_errors=True)  # it has the correct blobs
    path = attacked.blob_path(attacked.manifest.engines[0].blob.sha256)
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    attacked.assert_refused(CorruptBlob, path.name[:12])
