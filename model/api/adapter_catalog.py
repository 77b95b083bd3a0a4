"""The adapters of a store that requests may name: found, checked and fetched while the server runs.

A name of the configuration is read when the server starts. A pattern stands for the names that the store has now. The
store's list is read again when a request names an adapter: if the list is `LIST_SECONDS` old, or if it lacks the name,
which happens at most `MAX_EARLY_LISTS` times a minute. So names that the store lacks cost few requests, and a removed
adapter is not offered any more. Records are written once: one that replaces another is refused.

Requests to the store run on threads of the catalog. Imports no torch: with workers, the server has no device.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from model import metrics
from model.deployment import ServedAdapters, fits_pattern
from model.errors import (
    AdapterError,
    AdapterNotFound,
    AdapterNotReady,
    CorruptBlob,
    Overloaded,
    RequestRefused,
    StoreError,
    UntrustedRelease,
)
from model.settings import Limits, Settings
from model.store.adapter_record import AdapterRecord
from model.store.keys import is_adapter_name, listed
from model.store.signature import PublicKey, check_signature
from model.store.store import Store, open_store
from model.validation import format_value

logger = logging.getLogger("preheat")

LIST_SECONDS = 10.0
MAX_EARLY_LISTS = 4
FAILURE_SECONDS = 60.0  # after which a record that could not be used is read again, though it is the same
KNOWN_WAIT_SECONDS = 1.0  # that a description, and a request for an adapter that was read before, wait for the list

T = TypeVar("T")


@dataclass(frozen=True)
class _Failure:
    """Why an adapter with this mark cannot be used. at: by the catalog's clock."""

    mark: str
    at: float
    message: str


