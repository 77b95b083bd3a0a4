"""The Grafana dashboard names metrics and labels that exist, and shows each of the model's metrics."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.metrics import Counter, Gauge, Histogram, MetricWrapperBase

from model import cold_start as coldstart
from model import metrics

DASHBOARD = json.loads((Path(__file__).resolve().parents[1] / "docs" / "grafana" / "preheat.json").read_text())
SUFFIXES = {Counter: ("_total",), Gauge: ("",), Histogram: ("_bucket", "_sum", "_count")}
OURS: list[MetricWrapperBase] = [
    value for module in (metrics, coldstart) for value in vars(module).values() if isinstance(value, MetricWrapperBase)
]
# The name of every sample -> the metric and the labels it has.
SAMPLES = {
    metric._name + suffix: (metric, {*metric._labelnames, *(["le"] if suffix == "_bucket" else [])})
    for metric in OURS
    for suffix in SUFFIXES[type(metric)]
}


def targets() -> list[dict[str, Any]]:
    return [target for panel in DASHBOARD["panels"] for target in panel["targets"]]


@pytest.mark.parametrize("target", targets(), ids=lambda target: target["expr"][:60])
def test_an_expression_names_metrics_and_labels_that_exist(target: dict[str, Any]) -> None:
    names = re.findall(r"preheat_\w+", target["expr"])
    assert names and set(names) <= SAMPLES.keys()
    labels = set.intersection(*(SAMPLES[name][1] for name in names))
    for grouped in re.findall(r"by \(([^)]*)\)", target["expr"]):
        assert {label.strip() for label in grouped.split(",")} <= labels
    assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels


def test_every_metric_is_shown() -> None:
    shown = {SAMPLES[name][0] for target in targets() for name in re.findall(r"preheat_\w+", target["expr"])}
    assert [metric._name for metric in OURS if metric not in shown] == []


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
