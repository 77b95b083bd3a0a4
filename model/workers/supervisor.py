"""The life of the workers: one thread for each reads its messages, and starts it again when it has ended."""

import json
import logging
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from model.workers.messages import LoadFailed, Ready, WhileServing
from model.workers.worker import EXIT_SECONDS, Worker, load_error

logger = logging.getLogger("preheat")

LOAD_SECONDS = 1800.0  # in which a worker must have loaded the release
MORE_SECONDS = 60.0  # for the other workers, once one has loaded it
# Before a worker is started again. The pause doubles with each process that did not serve for long, because its cause
# may last: a store that cannot be reached, too little memory, a broken GPU. It is no longer than the last load took, so
# that a worker serves again within two loads.
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 10.0
_SERVED_LONG_SECONDS = 10.0
_FREE_STARTS = 3  # after which the pause begins to double
_MAX_KILLS = 3  # in a row during the load, which are no failure of the load


class Events(NamedTuple):
    """Functions that are called on a worker's thread.

    started: with each new worker.
    ready: once it has loaded the release.
    message: with each further message.
    ended: after its last message.
    """

    started: Callable[[Worker], None]
    ready: Callable[[Worker], None]
    message: Callable[[Worker, WhileServing], None]
    ended: Callable[[Worker], None]


@dataclass
class _Life:
    """The life of a worker's process, in seconds of a monotonic clock.

    outcome: how its load ended; None: it was killed meanwhile, which does not mean that it cannot load the release.
    """

    outcome: Ready | Exception | None = None
    started_at: float = field(default_factory=time.monotonic)
    ready_at: float | None = None
    ended_at: float = 0.0

    @property
    def load_seconds(self) -> float | None:
        return None if self.ready_at is None else self.ready_at - self.started_at

    @property
    def served_seconds(self) -> float:
        return 0.0 if self.ready_at is None else self.ended_at - self.ready_at


class Supervisor:
    """Constructing it starts the workers."""

    def __init__(self, size: int, start: Callable[[int], Worker], events: Events, closed: threading.Event) -> None:
        """`start`: starts the worker of a number; may raise OSError. `closed`: set when none is started any more."""
        self._size = size
        self._start = start
        self._events = events
        self._closed = closed
        self._changed = threading.Condition()  # guards the next one
        self._outcomes: dict[int, Ready | Exception] = {}  # of each worker: its first load, or the first that succeeded
        self._threads = [
            threading.Thread(target=self._run, args=[number], name=f"preheat-worker-{number}", daemon=True)
            for number in range(size)
        ]
        for thread in self._threads:
            thread.start()

    def wait_ready(self) -> list[Ready]:
        """Wait until each worker has loaded the release or failed to. One that loaded it suffices.

        Once one has loaded it, the others have at least a minute more, and at most twice its time in all. Raises the
        error of the first worker if none has loaded it.
        """
        began = time.monotonic()

        def decided() -> bool:
            return len(self._outcomes) == self._size

        def one_loaded() -> bool:
            return decided() or any(isinstance(outcome, Ready) for outcome in self._outcomes.values())

        with self._changed:
            self._changed.wait_for(one_loaded, LOAD_SECONDS + _LONGEST_PAUSE_SECONDS)
            self._changed.wait_for(decided, max(MORE_SECONDS, time.monotonic() - began) if self._outcomes else 0)
            outcomes = [self._outcomes.get(number) for number in range(self._size)]
        loaded = [outcome for outcome in outcomes if isinstance(outcome, Ready)]
        errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        if not loaded:
            raise errors[0] if errors else load_error(0, self._size, None)
        for error in errors:
            logger.error(json.dumps({"event": "load_failed", "error": str(error)}))
        return loaded

    def join(self) -> None:
        """Wait for the ends of all workers, after `closed` is set and they are killed."""
        for thread in self._threads:
            thread.join(2 * EXIT_SECONDS)

    def _run(self, number: int) -> None:
        """Serve with one process after the other, each in place of the one before."""
        kills, short_lives, longest = 0, 0, _LONGEST_PAUSE_SECONDS
        while not self._closed.is_set():
            life = _Life()
            try:
                worker = self._start(number)
                self._events.started(worker)
                if self._closed.is_set():
                    worker.kill("the server ended")
                self._serve(worker, life)
            except Exception as error:  # without this thread the worker would never be started again
                logger.exception("A worker cannot be started or followed.")
                life.outcome = error
            kills = kills + 1 if life.outcome is None else 0
            if kills > _MAX_KILLS:
                self._set_outcome(number, load_error(number, self._size, -signal.SIGKILL))
            elif life.outcome is not None:
                self._set_outcome(number, life.outcome)
            if life.load_seconds is not None:
                longest = min(life.load_seconds, _LONGEST_PAUSE_SECONDS)
            short_lives = 0 if life.served_seconds > _SERVED_LONG_SECONDS else short_lives + 1
            pause = _PAUSE_SECONDS * 2.0 ** min(max(0, short_lives - _FREE_STARTS), 10)
            self._closed.wait(max(_PAUSE_SECONDS, min(pause, longest)))

    def _serve(self, worker: Worker, life: "_Life") -> None:
        """Handle the messages of a worker until it ends, and hand on its requests. Records its life."""
        try:
            for message in worker.messages():
                if isinstance(message, Ready):
                    life.outcome, life.ready_at = message, time.monotonic()
                    self._events.ready(worker)
                    self._set_outcome(worker.number, message)
                    logger.info(json.dumps({"event": "worker_ready", "worker": worker.number, "pid": worker.pid}))
                elif isinstance(message, LoadFailed):
                    life.outcome = message.error
                else:
                    self._events.message(worker, message)
        except Exception:
            logger.exception("A message of a worker cannot be handled.")
            worker.kill("a message of it cannot be handled")
        life.ended_at = time.monotonic()
        self._events.ended(worker)
        code = worker.reap()
        if not self._closed.is_set():
            entry = {"event": "worker_ended", "worker": worker.number, "exit_code": code, "moved": worker.moved}
            if isinstance(life.outcome, Exception):
                entry["error"] = str(life.outcome)
            logger.error(json.dumps(entry | ({"reason": worker.reason} if worker.reason else {})))
        if life.outcome is None and (code != -signal.SIGKILL or worker.reason):
            life.outcome = load_error(worker.number, self._size, code)

    def _set_outcome(self, number: int, outcome: Ready | Exception) -> None:
        with self._changed:
            if isinstance(outcome, Ready) or number not in self._outcomes:
                self._outcomes[number] = outcome
            self._changed.notify_all()
