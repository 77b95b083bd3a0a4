"""The middleware that ends a server gracefully: with signals to this process in place of a server's, and in uvicorn."""

import asyncio
import math
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Scope

from gateway.errors import ApiError
from gateway.request_end import until_shutdown
from model.api.body_limit import BodyLimit, BodyLimits
from model.api.shutdown import GracefulShutdown, wait_for_end
from model.errors import PreheatError, Unavailable
from tests.support.waiting import TIMEOUT_SECONDS

Work = Callable[[Request], Awaitable[Response]]


@pytest.fixture
def ended() -> Iterator[list[int]]:
    """The signals that the server's own handlers have received, which end it."""
    received: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda number, _: received.append(number)) for number in numbers]
    yield received
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def refuse(scope: Scope, error: PreheatError) -> Response:
    return JSONResponse(str(error), 503 if isinstance(error, Unavailable) else 500)


class Scene:
    """A server with one request in flight, whose `work` waits for `finish`. `arrived`: the requests so far."""

    def __init__(self, grace_seconds: float, work: Work | None = None) -> None:
        self.began, self.finish = asyncio.Event(), asyncio.Event()
        routes = [Route("/", self._work, methods=["POST"]), Route("/health", self._health)]
        self.shutdown = GracefulShutdown(grace_seconds, refuse)
        self._inner = work or self._finish
        stack = self.shutdown.wrap(Starlette(routes=routes))
        self.application = BodyLimit(stack, refuse, BodyLimits(pause_seconds=0.05))
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(self.application), base_url="http://server")
        self.arrived = 0

    async def _work(self, http: Request) -> Response:
        self.arrived += 1
        await http.body()
        self.began.set()
        return await self._inner(http)

    async def _finish(self, _: Request) -> Response:
        await self.finish.wait()
        return JSONResponse("done")

    async def _health(self, _: Request) -> Response:
        return JSONResponse(not self.shutdown.has_begun)

    async def begin(self, *signals: int) -> "asyncio.Task[httpx.Response]":
        request = asyncio.create_task(self.client.post("/", content=b"x"))
        await self.began.wait()
        for number in signals:
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.05)  # the handler runs, and then the loop's callback
        return request


async def until_over(http: Request) -> Response:
    error = await wait_for_end(http)
    return JSONResponse(str(error), 503 if isinstance(error, Unavailable) else 499)


async def events_until_over(http: Request) -> Response:
    async def events() -> AsyncIterator[int]:
        yield 1
        await asyncio.Event().wait()

    received = []
    try:
        async for event in until_shutdown(http, events()):
            received.append(event)
    except ApiError as error:
        return JSONResponse([*received, str(error)], 503)
    return JSONResponse(received)


def run(scene: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(scene(), TIMEOUT_SECONDS)

    asyncio.run(limited())


@pytest.mark.parametrize("repeated", [0, 2])
def test_accepted_requests_finish_and_others_get_503(repeated: int, ended: list[int]) -> None:
    async def check() -> None:
        scene = Scene(math.inf)
        request = await scene.begin(*[signal.SIGTERM] * (1 + repeated))
        late = await scene.client.post("/", content=b"x")
        assert late.status_code == 503 and "is stopping" in late.json()
        assert (await scene.client.get("/health")).json() is False
        assert not request.done() and ended == []
        scene.finish.set()
        assert (await request).json() == "done"
        await asyncio.sleep(0.05)
        assert ended == [signal.SIGTERM]

    run(check)


@pytest.mark.parametrize("work", [until_over, events_until_over])
@pytest.mark.parametrize("grace, signals", [(0.1, [signal.SIGTERM]), (math.inf, [signal.SIGINT, signal.SIGINT])])
def test_rest_gets_503_after_the_grace_period(grace: float, signals: list[int], work: Work, ended: list[int]) -> None:
    async def check() -> None:
        scene = Scene(grace, work)
        answer = await (await scene.begin(*signals))
        assert answer.status_code == 503 and "is stopping" in answer.text
        await asyncio.sleep(0.05)
        assert ended == signals[:1]

    run(check)


TERM, INT = signal.SIGTERM, signal.SIGINT


@pytest.mark.parametrize(
    "grace, answer, signals, finishes",
    [(0.1, 0.1, [TERM], False), (0.1, 0.1, [TERM], True), (math.inf, math.inf, [TERM, INT, INT], False)],
    ids=["request", "connection", "third signal"],
)
def test_what_does_not_end_is_given_up(
    grace: float, answer: float, signals: list[int], finishes: bool, ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("model.api.shutdown._ANSWER_SECONDS", answer)

    async def check() -> None:
        scene = Scene(grace)
        if finishes:
            scene.finish.set()
        request = await scene.begin(*signals)
        while len(ended) < 2:
            await asyncio.sleep(0.02)
        assert ended == [TERM, INT]  # uvicorn no longer waits after the second one
        request.cancel()

    run(check)


@pytest.mark.parametrize("framing", ["Content-Length: 100", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize("is_late", [False, True], ids=["before", "during"])
def test_half_sent_request_is_refused(
    framing: str, is_late: bool, ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvicorn ends as soon as all requests are answered."""
    monkeypatch.setattr("model.api.shutdown._BODY_SECONDS", 0.1)
    head = f"POST / HTTP/1.1\r\nHost: x\r\n{framing}\r\n\r\n3\r\n".encode()

    async def check() -> None:
        scene = Scene(math.inf)
        config = uvicorn.Config(scene.application, http="h11", lifespan="off", log_level="critical")
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = asyncio.create_task(uvicorn.Server(config).serve([listener]))
            request = await scene.begin()
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            if not is_late:
                writer.write(head)
                while scene.arrived < 2:
                    await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            while not scene.shutdown.has_begun:
                await asyncio.sleep(0.01)
            if is_late:
                writer.write(head)
            answer = await reader.read()  # until the connection is closed
            writer.close()
            assert answer.startswith(b"HTTP/1.1 503 ") and answer.endswith(b'is stopping. Repeat the request."')
            assert scene.arrived == (1 if is_late else 2) and not server.done()
            scene.finish.set()
            assert (await request).json() == "done"
            await server
        assert ended == [signal.SIGTERM]

    run(check)
