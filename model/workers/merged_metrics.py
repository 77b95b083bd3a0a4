"""The metrics of all workers as those of one server: the values of each sample are added.

The server's own collectors are replaced by one that adds the workers' last snapshots to them. Counters of ended workers
are kept, so that no sum ever falls. The cold start has its own metric, which is not added.
"""

import threading
from collections.abc import Iterable, Mapping

from prometheus_client import REGISTRY, Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from model import metrics
from model.workers.messages import Samples


def collectors() -> list[MetricWrapperBase]:
    """Return the metrics that are added."""
    return [value for value in vars(metrics).values() if isinstance(value, MetricWrapperBase)]


def snapshot() -> tuple[dict[str, Samples], dict[str, Samples]]:
    """Return this process's samples of counters and histograms, and those of gauges, by the metrics' names."""
    counters: dict[str, Samples] = {}
    gauges: dict[str, Samples] = {}
    for collector in collectors():
        for family in collector.collect():
            (gauges if family.type == "gauge" else counters)[family.name] = _samples(family)
    return counters, gauges


class AddedMetrics(Collector):
    """Collects this process's metrics and those of the workers. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: dict[str, Samples] = {}  # counters
        self._counters: dict[int, Mapping[str, Samples]] = {}  # by worker
        self._gauges: dict[int, Mapping[str, Samples]] = {}

    def install(self) -> None:
        """Replace this process's own collectors in the registry."""
        for collector in collectors():
            REGISTRY.unregister(collector)
        REGISTRY.register(self)

    def remove(self) -> None:
        """Undo `install`."""
        REGISTRY.unregister(self)
        for collector in collectors():
            REGISTRY.register(collector)

    def update(self, worker: int, counters: Mapping[str, Samples], gauges: Mapping[str, Samples]) -> None:
        """Store the snapshot of a worker."""
        with self._lock:
            self._counters[worker], self._gauges[worker] = counters, gauges

    def end(self, worker: int) -> None:
        """Keep the counters of a worker that has ended, and forget its gauges."""
        with self._lock:
            self._gauges.pop(worker, None)
            for name, samples in self._counters.pop(worker, {}).items():
                _add(self._ended.setdefault(name, {}), samples)

    def collect(self) -> Iterable[Metric]:
        """Yield each metric with the sums."""
        with self._lock:
            ended = {name: dict(samples) for name, samples in self._ended.items()}
            parts = [ended, *self._counters.values(), *self._gauges.values()]
        for collector in collectors():
            for family in collector.collect():
                total = _samples(family)
                for part in parts:
                    _add(total, part.get(family.name, {}))
                added = Metric(family.name, family.documentation, family.type)
                for (name, labels), value in total.items():
                    added.add_sample(name, dict(labels), value)
                yield added


def _samples(family: Metric) -> Samples:
    return {
        (sample.name, tuple(sample.labels.items())): sample.value
        for sample in family.samples
        if not sample.name.endswith("_created")  # a time
    }


def _add(total: Samples, samples: Samples) -> None:
    for key, value in samples.items():
        total[key] = total.get(key, 0.0) + value
