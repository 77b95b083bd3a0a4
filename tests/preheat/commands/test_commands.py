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
from typer.testing import CliRunner

from engine_builder.files import write_file
from model.request_fields import ControlRequest, GenerationRequest, IpAdapterRequest, LoraRequest, MaskRequest
from preheat.commands.request_options import FIELD_OPTIONS, OTHER_OPTIONS
from preheat.main import PROGRAM, app
from tests.model.store.processes import finish, own_mounts, python
from tests.support import commands, odd_files
from tests.support.commands import Invocation, command_tree
from tests.support.http_server import HttpServer, QuietHandler

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()


class CountingServer(HttpServer):
    """Keeps the POST requests, and answers each with the next of `bodies`, then with {}, which is not Preheat's."""

    def __init__(self) -> None:
        counting = self
        self.bodies: list[bytes] = []
        self.received: list[Any] = []

        class Handler(QuietHandler):
            def do_POST(self) -> None:
                counting.received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.end_headers()
                self.wfile.write(counting.bodies.pop(0) if counting.bodies else b"{}")

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


def bad_images(folder: Path) -> Iterator[tuple[list[str], str]]:
    """Write files that are no images. Yields options of `generate` and the reason of the refusal."""
    (folder / "photo.png").write_bytes(base64.b64decode(PNG))
    (folder / "animation.gif").write_bytes(b"GIF89a")
    (folder / "secret.png").touch(mode=0)
    with (folder / "large.png").open("wb") as file:
        file.truncate(32 * 2**20 + 1)
    for name, reason in {
        "missing.png": "No such file",
        "pipe": "it is not a regular file",
        "folder": "is not a regular file",
        "secret.png": "is not readable",
        "loop": "Too many levels of symbolic links",
        "a" * 300: "File name too long",
        "large.png": "File too large",
        "file": "file is not a PNG, JPEG or WebP file",
    }.items():
        yield [f"--image={folder}/{name}"], reason
    photo, mask = f"--image={folder}/photo.png", f"--mask={folder}/photo.png"
    control, adapter = f"--control=edges={folder}/photo.png", f"--ip-adapter=style={folder}/photo.png"
    yield [photo, f"--mask={folder}/animation.gif"], "animation.gif is not a PNG, JPEG or WebP file"
    yield [photo, mask, mask, "--mask-prompt=x"], "--mask-prompt was given 1 times for 2 of --mask"
    yield [f"--control={folder}/photo.png"], "is not NAME=FILE"
    yield [f"--control=edges={folder}/missing.png"], "missing.png cannot be read"
    yield [control, control], "--control names edges twice"
    yield [control, *2 * ["--control-scale=1"]], "--control-scale was given 2 times for 1 of --control"
    yield [control, "--control-scale=pose=1"], "--control-scale: pose has no image"
    yield [control, "--control-mode=edges=1.5"], "--control-mode: '1.5' is not a number"
    yield ["--canny"], "--canny needs --control"
    yield ["--feather=3"], "--feather needs --mask"
    yield [f"--ip-adapter={folder}/photo.png"], "is not NAME=FILE"
    yield [adapter, "--ip-adapter-scale=style=1", "--ip-adapter-scale=style=0.5"], "style has two numbers"
    yield [photo, mask, "--feather=nan"], "masks: one of its values is not a finite number"


