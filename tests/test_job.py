"""What a deployment may set of the limits, and what a job says of its own way."""

from typing import Any

import pytest

from model.errors import Cancelled, ManifestError, Unavailable
from model.scheduling.job import (
    Job,
    Limits,
)
from tests.stand_ins.line_networks import PLAIN, line_model


def test_limits_that_are_left_out_have_defaults() -> None:
    assert Limits.from_config({}) == Limits()
    assert Limits.from_config({"max_queue": 16, "deadline_seconds": 2.5}) == Limits(max_queue=16, deadline_seconds=2.5)


@pytest.mark.parametrize(
    "wrong, says",
    [
        ({"queue": 8}, "limits.queue is 8; the limits are max_queue, deadline_seconds"),
        ({"max_queue": 0}, "limits.max_queue is 0"),
        ({"max_queue": 9.5}, "limits.max_queue is 9.5"),
        ({"max_queue": True}, "limits.max_queue is True"),
        ({"max_queue": 7}, "limits.max_queue is 7, and one request may ask for 8 images"),
        ({"deadline_seconds": "300"}, "limits.deadline_seconds is '300'"),
        ({"deadline_seconds": -1}, "limits.deadline_seconds is -1"),
        ({"stuck_seconds": float("nan")}, "limits.stuck_seconds is nan"),
    ],
)
def test_limits_that_are_none_are_refused_with_the_file_to_mend(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ManifestError, match=f"{says}.*mend model_metadata.preheat.limits in config.yaml"):
        Limits.from_config(wrong)


def test_stages_follow_each_other_and_add_up() -> None:
    job = Job(line_model(), PLAIN, None, 0)
    for stage in ("queue", "text", "denoise", "denoise", "decode", "encode"):
        job.mark(stage)
    timings = job.timings()
    assert list(timings) == ["queue", "text", "denoise", "decode", "encode"]
    assert sum(timings.values()) == pytest.approx((job.marks["encode"] - job.marks["accepted"]) * 1000)


def test_a_job_is_answered_once() -> None:
    job = Job(line_model(), PLAIN, None, 0)
    assert job.fail(Cancelled("first")) and not job.fail(Unavailable("second"))
    with pytest.raises(Cancelled, match="first"):
        job.result.result(0)
