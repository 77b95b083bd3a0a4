"""Classify the gaps between the activities of a GPU. The profiler itself needs a GPU."""

import sys

import pytest
import torch

from benchmarks import idle
from benchmarks.idle import Activity, Gaps, measure_gaps


def test_gaps_within_and_between_launches() -> None:
    launches = [(100, 110, 1), (112, 120, 1), (125, 130, 2), (130, 140, 2), (143, 150, 2)]
    activities = [Activity(*launch) for launch in launches]
    assert measure_gaps(activities) == measure_gaps(reversed(activities)) == Gaps(span=50, within=2 + 3, between=5)


def test_gaps_of_concurrent_activities() -> None:
    long, last = Activity(0, 50, launch=1), Activity(60, 70, launch=1)
    assert measure_gaps([long, Activity(10, 20, launch=2), last]) == Gaps(span=70, within=10, between=0)
    assert measure_gaps([long, Activity(40, 55, launch=2), last]) == Gaps(span=70, within=0, between=5)
    assert measure_gaps([long]) == Gaps(span=50, within=0, between=0)


def test_refuses_to_run_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["idle", "/nowhere", "model/1"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        idle.main()
    assert "no GPU was found" in capsys.readouterr().err