ODD_VALUES = {
    "prompt: the text is not valid UTF-8": ["a \udcff prompt"],
    "negative_prompt: the text is not valid UTF-8": ["--negative-prompt=\udc80", "x"],
    "guidance_scale: nan is not a finite number": ["--guidance-scale=nan", "x"],
    "A timeout of nan s is not possible": ["--timeout=nan", "x"],
    "A timeout of -1 s is not possible": ["--timeout=-1", "x"],
}
RATE = ["--cold-start=1", "--p99=1", "--curve=1:0.1"]
NEW_FOLDER = [
    *(["save", "--out=new/x.png"], ["generate", "--out=new/x.png", "x"], ["generate", "--previews=new/x.jpg", "x"]),
    *(["demo", "--out=new/x.png"], ["keygen", "new/x.pem"], ["report", "--out=new/x.md"]),
    *(["plan-replicas", *RATE, "constant:0.1", option] for option in ("--out=new/x.json", "--plot=new/x.png")),
    ["load", "toy/1", "--out=new/x.json"],
    *(["bench", name, "toy/1", "--out=new/x.json"] for name in ("latency", "cold-start", "multi-gpu")),
    *(["export-onnx", "x", "--out=new/x"], ["export-triton", "toy/1", "--out=new/x"]),
    *(["triton-client", "x", "--out=new/x.png"], ["check-fp8", "x", "--out=new/x", "--count=1"]),
    ["gateway", "--history=new/x.db", "--port=21999"],
]
READING = [["releases"], ["verify"], ["verify", "toy/1"], ["gc", "--delete"], ["copy", "toy/1", "--store=other"],
           ["serve", "toy/1"], ["load", "toy/1"], ["publish", "toy"]]  # fmt: skip


def refused_commands(sandbox: Path, url: str) -> Iterator[tuple[Invocation, str]]:
    """Yield commands that are refused before anything is requested or written, and the reason."""
    files, work = sandbox / "files", sandbox / "work"
    answer = f'{{"images": [{{"data": "{PNG}"}}, {{"data": "{PNG}"}}]}}'.encode()
    for reason, path in invalid_targets(files).items():
        yield Invocation(["generate", url, "--images=2", f"--out={path}", "x"]), reason
        yield Invocation(["save", f"--out={path}"], answer), reason
    for options, reason in bad_images(files):
        yield Invocation(["generate", url, *options, "x"]), reason
    for reason, options in ODD_VALUES.items():
        yield Invocation(["generate", url, *options]), reason
    for args in NEW_FOLDER:
        args = [*args, url] if args[0] == "generate" else args
        yield Invocation(args), "the folder new does not exist. Make it with `mkdir -p new`"
    (work / "file").touch()
    for args in READING:
        option = "--from" if args[0] == "copy" else "--store"
        for name, reason in (
            *(("typo", "No such file or directory"), ("file", "it is not a folder")),
            ("file/store", "Not a directory"),
        ):
            yield Invocation([*args, option, str(work / name)]), f"is not a store: {reason}. Check --store"
    for name in ("[red]x[/]", "[/]", "\\[/]", ":warning:", "\udcff"):  # shown unchanged
        shown = name.encode(errors="backslashreplace").decode()
        yield Invocation(["generate", f"--out=file/{name}.png", "x"]), f"file/{shown}.png cannot be written"
    (work / "store").mkdir()
    yield Invocation(["verify"]), "has no release and no adapter. Check --store"
    yield Invocation(["serve", "toy/1", "--store=store"]), "Release toy/1 was not found"
    yield Invocation(["plan-replicas", *RATE, "constant:1e9"]), "more than 10,000,000 requests"


def test_commands_refuse_before_they_do_anything(sandbox: Path, server: CountingServer) -> None:
    cases = list(refused_commands(sandbox, server.option))
    before = sorted(sandbox.rglob("[!.]*"))
    results = commands.run(sandbox, [case for case, _ in cases])
    for (case, reason), result in zip(cases, results, strict=True):
        assert result["status"] in (1, 2) and reason in result["stderr"], (case, result)
        assert "Traceback" not in result["stderr"] and not result["forbidden"], (case, result)
        assert result["stdout"] == "", (case, result)
    assert server.received == [] and sorted(sandbox.rglob("[!.]*")) == before
    assert not any(Path("/dev").glob("null*.png")) and not any(Path("/dev").glob("full*.png"))


def option_names(*words: str) -> set[str]:
    """Return the names of all options and arguments of a command."""
    command = command_tree()
    for word in words:
        command = command.commands[word]
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


def test_commands_have_no_options_of_completion() -> None:
    for words in ((), ("bench",), ("bench", "latency"), ("serve",)):
        assert not {name for name in option_names(*words) if "completion" in name}, words


