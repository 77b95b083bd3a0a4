"""Triton Inference Server for tests: its binary from the wheel of nvidia-pytriton, and a process that serves a folder.

The wheel needs NumPy below 2, so it is unpacked into `.preheat` and not installed. The models run in an environment
that has this repository and the packages of this Python.
"""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import venv
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
from typer.testing import CliRunner

from preheat.main import app
from tests.support.optional_tools import skip_without
from tests.support.ports import free_ports
from tests.support.repository import REPOSITORY

VERSION = "2.51.0"
_WHEEL = "nvidia-pytriton==0.7.0"
_SHA256 = "21f063ff93bb426d0c06b7a55e7eb9efcfe62c0dddd9a908e9877e18710128df"
_STOP_SECONDS = 15
_ABORTED = "terminate called after throwing an instance of 'boost::interprocess::lock_exception'"


def require_triton(folder: Path) -> Path:
    """Return a folder with `bin`, `libs` and `backends`, downloaded at first use.

    Without a network the test is skipped, or fails if PREHEAT_REQUIRE_TRITON_SERVER is set.
    """
    if folder.is_dir():
        return folder
    work = folder.with_name(folder.name + ".incoming")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    requirements = work / "requirements.txt"
    requirements.write_text(f"{_WHEEL} --hash=sha256:{_SHA256}\n")
    options = ["--quiet", "--no-deps", "--require-hashes", "--dest", f"{work}", "--requirement", f"{requirements}"]
    ran = subprocess.run([sys.executable, "-m", "pip", "download", *options], capture_output=True, text=True)
    if ran.returncode:
        reason = f"{_WHEEL} cannot be downloaded, run the test with a network: {ran.stderr.strip()[-200:]}"
        skip_without("TRITON_SERVER", reason)
    [wheel] = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(work / "wheel")
    server, backend = work / "wheel" / "pytriton" / "tritonserver", work / "server" / "backends" / "python"
    shutil.copytree(server / "backends" / "python", backend)
    stubs = server / "python_backend_stubs" / f"{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copytree(stubs, backend, dirs_exist_ok=True)
    shutil.copytree(server / "bin", work / "server" / "bin")
    shutil.copytree(work / "wheel" / "nvidia_pytriton.libs", work / "server" / "libs")
    for program in (work / "server" / "bin" / "tritonserver", backend / "triton_python_backend_stub"):
        program.chmod(0o755)
    (work / "server").rename(folder)
    shutil.rmtree(work)
    return folder


def export(url: str, releases: Sequence[str], out: Path, *options: str) -> Path:
    """Run `preheat export-triton`. Returns `out`, the new repository."""
    ran = CliRunner().invoke(app, ["export-triton", *releases, "--store", url, "--out", str(out), *options])
    assert ran.exit_code == 0, ran.output
    return out


def require_triton_client() -> None:
    """Skip the test without tritonclient, or fail it if PREHEAT_REQUIRE_TRITON_SERVER is set."""
    if importlib.util.find_spec("tritonclient") is None:
        skip_without("TRITON_SERVER", "tritonclient is not installed: .venv/bin/pip install --editable '.[triton]'")


class TritonServer:
    """A Triton process on free ports of 127.0.0.1, which loads what it is asked to. Stopped at the end of `with`.

    This version of Triton aborts when the process of a model ends while it starts, which happens on a busy machine
    without a fault of the model. It is then started again, once, with the models that it had.
    """

    def __init__(self, installed: Path, repository: Path, work: Path) -> None:
        """`work`: an existing folder for the models' environment and the log."""
        self.repository = repository
        self.log = work / "triton.log"
        self._installed, self._environment = installed, work / "environment"
        self._process: subprocess.Popen[bytes] | None = None
        self._loaded: list[str] = []
        self._aborted = False
        self.http, self.grpc, self.metrics = (f"127.0.0.1:{port}" for port in free_ports(3))

    def __enter__(self) -> Self:
        builder = venv.EnvBuilder(symlinks=True)
        builder.create(self._environment)
        packages = next((self._environment / "lib").glob("python3.*")) / "site-packages"
        (packages / "models.pth").write_text(f"{REPOSITORY}\n{sysconfig.get_paths()['purelib']}\n")
        self._start()
        return self

    def _start(self) -> None:
        ports = {"http": self.http, "grpc": self.grpc, "metrics": self.metrics}
        options = [f"--{name}-{part}" for name, address in ports.items() for part in _address_options(address)]
        libraries = [str(self._installed / "libs"), sysconfig.get_config_var("LIBDIR")]
        variables = os.environ | {
            "LD_LIBRARY_PATH": os.pathsep.join(libraries),
            "PATH": os.pathsep.join([str(self._environment / "bin"), os.environ["PATH"]]),
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        command = [
            str(self._installed / "bin" / "tritonserver"),
            f"--model-repository={self.repository}",
            f"--backend-directory={self._installed / 'backends'}",
            "--model-control-mode=explicit",
            "--disable-auto-complete-config",
            "--allow-gpu-metrics=false",
            "--exit-timeout-secs=5",
            *options,
        ]
        with self.log.open("wb") as log:
            # In a group of its own, so that the models' processes also end if Triton must be killed.
            self._process = subprocess.Popen(
                command, env=variables, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        deadline = time.monotonic() + 60
        while True:
            try:
                if httpx.get(f"http://{self.http}/v2/health/live", trust_env=False).is_success:
                    return
            except httpx.TransportError:
                pass
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                pytest.fail(f"Triton did not start: {self.log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def load(self, model: str) -> str:
        """Load a model with the repository's current config. Returns "", or Triton's error."""
        error = self._control(model, "load")
        if not error and model not in self._loaded:
            self._loaded.append(model)
        return error

    def ready(self, model: str) -> bool:
        """True if Triton serves the model."""
        return httpx.get(f"http://{self.http}/v2/models/{model}/ready", trust_env=False).is_success

    def index(self) -> list[dict[str, Any]]:
        """Return the state of each version of each model, with the reason why it is not available."""
        entries: list[dict[str, Any]] = httpx.post(
            f"http://{self.http}/v2/repository/index", json={}, trust_env=False
        ).json()
        return entries

    def metric(self, name: str, model: str) -> float:
        """Return the sum of a counter over the versions of a model."""
        text = httpx.get(f"http://{self.metrics}/metrics", trust_env=False).text
        lines = [line for line in text.splitlines() if line.startswith(f"{name}{{") and f'model="{model}"' in line]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def _control(self, model: str, action: str) -> str:
        url = f"http://{self.http}/v2/repository/models/{model}/{action}"
        try:
            answer = httpx.post(url, json={}, timeout=300, trust_env=False)
        except httpx.TransportError:
            if self._aborted or _ABORTED not in self.log.read_text(errors="replace"):
                raise
            self._aborted = True
            self.__exit__()
            self._start()
            for name in self._loaded:
                assert self._control(name, "load") == ""
            return self._control(model, action)
        return "" if answer.is_success else str(answer.json()["error"])


def _address_options(address: str) -> tuple[str, str]:
    host, port = address.split(":")
    return f"address={host}", f"port={port}"
