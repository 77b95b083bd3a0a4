"""The limit of request bodies, as ASGI middleware and on the real server."""

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope

from model.api.body_limit import CLIENT, MAX_BODY_BYTES, SMALL_BODY_BYTES, BodyLimit, BodyLimits
from model.errors import Overloaded, PreheatError
from model.statuses import status_of
from preheat.local_server.server import Server
from tests.support.predictions import PREDICT_PATH
from tests.support.waiting import TIMEOUT_SECONDS

LIMIT, TOTAL = 3 * 2**20, 5 * 2**20
LIMITS = BodyLimits(body=LIMIT, total=TOTAL)


def refuse(scope: Scope, error: PreheatError) -> Response:
    status, _ = status_of(error)
    return JSONResponse({"error": str(error), "id": Headers(scope=scope).get("X-Request-Id")}, status)


class Echo:
    """An application that answers with the size of the body, once `answer` is set.

    `parts` counts the messages that were read, `read` the whole bodies.
    """

    def __init__(self) -> None:
        self.parts = self.read = 0
        self.answer = asyncio.Event()
        self.answer.set()
        self.application = Starlette(routes=[Route("/", self.endpoint, methods=["POST"])])
        self.limited = BodyLimit(self.application, refuse, LIMITS)

    async def endpoint(self, request: Request) -> Response:
        size = 0
        async for part in request.stream():
            self.parts += 1
            size += len(part)
        self.read += 1
        await self.answer.wait()
        return PlainTextResponse(str(size))

    async def post(self, content: bytes | AsyncIterator[bytes], **headers: str) -> httpx.Response:
        transport = httpx.ASGITransport(app=self.limited)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post("/", content=content, headers=headers)


async def chunks(size: int, chunk: int = 2**16) -> AsyncIterator[bytes]:
    for _ in range(size // chunk):
        yield b"A" * chunk


def run_within_timeout(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, TIMEOUT_SECONDS))


def test_limits_the_size_of_a_body() -> None:
    async def run() -> None:
        echo = Echo()
        for content in (b"", b"x", b"A" * LIMIT, chunks(LIMIT)):
            answer = await echo.post(content)
            assert answer.status_code == 200
        assert answer.text == str(LIMIT)
        echo.parts = 0
        answer = await echo.post(b"A" * (LIMIT + 1), **{"X-Request-Id": "abc"})
        assert answer.status_code == 413 and answer.json()["id"] == "abc" and "3 MiB" in answer.json()["error"]
        assert echo.parts == 0, "the body was read"
        for _ in range(5):
            echo.parts = 0
            answer = await echo.post(chunks(4 * LIMIT))
            assert answer.status_code == 413 and answer.headers["Connection"] == "close"
            assert echo.parts * 2**16 <= LIMIT
        assert (await echo.post(b"A" * LIMIT)).status_code == 200, "the memory was not given back"

    run_within_timeout(run())


def test_limits_the_bodies_of_all_requests() -> None:
    async def run() -> None:
        echo = Echo()
        echo.answer.clear()
        held = [asyncio.create_task(echo.post(b"A" * (size))) for size in (LIMIT, TOTAL - LIMIT)]
        while echo.read < 2:
            await asyncio.sleep(0)
        answer = await echo.post(b"A" * (SMALL_BODY_BYTES + 1))
        assert answer.status_code == 429 and "Repeat the request" in answer.json()["error"]
        small = asyncio.create_task(echo.post(b"A" * (SMALL_BODY_BYTES)))
        echo.answer.set()
        assert [(await task).status_code for task in (*held, small)] == [200, 200, 200]
        assert (await echo.post(b"A" * (LIMIT))).status_code == 200, "the memory was not given back"

    run_within_timeout(run())


def stalling(*parts: bytes, seconds: float = 0.02) -> Receive:
    """A client that sends parts of a body, with so many seconds before each, and then nothing."""
    left = list(parts)

    async def receive() -> Message:
        if not left:
            await asyncio.Event().wait()
        await asyncio.sleep(seconds)
        return {"type": "http.request", "body": left.pop(0), "more_body": True}

    return receive


def half_sent(limited: BodyLimit, size: int, client: str, *parts: bytes) -> "asyncio.Task[int]":
    """Send parts of a body of a stated size. Returns a task with the status of the answer."""
    headers = [(b"content-length", str(size).encode())]
    scope = {"type": "http", "path": "/", "method": "POST", "headers": headers, CLIENT: client}
    status = 0

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)

    async def run() -> int:
        await limited(scope, stalling(*parts), send)
        return status

    return asyncio.create_task(run())


def test_ends_a_body_that_does_not_arrive() -> None:
    async def run() -> None:
        limited = BodyLimit(Echo().application, refuse, BodyLimits(progress_seconds=0.05, pause_seconds=0.05))
        for parts in ((), (b"A",), (b"A" * 2**20,)):
            assert await half_sent(limited, 2**21, "", *parts) == 408

    run_within_timeout(run())


def test_stalled_body_yields_to_one_that_needs_its_memory() -> None:
    async def run() -> None:
        echo = Echo()
        limits = BodyLimits(arriving=4 * 2**20, yield_seconds=0.05, pause_seconds=0.05)
        limited = BodyLimit(echo.application, refuse, limits)
        held = half_sent(limited, 3 * 2**20, "", b"A")
        await asyncio.sleep(0)
        transport = httpx.ASGITransport(app=limited)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            assert (await client.post("/", content=b"A" * 3 * 2**20)).status_code == 200
        assert await held == 429

    run_within_timeout(run())


