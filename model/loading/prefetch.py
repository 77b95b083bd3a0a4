"""Bring a release's blobs here while the process still imports torch, which takes seconds and one core.

What is brought is a guess from the manifest: a wrong one costs time and nothing else, since loading asks for what it
needs itself, and finds here, or on its way, what was guessed right. Nothing is opened, and of a release that the
deployment's key has not signed not a blob is read. Imports neither torch nor what imports it.

What lies on this machine already is not hashed meanwhile, only asked of the disk: hashing takes cores from the imports,
and with each piece the interpreter's lock, and takes little time once they are done. What lies in a bucket is fetched
by a process of its own (model/loading/prefetch_worker.py), for boto3 is Python, too.
"""

import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from model.errors import PreheatError
from model.loading.prefetch_worker import PrefetchProcess
from model.loading.target import detect_targets
from model.store.manifest import SERVED_FIRST, Blob, EngineRecord, Manifest, Precision
from model.store.s3 import S3Store
from model.store.signature import PublicKey, check_signature, configured_keys
from model.store.store import (
    Store,
    StoreOptions,
    open_store,
)

logger = logging.getLogger("preheat")


class Prefetch:
    """Starts at once: from a bucket in a process of its own, else in a thread. `settings` are model_metadata.preheat,
    `secrets` Truss's."""

    def __init__(self, settings: Mapping[str, Any], secrets: Mapping[str, str]) -> None:
        self._settings = settings
        self._secrets = secrets
        self._url, self._release = (setting(settings, name) for name in ("store", "release"))
        self._store: Store | None = None
        self._opened = threading.Event()
        self._brought = threading.Event()
        self._process = _start_process() if self._release and self._url.lower().startswith("s3://") else None
        threading.Thread(target=self._run, name="preheat-prefetch", daemon=True).start()

    def store(self, url: str) -> Store:
        """The deployment's store, opened once, so that the manifest read on the way here is not read again. Raises
        StoreError, ManifestError."""
        self._opened.wait()
        if self._store is None:
            self._store = open_store(url, StoreOptions.from_deployment(self._settings, self._secrets))
        return self._store

    def forget(self) -> None:
        """Give the store up once all is loaded: a cache may then evict what is no longer read. What is still on its
        way was guessed wrong, and comes no further."""
        self._store = None
        self._end_process()

    def wait(self) -> None:
        """Until nothing more is brought. For tests: loading waits for each blob by itself."""
        self._brought.wait()

    def _run(self) -> None:
        try:
            if self._url and self._release:
                self._bring()
        except PreheatError as error:
            logger.debug("prefetch: %s", error)  # loading meets the same, and says it
            self._end_process()
        except Exception:
            logger.exception("prefetch failed; loading goes on without it")
            self._end_process()
        finally:
            self._opened.set()
            self._brought.set()
        if self._process is not None:
            self._process.reap()

    def _bring(self) -> None:
        options = StoreOptions.from_deployment(self._settings, self._secrets)
        self._store = store = open_store(self._url, options)
        # TensorRT's plans take the weights in another layout, and whether they serve is known once torch is here.
        inductor = setting(self._settings, "runtime") in ("", "aot_inductor")
        order = {
            "keys": [str(key) for key in configured_keys(self._settings)],
            "targets": [target.key for target in detect_targets()] if inductor else [],
            "buckets": self._settings.get("buckets") or [],
        }
        if self._process is None:
            self._opened.set()
            bring(store, store.read_release(self._release), **order)
            return
        self._process.order(self._url, self._release, options, order)
        manifest = self._process.manifest()
        if manifest is not None and isinstance(store, S3Store):
            store.offer(self._release, manifest)
        self._opened.set()
        self._process.wait()

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.end()


def _start_process() -> PrefetchProcess | None:
    try:
        return PrefetchProcess()
    except OSError as error:
        logger.warning("prefetch has no process of its own (%s), and shares this one", error)
        return None


def bring(
    store: Store, manifest: Manifest, keys: Iterable[str], targets: Sequence[str], buckets: Iterable[Any]
) -> None:
    """Fetch what is guessed of a release that one of `keys` has signed (none: of any). Raises UntrustedRelease before
    that; CorruptBlob, StoreError."""
    check_signature(manifest, [PublicKey.parse(key) for key in keys])
    store.fetch(guess(manifest, targets, buckets))


def setting(settings: Mapping[str, Any], name: str) -> str:
    """A deployment's setting, "" for none: PREHEAT_STORE, PREHEAT_RELEASE, PREHEAT_RUNTIME in the environment come
    before model_metadata.preheat."""
    return str(os.environ.get(f"PREHEAT_{name.upper()}") or settings.get(name) or "")


def guess(manifest: Manifest, targets: Sequence[str], buckets: Iterable[Any]) -> list[Blob]:
    """The blobs that loading on the first of `targets` which has engines will most likely read, the largest first.

    `buckets` are the config's, unchecked.
    """
    built = {engine.target for engine in manifest.engines}
    target = next((target for target in targets if target in built), None)
    every = [engine for engine in manifest.engines if engine.target == target]
    best: dict[str, Precision] = {}
    for engine in every:
        best[engine.component] = min(
            best.get(engine.component, engine.precision), engine.precision, key=SERVED_FIRST.index
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
