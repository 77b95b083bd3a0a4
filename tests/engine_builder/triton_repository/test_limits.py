"""The limits of `generate_loop`, without a server."""

import time
from functools import partial
from queue import SimpleQueue
from typing import Any
from unittest.mock import Mock

import pytest

from engine_builder.triton_repository.serving.limits import Unread, Watch
from model.errors import Cancelled, DeadlineExceeded, Overloaded, PreheatError


def test_only_so_many_requests_and_bytes_wait_to_be_read() -> None:
    for unread, body in ((Unread(max_requests=2), b"a"), (Unread(max_requests=10, max_bytes=100), bytes(50))):
        unread.add(body)
        unread.add(body)
        with pytest.raises(Overloaded, match="requests with .* wait to be read"):
            unread.add(body)
        unread.remove(body)
        unread.add(body)


def test_watch_cancels_requests_once() -> None:
    """Those whose client has left or whose time is over, also after a failed check of another one."""

    def answer(age: float = 0.0, left: bool = False, ended: bool = False, error: Exception | None = None) -> Any:
        abandoned = Mock(return_value=left, side_effect=error)
        return Mock(arrival=time.monotonic() - age, ended=ended, abandoned=abandoned)

    watch, reported = Watch(10.0), SimpleQueue[tuple[str, PreheatError]]()
    answers = {
        "answered": answer(age=20, ended=True),
        "broken": answer(error=RuntimeError("no answer from Triton")),
        "late": answer(age=20),
        "left": answer(left=True),
    }
    for name, one in answers.items():
        watch.add(one, partial(lambda name, error: reported.put((name, error)), name))
    errors = dict(reported.get(timeout=30) for _ in range(3))
    watch.close()
    assert reported.empty() and "no answer from Triton" in str(errors["broken"])
    assert (type(errors["late"]), type(errors["left"])) == (DeadlineExceeded, Cancelled)
