"""Build and time plans with TensorRT 8.6, in a process of its own. The server never runs it.

`python worker.py build GRAPH PLAN --shape NAME=1x2x3 ... --timing-cache FILE --level 2`
`python worker.py run PLAN INPUTS OUTPUTS --runs 30`

8.6.0 is the newest TensorRT whose package on PyPI contains its libraries. Its bindings end with Python 3.10. So this
module runs on Python 3.9, with numpy and cuda-python, without torch. It opens and runs plans by the calls that the
server uses (model/engines/tensorrt/execution.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from model.engines.tensorrt.execution import (
    Execution,
    Plan,
    RawTensor,
    WorkspaceMemory,
    capture,
    check_cuda,
    last_error,
    make_logger,
)

_WORKSPACE_BYTES = 8 * 2**30
_WARM_UPS = 5


def build(
    graph: Path, plan: Path, shapes: dict[str, tuple[int, ...]], timing_cache: Path, level: int
) -> dict[str, Any]:
    """Build a plan of one static shape, in fp16, and write it and the updated timing cache. Returns its facts.

    The kernels of cuBLAS and cuDNN are left out: the libraries of TensorRT 8.6's time are not needed then.
    """
    trt: Any = import_module("tensorrt")
    log: Any = make_logger(trt)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH))
    parser = trt.OnnxParser(network, log)
    started = time.perf_counter()
    if not parser.parse_from_file(str(graph)):
        errors = [parser.get_error(number).desc() for number in range(parser.num_errors)]
        sys.exit(f"TensorRT {trt.__version__} cannot read {graph}: {'; '.join(errors)[:1000]}")
    parsed = time.perf_counter()
    layers = network.num_layers
    config = builder.create_builder_config()
    config.set_flag(trt.BuilderFlag.FP16)
    config.clear_flag(trt.BuilderFlag.TF32)
    config.builder_optimization_level = level
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, _WORKSPACE_BYTES)
    sources = (trt.TacticSource.EDGE_MASK_CONVOLUTIONS, trt.TacticSource.JIT_CONVOLUTIONS)
    config.set_tactic_sources(sum(1 << int(source) for source in sources))
    profile = builder.create_optimization_profile()
    for name, shape in shapes.items():
        profile.set_shape(name, shape, shape, shape)
    config.add_optimization_profile(profile)
    cache = config.create_timing_cache(timing_cache.read_bytes() if timing_cache.exists() else b"")
    config.set_timing_cache(cache, False)
    serialized = builder.build_serialized_network(network, config)
    if serialized is None:
        sys.exit(f"TensorRT {trt.__version__} could not build {graph}: {last_error(log)}")
    built = time.perf_counter()
    plan.write_bytes(serialized)
    timing_cache.write_bytes(config.get_timing_cache().serialize())
    return {
        "tensorrt": trt.__version__,
        "layers": layers,
        "level": level,
        "parse_seconds": round(parsed - started, 1),
        "build_seconds": round(built - parsed, 1),
        "plan_bytes": serialized.nbytes,
    }


class Device:
    """Memory, streams and events of GPU 0, by cuda-python."""

    def __init__(self) -> None:
        from cuda.bindings import runtime  # type: ignore[import-not-found, unused-ignore]

        self.runtime: Any = runtime
        self.stream = int(self._check(runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking)))

    def _check(self, result: tuple[Any, ...]) -> Any:
        return check_cuda(self.runtime, result)

    def allocate(self, byte_count: int) -> int:
        return int(self._check(self.runtime.cudaMalloc(byte_count)))

    def synchronize(self) -> None:
        self._check(self.runtime.cudaStreamSynchronize(self.stream))

    def upload(self, array: Any) -> RawTensor:
        """Copy an array to new device memory."""
        dense = np.ascontiguousarray(array)
        address = self.allocate(dense.nbytes)
        kind = self.runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._check(self.runtime.cudaMemcpy(address, dense.ctypes.data, dense.nbytes, kind))
        return RawTensor(address, str(dense.dtype), dense.shape)

    def download(self, tensor: RawTensor) -> Any:
        array = np.empty(tensor.shape, tensor.dtype)
        kind = self.runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._check(self.runtime.cudaMemcpy(array.ctypes.data, tensor.address, array.nbytes, kind))
        return array

    def milliseconds(self, work: Any, runs: int) -> list[float]:
        """Return the milliseconds of each of `runs` calls of `work` on the stream, by events."""
        events = [self._check(self.runtime.cudaEventCreate()) for _ in range(runs + 1)]
        self._check(self.runtime.cudaEventRecord(events[0], self.stream))
        for event in events[1:]:
            work()
            self._check(self.runtime.cudaEventRecord(event, self.stream))
        self.synchronize()
        pairs = zip(events, events[1:])  # noqa: B905 (Python 3.9)
        return [float(self._check(self.runtime.cudaEventElapsedTime(start, end))) for start, end in pairs]


def run(plan_path: Path, inputs: Path, outputs: Path, runs: int) -> dict[str, Any]:
    """Run a plan on the arrays of a folder (NAME.npy), write its outputs likewise, and time it. Returns its facts.

    The graph's outputs must equal the plain run's, bit for bit.
    """
    trt: Any = import_module("tensorrt")
    device = Device()
    started = time.perf_counter()
    plan = Plan(trt, plan_path.read_bytes(), plan_path.stem)
    deserialized = time.perf_counter()
    arrays = {path.stem: np.load(path) for path in sorted(inputs.glob("*.npy"))}
    returned = plan.output_dtypes()
    plan.check_tensors({name: str(array.dtype) for name, array in arrays.items()}, returned)
    execution = Execution(plan, 0, device.stream, device.synchronize)
    memory = WorkspaceMemory(device.allocate)
    memory.reserve(execution.workspace_bytes)
    execution.set_workspace(memory.address())
    given = {name: device.upload(array) for name, array in arrays.items()}
    execution.set_shapes(given)
    results = {
        name: device.upload(np.full(execution.output_shape(name), np.nan, dtype)) for name, dtype in returned.items()
    }
    execution.set_tensors(given, results)
    execution.enqueue(device.stream)
    device.synchronize()
    ready = time.perf_counter()
    plain = {name: device.download(tensor) for name, tensor in results.items()}
    for _ in range(_WARM_UPS):
        execution.enqueue(device.stream)
    times = device.milliseconds(lambda: execution.enqueue(device.stream), runs)
    replay = capture(device.runtime, device.stream, lambda: execution.enqueue(device.stream, is_capturing=True))
    for _ in range(_WARM_UPS):
        replay()
    graph_times = device.milliseconds(replay, runs)
    outputs.mkdir(parents=True, exist_ok=True)
    for name, tensor in results.items():
        array = device.download(tensor)
        np.save(outputs / f"{name}.npy", array)
        if not np.array_equal(array, plain[name], equal_nan=True):
            sys.exit(f"{name}: the graph's output differs from the plain run's")
    return {
        "tensorrt": trt.__version__,
        "deserialize_seconds": round(deserialized - started, 2),
        "load_seconds": round(ready - started, 2),
        "workspace_bytes": execution.workspace_bytes,
        "plain_milliseconds": round(statistics.median(times), 3),
        "graph_milliseconds_of_runs": graph_times,
    }


def parse_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Parse "sample=2x4x128x128"."""
    name, _, sizes = text.partition("=")
    return name, tuple(int(size) for size in sizes.split("x"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and print its facts as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build")
    building.add_argument("graph", type=Path)
    building.add_argument("plan", type=Path)
    building.add_argument("--shape", action="append", required=True, metavar="NAME=1x2x3", help="of each input")
    building.add_argument("--timing-cache", type=Path, required=True, help="read if it exists, and updated")
    building.add_argument("--level", type=int, default=2)
    running = commands.add_parser("run")
    running.add_argument("plan", type=Path)
    running.add_argument("inputs", type=Path)
    running.add_argument("outputs", type=Path)
    running.add_argument("--runs", type=int, default=30)
    options = parser.parse_args(arguments)
    if options.command == "build":
        shapes = dict(parse_shape(text) for text in options.shape)
        facts = build(options.graph, options.plan, shapes, options.timing_cache, options.level)
    else:
        facts = run(options.plan, options.inputs, options.outputs, options.runs)
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
