"""The life of the workers: one thread for each reads its messages, and starts it again when it has ended."""

import json
import logging
import signal
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from model.workers.messages import LoadFailed, Ready, WhileServing
from model.workers.worker import EXIT_SECONDS, Worker, load_error

logger = logging.getLogger("preheat")

LOAD_SECONDS = 1800.0  # in which a worker must have loaded the release
MORE_SECONDS = 60.0  # for the other workers, once one has loaded it
# Before a worker is started again. Its start alone takes seconds, so a process that ends again and again makes no busy
# loop. Only failed loads make the pause longer, because they can last: a store that cannot be reached, a broken GPU.
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 10.0
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
        pause, kills = _PAUSE_SECONDS, 0
        while not self._closed.is_set():
            outcome: Ready | Exception | None
            try:
                worker = self._start(number)
                self._events.started(worker)
                if self._closed.is_set():
                    worker.kill("the server ended")
                outcome = self._serve(worker)
            except Exception as error:  # without this thread the worker would never be started again
                logger.exception("A worker cannot be started or followed.")
                outcome = error
            kills = kills + 1 if outcome is None else 0
            if kills > _MAX_KILLS:
                self._set_outcome(number, load_error(number, self._size, -signal.SIGKILL))
            elif outcome is not None:
                self._set_outcome(number, outcome)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS) if isinstance(outcome, Exception) else _PAUSE_SECONDS
            self._closed.wait(pause)

    def _serve(self, worker: Worker) -> Ready | Exception | None:
        """Handle the messages of a worker until it ends, and hand on its requests.

        Returns how its load ended; None: it was killed meanwhile, which does not mean that it cannot load the release.
        """
        outcome: Ready | Exception | None = None
        try:
            for message in worker.messages():
                if isinstance(message, Ready):
                    outcome = message
                    self._events.ready(worker)
                    self._set_outcome(worker.number, message)
                    logger.info(json.dumps({"event": "worker_ready", "worker": worker.number, "pid": worker.pid}))
                elif isinstance(message, LoadFailed):
                    outcome = message.error
                else:
                    self._events.message(worker, message)
        except Exception:
            logger.exception("A message of a worker cannot be handled.")
            worker.kill("a message of it cannot be handled")
        self._events.ended(worker)
        code = worker.reap()
        if not self._closed.is_set():
            entry = {"event": "worker_ended", "worker": worker.number, "exit_code": code, "moved": worker.moved}
            if isinstance(outcome, Exception):
                entry["error"] = str(outcome)
            logger.error(json.dumps(entry | ({"reason": worker.reason} if worker.reason else {})))
        if outcome is None and (code != -signal.SIGKILL or worker.reason):
            return load_error(worker.number, self._size, code)
        return outcome

    def _set_outcome(self, number: int, outcome: Ready | Exception) -> None:
        with self._changed:
            if isinstance(outcome, Ready) or number not in self._outcomes:
                self._outcomes[number] = outcome
            self._changed.notify_all()
