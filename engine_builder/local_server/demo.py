"""From a model folder to a picture, the whole way: build, publish, real server, HTTP, file. What `make demo` runs."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from engine_builder.local_server.client import (
    CallFailed,
    generate,
    save_images,
)
from engine_builder.local_server.server import (
    Server,
    build_context,
    lay_out,
)


@dataclass(frozen=True)
class Picture:
    """What a request to a fresh server gave. Times in seconds and milliseconds as the server reports them."""

    paths: list[Path]
    response: dict[str, Any]
    cold_start: dict[str, float]
    ready_seconds: float


@contextmanager
def serving(
    root: Path, config: Path, work: Path, store: str, release: str, port: int | None = None, log: Path | None = None
) -> Iterator[Server]:
    """The real Truss server on 127.0.0.1, from a Docker context of `root`, serving one release.

    `work` is a folder of ours for the context and the image's layout. Raises ServerFailed.
    """
    layout = lay_out(build_context(root, config, work), work / "image")
    environment = {"PREHEAT_STORE": store, "PREHEAT_RELEASE": release}
    with Server(layout, environment=environment, port=port, log=log) as server:
        yield server


def draw_once(
    server: Server,
    request: dict[str, Any],
    out: Path,
    timeout: float,
    progress: Callable[[dict[str, Any]], None] | None = None,
) -> Picture:
    """Wait for a starting server, send it one request, save the pictures. `progress`: see `calling.generate`."""
    began = time.perf_counter()
    server.wait_ready(timeout)
    ready = time.perf_counter() - began
    response = generate(server.url, request, timeout, progress)
    return Picture(save_images(response, out), response, cold_start_phases(server.url), ready)


def cold_start_phases(url: str) -> dict[str, float]:
    """Seconds by phase, from the server's metrics, in the order the phases happened."""
    try:
        text = httpx.get(f"{url}/metrics/", trust_env=False, timeout=10).text
    except httpx.TransportError as error:
        raise CallFailed(f"{url}/metrics/ cannot be read: {error}.") from error
    found = re.findall(r'^preheat_cold_start_seconds\{phase="([a-z_]+)"\} ([0-9.e+-]+)$', text, re.MULTILINE)
    return {phase: float(seconds) for phase, seconds in found}