def test_every_field_of_a_request_has_an_option() -> None:
    lists = {"masks": MaskRequest, "loras": LoraRequest, "controls": ControlRequest, "ip_adapters": IpAdapterRequest}
    fields = {name for name in GenerationRequest.model_fields if name not in lists}
    fields |= {f"{name}.{field}" for name, entry in lists.items() for field in entry.model_fields}
    options = {option.field: option.flag.partition("/")[0] for option in FIELD_OPTIONS} | OTHER_OPTIONS
    assert options.keys() == fields
    assert {name.lower() for name in options.values()} <= {name.lower() for name in option_names("generate")}


SCALARS: dict[str, tuple[str, object]] = {
    "--negative-prompt": ("fog", "fog"), "--prompt-syntax": ("weighted", "weighted"), "--width": ("64", 64),
    "--height": ("96", 96), "--seed": ("3", 3), "--steps": ("4", 4), "--scheduler": ("Euler a", "Euler a"),
    "--guidance-scale": ("2.5", 2.5), "--guidance-rescale": ("0.5", 0.5), "--end-cfg-frac": ("0.25", 0.25),
    "--guidance-start": ("0.1", 0.1), "--guidance-end": ("0.9", 0.9), "--forecast": ("fast", "fast"),
    "--clip-skip": ("1", 1), "--refiner": ("", True), "--denoising-frac": ("0.5", 0.5), "--strength": ("1", 1),
    "--resize": ("pad", "pad"), "--composite": ("", True), "--color-match": ("", True), "--upscale": ("2", 2),
    "--original-size": ("640x480", [480, 640]), "--crop": ("8,16", [8, 16]), "--target-size": ("64x32", [32, 64]),
    "--timesteps": ("999,500", [999, 500]), "--sigmas": ("9.5,0", [9.5, 0]), "--quality": ("80", 80),
    "--metadata": ("", True), "--preview-every": ("2", 2), "--model": ("style/2", "style/2"),
}  # fmt: skip
MASKS = ["--image=a.png", "--mask=b.png", "--mask=c.png", "--mask-prompt=a storm", "--mask-prompt=red", "--feather=4"]
MASKS += [*("--mask-negative-prompt=a", "--mask-negative-prompt=b", "--mask-strength=1", "--mask-strength=0.5")]
MODES = (("canny", 0), ("pose", 1))
IMAGES = ["--control=canny=a.png", "--control=pose=b.png", "--canny", "--control-scale=canny=0.5"]
CONTROLS = [*IMAGES, "--control-scale=pose=1"]
CONTROLS += [f"--control-{name}={of}={number}" for name in ("start", "end", "mode") for of, number in MODES]
OLD_CONTROLS = [*IMAGES[:3], "--control-scale=0.5", "--control-scale=1"]
OLD_CONTROLS += [f"--control-{name}={number}" for name in ("start", "end", "mode") for number in (0, 1)]
ADAPTERS = ["--ip-adapter=style=a.png", "--ip-adapter=style=b@home.png", "--ip-adapter=face=c.png"]
OLD_ADAPTERS = ["--ip-adapter=style=a.png@0.5", *ADAPTERS[1:]]
ADAPTERS += ["--ip-adapter-scale=style=0.5"]


