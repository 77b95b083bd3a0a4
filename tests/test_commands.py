"""What a command refuses before it does anything, and how it ends when its output cannot be written."""

import base64
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.support import commands, odd_files
from tests.support.commands import Case

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()


class Counting(HTTPServer):
    """A server on 127.0.0.1 that counts the requests it answers, with a body that is not Preheat's."""

    requests = 0
    body = b"{}"


@pytest.fixture
def server() -> Iterator[Counting]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert isinstance(self.server, Counting)
            self.server.requests += 1
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.server.body)

        def log_message(self, *_: object) -> None:
            pass

    with Counting(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Path]:
    yield commands.make_sandbox(tmp_path)
    odd_files.unlock(tmp_path)


def url(server: Counting) -> str:
    return f"--url=http://127.0.0.1:{server.server_port}"


def targets(folder: Path) -> dict[str, Path]:
    """Write what cannot be a target, and return it by the reason."""
    (folder / "folder").mkdir()
    (folder / "image.png").mkdir()
    (folder / "file").touch()
    os.mkfifo(folder / "pipe")
    (folder / "locked").mkdir(mode=0o500)
    (folder / "locked.png").touch(mode=0o400)
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "dangling").symlink_to(folder / "nothing")
    (folder / "many-2.png").mkdir()
    return {
        "it is a folder": folder / "folder",
        "it is a folder.": folder / "image.png",
        "it is a folder. Name": folder / "many.png",
        "is not a folder": folder / "file" / "image.png",
        "it is not a regular file": folder / "pipe",
        "not a regular file": Path("/dev/null"),
        "not a regular file.": Path("/dev/full"),
        "Permission denied": folder / "locked.png",
        "Permission denied in": folder / "locked" / "new" / "image.png",
        "Too many levels of symbolic links": folder / "loop",
        "it is a link to a missing file": folder / "dangling",
        "File name too long": folder / ("a" * 300),
        "is not the name of a file": Path("/"),
    }


def test_refuses_bad_targets_before_the_request(sandbox: Path, server: Counting) -> None:
    kinds = targets(sandbox / "files")
    before = sorted((sandbox / "files").rglob("*"))
    cases = [Case(["generate", url(server), "--images=2", f"--out={path}", "x"]) for path in kinds.values()]
    for reason, result in zip(kinds, commands.run(sandbox, cases), strict=True):
        assert result["status"] == 1 and reason in result["stderr"], (reason, result)
        assert "Name another file." in result["stderr"] and "Traceback" not in result["stderr"]
    assert server.requests == 0
    assert sorted((sandbox / "files").rglob("*")) == before


def test_save_writes_nothing_beside_a_bad_target(sandbox: Path) -> None:
    kinds = targets(sandbox / "files")
    before = sorted((sandbox / "files").rglob("*"))
    answer = f'{{"images": [{{"data": "{PNG}"}}, {{"data": "{PNG}"}}]}}'.encode()
    cases = [Case(["save", f"--out={path}"], answer) for path in kinds.values()]
    for reason, result in zip(kinds, commands.run(sandbox, cases), strict=True):
        assert result["status"] == 1 and reason in result["stderr"], (reason, result)
    assert sorted((sandbox / "files").rglob("*")) == before
    assert not any(Path("/dev").glob("null*.png")) and not any(Path("/dev").glob("full*.png"))


def test_makes_missing_folders_for_images(sandbox: Path) -> None:
    [result] = commands.run(sandbox, [Case(["save", "--out=new/deep/x.png"], f'{{"data": "{PNG}"}}'.encode())])
    assert result["status"] == 0 and (sandbox / "work" / "new" / "deep" / "x.png").is_file()


def test_refuses_what_json_cannot_hold(sandbox: Path, server: Counting) -> None:
    cases = {
        "prompt: the text is not valid UTF-8": ["a \udcff prompt"],
        "negative_prompt: the text is not valid UTF-8": ["--negative-prompt=\udc80", "x"],
        "guidance_scale: nan is not a finite number": ["--guidance-scale=nan", "x"],
        "A timeout of nan s is not possible": ["--timeout=nan", "x"],
        "A timeout of -1 s is not possible": ["--timeout=-1", "x"],
    }
    results = commands.run(sandbox, [Case(["generate", url(server), *args]) for args in cases.values()])
    for reason, result in zip(cases, results, strict=True):
        assert result["status"] == 1 and reason in result["stderr"], result
    assert server.requests == 0


def test_names_the_images_of_an_odd_response(sandbox: Path, server: Counting) -> None:
    """They are saved, although the server is not Preheat's."""
    server.body = f'{{"event": "image", "index": 0, "data": "{PNG}"}}\n{{"event": "done"}}\n'.encode()
    [result] = commands.run(sandbox, [Case(["generate", url(server), "x"])])
    assert result["status"] == 1
    assert "image.png is saved, but the rest of the response is invalid" in result["stderr"]
    assert (sandbox / "work" / "image.png").is_file()


def test_errors_keep_markup_and_bytes(sandbox: Path) -> None:
    odd = ["[red]x[/]", "[/]", "\\[/]", ":warning:"]
    results = commands.run(sandbox, [Case(["export-onnx", name]) for name in [*odd, "\udcff"]])
    for name, result in zip([*odd, "\\udcff"], results, strict=True):
        assert result["status"] == 1 and f"preheat: {name} is neither" in result["stderr"]


@pytest.mark.parametrize("args", [["--help"], ["releases"], ["gc"]])
def test_a_full_disk_behind_the_output_is_one_sentence(args: list[str], sandbox: Path) -> None:
    with open("/dev/full", "wb") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "engine_builder.commands.main", *args],
            cwd=sandbox / "work",
            env=commands.environment(sandbox),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert ran.returncode == 1
    assert ran.stderr == "preheat: The output cannot be written: No space left on device. Free some disk space.\n"


def test_a_missing_release_is_refused_before_serving(sandbox: Path) -> None:
    [result] = commands.run(sandbox, [Case(["serve", "toy/1", "--store=empty"])])
    assert result["status"] == 1 and "Release toy/1 was not found" in result["stderr"]
    assert not result["forbidden"], "the server's files were laid out"


def test_too_many_requests_are_not_simulated(sandbox: Path) -> None:
    args = ["plan-replicas", "--cold-start=1", "--p99=1", "--curve=1:0.1", "constant:1e9"]
    [result] = commands.run(sandbox, [Case(args)])
    assert result["status"] == 1 and "more than 10,000,000 requests" in result["stderr"]
