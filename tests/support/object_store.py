"""A real S3-compatible store on this machine: Ceph's RADOS Gateway, with one monitor and one disk in memory.

All daemons listen on 127.0.0.1 and write to one folder. Only the gateway authenticates its clients, as S3 does. The
cluster behind it does not, so it is for tests only.
"""

import json
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, cast

import httpx

from tests.support.ports import free_ports

INSTALL = "apt-get install --no-install-recommends radosgw ceph-mon ceph-osd"
PROGRAMS = ("radosgw", "radosgw-admin", "ceph", "ceph-mon", "ceph-osd", "monmaptool", "setpriv")
ACCESS_KEY = "preheatpreheatpreheat"
SECRET_KEY = "a-secret-for-tests-that-opens-nothing-else"
PAGE_KEYS = 10  # limit of a page of a list, so that a short list has several pages
_DISK_BYTES = 16 * 2**30  # only written bytes use memory
_MAX_RESTARTS = 10  # of all daemons together, while they start
_READY_SECONDS = 120  # of one daemon, enough for any machine

_CONFIG = """\
[global]
fsid = {fsid}
mon host = v1:127.0.0.1:{mon_port}
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
ms mon client mode = crc
ms bind msgr2 = false
run dir = {folder}
admin socket = {folder}/$name.asok
pid file =
log file = {folder}/$name.log
mon cluster log file = {folder}/cluster.log
crash dir = {folder}/crash
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon allow pool delete = true
mon warn on pool no redundancy = false
mon data = {folder}/mon
mon data avail warn = 1
mon data avail crit = 0
paxos propose interval = 0.02
paxos min wait = 0.01
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = {disk}
osd max object name len = 1024
[client.rgw]
rgw data = {folder}/rgw
rgw frontends = beast endpoint=127.0.0.1:{rgw_port}
rgw thread pool size = 64
rgw enable usage log = false
rgw enable ops log = false
rgw gc obj min wait = 60
rgw max listing results = {page}
"""


def missing_programs() -> list[str]:
    """Return the programs of Ceph that are not installed."""
    return [program for program in PROGRAMS if shutil.which(program) is None]


class ObjectStore:
    """Ceph RADOS Gateway in `folder`, as a context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._last_error = ""
        self._restarts = 0
        self._mon_port, self._rgw_port = free_ports(2)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._rgw_port}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that make boto3 use this store."""
        return credentials() | {"AWS_ENDPOINT_URL": self.url}

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _start(self) -> None:
        folder, fsid = self._folder, str(uuid.uuid4())
        for name in ("mon", "osd", "rgw", "crash"):
            (folder / name).mkdir(parents=True)
        self._config = folder / "ceph.conf"
        self._config.write_text(
            _CONFIG.format(
                fsid=fsid,
                folder=folder,
                mon_port=self._mon_port,
                rgw_port=self._rgw_port,
                disk=_DISK_BYTES,
                page=PAGE_KEYS,
            )  # fmt: skip
        )
        monmap, address = folder / "monmap", f"[v1:127.0.0.1:{self._mon_port}]"
        self._call("monmaptool", "--create", "--addv", "a", address, "--fsid", fsid, str(monmap))
        self._call("ceph-mon", "--mkfs", "-i", "a", "--monmap", str(monmap))
        self._spawn("ceph-mon", "-i", "a")
        osd = str(uuid.uuid4())
        self._ceph("osd", "new", osd)
        self._call("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._spawn("ceph-osd", "-i", "0")
        self._wait("the disk", lambda: json.loads(self._ceph("osd", "stat", "-f", "json"))["num_up_osds"] == 1)
        self._call_again(
            "radosgw-admin", "-n", "client.rgw", "user", "create", "--uid", "preheat", "--display-name", "preheat",
            "--access-key", ACCESS_KEY, "--secret", SECRET_KEY,
        )  # fmt: skip
        self._spawn("radosgw", "-n", "client.rgw")
        self._wait("the gateway", self._gateway_answers)

    def _stop(self) -> None:
        """Stop the daemons in reverse order, because each waits for those that were started before it."""
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()

    def _gateway_answers(self) -> bool:
        try:
            return httpx.get(self.url, trust_env=False, timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def _ceph(self, *arguments: str) -> str:
        return self._call_again("ceph", "--connect-timeout", "30", *arguments)

    def _call_again(self, *command: str) -> str:
        """Repeat a command until the monitor is ready. The command must be safe to repeat."""
        output: list[str] = []

        def succeeds() -> bool:
            try:
                output.append(self._call(*command))
            except RuntimeError as error:
                self._last_error = str(error)
            return bool(output)

        self._wait(command[0], succeeds)
        return output[0]

    def _call(self, *command: str) -> str:
        result = subprocess.run([*command, "-c", str(self._config)], capture_output=True, text=True, env=_environment())
        if result.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {result.returncode}: {result.stderr[-2000:]}")
        return result.stdout

    def _spawn(self, *command: str) -> None:
        self._daemons.append(self._popen(*command))

    def _popen(self, *command: str) -> "subprocess.Popen[bytes]":
        with (self._folder / f"{command[0]}.out").open("ab") as out:
            return subprocess.Popen(
                # A killed test run must leave no daemon behind.
                ["setpriv", "--pdeathsig", "TERM", *command, "-c", str(self._config), "-f"],
                stdout=out,
                stderr=out,
                env=_environment(),
            )

    def _wait(self, what: str, ready: Callable[[], bool]) -> None:
        """Wait until `ready` returns True, and restart daemons that end before."""
        end = time.monotonic() + _READY_SECONDS
        while not ready():
            for index, daemon in enumerate(self._daemons):
                if daemon.poll() is None:
                    continue
                command = [str(word) for word in cast(list[str], daemon.args)[3:-3]]
                output = (self._folder / f"{command[0]}.out").read_text()[-2000:]
                # A daemon that contacts the monitor too early ends with "wrong fsid".
                self._restarts += 1
                if self._restarts > _MAX_RESTARTS:
                    raise RuntimeError(f"{command[0]} ended with {daemon.returncode}: {output}")
                self._daemons[index] = self._popen(*command)
            if time.monotonic() > end:
                raise RuntimeError(
                    f"{what} was not ready after {_READY_SECONDS} s ({self._last_error}): {self._folder}"
                )
            time.sleep(0.05)


def credentials() -> dict[str, str]:
    """Return environment variables with the store's credentials, which hide this machine's own."""
    return {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "NO_PROXY": "127.0.0.1",
    }


def _environment() -> dict[str, str]:
    """Return the environment without CEPH_*, which could name another cluster."""
    return {name: value for name, value in os.environ.items() if not name.startswith("CEPH_")}
