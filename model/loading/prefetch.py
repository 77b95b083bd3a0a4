"""Fetch the blobs of a release while the process still imports torch, which takes seconds and one core.

The blobs are those that `select` names, so the load finds them here or in flight. Nothing is opened, and no blob is
read of a release that the deployment's keys have not signed. Imports neither torch nor numpy.

A local store's blobs are not hashed here, only read ahead: hashing competes with the imports for cores and for the
interpreter lock, and is quick once they are done. A bucket's blobs are fetched by a process of its own
(model/loading/prefetch_worker.py), because boto3 is Python too.
"""

import logging
import threading
from collections.abc import Mapping

from model.errors import PreheatError
from model.loading.prefetch_worker import PrefetchProcess, fetch_selected
from model.loading.runtimes import targets_here
from model.settings import Settings
from model.store.s3 import S3Store
from model.store.store import Store, open_store

logger = logging.getLogger("preheat")


class Prefetch:
    """Starts at once: for a bucket in a process of its own, otherwise in a thread. `secrets` are Truss's."""

    def __init__(self, settings: Settings, secrets: Mapping[str, str]) -> None:
        self._settings = settings
        self._secrets = secrets
        self._store: Store | None = None
        self._opened = threading.Event()
        self._finished = threading.Event()
        in_bucket = settings.release and settings.store.lower().startswith("s3://")
        self._process = _start_process() if in_bucket else None
        threading.Thread(target=self._run, name="preheat-prefetch", daemon=True).start()

    def store(self) -> Store:
        """The deployment's store. It is opened once, so that the prefetched manifest is not read again.

        Raises ConfigError or StoreError.
        """
        self._opened.wait()
        if self._store is None:
            self._store = open_store(self._settings.required("store"), self._settings.store_options(self._secrets))
        return self._store

    def close(self) -> None:
        """Release the store after the load, so that a cache may evict blobs that are no longer read, and end what is
        still being fetched."""
        self._store = None
        self._end_process()

    def wait(self) -> None:
        """Wait until all fetching has ended. For tests: the load waits for each blob by itself."""
        self._finished.wait()

    def _run(self) -> None:
        try:
            if self._settings.store and self._settings.release:
                self._fetch()
        except PreheatError as error:
            logger.debug("prefetch: %s", error)  # the load meets the same error and reports it
            self._end_process()
        except Exception:
            logger.exception("prefetch failed; the load continues without it")
            self._end_process()
        finally:
            self._opened.set()
            self._finished.set()
        if self._process is not None:
            self._process.wait_exit()

    def _fetch(self) -> None:
        settings, options = self._settings, self._settings.store_options(self._secrets)
        self._store = store = open_store(settings.store, options)
        targets = targets_here(settings.runtime)
        if self._process is None:
            self._opened.set()
            fetch_selected(store, store.read_release(settings.release), settings.public_key, targets, settings.buckets)
            return
        self._process.send_request(settings, options, targets)
        manifest = self._process.manifest()
        if manifest is not None and isinstance(store, S3Store):
            store.preset_manifest(settings.release, manifest)
        self._opened.set()
        self._process.wait()

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.end()


def _start_process() -> PrefetchProcess | None:
    try:
        return PrefetchProcess()
    except OSError as error:
        logger.warning("prefetch runs in the server's process, because it cannot start its own (%s)", error)
        return None
