"""The Truss model. Thin: settings in, pictures out; what happens in between is in loading.py and pipeline.py.

Truss inspects the real annotations of `predict`, so this module must not postpone their evaluation
(no `from __future__ import annotations`).
"""

import asyncio
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from model.coldstart import ColdStart, seconds_since_process_start
from model.errors import BrokenImage, ManifestError, RequestRefused
from model.image import encode_base64
from model.loading import Loaded, ServedBucket, load_release
from model.pipeline import generate
from model.request import GenerationRequest, GenerationResponse, GenerationSettings, SizeList, resolve
from model.store import StoreOptions, open_store
from model.store.signature import configured_keys
from model.target import detect_targets

logger = logging.getLogger("preheat")


class Model:
    """`load()` makes this replica warm; `predict()` answers one request. See `model.request` for both shapes."""

    def __init__(self, **kwargs: Any) -> None:
        config = kwargs.get("config") or {}
        self._settings: dict[str, Any] = dict((config.get("model_metadata") or {}).get("preheat") or {})
        self._secrets: Mapping[str, str] = kwargs.get("secrets") or {}
        self._cold_start = ColdStart()
        self._loaded: Loaded | None = None
        self._worker: Worker | None = None

    def load(self) -> None:
        """Find this device's engines in the release, map the weights, warm up. Truss calls it again after a failure."""
        if self._loaded is not None:
            return
        self._cold_start.record("import", seconds_since_process_start())
        loaded = load_release(
            open_store(self._setting("store"), StoreOptions.from_deployment(self._settings, self._secrets)),
            self._setting("release"),
            detect_targets(),
            [ServedBucket.from_config(entry) for entry in self._settings.get("buckets") or []],
            self._cold_start,
            configured_keys(self._settings),
        )
        self._worker = self._worker or Worker()
        with self._cold_start.phase("warm_up"):
            self._worker.submit(lambda: _warm_up(loaded)).result()
        self._loaded = loaded
        logger.info(
            json.dumps(
                {
                    "event": "loaded",
                    "release": loaded.release,
                    "target": loaded.target,
                    "weight_bytes": loaded.weight_bytes,
                    "seconds": self._cold_start.phases,
                }
            )
        )

    async def predict(self, request: GenerationRequest, http: Request) -> Any:
        """A GenerationResponse, or a JSONResponse {"error": ...}: 400 for what is not served, 500 for no picture."""
        began = time.perf_counter()
        request_id = uuid.uuid4().hex[:12]
        assert self._loaded is not None and self._worker is not None
        loaded = self._loaded
        try:
            settings = resolve(request, loaded.served)
            work = self._worker.submit(lambda: _draw(loaded, settings))
            images, timings, warnings = await asyncio.wrap_future(work)
        except RequestRefused as refusal:
            return JSONResponse({"error": str(refusal), "field": refusal.field}, status_code=400)
        except BrokenImage as broken:
            seed = settings.seed
            logger.error(
                json.dumps({"event": "broken_image", "request": request_id, "seed": seed, "error": str(broken)})
            )
            return JSONResponse({"error": f"{broken} The request's seed was {seed}."}, status_code=500)
        self._cold_start.first_image()
        return GenerationResponse(
            status="success",
            data=images[0],
            time=time.perf_counter() - began,
            images=[
                {
                    "data": data,
                    "seed": seed,
                    "format": settings.output_format,
                    "width": settings.width,
                    "height": settings.height,
                }
                for data, seed in zip(images, settings.seeds, strict=True)
            ],
            timings={stage: round(milliseconds, 2) for stage, milliseconds in timings.items()},
            warnings=warnings,
            engine={"release": loaded.release, "target": loaded.target, "runtime": loaded.runtime},
        )

    async def is_healthy(self) -> bool:
        """Ready once loaded, for as long as the worker thread lives."""
        return self._loaded is not None and self._worker is not None and self._worker.alive

    def _setting(self, name: str) -> str:
        """A deployment setting: PREHEAT_STORE, PREHEAT_RELEASE in the environment, else model_metadata.preheat."""
        value = os.environ.get(f"PREHEAT_{name.upper()}") or self._settings.get(name)
        if not value:
            raise ManifestError(
                f"No {name} is configured: set model_metadata.preheat.{name} in config.yaml, or PREHEAT_{name.upper()}."
            )
        return str(value)


class Worker:
    """One daemon thread that does all work on the device, in the order it was asked for.

    A daemon, because Truss exits without joining threads of ours; one, because the device does one thing at a time.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="preheat-worker", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, work: Callable[[], Any]) -> "Future[Any]":
        future: Future[Any] = Future()
        self._queue.put((work, future))
        return future

    def _run(self) -> None:
        while True:
            work, future = self._queue.get()
            if not future.set_running_or_notify_cancel():
                continue  # the client left while it waited
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)


def _draw(loaded: Loaded, settings: GenerationSettings) -> tuple[list[str], dict[str, float], list[str]]:
    """On the worker: pictures as base64, milliseconds by stage, warnings."""
    pixels, timings, warnings = generate(loaded.model, [settings])
    began = time.perf_counter()
    images = [encode_base64(picture, settings.output_format, settings.quality) for picture in pixels]
    timings["encode"] = (time.perf_counter() - began) * 1000
    return images, timings, warnings


def _warm_up(loaded: Loaded) -> None:
    """Run every engine once at each size listed, or at the native one, so that no request pays for lazy loading."""
    served = loaded.served
    native = (served.native_width, served.native_height)
    for width, height in served.sizes.sizes if isinstance(served.sizes, SizeList) else (native,):
        request = GenerationRequest(
            prompt="warm up",
            width=width,
            height=height,
            num_inference_steps=4,
            seed=0,
            use_refiner=served.has_refiner,
            denoising_frac=0.5,
        )
        generate(loaded.model, [resolve(request, served)])
