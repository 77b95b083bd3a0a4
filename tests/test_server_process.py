"""The real Truss server in its process: what it can import, who can reach it, how it ends."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from engine_builder.local_server.server import Layout, Server, ServerFailed, build_context, exception_sentence
from tests.support import stub_truss

# Long enough for any machine: a test that waits for all of it fails.
TIMEOUT = 120

CURIOUS = """
    import importlib
    import os
    import subprocess
    import sys

    class Model:
        def load(self):
            self.child = subprocess.Popen(["sleep", "600"])

        async def predict(self, request):
            imports = {}
            for name in request.get("import", []):
                try:
                    imports[name] = str(importlib.import_module(name).__file__)
                except ImportError as error:
                    imports[name] = repr(error)
            return {"imports": imports, "child": self.child.pid, "env": dict(os.environ), "cwd": os.getcwd(),
                    "main": sys.modules["__main__"].__file__}
"""


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    config = """
        environment_variables:
          FROM_CONFIG: config
          PREHEAT_STORE: config
          PREHEAT_RELEASE: config
    """
    return stub_truss.make_layout(tmp_path_factory.mktemp("curious"), CURIOUS, config)


@pytest.fixture
def server(layout: Layout) -> Iterator[Server]:
    with Server(layout) as server:
        server.wait_ready(TIMEOUT)
        yield server


def ask(server: Server, **request: object) -> dict:
    answer = httpx.post(f"{server.url}/v1/models/model:predict", json=request, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()


def eventually(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + TIMEOUT
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # ended; whoever adopted it has yet to notice
    except psutil.NoSuchProcess:
        return True


def test_only_what_is_in_the_image_is_importable(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(stub_truss.REPOSITORY))
    monkeypatch.syspath_prepend(stub_truss.REPOSITORY)
    with Server(layout) as server:
        server.wait_ready(TIMEOUT)
        ours = ["engine_builder", "engine_builder.local_server.server", "training", "tests"]
        answer = ask(server, **{"import": [*ours, "model.errors", "numpy"]})
    for name in ours:
        assert answer["imports"][name].startswith("ModuleNotFoundError"), answer["imports"][name]
    assert answer["imports"]["model.errors"] == str(layout.app / "model" / "errors.py")
    assert answer["imports"]["numpy"].endswith("numpy/__init__.py")


def test_the_main_module_and_folder_are_the_image_s(server: Server, layout: Layout) -> None:
    answer = ask(server)
    assert Path(answer["cwd"]) == layout.app
    assert layout.app / answer["main"] == layout.app / "main.py"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8 on its loopback")
def test_it_listens_on_one_address_only(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.port), timeout=5)


def test_the_environment_is_the_image_s_and_what_is_passed_on(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREHEAT_STORE", "ours")
    monkeypatch.setenv("PREHEAT_RELEASE", "ours")
    monkeypatch.setenv("TRUSS_SECRET_token", "secret")
    monkeypatch.setenv("PRIVATE", "private")
    with Server(layout, environment={"PREHEAT_RELEASE": "given"}) as server:
        server.wait_ready(TIMEOUT)
        env = ask(server)["env"]
    assert env["FROM_CONFIG"] == "config"
    assert env["PREHEAT_STORE"] == "ours"
    assert env["PREHEAT_RELEASE"] == "given"
    assert env["TRUSS_SECRET_token"] == "secret"
    assert env["INFERENCE_SERVER_PORT"] == str(server.port)
    assert "PRIVATE" not in env and env["HOME"] != os.environ.get("HOME")
    assert not Path(env["HOME"]).exists()


def test_progress_is_what_the_server_logs_and_a_log_that_was_asked_for_is_kept(layout: Layout, tmp_path: Path) -> None:
    said: list[str] = []
    with Server(layout, log=tmp_path / "server.log") as server:
        server.wait_ready(TIMEOUT, said.append)
    assert "Executing model.load()..." in said
    assert any(message.startswith("Completed model.load()") for message in said)
    assert "Completed model.load()" in (tmp_path / "server.log").read_text()


def test_a_refusal_is_reported_once_and_without_a_signal(tmp_path: Path) -> None:
    failing = """
        from model.errors import NoEngineForTarget

        class Model:
            def load(self):
                try:
                    {}["key"]
                except KeyError as error:
                    raise NoEngineForTarget("No engine for this GPU.\\nIts build failed.", "Build one.") from error

            def predict(self, request):
                return {}
    """
    server = Server(stub_truss.make_layout(tmp_path, failing))
    with server, pytest.raises(ServerFailed) as failure:
        server.wait_ready(TIMEOUT)
    assert str(failure.value) == "The server refused to start. No engine for this GPU.\nIts build failed. Build one."
    assert not server.running


@pytest.mark.parametrize(
    "model, begins",
    [
        ("import engine_builder", "ModuleNotFoundError: No module named 'engine_builder'\n"),
        (
            "class Model:\n    pass",
            "_truss_common.errors.ModelDefinitionError: Truss model must have a `predict`",
        ),
        ("class Model:", "IndentationError: expected an indented block"),
    ],
)
def test_a_model_that_cannot_be_imported_is_answered_with_the_reason(tmp_path: Path, model: str, begins: str) -> None:
    with Server(stub_truss.make_layout(tmp_path, model)) as server, pytest.raises(ServerFailed) as failure:
        server.wait_ready(TIMEOUT)
    assert str(failure.value).startswith(begins)


def test_a_server_that_cannot_start_is_answered_with_the_reason(layout: Layout, tmp_path: Path) -> None:
    broken = stub_truss.make_layout(tmp_path, CURIOUS)
    (broken.app / "model_wrapper.py").write_text("raise RuntimeError('the image is broken')")
    with (
        Server(broken) as server,
        pytest.raises(ServerFailed, match=r"\ARuntimeError: the image is broken\n.*code 1"),
    ):
        server.wait_ready(TIMEOUT)


def test_what_a_server_says_while_it_shuts_down_does_not_hide_what_it_failed_at(tmp_path: Path) -> None:
    failing = stub_truss.make_layout(tmp_path, CURIOUS)
    (failing.app / "main.py").write_text(
        textwrap.dedent("""
            import json

            def log(level, message, **more):
                print(json.dumps({"levelname": level, "message": message, **more}))

            log("INFO", "Executing model.load()...")
            trace = "Traceback (most recent call last):\\n  File 'model.py'\\nOSError: the disk is full"
            log("ERROR", "Exception while loading model", exc_info=trace)
            for step in range(20):
                log("INFO", f"Shutting down, step {step}")
        """)
    )
    with Server(failing) as server, pytest.raises(ServerFailed) as failure:
        server.wait_ready(TIMEOUT)
    assert str(failure.value).splitlines() == [
        "OSError: the disk is full",
        "The server ended before it was ready (exit code 0).",
        "  Executing model.load()...",
        "  Exception while loading model",
    ]


SLOW = """
    import time

    class Model:
        def load(self):
            time.sleep(600)

        def predict(self, request):
            return {}
