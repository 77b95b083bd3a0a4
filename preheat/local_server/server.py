"""Run the real Truss server of this repository on this machine, without Docker.

`build_context` makes the Docker context that `truss push` and the platform make. `lay_out` copies it into a folder as
the Dockerfile copies it into an image. `Server` runs the server of that folder in its own process. It can
import only modules that reach the image: `import engine_builder` fails, as in production. The server listens on
127.0.0.1 unless another address is given. It ends with `stop`, or with the process that started it. For Linux only.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import httpx

from engine_builder.truss_config import read_truss_config
from gateway.endpoint import READY_PATH
from gateway.listening import listen
from model.errors import ConfigError, PreheatError
from model.settings import read_settings
from preheat.local_server.server_log import ServerLog

# Variables that a container gets from its host. The server gets no other variables of this environment.
_PASSED_VARIABLES = re.compile(
    r"(PREHEAT|TRUSS_SECRET|AWS|CUDA|NVIDIA|LC)_.*"
    r"|PATH|LD_LIBRARY_PATH|LANG|TZ|TMPDIR|SSL_CERT_FILE|NO_PROXY|no_proxy"
)
_POLL_SECONDS = 0.05
_EXIT_SECONDS = 10.0  # after the grace period, for the answers and the end of the process
_ERROR_LOG_LINES = 8
_REACHABLE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
"""An address that stands for all of this machine -> one that a client can name."""
_LAUNCHER = Path(__file__).with_name("launcher.py")


class ServerFailed(PreheatError):
    """The server ended or was not ready in time. The message begins with the error that the server logged."""


@dataclass(frozen=True)
class Layout:
    """The files of the image on this machine.

    `root` is the image's `/`, `app` is /app (server, model/, data/ and the expanded config.yaml), `packages`
    is /packages. `config` is the expanded config.yaml.
    """

    root: Path
    app: Path
    packages: Path
    config: dict[str, Any]


def build_context(root: Path, config: Path, out: Path) -> Path:
    """Make the Docker context that pushing `root` with `config` makes. Returns its folder, which is under `out`.

    Runs truss's own code for upload and build. The build reads only the config.yaml at the root of the upload, so it
    works on an unpacked copy, never on the repository itself. Raises ConfigError.
    """
    check_config(config)
    upload, context = out / "upload", out / "context"
    for folder in (upload, context):
        shutil.rmtree(folder, ignore_errors=True)
    with warnings.catch_warnings(action="ignore"):  # truss and its dependencies warn about each other
        # Imported here, because the import takes most of a second.
        from truss.remote.baseten.core import archive_dir  # type: ignore[import-untyped]
        from truss.truss_handle.build import load  # type: ignore[import-untyped]

        with archive_dir(root, config_yaml_override=config.read_bytes()) as archive:
            with tarfile.open(archive.name) as tar:
                # No filter, because Debian 12's Python 3.11.2 has none. The archive is trusted.
                tar.extractall(upload)
        load(upload).docker_build_setup(context)
    return context


def check_config(config: Path) -> None:
    """Raise ConfigError if a config.yaml cannot be read, or is not valid for truss or for the server."""
    metadata = read_truss_config(config).to_dict()["model_metadata"]
    read_settings((metadata or {}).get("preheat"), variables=())


def lay_out(context: Path, fs_root: Path) -> Layout:
    """Empty `fs_root` and copy a Docker context into it as the Dockerfile does. Runs none of its commands."""
    app, packages = fs_root / "app", fs_root / "packages"
    shutil.rmtree(fs_root, ignore_errors=True)
    for folder in (app, packages):
        folder.mkdir(parents=True)
    with warnings.catch_warnings(action="ignore"):
        from truss.base.truss_config import TrussConfig  # type: ignore[import-untyped]
        from truss.contexts.local_loader import docker_build_emulator  # type: ignore[import-untyped]

        docker_build_emulator.DockerBuildEmulator(context / "Dockerfile", context).run(fs_root)
        config = TrussConfig.from_yaml(app / "config.yaml").to_dict()
    return Layout(root=fs_root, app=app, packages=packages, config=config)


def with_settings(layout: Layout, **settings: Any) -> Layout:
    """Replace settings of model_metadata.preheat in the layout's config.yaml. Returns the changed layout."""
    metadata = layout.config["model_metadata"]
    config = layout.config | {"model_metadata": metadata | {"preheat": metadata["preheat"] | settings}}
    (layout.app / "config.yaml").write_text(json.dumps(config, indent=1) + "\n")  # JSON is YAML
    return replace(layout, config=config)


