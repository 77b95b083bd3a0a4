"""Each local server has a folder of its own, also when another one runs, and after kill -9."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from engine_builder.local_server.demo import serving
from engine_builder.local_server.server import Server, ServerFailed
from engine_builder.local_server.server_folder import FolderFailed, server_folder
from engine_builder.stores.store import WritableStore
from tests.support import stub_truss

_HOLD = """
import sys
from pathlib import Path
from engine_builder.local_server.server_folder import server_folder
with server_folder(Path(sys.argv[1])) as folder:
    print(folder.path, flush=True)
    sys.stdin.read()
"""


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
    owner = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path)],
        cwd=stub_truss.REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None and owner.stdin is not None
    abandoned = Path(owner.stdout.readline().strip())
    with server_folder(tmp_path) as mine:
        assert folders(tmp_path) == {abandoned, mine.path}
    owner.kill()
    owner.communicate()
    (tmp_path / "server-without-a-lock").mkdir()
    with server_folder(tmp_path) as mine:
        assert folders(tmp_path) == {mine.path}


def test_a_running_server_keeps_its_folder(tmp_path: Path) -> None:
    """Its process holds the lock, too, so the folder outlives an owner that was killed until the server has ended."""
    script = """
import os, sys
from pathlib import Path
from engine_builder.local_server.server_folder import server_folder
with server_folder(Path(sys.argv[1])) as folder:
    child = os.fork()
    if child:
        os._exit(0)
    sys.stdin.read()
    os._exit(0)
"""
    owner = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], cwd=stub_truss.REPOSITORY, stdin=subprocess.PIPE
    )
    owner.wait()
    [running] = folders(tmp_path)
    with server_folder(tmp_path):
        assert running.exists()
    assert owner.stdin is not None
    owner.stdin.close()
    for _ in range(100):
        with server_folder(tmp_path):
            if not running.exists():
                return
        time.sleep(0.05)
    pytest.fail("the folder was not deleted")


def test_keeps_the_folder_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed), server_folder(tmp_path) as failed:
        raise ServerFailed("The server refused to start.")
    assert folders(tmp_path) == {failed.path}
    with pytest.raises(KeyboardInterrupt), server_folder(tmp_path) as stopped:
        assert not failed.path.exists()
        raise KeyboardInterrupt
    assert not stopped.path.exists()


def test_a_file_in_the_way_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(FolderFailed, match=r"cannot hold a server's files: .*Not a directory"),
        server_folder(tmp_path / "file" / "servers"),
    ):
        pass


def test_two_servers_at_once_keep_their_logs(tmp_path: Path) -> None:
    """Each has its files while the other one ends, and what is kept at the end is one server's whole log."""
    model = """
        class Model:
            def predict(self, request):
                return {}
    """
    truss, config = stub_truss.write(tmp_path / "truss", model), tmp_path / "truss" / "config.yaml"
    logs = [tmp_path / "logs" / "one.log", tmp_path / "logs" / "two.log"]
    with serving(truss, config, tmp_path / "work", "s", "r", kept_log=logs[0]) as one:
        with serving(truss, config, tmp_path / "work", "s", "r", kept_log=logs[1]) as two:
            two.wait_ready(120)
        assert not two.layout.root.exists()
        one.wait_ready(120)
    assert not folders(tmp_path / "work")
    assert all("Completed model.load()" in log.read_text() for log in logs)


def test_a_port_is_taken_as_soon_as_a_server_starts(tmp_path: Path) -> None:
    """The second server is refused at once, and not when it has loaded its model."""
    layout = stub_truss.make_layout(tmp_path, "class Model:\n    def predict(self, request):\n        return {}\n")
    with Server(layout) as first, pytest.raises(ServerFailed, match=f"Port {first.port} of 127.0.0.1 is taken"):
        Server(layout, port=first.port).start()


def test_a_second_serve_on_a_port_leaves_the_first_one_alone(store: WritableStore, release: str) -> None:
    """With the real command: the second one is refused, and the first still answers and has its files."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "engine_builder.commands.main", "serve", release, "--store", store.url]
    with subprocess.Popen(
        [*command, "--port", str(port)], cwd=stub_truss.REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as first:
        try:
            assert first.stdout is not None
            for line in first.stdout:
                if "Serving" in line:
                    break
            second = subprocess.run(
                [*command, "--port", str(port)], cwd=stub_truss.REPOSITORY, capture_output=True, text=True
            )
            assert second.returncode == 1 and f"Port {port} of 127.0.0.1 is taken" in second.stderr
            assert "Traceback" not in second.stderr
            body = {"prompt": "a red circle", "width": 64, "height": 64, "num_inference_steps": 1}
            url = f"http://127.0.0.1:{port}/v1/models/model:predict"
            assert httpx.post(url, json=body, timeout=60, trust_env=False).json()["status"] == "success"
        finally:
            os.kill(first.pid, signal.SIGINT)
            first.communicate()
    assert first.returncode == 0
