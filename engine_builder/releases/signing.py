"""Private keys: make one, and sign a manifest with it. Nothing of this reaches a server."""

import base64
import os
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from model.errors import PreheatError
from model.store.manifest import Manifest, ReleaseSignature
from model.store.manifest_json import parse_manifest
from model.store.signature import PublicKey


class BadKey(PreheatError):
    """A private key that cannot be written, or that is none."""


def write_key(path: Path) -> PublicKey:
    """Make a private key, keep it in a new file that only its owner reads (PEM, PKCS #8), return its public half.

    Raises BadKey; a file that is there already is left alone.
    """
    key = Ed25519PrivateKey.generate()
    data = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Created with its mode, so that nobody else can have opened it before.
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)
    except FileExistsError as error:
        raise BadKey(
            f"{path} is there already and is left as it is: releases may be signed with it. Name another file."
        ) from error
    except OSError as error:
        raise BadKey(f"{path} cannot be written: {error.strerror or error}. Name another file.") from error
    return public_key(key)


def read_key(path: Path) -> Ed25519PrivateKey:
    """Raises BadKey for what is no Ed25519 private key of `write_key`'s."""
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise BadKey(
            f"{path} cannot be read: {error.strerror or error}. Make a key with `preheat keygen {path}`."
        ) from error
    except (ValueError, TypeError) as error:
        raise BadKey(f"{path} is no private key without a password: make one with `preheat keygen`.") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise BadKey(f"{path} is a key of another kind than Ed25519: make one with `preheat keygen`.")
    return key


def public_key(key: Ed25519PrivateKey) -> PublicKey:
    """The half that goes into a config."""
    return PublicKey(key.public_key().public_bytes_raw())


def sign(manifest: Manifest, key: Ed25519PrivateKey) -> Manifest:
    """The manifest with its signature, in place of any that it had."""
    # As every reader will have it: what was left to a default is written out by then, and so is signed.
    read = parse_manifest(manifest.to_json(), manifest.name)
    signature = base64.b64encode(key.sign(read.signed_bytes())).decode()
    return read.model_copy(update={"signature": ReleaseSignature(key_id=public_key(key).key_id, ed25519=signature)})
