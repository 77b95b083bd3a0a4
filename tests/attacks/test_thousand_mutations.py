"""Many changed manifests and blobs, from fixed seeds: 100 of each, and a thousand in `make full`.

Each is refused with an error, none ends the process, and none leaves a file in the cache.
"""

import copy
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from engine_builder.releases import signing
from model.cold_start import ColdStart
from model.errors import CorruptBlob, PreheatError
from model.loading.load import Loaded
from model.store.local import LocalStore
from model.store.manifest import Manifest
from model.store.manifest_json import parse_manifest
from model.store.signature import PublicKey
from tests.attacks.conftest import AttackedRelease
from tests.support import releases
from tests.support.deployments import deployed, load_release
from tests.support.releases import RELEASE_NAME, cpu_target

Entries = dict[str, Any]
MAX_MESSAGE_LENGTH = 1500
each_number = pytest.mark.parametrize("mutations", [100, pytest.param(1000, marks=pytest.mark.full)])

JUNK: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 7, 2**31, 2**63, 2**70, 10**400, 0.5, -1e308, "", "1", "\0", "../../x", "é\u202e",
    "0" * 64, "x" * 5000, [], {}, [[]], {"a": {}}, [1, "2", None],
)  # fmt: skip


def objects_and_lists(node: Any) -> list[Any]:
    """Return all objects and lists of a tree, the root included."""
    if not isinstance(node, dict | list):
        return []
    children = node.values() if isinstance(node, dict) else node
    return [node] + [descendant for child in children for descendant in objects_and_lists(child)]


def similar_value(value: Any, rng: random.Random) -> Any:
    """Change a number, string or boolean a little: the result is often valid too. Return other values unchanged."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + rng.choice([-1, 1, 7])
    if isinstance(value, str) and value:
        at = rng.randrange(len(value))
        return value[:at] + rng.choice("0123456789abcdef") + value[at + 1 :]
    return value


def mutate_entries(entries: Entries, rng: random.Random) -> bytes:
    """Apply one to three changes that keep valid JSON."""
    for _ in range(rng.choice([1, 1, 2, 3])):
        node = rng.choice([node for node in objects_and_lists(entries) if node])
        key, other = (rng.choice(list(node) if isinstance(node, dict) else range(len(node))) for _ in range(2))
        match rng.randrange(12):
            case 0:
                del node[key]
            case 1:
                node[key] = copy.deepcopy(rng.choice(JUNK))
            case 2 if isinstance(node, dict):
                node[rng.choice(["surprise", "", key + "x", key.upper()])] = node.pop(key)
            case 2:
                node.append(copy.deepcopy(node[key]))
            case 3:
                node[key], node[other] = node[other], node[key]
            case 4:
                node[key] = rng.choice([[node[key]], {"x": node[key]}])
            case _:
                node[key] = similar_value(node[key], rng)
    return json.dumps(entries).encode()


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Apply one to three changes: a flipped bit, bytes missing or repeated, junk, a space after a comma."""
    for _ in range(rng.randint(1, 3)):
        at, length = rng.randrange(len(data)), rng.choice([1, 1, 2, 8, 100, 2000])
        comma = data.find(b",", at)
        data = rng.choice(
            [
                data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :],
                data[:at] + data[at + length :],
                data[:at] + data[at : at + length] * 2 + data[at + length :],
                data[:at] + rng.choice([b"{", b"]", b'"', b"null", b"NaN", b"\xff", b"\0"]) + data[at:],
                data[: max(at, 1)],
                data[:comma] + rng.choice([b" ", b"\n", b"\t\r "]) + data[comma:] if comma >= 0 else data + b"\n",
            ]
        )
    return data


def load(store: LocalStore, keys: list[PublicKey] | None = None) -> Loaded:
    return load_release(store, deployed(public_keys=tuple(keys or ())), [cpu_target()], ColdStart())


def try_to_load(store: LocalStore, keys: list[PublicKey] | None = None) -> Loaded | str:
    """Load the release, or return the name of the error, whose message must be short and printable."""
    try:
        return load(store, keys)
    except PreheatError as error:
        message = str(error)
        assert message.isprintable() and len(message) < MAX_MESSAGE_LENGTH, message
        return type(error).__name__


