"""Each local server has its own folder, also while another one runs, and after SIGKILL."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from engine_builder.stores.store import WritableStore
from preheat.local_server.demo import serving
from preheat.local_server.server import ServerFailed
from preheat.local_server.server_folder import FolderFailed, server_folder
from tests.support import stub_truss
from tests.support.ports import free_port
from tests.support.waiting import eventually

OWN_FOLDER = """
import os, sys
from pathlib import Path
from preheat.local_server.server_folder import server_folder
with server_folder(Path(sys.argv[1])) as folder:
    if sys.argv[2] == "fork" and os.fork():
        os._exit(0)
    print(folder.path, flush=True)
    sys.stdin.read()
    os._exit(0)
"""


def own_folder(folder: Path, kind: str) -> tuple[subprocess.Popen[str], Path]:
    """Start a process that has a server's folder. `kind`: fork, to leave it to a child, or hold."""
    command = [sys.executable, "-c", OWN_FOLDER, str(folder), kind]
    pipe = subprocess.PIPE
    owner = subprocess.Popen(command, cwd=stub_truss.REPOSITORY, stdin=pipe, stdout=pipe, text=True)
    assert owner.stdout is not None
    return owner, Path(owner.stdout.readline().strip())


def folders(parent: Path) -> set[Path]:
    return set(parent.glob("server-*"))


def test_two_servers_have_two_folders(tmp_path: Path) -> None:
    with server_folder(tmp_path) as one:
        (one.path / "log").touch()
        with server_folder(tmp_path) as two:
            assert folders(tmp_path) == {one.path, two.path}
        assert folders(tmp_path) == {one.path} and (one.path / "log").exists()
    assert not folders(tmp_path)


def test_deletes_the_folder_of_a_killed_owner(tmp_path: Path) -> None:
    owner, abandoned = own_folder(tmp_path, "hold")
    with server_folder(tmp_path) as mine:
        assert folders(tmp_path) == {abandoned, mine.path}
    owner.kill()
    owner.communicate()
    (tmp_path / "server-without-a-lock").mkdir()
    with server_folder(tmp_path) as mine:
        assert folders(tmp_path) == {mine.path}


def test_running_server_keeps_its_folder(tmp_path: Path) -> None:
    """The server's process holds the lock, too, so its folder outlives an owner that was killed."""
    owner, running = own_folder(tmp_path, "fork")
    owner.wait()
    with server_folder(tmp_path):
        assert running.exists()
    owner.communicate("")  # ends the child

    def is_deleted() -> bool:
        with server_folder(tmp_path):
            return not running.exists()

    eventually(is_deleted, "the folder is deleted")


def test_keeps_the_folder_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed), server_folder(tmp_path) as failed:
        raise ServerFailed("The server refused to start.")
    assert folders(tmp_path) == {failed.path}
    with pytest.raises(KeyboardInterrupt), server_folder(tmp_path) as stopped:
        assert not failed.path.exists()
        raise KeyboardInterrupt
    assert not stopped.path.exists()


def test_reports_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(FolderFailed, match=r"cannot hold a server's files: .*Not a directory"),
        server_folder(tmp_path / "file" / "servers"),
    ):
        pass


@pytest.mark.full
def test_two_servers_keep_their_files_and_logs(tmp_path: Path) -> None:
    """Each has its files after the other one has ended. Each kept log is that of one server."""
    model = """
        class Model:
            def predict(self, request):
                return {}
    """
    truss, config = stub_truss.write(tmp_path / "truss", model), tmp_path / "truss" / "config.yaml"
    logs, work = [tmp_path / "logs" / "one.log", tmp_path / "logs" / "two.log"], tmp_path / "work"
    with serving(truss, config, work, "store", ["release"], kept_log=logs[0]) as one:
        with serving(truss, config, work, "store", ["release"], kept_log=logs[1]) as two:
            two.wait_ready(120)
        assert not two.layout.root.exists()
        one.wait_ready(120)
    assert not folders(work)
    assert all("Completed model.load()" in log.read_text() for log in logs)


@pytest.mark.full
def test_second_serve_command_on_a_port_is_refused(store: WritableStore, release: str) -> None:
    """The first one still answers, so it has its files."""
    port = free_port()

    def is_listening() -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    command = [sys.executable, "-m", "preheat", "serve", release, "--store", store.url]
    command += ["--port", str(port)]
    with subprocess.Popen(command, cwd=stub_truss.REPOSITORY, stdout=subprocess.PIPE, text=True) as first:
        try:
            eventually(is_listening, "the first server listens")
            second = subprocess.run(command, cwd=stub_truss.REPOSITORY, capture_output=True, text=True, timeout=60)
            assert second.returncode == 1 and f"Port {port} of 127.0.0.1 is taken" in second.stderr
            assert "Traceback" not in second.stderr
            assert first.stdout is not None
            assert any("Serving" in line for line in first.stdout)
            body = {"prompt": "a red circle", "width": 64, "height": 64, "num_inference_steps": 1}
            url = f"http://127.0.0.1:{port}/v1/models/model:predict"
            assert httpx.post(url, json=body, timeout=60, trust_env=False).json()["status"] == "success"
        finally:
            os.kill(first.pid, signal.SIGINT)
            try:
                first.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                first.kill()
                raise
    assert first.returncode == 0
