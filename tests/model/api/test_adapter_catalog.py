"""Adapters that are added, removed and damaged while a catalog offers them, and what each request costs the store."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from engine_builder.releases.signing import public_key, sign_adapter
from model.api import adapter_catalog as module
from model.api.adapter_catalog import AdapterCatalog
from model.errors import AdapterError, AdapterNotReady, Overloaded, RequestRefused, StoreError
from model.settings import Limits
from model.store.adapter_record import AdapterRecord
from model.store.keys import adapter_key
from model.store.manifest import Blob
from tests.support.adapter_model import HeldStore, put_adapter

KEY = Ed25519PrivateKey.generate()


class CountingStore(HeldStore):
    """Counts what a catalog asks for. Can be unreachable, and can hold the list of adapters."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.lists = self.records_read = 0
        self.is_down = False
        self.listed = threading.Event()
        self.listed.set()

    def adapters(self) -> dict[str, str]:
        self.lists += 1
        assert self.listed.wait(10)
        if self.is_down:
            raise StoreError("The store cannot be reached.")
        return super().adapters()

    def read_adapter(self, name: str) -> AdapterRecord:
        self.records_read += 1
        if self.is_down:
            raise StoreError("The store cannot be reached.")
        return super().read_adapter(name)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    return CountingStore(tmp_path / "store")


@pytest.fixture
def clock() -> Clock:
    return Clock()


Run = Callable[[Coroutine[Any, Any, Any]], Any]
Make = Callable[..., AdapterCatalog]


