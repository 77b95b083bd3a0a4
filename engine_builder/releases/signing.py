"""Make a private key, and sign a manifest or an adapter with it. Servers never have private keys."""

import base64
import os
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from engine_builder.files import check_writable, read_file
from model.errors import PreheatError
from model.store.adapter_record import AdapterRecord
from model.store.manifest import Manifest, ReleaseSignature
from model.store.manifest_json import parse_manifest
from model.store.signature import PublicKey


class BadKey(PreheatError):
    """A private key cannot be written, or is invalid."""

    remedy = "Make a key with `preheat keygen`."


def write_key(path: Path) -> PublicKey:
    """Write a new private key to a new file that only its owner may read (PEM, PKCS #8). Returns the public key.

    Raises BadKey, also if the file exists, or NotWritable.
    """
    key = Ed25519PrivateKey.generate()
    data = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        # Created with its mode, so that no other user can have opened it before.
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)  # an incomplete key would be refused by the next try, because it exists
            raise
    except FileExistsError as error:
        raise BadKey(f"{path} exists, and releases may be signed with it.", "Name another file.") from error
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            check_writable(path)  # names the missing folder
        raise BadKey(f"{path} cannot be written: {error.strerror or error}.", "Name another file.") from error
    return public_key(key)


def read_key(path: Path) -> Ed25519PrivateKey:
    """Read a private key that `write_key` wrote. Raises BadKey."""
    try:
        key = load_pem_private_key(read_file(path), password=None)
    except OSError as error:
        raise BadKey(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, TypeError) as error:
        raise BadKey(f"{path} is not a private key, or has a password.") from error
    except UnsupportedAlgorithm as error:
        raise BadKey(f"{path} is not an Ed25519 key.") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise BadKey(f"{path} is not an Ed25519 key.")
    return key


def public_key(key: Ed25519PrivateKey) -> PublicKey:
    """Return the public key of a private key. A deployment's config names it."""
    return PublicKey(key.public_key().public_bytes_raw())


def sign(manifest: Manifest, key: Ed25519PrivateKey) -> Manifest:
    """Return the manifest with a signature by `key`, which replaces an earlier signature."""
    # Parse it as a reader does: the written JSON also states default values, and the signature covers them.
    read = parse_manifest(manifest.to_json(), manifest.name)
    return read.model_copy(update={"signature": _signature(read.signed_bytes(), key)})


def sign_adapter(record: AdapterRecord, key: Ed25519PrivateKey) -> AdapterRecord:
    """Return the record with a signature by `key`, which replaces an earlier signature."""
    return record.model_copy(update={"signature": _signature(record.signed_bytes(), key)})


def _signature(data: bytes, key: Ed25519PrivateKey) -> ReleaseSignature:
    return ReleaseSignature(key_id=public_key(key).key_id, ed25519=base64.b64encode(key.sign(data)).decode())
