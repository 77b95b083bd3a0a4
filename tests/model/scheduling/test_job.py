"""The timings and the single result of a job."""

import threading
import time

import pytest

from model.errors import Cancelled, Unavailable
from model.pipeline.runner import Runner
from model.scheduling.job import ImageEvent, Job
from tests.support.linear_networks import PLAIN, linear_model


def make_job() -> Job:
    return Job(Runner(linear_model()).plan(PLAIN), None, 0)


def test_time_of_each_pass_counts_for_its_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two masks may have steps that the first has not, and the stages of two images may alternate."""
    events = [("queue", 1), ("text", 3), ("refine", 7), ("denoise", 20), ("refine", 22), ("decode", 23), ("refine", 30)]
    clock = iter([0, *(second for _, second in events)])
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    job = make_job()
    for stage, _ in events:
        job.end_stage(stage)
    expected = {"queue": 1000, "text": 2000, "refine": 4000 + 2000 + 7000, "denoise": 13000, "decode": 1000}
    assert job.timings() == expected


def test_first_result_of_a_job_is_final() -> None:
    job = make_job()
    assert job.fail(Cancelled("first")) and not job.fail(Unavailable("second"))
    for index in range(job.params.num_images):
        job.add_encoded_image(ImageEvent(index, "data"))
    with pytest.raises(Cancelled, match="first"):
        job.result.result(0)


def test_callbacks_of_the_result_may_call_the_job() -> None:
    job = make_job()
    returned: list[object] = []
    job.result.add_done_callback(lambda _: returned.extend([job.fail(Unavailable("second")), job.timings()]))
    thread = threading.Thread(target=job.fail, args=[Cancelled("first")], daemon=True)
    thread.start()
    thread.join(20)
    assert returned == [False, {}], "the callback waits for a lock that its own thread holds"
