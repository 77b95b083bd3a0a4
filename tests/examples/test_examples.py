"""The programs of examples/ as processes: with the real server, and with scripted responses that it rarely gives."""

import base64
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from preheat.local_server.server import Server
from tests.conftest import READY_SECONDS
from tests.support.repository import REPOSITORY
from tests.support.scripted_server import Answer, ScriptedServer, write_certificate

EXAMPLES = REPOSITORY / "examples"
PREDICT = "/v1/models/model:predict"
PROMPT = "a red circle"
SMALL_IMAGE = {"width": 64, "height": 64, "num_inference_steps": 2}
# A request that keeps the server busy until its client disconnects.
LONG_REQUEST = {"width": 320, "height": 320, "num_inference_steps": 100}
# Each program's file of the first image. load.py writes no file.
IMAGE_FILES = {
    "generate.py": "image.png",
    "generate_async.py": "images/1.png",
    "stream.py": "image.png",
    "generate.sh": "image.png",
    "load.py": None,
}
PROGRAMS = list(IMAGE_FILES)
WRITING_PROGRAMS = [name for name in PROGRAMS if IMAGE_FILES[name]]
REPEATING_PROGRAMS = ["generate.py", "generate_async.py"]  # they send a request again if the server is busy
PYTHON_PROGRAMS = [name for name in PROGRAMS if name.endswith(".py")]


def mark_slow(program: str) -> Any:
    """Run a case of most programs in `make full` only: generate.py stands for those that share a module."""
    return program if program in ("generate.py", "generate.sh") else pytest.param(program, marks=pytest.mark.full)


def command(program: str, fields: dict[str, Any], *options: str, out: str | None = None) -> list[str]:
    """Return the command that generates PROMPT with a program.

    `fields`: other fields of the request. `out`: the file, or the folder of generate_async.py, if not the default.
    """
    path, fields_json = str(EXAMPLES / program), json.dumps(fields)
    if program == "generate.sh":
        return [path, PROMPT, out or "image.png", fields_json, *options]
    prompt = ["--prompt", PROMPT, "--rate", "5", "--seconds", "1"] if program == "load.py" else [PROMPT]
    out_options = ["--out", out] if out else []
    return [sys.executable, path, *prompt, "--fields", fields_json, *out_options, *options]


def environment(url: str, **variables: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "MODEL_URL": url} | variables


