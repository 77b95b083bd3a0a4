"""Start a server in this process: load its releases, and start the scheduler of their engines, with the warm-up.

The Truss model, its workers and Triton start here.
"""

import atexit
import gc
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from model import metrics
from model.child_process import FAILED_EXIT_CODE, exit_soon
from model.cold_start import ColdStart
from model.deployment import Deployment
from model.errors import PreheatError
from model.loading.embeddings import NewEmbeddings
from model.loading.load import Loaded
from model.loading.releases import Releases, open_releases, slot_of
from model.loading.runtimes import find_targets
from model.loading.warmup import find_preview_map, step_measurement, warm_up, warm_up_in_parts
from model.pipeline.runner import Runner
from model.scheduling.comparison import ImageComparison
from model.scheduling.scheduler import Scheduler
from model.scheduling.weight_slots import Slot, WeightSlots
from model.settings import Settings
from model.store.store import Store
from model.weights.slot import WeightSlot

logger = logging.getLogger("preheat")

EMBEDDING_SECONDS = 10.0


def start_server(
    settings: Settings,
    secrets: Mapping[str, str],
    open_store: Callable[[], Store],
    cold_start: ColdStart,
    on_device_failure: Callable[[], None],
) -> tuple[list[Loaded], Scheduler]:
    """Load and warm up the releases, and return them with the running scheduler, whose runners have their order.

    `on_device_failure`: see `Scheduler`.

    Once the first release is ready, the others are loaded in the background.

    Raises what `Releases` and `Releases.open` raise, and RankFailed. If ranks were started, the process also ends soon
    after an error: the graphs of this load keep the group's communicator, so there can be no second load.
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
        releases = open_releases(store, deployment, settings.store_options().cache_folder, cold_start)
        loaded = [releases.open(0)]
        with cold_start.phase("releases"):
            loaded += [releases.without_weights(index) for index in range(1, len(releases))]
        first = loaded[0].model
        metrics.watch_gpu_memory(first.device)
        every = settings.compare_every
        comparison = None if every is None else ImageComparison(first, every)
        if followers is not None:
            followers.join(first)
        runners = [Runner(one.model) for one in loaded]

        def prepare() -> None:
            runners[0].preview_map = warm_up(loaded[0], cold_start=cold_start, comparison=comparison)

        slots = None
        if len(loaded) > 1:
            loader = _SlotLoader(releases, loaded, runners)
            turn_seconds = settings.limits.release_turn_seconds
            # The interpreter waits for the threads of pools before it runs functions of `atexit`.
            threading._register_atexit(loader.stop)  # type: ignore[attr-defined]
            slots = WeightSlots(runners, loader, slot_of(loaded[0]), settings.weight_slots, turn_seconds)
        scheduler = Scheduler(runners, settings.limits, on_device_failure, comparison, prepare, slots)
        if followers is not None:
            followers.watch(scheduler.abandon)  # also during the warm-up, whose graphs wait for all ranks
        scheduler.wait_ready()
    except Exception:
        if followers is not None:
            atexit.unregister(followers.exit_process)
            exit_soon()
        raise
    if loaded[0].plans is not None:
        loaded[0].plans.keep_compiled_kernels()
    # Loaded objects are permanent. The collector would otherwise scan all of them, and every thread would wait.
    gc.collect()
    gc.freeze()
    scheduler.when_idle(step_measurement(loaded[0]))
    logger.info(
        json.dumps(
            {
                "event": "loaded",
                "release": ", ".join(one.release for one in loaded),
                "target": loaded[0].target,
                "weight_bytes": loaded[0].weight_bytes,
                "gpu_bytes": metrics.gpu_memory(first.device),
                "seconds": cold_start.phases,
            }
        )
    )
    if slots is not None:
        scheduler.call(slots.open_unasked)
    if settings.follow_embeddings:
        EmbeddingUpdates(releases, runners, loaded[0].slot, slots, scheduler).start()
    return loaded, scheduler


class EmbeddingUpdates:
    """Takes over the embeddings of later versions of the releases, see `model.loading.embeddings`."""

    def __init__(
        self,
        releases: Releases,
        runners: Sequence[Runner],
        first: WeightSlot,
        slots: WeightSlots | None,
        scheduler: Scheduler,
    ) -> None:
        """`first`: the weights of the only release if there are no slots."""
        self._releases, self._runners, self._first = releases, runners, first
        self._slots, self._scheduler = slots, scheduler

    def start(self) -> None:
        """Look for later versions every `EMBEDDING_SECONDS`, on a thread of its own."""
        threading.Thread(target=self._run, name="preheat-embeddings", daemon=True).start()

    def update(self) -> None:
        """Look for later versions now. A release that cannot be updated is logged, and goes on as it is."""
        for index, runner in enumerate(self._runners):
            try:
                while (found := self._releases.find_embeddings(index, runner.model.tokenizers)) is not None:
                    if not self._scheduler.call(partial(self._use, index, found)).result():
                        break
                    entry = {"event": "embeddings_added", "release": self._releases.name(index)}
                    version = found.selection.manifest.name
                    logger.info(json.dumps(entry | {"version": version, "embeddings": found.tokens}))
            except PreheatError as error:
                logger.error("Embeddings of %s cannot be taken over. %s", self._releases.name(index), error)
            except Exception:
                logger.exception("Embeddings of %s cannot be taken over.", self._releases.name(index))

    def _run(self) -> None:
        while not self._scheduler.is_closed:
            time.sleep(EMBEDDING_SECONDS)
            self.update()

    def _use(self, index: int, found: NewEmbeddings) -> bool:
        """Return False if the release is being loaded without them. Runs on the scheduler's thread."""
        runner = self._runners[index]
        if self._slots is not None and self._slots.is_loaded_now(runner):
            return False
        weights = self._first if self._slots is None else self._slots.weights_of(runner)
        runner.model.use_embeddings(found.tokenizers, lambda: None if weights is None else found.write(weights))
        self._releases.use_embeddings(index, found)
        return True


class _SlotLoader:
    """Implements `SlotLoader` with the releases of a deployment."""

    def __init__(self, releases: Releases, loaded: Sequence[Loaded], runners: Sequence[Runner]) -> None:
        self._loaded, self._runners = loaded, runners
        self.name, self.has_room = releases.name, releases.has_room
        self.fetch, self.fill, self.stop = releases.fetch, releases.fill, releases.stop
        self._open = releases.open
        loaded[0].model.same_code.append(loaded[0].model.loops)  # its release may leave them

    def open(self, index: int) -> Slot:
        slot, first = slot_of(self._open(index)), self._loaded[0].model
        slot.model.step_times = first.step_times
        return slot

    def begin(self, index: int, is_new: bool) -> Iterator[None]:
        one, runner = self._loaded[index], self._runners[index]
        if is_new:
            runner.preview_map = yield from warm_up_in_parts(one)
            self._loaded[0].model.same_code.append(one.model.loops)
        elif runner.preview_map is None:
            runner.preview_map = find_preview_map(one.model, one.served)


def end_failed_process() -> None:
    """End this process after a grace period for answers in flight.

    A failed GPU stays failed until its process ends. The platform, or the parent of a worker, then starts another one.
    """
    logger.critical(json.dumps({"event": "device_failed", "exit_code": FAILED_EXIT_CODE}))
    exit_soon()
