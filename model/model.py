"""The Truss model: loads a release and passes requests on. model/api and model/scheduling handle them.

Truss inspects the real annotations of `predict`, so this module must not postpone their evaluation (no
`from __future__ import annotations`). Torch is imported in `load()`, so that the prefetch of the release starts before
that import.
"""

import gc
import json
import logging
import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from model.api.body_limit import find_application, limit_bodies
from model.api.request import GenerationRequest
from model.cold_start import ColdStart, seconds_since_process_start
from model.errors import ConfigError
from model.loading import preload_torch
from model.loading.prefetch import Prefetch
from model.settings import read_settings

if TYPE_CHECKING:
    from model.api.service import Service
    from model.ranks.lead import Followers
    from model.scheduling.scheduler import Scheduler

logger = logging.getLogger("preheat")

SHUTDOWN_GRACE_SECONDS = 2.0
DEVICE_FAILED_EXIT_CODE = 70  # EX_SOFTWARE of sysexits.h


class Model:
    """The class that Truss loads. `load()` makes this replica ready, and `predict()` answers one request."""

    def __init__(self, **kwargs: Any) -> None:
        preload_torch.start()
        config = kwargs.get("config") or {}
        try:
            self._settings = read_settings((config.get("model_metadata") or {}).get("preheat"))
        except ConfigError as error:
            _log_failed_load(error)
            raise
        self._cold_start = ColdStart()
        secrets: Mapping[str, str] = kwargs.get("secrets") or {}
        self._secrets = secrets
        self._prefetch = Prefetch(self._settings, secrets)
        self._application = find_application()  # now, because the imports of the load add many objects to search
        self._scheduler: Scheduler | None = None
        self._service: Service | None = None
        self._followers: Followers | None = None
        self._failed = False

    def load(self) -> None:
        """Select this device's engines, load the weights, warm up.

        Truss calls it again after a failure. With several GPUs for each image, the process ends instead.
        """
        if self._service is not None:
            return
        if self._failed:
            _free_memory()
        gc.disable()  # garbage collection costs a tenth of the load and frees almost nothing
        try:
            self._load()
        except Exception as error:
            self._failed = True
            _log_failed_load(error)
            if self._followers is not None:
                _exit_soon()  # the graphs of this load keep the group's communicator, so there can be no second load
            raise
        finally:
            gc.enable()

    def _load(self) -> None:
        # Imported here and not at the top, because all but the first three import torch. The first three are imported
        # while torch's libraries are still being loaded.
        import numpy  # noqa: F401
        import PIL.Image  # noqa: F401
        import tokenizers  # noqa: F401

        preload_torch.import_torch()

        from model import metrics
        from model.api.service import Service
        from model.loading.adapters import ServedAdapters
        from model.loading.load import load_release
        from model.loading.runtimes import find_targets, runtime_cache_folder
        from model.loading.warmup import batch_measurement, warm_up
        from model.pipeline.runner import Runner
        from model.scheduling.comparison import ImageComparison
        from model.scheduling.scheduler import Scheduler

        settings = self._settings
        gc.freeze()  # modules are permanent, and the collection below takes 0.14 s with them
        self._cold_start.record("import", seconds_since_process_start())
        store, release = self._prefetch.store(), settings.required("release")
        targets = find_targets(settings.runtime)
        if settings.gpus_per_image > 1:
            from model.ranks.lead import start_followers  # imports torch.distributed

            self._followers = start_followers(settings, self._secrets)
        loaded = load_release(
            store,
            release,
            targets,
            settings.buckets,
            self._cold_start,
            settings.public_key,
            runtime_cache_folder(settings.store_options().cache_folder, targets),
            settings.served_precision,
            ServedAdapters(tuple(settings.loras), settings.lora_cache_bytes),
            safety=settings.safety,
            ranks=settings.gpus_per_image,
        )
        metrics.watch_gpu_memory(loaded.model.device)
        every = settings.compare_every
        comparison = None if every is None else ImageComparison(loaded.model, every)
        if self._followers is not None:
            self._followers.join(loaded.model)
        scheduler = Scheduler(Runner(loaded.model), settings.limits, _end_process)
        if self._followers is not None:
            self._followers.watch(scheduler.abandon)  # also during the warm-up, whose graphs wait for all ranks
        try:
            # Warm-up runs on the scheduler's thread, like all generation. It also fits the map for previews.
            scheduler.preview_map = scheduler.call(
                lambda: warm_up(loaded, cold_start=self._cold_start, comparison=comparison)
            ).result()
        except BaseException:
            scheduler.close()
            raise
        if loaded.plans is not None:
            loaded.plans.keep_compiled_kernels()
        # Loaded objects are permanent. The collector would otherwise scan all of them, and every thread would wait.
        gc.collect()
        gc.freeze()
        scheduler.when_idle(batch_measurement(loaded))
        scheduler.comparison = comparison
        self._prefetch.close()
        self._scheduler = scheduler
        self._service = Service(loaded, scheduler, self._cold_start, settings.log_prompts)
        if self._application is None:
            logger.warning("Truss's application was not found, so the bodies of requests have no limit of their size.")
        else:
            limit_bodies(self._application, self._service.refuse)
        logger.info(
            json.dumps(
                {
                    "event": "loaded",
                    "release": loaded.release,
                    "target": loaded.target,
                    "weight_bytes": loaded.weight_bytes,
                    "gpu_bytes": metrics.gpu_memory(loaded.model.device),
                    "seconds": self._cold_start.phases,
                }
            )
        )

    async def predict(self, request: GenerationRequest, http: Request) -> Any:
        """Return a GenerationResponse, a stream of lines, or {"error": ..., "kind": ...}; see `model.api.service`."""
        assert self._service is not None
        return await self._service.answer(request, http)

    async def is_healthy(self) -> bool:
        """True once the model is loaded, as long as the device works and steps make progress."""
        from model import metrics

        healthy = self._scheduler is not None and self._scheduler.healthy()
        metrics.HEALTHY.set(healthy)
        return healthy


def _log_failed_load(error: Exception) -> None:
    logger.error(json.dumps({"event": "load_failed", "error": str(error)}))


def _free_memory() -> None:
    """Free the GPU memory of a failed load: the exception's traceback kept the model alive, in a reference cycle."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def _end_process() -> None:
    """End the process after a grace period for answers in flight.

    A failed GPU stays failed until its process ends. The platform then replaces the replica.
    """
    logger.critical(json.dumps({"event": "device_failed", "exit_code": DEVICE_FAILED_EXIT_CODE}))
    _exit_soon()


def _exit_soon() -> None:
    timer = threading.Timer(SHUTDOWN_GRACE_SECONDS, os._exit, [DEVICE_FAILED_EXIT_CODE])
    timer.daemon = True
    timer.start()
