"""Commands refuse invalid arguments before they do anything, and report an output that cannot be written."""

import base64
import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from engine_builder.commands.main import PROGRAM, app
from engine_builder.commands.request_options import FIELD_OPTIONS, OTHER_OPTIONS
from engine_builder.files import write_file
from model.api.request import ControlRequest, GenerationRequest, IpAdapterRequest, LoraRequest, MaskRequest
from tests.model.store.processes import finish, own_mounts, python
from tests.support import commands, odd_files
from tests.support.commands import Invocation
from tests.support.http_server import HttpServer, QuietHandler

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()


class CountingServer(HttpServer):
    """Counts the POST requests, keeps the last one, and answers each with `body`, which is not Preheat's."""

    def __init__(self) -> None:
        counting = self
        self.requests = 0
        self.body, self.received = b"{}", b""

        class Handler(QuietHandler):
            def do_POST(self) -> None:
                counting.requests += 1
                counting.received = self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(200)
                self.end_headers()
                self.wfile.write(counting.body)

        super().__init__(Handler)
        self.option = f"--url=http://127.0.0.1:{self.port}"


@pytest.fixture
def server() -> Iterator[CountingServer]:
    with CountingServer() as running:
        yield running


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Path]:
    yield commands.make_sandbox(tmp_path)
    odd_files.unlock(tmp_path)


def invalid_targets(folder: Path) -> dict[str, Path]:
    """Write paths to which no image can be written. Returns reason -> path."""
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


def test_generate_refuses_bad_targets_before_the_request(sandbox: Path, server: CountingServer) -> None:
    targets = invalid_targets(sandbox / "files")
    before = sorted((sandbox / "files").rglob("*"))
    cases = [Invocation(["generate", server.option, "--images=2", f"--out={path}", "x"]) for path in targets.values()]
    for reason, result in zip(targets, commands.run(sandbox, cases), strict=True):
        assert result["status"] == 1 and reason in result["stderr"], (reason, result)
        assert "Name another file." in result["stderr"] and "Traceback" not in result["stderr"]
    assert server.requests == 0
    assert sorted((sandbox / "files").rglob("*")) == before


def test_save_writes_nothing_next_to_a_bad_target(sandbox: Path) -> None:
    targets = invalid_targets(sandbox / "files")
    before = sorted((sandbox / "files").rglob("*"))
    answer = f'{{"images": [{{"data": "{PNG}"}}, {{"data": "{PNG}"}}]}}'.encode()
    cases = [Invocation(["save", f"--out={path}"], answer) for path in targets.values()]
    for reason, result in zip(targets, commands.run(sandbox, cases), strict=True):
        assert result["status"] == 1 and reason in result["stderr"], (reason, result)
    assert sorted((sandbox / "files").rglob("*")) == before
    assert not any(Path("/dev").glob("null*.png")) and not any(Path("/dev").glob("full*.png"))


def test_no_command_makes_a_missing_folder(sandbox: Path, server: CountingServer) -> None:
    rate = ["--cold-start=1", "--p99=1", "--curve=1:0.1", "constant:0.1"]
    cases = [
        ["save", "--out=new/x.png"],
        ["generate", server.option, "--out=new/x.png", "x"],
        ["generate", server.option, "--previews=new/x.jpg", "x"],
        ["demo", "--out=new/x.png"],
        ["keygen", "new/x.pem"],
        ["report", "--out=new/x.md"],
        ["plan-replicas", *rate, "--out=new/x.json"],
        ["plan-replicas", *rate, "--plot=new/x.png"],
        ["load", "toy/1", "--out=new/x.json"],
        *(["bench", name, "toy/1", "--out=new/x.json"] for name in ("latency", "cold-start", "multi-gpu")),
        ["export-onnx", "x", "--out=new/x"],
        ["export-triton", "toy/1", "--out=new/x"],
        ["triton-client", "x", "--out=new/x.png"],
        ["check-fp8", "x", "--out=new/x", "--count=1"],
        ["gateway", "--history=new/x.db", "--port=21999"],
    ]
    for case, result in zip(cases, commands.run(sandbox, [Invocation(case) for case in cases]), strict=True):
        assert result["status"] == 1, (case, result)
        assert "the folder new does not exist. Make it with `mkdir -p new`" in result["stderr"], (case, result)
    assert server.requests == 0 and not (sandbox / "work" / "new").exists()


