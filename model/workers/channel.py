"""Send messages from a thread of its own, so that no thread that generates or answers waits for the other process."""

import logging
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from model.child_process import shut_down

logger = logging.getLogger("preheat")

_END_SECONDS = 1.0


class Sender:
    """Any thread may call `send`. Messages that the other process can no longer receive are dropped."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._messages: SimpleQueue[Any] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="preheat-send", daemon=True)
        self._thread.start()

    def send(self, message: Any) -> None:
        """Send a message, after those before it. Returns at once."""
        self._messages.put(message)

    def close(self) -> bool:
        """End the thread after the messages so far. Return False if it still waits for the other process."""
        self._messages.put(None)
        self._thread.join(_END_SECONDS)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (message := self._messages.get()) is not None:
                self._connection.send(message)
        except OSError:
            pass  # the other process has ended
        except Exception:  # a lost message would leave its request without an answer
            logger.exception("A message cannot be sent to another process.")
            with suppress(OSError):
                shut_down(self._connection)
