"""The queues before the scheduler: their order, who leaves them, and who is refused."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import pytest

from model.api.fair_queue import MAX_WAITING, SMALL_PRICE, FairQueue, PreparationQueues
from model.errors import Overloaded
from tests.support.repository import REPOSITORY

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
    async def one(name: str, client: str, price: int) -> str:
        [result] = await queue.run(client, [(price, work(name))])
        return result

    return [asyncio.create_task(one(*entry)) for entry in entries]


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


def test_serves_by_price_and_client() -> None:
    async def steps(work: Work, entries: list[Entry]) -> str:
        tasks = waiting(FairQueue(), work, [("first", "", 0), *entries])
        await asyncio.sleep(0)
        work.finish.set()
        await asyncio.gather(*tasks)
        return "".join(work.begun)

    for name, (entries, order) in ORDERS.items():
        assert run(partial(steps, entries=entries)) == "first" + order, name


def test_expensive_work_is_served_among_cheap() -> None:
    """However much cheap work arrives, it overtakes only until its prices have reached that of the expensive work."""

    async def steps(work: Work) -> None:
        queue = FairQueue()
        work.finish.set()
        big = waiting(queue, work, [("first", "", 0), ("big", "", 100)])
        while not big[1].done():
            await asyncio.gather(*waiting(queue, work, [("small", "", 10)]))
        assert work.begun.index("big") <= 11

    run(steps)


def test_small_work_does_not_wait_for_large() -> None:
    async def steps(work: Work) -> None:
        queues, large = PreparationQueues(), Work()
        large_queue, small_queue = queues.images(SMALL_PRICE + 1), queues.images(SMALL_PRICE)
        bombs = waiting(large_queue, large, [("bomb", "", SMALL_PRICE + 1)] * 3)
        work.finish.set()
        assert await waiting(small_queue, work, [("small", "", 1)])[0] == "small"
        assert large.begun == ["bomb"], "one at a time"
        large.finish.set()
        await asyncio.gather(*bombs)

    run(steps)


def test_caller_that_leaves_is_not_served() -> None:
    async def steps(work: Work) -> None:
        queue = FairQueue()
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


def test_ended_turns_are_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_to_start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def steps(work: Work) -> None:
        queue = FairQueue()
        work.finish.set()
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="can't start new thread"):
            patch.setattr(threading.Thread, "start", refuse_to_start)
            await queue.run("", [(1, work("a"))])
        [leaving] = waiting(queue, work, [("left", "", 1)])
        await asyncio.sleep(0)  # its turn has begun, and its task has not gone on
        leaving.cancel()
        with pytest.raises(ZeroDivisionError):
            await queue.run("", [(1, lambda: 1 // 0), (1, work("never"))])
        assert await waiting(queue, work, [("b", "", 1)])[0] == "b" and "never" not in work.begun

    run(steps)


def test_full_queue_refuses_the_client_with_the_most() -> None:
    async def steps(work: Work) -> None:
        queue = FairQueue()
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


def test_a_caller_that_leaves_a_full_queue_refuses_nobody() -> None:
    """It is cancelled in the same turn of the event loop in which another request arrives."""

    async def steps(work: Work) -> None:
        queue = FairQueue()
        flood = waiting(queue, work, [("x", "", 10 + number) for number in range(MAX_WAITING + 1)])  # one runs
        while not work.begun:
            await asyncio.sleep(0.001)
        [arrived] = waiting(queue, work, [("y", "", 1)])
        flood[-1].cancel()
        await asyncio.sleep(0.01)
        assert not arrived.done()
        work.finish.set()
        assert await arrived == "y"
        await asyncio.gather(*flood[:-1])

    run(steps)


def test_parts_of_a_cheap_request_are_not_divided() -> None:
    async def steps(work: Work) -> None:
        queue = FairQueue()
        first = waiting(queue, work, [("first", "", 0)])
        parts = {name: [(price, work(name))] * 3 for name, price in (("big", 1000), ("small", 1))}
        runs = [asyncio.create_task(queue.run("", parts[name])) for name in parts]
        await asyncio.sleep(0)
        work.finish.set()
        await asyncio.gather(*first, *runs)
        assert work.begun == ["first", *["small"] * 3, *["big"] * 3]
        assert runs[0].result() == ["big"] * 3 and await queue.run("", []) == []

    run(steps)


def test_serves_in_a_process_of_low_priority() -> None:
    """A thread of a process without privileges may not raise its priority."""
    script = """
import asyncio, os
from model.api.fair_queue import FairQueue
queue = FairQueue()
os.nice(10)
if os.geteuid() == 0:
    os.setuid(65534)
priority = lambda: os.getpriority(os.PRIO_PROCESS, 0)
assert asyncio.run(queue.run("", [(1, priority)])) == [priority()]
"""
    subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, check=True, timeout=READY_SECONDS)
