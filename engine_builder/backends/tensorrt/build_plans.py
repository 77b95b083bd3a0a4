"""Build a plan from an ONNX graph: with TensorRT on the GPU that will run it, with TensorRT-RTX on any machine.

A build can take minutes. So the library and the graph's nodes are checked before the build. The library is called
directly, not through Polygraphy, so that mypy checks the calls. docs/log/builds.md lists what ran on a real library.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, SupportsInt

from engine_builder.backends.built import CompileError
from engine_builder.backends.tensorrt.plan_options import PlanOptions
from engine_builder.backends.tensorrt.plan_settings import Profile, builder_flags, describe_unsupported
from engine_builder.backends.tensorrt.progress import PhaseProgress
from model.engines.tensorrt.execution import last_error, make_logger
from model.engines.tensorrt.libraries import import_library, require
from model.store.precision import Precision

if TYPE_CHECKING:
    import tensorrt


@dataclass(frozen=True)
class SerializedPlan:
    """The result of a build."""

    plan: bytes | memoryview
    """The plan, without weights unless `PlanOptions.refit` is "none"."""
    timing_cache: bytes
    """The measured times of this GPU's kernels, for later builds. Empty for TensorRT-RTX, which measures none."""
    build_seconds: float


def build_plan(
    component: str,
    onnx_path: Path,
    profiles: Sequence[Profile],
    precision: Precision,
    options: PlanOptions,
    workspace_bytes: int | None,
    capabilities: Sequence[str] = (),
    timing_cache: bytes = b"",
    report: Callable[[str], None] = lambda _: None,
) -> SerializedPlan:
    """Build the plan of one component.

    component: the component's name, for error messages.
    onnx_path: the ONNX graph. Its weights are in other files, by paths relative to the graph (external data).
    profiles: the shapes of each optimization profile.
    precision: the precision that the graph was exported in.
    options: the library, the refit, the compatibility and the level of optimization.
    workspace_bytes: the largest amount of GPU memory that a kernel may use for intermediate results; None: no limit.
    capabilities: TensorRT-RTX: the compute capabilities that the plan is for, such as "sm86".
    timing_cache: the cache of an earlier build for the same target, or empty.
    report: called with lines that describe the progress. If `report` raises an exception, the build stops, and the
        exception is raised here.

    Raises TensorRTUnavailable, or CompileError with the library's reason.
    """
    library = options.plan_library
    if not library.compiles_on_target:
        require(library)
    trt = import_library(library)
    log = make_logger(trt)
    builder: tensorrt.Builder = trt.Builder(log)
    if unsupported := _describe_unsupported_nodes(trt, builder, log, onnx_path):
        raise CompileError(f"{library.title} does not support these nodes of {component}'s ONNX graph: {unsupported}.")
    network = builder.create_network(_network_flags(trt))
    parser: tensorrt.OnnxParser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(str(onnx_path)):
        raise CompileError(f"{library.title} cannot read {component}'s ONNX graph: {_describe_errors(parser)}.")
    config = _make_config(trt, builder, precision, options, workspace_bytes, capabilities)
    for profile in profiles:
        if config.add_optimization_profile(_make_optimization_profile(builder, profile)) < 0:
            raise CompileError(f"{library.title} refused the shapes of {component}: {_describe_profile(profile)}.")
    cache = None if library.compiles_on_target else _set_timing_cache(config, timing_cache)
    progress = PhaseProgress(report)
    monitor = _make_progress_monitor(trt, progress)
    config.progress_monitor = monitor
    started = time.perf_counter()
    serialized = builder.build_serialized_network(network, config)
    if progress.error is not None:
        raise progress.error  # an exception of `report`, which cannot pass through the library
    if serialized is None:
        remedy = (
            "Give other --size, or choose the runtime aot_inductor."
            if library.compiles_on_target
            else "Give more --workspace, fewer or smaller --size, or build on a GPU with more memory."
        )
        raise CompileError(f"{library.title} could not build {component} ({last_error(log)}).", remedy)
    seconds = time.perf_counter() - started
    return SerializedPlan(memoryview(serialized).cast("B"), bytes(cache.serialize()) if cache else b"", seconds)


def _network_flags(module: ModuleType) -> int:
    """Return the flags of a network with the tensor types of its ONNX graph. TensorRT 11 has no other kind."""
    return 1 << int(module.NetworkDefinitionCreationFlag.STRONGLY_TYPED)


