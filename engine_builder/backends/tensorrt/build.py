"""Build a stripped TensorRT plan from an ONNX graph, on the GPU that will run the plan.

A build takes minutes. So TensorRT, the GPU and the graph's nodes are checked before the build. TensorRT is called
directly, not through Polygraphy, so that mypy checks the calls. This module has not run with the real TensorRT yet; see
docs/tensorrt.md.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, SupportsInt

from engine_builder.backends.built import CompileError
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
    """The result of a build."""

    plan: bytes
    """The plan, without weights."""
    timing_cache: bytes
    """The measured times of this GPU's kernels, for later builds."""
    build_seconds: float


def build_plan(
    component: str,
    onnx_path: Path,
    profiles: Sequence[Profile],
    precision: Precision,
    options: PlanOptions,
    workspace_bytes: int,
    timing_cache: bytes = b"",
    report: Callable[[str], None] = lambda _: None,
) -> SerializedPlan:
    """Build the plan of one component.

    component: the component's name, for error messages.
    onnx_path: the ONNX graph. Its weights are in other files, by paths relative to the graph (external data).
    profiles: the shapes of each optimization profile.
    precision: the precision that the graph was exported in.
    options: the refit, the compatibility and the level of optimization.
    workspace_bytes: the largest amount of GPU memory that a kernel may use for intermediate results.
    timing_cache: the cache of an earlier build for the same target, or empty.
    report: called with lines that describe the progress. If `report` raises an exception, the build stops, and the
        exception is raised here.

    Raises TensorRTUnavailable, or CompileError with TensorRT's reason.
    """
    api.require()
    import tensorrt as trt

    log = api.make_logger()
    builder = trt.Builder(log)
    if unsupported := _describe_unsupported_nodes(builder, log, onnx_path):
        raise CompileError(f"TensorRT does not support these nodes of {component}'s ONNX graph: {unsupported}.")
    network = builder.create_network(api.network_flags())
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(str(onnx_path)):
        raise CompileError(f"TensorRT cannot read {component}'s ONNX graph: {_describe_errors(parser)}.")
    config = _make_config(builder, precision, options, workspace_bytes)
    for profile in profiles:
        if config.add_optimization_profile(_make_optimization_profile(builder, profile)) < 0:
            raise CompileError(
                f"TensorRT refused the shapes of {component}: {_describe_profile(profile)} ({api.last_error(log)})."
            )
    cache = _set_timing_cache(config, timing_cache)
    progress = PhaseProgress(report)
    monitor = _make_progress_monitor(progress)
    config.progress_monitor = monitor
    started = time.perf_counter()
    serialized = builder.build_serialized_network(network, config)
    if progress.error is not None:
        raise progress.error  # an exception of `report`, which cannot pass through TensorRT
    if serialized is None:
        raise CompileError(
            f"TensorRT could not build {component} ({api.last_error(log)}).",
            "Give more --workspace, fewer or smaller --size, or build on a GPU with more memory.",
        )
    return SerializedPlan(bytes(serialized), bytes(cache.serialize()), time.perf_counter() - started)


def _make_config(
    builder: "tensorrt.Builder", precision: Precision, options: PlanOptions, workspace_bytes: int
) -> "tensorrt.IBuilderConfig":
    """Return a build's configuration without profiles and timing cache."""
    import tensorrt as trt

    config = builder.create_builder_config()
    for name, is_set in builder_flags(options.refit, precision).items():
        flag = getattr(trt.BuilderFlag, name)
        if is_set:
            config.set_flag(flag)
        else:
            config.clear_flag(flag)
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace_bytes)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.builder_optimization_level = options.level
    config.hardware_compatibility_level = _compatibility_level(options.compatibility)
    return config


def _make_optimization_profile(builder: "tensorrt.Builder", profile: Profile) -> "tensorrt.IOptimizationProfile":
    optimization_profile = builder.create_optimization_profile()
    for name, shapes in profile.items():
        optimization_profile.set_shape(name, shapes.smallest, shapes.tuned, shapes.largest)
    return optimization_profile


def _describe_profile(profile: Profile) -> str:
    """List the inputs with their shapes: "sample [1, 4, 64, 64] to [4, 4, 128, 128], ..."."""
    return ", ".join(f"{name} {list(shapes.smallest)} to {list(shapes.largest)}" for name, shapes in profile.items())


def _set_timing_cache(config: "tensorrt.IBuilderConfig", timing_cache: bytes) -> "tensorrt.ITimingCache":
    """Use the times of an earlier build, or start an empty cache if TensorRT refuses them. Returns the cache in use."""
    cache = config.create_timing_cache(timing_cache)
    if not config.set_timing_cache(cache, ignore_mismatch=False):  # the times are of another version or GPU
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, ignore_mismatch=False)
    return cache


def _describe_unsupported_nodes(builder: "tensorrt.Builder", log: "tensorrt.ILogger", onnx_path: Path) -> str:
    """Describe the nodes that the installed TensorRT's parser refuses. Empty if it supports all of them."""
    import onnx
    import tensorrt as trt

    network = builder.create_network(api.network_flags())  # a variable, because the parser does not keep it alive
    parser = trt.OnnxParser(network, log)
    graph = onnx_path.read_bytes()
    if parser.supports_model_v2(graph, str(onnx_path)):
        return ""
    nodes = onnx.load_from_string(graph).graph.node
    reasons = {error.node(): _reason(error) for error in _list_errors(parser)}
    refused = [
        index
        for subgraph in range(parser.num_subgraphs)
        if not parser.is_subgraph_supported(subgraph)
        for index in parser.get_subgraph_nodes(subgraph)
    ]
    # A refused subgraph may hold supported nodes. So list only nodes with an error, if any has one.
    listed = [index for index in refused if index in reasons] or refused
    unsupported = [(nodes[i].op_type, nodes[i].name, reasons.get(i, "not supported")) for i in listed]
    return describe_unsupported(unsupported) or _describe_errors(parser)


def _list_errors(parser: "tensorrt.OnnxParser") -> "list[tensorrt.ParserError]":
    return [parser.get_error(number) for number in range(parser.num_errors)]


def _describe_errors(parser: "tensorrt.OnnxParser") -> str:
    nodes = [(e.node_operator() or "graph", e.node_name() or str(e.node()), _reason(e)) for e in _list_errors(parser)]
    return describe_unsupported(nodes) or "no reason given"


def _reason(error: "tensorrt.ParserError") -> str:
    """Return the first line of the parser's message, at most 200 characters."""
    return str(error.desc()).strip().partition("\n")[0][:200]


def _compatibility_level(choice: Compatibility) -> "tensorrt.HardwareCompatibilityLevel":
    from tensorrt import HardwareCompatibilityLevel as Level

    return {
        "none": Level.NONE,
        "same_compute_capability": Level.SAME_COMPUTE_CAPABILITY,
        "ampere_plus": Level.AMPERE_PLUS,
    }[choice]


def _make_progress_monitor(progress: PhaseProgress) -> "tensorrt.IProgressMonitor":
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
