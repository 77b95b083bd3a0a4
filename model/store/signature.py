"""Which releases a deployment takes: those that a key of its config has signed.

An engine is native code, so whoever can write a store runs what they like in every server that loads from it. With a
public key in its config a server loads nothing that the key's owner has not signed. What is signed is the manifest's
canonical JSON, and so every digest in it; the signature lies in the manifest itself, so both are published at once.
`cryptography` is imported only where a key is configured. Private keys are `engine_builder.releases.signing`'s.
"""

import base64
import binascii
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from model.errors import ManifestError, UntrustedRelease
from model.store.manifest import Manifest

_PREFIX = "ed25519:"
_KEY_BYTES = 32  # RFC 8032


@dataclass(frozen=True)
class PublicKey:
    """An Ed25519 public key: 32 bytes, written "ed25519:" and their base64."""

    raw: bytes

    @classmethod
    def parse(cls, text: Any) -> "PublicKey":
        """Raises ManifestError for what is no such text."""
        try:
            if not isinstance(text, str) or not text.startswith(_PREFIX):
                raise ValueError
            raw = base64.b64decode(text.removeprefix(_PREFIX), validate=True)
            if len(raw) != _KEY_BYTES:
                raise ValueError
        except (ValueError, binascii.Error) as error:
            raise ManifestError(
                f"config: {text!r:.80} is no public key: give the line that `preheat keygen` prints (ed25519: and 44 "
                "characters) as model_metadata.preheat.public_key in config.yaml, or as PREHEAT_PUBLIC_KEY."
            ) from error
        return cls(raw)

    @property
    def key_id(self) -> str:
        """The first 16 hexadecimal digits of the key's SHA-256: a name for messages, which proves nothing."""
        return hashlib.sha256(self.raw).hexdigest()[:16]

    def __str__(self) -> str:
        return _PREFIX + base64.b64encode(self.raw).decode()


def configured_keys(settings: Mapping[str, Any] | None = None) -> list[PublicKey]:
    """The keys a deployment trusts: PREHEAT_PUBLIC_KEY (several with commas between them), else `public_key` of
    `settings` (model_metadata.preheat; one or a list). None: releases need no signature. Raises ManifestError."""
    return parse_keys(os.environ.get("PREHEAT_PUBLIC_KEY") or (settings or {}).get("public_key"))


def parse_keys(given: Any) -> list[PublicKey]:
    """Public keys from text (several with commas between them) or a list of it; none from nothing. Raises
    ManifestError."""
    if given is None or given == "" or given == []:
        return []
    texts = [part.strip() for part in given.split(",")] if isinstance(given, str) else given
    return [PublicKey.parse(text) for text in (texts if isinstance(texts, list) else [texts])]


def check_signature(manifest: Manifest, keys: Sequence[PublicKey]) -> None:
    """Refuse a release that none of `keys` has signed; no keys, no question. Raises UntrustedRelease."""
    if not keys:
        return
    trusted = ", ".join(key.key_id for key in keys)
    signature = manifest.signature
    if signature is None:
        raise UntrustedRelease(
            f"Release {manifest.name} is not signed, and only releases signed by {trusted} are loaded here: publish it "
            "signed, under a new version (`preheat publish --sign KEYFILE`), or name a release that is."
        )
    key = next((key for key in keys if key.key_id == signature.key_id), None)
    if key is None:
        raise UntrustedRelease(
            f"Release {manifest.name} is signed by {signature.key_id}, and only releases signed by {trusted} are "
            "loaded here: name a release that is, or, if you trust that key's owner, add the key to public_key in "
            "config.yaml (PREHEAT_PUBLIC_KEY)."
        )
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(key.raw).verify(base64.b64decode(signature.ed25519), manifest.signed_bytes())
    except InvalidSignature as error:
        raise UntrustedRelease(
            f"The signature of release {manifest.name} is not one of this manifest by {key.key_id}: the manifest was "
            "changed after it was signed, or the signature is another's. Find out who can write the store, then "
            "publish the release again, signed, under a new version (`preheat publish --sign KEYFILE`)."
        ) from error
