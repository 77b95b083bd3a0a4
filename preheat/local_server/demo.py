"""Serve a release with the real Truss server on this machine, and read its cold start from its metrics."""

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from engine_builder.error_text import cause_of
from gateway.listening import listen
from preheat.local_server.client import CallFailed
from preheat.local_server.server import Server, ServerFailed, build_context, check_config, lay_out
from preheat.local_server.server_folder import server_folder

_PHASE = re.compile(r'preheat_cold_start_seconds\{phase="([a-z0-9_]+)"\}')


@contextmanager
def serving(
    root: Path,
    config: Path,
    work: Path,
    store: str,
    releases: Sequence[str],
    port: int | None = None,
    host: str = "127.0.0.1",
    kept_log: Path | None = None,
    loras: Sequence[str] = (),
) -> Iterator[Server]:
    """Run the real Truss server from a Docker context of `root`, serving releases. `host`: address to listen on.

    `loras`: adapters, in place of those of the config.

    The context, the image's files and the log are written to a new folder under `work`. At the end the log is
    copied to the file `kept_log`, and the folder is deleted. Raises ConfigError, ServerFailed or FolderFailed.
    """
    check_config(config)  # before the folder is made, so that a refused config leaves none
    listen(host, port or 0, ServerFailed).close()  # a port that is taken is refused at once
    with server_folder(work) as folder:
        layout = lay_out(build_context(root, config, folder.path), folder.path / "image")
        environment = release_variables(store, releases)
        if loras:
            environment["PREHEAT_LORAS"] = ",".join(loras)
        log = folder.path / "server.log"
        try:
            with Server(
                layout, environment=environment, host=host, port=port, log=log, inherited=(folder.lock,)
            ) as server:
                yield server
        finally:
            if kept_log is not None and log.exists():
                kept_log.parent.mkdir(parents=True, exist_ok=True)
                # Copied, because an error names the log in the folder. Then moved, because two servers may end at once.
                shutil.copyfile(log, folder.path / "kept.log")
                os.replace(folder.path / "kept.log", kept_log)


def release_variables(store: str, releases: Sequence[str]) -> dict[str, str]:
    """Return the variables with which a server serves these releases. An empty one hides a variable of the machine."""
    several = len(releases) > 1  # some settings of a config are for one release only
    return {
        "PREHEAT_STORE": store,
        "PREHEAT_RELEASE": "" if several else releases[0],
        "PREHEAT_RELEASES": ",".join(releases) if several else "",
    }


def cold_start_phases(url: str) -> dict[str, float]:
    """Return the seconds of each phase from the server's metrics, in the order of the phases. Raises CallFailed."""
    matches = ((_PHASE.fullmatch(name), value) for name, value in read_metrics(url).items())
    return {match[1]: seconds for match, seconds in matches if match}


def read_metrics(url: str) -> dict[str, float]:
    """Return the server's metrics by name with labels, as they are written, in their order. Raises CallFailed."""
    try:
        answer = httpx.get(f"{url}/metrics/", trust_env=False, timeout=10).raise_for_status()
        lines = [line.rpartition(" ") for line in answer.text.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}
    except (httpx.HTTPError, ValueError) as error:
        raise CallFailed(f"{url}/metrics/ cannot be read: {cause_of(error)}.") from error
