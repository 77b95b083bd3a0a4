"""Attacks on a gateway, each a function that sends for some seconds.

`python -m tests.support.attacks NAME URL KEY SECONDS` runs one. They run in a process of their own, so that they do
not slow down the test that measures the gateway.
"""

import base64
import io
import json
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from PIL import Image

MIB = 2**20
PREDICT, EDITS = "/v1/models/model:predict", "/v1/images/edits"
JSON, FORM = "application/json", "multipart/form-data; boundary=x"
_CHUNK = 2**18


@dataclass(frozen=True)
class Target:
    """A gateway at a port of 127.0.0.1, the attacker's key, and the time when an attack ends (`time.monotonic()`)."""

    port: int
    key: str
    end: float

    def connect(self) -> socket.socket:
        """Open a connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=5)

    def head(self, path: str, content_type: str, *headers: str) -> bytes:
        """Return the head of a POST request."""
        lines = (f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {self.key}", *headers)
        return "\r\n".join((*lines, f"Content-Type: {content_type}", "", "")).encode()

    def post(self, path: str, content_type: str, body: bytes) -> None:
        """Send a whole request and read its answer."""
        with suppress(OSError), self.connect() as connection:
            connection.settimeout(30)
            connection.sendall(self.head(path, content_type, f"Content-Length: {len(body)}") + body)
            connection.recv(2**16)

    def is_on(self) -> bool:
        """True until the attack ends."""
        return time.monotonic() < self.end

    @contextmanager
    def holding(self) -> Iterator[Callable[[bytes], None]]:
        """Yield a function that opens a connection, sends bytes on it and keeps it open until the attack ends."""
        with ExitStack() as stack:

            def hold(content: bytes) -> None:
                with suppress(OSError):  # refused: the next one may not be
                    if not self.is_on():
                        return
                    connection = stack.enter_context(self.connect())
                    for start in range(0, len(content), _CHUNK):
                        connection.sendall(content[start : start + _CHUNK])

            yield hold
            while self.is_on():
                time.sleep(0.1)


def _repeat_body(content_type: str, body: bytes, path: str = PREDICT) -> Callable[[Target], None]:
    def attack(target: Target) -> None:
        while target.is_on():
            target.post(path, content_type, body)

    return attack


def _hold_bodies(*counts_and_sizes: tuple[int, int], is_chunked: bool = False) -> Callable[[Target], None]:
    """Return the attack that sends all but the last bytes of bodies: so many of so many MiB."""

    def attack(target: Target) -> None:
        with target.holding() as hold, ThreadPoolExecutor(16) as senders:  # a body may wait for memory
            for count, mib in counts_and_sizes:
                size = mib * MIB
                body = b'{"prompt": "x", "image": "'.ljust(size - 9, b"A")
                if is_chunked:
                    content = target.head(PREDICT, JSON, "Transfer-Encoding: chunked") + b"%x\r\n" % size + body
                else:
                    content = target.head(PREDICT, JSON, f"Content-Length: {size}") + body
                for _ in range(count):
                    senders.submit(hold, content)

    return attack


def _hold_heads(count: int, *heads: bytes) -> Callable[[Target], None]:
    def attack(target: Target) -> None:
        with target.holding() as hold:
            for number in range(count):
                hold(heads[number % len(heads)])

    return attack


def _dribble(target: Target) -> None:
    """Send 200 bodies, a byte of each at a time."""
    with ExitStack() as stack:
        connections = []
        for _ in range(200):
            connection = stack.enter_context(target.connect())
            connection.sendall(target.head(PREDICT, JSON, "Content-Length: 1000000"))
            connections.append(connection)
        while target.is_on():
            for connection in connections:
                with suppress(OSError):
                    connection.sendall(b" ")
            time.sleep(0.5)


def _tiny_chunks(target: Target) -> None:
    """Send a chunked body of one byte in each chunk."""
    while target.is_on():
        with suppress(OSError), target.connect() as connection:
            connection.sendall(target.head(PREDICT, JSON, "Transfer-Encoding: chunked"))
            while target.is_on():
                connection.sendall(b"1\r\nA\r\n" * 2**15)


def _unread_answers(target: Target) -> None:
    """Request answers and never read them."""
    with ExitStack() as stack:
        while target.is_on():
            with suppress(OSError):
                connection = stack.enter_context(target.connect())
                connection.sendall((b"GET /main.js HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n") * 50)
            time.sleep(0.02)


def _json(
    fill: bytes, size: int = 40_000_000, start: bytes = b'{"prompt": "x", "masks": [', end: bytes = b"1]}"
) -> bytes:
    return start + fill * ((size - len(start) - len(end)) // len(fill)) + end


def _members(size: int = 40_000_000) -> bytes:
    return b"{" + b",".join(b'"%x":1' % number for number in range(size // 11)) + b"}"


def _form(part: bytes, count: int) -> bytes:
    return b"".join(b"--x\r\n" + part % {b"n": number} for number in range(count)) + b"--x--\r\n"


_FIELD = b'Content-Disposition: form-data; name="%(n)d"\r\n\r\n1\r\n'


def _file(mode: str, color: Any, **options: Any) -> bytes:
    """Return a small file of 32 megapixels."""
    written = io.BytesIO()
    Image.new(mode, (8000, 4000), color).save(written, **{"format": "PNG", **options})
    return written.getvalue()


def _image_bombs(target: Target) -> None:
    """Send twelve requests at once: of 96 megapixels, of the longest prompts, and of a transparent image."""
    texts = {"prompt": "\U0001f600" * 4000, "negative_prompt": "\U0001f600" * 3999}
    mask, small = base64.b64encode(_file("L", 255)).decode(), {"width": 64, "height": 64, "resize": "stretch"}
    files = (_file("RGB", 0), _file("RGBA", (1, 2, 3, 99)), _file("RGB", 9, format="JPEG", progressive=True))
    images = [base64.b64encode(file).decode() for file in files]
    requests = [{"prompt": "a", "image": image, "strength": 1.0, "masks": [{"image": mask}] * 2} for image in images]
    requests.append({"prompt": "a", "image": mask, "masks": [{"image": mask} | texts]})
    bodies = [
        (JSON, json.dumps(request | small | {"num_inference_steps": 2}).encode(), PREDICT) for request in requests
    ]
    part = b'Content-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n' + _file("RGBA", (0, 0, 0, 0))
    prompt = b'Content-Disposition: form-data; name="prompt"\r\n\r\na'
    form = b"".join(b"--x\r\n" + one + b"\r\n" for one in (part, prompt)) + b"--x--\r\n"
    with ThreadPoolExecutor(12) as pool:
        for number in range(6):
            pool.submit(_repeat_body(*bodies[number % len(bodies)]), target)
            pool.submit(_repeat_body(FORM, form, EDITS), target)


# Each sends for as long as the test asks. Bodies are made when their attack starts.
ATTACKS: dict[str, Callable[[Target], None]] = {
    "members": lambda target: _repeat_body(JSON, _members())(target),
    "values": lambda target: _repeat_body(JSON, _json(b"1,"))(target),
    "nested arrays": lambda target: _repeat_body(JSON, _json(b"["))(target),
    "escapes": lambda target: _repeat_body(JSON, _json(rb"\u0041", start=b'{"prompt": "', end=b'"}'))(target),
    "digits": lambda target: _repeat_body(JSON, _json(b"1", start=b'{"seed": 0.', end=b"}"))(target),
    "whole numbers": lambda target: _repeat_body(JSON, _json(b"1" * 4300 + b","))(target),
    "wide text": lambda target: _repeat_body(
        JSON, _json(b"A", start='{"prompt": "\U0001f600'.encode(), end=b'"}', size=60_000_000)
    )(target),
    "parts of a form": lambda target: _repeat_body(FORM, _form(_FIELD, 600_000), EDITS)(target),
    "headers of a part": lambda target: _repeat_body(FORM, b"--x\r\n" + b"a: b\r\n" * 6_000_000, EDITS)(target),
    "half-open connections": _hold_heads(500, b"", b"GET / HTTP/1.1\r\n", b"POST / HTTP/1.1\r\nX: " + b"a" * 9000),
    "5,000 half-open connections": _hold_heads(5000, b"GET /health HTTP/1.1\r\n"),
    "half-sent bodies": _hold_bodies((34, 30), (60, 1)),
    "half-sent chunked bodies": _hold_bodies((34, 30), (60, 1), is_chunked=True),
    "dribbled bodies": _dribble,
    "image bombs": _image_bombs,
    "tiny chunks": _tiny_chunks,
    "unread answers": _unread_answers,
}


if __name__ == "__main__":
    name, url, key, seconds = sys.argv[1:]
    ATTACKS[name](Target(int(url.rpartition(":")[2]), key, time.monotonic() + float(seconds)))
