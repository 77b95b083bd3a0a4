"""Serve a release with the real Truss server on this machine, and read its cold start from its metrics."""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from engine_builder.local_server.client import CallFailed
from engine_builder.local_server.folders import owned_folder, owned_log
from engine_builder.local_server.server import Server, build_context, lay_out


@contextmanager
def serving(
    root: Path, config: Path, store: str, release: str, port: int | None = None, logs: Path | None = None
) -> Iterator[Server]:
    """Run the real Truss server on 127.0.0.1, from a Docker context of `root`, serving one release.

    Its files are in a folder of its own under `root`/.preheat/servers, which is deleted in the end. With a folder
    `logs` the log is kept there. Raises ServerFailed and FolderUnusable.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(owned_folder(root / ".preheat" / "servers"))
        log = stack.enter_context(owned_log(logs)) if logs is not None else None
        layout = lay_out(build_context(root, config, folder.path), folder.path / "image")
        server = Server(
            layout,
            environment={"PREHEAT_STORE": store, "PREHEAT_RELEASE": release},
            port=port,
            log=log.path if log else None,
            home=folder.path / "home",
            inherited=[owned.lock for owned in (folder, log) if owned is not None],
        )
        yield stack.enter_context(server)


def cold_start_phases(url: str) -> dict[str, float]:
    """Return the seconds of each phase from the server's metrics, in the order of the phases. Raises CallFailed."""
    try:
        text = httpx.get(f"{url}/metrics/", trust_env=False, timeout=10).text
    except httpx.TransportError as error:
        raise CallFailed(f"{url}/metrics/ cannot be read: {error}.") from error
    found = re.findall(r'^preheat_cold_start_seconds\{phase="([a-z_]+)"\} ([0-9.e+-]+)$', text, re.MULTILINE)
    return {phase: float(seconds) for phase, seconds in found}