def option_names(*words: str) -> set[str]:
    """Return the names of all options and arguments of a command."""
    command: Any = typer.main.get_command(app)
    for word in words:
        command = command.commands[word]
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


def test_every_field_of_a_request_has_an_option() -> None:
    lists = {"masks": MaskRequest, "loras": LoraRequest, "controls": ControlRequest, "ip_adapters": IpAdapterRequest}
    fields = {name for name in GenerationRequest.model_fields if name not in lists}
    fields |= {f"{name}.{field}" for name, entry in lists.items() for field in entry.model_fields}
    options = {option.field: option.flag.partition("/")[0] for option in FIELD_OPTIONS} | OTHER_OPTIONS
    assert options.keys() == fields
    assert {name.lower() for name in options.values()} <= {name.lower() for name in option_names("generate")}


def test_generate_sends_every_scalar_field(sandbox: Path, server: CountingServer) -> None:
    values: dict[str, tuple[str, object]] = {
        "--negative-prompt": ("fog", "fog"), "--prompt-syntax": ("weighted", "weighted"), "--width": ("64", 64),
        "--height": ("96", 96), "--seed": ("3", 3), "--steps": ("4", 4), "--scheduler": ("Euler a", "Euler a"),
        "--guidance-scale": ("2.5", 2.5), "--guidance-rescale": ("0.5", 0.5), "--end-cfg-frac": ("0.25", 0.25),
        "--clip-skip": ("1", 1), "--refiner": ("", True), "--denoising-frac": ("0.5", 0.5), "--strength": ("1", 1),
        "--resize": ("pad", "pad"), "--composite": ("", True), "--color-match": ("", True), "--upscale": ("2", 2),
        "--original-size": ("640x480", [480, 640]), "--crop": ("8,16", [8, 16]), "--target-size": ("64x32", [32, 64]),
        "--timesteps": ("999,500", [999, 500]), "--sigmas": ("9.5,0", [9.5, 0]), "--quality": ("80", 80),
        "--metadata": ("", True), "--preview-every": ("2", 2),
    }  # fmt: skip
    fields = {option.flag.partition("/")[0]: option.field for option in FIELD_OPTIONS}
    args = [f"{name}={text}" if text else name for name, (text, _) in values.items()]
    bad = [["--crop=1;2"], ["--timesteps=1,x"], ["--sigmas="], ["--target-size=64"]]
    first, *refused = commands.run(
        sandbox, [Invocation(["generate", server.option, *more, "x"]) for more in (args, *bad)]
    )
    assert first["status"] == 1 and {result["status"] for result in refused} == {2} and server.requests == 1
    request = json.loads(server.received)
    assert {name: request[fields[name]] for name in fields} == {name: value for name, (_, value) in values.items()}


