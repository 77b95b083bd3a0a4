"""Write files and folders that a user may name by mistake, and list invalid values of options."""

import base64
import json
import os
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat

from engine_builder.stores.store import open_writable_store
from tests.support import releases

TEXTS = [
    "", " ", "a" * 5000, "é" * 300, "\x1b[31mred\x1b[0m", "\x07\x08\r\n\t", "[red]", "[/]", "[/red]", "\\[/]", "[bold",
    "\udcff\udcfe", "a\udc80b", "🜛🜛", "\u202egnp", "--", "-", "%s%n{}{0}", "${HOME}", "~nobody/x", "None", "\ufeff",
]  # fmt: skip
NUMBERS = [
    "", "0", "-1", "1", "1.5", "nan", "inf", "-inf", "1e999", "1e308", "99999999999999999999", "-0", "0x10", "1_000",
    "٣", "one", "[/]", "\udcff",
]  # fmt: skip
SIZES = [
    "", "x", "0x0", "-1x-1", "64", "64x", "64x64", "64x64@", "64x64@0", "64x64@-1", "64x64@x", "65x65", "63x63@1",
    "99999999999x99999999999", "99999999999x99999999999@1", "64X64", "²x²", "٣x٣", "[/]x[/]", "64x64x64",
]  # fmt: skip
NAMES = [
    "", "x", "/", "x/", "/1", "../x", "a/0", "a/1/2", "a/-1", "a/..", "toy/1", "toy/2", "toy/[red]", "[/]/1", "a//1",
    "A/1", "a" * 300 + "/1", "a/" + "9" * 400, "toy/1 ", "\udcff/1", "toy/\x1b[31m", "toy", "b/1", ".", "..", "a/٣",
]  # fmt: skip
URLS = [
    "", "http://", "http://x", "https://127.0.0.1:9", "http://127.0.0.1:9", "http://127.0.0.1:99999", "http://[x",
    "http://127.0.0.1:80a", "ftp://127.0.0.1", "127.0.0.1:9", "localhost:9", "file:///etc/passwd", "http://\udcff",
    "http://a b", "http://[/]", "http://user:pass@127.0.0.1:9", "http://127.0.0.1:9/x?y#z", "//127.0.0.1:9",
    "http://" + "a" * 5000, "http://xn--", "http://é.example", "http://127.0.0.1:-1", "http://127.0.0.1:0",
    "http://.", "http://..", "http://\u202e", "http://127.0.0.1:9\n", "javascript:1",
]  # fmt: skip
_STORE_URLS = [
    "s3://", "s3:///", "s3:///x", "s3://[x", "s3://A B", "s3://x/..", "s3://[red]", "s3://" + "a" * 300, "s3:x",
    "s3://\udcff", "http://x", "http://", "file://host/x", "file://", "file:x", "file:///", "file:///x?y",
    "file:///x#y", "file:///%00", "file://localhost", "gs://x", "file:///%ff",
]  # fmt: skip
JSON = [
    b"", b"{", b"[]", b"{}", b"null", b"1", b'"x"', b"[[]]", b"[{}]", b"[null]", b"NaN", b'{"a": 1e999}', b"\xff\xfe",
    b'{"\xff": 1}', b"[" * 200_000, b'{"a":' * 200_000, b"\0" * 100, b"\xef\xbb\xbf{}", b"1" * 5000,
    b'[{"case": "x"}]', b'{"releases": []}', b'{"_class_name": 3}', b'{"\\ud800": "\\ud800"}',
]  # fmt: skip
_CONFIGS = [
    b"", b"[]", b"1", b"x", b"a: b: c", b"\t", b"\xff", b"model_metadata: 3\n", b"model_metadata: {preheat: []}\n",
    b"resources: {cpu: x}\n", b"python_version: py1\n", b"[" * 2000, b"{" * 2000, b"\0",
    b"a: &a [*a]\n", b"!!python/object/apply:os.system ['true']\n", b"environment_variables: 3\n", b"runtime: x\n",
    b"- [/]\n", b"requirements: 7\n", b"model_metadata: {preheat: {store: 7}}\n",
]  # fmt: skip
_TRAFFIC = [
    b"", b"0,1\n", b"0,1\n1,1\n", b"0,1\n0,1\n", b"x,y\n", b"0,1,2\n", b"0,nan\n1,inf\n", b"\xff\n", b"0,-1\n1,1\n",
    b'"', b"a" * 200_000, b"0,1\n1e308,1\n", b"\0,\0\n", b"0,1\ninf,1\n", b"1e308,1e308\n1.7e308,1e308\n",
]  # fmt: skip


