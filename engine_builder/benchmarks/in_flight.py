"""What in-flight batching gives on this device, without HTTP: the model's own scheduler, asked in this process.

Measured, all on the same engines: images/s drawn offline at full rows; images/s of the scheduler when more is waiting
than fits; at a share of that capacity with Poisson arrivals, latency in flight, as many let in as when it serves, and
latency batch at a time (a worker that draws up to as many waiting requests as fit, from the first step to the last, and
then looks again); and how far pictures drawn in a mix of requests are from the same requests drawn alone.

    python -m engine_builder.benchmarks.in_flight tiny-sdxl/1 --store .preheat/store --steps 20 --seconds 60

Imports model/, torch and the standard library: it runs where the server image runs.
"""

import argparse
import base64
import io
import json
import math
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from engine_builder.benchmarks.bench import load_here, offline, precision_of
from engine_builder.benchmarks.rows import Row, append_rows, make_row
from model.api.request import (
    GenerationRequest,
    GenerationSettings,
    resolve,
)
from model.denoising.samplers import SAMPLERS
from model.engines import components
from model.images.encode import encode_base64
from model.loading.load import (
    Loaded,
    ServedBucket,
)
from model.loading.warmup import warm_up
from model.pipeline.text_to_image import (
    generate,
    is_guided,
)
from model.scheduling.job import (
    Finished,
    Limits,
    Stepped,
)
from model.scheduling.output_workers import THREADS
from model.scheduling.scheduler import Scheduler
from model.store.store import (
    StoreOptions,
    open_store,
)

Submit = Callable[[GenerationSettings], "Future[Any]"]
Asked = Callable[[int], GenerationSettings]
"""The request of a number: the same whenever it is asked for."""


class BatchAtATime:
    """What in-flight batching is compared with: the same `generate`, called for up to `most` requests at once."""

    def __init__(self, loaded: Loaded, most: int) -> None:
        self._loaded, self._most = loaded, most
        self._waiting: deque[tuple[GenerationSettings, Future[list[str]]]] = deque()
        self._news = threading.Condition()
        self._closed = False
        self._encoders = ThreadPoolExecutor(THREADS)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, settings: GenerationSettings) -> "Future[Any]":
        result: Future[list[str]] = Future()
        with self._news:
            self._waiting.append((settings, result))
            self._news.notify()
        return result

    def close(self) -> None:
        """After all that was submitted is drawn."""
        with self._news:
            self._closed = True
            self._news.notify()
        self._thread.join()
        self._encoders.shutdown()

    def _run(self) -> None:
        while True:
            with self._news:
                while not self._waiting and not self._closed:
                    self._news.wait()
                if not self._waiting:
                    return
                batch = [self._waiting.popleft() for _ in range(min(self._most, len(self._waiting)))]
            pictures = generate(self._loaded.model, [settings for settings, _ in batch])[0]
            for (settings, result), picture in zip(batch, pictures, strict=True):
                self._encoders.submit(self._finish, settings, result, picture)

    @staticmethod
    def _finish(settings: GenerationSettings, result: "Future[list[str]]", picture: Any) -> None:
        result.set_result([encode_base64(picture, settings.output_format, settings.quality)])


def requests(settings: GenerationSettings, mix: Sequence[int], seed: int = 0) -> Asked:
    """Each has its number as its seed and, by chance, one of the numbers of steps in `mix`."""
    return lambda number: replace(
        settings, seed=number, num_inference_steps=random.Random(f"{seed}/{number}").choice(mix)
    )


