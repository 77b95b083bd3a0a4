"""The Grafana dashboard names existing metrics and labels, and shows each of the model's metrics."""

import json
import re
from typing import Any

import yaml
from prometheus_client import REGISTRY

from tests.support.metrics import declared_metrics
from tests.support.repository import REPOSITORY

DASHBOARD = json.loads((REPOSITORY / "docs" / "grafana" / "preheat.json").read_text())
ALERTS = yaml.safe_load((REPOSITORY / "docs" / "grafana" / "alerts.yaml").read_text())
METRICS = declared_metrics()
LABELS = {series: labels for metric in METRICS for series, labels in metric.labels_by_series().items()}


def targets() -> list[dict[str, Any]]:
    return [target for panel in DASHBOARD["panels"] for target in panel["targets"]]


def sample_names(target: dict[str, Any]) -> set[str]:
    """Return the names of the samples in a target's expression."""
    return set(re.findall(r"preheat_\w+", target["expr"]))


def test_expressions_name_existing_metrics_and_labels() -> None:
    for target in targets():
        names = sample_names(target)
        assert names and names <= LABELS.keys(), target["expr"]
        grouped = [label.strip() for text in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in text.split(",")]
        shown = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
        assert {*grouped, *shown} <= set.intersection(*(LABELS[name] for name in names)), target["expr"]


def test_shows_every_metric() -> None:
    shown = {name for target in targets() for name in sample_names(target)}
    assert [metric.name for metric in METRICS if not shown & metric.labels_by_series().keys()] == []


def test_alerts_name_existing_metrics_and_labels() -> None:
    rules = [rule for group in ALERTS["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) > 0
    for rule in rules:
        for name, selector in re.findall(r"(preheat_\w+)(?:\{([^}]*)\})?", rule["expr"]):
            labels = dict(re.findall(r'(\w+)=~?"([^"]*)"', selector))
            assert labels.keys() <= LABELS[name], rule["alert"]
            exposed = [sample for family in REGISTRY.collect() for sample in family.samples if sample.name == name]
            for label, pattern in labels.items():
                values = {sample.labels[label] for sample in exposed}
                assert set(pattern.split("|")) <= values, f"{rule['alert']}: {label}"
