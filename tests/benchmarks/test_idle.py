"""Classify the gaps between the activities of a GPU. The profiler itself needs a GPU."""

import os
import subprocess
import sys

from engine_builder.benchmarks.idle import Activity, Gaps, measure_gaps


def test_gaps_within_and_between_launches() -> None:
    activities = [
        Activity(100, 110, launch=1),
        Activity(112, 120, launch=1),
        Activity(125, 130, launch=2),
        Activity(130, 140, launch=2),
        Activity(143, 150, launch=2),
    ]
    assert measure_gaps(activities) == measure_gaps(reversed(activities)) == Gaps(span=50, within=2 + 3, between=5)


def test_gaps_of_concurrent_activities() -> None:
    long = Activity(0, 50, launch=1)
    assert measure_gaps([long, Activity(10, 20, launch=2), Activity(60, 70, launch=1)]) == Gaps(
        span=70, within=10, between=0
    )
    assert measure_gaps([long, Activity(40, 55, launch=2), Activity(60, 70, launch=1)]) == Gaps(
        span=70, within=0, between=5
    )
    assert measure_gaps([long]) == Gaps(span=50, within=0, between=0)


def test_refuses_to_run_without_a_gpu() -> None:
    command = [sys.executable, "-m", "engine_builder.benchmarks.idle", "/nowhere", "model/1"]
    without = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=without, capture_output=True, text=True)
    assert done.returncode == 2 and "no GPU was found" in done.stderr
