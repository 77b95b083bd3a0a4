"""Public keys, and the check that a trusted key has signed a release.

An engine is native code. So anyone who can write to a store can run any code in every server that loads from it.
With public keys in its config, a server loads only releases that were signed with one of their private keys.

The signature covers the canonical JSON of the manifest without the signature, and so each blob's digest. Manifest and
signature are one file, so they are published at once. `cryptography` is imported only if a key is configured.
engine_builder/releases/signing.py makes private keys and signatures.
"""

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from model.errors import ConfigError, UntrustedRelease
from model.store.manifest import ReleaseSignature

_PREFIX = "ed25519:"
_ADD_AGAIN = "add it again, signed, under a new name (`preheat add-lora --sign KEYFILE`)."
_REPUBLISH_REMEDY = "publish the release again, signed, under a new version (`preheat publish --sign KEYFILE`)."


@dataclass(frozen=True)
class PublicKey:
    """An Ed25519 public key. `raw`: its 32 bytes. Its text is "ed25519:" and the base64 of `raw`."""

    raw: bytes

    @classmethod
    def parse(cls, text: Any) -> "PublicKey":
        """Read a key from its text. Raises ConfigError."""
        if not isinstance(text, str) or not re.fullmatch(_PREFIX + "[A-Za-z0-9+/]{43}=", text):
            raise ConfigError(
                f"{text!r:.80} is not a public key.",
                "Give the line that `preheat keygen` prints (ed25519: and 44 characters).",
            )
        raw = base64.b64decode(text.removeprefix(_PREFIX))
        if _has_small_order(raw):
            raise ConfigError(
                f"{text!r} is an unsafe key (a point of small order): anyone can make signatures that match it.",
                "Make a key with `preheat keygen`, and give the line that it prints.",
            )
        return cls(raw)

    @property
    def key_id(self) -> str:
        """The first 16 hex digits of the key's SHA-256. It names the key in messages and in a manifest's signature."""
        return hashlib.sha256(self.raw).hexdigest()[:16]

    def __str__(self) -> str:
        return _PREFIX + base64.b64encode(self.raw).decode()


def _has_small_order(raw: bytes) -> bool:
    """True for an encoded point of order 1, 2, 4 or 8 on edwards25519, -x^2 + y^2 = 1 + d x^2 y^2 (RFC 8032, 5.1).

    The points of order 1, 2 and 4 have y = 1, -1 and 0. A point of order 8 doubles to one of order 4, so to y = 0. By
    the doubling formula x^2 = -y^2. The curve's equation then gives d y^4 + 2 y^2 = 1. The encoding's highest bit, the
    sign of x, does not matter. An encoded y may be larger than the prime.
    """
    prime = 2**255 - 19
    d = -121665 * pow(121666, -1, prime)
    y = int.from_bytes(raw, "little") % 2**255 % prime
    return y in (0, 1, prime - 1) or (d * y**4 + 2 * y**2 - 1) % prime == 0


def parse_public_keys(value: Any) -> list[PublicKey]:
    """Read keys from text (separated by commas) or a list; None, "" and [] give no key. Raises ConfigError."""
    if value is None or value == "":
        return []
    if isinstance(value, str):
        value = [text.strip() for text in value.split(",")]
    if not isinstance(value, list):
        value = [value]  # refused by `parse`, which names it
    return [PublicKey.parse(text) for text in value]


class Signed(Protocol):
    """A release or an adapter: what a signature covers, and the signature."""

    @property
    def title(self) -> str: ...

    @property
    def signature(self) -> ReleaseSignature | None: ...

    def signed_bytes(self) -> bytes: ...


def check_signature(signed: Signed, keys: Sequence[PublicKey]) -> None:
    """Raise UntrustedRelease unless one of `keys` has signed it. Without keys nothing is checked."""
    if not keys:
        return
    kind = signed.title.partition(" ")[0].lower()
    sign_again = _ADD_AGAIN if kind == "adapter" else _REPUBLISH_REMEDY
    trusted = ", ".join(key.key_id for key in keys)
    signature = signed.signature
    if signature is None:
        raise UntrustedRelease(
            f"{signed.title} is not signed. This deployment loads only {kind}s signed by {trusted}.",
            f"Name a signed {kind}, or {sign_again}",
        )
    key = next((key for key in keys if key.key_id == signature.key_id), None)
    if key is None:
        raise UntrustedRelease(
            f"{signed.title} is signed by {signature.key_id}. This deployment loads only {kind}s signed by {trusted}.",
            f"Name another {kind}. If you trust that key's owner, add the key to public_key in config.yaml "
            "(PREHEAT_PUBLIC_KEY).",
        )
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(key.raw).verify(base64.b64decode(signature.ed25519), signed.signed_bytes())
    except InvalidSignature as error:
        raise UntrustedRelease(
            f"The signature of {signed.title[0].lower()}{signed.title[1:]} does not match this "
            f"{'manifest' if kind == 'release' else 'record'} and key {key.key_id}. Either it was changed after "
            f"signing, or the signature belongs to another {kind}.",
            f"Find out who can write to the store, then {sign_again}",
        ) from error
