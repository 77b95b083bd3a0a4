"""A process that brings a release's blobs from a bucket into the cache folder: boto3, sockets and hashing share neither
the interpreter's lock nor a core with the import of torch.

It is told what to bring in one line of JSON on its stdin (credentials, too, which no list of processes may show), and
ends when that stdin is closed: its parent keeps it open for as long as it loads, and one that was killed does not.
Until then it holds what it brought in use, so that no other process evicts it. On its stdout it says the length of the
release's manifest (8 bytes, big-endian) and the manifest as it lies in the bucket, and closes it when nothing more is
brought. Nothing is believed of it: who loads parses, checks the signature and hashes as if it had come from anywhere.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from model.errors import PreheatError
from model.store.options import StoreOptions

logger = logging.getLogger("preheat")
_LENGTH = 8  # bytes
_NICENESS = 10  # so that the import goes first where cores are few; at 19 the import is over before the blobs are here


class PrefetchProcess:
    """The parent's end. Starts the process at once; raises OSError where it cannot."""

    def __init__(self) -> None:
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._process = subprocess.Popen(
            # -S: no .pth files, which take time; what they add is in that path already. -P: not the current folder.
            [sys.executable, "-S", "-P", "-c", "from model.loading.prefetch_worker import main; main()"],
            env=os.environ
            | {"PYTHONPATH": path, "PYDANTIC_DISABLE_PLUGINS": "__all__"},  # it looks for them on the disk
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    def order(self, url: str, release: str, options: StoreOptions, order: Mapping[str, Any]) -> None:
        """Say what to bring; `order` is what `model.loading.prefetch.bring` takes beside the store and the manifest."""
        said = {name: value for name, value in asdict(options).items() if name != "report"}
        line = json.dumps({"url": url, "release": release, "options": said, "order": order}, default=str)
        with suppress(OSError):  # it has ended, which `manifest` finds
            self._stdin.write(line.encode() + b"\n")
            self._stdin.flush()

    def manifest(self) -> bytes | None:
        """The release's manifest, unread, once it is here; None where the process could not get it."""
        length = int.from_bytes(self._stdout.read(_LENGTH), "big")
        data = self._stdout.read(length)
        return data if length and len(data) == length else None

    def wait(self) -> None:
        """Until nothing more is brought."""
        self._stdout.read()

    def reap(self) -> None:
        """Wait for the end of the process, and say so where it was not `end`'s doing."""
        if code := self._process.wait():
            logger.error("prefetch ended with exit code %d; loading goes on without it", code)
        self._stdout.close()

    def end(self) -> None:
        """End the process, whatever it does. What it has of a blob stays in the cache."""
        with suppress(OSError):
            self._stdin.close()


def main() -> None:
    """The process's own end."""
    os.nice(_NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to both, and the parent decides
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed by anything imported is none of the bytes that the parent reads
    import model.store.s3_bucket  # noqa: F401  takes long, so before it is known what to ask
    from model.loading.prefetch import bring
    from model.store.manifest_json import parse_manifest
    from model.store.s3 import S3Store

    line = _read_line()
    brought = threading.Event()
    lifeline = threading.Thread(target=_end_with_parent, args=[brought], daemon=True)
    lifeline.start()
    told = json.loads(line)
    options = told["options"]
    folder = options.pop("cache_dir")
    try:
        store = S3Store(told["url"], StoreOptions(cache_dir=folder and Path(folder), **options))
        manifest = store.read_manifest(told["release"])
        out.write(len(manifest).to_bytes(_LENGTH, "big") + manifest)
        out.flush()
        bring(store, parse_manifest(manifest, told["release"]), **told["order"])
    except PreheatError:
        return  # loading meets the same, and says it
    brought.set()
    out.close()
    lifeline.join()


def _read_line() -> bytes:
    """Unbuffered, for a thread that waits in a buffered read of stdin does not let the interpreter end."""
    line = b""
    while not line.endswith(b"\n"):
        more = os.read(0, 2**16)
        if not more:
            sys.exit()
        line += more
    return line


def _end_with_parent(brought: threading.Event) -> None:
    while os.read(0, 1):
        pass
    if not brought.is_set():
        os._exit(0)
