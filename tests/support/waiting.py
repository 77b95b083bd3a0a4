"""Waiting for a condition that no event reports."""

import time
from collections.abc import Callable

TIMEOUT_SECONDS = 60  # a test that waits this long fails
_POLL_SECONDS = 0.02


def eventually(condition: Callable[[], bool], expected: str, seconds: float = TIMEOUT_SECONDS) -> None:
    """Return once `condition()` is true. Fails, naming what was `expected`, if it stays false."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not reached in {seconds:g} s: {expected}"
        time.sleep(_POLL_SECONDS)
