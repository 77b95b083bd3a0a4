"""Manifests that an attacker wrote, loaded as in a server.

tests/model/store/test_manifest.py has all that the parser refuses.
"""

import base64
import json
import shutil
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from engine_builder.releases import signing
from model.errors import CorruptBlob, ManifestError, UntrustedRelease
from model.store.manifest import ENGINE_LIMIT, MANIFEST_LIMIT
from tests.attacks.conftest import AttackedRelease, from_bucket
from tests.support import releases

UNSAFE_DIGESTS = ["../" * 20 + "0000", "/etc/passwd", "0" * 63 + "/", "0" * 64 + "\0", "0" * 62 + "..", ""]
UNSAFE_NAMES = [
    "..", "../unet", "/etc/passwd", "unet/../../x", "unet\\..\\x", ".hidden", "unet\n", "", "x" * 200, "un\u202eet",
]  # fmt: skip
INVALID_ENTRIES: dict[str, list[Any]] = {
    "engines.0.blob.sha256": UNSAFE_DIGESTS,
    "engines.0.constants.sha256": UNSAFE_DIGESTS[:1],
    "engines.0.component": UNSAFE_NAMES,
    "engines.0.target": UNSAFE_NAMES[:1],
    "engines.0.layout": UNSAFE_NAMES[:1],
    "weights.0.component": UNSAFE_NAMES[:1],
    "model": UNSAFE_NAMES,
    "version": UNSAFE_NAMES,
    "engines.0.blob.bytes": [ENGINE_LIMIT + 1, 2**50, 2**63, 10**400, -1],
}


def test_refuses_unsafe_entries(attacked: AttackedRelease) -> None:
    intact = json.dumps(attacked.entries)
    for path, values in INVALID_ENTRIES.items():
        for value in values:
            attacked.entries = json.loads(intact)
            releases.set_entry(attacked.entries, path, value)
            attacked.assert_refused(ManifestError, f"damaged at {path}")
    for name in UNSAFE_NAMES:
        attacked.entries = json.loads(intact)
        attacked.entries["architectures"][name] = "0" * 64
        attacked.assert_refused(ManifestError, "damaged at architectures")


def test_refuses_unsafe_release_name(attacked: AttackedRelease) -> None:
    for name in ("../../outside", "toy/../../../outside", "/etc/passwd", "toy/%2e%2e", "toy\\1", "toy/1\0", "toy/1\nx"):
        attacked.assert_refused(ManifestError, "is not a release name. Write model/version", name)


@from_bucket
def test_refuses_manifest_under_another_name(attacked: AttackedRelease) -> None:
    """A copy under a newer version would bring a withdrawn release back."""
    releases.write_manifest(attacked.store.root, attacked.manifest.to_json(), "toy/2")
    attacked.assert_refused(ManifestError, "manifest of toy/2 is that of toy/1", "toy/2")


@pytest.mark.parametrize("attacked", ["folder", "bucket"], indirect=True)
def test_refuses_huge_manifest(attacked: AttackedRelease) -> None:
    attacked.manifest_bytes = attacked.manifest.to_json()[:-1] + b" " * (20 * MANIFEST_LIMIT) + b"}"
    attacked.assert_refused(ManifestError, f"has more than {MANIFEST_LIMIT} bytes")


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


def test_refuses_missing_and_damaged_signatures(attacked: AttackedRelease, key: Ed25519PrivateKey) -> None:
    signature = attacked.entries.pop("signature")
    attacked.assert_refused(UntrustedRelease, "is not signed")
    attacked.entries["signature"] = None
    attacked.assert_refused(UntrustedRelease, "is not signed")
    for damaged in ("", "AAAA", "A" * 88, signature["ed25519"][:-1], 7):
        attacked.entries["signature"] = signature | {"ed25519": damaged}
        attacked.assert_refused(ManifestError, "damaged at signature.ed25519")


def test_refuses_signatures_of_other_content(attacked: AttackedRelease, key: Ed25519PrivateKey) -> None:
    own = attacked.entries["signature"]
    of_file_bytes = own | {"ed25519": base64.b64encode(key.sign(attacked.manifest.to_json())).decode()}
    untrusted = signature_by(Ed25519PrivateKey.generate(), attacked)
    under_trusted_id = untrusted | {"key_id": attacked.keys[0].key_id}
    for signature in (signature_by(key, attacked, version="2"), of_file_bytes, under_trusted_id):
        attacked.entries["signature"] = signature
        attacked.assert_refused(UntrustedRelease, "does not match this manifest")
    attacked.entries["signature"] = untrusted
    attacked.assert_refused(UntrustedRelease, f"is signed by {untrusted['key_id']}. This deployment")


def test_refuses_older_release_under_newer_name(attacked: AttackedRelease, key: Ed25519PrivateKey) -> None:
    releases.write_manifest(attacked.store.root, attacked.entries | {"version": "2"}, "toy/2")
    attacked.assert_refused(UntrustedRelease, "does not match this manifest", "toy/2")


def test_refuses_swapped_digests(attacked: AttackedRelease, key: Ed25519PrivateKey) -> None:
    """Both blobs are correct and signed, but each is listed for the other component."""
    first, third = attacked.entries["weights"][0], attacked.entries["weights"][2]
    first["blobs"], third["blobs"] = third["blobs"], first["blobs"]
    attacked.assert_refused(UntrustedRelease, "does not match this manifest")


@from_bucket
def test_checks_blobs_of_signed_release(attacked: AttackedRelease, key: Ed25519PrivateKey) -> None:
    shutil.rmtree(attacked.cache)  # it has the correct blobs
    path = attacked.blob_path(attacked.manifest.engines[0].blob.sha256)
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    attacked.assert_refused(CorruptBlob, path.name[:12])
