"""HAProxy with deploy/haproxy.cfg in front of two servers, and its commands.

Without HAProxy the tests are skipped, or fail if PREHEAT_REQUIRE_HAPROXY is set.
"""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.optional_tools import skip_without
from tests.support.ports import free_port
from tests.support.repository import REPOSITORY
from tests.support.waiting import eventually

CONFIG = REPOSITORY / "deploy" / "haproxy.cfg"
NAMES = ("first", "second")  # of the servers in CONFIG


def haproxy() -> str:
    """Return the program, or skip the test. Debian has it in a folder that is not on everyone's PATH."""
    program = shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        skip_without("HAPROXY", "HAProxy is not installed: apt-get install haproxy")
    return program


class Balancer:
    """A running HAProxy. `url`: where clients send requests."""

    def __init__(self, url: str, control: Path) -> None:
        self.url = url
        self._control = control

    def command(self, text: str) -> str:
        """Return the answer of a command, as `socat` on the socket gives it."""
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(self._control))
            client.sendall(f"{text}\n".encode())
            return b"".join(iter(lambda: client.recv(65536), b"")).decode()

    def statistic(self, name: str, server: str) -> str:
        """Return a column of `show stat`: `status` (UP, DOWN, DRAIN), or `scur`, the requests in flight."""
        header, *rows = self.command("show stat").removeprefix("# ").strip().splitlines()
        columns = header.split(",")
        found = [dict(zip(columns, row.split(","), strict=False)) for row in rows]
        [row] = [row for row in found if (row["pxname"], row["svname"]) == ("preheat", server)]
        return row[name]

    def wait_up(self, server: str) -> None:
        eventually(lambda: self.statistic("status", server) == "UP", f"the balancer finds {server} ready")


@contextmanager
def balancer(folder: Path, ports: Sequence[int]) -> Iterator[Balancer]:
    """Run HAProxy in front of servers on two ports of 127.0.0.1."""
    address, control = f"127.0.0.1:{free_port()}", folder / "control"
    variables = {"PREHEAT_BALANCER_BIND": address, "PREHEAT_BALANCER_SOCKET": str(control)}
    variables |= {f"PREHEAT_SERVER_{number}": f"127.0.0.1:{port}" for number, port in enumerate(ports, start=1)}
    with (folder / "haproxy.log").open("wb") as log:
        process = subprocess.Popen([haproxy(), "-db", "-f", str(CONFIG)], env=variables, stdout=log, stderr=log)
    try:
        eventually(control.exists, "the balancer has started")
        yield Balancer(f"http://{address}", control)
    finally:
        process.terminate()
        process.wait()
