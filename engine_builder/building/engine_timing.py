"""How long one run of an engine takes: what a deployment that asks for the fastest runtime chooses by."""

import statistics
import time
from collections.abc import Mapping

import torch

from engine_builder.backends.aot_inductor.compile import example_inputs
from model.engines.engine import Engine
from model.store.manifest import Benchmark, Bucket, Signature

WARM_UPS, RUNS = 3, 20


def largest_inputs(signature: Signature, bucket: Bucket, device: str) -> dict[str, torch.Tensor]:
    """Random inputs of a bucket's largest shape."""
    height, width = (span.max if span else 0 for span in (bucket.height, bucket.width))
    return example_inputs(signature, bucket.rows.max, height, width, device)


def time_engine(
    engine: Engine, inputs: Mapping[str, torch.Tensor], warm_ups: int = WARM_UPS, runs: int = RUNS
) -> Benchmark:
    """Median milliseconds of `runs` calls after `warm_ups` uncounted ones, each until its outputs are there."""
    on_gpu = next(iter(inputs.values())).is_cuda
    taken = []
    with torch.inference_mode():
        for number in range(warm_ups + runs):
            if on_gpu:
                torch.cuda.synchronize()
            began = time.perf_counter()
            engine.run(inputs)
            if on_gpu:
                torch.cuda.synchronize()
            if number >= warm_ups:
                taken.append((time.perf_counter() - began) * 1000)
    return Benchmark(median=round(statistics.median(taken), 4), runs=runs)
