"""Signatures of other releases, older releases and other keys; missing and edited signatures."""

import base64
import json
import shutil

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from engine_builder.releases import signing
from model.errors import CorruptBlob, ManifestError, UntrustedRelease
from tests.attacks.conftest import Victim, in_folder_and_bucket
from tests.support import releases


@pytest.fixture
def key(victim: Victim) -> Ed25519PrivateKey:
    """The key that the deployment trusts and that signed its release."""
    key = Ed25519PrivateKey.generate()
    victim.keys = [signing.public_key(key)]
    victim.entries = json.loads(signing.sign(victim.manifest, key).to_json())
    assert victim.served().release == "toy/1"
    return key


def test_refuses_missing_signature(victim: Victim, key: Ed25519PrivateKey) -> None:
    signature = victim.entries.pop("signature")
    victim.refused(UntrustedRelease, "is not signed")
    victim.entries["signature"] = None
    victim.refused(UntrustedRelease, "is not signed")
    for word in ("", "AAAA", "A" * 88, signature["ed25519"][:-1], 7):
        victim.entries["signature"] = signature | {"ed25519": word}
        victim.refused(ManifestError, "damaged at signature.ed25519")


def test_refuses_signature_of_another_release(victim: Victim, key: Ed25519PrivateKey) -> None:
    other = signing.sign(victim.manifest.model_copy(update={"version": "2"}), key)
    assert other.signature is not None
    victim.entries["signature"] = other.signature.model_dump()
    victim.refused(UntrustedRelease, "does not match this manifest")


def test_refuses_older_release_under_newer_name(victim: Victim, key: Ed25519PrivateKey) -> None:
    releases.write_manifest(victim.store.root, json.dumps(victim.entries).encode(), "toy/2")
    victim.refused(ManifestError, "manifest of toy/2 is that of toy/1", "toy/2")
    older = dict(victim.entries)
    victim.entries = older | {"version": "2"}
    releases.write_manifest(victim.store.root, json.dumps(victim.entries).encode(), "toy/2")
    victim.entries = older
    victim.refused(UntrustedRelease, "does not match this manifest", "toy/2")


def test_refuses_untrusted_key_under_trusted_id(victim: Victim, key: Ed25519PrivateKey) -> None:
    untrusted = signing.sign(victim.manifest, Ed25519PrivateKey.generate())
    assert untrusted.signature is not None
    victim.entries["signature"] = untrusted.signature.model_dump()
    victim.refused(UntrustedRelease, f"is signed by {untrusted.signature.key_id}. This deployment")
    victim.entries["signature"]["key_id"] = victim.keys[0].key_id
    victim.refused(UntrustedRelease, "does not match this manifest")


def test_refuses_signature_of_the_file_bytes(victim: Victim, key: Ed25519PrivateKey) -> None:
    signature = base64.b64encode(key.sign(victim.manifest.to_json())).decode()
    victim.entries["signature"]["ed25519"] = signature
    victim.refused(UntrustedRelease, "does not match this manifest")


def test_refuses_swapped_digests(victim: Victim, key: Ed25519PrivateKey) -> None:
    """Both blobs are correct and signed, but each is listed for the other component."""
    first, third = victim.entries["weights"][0], victim.entries["weights"][2]
    first["blobs"], third["blobs"] = third["blobs"], first["blobs"]
    victim.refused(UntrustedRelease, "does not match this manifest")


@in_folder_and_bucket
def test_checks_blobs_of_signed_release(victim: Victim, key: Ed25519PrivateKey) -> None:
    shutil.rmtree(victim.cache, ignore_errors=True)  # it has the correct blobs
    path = victim.blob(victim.manifest.engines[0].blob.sha256)
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    victim.refused(CorruptBlob, path.name[:12])
