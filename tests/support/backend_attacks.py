"""Backends that try to harm a gateway: `python -m tests.support.backend_attacks NAME VICTIMS SECONDS` prints its port.

Then it reads the gateway's URL, and sends the requests that it attacks, so many at once.
"""

import gzip
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import ThreadingHTTPServer
from itertools import repeat
from typing import Any

import httpx

from tests.support.http_server import QuietHandler

RELEASE = "evil/1"
CHUNK = b"a" * 2**16
OK = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
DESCRIPTION = json.dumps({"release": RELEASE, "defaults": {"num_inference_steps": 2}}).encode()
ACCEPTED = b'{"event": "accepted", "seed": 1, "steps": 1}\n'
ZEROS = gzip.compress(bytes(2**24))
Parts = Iterator[bytes]


def answer(*parts: bytes, then: bytes = b"", seconds: float = 0) -> Parts:
    """Yield parts, and one of them again and again after `seconds`."""
    yield from parts
    for part in repeat(then) if then else ():
        time.sleep(seconds)
        yield part


def bomb() -> Parts:
    """A small body that unpacks to 1 GiB."""
    return answer(OK[:-2] + b"Content-Encoding: gzip\r\n\r\n", ZEROS * 64)


# Name -> the kind of request that is answered so (health, describe or images; others are answered well), and how.
ATTACKS: dict[str, tuple[str, Callable[[], Parts]]] = {
    "endless line": ("images", lambda: answer(OK, ACCEPTED, then=CHUNK)),
    "endless first line": ("images", lambda: answer(OK, then=CHUNK)),
    "slow endless line": ("images", lambda: answer(OK, ACCEPTED, CHUNK * 160, then=b"a", seconds=0.05)),
    "line of values": ("images", lambda: answer(OK, ACCEPTED, b'{"a": [' + b"{}," * 2_500_000 + b"1]}\n")),
    "flood of heartbeats": ("images", lambda: answer(OK, ACCEPTED, then=b'{"event": "heartbeat"}\n' * 2000)),
    "flood of previews": (
        "images",
        lambda: answer(OK, ACCEPTED, then=b'{"event":"step","step":1,"steps":1,"preview":"%s"}\n' % (CHUNK * 12)),
    ),
    "endless headers": ("images", lambda: answer(b"HTTP/1.1 200 OK\r\n", then=b"X-A: " + CHUNK[:1000] + b"\r\n")),
    "endless first header": ("images", lambda: answer(b"HTTP/1.1 200 OK\r\nX-A: ", then=CHUNK)),
    "chunks of a byte": (
        "images",
        lambda: answer(OK[:-2] + b"Transfer-Encoding: chunked\r\n\r\n", then=b"1\r\na\r\n" * 10_000),
    ),
    "endless error": ("images", lambda: answer(OK.replace(b"200", b"400"), then=CHUNK)),
    "compressed": ("images", bomb),
    "endless description": ("describe", lambda: answer(OK, then=CHUNK)),
    "compressed description": ("describe", bomb),
    "endless health": ("health", lambda: answer(OK, then=CHUNK)),
}


def send_victims(url: str, number: int, end: float) -> None:
    sizes = {"width": 1024, "height": 1024} if number % 4 > 1 else {}
    body = {"prompt": "x", "stream": number % 2 > 0} | sizes
    while time.monotonic() < end:
        options: Any = {"trust_env": False, "timeout": max(1, end - time.monotonic())}
        with suppress(httpx.HTTPError), httpx.stream("POST", url, json=body, **options) as answer:
            assert answer.status_code != 500
            for _ in answer.iter_bytes():
                if time.monotonic() > end:
                    break


def serve(name: str, victims: int, seconds: float) -> None:
    """Serve the attack until the process is ended."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self._send("health")

        def do_POST(self) -> None:
            body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send("describe" if body.get("describe") else "images")

        def _send(self, kind: str) -> None:
            attacked, parts = ATTACKS[name]
            try:
                for part in parts() if kind == attacked else answer(OK, DESCRIPTION):
                    self.wfile.write(part)
            except OSError:
                pass  # the gateway has had enough

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    url = f"{sys.stdin.readline().strip()}/v1/models/model:predict?model={RELEASE}"
    end = time.monotonic() + seconds
    with ThreadPoolExecutor(victims) as pool:
        for sending in [pool.submit(send_victims, url, number, end) for number in range(victims)]:
            sending.result()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
