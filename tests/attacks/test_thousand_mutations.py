"""A thousand changed manifests and two thousand changed blobs, from fixed seeds.

Each is refused with an error, none ends the process, and none leaves a file in the cache.
"""

import copy
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from engine_builder.releases import signing
from engine_builder.stores.s3 import WritableS3Store
from model.cold_start import ColdStart
from model.errors import CorruptBlob, PreheatError
from model.loading.load import Loaded, load_release
from model.store.local import LocalStore
from model.store.manifest import Manifest
from model.store.manifest_json import parse_manifest
from model.store.signature import PublicKey
from tests.attacks.conftest import Victim
from tests.support import releases
from tests.support.releases import NAME, cpu_target

Entries = dict[str, Any]
THOUSAND = 1000

JUNK: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 7, 2**31, 2**63, 2**70, 10**400, 0.5, -1e308, "", "1", "\0", "../../x", "é\u202e",
    "0" * 64, "x" * 5000, [], {}, [[]], {"a": {}}, [1, "2", None],
)  # fmt: skip


def leaves(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield (path, value) of all leaves of a tree, including empty objects and lists."""
    items = list(node.items()) if isinstance(node, dict) else list(enumerate(node)) if isinstance(node, list) else []
    if not items:
        yield path, node
    for key, child in items:
        yield from leaves(child, (*path, key))


def containers(node: Any) -> list[Any]:
    if not isinstance(node, dict | list):
        return []
    children = node.values() if isinstance(node, dict) else node
    return [node] + [found for child in children for found in containers(child)]


def another(value: Any, rng: random.Random) -> Any:
    """Return another value that is usually as valid."""
    if type(value) is int:
        return value + rng.choice([-1, 1, 7])
    if isinstance(value, float):
        return value * rng.choice([0.5, 2.0]) + 1e-3
    if isinstance(value, str) and value:
        at = rng.randrange(len(value))
        return value[:at] + rng.choice("0123456789abcdef") + value[at + 1 :]
    return not value if isinstance(value, bool) else value


def mutate_tree(entries: Entries, rng: random.Random) -> bytes:
    """Apply one to three changes that keep valid JSON."""
    for _ in range(rng.choice([1, 1, 2, 3])):
        node = rng.choice([found for found in containers(entries) if found])
        key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        match rng.randrange(9):
            case 6 | 7 | 8:
                node[key] = another(node[key], rng)
            case 0:
                del node[key]
            case 1 | 2:
                node[key] = copy.deepcopy(rng.choice(JUNK))
            case 3 if isinstance(node, dict):
                node[rng.choice(["surprise", "", key + "x", key.upper()])] = node.pop(key)
            case 3:
                node.append(copy.deepcopy(node[key]))
            case 4:  # swap two entries
                other = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
                node[key], node[other] = node[other], node[key]
            case _:
                node[key] = [node[key]] if rng.random() < 0.5 else {"x": node[key]}
    return json.dumps(entries).encode()


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Apply one to three changes to the bytes."""
    for _ in range(rng.randint(1, 3)):
        at, length = rng.randrange(len(data)), rng.choice([1, 1, 2, 8, 100, 2000])
        match rng.randrange(6):
            case 0:
                data = data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
            case 1:
                data = data[:at] + data[at + length :]
            case 2:
                data = data[:at] + data[at : at + length] * 2 + data[at + length :]
            case 3:
                data = data[:at] + rng.randbytes(length) + data[at:]
            case 4:
                data = data[: max(at, 1)]
            case _:  # whitespace, which JSON allows here
                at = data.find(b",", at)
                data = data[:at] + rng.choice([b" ", b"\n", b"\t\r "]) + data[at:] if at >= 0 else data + b"\n"
    return data


def kinds(tree: Any) -> dict[tuple[Any, ...], type]:
    return {path: type(value) for path, value in leaves(tree)}


def rewrite(path: Path, data: bytes | None) -> None:
    """Replace a file, at least one tick of the file system's clock later. No data deletes it."""
    before = path.stat().st_ctime_ns if path.exists() else 0
    path.unlink(missing_ok=True)
    if data is not None:
        path.write_bytes(data)
        while path.stat().st_ctime_ns == before:
            path.write_bytes(data)


def load(store: LocalStore, keys: list[PublicKey] | None = None) -> Loaded:
    return load_release(store, NAME, [cpu_target()], [], ColdStart(), keys or [])


def refusal(store: LocalStore, keys: list[PublicKey]) -> str:
    """Load the release, which must fail, and return the name of the error."""
    with pytest.raises(PreheatError) as caught:
        load(store, keys)
    message = str(caught.value)
    assert message.isprintable() and len(message) < 1500, message
    return type(caught.value).__name__


def meaning(data: bytes) -> Manifest | None:
    try:
        return parse_manifest(data, NAME)
    except PreheatError:
        return None


def test_a_thousand_mutated_manifests(victim: Victim) -> None:
    """A signed release: every manifest with another meaning is refused.

    Without a configured key, a valid manifest with another number (of steps, of a date) looks like a published one. It
    must then load blobs of the original release only. Other errors, crashes and unverified bytes must not happen.
    """
    rng = random.Random(20260101)
    key = Ed25519PrivateKey.generate()
    trusted = [signing.public_key(key)]
    original = signing.sign(victim.manifest, key)
    data = original.to_json()
    true = {digest: blob.bytes for digest, blob in original.blobs().items()}
    blobs = sorted(victim.store.root.rglob("blobs/sha256/*"))
    refused: Counter[str] = Counter()
    unsigned: Counter[str] = Counter()
    same = 0
    while refused.total() < THOUSAND:
        mutant = mutate_tree(json.loads(data), rng) if rng.random() < 0.5 else mutate_bytes(data, rng)
        accepted = meaning(mutant)
        if accepted == original:
            same += 1  # whitespace, for example
            continue
        releases.write_manifest(victim.store.root, mutant)
        refused[refusal(victim.store, trusted)] += 1
        if accepted is None:
            continue
        try:
            loaded = load(victim.store)
        except PreheatError as error:
            assert str(error).isprintable() and len(str(error)) < 1500, str(error)
            unsigned[type(error).__name__] += 1
            continue
        unsigned["served"] += 1
        assert loaded.release == NAME
        assert {digest: blob.bytes for digest, blob in accepted.blobs().items()}.items() <= true.items()
        dumped = kinds(accepted.model_dump(mode="json"))
        shared = dumped.keys() & kinds(original.model_dump(mode="json")).keys()
        assert len(shared) > 0.9 * len(dumped), "a large change was accepted"
    assert refused.keys() == {"ManifestError", "UntrustedRelease"} and min(refused.values()) > 50, refused
    assert same > 10 and unsigned["served"] > 20, (same, unsigned)
    assert {"CorruptBlob", "NoEngineForTarget", "MissingComponent"} <= unsigned.keys(), unsigned
    assert sorted(victim.store.root.rglob("blobs/sha256/*")) == blobs


def changed(data: bytes, alike: list[bytes], rng: random.Random) -> bytes | None:
    """Return changed bytes, or None for a deleted blob: a bit, cut, longer, another blob, noise, rotated."""
    at = rng.randrange(len(data))
    match rng.randrange(8):
        case 0 | 1:
            bad = data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
        case 2:
            bad = data[:at]
        case 3:
            bad = data + rng.randbytes(rng.choice([1, 100]))
        case 4:
            bad = rng.choice(alike) if alike else bytes(len(data))
        case 5:
            bad = rng.randbytes(len(data))
        case 6:
            cut = rng.randrange(1, len(data) + 1)
            bad = data[cut:] + data[:cut]
        case _:
            return None
    return b"" if bad == data else bad


def contents(victim: Victim) -> tuple[dict[Path, bytes], Callable[[Path], list[bytes]]]:
    """Return all blobs of the release, and a function for the others of the same size."""
    whole = {path: path.read_bytes() for path in sorted((victim.store.root / "blobs" / "sha256").iterdir())}
    return whole, lambda path: [
        data for other, data in whole.items() if other != path and len(data) == len(whole[path])
    ]


def test_a_thousand_changed_blobs_in_a_folder(victim: Victim) -> None:
    """The store has verified them before. Each change is refused, and each restored blob loads."""
    rng = random.Random(20260102)
    whole, alike = contents(victim)
    load(victim.store)
    for number in range(THOUSAND):
        path = rng.choice(list(whole))
        rewrite(path, changed(whole[path], alike(path), rng))
        # A new store, or one that has verified the blob before.
        with pytest.raises(CorruptBlob, match=path.name[:12]):
            load(LocalStore(victim.store.root) if number % 2 else victim.store)
        rewrite(path, whole[path])
    assert load(victim.store).release == NAME


def test_a_thousand_changed_blobs_in_a_bucket(
    victim: Victim, s3: Any, bucket: str, open_bucket: Callable[..., WritableS3Store]
) -> None:
    """Each is fetched with an empty cache, refused, and not cached."""
    rng = random.Random(20260103)
    whole, alike = contents(victim)
    engine = max(whole, key=lambda path: len(whole[path]))
    store = open_bucket(cache_dir=victim.cache)
    # The engine is a thousand times larger than the others, so it is changed less often.
    paths = [rng.choice([path for path in whole if path != engine]) for _ in range(THOUSAND - 20)] + [engine] * 20
    # Sequential for each blob, with several blobs in parallel.
    turns = {path: paths.count(path) for path in whole}
    seeds = {path: rng.randrange(2**32) for path in whole}

    def attack(path: Path) -> int:
        own = random.Random(seeds[path])
        for _ in range(turns[path]):
            bad = changed(whole[path], alike(path), own)
            if bad is None:
                s3.delete_object(Bucket=bucket, Key=f"blobs/sha256/{path.name}")
            else:
                s3.put_object(Bucket=bucket, Key=f"blobs/sha256/{path.name}", Body=bad)
            with pytest.raises(CorruptBlob, match=path.name[:12]):
                store.get(path.name, len(whole[path]))
        return turns[path]

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(attack, whole)) == THOUSAND
    assert not [*(victim.cache / "blobs" / "sha256").iterdir(), *(victim.cache / "partial").iterdir()]