@pytest.mark.parametrize("has_stream", [True, False])
def test_generate_writes_previews_and_describes(has_stream: bool, sandbox: Path, server: CountingServer) -> None:
    image = {"data": PNG, "seed": 3, "width": 8, "height": 8}
    done: dict[str, Any] = {"timings": {"steps": 1.0}, "time": 0.5, "warnings": ["a [warning]"]}
    lines = [
        {"event": "accepted", "ahead": 0, "steps": 2},
        *({"event": "step", "step": step, "steps": 2, "preview": PNG} for step in (1, 2)),
        {"event": "image", "index": 0, **image},
        {"event": "done", **done},
    ]
    if has_stream:
        server.body = "\n".join(map(json.dumps, lines)).encode()
        option = "--previews=p.jpg"
    else:
        server.body = json.dumps({**done, "data": PNG, "images": [image]}).encode()
        option = "--no-stream"
    made, described = commands.run(
        sandbox, [Invocation(["generate", server.option, *args]) for args in ([option, "x"], ["--describe"])]
    )
    assert made["status"] == 0 and "a [warning]" in made["stdout"], made
    assert ("Step 2 of 2: p.jpg" in made["stderr"]) == (sandbox / "work" / "p.jpg").is_file() == has_stream
    assert (sandbox / "work" / "image.png").read_bytes() == base64.b64decode(PNG)
    assert json.loads(server.received) == {"prompt": "description", "describe": True}
    if not has_stream:
        assert described["status"] == 0 and json.loads(described["stdout"])["time"] == 0.5


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (["--version"], "preheat 0.1"),
        (["-V"], "preheat 0.1"),
        (["-h"], "Usage: preheat "),
        (["serve", "-h"], "Usage: preheat serve "),
        (["bench", "latency", "-h"], "Usage: preheat bench latency "),
        (["help"], "Usage: preheat "),
        (["help", "serve"], "Usage: preheat serve "),
    ],
    ids=" ".join,
)
def test_help_and_version(args: list[str], shown: str) -> None:
    """The usage line has the command's name, although a module is started."""
    result = CliRunner().invoke(app, args, prog_name=PROGRAM)
    assert result.exit_code == 0 and shown in result.stdout


def test_generate_refuses_values_that_json_cannot_hold(sandbox: Path, server: CountingServer) -> None:
    arguments = {
        "prompt: the text is not valid UTF-8": ["a \udcff prompt"],
        "negative_prompt: the text is not valid UTF-8": ["--negative-prompt=\udc80", "x"],
        "guidance_scale: nan is not a finite number": ["--guidance-scale=nan", "x"],
        "A timeout of nan s is not possible": ["--timeout=nan", "x"],
        "A timeout of -1 s is not possible": ["--timeout=-1", "x"],
    }
    results = commands.run(sandbox, [Invocation(["generate", server.option, *args]) for args in arguments.values()])
    for reason, result in zip(arguments, results, strict=True):
        assert result["status"] == 1 and reason in result["stderr"], result
    assert server.requests == 0


def test_generate_sends_image_and_masks(sandbox: Path, server: CountingServer) -> None:
    folder = sandbox / "work"
    for name in ("photo", "sky", "door"):
        (folder / f"{name}.png").write_bytes(base64.b64decode(PNG) + name.encode())
    options = ["--image=photo.png", "--mask=sky.png", "--mask=door.png", "--mask-prompt=a storm", "--mask-prompt=red"]
    options += ["--mask-negative-prompt=a", "--mask-negative-prompt=b", "--mask-strength=1", "--mask-strength=0.5"]
    options += ["--strength=0.5", "--feather=4", "--resize=crop", "--composite", "--color-match", "--upscale=2"]
    commands.run(sandbox, [Invocation(["generate", server.option, *options, "x"])])
    request = json.loads(server.received)
    for field, name in zip((request, *request["masks"]), (b"photo", b"sky", b"door"), strict=True):
        assert base64.b64decode(field["image"]).endswith(name)
    own = ("prompt", "feather", "negative_prompt", "strength")
    values = [[mask[name] for name in own] for mask in request["masks"]]
    assert values == [["a storm", 4.0, "a", 1.0], ["red", 4.0, "b", 0.5]]
    names = ("strength", "resize", "composite", "color_match", "upscale")
    assert [request[name] for name in names] == [0.5, "crop", True, True, 2]


