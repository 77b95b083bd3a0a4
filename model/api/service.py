"""Answer a request over HTTP: accept or refuse it first, then send one body, or a line of JSON for each event.

Every answer carries X-Request-Id, the caller's own if it sent one. Every request is logged as one JSON line, except one
with `describe`. The line has the prompt only if the deployment logs prompts. This module uses the device only through a
`JobScheduler`.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Scope

from model import metrics
from model.api.adapter_catalog import AdapterCatalog
from model.api.describe import DescribedAdapter, describe
from model.api.fair_queue import CLIENT_HEADER, SMALL_PRICE, PreparationQueues
from model.api.images import read_images, reading_price
from model.api.json_bytes import json_bytes
from model.api.request import GenerationResponse, ImageResult
from model.api.request_id import request_id
from model.api.resolve import find_release, resolve
from model.api.shutdown import wait_for_end
from model.cold_start import ColdStart
from model.errors import (
    BrokenImage,
    Cancelled,
    DeadlineExceeded,
    PreheatError,
    RequestRefused,
)
from model.loading.served import ServedModel, ServedRelease
from model.pipeline.params import GenerationParams
from model.request_fields import GenerationRequest
from model.scheduling.interface import JobScheduler, RequestJob
from model.scheduling.job import GenerationResult, ImageEvent, StepEvent
from model.statuses import retry_after, status_of
from model.store.adapter_record import AdapterRecord

logger = logging.getLogger("preheat")

HEARTBEAT_SECONDS = 1.0
MAX_DESCRIBED = 1000  # adapters in a description
CHARACTER_PRICE = 1000  # of a prompt, in pixels: the longest texts of eight masks take two seconds to tokenize
T = TypeVar("T")
Watcher = asyncio.Task[PreheatError]
"""Returns the error of a request whose client leaves, whose deadline passes, or whose server stops. Cancelled at the
answer."""


@dataclass
class RequestContext:
    """One request while it is being answered."""

    id: str
    began: float  # time.perf_counter()
    stream: bool
    prompt: str
    params: GenerationParams | None = None
    is_submitted: bool = False  # or is being submitted
    release: ServedRelease | None = None


class Service:
    """Answers requests for the loaded releases, on the server's event loop."""

    def __init__(
        self,
        releases: Sequence[ServedRelease],
        scheduler: JobScheduler[Any],
        cold_start: ColdStart,
        log_prompts: bool,
        catalog: AdapterCatalog | None = None,
    ) -> None:
        """`releases`: in the order of `scheduler`'s models. `catalog`: of the adapters that `loras` has patterns of."""
        self._releases = tuple(releases)
        self._names = [release.release for release in releases]
        self._scheduler = scheduler
        self._cold_start = cold_start
        self._log_prompts = log_prompts
        self._catalog = catalog
        self._adapters_used: dict[str, float] = {}
        self._queues = PreparationQueues(metrics.observe_preparation)
        self._watchers: set[Watcher] = set()

    async def answer(self, request: GenerationRequest, http: Request) -> Response | GenerationResponse:
        """Return the response. A caller of predict_binary gets the bare body, which Truss writes as msgpack."""
        context = RequestContext(request_id(http.headers), time.perf_counter(), request.stream, request.prompt)
        headers = {"X-Request-Id": context.id}
        try:
            model = find_release(self._names, request.model)
        except RequestRefused as error:
            return self._error_response(context, error)
        release = context.release = self._releases[model]
        if request.describe:
            described = describe(release, self._names, await self._describe_adapters(release.served))
            return JSONResponse(described, headers=headers)
        events: asyncio.Queue[StepEvent | ImageEvent | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def emit(event: StepEvent | ImageEvent | None) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        watcher = self._watch(http)
        adapters: list[AdapterRecord] = []

        def submit(params: GenerationParams) -> RequestJob:
            """Pass the request to the scheduler, which reads its prompts. Any thread may call it."""
            context.is_submitted = True
            preview_every = request.preview_every if request.stream else 0
            listener = emit if request.stream else None
            job: RequestJob = self._scheduler.submit(params, listener, preview_every, model, adapters)
            job.result.add_done_callback(lambda _: emit(None))
            job.result.add_done_callback(lambda _: loop.call_soon_threadsafe(watcher.cancel))
            # If the watcher has ended meanwhile, or was cancelled with the answer, this cancels the job.
            loop.call_soon_threadsafe(watcher.add_done_callback, partial(self._cancel, job))
            return job

        client = http.headers.get(CLIENT_HEADER, "")
        try:
            context.params = await self._unless_ended(self._resolve(request, release.served, client), watcher)
            adapters += await self._unless_ended(self._find_adapters(context.params, release.served), watcher)
            job = await self._unless_ended(self._submit(context.params, client, submit), watcher)
        except BaseException as error:
            if not watcher.cancel() and not context.is_submitted:  # otherwise the scheduler counts it
                metrics.CANCELLATIONS.labels("decoding").inc()
            if isinstance(error, PreheatError):
                return self._error_response(context, error)
            raise
        if request.stream:
            planned = asyncio.wrap_future(job.planned)
            await asyncio.wait([planned])
            if (refusal := planned.exception()) is not None:
                return self._error_response(context, refusal)
            events_as_lines = self._stream_events(context, job, events)
            return StreamingResponse(events_as_lines, media_type="application/x-ndjson", headers=headers)
        await events.get()
        if (failure := job.result.exception()) is not None:
            return self._error_response(context, failure)
        body = self._body(context, result := job.result.result())
        self._log(context, 200, timings=body["timings"], evaluations=result.evaluations)
        if http.headers.get("Content-Type", "").startswith("application/octet-stream"):
            return body
        return Response(json_bytes(body), media_type="application/json", headers=headers)

    async def _unless_ended(self, work: Coroutine[Any, Any, T], watcher: Watcher) -> T:
        """Return the result of `work`. If `watcher` ends first, cancel the work and raise the watcher's error.

        A watcher that is cancelled has no error: the job of `work` has ended.
        """
        working = asyncio.create_task(work)
        try:
            await asyncio.wait((working, watcher), return_when=asyncio.FIRST_COMPLETED)
            if not working.done() and not watcher.cancelled():
                raise watcher.result()
            return await working
        finally:
            working.cancel()

    async def _resolve(self, request: GenerationRequest, served: ServedModel, client: str) -> GenerationParams:
        """Return the request's parameters. Its images are decoded one by one, in turns with those of other requests.

        If the caller is cancelled, the image in work is finished, and no further one is decoded.
        """
        if request.image is None and not request.controls and not request.ip_adapters:
            return resolve(request, served)
        self._scheduler.check_acceptable(request.num_images)  # a full queue is known before images are decoded
        price = reading_price(request)
        reading = [(price, partial(read_images, request, served))]
        [undecoded] = await self._queues.images(price).run(client, reading)
        request.release_images()
        parts = [(part.price, part.decode) for part in undecoded.parts]
        queue = self._queues.images(max((price for price, _ in parts), default=0))
        return undecoded.params_with(await queue.run(client, parts))

    async def _find_adapters(self, params: GenerationParams, served: ServedModel) -> list[AdapterRecord]:
        """Return the adapters of a request that the scheduler does not have since its start."""
        names = [name for name, _ in params.loras]
        new = [name for name in names if not served.has_adapter(name)]
        found = await self._catalog.find(new) if new and self._catalog is not None else []
        self._adapters_used |= dict.fromkeys(names, time.time())
        return found

    async def _describe_adapters(self, served: ServedModel) -> list[DescribedAdapter]:
        """Return the adapters that requests may name now: those of the configuration, then those of its patterns."""
        sizes: dict[str, int | None] = dict(served.lora_bytes)
        if self._catalog is not None:
            sizes |= {name: size for name, size in (await self._catalog.sizes()).items() if name not in sizes}
        on_device = self._scheduler.adapters_on_device
        return [
            {
                "name": name,
                "bytes": count,
                "used": self._adapters_used.get(name),
                "place": "device" if name in on_device else "host" if name in self._adapters_used else "store",
            }
            for name, count in list(sizes.items())[:MAX_DESCRIBED]
        ]

    async def _submit(
        self, params: GenerationParams, client: str, submit: Callable[[GenerationParams], RequestJob]
    ) -> RequestJob:
        """Return the job of a request. Long prompts are read in turns with those of other requests."""
        texts = {text for one in params.passes() for text in (one.prompt, one.negative_prompt or "")}
        price = CHARACTER_PRICE * sum(map(len, texts))
        if price <= SMALL_PRICE:
            return submit(params)
        [job] = await self._queues.texts.run(client, [(price, partial(submit, params))])
        return job

    def refuse(self, scope: Scope, error: PreheatError) -> JSONResponse:
        """Return the answer to a request that is refused before it is parsed, from its ASGI scope."""
        context = RequestContext(request_id(Headers(scope=scope)), time.perf_counter(), stream=False, prompt="")
        return self._error_response(context, error)

    def _watch(self, http: Request) -> Watcher:
        """Start the watcher of a request that has just arrived."""
        watcher = asyncio.get_running_loop().create_task(self._wait_for_end_or_deadline(http))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        return watcher

    def _cancel(self, job: RequestJob, watcher: Watcher) -> None:
        """Cancel a job that has not ended. A cancelled watcher: the answer was cancelled before."""
        error = Cancelled("The client left.") if watcher.cancelled() else watcher.result()
        if not job.result.done():
            self._scheduler.cancel(job, error)

    async def _wait_for_end_or_deadline(self, http: Request) -> PreheatError:
        seconds = self._scheduler.limits.deadline_seconds
        try:
            async with asyncio.timeout(seconds):
                # A disconnect arrives at once; Truss's own `request.state.watch_disconnect` polls once a second.
                return await wait_for_end(http)
        except TimeoutError:
            return DeadlineExceeded(f"The images were not finished within {seconds:g} s.")

    async def _stream_events(
        self, context: RequestContext, job: RequestJob, events: "asyncio.Queue[StepEvent | ImageEvent | None]"
    ) -> AsyncIterator[bytes]:
        assert context.release is not None
        accepted = {"request_id": context.id, "release": context.release.release, "seed": job.params.seed}
        try:
            yield _line("accepted", **accepted, steps=job.steps, ahead=job.images_ahead)
            while True:
                try:
                    event = await asyncio.wait_for(events.get(), HEARTBEAT_SECONDS)
                except TimeoutError:
                    yield _line("heartbeat", ahead=job.images_ahead)
                    continue
                if isinstance(event, StepEvent):
                    preview = {} if event.preview is None else {"index": event.index, "preview": event.preview}
                    yield _line("step", step=event.step, steps=event.steps, **preview)
                elif isinstance(event, ImageEvent):
                    yield _line("image", index=event.index, **_image(job.params, event))
                else:
                    break
        except (asyncio.CancelledError, GeneratorExit):
            self._error_response(context, Cancelled("The client left."))  # for the metrics and the log
            raise
        if (error := job.result.exception()) is not None:
            response = self._error_response(context, error)
            yield _line("error", status=response.status_code, **json.loads(bytes(response.body)))
            return
        body = self._body(context, result := job.result.result())
        self._log(context, 200, timings=body["timings"], evaluations=result.evaluations)
        fields = ("status", "time", "timings", "warnings", "engine")
        yield _line("done", **{key: value for key, value in body.items() if key in fields})

    def _body(self, context: RequestContext, result: GenerationResult) -> GenerationResponse:
        release = context.release
        assert context.params is not None and release is not None
        self._cold_start.record_first_image()
        finished = enumerate(zip(result.images, result.flagged, strict=True))
        images = [_image(context.params, ImageEvent(index, *image)) for index, image in finished]
        for stage, milliseconds in result.timings.items():
            if stage != "queue":  # QUEUE_WAIT measures it
                metrics.STAGE_SECONDS.labels(stage).observe(milliseconds / 1000)
        seconds = time.perf_counter() - context.began
        metrics.REQUEST_SECONDS.labels(context.params.task).observe(seconds)
        return GenerationResponse(
            status="success",
            data=images[0]["data"],
            time=seconds,
            images=images,
            timings={stage: round(milliseconds, 2) for stage, milliseconds in result.timings.items()},
            warnings=result.warnings,
            engine={"release": release.release, "target": release.target, "runtime": release.runtime},
        )

    def _error_response(self, context: RequestContext, error: BaseException) -> JSONResponse:
        """Count and log a request that ended without images, and return its answer."""
        status, kind = status_of(error)
        metrics.ERRORS.labels(kind).inc()
        body = {"error": str(error), "kind": kind}
        headers = {"X-Request-Id": context.id}
        if isinstance(error, RequestRefused):
            body["field"] = error.field
        if seconds := retry_after(error):
            headers["Retry-After"] = str(seconds)
        elif isinstance(error, BrokenImage) and context.params is not None:
            body["error"] += f" The request's seed was {context.params.seed}."
        elif kind == "failed":
            body["error"] = f"The images could not be generated; the server's log has the reason under {context.id}."
        self._log(context, status, kind=kind, error=str(error))
        return JSONResponse(body, status, headers)

    def _log(self, context: RequestContext, status: int, **entries: object) -> None:
        metrics.REQUESTS.labels(str(status), "" if context.release is None else context.release.release).inc()
        entry: dict[str, object] = {"event": "request", "request": context.id, "status": status}
        entry |= {"stream": context.stream, "seconds": round(time.perf_counter() - context.began, 4)} | entries
        if context.release is not None:
            entry["release"] = context.release.release
        if (params := context.params) is not None:
            entry |= {
                "task": params.task, "width": params.width, "height": params.height,
                "steps": params.num_inference_steps, "scheduler": params.scheduler, "forecast": params.used_forecast,
                "refiner": params.use_refiner, "images": params.num_images, "seed": params.seed,
                "loras": [name for name, _ in params.loras],
            }  # fmt: skip
        if self._log_prompts:
            entry["prompt"] = context.prompt
        logger.log(logging.ERROR if status >= 500 else logging.INFO, json.dumps(entry))


def _image(params: GenerationParams, image: ImageEvent) -> ImageResult:
    result: ImageResult = {
        "data": image.data,
        "seed": params.seeds[image.index],
        "format": params.output_format,
        "width": params.width * params.upscale,
        "height": params.height * params.upscale,
    }
    if image.flagged is not None:
        result["flagged"] = image.flagged
    return result


def _line(event: str, **entries: Any) -> bytes:
    return json_bytes({"event": event, **entries}) + b"\n"
