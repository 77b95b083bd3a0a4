"""Load the kernels of engines on several threads, while weights are streamed.

The code of an engine loads its kernels at its first run. That run needs the shapes of the weights and not their values.
So each engine runs once on zeros. The load binds it to its weights afterwards.
"""

import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from typing import Protocol

import torch

from model.cold_start import ColdStart
from model.engines.shapes import DTYPES, shape_at
from model.engines.signatures import TOKENS
from model.store.manifest import Bucket, Constant, Signature, Span
from model.weights.layout import LAYOUTS, from_stored, stored_shape

logger = logging.getLogger("preheat")

MAX_THREADS = 8
CONCURRENT_PIXELS = 4 * 2**20  # of the images of all runs at a time, which have their activations in memory
_TOKENS = 77  # for engines that take any number


class KernelEngine(Protocol):
    """An engine that is not bound to weights yet. constants: its weights, by their names in the code."""

    component: str
    signature: Signature
    bucket: Bucket
    constants: Mapping[str, Constant]

    def load_kernels(self, weights: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> None:
        """Run once. `weights`: by their names in the release. They are freed afterwards."""


@contextmanager
def loading_kernels(engines: Sequence[KernelEngine], device: torch.device, cold_start: ColdStart) -> Iterator[None]:
    """Load the kernels of `engines` while the block runs, and wait for them at its end.

    If the block raises, engines that have not started are skipped. Errors of an engine are left to its next run, which
    reports them. Records the phases `kernels` and `kernels_wait`.
    """
    if not engines:
        yield
        return
    waiting, zeros = _WaitingEngines(engines), _zeros_for(engines, device)
    thread = threading.Thread(target=_load, args=[waiting, zeros, cold_start], name="preheat-kernels", daemon=True)
    thread.start()
    try:
        yield
    except BaseException:
        waiting.clear()
        raise
    finally:
        with cold_start.phase("kernels_wait"):
            thread.join()
        # torch keeps a reference to each tensor that an engine was bound to, so only its memory can be freed.
        zeros.untyped_storage().resize_(0)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # frees the memory of activations


class _WaitingEngines:
    """Gives engines to threads, those of the largest images first.

    All runs at a time have at most CONCURRENT_PIXELS, or the pixels of the largest engine.
    """

    def __init__(self, engines: Sequence[KernelEngine]) -> None:
        self._waiting = sorted(engines, key=_pixels, reverse=True)
        self._free_pixels = max(CONCURRENT_PIXELS, _pixels(self._waiting[0]))
        self._changed = threading.Condition()

    @contextmanager
    def take(self) -> Iterator[KernelEngine | None]:
        """Wait until an engine may run, which it does within a `with` statement. None: no engine is left."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting or self._next() is not None)
            engine = self._next()
            if engine is not None:
                self._waiting.remove(engine)
                self._free_pixels -= _pixels(engine)
        try:
            yield engine
        finally:
            with self._changed:
                self._free_pixels += 0 if engine is None else _pixels(engine)
                self._changed.notify_all()

    def clear(self) -> None:
        """Drop all engines that wait."""
        with self._changed:
            self._waiting.clear()
            self._changed.notify_all()

    def _next(self) -> KernelEngine | None:
        return next((engine for engine in self._waiting if _pixels(engine) <= self._free_pixels), None)


def _load(waiting: _WaitingEngines, zeros: torch.Tensor, cold_start: ColdStart) -> None:
    def work() -> None:
        while True:
            with waiting.take() as engine:
                if engine is None:
                    return
                try:
                    _run_on_zeros(engine, zeros)
                except Exception as error:
                    logger.debug("the kernels of %s were not loaded: %s", engine.component, error)

    threads = min(MAX_THREADS, os.cpu_count() or 1)
    with cold_start.phase("kernels"), ThreadPoolExecutor(threads, thread_name_prefix="preheat-kernels") as pool:
        for task in [pool.submit(work) for _ in range(threads)]:
            task.result()


@torch.inference_mode()
def _run_on_zeros(engine: KernelEngine, zeros: torch.Tensor) -> None:
    """Run on the default stream of the device, so that a run reuses the memory of runs that have ended."""
    engine.load_kernels(_zero_weights(engine, zeros), _zero_inputs(engine, zeros.device))


def _zero_weights(engine: KernelEngine, zeros: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return views of `zeros` in the shapes and layout of the weights, by their names in the release."""
    layout = LAYOUTS[zeros.device.type]
    weights = {}
    for constant in engine.constants.values():
        stored = zeros[: _bytes(constant)].view(DTYPES[constant.dtype]).view(stored_shape(constant.shape, layout))
        weights[constant.tensor] = from_stored(stored, layout)
    return weights


def _zero_inputs(engine: KernelEngine, device: torch.device) -> dict[str, torch.Tensor]:
    """Return inputs of the smallest shapes in the engine's bucket."""
    bucket = engine.bucket
    sizes = {"rows": bucket.batch.min, "height": _side(bucket.height), "width": _side(bucket.width), TOKENS: _TOKENS}
    return {
        spec.name: torch.zeros(shape_at(spec.shape, sizes), dtype=DTYPES[spec.dtype], device=device)
        for spec in engine.signature.inputs
    }


def _zeros_for(engines: Sequence[KernelEngine], device: torch.device) -> torch.Tensor:
    """Return zero bytes that can stand for each of the engines' weights."""
    size = max((_bytes(constant) for engine in engines for constant in engine.constants.values()), default=0)
    return torch.zeros(size, dtype=torch.uint8, device=device)


def _bytes(constant: Constant) -> int:
    return prod(constant.shape) * DTYPES[constant.dtype].itemsize


def _pixels(engine: KernelEngine) -> int:
    """Return the pixels of the images of a run; 0 for a text encoder."""
    bucket = engine.bucket
    return bucket.batch.min * _side(bucket.height) * _side(bucket.width)


def _side(span: Span | None) -> int:
    return span.min if span else 0
