"""Measure throughput and latency of in-flight batching on this device, with the scheduler in this process, no HTTP.

    python -m benchmarks.in_flight tiny-sdxl/1 --store .preheat/store --steps 20 --seconds 60

Measured on the same engines:

    offline         images/s with full batches and without the scheduler
    saturated       images/s of the scheduler while more requests wait than fit
    Poisson         latency at a share of that capacity, in flight and batch at a time (see `BatchAtATime`)

Apart from engine_builder, it imports only packages of the server image.
"""

import argparse
import math
import queue
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import encode_all, generate_offline, load_in_process, precision_of
from benchmarks.rows import Row, finish, make_row
from model.api.resolve import resolve
from model.images.pixels import Pixels
from model.loading.load import Loaded
from model.loading.warmup import warm_up
from model.pipeline.params import GenerationParams
from model.pipeline.runner import Runner
from model.pipeline.spec import UNET
from model.pipeline.text_to_image import generate
from model.request_fields import GenerationRequest
from model.scheduling.job import ImageEvent, StepEvent
from model.scheduling.output_workers import THREADS
from model.scheduling.scheduler import Scheduler
from model.settings import Limits
from preheat.replicas.traffic import poisson_arrivals

Submit = Callable[[GenerationParams], "Future[Any]"]
RequestOf = Callable[[int], GenerationParams]
"""Returns the request with a number; for equal numbers equal requests."""


class BatchAtATime:
    """The baseline of in-flight batching: batches that finish before the next one starts.

    One thread generates up to `max_batch` waiting requests, from the first step to the last, then the next ones.
    """

    def __init__(self, loaded: Loaded, max_batch: int) -> None:
        self._loaded, self._max_batch = loaded, max_batch
        self._waiting: deque[tuple[GenerationParams, Future[None]]] = deque()
        self._worker, self._encoders = ThreadPoolExecutor(1), ThreadPoolExecutor(THREADS)

    def submit(self, params: GenerationParams) -> "Future[Any]":
        result: Future[None] = Future()
        self._waiting.append((params, result))
        self._worker.submit(self._generate_waiting)
        return result

    def close(self) -> None:
        """Wait until all submitted requests are answered."""
        self._worker.shutdown()
        self._encoders.shutdown()

    def _generate_waiting(self) -> None:
        """Generate the next batch. Called once per request, so it finds no request if an earlier batch included it."""
        batch = [self._waiting.popleft() for _ in range(min(self._max_batch, len(self._waiting)))]
        if batch:
            images, _, _ = generate(self._loaded.model, [params for params, _ in batch])
            for (params, result), image in zip(batch, images, strict=True):
                self._encoders.submit(self._answer, params, result, image)

    @staticmethod
    def _answer(params: GenerationParams, result: "Future[None]", image: Pixels) -> None:
        encode_all([image], params)
        result.set_result(None)


def numbered_requests(params: GenerationParams, mix: Sequence[int]) -> RequestOf:
    """Return requests by number. Its seed is the number; its number of steps is a random one of `mix`."""
    return lambda number: replace(params, seed=number, num_inference_steps=random.Random(str(number)).choice(mix))


