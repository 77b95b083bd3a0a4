"""Build a stripped TensorRT plan from an ONNX graph, on the GPU that it is for. Not tested on TensorRT yet; see
docs/tensorrt.md.

A build takes minutes. So TensorRT, the GPU and the graph's nodes are checked before it. TensorRT is called directly,
not through Polygraphy, so that mypy checks the calls.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, SupportsInt

from engine_builder.backends.aot_inductor.compile import CompileError
from engine_builder.backends.tensorrt.options import PlanOptions
from engine_builder.backends.tensorrt.plan_settings import Profile, builder_flags, describe_unsupported
from engine_builder.backends.tensorrt.progress import PhaseProgress
from model.engines.tensorrt import api
from model.loading.runtimes import Compatibility
from model.store.precision import Precision

if TYPE_CHECKING:
    import tensorrt


@dataclass(frozen=True)
class SerializedPlan:
    """A plan without weights, the measured times of this GPU's kernels, and the seconds that the build took."""

    data: bytes
    timing_cache: bytes
    seconds: float


def build_plan(
    component: str,
    model: Path,
    profiles: Sequence[Profile],
    precision: Precision,
    options: PlanOptions,
    workspace: int,
    timing_cache: bytes = b"",
    report: Callable[[str], None] = lambda _: None,
) -> SerializedPlan:
    """Build the plan of `model` (.onnx, its weights in files next to it) with the given optimization profiles.

    `workspace`: bytes of GPU memory for kernels. `timing_cache`: that of an earlier build for the same target, or
    empty.
    Raises TensorRTUnavailable, or CompileError with TensorRT's reason.
    """
    api.require()
    import tensorrt as trt

    log = api.make_logger()
    builder = trt.Builder(log)
    if unsupported := _unsupported_nodes(builder, log, model):
        raise CompileError(f"TensorRT does not support these nodes of {component}'s ONNX graph: {unsupported}.")
    network = builder.create_network(api.network_flags())
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(str(model)):
        raise CompileError(f"TensorRT cannot read {component}'s ONNX graph: {_parser_errors(parser)}.")
    config = builder.create_builder_config()
    for name, is_set in builder_flags(options.refit, precision).items():
        flag = getattr(trt.BuilderFlag, name)
        if is_set:
            config.set_flag(flag)
        else:
            config.clear_flag(flag)
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.builder_optimization_level = options.level
    config.hardware_compatibility_level = _compatibility_level(options.compatibility)
    for profile in profiles:
        shapes = builder.create_optimization_profile()
        for name, span in profile.items():
            shapes.set_shape(name, span.smallest, span.tuned, span.largest)
        if config.add_optimization_profile(shapes) < 0:
            raise CompileError(f"TensorRT refused the shapes {profile} of {component} ({api.last_error(log)}).")
    cache = config.create_timing_cache(timing_cache)
    if not config.set_timing_cache(cache, False):  # the cache belongs to another version or GPU
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, False)
    progress = PhaseProgress(report)
    monitor = _monitor(progress)
    config.progress_monitor = monitor
    started = time.perf_counter()
    serialized = builder.build_serialized_network(network, config)
    if progress.error is not None:
        raise progress.error
    if serialized is None:
        raise CompileError(
            f"TensorRT could not build {component} ({api.last_error(log)}).",
            "Give more --workspace, fewer or smaller --size, or build on a GPU with more memory.",
        )
    return SerializedPlan(bytes(serialized), bytes(cache.serialize()), time.perf_counter() - started)


def _unsupported_nodes(builder: "tensorrt.Builder", log: "tensorrt.ILogger", model: Path) -> str:
    """Describe the nodes that the installed TensorRT's parser refuses. Empty if it supports all of them."""
    import onnx
    import tensorrt as trt

    network = builder.create_network(api.network_flags())  # a variable, because the parser does not keep it alive
    parser = trt.OnnxParser(network, log)
    data = model.read_bytes()
    if parser.supports_model_v2(data, str(model)):
        return ""
    nodes = onnx.load_from_string(data).graph.node
    errors = [parser.get_error(number) for number in range(parser.num_errors)]
    reasons = {error.node(): _reason(error) for error in errors}
    refused = [
        index
        for part in range(parser.num_subgraphs)
        if not parser.is_subgraph_supported(part)
        for index in parser.get_subgraph_nodes(part)
    ]
    # A refused subgraph may hold supported nodes. So list only nodes with an error, if any has one.
    listed = [index for index in refused if index in reasons] or refused
    unsupported = [(nodes[i].op_type, nodes[i].name, reasons.get(i, "not supported")) for i in listed]
    return describe_unsupported(unsupported) or _parser_errors(parser)


def _parser_errors(parser: "tensorrt.OnnxParser") -> str:
    errors = [parser.get_error(number) for number in range(parser.num_errors)]
    nodes = [(e.node_operator() or "graph", e.node_name() or str(e.node()), _reason(e)) for e in errors]
    return describe_unsupported(nodes) or "no reason given"


def _reason(error: "tensorrt.ParserError") -> str:
    return str(error.desc()).strip().partition("\n")[0][:200]


def _compatibility_level(choice: Compatibility) -> "tensorrt.HardwareCompatibilityLevel":
    from tensorrt import HardwareCompatibilityLevel as Level

    return {
        "none": Level.NONE,
        "same_compute_capability": Level.SAME_COMPUTE_CAPABILITY,
        "ampere_plus": Level.AMPERE_PLUS,
    }[choice]


def _monitor(progress: PhaseProgress) -> "tensorrt.IProgressMonitor":
    import tensorrt as trt

    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: SupportsInt) -> None:
            progress.start(phase_name, parent_phase, int(num_steps))

        def step_complete(self, phase_name: str, step: SupportsInt) -> bool:
            return progress.step(phase_name, int(step))

        def phase_finish(self, phase_name: str) -> None:
            progress.finish(phase_name)

    return Monitor()
