"""The gateway's HTTP application: OpenAI's Images API, Preheat's own requests, health and the playground page.

Without keys it answers only requests for this machine's own name, so that no web page of another site can use it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway import gateway_metrics as metrics
from gateway.apis import openai
from gateway.apis.openai import Files, ImageCall
from gateway.backend_answers import Event
from gateway.backends import Accepted, Backends
from gateway.bodies import Bodies
from gateway.endpoint import PREDICT_PATH, READY_PATH
from gateway.errors import ApiError, api_error, refused
from gateway.history import MAX_LISTED, History, answer_of
from gateway.keys import ApiKey, Keys
from gateway.page_routes import page_routes
from gateway.recording import recorded
from gateway.request_end import ClosingStream, unless_disconnected, until_shutdown
from model.api.body_limit import CLIENT, BodyLimit, BodyLimits
from model.api.fair_queue import PreparationQueues
from model.api.json_bytes import json_bytes
from model.api.request_id import request_id
from model.api.shutdown import GracefulShutdown
from model.errors import Overloaded, PreheatError
from model.request_fields import GenerationRequest

_KEY_SHARE = 0.5  # of the memory for bodies that other keys leave
_LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]")
_REQUEST_ID_KEY = "preheat.request_id"  # of an ASGI scope
Start = Callable[[AsyncExitStack], Awaitable[Accepted]]
logger = logging.getLogger("preheat.gateway")


class Gateway:
    """The endpoints. `build` makes the application."""

    def __init__(
        self, backends: Backends, keys: Keys, history: History | None = None, shutdown: GracefulShutdown | None = None
    ) -> None:
        """`shutdown`: ends the application, if given."""
        self._shutdown = shutdown
        self._backends = backends
        self._keys = keys
        self._history = history
        self._bodies = Bodies()
        self._queues = PreparationQueues()

    def build(self) -> Starlette:
        """Return the ASGI application."""

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            async with self._backends.running():
                yield
            if self._history is not None:
                self._history.close()

        routes = [
            Route("/v1/images/generations", self.generations, methods=["POST"]),
            Route("/v1/images/edits", self.edits, methods=["POST"]),
            Route("/v1/images/variations", self.variations, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/loras", self.loras),
            Route(PREDICT_PATH, self.predict, methods=["POST"]),
            Route(READY_PATH, self.health),
            Route("/v1/models/{model:path}", self.model),
            Route("/v1/description", self.description),
            Route("/v1/history", self.list_history),
            Route("/v1/history", self.clear_history, methods=["DELETE"]),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            *page_routes(),
        ]
        limits = BodyLimits(share=_KEY_SHARE if self._keys.required else 1.0, has_forms=True)
        middleware = [Middleware(BodyLimit, refuse=refuse_body, limits=limits)]
        if self._shutdown is not None:
            middleware.append(Middleware(self._shutdown.wrap))
        if not self._keys.required:
            middleware.insert(0, Middleware(LocalOnly))
        handlers: dict[Any, Any] = {
            ApiError: _api_error,
            HTTPException: _http_error,
            ClientDisconnect: lambda *_: Response(status_code=499),
            Exception: _internal_error,
        }
        return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=lifespan)

    async def generations(self, http: Request) -> Response:
        """`POST /v1/images/generations`."""
        key = self._authenticate(http)
        return await self._answer(http, key, openai.generation(await self._bodies.json_object(http)))

    async def edits(self, http: Request) -> Response:
        """`POST /v1/images/edits`, multipart."""
        return await self._answer_form(http, openai.edit)

    async def variations(self, http: Request) -> Response:
        """`POST /v1/images/variations`, multipart."""
        return await self._answer_form(http, openai.variation)

    async def _answer_form(self, http: Request, parse: Callable[[Mapping[str, Any], Files], ImageCall]) -> Response:
        key = self._authenticate(http)
        fields, files = await self._bodies.form(http)
        values = openai.parse_form(fields)
        price = await asyncio.to_thread(openai.decoding_price, files)
        parsing = self._queues.images(price).run(key.client_id, [(price, partial(parse, values, files))])
        try:
            [call] = await unless_disconnected(http, parsing)
        except Overloaded as error:
            raise api_error(error) from error
        del values, fields, files, parsing  # the call has them
        return await self._answer(http, key, call)

    async def _answer(self, http: Request, key: ApiKey, call: ImageCall) -> Response:
        description = await self._backends.description_of(call.model)
        native = call.native | {"stream": True, "preview_every": openai.preview_every(call, description)}
        starting = partial(self._start, http, key, native, description["release"])
        if call.stream:
            return await _stream(http, starting, partial(openai.server_sent_events, call), "text/event-stream")
        return await _collect(http, starting, partial(openai.answer, call))

    async def predict(self, http: Request) -> Response:
        """`POST /v1/models/model:predict`: a request and answers of Preheat. `?model=` also names a release."""
        key = self._authenticate(http)
        given = await self._bodies.json_object(http)
        try:
            GenerationRequest.model_validate(given)
        except ValidationError as error:
            problems = error.errors(include_url=False)
            field = ".".join(map(str, problems[0]["loc"])) or None
            message = " ".join(f"{'.'.join(map(str, one['loc'])) or 'request'}: {one['msg']}." for one in problems)
            raise ApiError(400, message, field, "refused") from error
        given = {name: value for name, value in given.items() if value is not None}  # null stands for a missing value
        names = {*http.query_params.getlist("model"), given.pop("model", None)} - {None}
        if len(names) > 1:
            raise ApiError(400, "The address and the body name several models.", "model", "refused")
        description = await self._backends.description_of(names.pop() if names else None)
        if given.get("describe"):
            return JSONResponse(description, headers=_headers(http))
        if not given.get("stream"):
            given["preview_every"] = 0
        starting = partial(self._start, http, key, given, description["release"])
        if given.get("stream"):
            return await _stream(http, starting, _native_lines, "application/x-ndjson")
        return await _collect(http, starting, _native_answer)

    async def _start(self, http: Request, key: ApiKey, native: Event, model: str, stack: AsyncExitStack) -> Accepted:
        """Start a request, which ends with `stack`."""
        images = native.get("num_images", 1)
        self._keys.take(key, images)
        try:
            request_id = _request_id(http.scope)
            starting = stack.enter_async_context(self._backends.start(native, model, request_id, key.client_id))
            accepted = await unless_disconnected(http, starting)
        except BaseException:
            key.give_back(images)  # nothing was generated
            raise
        events = _counted(key, images, until_shutdown(http, accepted.events))
        if self._history is not None:
            events = recorded(self._history, key.name, native, events)
        return replace(accepted, events=events)

    async def models(self, http: Request) -> Response:
        """`GET /v1/models`: the releases of all backends."""
        self._authenticate(http)
        known = await self._backends.descriptions()
        names = dict.fromkeys(description["release"] for _, description in known)
        return JSONResponse({"object": "list", "data": [openai.model(name) for name in names]})

    async def loras(self, http: Request) -> Response:
        """`GET /v1/loras`: the adapters that requests may name, each once for every server and release that has it."""
        self._authenticate(http)
        known = await self._backends.descriptions()
        adapters = [
            {"model": description["release"], "server": backend.name} | adapter
            for backend, description in known
            for adapter in description.get("adapters") or []
        ]
        return JSONResponse({"object": "list", "data": adapters})

    async def model(self, http: Request) -> Response:
        """`GET /v1/models/{model}`."""
        self._authenticate(http)
        description = await self._backends.description_of(http.path_params["model"])
        return JSONResponse(openai.model(description["release"]))

    async def description(self, http: Request) -> Response:
        """`GET /v1/description`: what the releases serve, and whether requests need a key."""
        if self._keys.required and not http.headers.get("Authorization"):
            return JSONResponse({"key_required": True, "models": []})
        self._authenticate(http)
        known = await self._backends.descriptions()
        found = {description["release"]: description for _, description in reversed(known)}
        return JSONResponse({"key_required": self._keys.required, "models": list(reversed(found.values()))})

    async def list_history(self, http: Request) -> Response:
        """`GET /v1/history?limit=&before=`: the key's finished requests, the newest first."""
        key, history = self._authenticate(http), self._require_history()
        limit = _query_number(http, "limit", 50, MAX_LISTED)
        before = _query_number(http, "before", 2**53, 2**53)
        entries = await answer_of(history.list(key.name, limit, before))
        return JSONResponse({"object": "list", "data": entries})

    async def clear_history(self, http: Request) -> Response:
        """`DELETE /v1/history`: delete all entries of the key."""
        key, history = self._authenticate(http), self._require_history()
        return JSONResponse({"deleted": await answer_of(history.clear(key.name))})

    def _require_history(self) -> History:
        if self._history is None:
            raise ApiError(404, "This gateway keeps no history. Start it with --history FILE.", None, "history_off")
        return self._history

    async def health(self, _: Request) -> Response:
        """`GET /health`: status 200 if a backend can be used, with the state of each."""
        backends = [
            {"url": backend.name, "up": backend.is_up(), "images": backend.images} for backend in self._backends.all
        ]
        is_stopping = self._shutdown is not None and self._shutdown.has_begun
        up = not is_stopping and any(backend.is_up() for backend in self._backends.all)
        shown = {} if self._keys.required else {"backends": backends}
        return JSONResponse({"status": "ok" if up else "unavailable", **shown}, 200 if up else 503)

    async def metrics(self, http: Request) -> Response:
        """`GET /metrics`: numbers for Prometheus."""
        self._authenticate(http)
        return Response(metrics.exposition(self._backends, self._history), media_type=metrics.CONTENT_TYPE)

    def _authenticate(self, http: Request) -> ApiKey:
        key = self._keys.authenticate(http.headers.get("Authorization", ""))
        http.scope[CLIENT] = key.name
        return key