@pytest.fixture
def run() -> Iterator[Run]:
    """Runs on one event loop, as a server does."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture
def make(store: CountingStore, clock: Clock) -> Make:
    def make(*patterns: str, keys: tuple[Any, ...] = (), **limits: Any) -> AdapterCatalog:
        return AdapterCatalog(store, patterns or ("*",), keys, Limits(**limits), clock)

    return make


def names_of(found: list[AdapterRecord]) -> list[str]:
    return [record.name for record in found]


def test_an_added_adapter_is_found_at_its_first_request(store: CountingStore, make: Make, run: Run) -> None:
    put_adapter(store, "a", 1.0)
    catalog = make()
    assert names_of(run(catalog.find(["a"]))) == ["a"]
    put_adapter(store, "b", 2.0)
    assert names_of(run(catalog.find(["b", "a"]))) == ["b", "a"]
    assert run(catalog.sizes()).keys() == {"a", "b"}


def test_a_known_adapter_costs_no_request(store: CountingStore, clock: Clock, make: Make, run: Run) -> None:
    put_adapter(store, "a", 1.0)
    catalog = make()
    for _ in range(100):
        run(catalog.find(["a"]))
    assert (store.lists, store.records_read) == (1, 1)
    clock.now += module.LIST_SECONDS
    run(catalog.find(["a"]))
    assert (store.lists, store.records_read) == (2, 1)


def test_missing_names_cost_few_requests(store: CountingStore, clock: Clock, make: Make, run: Run) -> None:
    put_adapter(store, "a", 1.0)
    catalog = make()
    for number in range(1000):
        clock.now += 0.1
        with pytest.raises(RequestRefused, match=f'loras: "missing-{number}" is not offered now. Expected one of a.'):
            run(catalog.find([f"missing-{number}"]))
    assert store.lists + store.records_read <= 20
    assert names_of(run(catalog.find(["a"]))) == ["a"]


def test_impossible_names_cost_no_request(store: CountingStore, clock: Clock, make: Make, run: Run) -> None:
    put_adapter(store, "a", 1.0)
    catalog = make()
    for name in ("*", "../a", "a b", "n\N{LATIN SMALL LETTER O WITH DIAERESIS}pe", "x/y", "", "a" * 129):
        with pytest.raises(RequestRefused, match="is no name of an adapter"):
            run(catalog.find([name]))
    assert store.lists == 0
    run(catalog.find(["a"]))
    put_adapter(store, "b", 1.0)
    clock.now += 1
    assert names_of(run(catalog.find(["b"]))) == ["b"]


def test_says_when_a_new_adapter_will_be_found(store: CountingStore, clock: Clock, make: Make, run: Run) -> None:
    catalog = make()
    clock.now += 2
    for number in range(module.MAX_EARLY_LISTS + 1):
        with pytest.raises(RequestRefused):
            run(catalog.find([f"missing-{number}"]))
    put_adapter(store, "new", 1.0)
    clock.now += 2
    with pytest.raises(RequestRefused, match="If it is new, repeat the request in 8 s."):
        run(catalog.find(["new"]))
    clock.now += 8
    assert names_of(run(catalog.find(["new"]))) == ["new"]


def test_a_removed_adapter_is_refused(store: CountingStore, clock: Clock, make: Make, run: Run) -> None:
    put_adapter(store, "a", 1.0)
    catalog = make()
    run(catalog.find(["a"]))
    store.delete_adapter("a")
    clock.now += module.LIST_SECONDS
    with pytest.raises(RequestRefused, match='"a" is not offered now. Expected no adapter'):
        run(catalog.find(["a"]))
    assert run(catalog.sizes()) == {}
    put_adapter(store, "a", 1.0)  # the same one
    assert names_of(run(catalog.find(["a"]))) == ["a"]


def test_an_adapter_removed_since_the_list_is_refused(store: CountingStore, make: Make, run: Run) -> None:
    put_adapter(store, "a", 1.0)
    put_adapter(store, "b", 1.0)
    catalog = make()
    run(catalog.find(["a"]))
    store.delete_adapter("b")
    with pytest.raises(RequestRefused, match='"b" is not offered now. Expected one of a.'):
        run(catalog.find(["b"]))


def test_a_replaced_adapter_is_refused(store: CountingStore, clock: Clock, make: Make, run: Run) -> None:
    """What is on the device under this name is the earlier one."""
    put_adapter(store, "a", 1.0)
    catalog = make()
    run(catalog.find(["a"]))
    store.delete_adapter("a")
    put_adapter(store, "a", 2.0)
    clock.now += module.LIST_SECONDS
    with pytest.raises(AdapterError, match="Adapter a was replaced in the store by another one"):
        run(catalog.find(["a"]))


def test_patterns_bound_the_names(store: CountingStore, make: Make, run: Run) -> None:
    for name in ("style-a", "style-b", "figure"):
        put_adapter(store, name, 1.0)
    catalog = make("style-*")
    assert run(catalog.sizes()) == {"style-a": None, "style-b": None}
    with pytest.raises(RequestRefused, match='"figure" is not offered now. Expected one of style-a, style-b'):
        run(catalog.find(["figure"]))
    for name in ("*", "style-*", "../releases/x", ""):
        with pytest.raises(RequestRefused, match="is no name of an adapter"):
            run(catalog.find([name]))
    assert store.records_read == 0


def test_an_unsigned_adapter_is_refused(store: CountingStore, make: Make, run: Run) -> None:
    record = put_adapter(store, "a", 1.0)
    signed = sign_adapter(record.model_copy(update={"name": "b"}), KEY)
    store.write_adapter(signed)
    catalog = make(keys=(public_key(KEY),))
    with pytest.raises(AdapterError, match="Adapter a cannot be used. Adapter a is not signed"):
        run(catalog.find(["a"]))
    assert names_of(run(catalog.find(["b"]))) == ["b"]


def test_a_damaged_record_is_read_once_a_minute(store: CountingStore, clock: Clock, make: Make, run: Run) -> None:
    put_adapter(store, "a", 1.0)
    path = store.root / adapter_key("a")
    intact = path.read_bytes()
    path.write_bytes(b"{}")
    catalog = make()
    for _ in range(10):
        with pytest.raises(AdapterError, match="Adapter a cannot be used. The record of adapter a is damaged"):
            run(catalog.find(["a"]))
    assert store.records_read == 1
    clock.now += module.FAILURE_SECONDS
    with pytest.raises(AdapterError):
        run(catalog.find(["a"]))
    assert store.records_read == 2
    path.write_bytes(intact)  # its mark changes
    clock.now += module.LIST_SECONDS
    assert names_of(run(catalog.find(["a"]))) == ["a"]


def test_an_unreachable_store_stops_new_adapters_only(store: CountingStore, clock: Clock, make: Make, run: Run) -> None:
    put_adapter(store, "a", 1.0)
    put_adapter(store, "b", 1.0)
    catalog = make()
    run(catalog.find(["a"]))
    store.is_down = True
    clock.now += 2 * module.LIST_SECONDS
    assert names_of(run(catalog.find(["a"]))) == ["a"]
    assert run(catalog.sizes()).keys() == {"a", "b"}
    with pytest.raises(AdapterNotReady, match="Adapter b cannot be read. The store cannot be reached"):
        run(catalog.find(["b"]))
    with pytest.raises(AdapterNotReady, match="Adapter c cannot be looked up. The store cannot be reached"):
        run(catalog.find(["c"]))
    store.is_down = False
    assert names_of(run(catalog.find(["b"]))) == ["b"]


def test_tensors_that_cannot_be_fetched_stay_evictable(
    store: CountingStore, make: Make, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = put_adapter(store, "a", 1.0)

    def fetch(blobs: Iterable[Blob]) -> None:
        raise StoreError("The store cannot be reached.")

    monkeypatch.setattr(store, "fetch", fetch)
    with pytest.raises(AdapterNotReady, match="Adapter a cannot be read"):
        run(make().find(["a"]))
    assert store.unpinned == [blob.sha256 for blob in record.blobs]


def test_a_slow_list_holds_up_no_known_adapter(
    store: CountingStore,
    clock: Clock,
    make: Make,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put_adapter(store, "a", 1.0)
    catalog = make()
    run(catalog.find(["a"]))
    monkeypatch.setattr(module, "KNOWN_WAIT_SECONDS", 0.01)
    store.listed.clear()
    clock.now += module.LIST_SECONDS
    assert names_of(run(catalog.find(["a"]))) == ["a"]
    monkeypatch.undo()
    store.listed.set()
    run(catalog.sizes())  # the slow list ends
    store.delete_adapter("a")
    clock.now += module.LIST_SECONDS
    with pytest.raises(RequestRefused):
        run(catalog.find(["a"]))


def test_requests_of_one_adapter_read_it_once_and_may_leave(store: CountingStore, make: Make, run: Run) -> None:
    put_adapter(store, "a", 1.0)
    catalog = make()
    store.listed.clear()

    async def ask() -> list[str]:
        requests = [asyncio.create_task(catalog.find(["a"])) for _ in range(8)]
        await asyncio.sleep(0)
        requests[0].cancel()  # the one that began the reading
        store.listed.set()
        return [names_of(await one)[0] for one in requests[1:]]

    assert run(ask()) == ["a"] * 7
    assert (store.lists, store.records_read) == (1, 1)


def test_a_request_waits_for_a_bounded_time(store: CountingStore, make: Make, run: Run) -> None:
    put_adapter(store, "a", 1.0)
    catalog = make(lora_wait_seconds=0.05)
    store.listed.clear()
    with pytest.raises(AdapterNotReady, match=r"The adapters a were not read within 0.05 s .* Repeat the request"):
        run(catalog.find(["a"]))
    store.listed.set()
    assert names_of(run(catalog.find(["a"]))) == ["a"]


def test_new_adapters_of_a_minute_are_limited(store: CountingStore, clock: Clock, make: Make, run: Run) -> None:
    for name in "abc":
        put_adapter(store, name, 1.0)
    catalog = make(lora_fetches_per_minute=2)
    run(catalog.find(["a", "b"]))
    clock.now += 20
    with pytest.raises(Overloaded, match="2 new adapters were read within a minute") as caught:
        run(catalog.find(["c"]))
    assert caught.value.retry_after == 40
    assert names_of(run(catalog.find(["a"]))) == ["a"]
    clock.now += 40
    assert names_of(run(catalog.find(["c"]))) == ["c"]
