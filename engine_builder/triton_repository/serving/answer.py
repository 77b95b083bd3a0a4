"""The responses of one request.

Triton's gRPC endpoint mixes up the outputs of two responses to one request that are sent at the same time, and may
crash. An `Answer` sends them one at a time, whatever threads they come from.
"""

import threading
import time
from typing import Any

from engine_builder.triton_repository.serving.backend import error_response, send_last


class Answer:
    """The responses of one request. After the last one nothing more is sent."""

    def __init__(self, sender: Any) -> None:
        """`sender`: Triton's response sender of the request."""
        self.arrival = time.monotonic()
        self._sender = sender
        self._lock = threading.Lock()
        self._ended = False

    @property
    def ended(self) -> bool:
        """True once the last response has been sent, or could not be sent."""
        return self._ended

    def abandoned(self) -> bool:
        """True if the client has left."""
        with self._lock:
            return not self._ended and bool(self._sender.is_cancelled())

    def send(self, response: Any) -> None:
        """Send a response that is not the last one. Without effect after the last one."""
        with self._lock:
            if not self._ended:
                self._sender.send(response)

    def end(self, response: Any) -> None:
        """Send the last response, or the reason why it cannot be sent. Without effect after the last one."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            try:
                send_last(self._sender, response)
            except Exception as error:
                send_last(self._sender, error_response(error))

    def refuse(self, error: BaseException) -> None:
        """Send an error as the last response."""
        self.end(error_response(error))