async def _counted(key: ApiKey, images: int, events: AsyncIterator[Event]) -> AsyncIterator[Event]:
    """Yield the events of a request. Images that a failed backend did not make do not count for the key."""
    try:
        async for event in events:
            images -= event["event"] == "image"
            yield event
    except Exception:
        key.give_back(images)
        raise


class LocalOnly:
    """ASGI middleware that refuses requests of web pages of other sites: another Host or Origin than this machine."""

    def __init__(self, application: ASGIApp) -> None:
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it with status 403."""
        if scope["type"] == "http":
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            host, origin = headers.get("host", ""), headers.get("origin")
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            if name not in _LOCAL_HOSTS or origin not in (None, f"http://{host}", f"https://{host}"):
                error = ApiError(403, "Without a key file, requests of other sites are refused.", None, "forbidden")
                await _error_response(scope, error)(scope, receive, send)
                return
        await self._application(scope, receive, send)


async def _stream(
    http: Request, start: Start, lines: Callable[[Accepted], AsyncIterator[bytes]], media_type: str
) -> Response:
    """Start a request, and return the stream of its events. The work stops if the client leaves."""
    stack = AsyncExitStack()
    accepted = await start(stack)

    async def body() -> AsyncIterator[bytes]:
        async with stack:
            async for line in lines(accepted):
                yield line

    headers = _headers(http) | {"X-Accel-Buffering": "no", "Cache-Control": "no-store"}
    return ClosingStream(body(), stack, media_type=media_type, headers=headers)


async def _collect(http: Request, start: Start, answer: Callable[[list[Event]], Event]) -> Response:
    """Return the answer of a request once its images are finished. The work stops if the client leaves."""
    async with AsyncExitStack() as stack:
        accepted = await start(stack)

        async def collect() -> list[Event]:
            return [event async for event in accepted.events if event["event"] in ("image", "done")]

        events = await unless_disconnected(http, collect())
    return Response(json_bytes(answer(events)), media_type="application/json", headers=_headers(http))


async def _native_lines(accepted: Accepted) -> AsyncIterator[bytes]:
    """Yield the lines of a server's stream. An error is its last line."""
    yield json_bytes(accepted.event) + b"\n"
    try:
        async for event in accepted.events:
            yield json_bytes(event) + b"\n"
    except ApiError as error:
        yield json_bytes({"event": "error", "status": error.status, **_native_body(error)}) + b"\n"


