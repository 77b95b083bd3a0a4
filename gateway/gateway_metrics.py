"""The gateway's metrics in the text format of Prometheus. Backends are numbered from 0, so no URL is shown."""

from collections.abc import Iterable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.backends import Backends
from gateway.history import History

CONTENT_TYPE = CONTENT_TYPE_LATEST


def exposition(backends: Backends, history: History | None) -> bytes:
    """Return the present values of all metrics."""
    registry = CollectorRegistry()
    registry.register(_State(backends, history))
    return generate_latest(registry)


class _State(Collector):
    def __init__(self, backends: Backends, history: History | None) -> None:
        self._backends = backends
        self._history = history

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("preheat_gateway_backend_up", "1 if the backend can be used.", labels=["backend"])
        images = GaugeMetricFamily("preheat_gateway_backend_images", "Images in flight.", labels=["backend"])
        failures = CounterMetricFamily(
            "preheat_gateway_backend_failures", "Requests that failed in the backend.", labels=["backend"]
        )
        for number, backend in enumerate(self._backends.all):
            up.add_metric([str(number)], backend.is_up())
            images.add_metric([str(number)], backend.images)
            failures.add_metric([str(number)], backend.failures)
        yield from (up, images, failures)
        if self._history is not None:
            waiting, lost = self._history.waiting, self._history.lost
            yield GaugeMetricFamily("preheat_gateway_history_waiting", "Entries not yet written.", value=waiting)
            yield CounterMetricFamily("preheat_gateway_history_lost", "Entries never written.", value=lost)
