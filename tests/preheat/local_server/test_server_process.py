"""The real Truss server in its process: its imports and environment, its address, its failures and its end."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from preheat.local_server.server import Layout, Server, ServerFailed
from tests.support import stub_truss
from tests.support.waiting import eventually

READY_SECONDS = 120  # a test that waits this long fails

REPORTER = """
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
    """The image of a model that reports on its process."""
    config = """
        environment_variables:
          FROM_CONFIG: config
          PREHEAT_STORE: config
          PREHEAT_RELEASE: config
    """
    return stub_truss.make_layout(tmp_path_factory.mktemp("reporter"), REPORTER, config)


@pytest.fixture(scope="module")
def server(layout: Layout) -> Iterator[Server]:
    """Started with the repository on PYTHONPATH, and with variables for the server and for others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(stub_truss.REPOSITORY))
        patch.syspath_prepend(stub_truss.REPOSITORY)
        for name, value in (("STORE", "host"), ("RELEASE", "host")):
            patch.setenv(f"PREHEAT_{name}", value)
        patch.setenv("TRUSS_SECRET_token", "secret")
        patch.setenv("PRIVATE", "private")
        with Server(layout, environment={"PREHEAT_RELEASE": "argument"}) as server:
            server.wait_ready(READY_SECONDS)
            yield server


def predict(server: Server, **request: object) -> dict:
    response = httpx.post(f"{server.url}/v1/models/model:predict", json=request, trust_env=False)
    assert response.status_code == 200, response.text
    return response.json()


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # ended, and its parent has yet to read its status
    except psutil.NoSuchProcess:
        return True


def test_runs_the_images_main_module_and_imports_only_the_image(server: Server, layout: Layout) -> None:
    excluded = ["engine_builder", "preheat.local_server.server", "training", "tests"]
    report = predict(server, **{"import": [*excluded, "model.errors", "numpy"]})
    assert Path(report["cwd"]) == layout.app and layout.app / report["main"] == layout.app / "main.py"
    for name in excluded:
        assert report["imports"][name].startswith("ModuleNotFoundError"), report["imports"][name]
    assert report["imports"]["model.errors"] == str(layout.app / "model" / "errors.py")
    assert report["imports"]["numpy"].endswith("numpy/__init__.py")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8 on its loopback")
def test_listens_on_one_address_only(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.port), timeout=5)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8 on its loopback")
def test_listens_on_the_given_address(layout: Layout) -> None:
    with Server(layout, host="127.0.0.2") as server:
        assert server.url == f"http://127.0.0.2:{server.port}"
        server.wait_ready(READY_SECONDS)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port), timeout=5)


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:1"), ("::", "http://[::1]:1"), ("fe80::1", "http://[fe80::1]:1")],
)
def test_names_an_address_that_a_client_can_reach(layout: Layout, host: str, url: str) -> None:
    assert Server(layout, host=host, port=1).url == url


def test_refuses_an_address_of_another_machine(layout: Layout) -> None:
    with pytest.raises(ServerFailed, match=r"of 192\.0\.2\.1 cannot be used: .*Name an address .* with --host"):
        Server(layout, host="192.0.2.1", port=1).start()


def test_refuses_the_port_of_another_server(server: Server, layout: Layout) -> None:
    with pytest.raises(ServerFailed, match=f"Port {server.port} of 127.0.0.1 is taken"):
        Server(layout, port=server.port).start()


def test_environment_is_the_images_and_passed_variables(server: Server) -> None:
    env = predict(server)["env"]
    expected = {"FROM_CONFIG": "config", "PREHEAT_STORE": "host", "PREHEAT_RELEASE": "argument"}
    expected |= {"TRUSS_SECRET_token": "secret", "INFERENCE_SERVER_PORT": str(server.port)}
    assert {name: env[name] for name in expected} == expected
    assert "PRIVATE" not in env and env["HOME"] != os.environ.get("HOME")


LOAD = """
    from model.errors import NoEngineForTarget

    class Model:
        def load(self):
            {}

        def predict(self, request):
            return {{}}
"""
REFUSING = LOAD.format("""
            try:
                {}["key"]
            except KeyError as error:
                raise NoEngineForTarget("No engine for this GPU.\\nIts build failed.", "Build one.") from error
