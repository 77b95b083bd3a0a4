"""Bytes more, fewer or others than the manifest says, under a right digest's name."""

from collections.abc import Callable

import pytest

from model.errors import CorruptBlob
from model.store.manifest import Blob, Manifest
from tests.attacks.conftest import Victim, everywhere

pytestmark = everywhere

DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "longer": (lambda data: data + b"\0", "bytes instead of"),
    "much longer": (lambda data: data + bytes(2**21), "bytes instead of"),
    "shorter": (lambda data: data[:-1], "bytes instead of"),
    "nothing": (lambda data: b"", "is damaged: it has "),
    "a bit": (lambda data: data[:20] + bytes([data[20] ^ 1]) + data[21:], "its bytes have changed"),
    "zeros": (lambda data: bytes(len(data)), "its bytes have changed"),
}


WHICH: dict[str, Callable[[Manifest], Blob]] = {
    "engine": lambda manifest: manifest.engines[2].blob,
    "weights": lambda manifest: manifest.weights[1].blobs[0],
    "tokenizer": lambda manifest: manifest.tokenizers["tokenizer"].blob,
}


@pytest.mark.parametrize("damage, words", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("which", WHICH.values(), ids=WHICH)
def test_it_is_refused(
    victim: Victim, which: Callable[[Manifest], Blob], damage: Callable[[bytes], bytes], words: str
) -> None:
    digest = which(victim.manifest).sha256
    path = victim.blob(digest)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert digest[:12] in victim.refused(CorruptBlob, words)
    path.write_bytes(whole)
    assert victim.served().release == victim.manifest.name
