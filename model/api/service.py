"""A request over HTTP -> its answer: accepted or refused first, then one body, or a line for each thing that happens.

Every answer carries X-Request-Id, the caller's own where it sent one; every request is logged as one JSON line, without
its prompt unless the deployment asks for it. Knows of the device only that a `Scheduler` draws on it.
"""

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from model import metrics
from model.api.request import (
    GenerationRequest,
    GenerationResponse,
    GenerationSettings,
    ImageResult,
    resolve,
)
from model.cold_start import ColdStart
from model.errors import (
    BrokenImage,
    Cancelled,
    DeadlineExceeded,
    Overloaded,
    PreheatError,
    RequestRefused,
    Unavailable,
)
from model.loading.load import Loaded
from model.scheduling.job import (
    Drawn,
    Finished,
    Job,
    Stepped,
)
from model.scheduling.scheduler import Scheduler

logger = logging.getLogger("preheat")

HEARTBEAT_SECONDS = 1.0
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
# Which answer an error is, and under which name it is counted. 499: nobody is there to read it.
_STATUS: dict[type[PreheatError], tuple[int, str]] = {
    RequestRefused: (400, "refused"),
    Overloaded: (429, "overloaded"),
    Cancelled: (499, "cancelled"),
    BrokenImage: (500, "broken_image"),
    Unavailable: (503, "unavailable"),
    DeadlineExceeded: (504, "deadline"),
}
_FAILED = (500, "failed")


@dataclass
class Asked:
    """One request, for as long as it is being answered."""

    id: str
    began: float
    stream: bool
    prompt: str
    settings: GenerationSettings | None = None