def test_generate_sends_controls(sandbox: Path, server: CountingServer) -> None:
    folder = sandbox / "work"
    for name in ("edges", "pose"):
        (folder / f"{name}.png").write_bytes(base64.b64decode(PNG) + name.encode())
    options = ["--control=canny=edges.png", "--control=pose=pose.png", "--control-scale=0.5", "--control-scale=1"]
    options += [f"--control-{name}={value}" for name in ("start", "end", "mode") for value in (0, 1)]
    commands.run(sandbox, [Invocation(["generate", server.option, *options, "--canny", "x"])])
    controls = json.loads(server.received)["controls"]
    for control, name in zip(controls, (b"edges", b"pose"), strict=True):
        assert base64.b64decode(control.pop("image")).endswith(name)
    assert controls == [
        {"name": "canny", "preprocess": "canny", "scale": 0.5, "start": 0.0, "end": 0.0, "mode": 0},
        {"name": "pose", "preprocess": "canny", "scale": 1.0, "start": 1.0, "end": 1.0, "mode": 1},
    ]


def test_generate_sends_ip_adapters(sandbox: Path, server: CountingServer) -> None:
    """Images of one name are those of one adapter. A file's name may contain an @."""
    folder = sandbox / "work"
    names = ("a.png", "b@home.png", "c.png")
    for name in names:
        (folder / name).write_bytes(base64.b64decode(PNG) + name.encode())
    options = ["--ip-adapter=style=a.png@0.5", "--ip-adapter=style=b@home.png", "--ip-adapter=face=c.png"]
    commands.run(sandbox, [Invocation(["generate", server.option, *options, "x"])])
    adapters = json.loads(server.received)["ip_adapters"]
    files = [base64.b64decode(image) for adapter in adapters for image in adapter.pop("images")]
    assert adapters == [{"name": "style", "scale": 0.5}, {"name": "face"}]
    for file, name in zip(files, names, strict=True):
        assert file.endswith(name.encode())


def test_generate_sends_no_field_that_was_not_given(sandbox: Path, server: CountingServer) -> None:
    commands.run(sandbox, [Invocation(["generate", server.option, "x"])])
    assert set(json.loads(server.received)) == {"prompt", "num_images", "output_format", "stream"}


def test_generate_refuses_bad_image_files_before_the_request(sandbox: Path, server: CountingServer) -> None:
    folder = sandbox / "files"
    invalid_targets(folder)
    (folder / "photo.png").write_bytes(base64.b64decode(PNG))
    (folder / "animation.gif").write_bytes(b"GIF89a")
    with (folder / "large.png").open("wb") as file:
        file.truncate(32 * 2**20 + 1)
    (folder / "secret.png").touch(mode=0)
    photo = f"--image={folder}/photo.png"
    arguments = {
        "No such file": [f"--image={folder}/missing.png"],
        "it is not a regular file": [f"--image={folder}/pipe"],
        "is not a regular file": [f"--image={folder}/folder"],
        "is not readable": [f"--image={folder}/secret.png"],
        "Too many levels of symbolic links": [f"--image={folder}/loop"],
        "File name too long": [f"--image={folder}/{'a' * 300}"],
        "File too large": [f"--image={folder}/large.png"],
        "file is not a PNG, JPEG or WebP file": [f"--image={folder}/file"],
        "animation.gif is not a PNG, JPEG or WebP file": [photo, f"--mask={folder}/animation.gif"],
        "--mask-prompt was given 1 times for 2 of --mask": [
            photo,
            *2 * [f"--mask={folder}/photo.png"],
            "--mask-prompt=x",
        ],
        "is not NAME=FILE": [f"--control={folder}/photo.png"],
        "missing.png cannot be read": [f"--control=edges={folder}/missing.png"],
        "--control-scale was given 2 times for 1 of --control": [
            f"--control=edges={folder}/photo.png",
            "--control-scale=1",
            "--control-scale=1",
        ],
        "--canny needs --control": ["--canny"],
        "--feather needs --mask": ["--feather=3"],
        "is not NAME=FILE or NAME=FILE@SCALE": [f"--ip-adapter={folder}/photo.png"],
        "Two scales were given for the IP-Adapter style": [
            f"--ip-adapter=style={folder}/photo.png@1",
            f"--ip-adapter=style={folder}/photo.png@0.5",
        ],
        "masks: one of its values is not a finite number": [photo, f"--mask={folder}/photo.png", "--feather=nan"],
    }
    results = commands.run(
        sandbox, [Invocation(["generate", server.option, *args, "x"]) for args in arguments.values()]
    )
    for reason, result in zip(arguments, results, strict=True):
        assert result["status"] in (1, 2) and reason in result["stderr"], (reason, result)
        assert len(result["stderr"]) < 1000 and "Traceback" not in result["stderr"]
    assert server.requests == 0


