"""The Prometheus metrics that modules of `model` declare."""

import pkgutil
from dataclasses import dataclass
from importlib import import_module

from prometheus_client.metrics import MetricWrapperBase

import model


@dataclass(frozen=True)
class DeclaredMetric:
    """A metric under its name in the server's /metrics. `kind`: counter, gauge or histogram."""

    name: str
    kind: str
    labels: frozenset[str]

    def labels_by_series(self) -> dict[str, set[str]]:
        """Return the metric's series in /metrics, by name, with their labels. A histogram has three."""
        if self.kind != "histogram":
            return {self.name: set(self.labels)}
        return {
            f"{self.name}_bucket": {*self.labels, "le"},
            f"{self.name}_sum": set(self.labels),
            f"{self.name}_count": set(self.labels),
        }


def declared_metrics() -> list[DeclaredMetric]:
    """Return the metrics that are global variables of any module of `model`."""
    modules = [import_module(found.name) for found in pkgutil.walk_packages(model.__path__, "model.")]
    values = {id(value): value for module in modules for value in vars(module).values()}.values()
    return [_describe(value) for value in values if isinstance(value, MetricWrapperBase)]


def _describe(metric: MetricWrapperBase) -> DeclaredMetric:
    [family] = metric.describe()
    name = f"{family.name}_total" if family.type == "counter" else family.name
    # `describe` gives no labels, and prometheus_client has no public list of them.
    return DeclaredMetric(name, family.type, frozenset(metric._labelnames))