""")
SLOW = LOAD.format("__import__('time').sleep(600)")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (REFUSING, "The server refused to start. No engine for this GPU.\nIts build failed. Build one."),
        ("import engine_builder", "ModuleNotFoundError: No module named 'engine_builder'\n"),
        ("class Model:\n    pass", "_truss_common.errors.ModelDefinitionError: Truss model must have a `predict`"),
    ],
    ids=["refusal", "import error", "no predict"],
)
def test_reports_why_a_server_cannot_start(tmp_path: Path, model: str, message: str) -> None:
    with Server(stub_truss.make_layout(tmp_path, model)) as server, pytest.raises(ServerFailed) as failure:
        server.wait_ready(READY_SECONDS)
    assert str(failure.value).startswith(message) and not server.running


def test_messages_of_the_shutdown_do_not_hide_the_failure(tmp_path: Path) -> None:
    failing = stub_truss.make_layout(tmp_path, REPORTER)
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
        server.wait_ready(READY_SECONDS)
    assert str(failure.value).splitlines() == [
        "OSError: the disk is full",
        "The server ended before it was ready (exit code 0).",
        "  Executing model.load()...",
        "  Exception while loading model",
    ]


def test_reports_a_server_that_is_killed_while_it_loads(tmp_path: Path) -> None:
    """Its messages are reported until then. The requested log is kept."""
    messages: list[str] = []

    def kill(message: str) -> None:
        messages.append(message)
        if message == "Executing model.load()...":
            os.kill(server.pid, signal.SIGKILL)

    log = tmp_path / "server.log"
    with Server(stub_truss.make_layout(tmp_path, SLOW), log=log) as server:
        with pytest.raises(ServerFailed, match="killed by SIGKILL"):
            server.wait_ready(READY_SECONDS, kill)
    assert "Loading truss model from file." in messages and "Executing model.load()" in log.read_text()


@pytest.mark.full
def test_stops_a_server_that_is_not_ready_in_time(tmp_path: Path) -> None:
    with Server(stub_truss.make_layout(tmp_path, SLOW)) as server:
        pid = server.pid
        with pytest.raises(ServerFailed, match="not ready after 0.5 s"):
            server.wait_ready(0.5)
        assert has_ended(pid)


def test_a_killed_server_leaves_no_process_and_no_files(layout: Layout) -> None:
    with Server(layout) as server:
        server.wait_ready(READY_SECONDS)
        assert server.running
        report = predict(server)
        assert Path(report["env"]["HOME"]).exists()
        os.kill(server.pid, signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL
        assert not server.running
        with pytest.raises(ServerFailed, match="SIGKILL"):
            server.wait_ready(READY_SECONDS)
        eventually(lambda: has_ended(report["child"]), "the child process of the killed server ends")
    assert not Path(report["env"]["HOME"]).exists()


def test_interrupted_stop_leaves_no_process_and_no_files(tmp_path: Path) -> None:
    """The server ends at no signal. At each one its parent gets one more Ctrl-C."""
    (tmp_path / "main.py").write_text(
        textwrap.dedent("""
            import os, signal
            from pathlib import Path
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: os.kill(os.getppid(), signal.SIGINT))
            Path("home.new").write_text(os.environ["HOME"])
            os.rename("home.new", "home")
            while True:
                signal.pause()
        """)
    )
    server = Server(Layout(tmp_path, tmp_path, tmp_path, {})).start()
    eventually((tmp_path / "home").exists, "the server has begun")
    pid, home = server.pid, Path((tmp_path / "home").read_text())
    assert home.exists()
    with pytest.raises(KeyboardInterrupt):
        server.stop()
    assert has_ended(pid) and not home.exists()


def test_stop_waits_for_requests_in_flight(tmp_path: Path) -> None:
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
        server.wait_ready(READY_SECONDS)
        answer = thread.submit(predict, server, begun=str(begun))
        eventually(begun.exists, "the request begins")
        server.stop()
        assert answer.result() == "answered"


def test_server_ends_with_the_process_that_started_it(layout: Layout, tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import os, sys
        from pathlib import Path
        from preheat.local_server.server import Layout, Server
        root = Path(sys.argv[1])
        server = Server(Layout(root, root / "app", root / "packages", {})).start()
        server.wait_ready(120)
        print(server.pid, flush=True)
        os.kill(os.getpid(), 9)
    """)
    ended = subprocess.run(
        [sys.executable, "-c", script, str(layout.root)],
        cwd=stub_truss.REPOSITORY,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # a killed process cannot delete its temporary folder
        capture_output=True,
        text=True,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    eventually(lambda: has_ended(int(ended.stdout)), "the server ends")