def parse_or_none(data: bytes) -> Manifest | None:
    try:
        return parse_manifest(data, RELEASE_NAME)
    except PreheatError:
        return None


@each_number
def test_a_thousand_mutated_manifests(mutations: int, attacked: AttackedRelease) -> None:
    """With a trusted key, every manifest is refused unless it parses to the original.

    Without a key, a manifest with another number (of steps, of a date) can be valid and load. It must name only blobs
    of the original release. Every other manifest must raise a PreheatError.
    """
    rng = random.Random(20260101)
    key = Ed25519PrivateKey.generate()
    trusted = [signing.public_key(key)]
    original = signing.sign(attacked.manifest, key)
    original_bytes = original.to_json()
    original_blobs = {digest: blob.bytes for digest, blob in original.blobs().items()}
    blob_files = sorted(attacked.store.root.rglob("blobs/sha256/*"))
    with_key: Counter[str] = Counter()
    without_key: Counter[str] = Counter()
    unchanged = 0
    while with_key.total() < mutations:
        mutants = mutate_entries(json.loads(original_bytes), rng), mutate_bytes(original_bytes, rng)
        mutant = rng.choice(mutants)
        manifest = parse_or_none(mutant)
        if manifest == original:
            unchanged += 1  # whitespace, for example
            continue
        releases.write_manifest(attacked.store.root, mutant)
        outcome = try_to_load(attacked.store, trusted)
        assert isinstance(outcome, str), "loaded a manifest that the key did not sign"
        with_key[outcome] += 1
        if manifest is None:
            continue
        outcome = try_to_load(attacked.store)
        without_key[outcome if isinstance(outcome, str) else "loaded"] += 1
        blobs = {digest: blob.bytes for digest, blob in manifest.blobs().items()}
        assert isinstance(outcome, str) or blobs.items() <= original_blobs.items()
    assert with_key.keys() == {"ManifestError", "UntrustedRelease"}
    assert min(with_key.values()) > mutations // 20, with_key
    assert unchanged and without_key["loaded"] >= mutations // 50, (unchanged, without_key)
    assert mutations == 100 or {"CorruptBlob", "NoEngineForTarget", "MissingComponent"} <= without_key.keys()
    assert sorted(attacked.store.root.rglob("blobs/sha256/*")) == blob_files


Blobs = dict[Path, bytes]


def read_blobs(attacked: AttackedRelease) -> Blobs:
    return {path: path.read_bytes() for path in sorted((attacked.store.root / "blobs" / "sha256").iterdir())}


def damage_blob(blobs: Blobs, path: Path, rng: random.Random) -> bytes | None:
    """Return the damaged bytes of a blob, or None to delete it."""
    data = blobs[path]
    at = rng.randrange(len(data))
    same_size = [other for key, other in blobs.items() if key != path and len(other) == len(data)]
    damaged = rng.choice(
        [
            data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :],
            data[:at],
            data + rng.randbytes(rng.choice([1, 100])),
            rng.choice(same_size) if same_size else bytes(len(data)),
            rng.randbytes(len(data)),
            data[at:] + data[:at],
            None,
        ]
    )
    return b"" if damaged == data else damaged


def replace_file(path: Path, data: bytes | None) -> None:
    """Replace a file, at least one tick of the file system's clock later. None deletes it."""
    before = path.stat().st_ctime_ns if path.exists() else 0
    path.unlink(missing_ok=True)
    if data is not None:
        path.write_bytes(data)
        while path.stat().st_ctime_ns == before:
            path.write_bytes(data)


@each_number
def test_a_thousand_changed_blobs_in_a_folder(mutations: int, attacked: AttackedRelease) -> None:
    """A new store refuses each change, and so does a store that verified the original blob. The restored blobs load."""
    rng = random.Random(20260102)
    blobs = read_blobs(attacked)
    load(attacked.store)
    for number in range(mutations):
        path = rng.choice(list(blobs))
        replace_file(path, damage_blob(blobs, path, rng))
        # A new store, or one that has verified the blob before.
        with pytest.raises(CorruptBlob, match=path.name[:12]):
            load(LocalStore(attacked.store.root) if number % 2 else attacked.store)
        replace_file(path, blobs[path])
    assert load(attacked.store).release == RELEASE_NAME
