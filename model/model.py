"""The Truss model. Thin: it loads, and hands requests on; what happens to them is in serving.py and scheduler.py.

Truss inspects the real annotations of `predict`, so this module must not postpone their evaluation
(no `from __future__ import annotations`). Nor does it import torch before `load()`, so that the release's blobs are on
their way by then.
"""

import gc
import json
import logging
import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from model.api.request import GenerationRequest
from model.cold_start import (
    ColdStart,
    seconds_since_process_start,
)
from model.errors import ManifestError
from model.loading import preload_torch as torch_libraries  # noqa: F401  first, for it begins what others wait for
from model.loading.prefetch import Prefetch
from model.settings import read_section
from model.store.signature import configured_keys

if TYPE_CHECKING:
    from model.api.service import Service
    from model.scheduling.scheduler import Scheduler

logger = logging.getLogger("preheat")

_LAST_WORDS_SECONDS = 2.0
DEVICE_FAILED = 70  # this process's exit code then: EX_SOFTWARE of sysexits.h


class Model:
    """`load()` makes this replica warm; `predict()` answers one request. See `model.api.request` for both shapes."""

    def __init__(self, **kwargs: Any) -> None:
        config = kwargs.get("config") or {}
        self._settings = read_section((config.get("model_metadata") or {}).get("preheat"))
        self._secrets: Mapping[str, str] = kwargs.get("secrets") or {}
        self._cold_start = ColdStart()
        self._prefetch = Prefetch(self._settings, self._secrets)
        self._scheduler: Scheduler | None = None
        self._service: Service | None = None
        self._failed = False

    def load(self) -> None:
        """Find this device's engines in the release, map the weights, warm up. Truss calls it again after a failure."""
        if self._service is not None:
            return
        if self._failed:
            _free_memory()
        gc.disable()  # importing makes many objects and little garbage; to look for that takes a tenth of the time
        try:
            self._load()
        except Exception as error:
            self._failed = True  # what Truss says of it when it loads again is that it does
            logger.error(json.dumps({"event": "load_failed", "error": str(error)}))
            raise
        finally:
            gc.enable()

    def _load(self) -> None:
        # Here and not above, for these import torch.
        from model import metrics
        from model.api.service import Service
        from model.loading.load import (
            ServedBucket,
            load_release,
        )
        from model.loading.runtimes import targets_here
        from model.loading.warmup import (
            efficient_by_size,
            warm_up,
        )
        from model.scheduling.job import Limits
        from model.scheduling.scheduler import Scheduler

        limits = Limits.from_config(self._settings.get("limits") or {})
        self._cold_start.record("import", seconds_since_process_start())
        loaded = load_release(
            self._prefetch.store(self._setting("store")),
            self._setting("release"),
            targets_here(self._settings),
            [ServedBucket.from_config(entry) for entry in self._settings.get("buckets") or []],
            self._cold_start,
            configured_keys(self._settings),
        )
        metrics.watch_gpu_memory(loaded.model.device)
        scheduler = Scheduler(loaded.model, limits, _end_process)
        try:
            with self._cold_start.phase("warm_up"):
                scheduler.preview_map = scheduler.call(lambda: warm_up(loaded)).result()
        except BaseException:
            scheduler.close()
            raise
        # What is loaded stays: else the collector looks through all of it now and then, and every thread waits.
        gc.collect()
        gc.freeze()
        self._prefetch.forget()
        self._scheduler = scheduler
        self._service = Service(loaded, scheduler, self._cold_start, bool(self._settings.get("log_prompts")))
        logger.info(
            json.dumps(
                {
                    "event": "loaded",
                    "release": loaded.release,
                    "target": loaded.target,
                    "weight_bytes": loaded.weight_bytes,
                    "gpu_bytes": metrics.gpu_memory(loaded.model.device),
                    "efficient": efficient_by_size(loaded.model),
                    "seconds": self._cold_start.phases,
                }
            )
        )

    async def predict(self, request: GenerationRequest, http: Request) -> Any:
        """A GenerationResponse, a stream of lines, or {"error": ..., "kind": ...}; see `model.api.service`."""
        assert self._service is not None
        return await self._service.answer(request, http)

    async def is_healthy(self) -> bool:
        """Ready once loaded, for as long as the device works and moves on."""
        from model import metrics

        healthy = self._scheduler is not None and self._scheduler.healthy()
        metrics.HEALTHY.set(healthy)
        return healthy

    def _setting(self, name: str) -> str:
        """A deployment setting: PREHEAT_STORE, PREHEAT_RELEASE in the environment, else model_metadata.preheat."""
        value = os.environ.get(f"PREHEAT_{name.upper()}") or self._settings.get(name)
        if not value:
            raise ManifestError(
                f"No {name} is configured: set model_metadata.preheat.{name} in config.yaml, or PREHEAT_{name.upper()}."
            )
        return str(value)


def _free_memory() -> None:
    """Of a load that failed: its error's traceback held the model, in a cycle, until Truss let go of it."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def _end_process() -> None:
    """A GPU that failed stays failed until its process ends: leave time for the answers under way, and be replaced."""
    logger.critical(json.dumps({"event": "device_failed", "exit_code": DEVICE_FAILED}))
    timer = threading.Timer(_LAST_WORDS_SECONDS, os._exit, [DEVICE_FAILED])
    timer.daemon = True
    timer.start()