@dataclass(frozen=True)
class OddFiles:
    """Paths by the kind of file that they may be mistaken for. All are in one folder."""

    paths: list[str]
    json: list[str]
    configs: list[str]
    traffic: list[str]
    keys: list[str]
    models: list[str]
    stores: list[str]
    good_store: str


def write(root: Path) -> OddFiles:
    """Write them into `root`, an empty folder."""
    paths = _paths(root)
    return OddFiles(
        paths=paths,
        json=_files(root / "json", JSON, ".json"),
        configs=_files(root / "configs", _CONFIGS, ".yaml"),
        traffic=_files(root / "traffic", _TRAFFIC, ".csv"),
        keys=_files(root / "keys", _keys(), ".pem"),
        models=_models(root / "models"),
        stores=[*_STORE_URLS, *paths, *_stores(root / "stores")],
        good_store=str(_good_store(root / "store")),
    )


def _paths(root: Path) -> list[str]:
    """Write files and folders of every kind. Returns their paths, and some that do not exist."""
    (root / "folder").mkdir()
    (root / "empty").touch()
    (root / "text.txt").write_text("text\n")
    (root / "locked").mkdir(mode=0)
    (root / "locked-file").touch(mode=0)
    (root / "read-only").mkdir(mode=0o500)
    (root / "read-only-file.png").touch(mode=0o400)
    os.mkfifo(root / "pipe")
    os.mkfifo(root / "pipe.png")
    (root / "folder.png").mkdir()
    (root / "loop").symlink_to(root / "loop")
    (root / "dangling").symlink_to(root / "missing" / "target")
    (root / "[red]").mkdir()
    names = [
        "folder", "empty", "text.txt", "locked", "locked/x.json", "locked-file", "read-only/new", "read-only/new.png",
        "read-only-file.png", "pipe", "pipe.png", "folder.png", "loop", "loop/x", "dangling", "[red]", "[/]/x",
        "missing", "missing/deep/x", "empty/x", "folder/", "folder/..", "missing/..", "a" * 300, "a/" * 3000 + "b",
        "\udcff.png", "é.png", "new.png", "new.jpeg", "new\n.png", "new\x1b[31m.webp",
    ]  # fmt: skip
    return [f"{root}/{name}" for name in names] + [
        "", ".", "..", "/", "/dev/null", "/dev/full", "/dev/zero", "/proc/self/mem", "/dev/tty", "~", "relative", "-",
    ]  # fmt: skip


def _files(folder: Path, contents: list[bytes], suffix: str) -> list[str]:
    folder.mkdir()
    paths = [folder / f"{number}{suffix}" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return [str(path) for path in paths]


def _keys() -> list[bytes]:
    key = generate_private_key(SECP256R1())
    forms = (NoEncryption(), BestAvailableEncryption(b"x"))
    written = [key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, form) for form in forms]
    begin, end = b"-----BEGIN PRIVATE KEY-----\n", b"-----END PRIVATE KEY-----\n"
    return [*written, b"", b"\xff", begin + end, begin + b"AAAA\n" + end, begin + b"[/]\n" + end, b"A" * 100_000]


