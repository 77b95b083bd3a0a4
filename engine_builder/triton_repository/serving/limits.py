"""The limits of `generate_loop`: requests that wait to be read, and the watch over requests in flight."""

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from model.api.body_limit import MAX_BODY_BYTES, MAX_TOTAL_BODY_BYTES
from model.errors import BodyTooLarge, Cancelled, DeadlineExceeded, Overloaded, PreheatError

if TYPE_CHECKING:
    from engine_builder.triton_repository.serving.answer import Answer

_WATCH_SECONDS = 0.25


class Unread:
    """The requests that wait for a reader: their number and bytes, both limited."""

    def __init__(self, max_requests: int, max_bytes: int = MAX_TOTAL_BODY_BYTES) -> None:
        self._max_requests, self._max_bytes = max_requests, max_bytes
        self._lock = threading.Lock()
        self._requests = self._bytes = 0

    def add(self, content: bytes) -> None:
        """Count a request. Raises BodyTooLarge, or Overloaded if no further one may wait."""
        if len(content) > MAX_BODY_BYTES:
            raise BodyTooLarge(f"The request has more than {MAX_BODY_BYTES / 2**20:g} MiB.")
        with self._lock:
            if self._requests >= self._max_requests or self._bytes + len(content) > self._max_bytes:
                raise Overloaded(
                    f"{self._requests} requests with {self._bytes / 2**20:.1f} MiB wait to be read, and this server "
                    f"holds {self._max_requests} with {self._max_bytes / 2**20:g} MiB. Repeat the request in 1 s.",
                    1,
                )
            self._requests += 1
            self._bytes += len(content)

    def remove(self, content: bytes) -> None:
        """Count a request that has been read no longer."""
        with self._lock:
            self._requests -= 1
            self._bytes -= len(content)


class Watch:
    """A thread that ends requests whose clients have left, or which were not answered within the deadline."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: from a request's arrival to its answer; infinity: no deadline."""
        self._seconds = seconds
        self._lock = threading.Lock()
        self._watched: dict[Answer, Callable[[PreheatError], None]] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="preheat-watch", daemon=True)
        self._thread.start()

    def check(self, answer: "Answer") -> None:
        """Raise Cancelled if the client has left, DeadlineExceeded if the time is over."""
        if answer.abandoned():
            raise Cancelled("The client left.")
        if time.monotonic() - answer.arrival > self._seconds:
            raise DeadlineExceeded(f"The images were not finished within {self._seconds:g} s.")

    def add(self, answer: "Answer", cancel: Callable[[PreheatError], None]) -> None:
        """Check a request until its answer has ended. `cancel` gets the error, once, on the watch's thread."""
        with self._lock:
            self._watched[answer] = cancel

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(_WATCH_SECONDS):
            with self._lock:
                self._watched = {answer: cancel for answer, cancel in self._watched.items() if not answer.ended}
                watched = list(self._watched.items())
            for answer, cancel in watched:
                try:
                    self.check(answer)
                except Exception as error:  # also of Triton's `is_cancelled`, which must not end the watch over others
                    with self._lock:
                        self._watched.pop(answer)
                    cancel(
                        error
                        if isinstance(error, PreheatError)
                        else Cancelled(f"Triton does not say whether the client has left: {error}")
                    )
