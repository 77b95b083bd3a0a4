"""A real server whose batches are divided among two processes."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from engine_builder.local_server.server import Layout, Server
from engine_builder.stores.store import WritableStore
from tests.support.images import largest_difference, pixels
from tests.support.predictions import PREDICT_PATH, http_client
from tests.support.waiting import eventually
from tests.support.workers import log_of, started

REQUEST = {"prompt": "a red circle on a blue background", "seed": 3, "num_inference_steps": 6, "output_format": "png"}


def child_pids(pid: int) -> list[int]:
    """Return the processes that run a share of the batches of a server process."""
    children = psutil.Process(pid).children()
    return [child.pid for child in children if "model.ranks.follower" in " ".join(child.cmdline())]


@pytest.fixture
def divided(layout: Layout, store: WritableStore, release: str, tmp_path: Path) -> Iterator[Server]:
    """A server whose batches are divided among two processes."""
    with started(layout, store, release, tmp_path, workers=1, gpus_per_image=2) as running:
        yield running


@pytest.mark.full
def test_a_server_divides_its_batches_and_ends_with_a_rank(server: Server, divided: Server) -> None:
    with http_client(server) as one, http_client(divided) as two:
        pictures = [
            pixels(client.post(PREDICT_PATH, json=REQUEST).json()["images"][0]["data"]) for client in (one, two)
        ]
        assert largest_difference(*pictures) <= 1
        [rank] = child_pids(divided.pid)
        with two.stream("POST", PREDICT_PATH, json=REQUEST | {"num_inference_steps": 100, "stream": True}) as events:
            lines = events.iter_lines()
            next(lines)
            os.kill(rank, signal.SIGKILL)
            assert "being replaced" in list(lines)[-1]
    eventually(lambda: not divided.running, "the end of the server", 30)
    assert "device_failed" in log_of(divided)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_ends_with_its_server(divided: Server, number: signal.Signals) -> None:
    [rank] = child_pids(divided.pid)
    os.kill(divided.pid, number)
    eventually(lambda: not divided.running, "the end of the server", 30)
    eventually(lambda: not Path(f"/proc/{rank}").exists(), "the end of the rank", 30)
    assert "being replaced" not in log_of(divided)
