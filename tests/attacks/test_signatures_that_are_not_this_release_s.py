"""A signature of another release, of an older one, of another key under this one's name; none at all; an edited one."""

import base64
import json
import shutil

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from engine_builder.releases import signing
from model.errors import CorruptBlob, ManifestError, UntrustedRelease
from tests.attacks.conftest import Victim, everywhere
from tests.stand_ins import releases


@pytest.fixture
def key(victim: Victim) -> Ed25519PrivateKey:
    """The victim trusts this one, and its release is signed by it."""
    key = Ed25519PrivateKey.generate()
    victim.keys = [signing.public_key(key)]
    victim.entries = json.loads(signing.sign(victim.manifest, key).to_json())
    assert victim.served().release == "toy/1"
    return key


def test_none(victim: Victim, key: Ed25519PrivateKey) -> None:
    signature = victim.entries.pop("signature")
    victim.refused(UntrustedRelease, "is not signed")
    victim.entries["signature"] = None
    victim.refused(UntrustedRelease, "is not signed")
    for word in ("", "AAAA", "A" * 88, signature["ed25519"][:-1], 7):
        victim.entries["signature"] = signature | {"ed25519": word}
        victim.refused(ManifestError, "damaged at signature.ed25519")


def test_another_release_s(victim: Victim, key: Ed25519PrivateKey) -> None:
    other = signing.sign(victim.manifest.model_copy(update={"version": "2"}), key)
    assert other.signature is not None
    victim.entries["signature"] = other.signature.model_dump()
    victim.refused(UntrustedRelease, "is not one of this manifest")


def test_an_older_release_under_a_newer_s_name(victim: Victim, key: Ed25519PrivateKey) -> None:
    releases.write_raw(victim.store.root, json.dumps(victim.entries).encode(), "toy/2")
    victim.refused(ManifestError, "toy/2 is that of toy/1", "toy/2")
    older = dict(victim.entries)
    victim.entries = older | {"version": "2"}
    releases.write_raw(victim.store.root, json.dumps(victim.entries).encode(), "toy/2")
    victim.entries = older
    victim.refused(UntrustedRelease, "is not one of this manifest", "toy/2")


def test_a_stranger_s_under_this_key_s_name(victim: Victim, key: Ed25519PrivateKey) -> None:
    stranger = signing.sign(victim.manifest, Ed25519PrivateKey.generate())
    assert stranger.signature is not None
    victim.entries["signature"] = stranger.signature.model_dump()
    victim.refused(UntrustedRelease, f"is signed by {stranger.signature.key_id}, and only")
    victim.entries["signature"]["key_id"] = victim.keys[0].key_id
    victim.refused(UntrustedRelease, "is not one of this manifest")


def test_a_signature_of_the_file_instead_of_what_it_says(victim: Victim, key: Ed25519PrivateKey) -> None:
    signature = base64.b64encode(key.sign(victim.manifest.to_json())).decode()
    victim.entries["signature"]["ed25519"] = signature
    victim.refused(UntrustedRelease, "is not one of this manifest")


def test_digests_that_changed_places(victim: Victim, key: Ed25519PrivateKey) -> None:
    """Every blob is right and signed for; but each under the other's component."""
    first, third = victim.entries["weights"][0], victim.entries["weights"][2]
    first["blobs"], third["blobs"] = third["blobs"], first["blobs"]
    victim.refused(UntrustedRelease, "is not one of this manifest")


@everywhere
def test_a_signed_release_s_blobs_are_checked_too(victim: Victim, key: Ed25519PrivateKey) -> None:
    shutil.rmtree(victim.cache, ignore_errors=True)  # which has them whole
    path = victim.blob(victim.manifest.engines[0].blob.sha256)
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    victim.refused(CorruptBlob, path.name[:12])
