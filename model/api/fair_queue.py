"""Queues for work that prepares a request, such as decoding its images: clients take turns, and cheap work goes first.

A ticket is served in the order of its virtual finish time (self-clocked fair queueing, Golestani, INFOCOM 1994): the
time of arrival, or of the client's ticket before, plus the price. So a cheap request goes before an expensive one, an
expensive one that has waited goes before a cheap new one, and a client with many requests delays mostly its own.

Imports no torch: the server and the gateway have the same queues.
"""

import asyncio
import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from model.errors import Overloaded

CLIENT_HEADER = "X-Preheat-Client"  # names one of a gateway's clients. Only the order in queues depends on it
SMALL_PRICE = 2**21  # pixels: a little more than 1920 x 1080, about 30 ms of decoding
MAX_WAITING = 64  # requests in a queue
_NICENESS = 5  # of the threads: event loops, and the launches of work on a GPU, have priority
PRICE_PER_SECOND = 50_000_000  # pixels, on a slow core
T = TypeVar("T")
Observer = Callable[[float, float], None]
"""Called with the seconds that work has waited, and that it has taken."""


@dataclass(frozen=True, order=True)
class Ticket:
    """The place of a request in a queue. `number`: its arrival, which orders equal finish times."""

    finish: float
    number: int
    price: int


class FairQueue:
    """Runs functions in a thread, one at a time. Use it on one event loop."""

    def __init__(self, observe: Observer) -> None:
        self._observe = observe
        self._thread = ThreadPoolExecutor(1, "preheat-decode", _lower_priority)
        self._now = 0.0  # virtual: the finish time of the last ticket that was served
        self._arrivals = 0
        self._last: dict[str, float] = {}  # client -> the finish time of its last ticket, if that is to come
        self._busy = False
        self._waiting: dict[asyncio.Future[None], Ticket] = {}

    def ticket(self, client: str, price: int) -> Ticket:
        """Return the ticket of a request. `client`: "" stands for another client each time."""
        self._last = {name: finish for name, finish in self._last.items() if finish > self._now}
        finish = max(self._now, self._last.get(client, 0.0)) + price
        if client:
            self._last[client] = finish
        self._arrivals += 1
        return Ticket(finish, self._arrivals, price)

    async def run(self, ticket: Ticket, work: Callable[[], T]) -> T:
        """Return `work()`, which runs in a thread once it is this ticket's turn.

        A ticket may be used for each part of a request. Raises what `work` raises, and Overloaded for the last ticket
        in order if more than 64 wait. A caller that is cancelled leaves the queue. Work that has begun is finished, and
        no other work begins before.
        """
        arrived = time.monotonic()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = ticket
        self._start_next()
        self._refuse_last()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:  # it began at this moment
                self._end()
            raise
        finally:
            self._waiting.pop(turn, None)
        began = time.monotonic()
        thread = asyncio.get_running_loop().run_in_executor(self._thread, work)
        thread.add_done_callback(lambda _: self._end())
        thread.add_done_callback(lambda _: self._observe(began - arrived, time.monotonic() - began))
        return await asyncio.shield(thread)

    def _end(self) -> None:
        self._busy = False
        self._start_next()

    def _start_next(self) -> None:
        waiting = self._in_order()
        if waiting and not self._busy:
            self._busy = True
            self._now = max(self._now, self._waiting.pop(waiting[0]).finish)
            waiting[0].set_result(None)

    def _refuse_last(self) -> None:
        waiting = self._in_order()
        if len(waiting) > MAX_WAITING:
            last = waiting[-1]
            del self._waiting[last]
            price = sum(ticket.price for ticket in self._waiting.values())
            seconds = min(60, max(1, math.ceil(price / PRICE_PER_SECOND / 2)))
            last.set_exception(
                Overloaded(
                    f"{MAX_WAITING} requests wait for their images to be decoded. Repeat the request in {seconds} s.",
                    seconds,
                )
            )

    def _in_order(self) -> list["asyncio.Future[None]"]:
        """Return the turns that wait, the next one first. One that was cancelled leaves at the loop's next turn."""
        waiting = [turn for turn in self._waiting if not turn.done()]
        return sorted(waiting, key=lambda turn: self._waiting[turn])


def _lower_priority() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


class Decoders:
    """Two queues: work of more than `SMALL_PRICE` has one, so that other work never waits for it."""

    def __init__(self, observe: Observer = lambda waited, worked: None) -> None:
        self._small, self._large = FairQueue(observe), FairQueue(observe)

    def queue(self, price: int) -> FairQueue:
        """Return the queue of a request. `price`: of the most expensive of its parts."""
        return self._large if price > SMALL_PRICE else self._small