def test_generate_sends_what_is_given(sandbox: Path, server: CountingServer) -> None:
    """IP-Adapter images of one name are those of one adapter. A file's name may contain an @."""
    images = {}
    for name in ("a", "b", "c", "b@home"):
        data = base64.b64decode(PNG) + name.encode()
        (sandbox / "work" / f"{name}.png").write_bytes(data)
        images[name] = base64.b64encode(data).decode()
    scalars = [f"{name}={text}" if text else name for name, (text, _) in SCALARS.items()]
    sent = [["x"], [*scalars, "x"], [*MASKS, "x"], [*CONTROLS, "x"], [*ADAPTERS, "x"]]
    sent += [[*OLD_CONTROLS, "x"], [*OLD_ADAPTERS, "x"]]
    bad = [["--crop=1;2", "x"], ["--timesteps=1,x", "x"], ["--sigmas=", "x"], ["--target-size=64", "x"]]
    results = commands.run(sandbox, [Invocation(["generate", server.option, *args]) for args in (*sent, *bad)])
    assert {result["status"] for result in results[len(sent) :]} == {2} and len(server.received) == len(sent)
    plain, of_scalars, masked, controlled, adapted, *old = server.received
    assert old == [controlled, adapted]
    notes = [results[number]["stdout"] for number in (5, 6)]
    assert "--control-scale NUMBER is now --control-scale NAME=NUMBER" in notes[0]
    assert "now --ip-adapter NAME=FILE --ip-adapter-scale style=0.5" in notes[1]
    assert set(plain) == {"prompt", "num_images", "output_format", "stream"}
    fields = {option.flag.partition("/")[0]: option.field for option in FIELD_OPTIONS}
    assert {name: of_scalars[fields[name]] for name in fields} == {name: value for name, (_, value) in SCALARS.items()}
    names = ("image", "prompt", "negative_prompt", "strength", "feather")
    values = [(images["b"], "a storm", "a", 1.0, 4.0), (images["c"], "red", "b", 0.5, 4.0)]
    assert masked["image"] == images["a"]
    assert masked["masks"] == [dict(zip(names, entry, strict=True)) for entry in values]
    names = ("name", "image", "preprocess", "scale", "start", "end", "mode")
    entries = [("canny", images["a"], "canny", 0.5, 0.0, 0.0, 0), ("pose", images["b"], "canny", 1.0, 1.0, 1.0, 1)]
    assert controlled["controls"] == [dict(zip(names, entry, strict=True)) for entry in entries]
    assert adapted["ip_adapters"] == [
        {"name": "style", "images": [images["a"], images["b@home"]], "scale": 0.5},
        {"name": "face", "images": [images["c"]]},
    ]


def test_generate_writes_previews_and_describes(sandbox: Path, server: CountingServer) -> None:
    """With a stream, without one, and only the description, of which any answer is printed."""
    image = {"data": PNG, "seed": 3, "width": 8, "height": 8}
    done: dict[str, Any] = {"timings": {"steps": 1.0}, "time": 0.5, "warnings": ["a [warning]"]}
    lines = [
        {"event": "accepted", "ahead": 0, "steps": 2},
        *({"event": "step", "step": step, "steps": 2, "preview": PNG} for step in (1, 2)),
        {"event": "image", "index": 0, **image},
        {"event": "done", **done},
    ]
    whole = json.dumps({**done, "data": PNG, "images": [image]}).encode()
    server.bodies = ["\n".join(map(json.dumps, lines)).encode(), whole, whole]
    options = (
        ["--previews=p.jpg", "--out=a.png", "x"],
        ["--no-stream", "--out=b.png", "x"],
        ["--describe", "--model=style"],
    )
    cases = [Invocation(["generate", server.option, *args]) for args in options]
    streamed, waited, described = commands.run(sandbox, cases)
    for result, name in ((streamed, "a.png"), (waited, "b.png")):
        assert result["status"] == 0 and "a [warning]" in result["stdout"], result
        assert (sandbox / "work" / name).read_bytes() == base64.b64decode(PNG)
    assert "Step 2 of 2: p.jpg" in streamed["stderr"] and (sandbox / "work" / "p.jpg").is_file()
    assert server.received[-1] == {"prompt": "description", "describe": True, "model": "style"}
    assert described["status"] == 0 and json.loads(described["stdout"])["time"] == 0.5


def test_saves_the_images_that_it_can(sandbox: Path, server: CountingServer) -> None:
    """Also those of an invalid response, and in a read-only folder."""
    folder = sandbox / "files" / "folder"
    folder.mkdir()
    (folder / "x.png").write_bytes(b"before")
    folder.chmod(0o500)
    answer = f'{{"event": "image", "index": 0, "data": "{PNG}"}}\n{{"event": "done"}}\n'
    server.bodies = [answer.encode()]
    generate = Invocation(["generate", server.option, "x"])
    predicted = f'Calling predict on development deployment of model...\n{{"data": "{PNG}"}}\n'  # by `truss predict`
    saved = Invocation(["save", f"--out={folder}/x.png"], predicted.encode())
    stream = Invocation(["save", f"--out={folder}/x.png"], b'{"event": "accepted", "seed": 1}\n{"event": "done"}\n')
    invalid, result, refused = commands.run(sandbox, [generate, saved, stream])
    assert refused["status"] == 1 and "Leave `stream` out of the request." in refused["stderr"]
    assert invalid["status"] == 1 and (sandbox / "work" / "image.png").is_file()
    assert "image.png is saved, but the rest of the response is invalid" in invalid["stderr"]
    assert result["status"] == 0 and (folder / "x.png").read_bytes() == base64.b64decode(PNG), result