def _make_config(
    module: ModuleType,
    builder: "tensorrt.Builder",
    precision: Precision,
    options: PlanOptions,
    workspace_bytes: int | None,
    capabilities: Sequence[str],
) -> "tensorrt.IBuilderConfig":
    """Return a build's configuration without profiles and timing cache."""
    if TYPE_CHECKING:
        import tensorrt as trt
    else:
        trt = module
    config = builder.create_builder_config()
    for name, is_set in builder_flags(options.refit, precision).items():
        flag = getattr(trt.BuilderFlag, name)
        if is_set:
            config.set_flag(flag)
        else:
            config.clear_flag(flag)
    if workspace_bytes is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace_bytes)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.builder_optimization_level = options.level
    if options.plan_library.compiles_on_target:
        _set_capabilities(module, config, capabilities)
    else:
        config.hardware_compatibility_level = getattr(trt.HardwareCompatibilityLevel, options.compatibility.upper())
    return config


def _set_capabilities(module: ModuleType, config: Any, capabilities: Sequence[str]) -> None:
    """Build for these compute capabilities. One plan serves all of them."""
    config.num_compute_capabilities = len(capabilities)
    for index, capability in enumerate(capabilities):
        config.set_compute_capability(getattr(module.ComputeCapability, capability.upper()), index)


def _make_optimization_profile(builder: "tensorrt.Builder", profile: Profile) -> "tensorrt.IOptimizationProfile":
    optimization_profile = builder.create_optimization_profile()
    for name, shapes in profile.items():
        optimization_profile.set_shape(name, shapes.smallest, shapes.tuned, shapes.largest)
    return optimization_profile


def _describe_profile(profile: Profile) -> str:
    """List the inputs with their shapes: "sample [1, 4, 64, 64] to [4, 4, 128, 128], ..."."""
    return ", ".join(f"{name} {list(shapes.smallest)} to {list(shapes.largest)}" for name, shapes in profile.items())


def _set_timing_cache(config: "tensorrt.IBuilderConfig", timing_cache: bytes) -> "tensorrt.ITimingCache":
    """Use the times of an earlier build, or start an empty cache if they are refused. Returns the cache in use."""
    cache = config.create_timing_cache(timing_cache)
    if not config.set_timing_cache(cache, ignore_mismatch=False):  # the times are of another version or GPU
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, ignore_mismatch=False)
    return cache


def _describe_unsupported_nodes(
    module: ModuleType, builder: "tensorrt.Builder", log: "tensorrt.ILogger", onnx_path: Path
) -> str:
    """Describe the nodes that the installed library's parser refuses. Empty if it supports all of them."""
    network = builder.create_network(_network_flags(module))  # a variable, because the parser does not keep it alive
    parser: tensorrt.OnnxParser = module.OnnxParser(network, log)
    if parser.supports_model_v2(onnx_path.read_bytes(), str(onnx_path)):
        return ""
    # An error without a node is of the whole graph. The parse reports it.
    return _describe_nodes([error for error in _list_errors(parser) if error.node() >= 0])


def _list_errors(parser: "tensorrt.OnnxParser") -> "list[tensorrt.ParserError]":
    return [parser.get_error(number) for number in range(parser.num_errors)]


def _describe_errors(parser: "tensorrt.OnnxParser") -> str:
    errors = _list_errors(parser)
    of_graph = [_reason(error) for error in errors if error.node() < 0]
    of_nodes = _describe_nodes([error for error in errors if error.node() >= 0])
    return "; ".join(filter(None, [*of_graph, of_nodes])) or "no reason given"


def _describe_nodes(errors: "Sequence[tensorrt.ParserError]") -> str:
    return describe_unsupported((e.node_operator(), e.node_name() or str(e.node()), _reason(e)) for e in errors)


def _reason(error: "tensorrt.ParserError") -> str:
    """Return the first line of the parser's message, at most 200 characters.

    For an operator that it never supports, the message is "false".
    """
    reason = str(error.desc()).strip().partition("\n")[0][:200].rstrip(".")
    return "not supported" if reason == "false" else reason


def _make_progress_monitor(module: ModuleType, progress: PhaseProgress) -> "tensorrt.IProgressMonitor":
    if TYPE_CHECKING:
        import tensorrt as trt
    else:
        trt = module

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