def _models(folder: Path) -> list[str]:
    """Write folders that look like diffusers' but have no weights, so nothing can be built from them."""
    folder.mkdir()
    for number, content in enumerate(JSON):
        for file in ("model_index.json", "unet/config.json"):
            model = folder / f"{number}-{file.partition('/')[0]}"
            (model / file).parent.mkdir(parents=True, exist_ok=True)
            (model / "model_index.json").write_text('{"_class_name": "StableDiffusionXLPipeline"}')
            (model / file).write_bytes(content)
    pipe = folder / "pipe"
    pipe.mkdir()
    os.mkfifo(pipe / "model_index.json")
    locked = folder / "locked"
    locked.mkdir()
    (locked / "model_index.json").touch(mode=0)
    return [str(path) for path in sorted(folder.iterdir())]


def _good_store(folder: Path) -> Path:
    """Write a store with the release toy/1, whose engines are not engines."""
    store = open_writable_store(folder)
    store.write_release(releases.draft_release(store))
    return folder


def _stores(folder: Path) -> list[str]:
    """Write stores with one invalid entry each."""
    folder.mkdir()
    for number, content in enumerate(JSON):
        releases.write_manifest(folder / f"release-{number}", content)
        record = folder / f"record-{number}" / "records" / "drafts" / "toy.json"
        record.parent.mkdir(parents=True)
        record.write_bytes(content)
    for entry in ("blobs", "blobs/sha256", "releases", "releases/toy", "records", "records/drafts"):
        name = entry.replace("/", "-")
        (folder / f"file-{name}" / entry).parent.mkdir(parents=True)
        (folder / f"file-{name}" / entry).touch()
        (folder / f"locked-{name}" / entry).mkdir(parents=True)
        (folder / f"locked-{name}" / entry).chmod(0)
        (folder / f"loop-{name}" / entry).parent.mkdir(parents=True)
        (folder / f"loop-{name}" / entry).symlink_to(folder / f"loop-{name}" / entry)
    for entry in ("releases/toy/1.json", "records/drafts/toy.json", f"blobs/sha256/{'0' * 64}"):
        name = entry.replace("/", "-")
        for kind in ("folder", "pipe", "locked", "dangling"):
            path = folder / f"{kind}-{name}" / entry
            path.parent.mkdir(parents=True)
            match kind:
                case "folder":
                    path.mkdir()
                case "pipe":
                    os.mkfifo(path)
                case "locked":
                    path.touch(mode=0)
                case "dangling":
                    path.symlink_to(folder / "nothing")
    for name in ("[red]", "\udcff", "a\nb", "..x", "\x1b[31m"):
        path = folder / "names" / "releases" / name / f"{name}.json"
        path.parent.mkdir(parents=True)
        path.write_text("{}")
    return [str(path) for path in sorted(folder.iterdir())]


def unlock(root: Path) -> None:
    """Make all folders writable again, so that pytest can delete them."""
    for path in root.rglob("*"):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700)


def base64_text(data: bytes) -> str:
    """Encode bytes for a line of JSON."""
    return base64.b64encode(data).decode()


def predict_outputs() -> list[bytes]:
    """Return inputs of `preheat save` that `truss predict` never prints."""
    image = base64_text(b"\x89PNG\r\n\x1a\n" + b"x" * 20)
    odd = [None, 3, [], {}, "x", image, [image], {"data": 3}, {"data": None}, [{"data": 3}], [3], [None], [[]],
           [{"data": image}], [{}], [{"data": image}, {"data": "!"}], True, 1e999, [{"data": [image]}]]  # fmt: skip
    responses = [{key: value} for key in ("data", "images", "error", "status") for value in odd]
    responses += [{"data": image, "images": value} for value in odd]
    texts = [b"Calling...\n" + json.dumps(response).encode() for response in responses]
    deep = [b'{"data":' + b"[" * 200_000, b'{"data": "' + b"A" * 10_000 + b'"}', b"\xff{\xff", b"{" * 100_000]
    return [*texts, *deep, *JSON]
