"""Fetch the blobs of releases from a bucket into the cache folder, in a separate process. boto3, sockets and hashing
then share neither the interpreter lock nor a core with the import of torch.

The parent sends one line of JSON to the worker's stdin: what to fetch, and credentials. They are not arguments, because
lists of processes show arguments. The worker ends when its stdin is closed. The parent keeps it open during the load,
and a killed parent closes it too. Until then the worker pins its blobs, so that no other process evicts them.

The worker writes to its stdout a line of JSON with the name of each release and the length of its manifest, and then
the manifests as stored in the bucket. It closes stdout when all blobs are fetched. The parent does not trust this
output: the load parses it, checks the signature and hashes the blobs, as for any other source.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from model.child_process import start_child, wait_for_parent
from model.deployment import Deployment
from model.errors import PreheatError
from model.loading.select import select
from model.loading.target import Target
from model.store.manifest import Manifest
from model.store.options import StoreOptions
from model.store.signature import check_signature
from model.store.store import Store

logger = logging.getLogger("preheat")
_NICENESS = 10  # the import has priority where cores are few; at 19 the import ends before the blobs arrive


class PrefetchProcess:
    """The parent's side. The constructor starts the process, and raises OSError if that fails."""

    def __init__(self, python: str = sys.executable) -> None:
        self._process = start_child(
            "model.loading.prefetch_worker.main",
            python=python,
            environment={"PYDANTIC_DISABLE_PLUGINS": "__all__"},  # it searches the disk
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    def send_request(self, url: str, options: StoreOptions, deployment: Deployment, targets: Sequence[Target]) -> None:
        """Send what to fetch: the store and its options, the deployment, and this machine's targets."""
        request = {
            "url": url,
            "options": {name: value for name, value in asdict(options).items() if name != "report"},
            "deployment": deployment.to_json(),
            "targets": [asdict(target) for target in targets],
        }
        with suppress(OSError):  # the process has ended, and `manifests` returns none
            self._stdin.write(json.dumps(request, default=str).encode() + b"\n")
            self._stdin.flush()

    def manifests(self) -> dict[str, bytes]:
        """Wait for the releases' manifests and return them unparsed, without those that the process could not read."""
        manifests = {}
        with suppress(ValueError):  # the process has ended
            for name, length in json.loads(self._stdout.readline()):
                data = self._stdout.read(length)
                if len(data) == length:
                    manifests[name] = data
        return manifests

    def wait(self) -> None:
        """Wait until all fetching has ended."""
        self._stdout.read()

    def wait_exit(self) -> None:
        """Wait for the end of the process, and log an exit that `end` did not cause."""
        if code := self._process.wait():
            logger.error("prefetch ended with exit code %d; the load continues without it", code)
        self._stdout.close()

    def end(self) -> None:
        """End the process at any point. The parts of blobs that it fetched stay in the cache."""
        with suppress(OSError):
            self._stdin.close()


def fetch_selected(
    store: Store, manifests: Sequence[Manifest], deployment: Deployment, targets: Sequence[Target]
) -> None:
    """Check the signatures, select, and fetch what a start reads: the weights only of the first release.

    Raises what `check_signature`, `select` and `Store.fetch` raise.
    """
    for number, manifest in enumerate(manifests):
        check_signature(manifest, deployment.public_keys)
        selection = select(manifest, targets, deployment.alone(manifest.name)).only(deployment.components)
        store.fetch(selection.blobs(weights=not number))


def main() -> None:
    """Run the worker: read the request from stdin, fetch, and end with the parent."""
    os.nice(_NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to both processes, and the parent handles it
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # imported modules may print, and the parent must not read that
    import model.store.s3_bucket  # noqa: F401  slow, so it is imported before the request arrives
    from model.store.manifest_json import parse_manifest
    from model.store.s3 import S3Store

    line = _read_line()
    done = threading.Event()
    parent_watcher = threading.Thread(target=_end_with_parent, args=[done], daemon=True)
    parent_watcher.start()
    request = json.loads(line)
    folder = request["options"].pop("cache_dir")
    try:
        store = S3Store(request["url"], StoreOptions(cache_dir=folder and Path(folder), **request["options"]))
        deployment = Deployment.from_json(request["deployment"]).resolved(store)
        manifests = {release: store.read_manifest(release) for release in deployment.releases}
        lengths = [(release, len(manifest)) for release, manifest in manifests.items()]
        out.write(json.dumps(lengths).encode() + b"\n" + b"".join(manifests.values()))
        out.flush()
        targets = [Target(**target) for target in request["targets"]]
        parsed = [parse_manifest(manifest, release) for release, manifest in manifests.items()]
        fetch_selected(store, parsed, deployment, targets)
    except PreheatError:
        return  # the load raises and reports the same error
    done.set()
    out.close()
    parent_watcher.join()


def _read_line() -> bytes:
    """Read a line of stdin, unbuffered. A thread that waits in a buffered read would block the interpreter's exit."""
    line = b""
    while not line.endswith(b"\n"):
        data = os.read(0, 2**16)
        if not data:
            sys.exit()
        line += data
    return line


def _end_with_parent(done: threading.Event) -> None:
    """Wait until stdin is closed, and then end the process unless it is done."""
    wait_for_parent()
    if not done.is_set():
        os._exit(0)
