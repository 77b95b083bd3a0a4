"""The Truss model: loads releases and passes requests on. model/api and model/scheduling handle them.

Truss inspects the real annotations of `predict`, so this module must not postpone their evaluation (no
`from __future__ import annotations`). Torch is imported in `load()`, so that the prefetch of the release starts before
that import.
"""

import gc
import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request

from model.api.body_limit import find_in_process, limit_bodies
from model.api.connections import bound_connections
from model.cold_start import ColdStart, seconds_since_process_start
from model.deployment import resolve_releases
from model.errors import ConfigError
from model.loading import preload_torch
from model.loading.prefetch import Prefetch
from model.request_fields import GenerationRequest
from model.settings import read_settings

if TYPE_CHECKING:
    from model.api.service import Service
    from model.api.shutdown import GracefulShutdown
    from model.loading.served import ServedRelease
    from model.scheduling.interface import JobScheduler

logger = logging.getLogger("preheat")


class Model:
    """The class that Truss loads. `load()` makes this replica ready, and `predict()` answers one request."""

    def __init__(self, **kwargs: Any) -> None:
        config = kwargs.get("config") or {}
        try:
            self._settings = read_settings((config.get("model_metadata") or {}).get("preheat"))
        except ConfigError as error:
            _log_failed_load(error)
            raise
        preload_torch.start(self._settings.has_one_worker)
        self._cold_start = ColdStart()
        secrets: Mapping[str, str] = kwargs.get("secrets") or {}
        self._secrets = secrets
        self._prefetch = Prefetch(self._settings, secrets)
        # Now, because the imports of the load add many objects to search.
        self._application, self._http_config = find_in_process(Starlette), find_in_process(uvicorn.Config)
        self._scheduler: JobScheduler[Any] | None = None
        self._service: Service | None = None
        self._shutdown: GracefulShutdown | None = None
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
            raise
        finally:
            gc.enable()

    def _load(self) -> None:
        if self._settings.workers == 1:
            _import_libraries()  # while the driver is being initialized
        gpus = preload_torch.count_gpus()
        workers = self._settings.worker_count(gpus)
        releases, self._scheduler = self._start_workers(workers, gpus) if workers > 1 else self._load_here()
        self._prefetch.close()

        from model.api.adapter_catalog import open_catalog
        from model.api.service import Service
        from model.api.shutdown import GracefulShutdown

        catalog = open_catalog(self._settings, self._secrets)
        self._service = Service(releases, self._scheduler, self._cold_start, self._settings.log_prompts, catalog)
        if self._application is None:
            logger.warning(
                "Truss's application was not found. So the bodies of requests have no limit of their size, and SIGTERM "
                "has no grace period."
            )
        else:
            self._shutdown = GracefulShutdown(self._settings.grace_seconds, self._service.refuse)
            limit_bodies(self._application, self._service.refuse, self._shutdown.wrap)
        if self._http_config is not None:
            bound_connections(self._http_config)

    def _load_here(self) -> "tuple[list[ServedRelease], JobScheduler[Any]]":
        """Load the releases in this process."""
        _import_libraries()

        from model.serving import end_failed_process, start_server

        self._cold_start.record("import", seconds_since_process_start())
        loaded, scheduler = start_server(
            self._settings, self._secrets, self._prefetch.store, self._cold_start, end_failed_process
        )
        return [one.summary for one in loaded], scheduler

    def _start_workers(self, workers: int, gpus: int) -> "tuple[list[ServedRelease], JobScheduler[Any]]":
        """Load the releases in workers. This process meanwhile imports what it needs itself."""
        from model.workers.pool import WorkerPool

        settings = self._settings
        if any(pattern.endswith("/*") for pattern in settings.releases):
            # Once for all workers, also for those that are started again: a request names a release by its index.
            names = resolve_releases(settings.releases, self._prefetch.store())
            settings = settings.model_copy(update={"releases": list(names)})
        pool = WorkerPool(settings, self._secrets, workers, gpus)
        try:
            _import_libraries()
            pool.add_metrics()
            return pool.wait_ready(self._cold_start), pool
        except BaseException:
            pool.close()
            raise

    async def predict(self, request: GenerationRequest, http: Request) -> Any:
        """Return a GenerationResponse, a stream of lines, or {"error": ..., "kind": ...}; see `model.api.service`."""
        assert self._service is not None
        return await self._service.answer(request, http)

    async def is_healthy(self) -> bool:
        """True once the model is loaded, as long as the device works, steps make progress and no shutdown has begun."""
        from model import metrics

        is_stopping = self._shutdown is not None and self._shutdown.has_begun
        healthy = self._scheduler is not None and self._scheduler.healthy() and not is_stopping
        metrics.HEALTHY.set(healthy)
        return healthy


def _log_failed_load(error: Exception) -> None:
    logger.error(json.dumps({"event": "load_failed", "error": str(error)}))


def _free_memory() -> None:
    """Free the GPU memory of a failed load: the exception's traceback kept the model alive, in a reference cycle."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def _import_libraries() -> None:
    """Import torch and what else takes long. The first three are imported while torch's libraries are still loaded."""
    import numpy  # noqa: F401
    import PIL.Image  # noqa: F401
    import tokenizers  # noqa: F401

    preload_torch.import_torch()