"""


def test_a_server_killed_while_it_loads_is_noticed(tmp_path: Path) -> None:
    def kill(message: str) -> None:
        if message == "Loading truss model from file.":
            os.kill(server.pid, signal.SIGKILL)

    with Server(stub_truss.make_layout(tmp_path, SLOW)) as server:
        with pytest.raises(ServerFailed, match="killed by SIGKILL"):
            server.wait_ready(TIMEOUT, kill)


def test_a_server_that_is_not_ready_in_time_is_stopped(tmp_path: Path) -> None:
    pids: list[int] = []
    with Server(stub_truss.make_layout(tmp_path, SLOW)) as server:
        pids.append(server.pid)
        with pytest.raises(ServerFailed, match="not ready after 2 s"):
            server.wait_ready(2)
    assert gone(pids[0])


def test_a_server_killed_while_it_serves_is_noticed(server: Server) -> None:
    assert server.running
    child = ask(server)["child"]
    os.kill(server.pid, signal.SIGKILL)
    assert server.wait() == -signal.SIGKILL
    assert not server.running
    with pytest.raises(ServerFailed, match="SIGKILL"):
        server.wait_ready(TIMEOUT)
    assert eventually(lambda: gone(child)), "what the dead server had spawned lives on"


def test_stop_leaves_no_process(layout: Layout) -> None:
    server = Server(layout).start()
    server.wait_ready(TIMEOUT)
    pids = [server.pid, ask(server)["child"]]
    server.stop()
    server.stop()
    assert not server.running
    assert all(eventually(lambda pid=pid: gone(pid)) for pid in pids)


def test_a_request_in_flight_is_answered_before_the_server_stops(tmp_path: Path) -> None:
    model = """
        import asyncio
        from pathlib import Path

        class Model:
            async def predict(self, request):
                Path(request["begun"]).touch()
                await asyncio.sleep(1)
                return "answered"
    """
    begun = tmp_path / "begun"
    with Server(stub_truss.make_layout(tmp_path, model)) as server, ThreadPoolExecutor() as thread:
        server.wait_ready(TIMEOUT)
        answer = thread.submit(ask, server, begun=str(begun))
        assert eventually(begun.exists)
        server.stop()
        assert answer.result() == "answered"


def test_the_server_ends_with_the_process_that_started_it(layout: Layout, tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import os, sys
        from pathlib import Path
        from engine_builder.local_server.server import Layout, Server
        root = Path(sys.argv[1])
        server = Server(Layout(root, root / "app", root / "packages", {})).start()
        server.wait_ready(120)
        print(server.pid, flush=True)
        os.kill(os.getpid(), 9)
    """)
    ended = subprocess.run(
        [sys.executable, "-c", script, str(layout.root)],
        cwd=stub_truss.REPOSITORY,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # a killed process cannot clear away its scratch folder
        capture_output=True,
        text=True,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert eventually(lambda: gone(int(ended.stdout)))


def test_another_server_s_port_is_refused(server: Server, layout: Layout) -> None:
    with pytest.raises(ServerFailed, match=f"Port {server.port} of 127.0.0.1 is taken"):
        Server(layout, port=server.port).start()


def test_a_server_is_started_once(server: Server) -> None:
    with pytest.raises(ServerFailed, match="started already"):
        server.start()


def test_building_a_context_leaves_the_tree_as_it_was(tmp_path: Path) -> None:
    truss = stub_truss.write(tmp_path / "truss", SLOW)

    def state() -> dict[Path, tuple[int, int]]:
        return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in truss.rglob("*")}

    before = state()
    build_context(truss, truss / "config.yaml", tmp_path / "build")
    assert state() == before


def test_the_sentence_of_a_chained_exception_is_the_last_one_s() -> None:
    trace = """Traceback (most recent call last):
  File "a.py", line 1, in <module>
KeyError: 'x'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "b.py", line 2, in <module>
    raise StoreError("...")
model.errors.StoreError: The bucket is not there.
  Create it first.
"""
    assert exception_sentence(trace) == "The bucket is not there.\n  Create it first."
