"""The queues before the scheduler: their order, who leaves them, and who is refused."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from model.api.fair_queue import MAX_WAITING, SMALL_PRICE, Decoders, FairQueue
from model.errors import Overloaded

Entry = tuple[str, str, int]  # the name of the work, its client, its price
READY_SECONDS = 60


class Work:
    """Work that takes until `finish`. `begun`: the names of what has begun, in order."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.finish = threading.Event()

    def __call__(self, name: str) -> Callable[[], str]:
        def run() -> str:
            self.begun.append(name)
            assert self.finish.wait(READY_SECONDS)
            return name

        return run


def waiting(queue: FairQueue, work: Work, entries: Sequence[Entry]) -> list["asyncio.Task[str]"]:
    return [asyncio.create_task(queue.run(queue.ticket(client, price), work(name))) for name, client, price in entries]


def run(steps: Callable[[Work], Awaitable[Any]]) -> Any:
    work = Work()

    async def within_time() -> Any:
        async with asyncio.timeout(READY_SECONDS):
            return await steps(work)

    try:
        return asyncio.run(within_time())
    finally:
        work.finish.set()


ORDERS: dict[str, tuple[list[Entry], str]] = {
    "equal prices in order of arrival": ([("a", "", 5), ("b", "", 5), ("c", "", 5)], "abc"),
    "cheap work first": ([("a", "", 90), ("b", "", 90), ("c", "", 1)], "cab"),
    "a client with many is last": ([("a", "x", 9), ("b", "x", 9), ("c", "x", 9), ("d", "y", 10)], "adbc"),
    "a big one of another client": ([("a", "x", 9), ("b", "x", 9), ("c", "x", 9), ("d", "y", 20)], "abdc"),
    "unnamed clients differ": ([("a", "", 9), ("b", "", 9), ("c", "", 10), ("d", "x", 11)], "abcd"),
}


@pytest.mark.parametrize("name", ORDERS)
def test_serves_by_price_and_client(name: str) -> None:
    entries, order = ORDERS[name]

    async def steps(work: Work) -> None:
        queue = FairQueue(lambda waited, worked: None)
        tasks = waiting(queue, work, [("first", "", 0), *entries])
        await asyncio.sleep(0)
        work.finish.set()
        await asyncio.gather(*tasks)
        assert "".join(work.begun) == "first" + order

    run(steps)


def test_expensive_work_is_served_among_cheap() -> None:
    """However much cheap work arrives, it overtakes only until its prices have reached that of the expensive work."""

    async def steps(work: Work) -> None:
        queue = FairQueue(lambda waited, worked: None)
        work.finish.set()
        big = waiting(queue, work, [("first", "", 0), ("big", "", 100)])
        while not big[1].done():
            await asyncio.gather(*waiting(queue, work, [("small", "", 10)]))
        assert work.begun.index("big") <= 11

    run(steps)


def test_small_work_does_not_wait_for_large() -> None:
    async def steps(work: Work) -> None:
        decoders, large = Decoders(), Work()
        large_queue, small_queue = decoders.queue(SMALL_PRICE + 1), decoders.queue(SMALL_PRICE)
        bombs = waiting(large_queue, large, [("bomb", "", SMALL_PRICE + 1)] * 3)
        work.finish.set()
        assert await waiting(small_queue, work, [("small", "", 1)])[0] == "small"
        assert large.begun == ["bomb"], "one at a time"
        large.finish.set()
        await asyncio.gather(*bombs)

    run(steps)


def test_caller_that_leaves_is_not_served() -> None:
    async def steps(work: Work) -> None:
        queue = FairQueue(lambda waited, worked: None)
        running, leaving, last = waiting(queue, work, [("a", "", 1), ("b", "", 2), ("c", "", 3)])
        while not work.begun:
            await asyncio.sleep(0.001)
        leaving.cancel()
        running.cancel()
        await asyncio.wait([leaving, running])
        assert work.begun == ["a"] and not last.done(), "the work of a goes on, and c waits for it"
        work.finish.set()
        await last
        assert work.begun == ["a", "c"]

    run(steps)


def test_caller_that_leaves_as_its_turn_begins_frees_it() -> None:
    async def steps(work: Work) -> None:
        queue = FairQueue(lambda waited, worked: None)
        work.finish.set()
        [leaving] = waiting(queue, work, [("a", "", 1)])
        await asyncio.sleep(0)  # its turn has begun, and its task has not gone on
        leaving.cancel()
        assert await waiting(queue, work, [("b", "", 1)])[0] == "b"

    run(steps)


def test_failed_work_frees_its_turn() -> None:
    async def steps(work: Work) -> None:
        queue = FairQueue(lambda waited, worked: None)
        work.finish.set()
        with pytest.raises(ZeroDivisionError):
            await queue.run(queue.ticket("", 1), lambda: 1 // 0)
        assert await waiting(queue, work, [("b", "", 1)])[0] == "b"

    run(steps)


def test_full_queue_refuses_the_client_with_the_most() -> None:
    async def steps(work: Work) -> None:
        queue = FairQueue(lambda waited, worked: None)
        flood = waiting(queue, work, [("x", "x", 50_000_000)] * (MAX_WAITING + 1))  # one of them runs
        [other] = waiting(queue, work, [("y", "y", 60_000_000)])
        refused, _ = await asyncio.wait([*flood, other], return_when=asyncio.FIRST_COMPLETED)
        assert refused == {flood[-1]}
        error = flood[-1].exception()
        assert isinstance(error, Overloaded) and error.retry_after == 33
        assert f"{MAX_WAITING} requests wait" in str(error)
        work.finish.set()
        await asyncio.gather(*flood[:-1], other)

    run(steps)