def _query_number(http: Request, name: str, default: int, most: int) -> int:
    text = http.query_params.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 17 and 1 <= int(text) <= most):
        raise refused(name, f"got {text[:60]!r}, expected a whole number from 1 to {most}.")
    return int(text)


def _native_answer(events: list[Event]) -> Event:
    """Return the body of a server's answer, from the events of its stream."""
    images = sorted((event for event in events if event["event"] == "image"), key=lambda event: event["index"])
    found = [{key: value for key, value in image.items() if key not in ("event", "index")} for image in images]
    done = {key: value for key, value in events[-1].items() if key != "event"}
    return {**done, "data": found[0]["data"], "images": found}


def _native_body(error: ApiError) -> dict[str, str | None]:
    """Return the body of an error as Preheat's servers write it."""
    field = {} if error.param is None else {"field": error.param}
    return {"error": str(error), "kind": error.code, **field}


def _error_response(scope: Scope, error: ApiError) -> Response:
    """Return the answer to a request that ends with an error: of `model:predict` in Preheat's form, else OpenAI's."""
    response = error.response(_native_body(error) if scope["path"] == PREDICT_PATH else error.body())
    response.headers["X-Request-Id"] = _request_id(scope)
    return response


def _api_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error_response(http.scope, error)


def refuse_body(scope: Scope, error: PreheatError) -> Response:
    """Return the answer to a request that is not parsed: because of its body, or because the gateway stops."""
    return _error_response(scope, api_error(error))


def _http_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = error.detail.lower().replace(" ", "_")
    return _error_response(http.scope, ApiError(error.status_code, f"{error.detail}.", None, code))


def _internal_error(http: Request, error: Exception) -> Response:
    logger.error("The request %s failed.", _request_id(http.scope), exc_info=error)
    return _error_response(http.scope, ApiError(500, "The gateway failed; its log has the reason.", None, "failed"))


def _headers(http: Request) -> dict[str, str]:
    return {"X-Request-Id": _request_id(http.scope)}


def _request_id(scope: Scope) -> str:
    """Return the id of a request: the same at each call."""
    if _REQUEST_ID_KEY not in scope:
        scope[_REQUEST_ID_KEY] = request_id(Headers(scope=scope))
    found: str = scope[_REQUEST_ID_KEY]
    return found
