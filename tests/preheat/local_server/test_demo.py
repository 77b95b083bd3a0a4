"""The metrics of a server, as the commands read them."""

import pytest

from preheat.local_server.client import CallFailed
from preheat.local_server.demo import cold_start_phases, read_metrics
from tests.support.http_server import HttpServer, QuietHandler


class MetricsHandler(QuietHandler):
    """Answers a page of metrics, or an error."""

    page = ""
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.page.encode())


def test_reads_metrics_by_name_and_labels() -> None:
    MetricsHandler.status, MetricsHandler.page = 200, '# HELP a b\na{kind="x y"} 1.5\nb 2\n'
    with HttpServer(MetricsHandler) as server:
        assert read_metrics(f"http://127.0.0.1:{server.port}") == {'a{kind="x y"}': 1.5, "b": 2.0}


@pytest.mark.parametrize("status, page", [(500, "a 1\n"), (200, "Internal Server Error\n")])
def test_refuses_a_page_without_metrics(status: int, page: str) -> None:
    MetricsHandler.status, MetricsHandler.page = status, page
    with HttpServer(MetricsHandler) as server, pytest.raises(CallFailed, match="/metrics/ cannot be read"):
        read_metrics(f"http://127.0.0.1:{server.port}")


def test_phases_of_a_start_are_in_order() -> None:
    phases = {"weights": 2.0, "import": 1.0}
    lines = [f'preheat_cold_start_seconds{{phase="{phase}"}} {seconds}' for phase, seconds in phases.items()]
    MetricsHandler.status, MetricsHandler.page = 200, "\n".join(["other 3", *lines])
    with HttpServer(MetricsHandler) as server:
        assert [*cold_start_phases(f"http://127.0.0.1:{server.port}").items()] == [*phases.items()]