def measure_saturated(
    scheduler: Scheduler,
    request_of: RequestOf,
    outstanding: int,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the steps/s of all images together while `outstanding` requests are always in flight.

    Measured from the first answer on. Steps are counted because a minute has too few images for an exact rate. Raises
    the error of any request.
    """
    step_times: list[float] = []
    answers: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()

    def record(event: StepEvent | ImageEvent) -> None:
        if isinstance(event, StepEvent):
            step_times.append(clock())

    def submit(number: int) -> None:
        scheduler.submit(request_of(number), record).result.add_done_callback(answers.put)

    for number in range(outstanding):
        submit(number)
    began = math.inf
    while clock() < began + seconds or step_times[-1] <= began:  # at least one step is counted
        answers.get().result()
        began = min(began, clock())
        number += 1
        submit(number)
    counted = [second for second in list(step_times) if second > began]
    for _ in range(outstanding):
        answers.get().result()  # not counted, because the loop becomes empty meanwhile
    return len(counted) / (counted[-1] - began)


def measure_latencies(submit: Submit, request_of: RequestOf, arrivals: Sequence[float]) -> list[float]:
    """Send a request at each second of `arrivals`, however many are in flight. Returns the seconds to each answer."""
    answers: queue.SimpleQueue[tuple[float, Future[Any]]] = queue.SimpleQueue()
    began = time.perf_counter()

    def record(arrival: float, future: "Future[Any]") -> None:
        answers.put((time.perf_counter() - began - arrival, future))

    for number, arrival in enumerate(arrivals):
        time.sleep(max(0.0, began + arrival - time.perf_counter()))
        submit(request_of(number)).add_done_callback(partial(record, arrival))
    answered = [answers.get() for _ in arrivals]
    for _, future in answered:
        future.result()
    return [seconds for seconds, _ in answered]


def measure(
    loaded: Loaded,
    request: GenerationRequest,
    seconds: float,
    share: float,
    images: int | None,
    mix: Sequence[int] | None = None,
) -> list[Row]:
    """Measure all cases.

    `seconds`: duration of each measurement. `share`: of the capacity, for the Poisson arrivals; 0 leaves them out.
    `images`: at once; default: the loop's capacity. `mix`: numbers of steps of the Poisson arrivals; default: the
    request's own.
    """
    params = resolve(request, loaded.served)
    steps = params.num_inference_steps
    loop = loaded.model.loop(UNET, params.height, params.width)
    image_batch = Runner(loaded.model).plan(params).first_needs.slots  # UNet batch entries of one image
    capacity = max(1, loop.capacity // image_batch)
    batch = min(images or capacity, capacity)
    loop.capacity = image_batch * batch
    outstanding = batch + max(2, batch // 2)  # so that a request always waits to join

    def row(case: str, values: Sequence[float], unit: str, **extra: Any) -> Row:
        name = f"{case} {params.width}x{params.height}"
        return make_row(name, values, unit, precision_of(loaded), steps, batch, digits=3, **extra)

    with torch.inference_mode():
        full_batch = [replace(params, seed=number) for number in range(batch)]
        generate_offline(loaded, full_batch, 0)
        rates = [1000 * batch / total for total in generate_offline(loaded, full_batch, seconds)]
    rows = [row("offline, full rows", rates, "images/s")]

    limits = Limits(max_queue=100_000, deadline_seconds=1e9, stuck_seconds=1e9)
    scheduler = Scheduler([Runner(loaded.model)], limits, lambda: None)
    rate = measure_saturated(scheduler, numbered_requests(params, (steps,)), outstanding, seconds) / steps
    of_offline = round(rate / rows[0].value, 4)
    rows.append(row("in flight, saturated", [rate], "images/s", of_offline=of_offline))
    request_of = numbered_requests(params, mix or (steps,))
    if mix:
        rate = measure_saturated(scheduler, request_of, outstanding, seconds) * len(mix) / sum(mix)
        rows.append(row("in flight, saturated by a mix", [rate], "images/s", mix=list(mix)))

    if not share:
        scheduler.close()
        return rows
    arrivals = list(poisson_arrivals(share * rate, seconds, random.Random(0)))
    arrivals = arrivals or [0.0]  # a row needs a request, also after a short time on a slow machine
    in_flight = measure_latencies(lambda params: scheduler.submit(params).result, request_of, arrivals)
    scheduler.close()
    baseline = BatchAtATime(loaded, batch)
    batch_at_a_time = measure_latencies(baseline.submit, request_of, arrivals)
    baseline.close()
    load = {"arrivals_per_second": round(share * rate, 4), "mix": list(mix or (steps,))}
    traffic = f"Poisson at {share:.0%}" + (f", {'/'.join(map(str, mix))} steps" if mix else "")
    rows.append(row(f"in flight, {traffic}", in_flight, "s", **load))
    rows.append(row(f"batch at a time, {traffic}", batch_at_a_time, "s", **load))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("release", help="MODEL/VERSION")
    parser.add_argument("--store", required=True)
    parser.add_argument("--size", help="WIDTHxHEIGHT; default: the release's native size")
    parser.add_argument("--images", type=int, help="images at once; default: the loop's capacity")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--mix", help="numbers of steps of the Poisson arrivals, e.g. 4,20,30,50; default: --steps")
    parser.add_argument("--seconds", type=float, default=60, help="seconds of each measurement")
    parser.add_argument(
        "--share", type=float, default=0.7, help="share of the capacity, for the arrivals; 0: no arrivals"
    )
    parser.add_argument("--out", type=Path, help="append the rows to this JSON file")
    options = parser.parse_args()
    size = dict(zip(("width", "height"), map(int, options.size.split("x")), strict=True)) if options.size else {}
    loaded = load_in_process(options.store, options.release)
    with torch.inference_mode():
        warm_up(loaded)
    fields = {"prompt": "a large red circle on a blue background", "seed": 0, "guidance_scale": 7.5}
    request = GenerationRequest.model_validate(fields | {"num_inference_steps": options.steps} | size)
    mix = [int(steps) for steps in options.mix.split(",")] if options.mix else None
    rows = measure(loaded, request, options.seconds, options.share, options.images, mix)
    for row in rows:
        numbers = f"{row.value:9.3f} {row.unit:9} p50 {row.p50:8.3f} p99 {row.p99:8.3f} n {row.runs:4}"
        print(f"{row.case:45} {numbers} {', '.join(f'{name} {value}' for name, value in row.extra.items())}")
    if options.share:
        print(f"p50 in flight / p50 batch at a time: {rows[-2].p50 / rows[-1].p50:.3f}")
    finish(rows, options.out)


if __name__ == "__main__":
    main()
