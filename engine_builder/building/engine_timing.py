"""Measure how long one run of an engine takes. A deployment with the runtime `fastest` selects engines by this time."""

import statistics
import time
from collections.abc import Mapping

import torch

from engine_builder.backends.aot_inductor.compile import example_inputs, sizes_of
from model.engines.engine import Engine
from model.store.manifest import Benchmark, Bucket, Signature

WARM_UPS, RUNS = 3, 20


def largest_inputs(signature: Signature, bucket: Bucket, device: str) -> dict[str, torch.Tensor]:
    """Return random inputs of a bucket's largest shape."""
    return example_inputs(signature, *sizes_of(bucket, "max"), device)


def time_engine(engine: Engine, inputs: Mapping[str, torch.Tensor]) -> Benchmark:
    """Return the median milliseconds of `RUNS` calls until their outputs are complete. Warm-ups are not counted."""
    on_gpu = next(iter(inputs.values())).is_cuda
    milliseconds = []
    with torch.inference_mode():
        for number in range(WARM_UPS + RUNS):
            if on_gpu:
                torch.cuda.synchronize()
            started = time.perf_counter()
            engine.run(inputs)
            if on_gpu:
                torch.cuda.synchronize()
            if number >= WARM_UPS:
                milliseconds.append((time.perf_counter() - started) * 1000)
    return Benchmark(median=round(statistics.median(milliseconds), 4), runs=RUNS)
