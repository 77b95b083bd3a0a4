"""The Prometheus metrics that the server declares."""

from dataclasses import dataclass

from prometheus_client.metrics import MetricWrapperBase

from model import cold_start, metrics


@dataclass(frozen=True)
class DeclaredMetric:
    """A metric as a scrape names it. `kind`: counter, gauge or histogram."""

    name: str
    kind: str
    labels: frozenset[str]

    def samples(self) -> dict[str, set[str]]:
        """Return the name of each of its samples with the sample's labels."""
        if self.kind != "histogram":
            return {self.name: set(self.labels)}
        return {f"{self.name}_bucket": {*self.labels, "le"}} | {
            f"{self.name}_{part}": set(self.labels) for part in ("sum", "count")
        }


def declared_metrics() -> list[DeclaredMetric]:
    """Return all metrics of `model`."""
    found = []
    for module in (metrics, cold_start):
        for value in vars(module).values():
            if isinstance(value, MetricWrapperBase):
                [family] = value.describe()
                name = f"{family.name}_total" if family.type == "counter" else family.name
                # Without samples, a metric has no public list of its labels.
                found.append(DeclaredMetric(name, family.type, frozenset(value._labelnames)))
    return found
