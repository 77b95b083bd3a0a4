"""The middleware that ends a server gracefully, with signals to this process in place of a server's."""

import asyncio
import math
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from model.api.shutdown import GracefulShutdown, until_shutdown, wait_for_end
from model.errors import Unavailable
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


class Scene:
    """A server with one request in flight, whose `work` waits for `finish`."""

    def __init__(self, grace_seconds: float, work: Work | None = None) -> None:
        self.began, self.finish = asyncio.Event(), asyncio.Event()
        routes = [Route("/", self._work, methods=["POST"]), Route("/health", self._health)]
        self.shutdown = GracefulShutdown(grace_seconds, lambda _, error: JSONResponse(str(error), 503))
        self._inner = work or self._finish
        transport = httpx.ASGITransport(self.shutdown.wrap(Starlette(routes=routes)))
        self.client = httpx.AsyncClient(transport=transport, base_url="http://server")

    async def _work(self, http: Request) -> Response:
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
    except Unavailable as error:
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


def test_requests_that_do_not_end_are_given_up(ended: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model.api.shutdown._ANSWER_SECONDS", 0.1)

    async def check() -> None:
        scene = Scene(0.1)
        request = await scene.begin(signal.SIGTERM)
        while len(ended) < 2:
            await asyncio.sleep(0.02)
        assert ended == [signal.SIGTERM, signal.SIGINT]  # uvicorn no longer waits after the second one
        request.cancel()

    run(check)