class AdapterCatalog:
    """Used on one event loop."""

    def __init__(
        self,
        store: Store,
        patterns: Sequence[str],
        public_keys: Sequence[PublicKey],
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`patterns`: of the names that are offered, see `fnmatch`."""
        self._store, self._patterns, self._keys = store, tuple(patterns), tuple(public_keys)
        self._wait_seconds, self._clock = limits.lora_wait_seconds, clock
        self._records: dict[str, AdapterRecord] = {}  # of all adapters that were read; removed ones may be in use
        self._read_marks: dict[str, str] = {}
        self._failures: dict[str, _Failure] = {}
        self._marks: dict[str, str] = {}  # the store's list
        self._listed_at = -LIST_SECONDS  # by the clock: the last attempt
        self._list_problem = ""  # why the last attempt failed
        self._max_reads = limits.lora_fetches_per_minute
        self._early_lists, self._reads = _Budget(MAX_EARLY_LISTS, clock), _Budget(self._max_reads, clock)
        self._listing: asyncio.Task[None] | None = None
        self._fetching: dict[str, asyncio.Task[AdapterRecord]] = {}
        self._lister = ThreadPoolExecutor(1, thread_name_prefix="preheat-adapter-list")
        self._fetcher = ThreadPoolExecutor(limits.lora_fetches_at_once, thread_name_prefix="preheat-adapter-fetch")

    async def find(self, names: Sequence[str]) -> list[AdapterRecord]:
        """Return the records of adapters, in order, once their tensors are on this machine.

        Raises RequestRefused for a name that is not offered now, AdapterError for an adapter that this server may not
        use, AdapterNotReady or Overloaded.
        """
        try:
            async with asyncio.timeout(self._wait_seconds):
                return [await self._find(name) for name in names]
        except TimeoutError as error:
            raise AdapterNotReady(
                f"The adapters {', '.join(names)} were not read within {self._wait_seconds:g} s "
                "(limits.lora_wait_seconds)."
            ) from error

    async def sizes(self) -> dict[str, int | None]:
        """Return the bytes of the adapters that are offered now, by name; None: it was not read yet.

        If the store is slow or cannot be reached, the names are older than `find` lets them become.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(KNOWN_WAIT_SECONDS):
                await self._refresh()
        return {name: self._records[name].total_bytes if name in self._records else None for name in self._offered()}

    async def _find(self, name: str) -> AdapterRecord:
        if not is_adapter_name(name):
            metrics.ADAPTER_LOOKUPS.labels("missing").inc()
            raise RequestRefused(
                "loras", f"{format_value(name)} is no name of an adapter: up to 128 letters, digits, '.', '_' and '-'."
            )
        is_known = name in self._marks and name in self._records
        with suppress(TimeoutError):
            async with asyncio.timeout(KNOWN_WAIT_SECONDS if is_known else None):
                await self._refresh(name)
        mark = self._marks.get(name)
        if mark is None and self._list_problem:
            raise AdapterNotReady(f"Adapter {name} cannot be looked up. {self._list_problem}")
        if mark is None or not self._is_offered(name):
            metrics.ADAPTER_LOOKUPS.labels("missing").inc()
            raise self._refusal(name)
        failure = self._failures.get(name)
        if failure is not None and failure.mark == mark and self._clock() - failure.at < FAILURE_SECONDS:
            raise AdapterError(failure.message, "")
        if self._read_marks.get(name) == mark:
            return self._records[name]
        if name not in self._fetching:
            if seconds := self._reads.seconds_until_room():
                raise Overloaded(
                    f"{self._max_reads} new adapters were read within a minute (limits.lora_fetches_per_minute). "
                    f"Repeat the request in {seconds} s.",
                    seconds,
                )
            self._reads.add()
            self._fetching[name] = _task(self._fetch(name, mark))
        return await asyncio.shield(self._fetching[name])

    async def _fetch(self, name: str, mark: str) -> AdapterRecord:
        """Read the record of an adapter, and fetch its tensors."""

        def fetch() -> AdapterRecord:
            record = self._store.read_adapter(name)
            check_signature(record, self._keys)
            if self._records.get(name, record) != record:
                raise AdapterError(
                    f"Adapter {name} was replaced in the store by another one of that name.",
                    "Add it under a new name, or restart the servers.",
                )
            try:
                self._store.fetch(record.blobs)
            finally:  # the cache may evict the tensors from here on; the load of an adapter fetches what is missing
                self._store.unpin(record.blobs)
            return record

        try:
            record = await asyncio.get_running_loop().run_in_executor(self._fetcher, fetch)
        except AdapterNotFound as error:
            self._marks.pop(name, None)
            raise self._refusal(name) from error
        except (AdapterError, UntrustedRelease, CorruptBlob) as error:
            metrics.ADAPTER_LOOKUPS.labels("refused").inc()
            logger.error("Adapter %s cannot be used. %s", name, error)
            self._failures[name] = _Failure(mark, self._clock(), f"Adapter {name} cannot be used. {error}")
            raise AdapterError(self._failures[name].message, "") from error
        except StoreError as error:
            metrics.ADAPTER_LOOKUPS.labels("failed").inc()
            self._reads.give_back()
            raise AdapterNotReady(f"Adapter {name} cannot be read. {error}") from error
        finally:
            del self._fetching[name]
        metrics.ADAPTER_LOOKUPS.labels("read").inc()
        self._failures.pop(name, None)
        self._records[name], self._read_marks[name] = record, mark
        return record

    async def _refresh(self, name: str | None = None) -> None:
        """Read the store's list if it is old, or lacks a name. If that fails, the earlier list stays."""
        if self._listing is None:
            if self._clock() - self._listed_at < LIST_SECONDS:
                if name is None or name in self._marks or self._early_lists.seconds_until_room():
                    return
                self._early_lists.add()
            self._listing = _task(self._list())
        await asyncio.shield(self._listing)

    async def _list(self) -> None:
        began = self._clock()
        try:
            self._marks = await asyncio.get_running_loop().run_in_executor(self._lister, self._store.adapters)
            self._list_problem = ""
        except StoreError as error:
            self._list_problem = str(error)
            logger.warning("The list of adapters is not up to date. %s", error)
        finally:
            self._listing, self._listed_at = None, began
        metrics.ADAPTER_LISTS.inc()

    def _is_offered(self, name: str) -> bool:
        return fits_pattern(name, self._patterns)

    def _offered(self) -> list[str]:
        return sorted(filter(self._is_offered, self._marks))

    def _refusal(self, name: str) -> RequestRefused:
        offered = self._offered()
        expected = f"one of {listed(offered)}" if offered else "no adapter: the store has none"
        note = ""
        if (left := self._listed_at + LIST_SECONDS - self._clock()) < LIST_SECONDS - 1:
            note = f" If it is new, repeat the request in {max(1, math.ceil(left))} s."
        return RequestRefused("loras", f"{format_value(name)} is not offered now. Expected {expected}.{note}")


def _task(work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
    """Start work that several requests wait for. All of them may leave before it fails."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


class _Budget:
    """A number of events in a minute."""

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self._limit, self._clock = limit, clock
        self._times: deque[float] = deque()

    def seconds_until_room(self) -> int:
        """Return 0 if one more event does not exceed the limit, else the seconds until it does not."""
        while self._times and self._clock() - self._times[0] >= 60:
            self._times.popleft()
        return 0 if len(self._times) < self._limit else max(1, round(60 - (self._clock() - self._times[0])))

    def add(self) -> None:
        """Count an event."""
        self._times.append(self._clock())

    def give_back(self) -> None:
        """Count the last event no more."""
        if self._times:
            self._times.pop()


def open_catalog(settings: Settings, secrets: Mapping[str, str]) -> AdapterCatalog | None:
    """Return the catalog of a deployment, or None if its adapters have no patterns. Sends no request."""
    if not (patterns := ServedAdapters(tuple(settings.loras)).patterns):
        return None
    store = open_store(settings.required("store"), settings.store_options(secrets))
    return AdapterCatalog(store, patterns, settings.public_key, settings.limits)
