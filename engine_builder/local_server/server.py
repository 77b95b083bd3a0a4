"""The real Truss server of this repository, on this machine and without docker.

`build_context` makes the Docker context that `truss push` and the platform would make, `lay_out` copies it
into a folder as the Dockerfile would copy it into an image, and `Server` runs the server of that layout in a
process of its own. Only what reaches the image is importable there: `import engine_builder` fails, as it
would in production. Promises that the server listens on 127.0.0.1 only and outlives neither `stop` nor the
process that started it. For Linux, as the images are. Knows nothing of pictures, requests or releases.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from model.errors import PreheatError

# What a container would get from its host; everything else of our environment stays out of the server.
_PASSED_ON = re.compile(
    r"(PREHEAT|TRUSS_SECRET|AWS|CUDA|NVIDIA|LC)_.*"
    r"|PATH|LD_LIBRARY_PATH|LANG|TZ|TMPDIR|SSL_CERT_FILE|NO_PROXY|no_proxy"
)
_POLL_SECONDS = 0.05
_LAST_LINES = 8
_TRACE = "Traceback (most recent call last):\n"
_LAUNCHER = Path(__file__).with_name("launcher.py")


class ServerFailed(PreheatError):
    """The server ended or was not ready in time. The message begins with the model's own sentence."""


@dataclass(frozen=True)
class Layout:
    """Where the parts of the image lie on this machine."""

    root: Path
    """Stands for the image's `/`."""
    app: Path
    """The image's /app: server, model/, data/ and the expanded config.yaml."""
    packages: Path
    """The image's /packages."""
    config: dict[str, Any]
    """The expanded config.yaml."""


def build_context(root: Path, config: Path, out: Path) -> Path:
    """Make the Docker context that pushing `root` with `config` gives. Returns its folder, under `out`.

    Runs truss's own code for both halves, the upload and the build. The build reads no config but config.yaml
    at the root of what was uploaded, so it works on an unpacked upload and never on the repository itself.
    """
    upload, context = out / "upload", out / "context"
    for folder in (upload, context):
        shutil.rmtree(folder, ignore_errors=True)
    with _without_warnings():
        # Importing truss takes most of a second, so only where it is used.
        from truss.remote.baseten.core import archive_dir  # type: ignore[import-untyped]
        from truss.truss_handle.build import load  # type: ignore[import-untyped]

        with archive_dir(root, config_yaml_override=config.read_bytes()) as archive:
            with tarfile.open(archive.name) as tar:
                # Our own archive: no filter, which Debian 12's Python 3.11.2 does not have.
                tar.extractall(upload)
        load(upload).docker_build_setup(context)
    return context


def lay_out(context: Path, fs_root: Path) -> Layout:
    """Copy a Docker context into `fs_root` (emptied first) as its Dockerfile says. Runs no command of it."""
    app, packages = fs_root / "app", fs_root / "packages"
    shutil.rmtree(fs_root, ignore_errors=True)
    for folder in (app, packages):
        folder.mkdir(parents=True)
    with _without_warnings():
        from truss.base.truss_config import TrussConfig  # type: ignore[import-untyped]
        from truss.contexts.local_loader import docker_build_emulator  # type: ignore[import-untyped]

        docker_build_emulator.DockerBuildEmulator(context / "Dockerfile", context).run(fs_root)
        config = TrussConfig.from_yaml(app / "config.yaml").to_dict()
    return Layout(root=fs_root, app=app, packages=packages, config=config)


def with_metadata(layout: Layout, metadata: Mapping[str, Any]) -> Layout:
    """The layout with `metadata` for its config's model_metadata, written into its config.yaml."""
    config = {**layout.config, "model_metadata": dict(metadata)}
    (layout.app / "config.yaml").write_text(json.dumps(config, indent=1) + "\n")  # JSON is YAML
    return replace(layout, config=config)


