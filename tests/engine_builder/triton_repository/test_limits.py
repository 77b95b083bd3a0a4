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
    watch, answer, cancellation = Watch(seconds), FakeAnswer(), Cancellation()
    answer.left = left
    watch.add(answer, cancellation)  # type: ignore[arg-type]
    assert cancellation.reported.wait(30)
    other, next_round = FakeAnswer(), Cancellation()
    other.left, other.arrival = left, answer.arrival
    watch.add(other, next_round)  # type: ignore[arg-type]
    assert next_round.reported.wait(30)
    watch.close()
    assert [type(error) for error in cancellation.errors] == [kind]


def test_watch_leaves_answered_requests_alone() -> None:
    watch, answered, cancellation = Watch(0.0), FakeAnswer(), Cancellation()
    answered.ended = True
    watch.add(answered, cancellation)  # type: ignore[arg-type]
    late, reported = FakeAnswer(), Cancellation()
    watch.add(late, reported)  # type: ignore[arg-type]
    assert reported.reported.wait(30)
    watch.close()
    assert not cancellation.errors


def test_watch_goes_on_after_a_failed_check() -> None:
    watch, broken, left, first, second = Watch(float("inf")), FakeAnswer(), FakeAnswer(), Cancellation(), Cancellation()
    broken.failure = RuntimeError("no answer from Triton")
    watch.add(broken, first)  # type: ignore[arg-type]
    assert first.reported.wait(30) and "no answer from Triton" in str(first.errors[0])
    left.left = True
    watch.add(left, second)  # type: ignore[arg-type]
    assert second.reported.wait(30)
    watch.close()