def saturated(scheduler: Scheduler, asked: Asked, outstanding: int, seconds: float) -> float:
    """Steps/s, those of each image counted, while so many requests always wait for an answer, from the first answer on:
    steps and not images, of which a minute ends too few to say what the next one brings. Raises what an answer does."""
    made: list[float] = []
    answers: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()

    def note(event: Stepped | Finished) -> None:
        if isinstance(event, Stepped):
            made.append(time.perf_counter())

    def submit(number: int) -> None:
        scheduler.submit(asked(number), note).result.add_done_callback(answers.put)

    for number in range(outstanding):
        submit(number)
    answers.get().result()
    began = time.perf_counter()
    number = outstanding
    submit(number)
    while time.perf_counter() < began + seconds:
        answers.get().result()
        number += 1
        submit(number)
    counted = [at for at in list(made) if at > began]
    for _ in range(outstanding):
        answers.get().result()  # the last ones, which end with the loop half empty
    return len(counted) / (counted[-1] - began)


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Moments of a Poisson process, `rate` a second."""
    chance, at, moments = random.Random(seed), 0.0, []
    while (at := at + chance.expovariate(rate)) < seconds:
        moments.append(at)
    return moments


def latencies(submit: Submit, asked: Asked, moments: Sequence[float]) -> list[float]:
    """Seconds from each arrival to its answer; requests are sent at their moments, whatever is under way."""
    found: list[float] = []
    lock = threading.Lock()
    began = time.perf_counter()
    futures = []

    def finished(at: float, future: "Future[Any]") -> None:
        future.result()
        with lock:
            found.append(time.perf_counter() - began - at)

    for number, at in enumerate(moments):
        time.sleep(max(0.0, began + at - time.perf_counter()))
        future = submit(asked(number))
        future.add_done_callback(partial(finished, at))
        futures.append(future)
    for future in futures:
        future.result()
    while len(found) < len(futures):
        time.sleep(0.001)
    return found


def company(loaded: Loaded, scheduler: Scheduler, settings: GenerationSettings, most: int) -> tuple[list[float], int]:
    """PSNR in dB of pictures drawn in a mix against the same requests alone, and the largest difference of any pixel
    (of 255). The mix differs in seed, sampler, steps and guidance; LCM is left out, which multiplies rounding."""
    samplers = [name for name in SAMPLERS if name != "LCM"]
    mix = [
        replace(
            settings,
            seed=1000 + number,
            scheduler=samplers[number % len(samplers)],
            num_inference_steps=max(1, settings.num_inference_steps - number % 5),
            guidance_scale=(settings.guidance_scale, 1.0)[number % 3 == 2],
            output_format="png",
        )
        for number in range(2 * most + 1)
    ]
    together = [future.result().images[0] for future in [scheduler.submit(request).result for request in mix]]
    found, largest = [], 0
    for request, data in zip(mix, together, strict=True):
        alone = _pixels(scheduler.submit(request).result.result().images[0])
        apart = np.abs(_pixels(data).astype(int) - alone.astype(int))
        largest = max(largest, int(apart.max()))
        mean = float((apart.astype(float) ** 2).mean())
        found.append(min(99.0, 10 * math.log10(255**2 / mean)) if mean else 99.0)
    return found, largest


def _pixels(data: str) -> NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))


def measure(
    loaded: Loaded,
    request: GenerationRequest,
    seconds: float,
    share: float,
    images: int | None,
    mix: Sequence[int] | None = None,
    arriving: float | None = None,
    seed: int = 0,
) -> list[Row]:
    """All cases. `images`: how many at once, default as many as the loop takes. `mix`: numbers of steps of the requests
    that arrive by chance, default the request's own. They arrive for `arriving` seconds, default `seconds`, at moments
    of `seed`."""
    settings = resolve(request, loaded.served)
    loop = loaded.model.loop(components.UNET, settings.height, settings.width)
    each = 2 if is_guided(loaded.model, settings, False) else 1
    fit = max(1, loop.capacity // each)
    most = min(images or fit, fit)
    loop.capacity = each * most
    limits = Limits(max_queue=100_000, deadline_seconds=1e9, stuck_seconds=1e9)
    precision = precision_of(loaded)
    where = f"{settings.width}x{settings.height}"
    steps = settings.num_inference_steps

    efficient = min(max(1, loop.efficient // each), most)
    waiting = max(2, most // 2)  # so that there is always one to join

    def row(case: str, values: Sequence[float], unit: str, **extra: object) -> Row:
        return make_row(f"{case} {where}", values, unit, precision, steps, most, digits=3, extra=extra)

    with torch.inference_mode():
        batch = [replace(settings, seed=number) for number in range(most)]
        offline(loaded, batch, 0)
        rates = [1000 * most / total for total in offline(loaded, batch, seconds)]
    rows = [row("offline, full rows", rates, "images/s")]
    scheduler = Scheduler(loaded.model, limits, lambda: None)

    def in_flight(settings: GenerationSettings) -> "Future[Any]":
        return scheduler.submit(settings).result

    asked = requests(settings, mix or (steps,), seed)
    rate = saturated(scheduler, requests(settings, (steps,)), most + waiting, seconds) / steps
    rows.append(
        row("in flight, saturated", [rate], "images/s", of_offline=round(rate / rows[0].value, 4), efficient=efficient)
    )
    if mix:
        rate = saturated(scheduler, asked, most + waiting, seconds) * len(mix) / sum(mix)
        rows.append(row("in flight, saturated by a mix", [rate], "images/s", mix=list(mix)))
    per_second = share * rate
    moments = arrivals(per_second, arriving or seconds, seed)
    flying = latencies(in_flight, asked, moments)
    decibels, largest = company(loaded, scheduler, settings, most)
    scheduler.close()
    batches = BatchAtATime(loaded, most)
    late = latencies(batches.submit, asked, moments)
    batches.close()
    load = {"arrivals_per_second": round(per_second, 4), "mix": list(mix or (steps,)), "seed": seed}
    arriving_so = f"Poisson at {share:.0%}" + (f", {'/'.join(map(str, mix))} steps" if mix else "")
    rows.append(row(f"in flight, {arriving_so}", flying, "s", **load, efficient=efficient))
    rows.append(row(f"batch at a time, {arriving_so}", late, "s", **load))
    rows.append(row("in a mix against alone, PSNR", decibels, "dB", worst=round(min(decibels), 2), largest=largest))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("release", help="MODEL/VERSION")
    parser.add_argument("--store", required=True)
    parser.add_argument("--size", default=None, help="WIDTHxHEIGHT; default: the release's native size")
    parser.add_argument("--rows", type=int, help="load only the buckets of up to so many rows at that size")
    parser.add_argument("--images", type=int, help="at once; default: as many as the rows take")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--mix", help="numbers of steps of the Poisson arrivals, as 4,20,30,50; default: --steps")
    parser.add_argument("--guidance-scale", type=float, default=7.5)
    parser.add_argument("--seconds", type=float, default=60, help="of each measurement")
    parser.add_argument("--arriving", type=float, help="of each of the two with Poisson arrivals, if others")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and steps of what arrives")
    parser.add_argument("--share", type=float, default=0.7, help="of capacity, for the Poisson arrivals")
    parser.add_argument("--out", type=Path, help="append the rows to this JSON file")
    given = parser.parse_args()
    width, height = (int(side) for side in given.size.split("x")) if given.size else (None, None)
    buckets = [ServedBucket(height, width, given.rows)] if height and width and given.rows else []
    store = open_store(given.store, StoreOptions.from_deployment())
    loaded = load_here(store, given.release, buckets)
    with torch.inference_mode():
        warm_up(loaded)
    request = GenerationRequest(
        prompt="a large red circle on a blue background",
        width=width,
        height=height,
        num_inference_steps=given.steps,
        guidance_scale=given.guidance_scale,
        seed=0,
        num_images=1,
    )
    mix = [int(steps) for steps in given.mix.split(",")] if given.mix else None
    rows = measure(loaded, request, given.seconds, given.share, given.images, mix, given.arriving, given.seed)
    for row in rows:
        extra = ", ".join(f"{name} {value}" for name, value in row.extra.items())
        print(
            f"{row.case:45} {row.value:9.3f} {row.unit:9} p50 {row.p50:8.3f} p99 {row.p99:8.3f} n {row.runs:4} {extra}"
        )
    flying, late = rows[-3], rows[-2]
    print(f"p50 in flight / p50 batch at a time: {flying.p50 / late.p50:.3f}")
    print(f"{rows[0].gpu}, torch {rows[0].torch}, {rows[0].precision}, {given.steps} steps, batch {rows[0].batch}")
    if given.out is not None:
        append_rows(given.out, rows)
    print(json.dumps([row.to_dict() for row in rows]))


if __name__ == "__main__":
    main()