class Service:
    """Answers requests for one loaded model. All of it runs on the server's event loop."""

    def __init__(self, loaded: Loaded, scheduler: Scheduler, cold_start: ColdStart, log_prompts: bool) -> None:
        self._loaded = loaded
        self._scheduler = scheduler
        self._cold_start = cold_start
        self._log_prompts = log_prompts
        self._watches: set[asyncio.Task[None]] = set()

    async def answer(self, request: GenerationRequest, http: Request) -> Response | GenerationResponse:
        """The response, or its bare body for a caller of predict_binary, for Truss to write as msgpack."""
        asked = Asked(_request_id(http.headers), time.perf_counter(), request.stream, request.prompt)
        events: asyncio.Queue[Stepped | Finished | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def tell(event: Stepped | Finished | None) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        try:
            asked.settings = resolve(request, self._loaded.served)
            preview_every = request.preview_every if request.stream else 0
            job = self._scheduler.submit(asked.settings, tell if request.stream else None, preview_every)
        except PreheatError as error:
            return self._refusal(asked, error)
        job.result.add_done_callback(lambda _: tell(None))
        self._watch(job, http)
        if request.stream:
            lines = self._lines(asked, job, events)
            return StreamingResponse(lines, media_type="application/x-ndjson", headers=_headers(asked))
        await events.get()
        if (failure := job.result.exception()) is not None:
            return self._refusal(asked, failure)
        body = self._body(asked, job.result.result())
        self._log(asked, 200, timings=body["timings"])
        if http.headers.get("Content-Type", "").startswith("application/octet-stream"):
            return body
        # Megabytes of base64: not on the event loop.
        content = await asyncio.to_thread(json.dumps, body)
        return Response(content, media_type="application/json", headers=_headers(asked))

    def _watch(self, job: Job, http: Request) -> None:
        """Give the request up when its client leaves or its time is over."""
        task = asyncio.get_running_loop().create_task(self._give_up(job, http))
        loop = task.get_loop()
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)
        job.result.add_done_callback(lambda _: loop.call_soon_threadsafe(task.cancel))

    async def _give_up(self, job: Job, http: Request) -> None:
        seconds = self._scheduler.limits.deadline_seconds
        try:
            async with asyncio.timeout(seconds):
                # The body has been read, so the next message is that the client has left. Truss's own
                # `request.state.watch_disconnect` asks once a second; this is told.
                while (await http.receive())["type"] != "http.disconnect":
                    pass
        except TimeoutError:
            said = f"The pictures were not finished within {seconds:g} s: ask for fewer steps or images, or later."
            self._scheduler.cancel(job, DeadlineExceeded(said))
        else:
            self._scheduler.cancel(job, Cancelled("The client left."))

    async def _lines(
        self, asked: Asked, job: Job, events: "asyncio.Queue[Stepped | Finished | None]"
    ) -> AsyncIterator[str]:
        yield _line("accepted", request_id=asked.id, seed=job.settings.seed, steps=job.steps, ahead=job.ahead)
        try:
            while True:
                try:
                    event = await asyncio.wait_for(events.get(), HEARTBEAT_SECONDS)
                except TimeoutError:
                    yield _line("heartbeat", ahead=job.ahead)
                    continue
                if isinstance(event, Stepped):
                    preview = {} if event.preview is None else {"preview": event.preview}
                    yield _line("step", step=event.step, steps=event.steps, **preview)
                elif isinstance(event, Finished):
                    yield _line("image", index=event.index, **_image(job.settings, event.index, event.data))
                else:
                    break
        except (asyncio.CancelledError, GeneratorExit):
            self._refusal(asked, Cancelled("The client left."))  # nobody reads it, but it is counted and logged
            raise
        if (error := job.result.exception()) is not None:
            refusal = self._refusal(asked, error)
            yield _line("error", status=refusal.status_code, **json.loads(bytes(refusal.body)))
            return
        body = self._body(asked, job.result.result())
        self._log(asked, 200, timings=body["timings"])
        kept = ("status", "time", "timings", "warnings", "engine")
        yield _line("done", **{key: value for key, value in body.items() if key in kept})

    def _body(self, asked: Asked, drawn: Drawn) -> GenerationResponse:
        assert asked.settings is not None
        self._cold_start.first_image()
        images = [_image(asked.settings, index, data) for index, data in enumerate(drawn.images)]
        for stage, milliseconds in drawn.timings.items():
            if stage != "queue":  # has a histogram of its own
                metrics.STAGE_SECONDS.labels(stage).observe(milliseconds / 1000)
        seconds = time.perf_counter() - asked.began
        metrics.REQUEST_SECONDS.observe(seconds)
        return GenerationResponse(
            status="success",
            data=images[0]["data"],
            time=seconds,
            images=images,
            timings={stage: round(milliseconds, 2) for stage, milliseconds in drawn.timings.items()},
            warnings=drawn.warnings,
            engine={
                "release": self._loaded.release,
                "target": self._loaded.target,
                "runtime": self._loaded.runtime,
            },
        )

    def _refusal(self, asked: Asked, error: BaseException) -> JSONResponse:
        """The answer to a request that got no picture; it is counted and logged here."""
        status, kind = next((known for kind, known in _STATUS.items() if isinstance(error, kind)), _FAILED)
        metrics.ERRORS.labels(kind).inc()
        body = {"error": str(error), "kind": kind}
        headers = _headers(asked)
        if isinstance(error, RequestRefused):
            body["field"] = error.field
        elif isinstance(error, Overloaded):
            headers["Retry-After"] = str(error.retry_after)
        elif isinstance(error, BrokenImage) and asked.settings is not None:
            body["error"] += f" The request's seed was {asked.settings.seed}."
        elif kind == "failed":
            body["error"] = f"The pictures could not be drawn; the server's log says why under {asked.id}."
        self._log(asked, status, kind=kind, error=str(error))
        return JSONResponse(body, status, headers)

    def _log(self, asked: Asked, status: int, **more: object) -> None:
        metrics.REQUESTS.labels(str(status)).inc()
        entry: dict[str, object] = {"event": "request", "request": asked.id, "status": status}
        entry |= {"stream": asked.stream, "seconds": round(time.perf_counter() - asked.began, 4)} | more
        if (settings := asked.settings) is not None:
            entry |= {
                "width": settings.width,
                "height": settings.height,
                "steps": settings.num_inference_steps,
                "scheduler": settings.scheduler,
                "refiner": settings.use_refiner,
                "images": settings.num_images,
                "seed": settings.seed,
            }
        if self._log_prompts:
            entry["prompt"] = asked.prompt
        logger.log(logging.ERROR if status >= 500 else logging.INFO, json.dumps(entry))


def _request_id(headers: Mapping[str, str]) -> str:
    """The caller's X-Request-Id where it is fit for a log, the platform's, or a new one."""
    for name in ("X-Request-Id", "X-Baseten-Request-Id"):
        if _REQUEST_ID.fullmatch(given := headers.get(name, "")):
            return given
    return uuid.uuid4().hex


def _headers(asked: Asked) -> dict[str, str]:
    return {"X-Request-Id": asked.id}


def _image(settings: GenerationSettings, index: int, data: str) -> ImageResult:
    return {
        "data": data,
        "seed": settings.seeds[index],
        "format": settings.output_format,
        "width": settings.width,
        "height": settings.height,
    }


def _line(event: str, **entries: Any) -> str:
    return json.dumps({"event": event, **entries}) + "\n"
