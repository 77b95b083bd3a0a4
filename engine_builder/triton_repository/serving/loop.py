"""`generate_loop` inside of Triton: the scheduler, loops and request schema of the Truss server.

Triton passes each request on at once. The scheduler batches the images of all requests step by step, so Triton's
dynamic batching is not used. The events of a request are:

    {"event": "step", "step": 5, "steps": 20}                                 its file is a preview
    {"event": "image", "index": 0, "seed": 7, "format": "png"}                its file is an image
    The last image's event also has "timings" (milliseconds by stage), "warnings" and "release".
"""

import base64
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from pydantic import ValidationError

from engine_builder.triton_repository.config import check_config
from engine_builder.triton_repository.loop_model import EVENT, FILE, REQUEST, loop_model
from engine_builder.triton_repository.serving.answer import Answer
from engine_builder.triton_repository.serving.backend import (
    as_triton_error,
    log_failure,
    open_release,
    read_bytes,
    refusal,
    response,
)
from engine_builder.triton_repository.serving.limits import Unread, Watch
from model.api.images import resolve_with_images
from model.api.resolve import resolve
from model.child_process import FAILED_EXIT_CODE
from model.cold_start import ColdStart
from model.errors import PreheatError, RequestRefused
from model.pipeline.params import GenerationParams
from model.request_fields import GenerationRequest
from model.scheduling.job import GenerationResult, ImageEvent, StepEvent
from model.serving import start_server

_READERS = 2  # requests whose images are decoded at once


class GenerateLoop:
    """Triton's `TritonPythonModel`. Settings come from the environment, as `model.settings` describes them."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load and warm up the release. Raises what Triton reports as the reason why the model is unavailable."""
        self._model = args["model_name"]
        try:
            check_config(json.loads(args["model_config"]), loop_model())
            store, settings = open_release(args)
            [self._loaded], self._scheduler = start_server(
                settings, {}, lambda: store, ColdStart(), lambda: os._exit(FAILED_EXIT_CODE)
            )
        except Exception as error:
            raise as_triton_error(self._model, error) from error
        self._readers = ThreadPoolExecutor(_READERS, "preheat-read")
        self._unread = Unread(self._scheduler.limits.max_queue)
        self._watch = Watch(self._scheduler.limits.deadline_seconds)

    def execute(self, requests: Sequence[Any]) -> None:
        """Accept requests. Their responses are sent later, by the scheduler's threads."""
        for request in requests:
            content, answer = read_bytes(request, REQUEST) or b"", Answer(request.get_response_sender())
            try:
                self._unread.add(content)
            except PreheatError as error:
                answer.refuse(error)
            else:
                self._readers.submit(self._read, content, answer)

    def finalize(self) -> None:
        """End the scheduler's threads. Requests in flight are answered with an error."""
        self._readers.shutdown()
        self._scheduler.close()
        self._watch.close()

    def _read(self, content: bytes, answer: Answer) -> None:
        """Pass a request to the scheduler, or refuse it."""
        try:
            self._watch.check(answer)
            request = _parse(content)
            params = self._resolve(request, answer)
            listener = partial(_send_preview, answer)
            job = self._scheduler.submit(params, listener, request.preview_every if request.stream else 0)
        except Exception as error:
            if not isinstance(error, RequestRefused):
                log_failure(self._model, error)
            answer.refuse(error)
            return
        finally:
            self._unread.remove(content)
        job.result.add_done_callback(partial(self._finish, answer, params))
        self._watch.add(answer, partial(self._scheduler.cancel, job))

    def _resolve(self, request: GenerationRequest, answer: Answer) -> GenerationParams:
        if request.image is None and not request.controls and not request.ip_adapters:
            return resolve(request, self._loaded.served)
        self._scheduler.check_acceptable(request.num_images)
        return resolve_with_images(request, self._loaded.served, answer.abandoned)

    def _finish(self, answer: Answer, params: GenerationParams, result: "Future[GenerationResult]") -> None:
        """Send the images or the error. A future swallows exceptions of its callbacks, so none may leave this."""
        try:
            self._send_images(answer, params, result.result())
        except BaseException as error:
            log_failure(self._model, error)
            answer.refuse(error)

    def _send_images(self, answer: Answer, params: GenerationParams, done: GenerationResult) -> None:
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
            answer.send(one)
        answer.end(last)


def _send_preview(answer: Answer, event: StepEvent | ImageEvent) -> None:
    if isinstance(event, StepEvent) and event.preview is not None:
        answer.send(_event(event.preview, {"event": "step", "step": event.step, "steps": event.steps}))


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
