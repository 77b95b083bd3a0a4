"""Send messages from a thread of its own, so that no thread that generates or answers waits for the other process."""

import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any


class Sender:
    """Any thread may call `send`. Messages that the other process can no longer receive are dropped."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._messages: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=self._run, name="preheat-send", daemon=True).start()

    def send(self, message: Any) -> None:
        """Send a message, after those before it. Returns at once."""
        self._messages.put(message)

    def close(self) -> None:
        """End the thread after the messages so far."""
        self._messages.put(None)

    def _run(self) -> None:
        with suppress(OSError):  # the other process has ended
            while (message := self._messages.get()) is not None:
                self._connection.send(message)
