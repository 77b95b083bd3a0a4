"""Queues for work that prepares a request, such as decoding its images: clients take turns, and cheap work goes first.

A request is served in the order of its virtual finish time (self-clocked fair queueing, Golestani, INFOCOM 1994): the
time of its arrival, or until which its client has been served, plus its price. So a cheap request goes before an
expensive one, an expensive one that has waited goes before a cheap new one, and a client with many requests delays
mostly its own. A client pays for what is served, not for what is refused or given up.

Imports no torch: the server and the gateway have the same queues.
"""

import asyncio
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from model.errors import Overloaded

CLIENT_HEADER = "X-Preheat-Client"  # names one of a gateway's clients. Only the order in queues depends on it
SMALL_PRICE = 2**21  # pixels: a little more than 1920 x 1080, about 30 ms of decoding
MAX_WAITING = 64  # requests in a queue
_NICENESS = 5  # of the threads: event loops, and the launches of work on a GPU, have priority
PRICE_PER_SECOND = 50_000_000  # pixels, on a slow core
T = TypeVar("T")
Part = tuple[int, Callable[[], T]]
"""The price of some work, and the work."""
Observer = Callable[[float, float], None]
"""Called with the seconds that work has waited, and that it has taken."""


@dataclass(eq=False)
class _Request:
    """A request in a queue. `arrival`: the virtual time; `ready_at`: when its next part could begin, in seconds."""

    client: Hashable
    number: int
    arrival: float
    parts: deque[Part[Any]]
    done: "asyncio.Future[list[Any]]"
    results: list[Any] = field(default_factory=list)
    begun: bool = False
    ready_at: float = field(default_factory=time.monotonic)


class FairQueue:
    """Runs functions in a thread, one at a time. Use it on one event loop."""

    def __init__(self, observe: Observer = lambda waited, worked: None) -> None:
        self._observe = observe
        self._thread = ThreadPoolExecutor(1, "preheat-prepare", _lower_priority)
        self._now = 0.0  # virtual: the finish time of the last part that was served
        self._arrivals = 0
        self._served: dict[Hashable, float] = {}  # client -> the virtual time until which it was served, if to come
        self._busy = False
        self._waiting: list[_Request] = []

    async def run(self, client: str, parts: Sequence[Part[T]]) -> list[T]:
        """Return the results of a request's parts, which run in a thread, in turns with those of other requests.

        client: "" stands for another client each time. Raises what a part raises, and Overloaded if more than 64
        requests wait: for the last one of the client with the most work. A caller that is cancelled leaves the queue. A
        part that has begun is finished, and no other part begins before.
        """
        if not parts:
            return []
        self._arrivals += 1
        done: asyncio.Future[list[T]] = asyncio.get_running_loop().create_future()
        request = _Request(client or object(), self._arrivals, self._now, deque(parts), done)
        self._served = {name: time for name, time in self._served.items() if time > self._now}
        self._waiting.append(request)
        try:
            self._start_next()
            self._refuse_last()
            return await done
        finally:
            self._leave(request)

    def _leave(self, request: _Request) -> None:
        request.parts.clear()
        if request in self._waiting:
            self._waiting.remove(request)

    def _start(self, request: _Request) -> float:
        """Return the virtual time at which a request's next part begins."""
        return max(self._served.get(request.client, 0.0), request.arrival)

    def _order(self, request: _Request) -> tuple[float, int]:
        return self._start(request) + sum(price for price, _ in request.parts), request.number

    def _start_next(self) -> None:
        self._waiting = [request for request in self._waiting if not request.done.done()]  # callers that have left
        if self._busy or not self._waiting:
            return
        request = min(self._waiting, key=self._order)
        price, work = request.parts.popleft()
        if not request.parts:
            self._waiting.remove(request)
        finish = self._start(request) + price
        self._served[request.client] = finish
        self._now = max(self._now, finish)
        request.begun, self._busy = True, True
        began, loop = time.monotonic(), asyncio.get_running_loop()
        try:
            thread = loop.run_in_executor(self._thread, work)
        except RuntimeError as error:  # no thread can be started
            thread = loop.create_future()
            thread.set_exception(error)
        thread.add_done_callback(partial(self._end, request, began))

    def _end(self, request: _Request, began: float, thread: "asyncio.Future[Any]") -> None:
        self._busy = False
        ended = time.monotonic()
        self._observe(began - request.ready_at, ended - began)
        request.ready_at = ended
        error = thread.exception()
        if not request.done.done():
            if error is not None:
                self._leave(request)
                request.done.set_exception(error)
            else:
                request.results.append(thread.result())
                if not request.parts:
                    request.done.set_result(request.results)
        self._start_next()

    def _refuse_last(self) -> None:
        if len(self._waiting) <= MAX_WAITING:
            return
        backlog: Counter[Hashable] = Counter()
        for request in self._waiting:
            backlog[request.client] += sum(price for price, _ in request.parts)
        unbegun = (request for request in self._waiting if not request.begun)
        last = max(unbegun, key=lambda request: (backlog[request.client], self._order(request)))
        self._waiting.remove(last)
        price = sum(price for request in self._waiting for price, _ in request.parts)
        seconds = min(60, max(1, math.ceil(price / PRICE_PER_SECOND / 2)))
        last.done.set_exception(
            Overloaded(
                f"{MAX_WAITING} requests wait for their images or prompts to be read. Repeat it in {seconds} s.",
                seconds,
            )
        )


def _lower_priority() -> None:
    thread = threading.get_native_id()
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


class PreparationQueues:
    """The queues of a server. Images of more than `SMALL_PRICE` have one, so that other images never wait for them."""

    def __init__(self, observe: Observer = lambda waited, worked: None) -> None:
        self._small, self._large = FairQueue(observe), FairQueue(observe)
        self.texts = FairQueue(observe)

    def images(self, price: int) -> FairQueue:
        """Return the queue of images. `price`: of the most expensive one of a request."""
        return self._large if price > SMALL_PRICE else self._small