class Server:
    """One server process for one layout.

        with Server(layout, environment={"PREHEAT_STORE": "file:///..."}) as server:
            server.wait_ready(timeout=60)
            httpx.post(f"{server.url}/v1/models/model:predict", json=...)

    `environment` comes before the variables passed on from this process (PREHEAT_*, TRUSS_SECRET_*, AWS_* and
    what a container's host sets), and those before the config's. `log` is kept; without it the log is gone
    after `stop`.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        environment: Mapping[str, str] | None = None,
        port: int | None = None,
        log: Path | None = None,
    ) -> None:
        self.layout = layout
        self.port = port if port is not None else _free_port()
        self._environment = dict(environment or {})
        self._kept_log = log
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._log: _Log | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._started().pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._exit_code() is None

    def start(self) -> Self:
        """Start the process and return at once; `wait_ready` waits for it."""
        if self._process is not None:
            raise ServerFailed("This server was started already; stop it first.")
        if not _is_free(self.port):
            # Else the other server's answers would pass for this one's.
            raise ServerFailed(f"Port {self.port} of 127.0.0.1 is taken: name another, or leave it out.")
        self._scratch = tempfile.TemporaryDirectory(prefix="preheat-server-", ignore_cleanup_errors=True)
        home = Path(self._scratch.name)
        self._log = _Log(self._kept_log or home / "server.log")
        with self._log.path.open("wb") as log:
            self._process = subprocess.Popen(
                # -S: no .pth files, hence no editable installs. -P: not the launcher's own folder. -u: the
                # log is complete even if the process is killed.
                [sys.executable, "-S", "-P", "-u", str(_LAUNCHER), _import_path(self.layout)],
                cwd=self.layout.app,
                env=self._variables(home),
                stdin=subprocess.PIPE,  # never written to: its closing tells the server that we are gone
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a group of its own, so that stop reaches what the model has spawned
            )
        return self

    def wait_ready(self, timeout: float, progress: Callable[[str], None] | None = None) -> None:
        """Return once the model serves. `progress` is called with each message the server logs meanwhile.

        Raises ServerFailed as soon as the process ends, however it ends, and after `timeout` seconds, when
        the process is stopped.
        """
        log = self._read_log()
        end = time.monotonic() + timeout

        def tell() -> None:
            for message in log.new_messages():
                if progress is not None:
                    progress(message)

        # Not through a proxy, whatever the environment says: this is our own machine.
        with httpx.Client(trust_env=False, timeout=5.0) as client:
            while True:
                # First whether it lives, then what it said, so that a dead process's last words are read.
                exit_code = self._exit_code()
                tell()
                if exit_code is not None:
                    raise self._failed(f"The server ended before it was ready ({_how(exit_code)}).")
                if time.monotonic() > end:
                    raise self._failed(f"The server was not ready after {timeout:g} s.")
                try:
                    if client.get(f"{self.url}/v1/models/model").status_code == 200:
                        tell()  # what was logged since, "Completed" last of all
                        return
                except httpx.TransportError:
                    pass  # not listening yet, or ending: the process's state says which
                time.sleep(_POLL_SECONDS)

    def wait(self) -> int:
        """Block until the server ends by itself. Returns its exit code; negative: what signal ended it."""
        exit_code = self._exit_code(block=True)
        assert exit_code is not None
        return exit_code

    def stop(self, grace: float = 10.0) -> None:
        """End the process and what it has spawned. Requests in flight have `grace` seconds to finish."""
        self._end(grace)
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerFailed("The server was not started.")
        return self._process

    def _read_log(self) -> "_Log":
        assert self._log is not None
        return self._log

    def _variables(self, home: Path) -> dict[str, str]:
        ours = {name: value for name, value in os.environ.items() if _PASSED_ON.fullmatch(name)}
        config: dict[str, str] = self.layout.config.get("environment_variables") or {}
        return {
            **config,
            **ours,
            **self._environment,
            "HOME": str(home),
            "INFERENCE_SERVER_PORT": str(self.port),
        }

    def _exit_code(self, block: bool = False) -> int | None:
        """How the process ended, None while it runs. Does not reap it, so that stop can name its group."""
        options = os.WEXITED | os.WNOWAIT | (0 if block else os.WNOHANG)
        ended = os.waitid(os.P_PID, self._started().pid, options)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def _end(self, grace: float) -> None:
        process = self._process
        if process is None:
            return
        os.kill(process.pid, signal.SIGTERM)
        end = time.monotonic() + grace
        while self._exit_code() is None and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdin is not None
        process.stdin.close()
        self._process = None

    def _failed(self, what: str) -> ServerFailed:
        log = self._read_log()
        self._end(grace=1.0)
        log.new_messages()  # before stop removes a log that nobody asked to keep
        self.stop()
        said = [f"  {message}" for message in log.until_the_failure()[-_LAST_LINES:]]
        kept = [f"The whole log: {self._kept_log}"] if self._kept_log is not None else []
        return ServerFailed("\n".join([*filter(None, [log.reason()]), what, *said, *kept]))


def _without_warnings() -> "warnings.catch_warnings[None]":
    """Around truss: what it and its dependencies warn of (each other's deprecations) nobody here can mend."""
    return warnings.catch_warnings(action="ignore")


def _import_path(layout: Layout) -> str:
    """The server's sys.path: the image's folders, and this interpreter's less what holds this repository."""
    ours = [os.path.abspath(entry) for entry in sys.path if not (Path(entry) / "engine_builder").is_dir()]
    return os.pathsep.join([str(layout.app), *ours, str(layout.packages)])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As uvicorn does: the port of a server that has just ended is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _how(exit_code: int) -> str:
    if exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"


class _Log:
    """Reads the server's log while it is written: JSON records from its logger, bare text from all else."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.messages: list[str] = []
        self._trace = ""
        self._error = ""
        self._failed_at: int | None = None  # how many messages there were, that of the last exception included
        self._offset = 0

    def new_messages(self) -> list[str]:
        """The messages of the complete lines written since the last call. Keeps them."""
        known = len(self.messages)
        for line in self._new_lines():
            self._read(line)
        return self.messages[known:]

    def until_the_failure(self) -> list[str]:
        """The messages up to the last exception that was logged: a server that shuts down says more after it."""
        return self.messages[: self._failed_at]

    def reason(self) -> str:
        """The words of the last exception logged or printed, else of the last error logged, else ""."""
        printed = "\n".join(self.messages)
        if self._trace or _TRACE in printed:
            return exception_sentence(self._trace or printed)
        return self._error

    def _new_lines(self) -> Iterator[str]:
        try:
            with self.path.open("rb") as log:
                log.seek(self._offset)
                for line in log:
                    if not line.endswith(b"\n"):
                        return
                    self._offset += len(line)
                    yield line.decode(errors="replace").rstrip()
        except FileNotFoundError:
            return

    def _read(self, line: str) -> None:
        try:
            record = json.loads(line)
            level, message = record["levelname"], record["message"]
        except (ValueError, KeyError, TypeError):
            if line:
                self.messages.append(line)
            return
        self.messages.append(message)
        if level in ("ERROR", "CRITICAL"):
            self._error = message
        if record.get("exc_info"):
            self._trace, self._failed_at = record["exc_info"], len(self.messages)


def exception_sentence(trace: str) -> str:
    """The exception's own words at the end of a printed traceback.

    The class is left out where the message was written for people (model.errors) and kept elsewhere.

    >>> exception_sentence('Traceback (most recent call last):\\n  File "x.py", line 1\\nKeyError: 3')
    'KeyError: 3'
    """
    lines = trace.rpartition(_TRACE)[2].splitlines()
    while lines and lines[0].startswith(" "):
        lines.pop(0)
    return re.sub(r"^model\.errors\.\w+: ", "", "\n".join(lines)).strip()