# Bodies that another client has begun, as numbers of bytes and whether they still arrive, slowly.
HELD_BY_ANOTHER: dict[str, list[tuple[int, bool]]] = {
    "small bodies": [(200, False)] * 600,
    "large bodies": [(8 * 2**20, True), (5 * 2**20, True)],
    "one large body": [(14 * 2**20, True)],
}


@pytest.mark.parametrize("case", HELD_BY_ANOTHER)
def test_client_leaves_room_for_others(case: str) -> None:
    async def run() -> None:
        limits = BodyLimits(arriving=32 * 2**20, share=0.5, yield_seconds=0.05, wait_seconds=2, pause_seconds=0.05)
        limited = BodyLimit(Echo().application, refuse, limits)
        held = [
            half_sent(limited, size, "one", b"A", *([b"A"] * 1000 if arrives else []))
            for size, arrives in HELD_BY_ANOTHER[case]
        ]
        await asyncio.sleep(0.01)
        other = half_sent(limited, 12 * 2**20, "other", b"A" * 2**19)
        await asyncio.wait([other], timeout=0.5)
        assert [body.client for body in limited.bodies].count("other") == 1
        for task in (other, *held):
            task.cancel()

    run_within_timeout(run())


def test_slow_body_is_kept_while_it_arrives() -> None:
    async def run() -> None:
        echo = Echo()
        limits = BodyLimits(arriving=4 * 2**20, yield_seconds=0.4, wait_seconds=1, pause_seconds=0.05)
        limited = BodyLimit(echo.application, refuse, limits)
        held = half_sent(limited, 3 * 2**20, "", *[b"A" * 100] * 100)
        await asyncio.sleep(0)
        assert await half_sent(limited, 2 * 2**20, "") == 429 and not held.done()
        held.cancel()

    run_within_timeout(run())


def test_body_given_up_with_its_last_part_is_not_used() -> None:
    async def run() -> None:
        echo = Echo()
        limited = BodyLimit(echo.application, refuse, BodyLimits(pause_seconds=0.05))
        statuses: list[int] = []

        async def receive() -> Message:
            next(iter(limited.bodies)).give_up(Overloaded("", 1))
            return {"type": "http.request", "body": b"A", "more_body": False}

        async def send(message: Message) -> None:
            statuses.append(message.get("status", 0))

        headers = [(b"content-length", b"1")]
        await limited({"type": "http", "path": "/", "method": "POST", "headers": headers}, receive, send)
        assert statuses[0] == 429 and echo.read == 0

    run_within_timeout(run())


# -- the real server --------------------------------------------------------------------------------------------------


def body(size: int) -> bytes:
    """Return a request of `size` bytes with an unknown field."""
    head, tail = b'{"prompt": "x", "padding": "', b'"}'
    return head + b"x" * (size - len(head) - len(tail)) + tail


def in_chunks(content: bytes) -> Iterator[bytes]:
    return (content[start : start + 2**20] for start in range(0, len(content), 2**20))


def test_server_limits_bodies(client: httpx.Client) -> None:
    largest, too_large = body(MAX_BODY_BYTES), body(65 * 2**20)
    for content in (too_large, in_chunks(too_large)):
        answer = client.post(PREDICT_PATH, content=content, headers={"X-Request-Id": "large-1"})
        assert answer.status_code == 413
        assert answer.json()["kind"] == "too_large" and "64 MiB" in answer.json()["error"]
        assert answer.headers["X-Request-Id"] == "large-1"
    assert re.search(r'^preheat_errors_total\{kind="too_large"\} [1-9]', client.get("/metrics/").text, re.MULTILINE)
    answer = client.post(PREDICT_PATH, content=in_chunks(largest))
    assert answer.status_code == 400 and "padding" in answer.json()["error"]


def send_raw(server: Server, content: bytes) -> bytes:
    """Send bytes. Return the status of the answer."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(content)
        return connection.recv(4096).split(b" ", 2)[1]


def test_server_answers_malformed_framing(server: Server) -> None:
    head = f"POST {PREDICT_PATH} HTTP/1.1\r\nHost: x\r\n"
    for length in ("68157441", "9" * 20, "9" * 4400, "-1", "1e9", "0x10", "६"):
        status = send_raw(server, f"{head}Content-Length: {length}\r\n\r\n".encode())
        expected = (b"413",) if re.fullmatch(r"[1-9][0-9]{6,19}", length) else (b"400", b"413")
        assert status in expected, length
    chunks_of_a_byte = f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + b"1\r\nA\r\n" * 10_000
    assert send_raw(server, chunks_of_a_byte) == b"400"


def test_server_refuses_bodies_that_are_costly_to_parse(client: httpx.Client) -> None:
    values, maps = b"[" + b"1," * 2**22 + b"1]", b"\xdd\0\x20\0\0" + b"\x80" * 2**21
    for content_type, content, reason in (
        ("application/json", values, "besides base64"),
        ("multipart/form-data; boundary=x", values, "besides base64"),
        ("text/plain", values, "besides base64"),
        ("application/octet-stream", maps, "values"),
    ):
        answer = client.post(PREDICT_PATH, content=content, headers={"Content-Type": content_type})
        assert answer.status_code == 400 and answer.json()["kind"] == "refused" and reason in answer.text, content_type
