"""Bring a release's blobs here while the process still imports torch, which takes seconds and one core.

What is brought is a guess from the manifest: a wrong one costs time and nothing else, since loading asks for what it
needs itself, and finds here, or on its way, what was guessed right. Nothing is opened, and of a release that the
deployment's key has not signed not a blob is read. Imports neither torch nor what imports it.

What lies on this machine already is not hashed meanwhile, only asked of the disk: hashing takes cores from the imports,
and with each piece the interpreter's lock, and takes little time once they are done.
"""

import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from model.errors import PreheatError
from model.store import Store, StoreOptions, open_store
from model.store.manifest import Blob, EngineRecord, Manifest
from model.store.signature import check_signature, configured_keys
from model.target import detect_targets

logger = logging.getLogger("preheat")
_PRECISIONS = ("fp16", "bf16", "fp32", "fp8", "int8")  # the order of model.loading's choice


class Prefetch:
    """Starts in a thread of its own at once. `settings` are model_metadata.preheat, `secrets` Truss's."""

    def __init__(self, settings: Mapping[str, Any], secrets: Mapping[str, str]) -> None:
        self._settings = settings
        self._secrets = secrets
        self._store: Store | None = None
        self._opened = threading.Event()
        self._thread = threading.Thread(target=self._run, name="preheat-prefetch", daemon=True)
        self._thread.start()

    def store(self, url: str) -> Store:
        """The deployment's store, opened once: what was verified in it on the way here need not be again. Raises
        StoreError, ManifestError."""
        self._opened.wait()
        if self._store is None:
            self._store = open_store(url, StoreOptions.from_deployment(self._settings, self._secrets))
        return self._store

    def forget(self) -> None:
        """Give the store up once all is loaded: a cache may then evict what is no longer read."""
        self._store = None

    def wait(self) -> None:
        """Until nothing more is brought. For tests: loading waits for each blob by itself."""
        self._thread.join()

    def _run(self) -> None:
        try:
            url, release = (setting(self._settings, name) for name in ("store", "release"))
            if not (url and release):
                return
            self._store = store = open_store(url, StoreOptions.from_deployment(self._settings, self._secrets))
            self._opened.set()
            manifest = store.read_release(release)
            check_signature(manifest, configured_keys(self._settings))
            buckets = self._settings.get("buckets") or []
            store.fetch(guess(manifest, [target.key for target in detect_targets()], buckets))
        except PreheatError as error:
            logger.debug("prefetch: %s", error)  # loading meets the same, and says it
        except Exception:
            logger.exception("prefetch failed; loading goes on without it")
        finally:
            self._opened.set()


def setting(settings: Mapping[str, Any], name: str) -> str:
    """A deployment's setting: PREHEAT_STORE, PREHEAT_RELEASE in the environment, else model_metadata.preheat; or ""."""
    return str(os.environ.get(f"PREHEAT_{name.upper()}") or settings.get(name) or "")


def guess(manifest: Manifest, targets: Sequence[str], buckets: Iterable[Any]) -> list[Blob]:
    """The blobs that loading on the first of `targets` which has engines will most likely read, the largest first.

    `buckets` are the config's, unchecked.
    """
    built = {engine.target for engine in manifest.engines}
    target = next((target for target in targets if target in built), None)
    every = [engine for engine in manifest.engines if engine.target == target]
    best: dict[str, str] = {}
    for engine in every:
        best[engine.component] = min(
            best.get(engine.component, engine.precision), engine.precision, key=_PRECISIONS.index
        )
    sizes = [bucket for bucket in buckets if isinstance(bucket, Mapping)]
    engines = [e for e in every if e.precision == best[e.component] and (not sizes or any(_fits(e, s) for s in sizes))]
    wanted = {(engine.component, engine.precision, engine.layout) for engine in engines}
    blobs = [blob for w in manifest.weights if (w.component, w.precision, w.layout) in wanted for blob in w.blobs]
    blobs += [blob for engine in engines for blob in (engine.blob, engine.constants)]
    blobs += [record.blob for record in manifest.tokenizers.values()] if engines else []
    return sorted({blob.sha256: blob for blob in blobs}.values(), key=lambda blob: -blob.bytes)


def _fits(engine: EngineRecord, bucket: Mapping[str, Any]) -> bool:
    if engine.bucket.height is None:
        return True
    try:
        rows, height, width = (int(bucket[name]) for name in ("rows", "height", "width"))
    except (KeyError, TypeError, ValueError):
        return True
    return engine.bucket.rows.min <= rows and engine.bucket.holds(engine.bucket.rows.min, height, width)