class Server:
    """One server process for a layout.

        with Server(layout, environment={"PREHEAT_STORE": "file:///..."}) as server:
            server.wait_ready(timeout=60)
            httpx.post(f"{server.url}/v1/models/model:predict", json=...)

    The server's variables come from the config, from this process and from `environment`; later ones override earlier
    ones. From this process come PREHEAT_*, TRUSS_SECRET_*, AWS_* and those that a container's host sets. `host`: the
    address to listen on. `log`: file of the log; without it `stop` deletes the log. `inherited`: file descriptors that
    stay open in the process, for example a lock.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        environment: Mapping[str, str] | None = None,
        host: str = "127.0.0.1",
        port: int | None = None,
        log: Path | None = None,
        inherited: Sequence[int] = (),
    ) -> None:
        self.layout = layout
        self.host = host
        self._inherited = tuple(inherited)
        self.port = port or 0
        self._environment = dict(environment or {})
        self._log_path = log
        self._grace_seconds = 0.0
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._log: ServerLog | None = None

    @property
    def url(self) -> str:
        """The address of the server for this machine, which an address such as 0.0.0.0 includes."""
        host = _REACHABLE.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def pid(self) -> int:
        return self._require_process().pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._exit_code() is None

    def start(self) -> Self:
        """Start the process and return at once. Raises ServerFailed if the address cannot be used."""
        if self._process is not None:
            raise ServerFailed("The server was started already.", "Stop it first.")
        # The process inherits the listening socket, so no other server can take the port meanwhile.
        with listen(self.host, self.port, ServerFailed) as listener:
            self.port = listener.getsockname()[1]
            self._start(listener.fileno())
        return self

    def _start(self, listener: int) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="preheat-server-", ignore_cleanup_errors=True)
        home = Path(self._scratch.name)
        variables = self._variables(home)
        with suppress(ConfigError):  # the server refuses to start
            section = (self.layout.config.get("model_metadata") or {}).get("preheat")
            self._grace_seconds = read_settings(section, environment=variables).grace_seconds
        self._log = ServerLog(self._log_path or home / "server.log")
        with self._log.path.open("wb") as log:
            self._process = subprocess.Popen(
                # -S: no .pth files, so no editable installs. -P: not the launcher's own folder. -u: the log is complete
                # even if the process is killed.
                [sys.executable, "-S", "-P", "-u", str(_LAUNCHER), str(listener), _import_path(self.layout)],
                cwd=self.layout.app,
                env=variables,
                stdin=subprocess.PIPE,  # never written; it closes with this process, and the server then ends
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(listener, *self._inherited),
                start_new_session=True,  # its own group, so that `stop` also ends the model's child processes
            )

    def wait_ready(self, timeout: float, progress: Callable[[str], None] | None = None) -> None:
        """Return when the model is loaded. `progress` is called with each message that the server logs until then.

        Raises ServerFailed if the process ends, or after `timeout` seconds. The process is stopped in both cases.
        """
        log = self._require_log()
        deadline = time.monotonic() + timeout

        def report() -> None:
            for message in log.new_messages():
                if progress is not None:
                    progress(message)

        # trust_env=False: a proxy of the environment cannot reach this machine's loopback address.
        # The port accepts connections before the server reads them, so a short timeout keeps `progress` going.
        with httpx.Client(trust_env=False, timeout=1.0) as client:
            while True:
                # Read the process's state before its log, so that an ended process's log is read completely.
                exit_code = self._exit_code()
                report()
                if exit_code is not None:
                    raise self._failed(f"The server ended before it was ready ({_describe_exit(exit_code)}).")
                if time.monotonic() > deadline:
                    raise self._failed(f"The server was not ready after {timeout:g} s.")
                try:
                    if client.get(self.url + READY_PATH).status_code == 200:
                        report()  # messages logged since the last check
                        return
                except httpx.TransportError:
                    pass  # the server does not read yet, or is ending, which the next check finds
                time.sleep(_POLL_SECONDS)

    def wait(self) -> int:
        """Wait until the server ends by itself. Returns its exit code, or the negative number of a signal."""
        exit_code = self._exit_code(block=True)
        assert exit_code is not None
        return exit_code

    def stop(self) -> None:
        """End the process and its children. Accepted requests finish within the server's own grace period.

        KeyboardInterrupt ends the grace period: the server answers the remaining requests with status 503. A second one
        kills the server, and is raised.
        """
        try:
            self._end(self._grace_seconds + _EXIT_SECONDS)
        finally:
            if self._scratch is not None:
                self._scratch.cleanup()
                self._scratch = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _require_process(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerFailed("The server was not started.")
        return self._process

    def _require_log(self) -> ServerLog:
        assert self._log is not None
        return self._log

    def _variables(self, home: Path) -> dict[str, str]:
        passed = {name: value for name, value in os.environ.items() if _PASSED_VARIABLES.fullmatch(name)}
        config: dict[str, str] = self.layout.config.get("environment_variables") or {}
        return {**config, **passed, **self._environment, "HOME": str(home), "INFERENCE_SERVER_PORT": str(self.port)}

    def _exit_code(self, block: bool = False) -> int | None:
        """Return the exit code, or None while the process runs. Does not reap it, because `stop` signals its group."""
        options = os.WEXITED | os.WNOWAIT | (0 if block else os.WNOHANG)
        ended = os.waitid(os.P_PID, self._require_process().pid, options)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def _end(self, grace: float) -> None:
        process = self._process
        if process is None:
            return
        try:
            os.kill(process.pid, signal.SIGTERM)
            self._wait_exit(grace)
        except KeyboardInterrupt:
            os.kill(process.pid, signal.SIGINT)
            self._wait_exit(_EXIT_SECONDS)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
            self._process = None

    def _wait_exit(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._exit_code() is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _failed(self, event: str) -> ServerFailed:
        """Stop the server. Returns an error with the logged reason, `event` and the last messages."""
        log = self._require_log()
        self._end(grace=1.0)
        log.new_messages()  # before `stop` removes the log
        self.stop()
        log_path = [f"The whole log: {self._log_path}"] if self._log_path is not None else []
        if refusal := log.refusal():
            return ServerFailed("\n".join([f"The server refused to start. {refusal}", *log_path]))
        logged = [f"  {message}" for message in log.until_failure()[-_ERROR_LOG_LINES:]]
        return ServerFailed("\n".join([*filter(None, [log.reason()]), event, *logged, *log_path]))


def _import_path(layout: Layout) -> str:
    """Return the server's sys.path: the image's folders, and this interpreter's without this repository."""
    entries = [os.path.abspath(entry) for entry in sys.path if not (Path(entry) / "engine_builder").is_dir()]
    return os.pathsep.join([str(layout.app), *entries, str(layout.packages)])


def _describe_exit(exit_code: int) -> str:
    return f"exit code {exit_code}" if exit_code >= 0 else f"killed by {signal.Signals(-exit_code).name}"