def test_generate_saves_the_images_of_an_invalid_response(sandbox: Path, server: CountingServer) -> None:
    server.body = f'{{"event": "image", "index": 0, "data": "{PNG}"}}\n{{"event": "done"}}\n'.encode()
    [result] = commands.run(sandbox, [Invocation(["generate", server.option, "x"])])
    assert result["status"] == 1
    assert "image.png is saved, but the rest of the response is invalid" in result["stderr"]
    assert (sandbox / "work" / "image.png").is_file()


def test_errors_show_markup_and_bytes_unchanged(sandbox: Path) -> None:
    names = ["[red]x[/]", "[/]", "\\[/]", ":warning:"]
    (sandbox / "work" / "file").touch()
    cases = [Invocation(["generate", f"--out=file/{name}.png", "x"]) for name in [*names, "\udcff"]]
    for name, result in zip([*names, "\\udcff"], commands.run(sandbox, cases), strict=True):
        assert result["status"] == 1 and f"file/{name}.png cannot be written" in result["stderr"], result


@pytest.mark.parametrize("args", [["--help"], ["releases"], ["gc"]], ids=" ".join)
def test_reports_a_full_disk_in_one_line(args: list[str], sandbox: Path) -> None:
    (sandbox / "work" / "store").mkdir()
    with open("/dev/full", "wb") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "engine_builder.commands.main", *args],
            cwd=sandbox / "work",
            env=commands.environment(sandbox),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
        )
    assert ran.returncode == 1
    assert ran.stderr == "preheat: The output cannot be written: No space left on device. Free some disk space.\n"


@pytest.mark.parametrize(
    "args",
    [["releases"], ["verify"], ["verify", "toy/1"], ["gc", "--delete"], ["copy", "toy/1", "--store=other", "--from"]],
    ids=" ".join,
)
def test_reading_commands_refuse_a_missing_store(args: list[str], sandbox: Path) -> None:
    work = sandbox / "work"
    (work / "file").touch()
    args = [*args, "--store"] if args[-1] != "--from" else args
    cases = [Invocation([*args, str(work / name)]) for name in ("typo", "file", "file/store")]
    reasons = ("No such file or directory", "it is not a folder", "Not a directory")
    for reason, result in zip(reasons, commands.run(sandbox, cases), strict=True):
        assert result["status"] == 1 and result["stdout"] == "", result
        assert f"is not a store: {reason}. Check --store" in result["stderr"], result
    assert not (work / "typo").exists()


def test_verify_refuses_an_empty_store(sandbox: Path) -> None:
    (sandbox / "work" / "store").mkdir()
    verified, listed = commands.run(sandbox, [Invocation(["verify"]), Invocation(["releases"])])
    assert verified["status"] == 1 and verified["stdout"] == ""
    assert "has no release and no adapter. Check --store" in verified["stderr"]
    assert listed["status"] == 0 and "has no release. Run preheat build" in listed["stdout"]


