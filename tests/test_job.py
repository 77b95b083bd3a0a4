"""The timings and the single result of a job."""

import pytest

from model.errors import Cancelled, Unavailable
from model.pipeline.runner import Runner
from model.scheduling.job import Job
from tests.support.linear_networks import PLAIN, linear_model


def make_job() -> Job:
    return Job(Runner(linear_model()).plan(PLAIN), None, 0)


def test_stage_times_add_up_to_the_whole() -> None:
    job = make_job()
    for stage in ("queue", "text", "denoise", "denoise", "decode", "encode"):
        job.end_stage(stage)
    timings = job.timings()
    assert list(timings) == ["queue", "text", "denoise", "decode", "encode"]
    assert sum(timings.values()) == pytest.approx((job.timestamps["encode"] - job.timestamps["accepted"]) * 1000)


def test_first_result_of_a_job_is_final() -> None:
    job = make_job()
    assert job.fail(Cancelled("first")) and not job.fail(Unavailable("second"))
    with pytest.raises(Cancelled, match="first"):
        job.result.result(0)
