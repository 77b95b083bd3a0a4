"""Real servers with two workers."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine_builder.stores.store import WritableStore
from preheat.local_server.server import Layout, Server
from tests.conftest import READY_SECONDS
from tests.support.layouts import configured
from tests.support.processes import children_that_run

STUCK_SECONDS = 6


def worker_pids(server: Server) -> list[int]:
    """Return the processes of a server's workers."""
    return [child.pid for child in children_that_run("model.workers.process", server.pid)]


@contextmanager
def started(layout: Layout, store: WritableStore, release: str, folder: Path, **settings: Any) -> Iterator[Server]:
    """Run a server with two workers, whose files are in `folder`. `settings` replace those of the deployment."""
    # Declared secrets, as in the shipped configs: Truss's mapping cannot be sent to another process.
    config = layout.config | {"secrets": {"aws_access_key_id": None, "aws_secret_access_key": None}}
    limits = {"stuck_seconds": STUCK_SECONDS, "max_queue": 16}
    own = configured(replace(layout, config=config), folder, **{"workers": 2, "limits": limits} | settings)
    environment = {"PREHEAT_STORE": store.url, "PREHEAT_RELEASE": release}
    with Server(own, environment=environment, log=folder / "server.log") as running:
        running.wait_ready(READY_SECONDS)
        yield running


def log_of(server: Server) -> str:
    return (server.layout.root.parent / "server.log").read_text()


def serving(server: Server) -> list[int]:
    """Return the processes of the workers that have reported to be ready."""
    ready = {int(pid) for pid in re.findall(r"worker_ready\W.*?pid\D+(\d+)", log_of(server))}
    return [pid for pid in worker_pids(server) if pid in ready]
