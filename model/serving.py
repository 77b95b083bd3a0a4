"""Start a server in this process: load its releases, and start the scheduler of their engines, with the warm-up.

The Truss model, its workers and Triton start here.
"""

import atexit
import gc
import itertools
import json
import logging
from collections.abc import Callable, Mapping

from model import metrics
from model.child_process import FAILED_EXIT_CODE, exit_soon
from model.cold_start import ColdStart
from model.deployment import Deployment
from model.loading.load import Loaded, load_deployment
from model.loading.runtimes import find_targets
from model.loading.warmup import step_measurement, warm_up
from model.pipeline.runner import Runner
from model.scheduling.comparison import ImageComparison
from model.scheduling.scheduler import Scheduler
from model.settings import Settings
from model.store.store import Store

logger = logging.getLogger("preheat")


def start_server(
    settings: Settings,
    secrets: Mapping[str, str],
    open_store: Callable[[], Store],
    cold_start: ColdStart,
    on_device_failure: Callable[[], None],
) -> tuple[list[Loaded], Scheduler]:
    """Load and warm up the releases, and return them with the running scheduler, whose runners have their order.

    `on_device_failure`: see `Scheduler`.

    Raises what `load_deployment` raises, and RankFailed. If ranks were started, the process also ends soon after an
    error: the graphs of this load keep the group's communicator, so there can be no second load.
    """
    gc.freeze()  # modules are permanent, and the collection below takes 0.14 s with them
    store, deployment = open_store(), Deployment.of(settings)
    followers = None
    if settings.gpus_per_image > 1:
        from model.ranks.lead import start_followers  # imports torch.distributed

        targets = find_targets(settings.runtime)  # no process is started for a machine that cannot serve
        followers = start_followers(settings, secrets)
        if targets[0].device == "cuda":
            atexit.register(followers.exit_process)
    try:
        loaded = load_deployment(store, deployment, settings.store_options().cache_folder, cold_start)
        first = loaded[0].model
        metrics.watch_gpu_memory(first.device)
        every = settings.compare_every
        comparison = None if every is None else ImageComparison(first, every)
        if followers is not None:
            followers.join(first)
        runners = [Runner(one.model) for one in loaded]

        def prepare() -> None:
            for one, runner in zip(loaded, runners, strict=True):
                runner.preview_map = warm_up(one, cold_start=cold_start, comparison=comparison)

        scheduler = Scheduler(runners, settings.limits, on_device_failure, comparison, prepare)
        if followers is not None:
            followers.watch(scheduler.abandon)  # also during the warm-up, whose graphs wait for all ranks
        scheduler.wait_ready()
    except Exception:
        if followers is not None:
            atexit.unregister(followers.exit_process)
            exit_soon()
        raise
    for one in loaded:
        if one.plans is not None:
            one.plans.keep_compiled_kernels()
    # Loaded objects are permanent. The collector would otherwise scan all of them, and every thread would wait.
    gc.collect()
    gc.freeze()
    scheduler.when_idle(itertools.chain.from_iterable(map(step_measurement, loaded)))
    logger.info(
        json.dumps(
            {
                "event": "loaded",
                "release": ", ".join(one.release for one in loaded),
                "target": loaded[0].target,
                "weight_bytes": sum(one.weight_bytes for one in loaded),
                "gpu_bytes": metrics.gpu_memory(first.device),
                "seconds": cold_start.phases,
            }
        )
    )
    return loaded, scheduler


def end_failed_process() -> None:
    """End this process after a grace period for answers in flight.

    A failed GPU stays failed until its process ends. The platform, or the parent of a worker, then starts another one.
    """
    logger.critical(json.dumps({"event": "device_failed", "exit_code": FAILED_EXIT_CODE}))
    exit_soon()
