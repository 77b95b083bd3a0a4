"""Serve a release with the real Truss server on this machine, and read its cold start from its metrics."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from engine_builder.local_server.client import CallFailed
from engine_builder.local_server.server import Server, build_context, lay_out


@contextmanager
def serving(
    root: Path, config: Path, work: Path, store: str, release: str, port: int | None = None, log: Path | None = None
) -> Iterator[Server]:
    """Run the real Truss server on 127.0.0.1, from a Docker context of `root`, serving one release.

    `work` is a folder for the context and the image's files. Raises ServerFailed.
    """
    layout = lay_out(build_context(root, config, work), work / "image")
    environment = {"PREHEAT_STORE": store, "PREHEAT_RELEASE": release}
    with Server(layout, environment=environment, port=port, log=log) as server:
        yield server


def cold_start_phases(url: str) -> dict[str, float]:
    """Return the seconds of each phase from the server's metrics, in the order of the phases. Raises CallFailed."""
    try:
        text = httpx.get(f"{url}/metrics/", trust_env=False, timeout=10).text
    except httpx.TransportError as error:
        raise CallFailed(f"{url}/metrics/ cannot be read: {error}.") from error
    found = re.findall(r'^preheat_cold_start_seconds\{phase="([a-z_]+)"\} ([0-9.e+-]+)$', text, re.MULTILINE)
    return {phase: float(seconds) for phase, seconds in found}
