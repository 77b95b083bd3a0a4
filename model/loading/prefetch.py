"""Fetch the blobs of the releases while the process still imports torch, which takes seconds and one core.

The blobs are those that `select` returns, so the load finds them fetched or in flight. No engine is opened. If the
deployment requires a signature, it is checked before any blob is read. Imports neither torch nor numpy.

A local store's blobs are not hashed, only read ahead: hashing competes with the imports for cores and for the
interpreter lock, and is quick once they are done. A bucket's blobs are fetched by a separate process
(model/loading/prefetch_worker.py), because boto3 also competes for the lock.
"""

import logging
import sys
import threading
from collections.abc import Callable, Mapping

from model.deployment import Deployment
from model.errors import PreheatError
from model.loading.prefetch_worker import PrefetchProcess, fetch_selected
from model.loading.runtimes import find_targets
from model.settings import Settings
from model.store.options import StoreOptions
from model.store.s3 import S3Store
from model.store.store import Store, open_store

logger = logging.getLogger("preheat")


class Prefetch:
    """Fetches a release in the background from construction on: from a bucket in a process, otherwise in a thread."""

    def __init__(
        self,
        settings: Settings,
        secrets: Mapping[str, str],
        open_store: Callable[[str, StoreOptions], Store] = open_store,
        python: str = sys.executable,
    ) -> None:
        """`secrets`: those of Truss. `open_store`: takes a URL and options. `python`: the process's interpreter."""
        self._settings = settings
        self._secrets = secrets
        self._open_store = open_store
        self._store: Store | None = None
        self._opened = threading.Event()
        self._finished = threading.Event()
        self._has_release = bool(settings.release or settings.releases)
        in_bucket = self._has_release and settings.store.lower().startswith("s3://")
        self._process = _start_process(python) if in_bucket else None
        threading.Thread(target=self._run, name="preheat-prefetch", daemon=True).start()

    def store(self) -> Store:
        """Return the deployment's store. It is opened once, so that the prefetched manifest is not read again.

        Raises ConfigError or StoreError.
        """
        self._opened.wait()
        if self._store is None:
            options = self._settings.store_options(self._secrets)
            self._store = self._open_store(self._settings.required("store"), options)
        return self._store

    def close(self) -> None:
        """Release the store after the load, and stop fetching. A cache may then evict blobs that are no longer read."""
        self._store = None
        self._end_process()

    def wait(self) -> None:
        """Wait until all fetching has ended. Only tests need it: the load waits for each blob."""
        self._finished.wait()

    def _run(self) -> None:
        try:
            if self._settings.store and self._has_release:
                self._fetch()
        except PreheatError as error:
            logger.debug("prefetch: %s", error)  # the load raises and reports the same error
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
        deployment = Deployment.of(settings)
        self._store = store = self._open_store(settings.store, options)
        targets = find_targets(settings.runtime)
        if self._process is None:
            self._opened.set()
            deployment = deployment.resolved(store)
            fetch_selected(store, [*map(store.read_release, deployment.releases)], deployment, targets)
            return
        self._process.send_request(settings.store, options, deployment, targets)
        for release, content in self._process.manifests().items():
            if isinstance(store, S3Store):
                store.preset_manifest(release, content)
        self._opened.set()
        self._process.wait()

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.end()


def _start_process(python: str) -> PrefetchProcess | None:
    try:
        return PrefetchProcess(python)
    except OSError as error:
        logger.warning("prefetch runs in the server's process, because no other process can be started (%s)", error)
        return None