def run(arguments: list[str], url: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder`. `variables`: additional variables of its environment."""
    ran = subprocess.run(
        arguments, cwd=folder, env=environment(url, **variables), capture_output=True, text=True, timeout=READY_SECONDS
    )
    assert "Traceback" not in ran.stderr, ran.stderr
    return ran


def files(folder: Path) -> list[str]:
    """Return the paths of all files in a folder and its subfolders, relative to it and sorted."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def write_old_image(program: str, folder: Path) -> dict[str, bytes]:
    """Write the image of an earlier run. Returns the files of the folder with their content."""
    if (name := IMAGE_FILES[program]) is None:
        return {}
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"old")
    return {name: b"old"}


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in files(folder)}


@pytest.fixture(scope="module")
def url(server: Server) -> str:
    return server.url + PREDICT


# -- the real server --------------------------------------------------------------------------------------------------


def readme_commands() -> list[list[str]]:
    """Return the commands of the README that run an example."""
    lines = re.findall(r"^ {4}(.*examples/.*)$", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    return [shlex.split(line) for line in lines]


def program_of(words: list[str]) -> str:
    return next(Path(word).name for word in words if word.startswith("examples/"))


@pytest.mark.parametrize("words", readme_commands(), ids=program_of)
def test_readme_command_works(words: list[str], url: str, tmp_path: Path) -> None:
    words = [sys.executable if word == ".venv/bin/python" else word for word in words]
    ran = run([str(REPOSITORY / word) if word.startswith("examples/") else word for word in words], url, tmp_path)
    assert ran.returncode == 0, ran.stderr
    if "load.py" in ran.args[1]:
        report = json.loads(ran.stdout.splitlines()[-1])
        assert report["finished"] == report["arrivals"] > 0 and report["failed"] == 0
        assert 0 < report["p50_seconds"] <= report["p90_seconds"] <= report["p99_seconds"]
        assert report["engine"]["release"].startswith("tiny-sdxl/")
        return
    written = ran.stdout.split()
    assert written and set(written) == {name for name in files(tmp_path) if "preview" not in name}
    for name in files(tmp_path):
        with Image.open(tmp_path / name) as image:
            image.load()
            assert image.format == {".png": "PNG", ".jpg": "JPEG"}[Path(name).suffix]


def test_readme_has_a_command_for_every_program() -> None:
    programs = {path.name for path in EXAMPLES.iterdir() if path.is_file()} - {"README.md", "client.py"}
    assert programs == {program_of(words) for words in readme_commands()} == set(PROGRAMS)


@pytest.mark.parametrize("program", WRITING_PROGRAMS)
def test_replaces_the_image_atomically_with_that_of_the_server(program: str, url: str, tmp_path: Path) -> None:
    """The new image is a new file. So a program that has opened the old file still reads the old image, whole."""
    request = SMALL_IMAGE | {"prompt": PROMPT, "seed": 5, "output_format": "png"}
    expected = httpx.post(url, json=request, trust_env=False, timeout=READY_SECONDS).json()["data"]
    write_old_image(program, tmp_path)
    with (tmp_path / str(IMAGE_FILES[program])).open("rb") as reader:
        ran = run(command(program, SMALL_IMAGE | {"seed": 5}), url, tmp_path)
        assert reader.read() == b"old"
    assert (ran.returncode, ran.stdout) == (0, f"{IMAGE_FILES[program]}\n"), ran.stderr
    assert contents(tmp_path) == {IMAGE_FILES[program]: base64.b64decode(expected)}


def test_stream_writes_and_shows_previews(url: str, tmp_path: Path) -> None:
    fields = SMALL_IMAGE | {"num_inference_steps": 5, "preview_every": 2}
    ran = run(command("stream.py", fields, "--show"), url, tmp_path)
    # A preview that is encoded late has the number of the last step, so two may have the same name.
    *previews, image = files(tmp_path)
    assert image == "image.png" and previews
    assert all(re.fullmatch(r"image-preview-[2-5]\.jpg", name) for name in previews), previews
    shown = [base64.b64decode(data) for data in re.findall(r"\033\]1337;File=inline=1:(\S+)\a", ran.stdout)]
    assert len(shown) == 2
    assert {(tmp_path / name).read_bytes() for name in previews} <= set(shown)
    assert ran.stdout.splitlines()[-1] == "image.png"
    assert re.findall(r"step (\d) of 5", ran.stderr).count("5") == 1


@pytest.mark.parametrize("program", PROGRAMS)
def test_reports_a_refusal(program: str, url: str, tmp_path: Path) -> None:
    before = write_old_image(program, tmp_path)
    ran = run(command(program, {"width": 100}), url, tmp_path)
    assert ran.returncode == 1 and ran.stdout == ""
    assert "400: width: 100 is not served here; give a multiple of 32 from 64 to 1024." in ran.stderr
    assert program != "generate.py" or ran.stderr.endswith("Change the field width.\n")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("program", [mark_slow(name) for name in PROGRAMS])
def test_reports_an_invalid_request(program: str, url: str, tmp_path: Path) -> None:
    """Truss refuses this request before Preheat reads it. Its response has another form."""
    ran = run(command(program, {"scheduler": ""}), url, tmp_path)
    assert ran.returncode == 1 and '400: Input Parsing Error: `scheduler`: got ""' in ran.stderr, ran.stderr


def read_metrics(url: str) -> dict[str, float]:
    """Return the values of Preheat's metrics by name and labels."""
    lines = httpx.get(url.removesuffix(PREDICT) + "/metrics/", trust_env=False, timeout=30).text.splitlines()
    samples = [line.rpartition(" ") for line in lines if line.startswith("preheat_")]
    return {name: float(value) for name, _, value in samples}


def count_images_in_server(url: str) -> float:
    """Return the number of images that the server generates or queues."""
    metrics = read_metrics(url)
    active_count = sum(value for name, value in metrics.items() if name.startswith("preheat_active_images"))
    return active_count + metrics["preheat_queue_images"]


def wait_until_idle(url: str) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while count_images_in_server(url):
        assert time.monotonic() < deadline, "the server still generates images whose clients have disconnected"
        time.sleep(0.1)


def test_reports_a_full_queue(tmp_path: Path) -> None:
    with ScriptedServer(lambda *_: overloaded("3")) as server:
        for program in ("stream.py", "generate.sh", "load.py"):
            ran = run(command(program, {}), server.url, tmp_path)
            assert ran.returncode == 1 and files(tmp_path) == []
            assert "429: The queue is full." in ran.stderr, ran.stderr
            assert program != "stream.py" or ran.stderr.endswith("Try again after 3 s.\n")
    assert len(server.headers) == 3  # no program repeats it


@pytest.mark.full
def test_load_counts_refusals(url: str, tmp_path: Path) -> None:
    """About 800 images arrive in a second. The server queues 64, and a CPU cannot generate the rest in that time."""
    fields = {"width": 128, "height": 128, "num_inference_steps": 2, "num_images": 8}
    ran = run(command("load.py", fields, "--rate", "100", "--seconds", "1"), url, tmp_path)
    report = json.loads(ran.stdout.splitlines()[-1])
    assert ran.returncode == 0, ran.stderr
    assert report["refused"] > 0 and report["finished"] > 0 and report["failed"] == 0
    assert report["arrivals"] == report["refused"] + report["finished"]
    assert report["images_per_second"] == pytest.approx(8 * report["finished"] / report["seconds"], rel=0.01)


@pytest.mark.parametrize("program", [mark_slow(name) for name in PROGRAMS])
def test_interrupt_cancels_the_requests(program: str, url: str, tmp_path: Path) -> None:
    def count_cancelled_requests() -> float:
        requests = {name: n for name, n in read_metrics(url).items() if name.startswith("preheat_requests_total")}
        return sum(count for name, count in requests.items() if 'status="499"' in name)

    cancelled_before, old_files = count_cancelled_requests(), write_old_image(program, tmp_path)
    arguments, in_flight_count = command(program, LONG_REQUEST), 1
    if program == "generate_async.py":  # two requests in flight, a third one not yet sent
        arguments += ["--concurrency", "2"]
        arguments[2:3] = [PROMPT, "a blue star", "two green squares"]
        in_flight_count = 2
    process = subprocess.Popen(
        arguments,
        cwd=tmp_path,
        env=environment(url),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + READY_SECONDS
    while count_images_in_server(url) < in_flight_count:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # to the whole group, as a terminal sends it
    _, errors = process.communicate(timeout=READY_SECONDS)
    assert process.returncode in (130, -signal.SIGINT)
    assert "Traceback" not in errors
    assert {name: data for name, data in contents(tmp_path).items() if "preview" not in name} == old_files
    wait_until_idle(url)
    assert count_cancelled_requests() == cancelled_before + in_flight_count


# -- responses that the real server rarely gives ----------------------------------------------------------------------


def one_image(data: bytes) -> Answer:
    """Return a response with one image. Its bytes may be anything, because clients do not decode them."""
    encoded = base64.b64encode(data).decode()
    body = {"status": "success", "data": encoded, "images": [{"data": encoded}], "warnings": [], "engine": {}}
    return Answer(200, json.dumps(body).encode())


def overloaded(retry_after: str) -> Answer:
    return Answer(429, b'{"error":"The queue is full.","kind":"overloaded"}', {"Retry-After": retry_after})


@pytest.mark.parametrize("program", REPEATING_PROGRAMS)
def test_repeats_the_request_to_a_busy_server(program: str, tmp_path: Path) -> None:
    """A proxy of the environment, which cannot reach a local server, is not used."""
    responses = [overloaded("0"), Answer(503, b"loading"), one_image(b"third")]
    with ScriptedServer(lambda number, _: responses[number]) as server:
        ran = run(command(program, {}), server.url, tmp_path, http_proxy="http://127.0.0.1:9")
    assert (ran.returncode, len(server.headers)) == (0, 3), ran.stderr
    assert (tmp_path / str(IMAGE_FILES[program])).read_bytes() == b"third"
    if program == "generate.py":
        assert "429: The queue is full. Waiting 0 s." in ran.stderr
        assert "503: loading. Waiting 2 s." in ran.stderr


@pytest.mark.parametrize("program", REPEATING_PROGRAMS)
@pytest.mark.parametrize("retry_after, requests", [("0", 5), ("61", 1)])
def test_limits_attempts_and_waits(program: str, retry_after: str, requests: int, tmp_path: Path) -> None:
    with ScriptedServer(lambda *_: overloaded(retry_after)) as server:
        ran = run(command(program, {}), server.url, tmp_path)
    assert (ran.returncode, len(server.headers), files(tmp_path)) == (1, requests, [])
    assert "429: The queue is full." in ran.stderr.splitlines()[-1]


@pytest.mark.parametrize("program", [mark_slow(name) for name in PROGRAMS])
def test_does_not_repeat_other_failures(program: str, tmp_path: Path) -> None:
    before = write_old_image(program, tmp_path)
    with ScriptedServer(lambda *_: Answer(500, b'{"error": "The name is \\"x\\"."}')) as server:
        ran = run(command(program, {}), server.url, tmp_path)
    assert (ran.returncode, len(server.headers), contents(tmp_path)) == (1, 1, before)
    assert '500: The name is "x".' in ran.stderr


FIXES = {401: "Check BASETEN_API_KEY.", 404: "Check MODEL_URL.", 500: "The request's id in the server's log is abc."}


def test_refusal_states_a_fix(tmp_path: Path) -> None:
    answer = [Answer(status, b"<html>", {"X-Request-Id": "abc"}) for status in FIXES]
    with ScriptedServer(lambda number, _: answer[number]) as server:
        for status, fix in FIXES.items():
            ran = run(command("generate.py", {}), server.url, tmp_path)
            assert ran.stderr == f"error: {status}: <html>. {fix}\n"


WITHOUT_IMAGE = [b"<html>Welcome</html>", b'{"images": [{"data": "%"}], "data": "%"}']
INVALID_STREAMS = [b"", b'{"event": "odd"}', b'{"event": "error", "status": 504, "error": "Too late."}']


@pytest.mark.parametrize("program", PROGRAMS)
def test_reports_a_response_without_an_image(program: str, tmp_path: Path) -> None:
    before = write_old_image(program, tmp_path)
    bodies = [*WITHOUT_IMAGE, *(INVALID_STREAMS if program == "stream.py" else [])]
    with ScriptedServer(lambda number, _: Answer(200, bodies[number])) as server:
        for body in bodies:
            ran = run(command(program, {}), server.url, tmp_path)
            assert (ran.returncode, contents(tmp_path)) == (1, before), body
            assert "error: " in ran.stderr and (b"Too late" not in body or "504: Too late." in ran.stderr)


@pytest.mark.parametrize("program", [mark_slow(name) for name in PYTHON_PROGRAMS])
def test_stops_waiting_for_a_silent_server(program: str, tmp_path: Path) -> None:
    closing = threading.Event()

    def wait(number: int, request: dict[str, Any]) -> Answer:
        closing.wait(READY_SECONDS)
        return one_image(b"late")

    with ScriptedServer(wait) as server:
        try:
            ran = run(command(program, {}, "--timeout", "0.5"), server.url, tmp_path)
        finally:
            closing.set()
    assert (ran.returncode, files(tmp_path)) == (1, [])
    assert re.search(rf"error: (prompt 1: )?{server.url} (gave no answer|sent nothing) ", ran.stderr), ran.stderr


@pytest.mark.parametrize("program", [mark_slow(name) for name in PROGRAMS])
def test_sends_the_key_over_https_only(program: str, tmp_path: Path) -> None:
    certificate, folder = write_certificate(tmp_path / "certificate.pem"), tmp_path / "out"
    folder.mkdir()
    for server_certificate, expected in ((None, None), (certificate, "Api-Key secret")):
        with ScriptedServer(lambda *_: overloaded("61"), server_certificate) as server:
            variables = {"BASETEN_API_KEY": "secret", "SSL_CERT_FILE": str(certificate)}
            ran = run(command(program, {}), server.url, folder, **variables)
        assert "429: The queue is full." in ran.stderr
        assert [headers.get("authorization") for headers in server.headers] == [expected]
        assert server.headers[0]["content-type"] == "application/json"


@pytest.mark.parametrize("program", WRITING_PROGRAMS)
def test_refuses_an_unwritable_file_before_the_request(program: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with ScriptedServer(lambda *_: one_image(b"x")) as server:
        ran = run(command(program, {}, out="file/image.png"), server.url, tmp_path)
    assert (ran.returncode, server.headers, files(tmp_path)) == (1, [], ["file"])
    assert ran.stderr.startswith("error: ") and "file" in ran.stderr


def test_prompts_run_concurrently_and_keep_their_order(tmp_path: Path) -> None:
    pairs, lock, third, running = threading.Barrier(2), threading.Lock(), threading.Event(), 0

    def answer(number: int, request: dict[str, Any]) -> Answer:
        nonlocal running
        with lock:
            running += 1
            if running > 2:
                third.set()
        pairs.wait(READY_SECONDS)  # each request waits for a second one in flight
        third.wait(0.5)  # long enough for a third request, if the client sends one
        with lock:
            running -= 1
        prompt = request["prompt"]
        return Answer(400, b'{"error": "Not that."}') if prompt == "c" else one_image(prompt.encode())

    with ScriptedServer(answer) as server:
        arguments = [sys.executable, str(EXAMPLES / "generate_async.py"), "d", "c", "b", "a", "--concurrency", "2"]
        ran = run(arguments, server.url, tmp_path)
    assert not third.is_set()
    assert ran.returncode == 1 and ran.stdout.split() == ["images/1.png", "images/3.png", "images/4.png"]
    assert ran.stderr == "error: prompt 2: 400: Not that.\n"
    assert contents(tmp_path) == {"images/1.png": b"d", "images/3.png": b"b", "images/4.png": b"a"}


def test_generate_sh_escapes_the_prompt(tmp_path: Path) -> None:
    prompt, requests = 'say "hi" \\ there,\ntwo lines\tand a tab, größer & größer', []

    def respond(number: int, request: dict[str, Any]) -> Answer:
        requests.append(request)
        return one_image(b"x")

    with ScriptedServer(respond) as server:
        ran = run([str(EXAMPLES / "generate.sh"), prompt, "x.webp", '{"seed": 3}'], server.url, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert requests == [{"prompt": prompt, "output_format": "webp", "seed": 3}]


# -- without a server -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", [mark_slow(name) for name in PROGRAMS])
def test_reports_an_unreachable_server(program: str, tmp_path: Path) -> None:
    before = write_old_image(program, tmp_path)
    with socket.socket() as bound:  # to a port, without listening
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}{PREDICT}"
        ran = run(command(program, {}), url, tmp_path)
    assert ran.returncode == 1 and ran.stdout == ""
    assert url in ran.stderr and "Check MODEL_URL, and that the server runs." in ran.stderr
    assert contents(tmp_path) == before


def test_wrong_command_line_is_a_usage_error(tmp_path: Path) -> None:
    for program, wrong in (
        *(("generate.py", "--out image.gif"), ("generate.py", "--fields []"), ("stream.py", "--timeout -1")),
        *(("generate_async.py", "--concurrency 0"), ("load.py", "--rate 0"), ("generate.sh", "too many")),
    ):
        ran = run(command(program, {}, *wrong.split()), "http://127.0.0.1:1", tmp_path)
        assert ran.returncode == 2 and ran.stderr.startswith("usage: "), (program, wrong)