FULL_DISK = """
    import os, subprocess, sys
    from pathlib import Path
    from engine_builder.files import NotWritable, write_file
    from engine_builder.releases.signing import BadKey, read_key, write_key

    root = Path(sys.argv[1])
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", root], check=True)
    image, filler = root / "image.png", root / "filler"
    write_file(image, b"before")
    try:
        write_file(image, bytes(2**20))
    except NotWritable as error:
        print(error)
    assert image.read_bytes() == b"before" and os.listdir(root) == ["image.png"], os.listdir(root)
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
    try:
        write_key(root / "key.pem")
    except BadKey as error:
        print(error)
    assert not (root / "key.pem").exists()
    filler.unlink()
    write_key(root / "key.pem")
    read_key(root / "key.pem")
"""


def test_full_disk_keeps_earlier_files_and_leaves_no_empty_key(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    lines = finish(python(FULL_DISK, root, prefix=own_mounts())).splitlines()
    assert len(lines) == 2 and all("cannot be written: No space left on device" in line for line in lines)


def test_written_file_keeps_links_and_permissions(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"before")
    target.chmod(0o640)
    link.symlink_to("target")
    write_file(link, b"after")
    assert link.is_symlink() and target.read_bytes() == b"after" and target.stat().st_mode & 0o777 == 0o640
    write_file(tmp_path / "new", b"new")
    (tmp_path / "default").touch()
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "default").stat().st_mode
    assert sorted(path.name for path in tmp_path.iterdir()) == ["default", "link", "new", "target"]


def test_written_file_of_another_user_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new file would belong to the user who runs the command."""
    path = tmp_path / "shared"
    path.write_bytes(b"before")
    inode = path.stat().st_ino

    def refuse(*_: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "fchown", refuse)
    write_file(path, b"after")
    assert path.stat().st_ino == inode and path.read_bytes() == b"after" and list(tmp_path.iterdir()) == [path]


def test_written_file_may_be_standard_output(tmp_path: Path) -> None:
    script = "from pathlib import Path; from engine_builder.files import write_file"
    script += "; write_file(Path('/dev/stdout'), b'image'); print(' and text')"
    with (tmp_path / "out").open("ab") as out:
        subprocess.run([sys.executable, "-c", script], stdout=out, check=True, timeout=60)
    assert (tmp_path / "out").read_bytes() == b"image and text\n"


def test_written_file_may_be_in_a_read_only_folder(sandbox: Path) -> None:
    folder = sandbox / "files" / "folder"
    folder.mkdir()
    (folder / "x.png").write_bytes(b"before")
    folder.chmod(0o500)
    saved = Invocation(["save", f"--out={folder}/x.png"], f'{{"data": "{PNG}"}}'.encode())
    [result] = commands.run(sandbox, [saved])
    assert result["status"] == 0 and (folder / "x.png").read_bytes() == base64.b64decode(PNG), result


def test_serve_refuses_a_missing_release_first(sandbox: Path) -> None:
    [result] = commands.run(sandbox, [Invocation(["serve", "toy/1", "--store=empty"])])
    assert result["status"] == 1 and "Release toy/1 was not found" in result["stderr"]
    assert not result["forbidden"], "the server's files were laid out"


def test_plan_replicas_refuses_too_many_requests(sandbox: Path) -> None:
    args = ["plan-replicas", "--cold-start=1", "--p99=1", "--curve=1:0.1", "constant:1e9"]
    [result] = commands.run(sandbox, [Invocation(args)])
    assert result["status"] == 1 and "more than 10,000,000 requests" in result["stderr"]


@pytest.mark.parametrize("code", [0, 3])
def test_command_ends_although_the_interpreter_would_hang(code: int) -> None:
    """With NCCL in a process, the interpreter may hang at its end. Output and exit code are kept."""
    script = f"""
import atexit, sys, time
from engine_builder.commands import main
from model.child_process import mark_hanging_exit
atexit.register(time.sleep, 600)
def app(prog_name):
    mark_hanging_exit()
    print("the rows")
    sys.exit({code})
main.app = app
main.main()
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ran = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (code, "the rows\n")
