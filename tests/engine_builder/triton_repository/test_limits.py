"""The limits of `generate_loop`, without a server."""

import threading
import time

import pytest

from engine_builder.triton_repository.serving.limits import Unread, Watch
from model.errors import Cancelled, DeadlineExceeded, Overloaded, PreheatError


class FakeAnswer:
    """An answer whose client leaves when the test says so."""

    def __init__(self) -> None:
        self.arrival = time.monotonic()
        self.ended = self.left = False
        self.failure: Exception | None = None

    def abandoned(self) -> bool:
        if self.failure is not None:
            raise self.failure
        return self.left


class Cancellation:
    """What a watch reports: each error, and that there is one."""

    def __init__(self) -> None:
        self.errors: list[PreheatError] = []
        self.reported = threading.Event()

    def __call__(self, error: PreheatError) -> None:
        self.errors.append(error)
        self.reported.set()


def test_only_so_many_requests_and_bytes_wait_to_be_read() -> None:
    for unread, body in ((Unread(max_requests=2), b"a"), (Unread(max_requests=10, max_bytes=100), bytes(50))):
        unread.add(body)
        unread.add(body)
        with pytest.raises(Overloaded, match="requests with .* wait to be read"):
            unread.add(body)
        unread.remove(body)
        unread.add(body)


@pytest.mark.parametrize("left, seconds, kind", [(True, float("inf"), Cancelled), (False, 0.01, DeadlineExceeded)])
def test_watch_cancels_once(left: bool, seconds: float, kind: type[PreheatError]) -> None:
    """Not those that are answered, and also after a failed check of another one."""
    watch, cancellations = Watch(seconds), [Cancellation() for _ in range(4)]
    answers = [FakeAnswer() for _ in cancellations]
    broken, answered, *others = answers
    broken.failure = RuntimeError("no answer from Triton")
    answered.ended = True
    for answer, cancellation in zip(answers, cancellations, strict=True):
        answer.left = left
        watch.add(answer, cancellation)  # type: ignore[arg-type]
    assert all(cancellation.reported.wait(30) for cancellation in (cancellations[0], *cancellations[2:]))
    late, next_round = FakeAnswer(), Cancellation()
    late.left = left
    watch.add(late, next_round)  # type: ignore[arg-type]
    assert next_round.reported.wait(30)
    watch.close()
    assert not cancellations[1].errors and len(cancellations[0].errors) == 1
    assert [type(error) for cancellation in cancellations[2:] for error in cancellation.errors] == [kind] * len(others)
