"""`generate_loop` inside of Triton: the scheduler, loops and request schema of the Truss server.

Triton passes each request on at once. The scheduler batches the images of all requests step by step, so Triton's
dynamic batching is not used. The events of a request are:

    {"event": "step", "step": 5, "steps": 20}                                 its file is a preview
    {"event": "image", "index": 0, "seed": 7, "format": "png"}                its file is an image
    The last image's event also has "timings" (milliseconds by stage), "warnings" and "release".
"""

import base64
import json
import math
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from pydantic import ValidationError

from engine_builder.triton_repository.config import check_config
from engine_builder.triton_repository.loop_model import EVENT, FILE, REQUEST, loop_model
from engine_builder.triton_repository.serving.backend import (
    as_triton_error,
    error_response,
    open_release,
    read_bytes,
    refusal,
    response,
    send_last,
)
from model.api.images import resolve_with_images
from model.api.request import GenerationRequest, resolve
from model.cold_start import ColdStart
from model.errors import Cancelled, DeadlineExceeded
from model.loading.load import load_release
from model.loading.runtimes import find_targets, runtime_cache_folder
from model.loading.warmup import batch_measurement, warm_up
from model.pipeline.params import GenerationParams
from model.pipeline.runner import Runner
from model.scheduling.job import GenerationResult, ImageEvent, Job, StepEvent
from model.scheduling.scheduler import Scheduler
from model.settings import read_settings

_READERS = 2  # requests whose images are decoded at once
_DEVICE_FAILED_EXIT_CODE = 70


class GenerateLoop:
    """Triton's `TritonPythonModel`. Settings come from the environment, as `model.settings` describes them."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load and warm up the release. Raises what Triton reports as the reason why the model is unavailable."""
        try:
            check_config(json.loads(args["model_config"]), loop_model())
            settings = read_settings()
            store, release = open_release(args)
            targets = find_targets(settings.runtime)
            self._loaded = load_release(
                store,
                release,
                targets,
                settings.buckets,
                ColdStart(),
                settings.public_key,
                runtime_cache_folder(settings.store_options().cache_folder, targets),
                settings.served_precision,
                safety=settings.safety,
            )
            self._scheduler = Scheduler(
                Runner(self._loaded.model), settings.limits, lambda: os._exit(_DEVICE_FAILED_EXIT_CODE)
            )
            self._scheduler.preview_map = self._scheduler.call(lambda: warm_up(self._loaded)).result()
        except Exception as error:
            raise as_triton_error(args["model_name"], error) from error
        self._scheduler.when_idle(batch_measurement(self._loaded))
        self._readers = ThreadPoolExecutor(_READERS, "preheat-read")

    def execute(self, requests: Sequence[Any]) -> None:
        """Accept requests. Their responses are sent later, by the scheduler's threads."""
        for request in requests:
            content, sender = read_bytes(request, REQUEST), request.get_response_sender()
            self._readers.submit(self._answer, content or b"", sender)

    def finalize(self) -> None:
        """End the scheduler's threads. Requests in flight are answered with an error."""
        self._readers.shutdown()
        self._scheduler.close()

    def _answer(self, content: bytes, sender: Any) -> None:
        try:
            request = _parse(content)
            params = self._resolve(request)
            job_of: list[Job] = []
            listener = partial(self._on_event, sender, job_of)
            preview_every = request.preview_every if request.stream else 0
            job = self._scheduler.submit(params, listener, preview_every)
            job_of.append(job)
        except Exception as error:
            send_last(sender, error_response(error))
            return
        job.result.add_done_callback(partial(self._finish, sender, params))
        self._limit_time(job)

    def _limit_time(self, job: Job) -> None:
        """Cancel a job that is not finished within the deadline."""
        seconds = self._scheduler.limits.deadline_seconds
        if math.isinf(seconds):
            return
        error = DeadlineExceeded(f"The images were not finished within {seconds:g} s.")
        timer = threading.Timer(seconds, self._scheduler.cancel, [job, error])
        timer.daemon = True
        timer.start()
        job.result.add_done_callback(lambda _: timer.cancel())

    def _resolve(self, request: GenerationRequest) -> GenerationParams:
        if request.image is None and not request.controls and not request.ip_adapters:
            return resolve(request, self._loaded.served)
        self._scheduler.check_acceptable(request.num_images)
        return resolve_with_images(request, self._loaded.served)

    def _on_event(self, sender: Any, job_of: Sequence[Job], event: StepEvent | ImageEvent) -> None:
        """Send a preview, and cancel a request whose client left."""
        for job in job_of:
            if sender.is_cancelled():
                self._scheduler.cancel(job, Cancelled("The client left."))
        if isinstance(event, StepEvent) and event.preview is not None:
            sender.send(_event(event.preview, {"event": "step", "step": event.step, "steps": event.steps}))

    def _finish(self, sender: Any, params: GenerationParams, result: "Future[GenerationResult]") -> None:
        if (failure := result.exception()) is not None:
            send_last(sender, error_response(failure if isinstance(failure, Exception) else RuntimeError(failure)))
            return
        done = result.result()
        events: list[dict[str, Any]] = [
            {"event": "image", "index": index, "seed": seed, "format": params.output_format}
            for index, seed in enumerate(params.seeds)
        ]
        for event, flagged in zip(events, done.flagged, strict=True):
            if flagged is not None:
                event["flagged"] = flagged
        events[-1] |= {"timings": done.timings, "warnings": done.warnings, "release": self._loaded.release}
        *others, last = (_event(data, event) for data, event in zip(done.images, events, strict=True))
        for one in others:
            sender.send(one)
        send_last(sender, last)


def _parse(content: bytes) -> GenerationRequest:
    """Return the request of a JSON text. Raises RequestRefused."""
    try:
        return GenerationRequest.model_validate_json(content)
    except ValidationError as error:
        raise refusal(error) from error


def _event(data: str, event: Mapping[str, Any]) -> Any:
    """Return a response with a file, given as base64, and its event."""
    return response({FILE: _tensor(base64.b64decode(data)), EVENT: _tensor(json.dumps(event).encode())})


def _tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