def test_help_and_version() -> None:
    """The usage line has the command's name, although a module is started."""
    for args, shown in {
        "--version": "preheat 0.1",
        "-V": "preheat 0.1",
        "-h": "Usage: preheat ",
        "serve -h": "Usage: preheat serve ",
        "bench latency -h": "Usage: preheat bench latency ",
        "help": "Usage: preheat ",
        "help serve": "Usage: preheat serve ",
    }.items():
        result = CliRunner().invoke(app, args, prog_name=PROGRAM)
        assert result.exit_code == 0 and shown in result.stdout, args


@pytest.mark.parametrize("args", [["--help"], ["releases"]], ids=" ".join)
def test_reports_a_full_disk_in_one_line(args: list[str], sandbox: Path) -> None:
    (sandbox / "work" / "store").mkdir()
    with open("/dev/full", "wb") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "preheat", *args],
            cwd=sandbox / "work",
            env=commands.environment(sandbox),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
        )
    assert ran.returncode == 1
    assert ran.stderr == "preheat: The output cannot be written: No space left on device. Free some disk space.\n"


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


def test_written_file_may_be_irreplaceable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It belongs to another user, as whose file a new one would not be, or its folder is read-only."""
    path = tmp_path / "shared"
    path.write_bytes(b"before")
    inode = path.stat().st_ino
    for call, number in (("fchown", errno.EPERM), ("open", errno.EACCES)):

        def refuse(*_: object, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patched:
            patched.setattr(os, call, refuse)
            write_file(path, call.encode())
        assert path.stat().st_ino == inode and path.read_bytes() == call.encode() and list(tmp_path.iterdir()) == [path]


def test_written_file_may_be_standard_output(tmp_path: Path) -> None:
    script = "from pathlib import Path; from engine_builder.files import write_file"
    script += "; write_file(Path('/dev/stdout'), b'image'); print(' and text')"
    with (tmp_path / "out").open("ab") as out:
        subprocess.run([sys.executable, "-c", script], stdout=out, check=True, timeout=60)
    assert (tmp_path / "out").read_bytes() == b"image and text\n"


def test_command_ends_although_the_interpreter_would_hang() -> None:
    """With NCCL in a process, the interpreter may hang at its end. Output and exit code are kept."""
    script = """
import atexit, sys, time
from preheat import main
from model.child_process import mark_hanging_exit
atexit.register(time.sleep, 600)
def app(prog_name):
    mark_hanging_exit()
    print("the rows")
    sys.exit(3)
main.app = app
main.main()
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ran = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (3, "the rows\n")


def test_full_gpu_memory_is_one_message() -> None:
    script = """
import torch
from preheat import main
def app(prog_name):
    raise torch.OutOfMemoryError("CUDA out of memory. Process 7 uses 9 GiB. Of the allocated memory 1 GiB is reserved.")
main.app = app
main.main()
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (1, "") and ran.stderr.startswith("preheat: The GPU's memory is full.")
    assert "Process 7 uses 9 GiB. End other programs" in ran.stderr and ran.stderr.count("\n") == 1


def test_list_of_commands_needs_neither_torch_nor_a_server() -> None:
    script = """
import sys
from preheat.main import app
try:
    app(sys.argv[1:], prog_name="preheat")
except SystemExit:
    print({"torch", "numpy", "truss", "httpx", "boto3"} & set(sys.modules))
"""
    for arguments, words in (
        (["--help"], "export-onnx"),
        (["--version"], "preheat 0"),
        (["serv"], "Did you mean 'serve'"),
    ):
        ran = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60)
        assert words in ran.stdout + ran.stderr and ran.stdout.endswith("set()\n"), ran.stdout + ran.stderr
