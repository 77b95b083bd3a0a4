"""ONNX -> a stripped TensorRT plan, on the GPU it is for. Not executed where this was written; see docs/tensorrt.md.

Everything that can be refused is refused before the build begins, which takes minutes: no TensorRT, no GPU, nodes that
the parser does not take, too little memory. TensorRT is called directly and not through Polygraphy's loaders, so that
its interface is checked by mypy; Polygraphy is for looking at what comes out.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, SupportsInt

import torch

from engine_builder.backends.aot_inductor.compile import CompileError
from engine_builder.backends.tensorrt.options import Choices
from engine_builder.backends.tensorrt.plan_settings import (
    Profile,
    builder_flags,
    describe_unsupported,
)
from engine_builder.backends.tensorrt.progress import PhaseProgress
from model.engines.tensorrt import api
from model.loading.runtimes import Compatibility
from model.store.manifest import Precision

if TYPE_CHECKING:
    import tensorrt


@dataclass(frozen=True)
class BuiltPlan:
    """A plan without weights, what was learned of this GPU's kernels, and the seconds it took."""

    data: bytes
    timing_cache: bytes
    seconds: float


def build_plan(
    component: str,
    model: Path,
    profiles: Sequence[Profile],
    precision: Precision,
    choices: Choices,
    workspace: int,
    timing_cache: bytes = b"",
    tell: Callable[[str], None] = lambda _: None,
) -> BuiltPlan:
    """Build `model` (.onnx, its weights beside it) with one optimization profile for each of `profiles`.

    `timing_cache` is an earlier build's, of the same target, or empty. Raises TensorRTUnavailable, or CompileError with
    what TensorRT said.
    """
    api.require(torch.device("cuda"))
    import tensorrt as trt

    log = api.make_logger()
    builder = trt.Builder(log)
    if unsupported := _unsupported_nodes(builder, log, model):
        raise CompileError(f"TensorRT does not take these nodes of {component}'s ONNX graph: {unsupported}.")
    network = builder.create_network(api.network_flags())
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(str(model)):
        raise CompileError(f"TensorRT cannot read {component}'s ONNX graph: {_parser_errors(parser)}.")
    config = builder.create_builder_config()
    for name, wanted in builder_flags(choices.refit, precision).items():
        flag = getattr(trt.BuilderFlag, name)
        if wanted:
            config.set_flag(flag)
        else:
            config.clear_flag(flag)
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.builder_optimization_level = choices.level
    config.hardware_compatibility_level = _compatibility(choices.compatibility)
    for profile in profiles:
        shapes = builder.create_optimization_profile()
        for name, span in profile.items():
            shapes.set_shape(name, span.smallest, span.tuned, span.largest)
        if config.add_optimization_profile(shapes) < 0:
            raise CompileError(f"TensorRT does not take the shapes {profile} of {component} ({api.last_error(log)}).")
    cache = config.create_timing_cache(timing_cache)
    if not config.set_timing_cache(cache, False):  # of another version or GPU: begin a new one
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, False)
    progress = PhaseProgress(tell)
    monitor = _monitor(progress)
    config.progress_monitor = monitor
    began = time.perf_counter()
    serialized = builder.build_serialized_network(network, config)
    if progress.error is not None:
        raise progress.error
    if serialized is None:
        raise CompileError(
            f"TensorRT could not build {component} ({api.last_error(log)}): give more --workspace, fewer or smaller "
            "--size, or build on a GPU with more memory."
        )
    return BuiltPlan(bytes(serialized), bytes(cache.serialize()), time.perf_counter() - began)


def _unsupported_nodes(builder: "tensorrt.Builder", log: "tensorrt.ILogger", model: Path) -> str:
    """A readable list of the nodes that this TensorRT's parser does not take, "" where it takes all."""
    import onnx
    import tensorrt as trt

    network = builder.create_network(api.network_flags())  # which the parser does not keep alive
    parser = trt.OnnxParser(network, log)
    data = model.read_bytes()
    if parser.supports_model_v2(data, str(model)):
        return ""
    nodes = onnx.load_from_string(data).graph.node
    reasons = {}
    for number in range(parser.num_errors):
        error = parser.get_error(number)
        reasons[error.node()] = str(error.desc()).strip().partition("\n")[0][:200]
    refused = [
        index
        for part in range(parser.num_subgraphs)
        if not parser.is_subgraph_supported(part)
        for index in parser.get_subgraph_nodes(part)
    ]
    # A refused subgraph may hold nodes that are not to blame: those with an error are named where there are any.
    blamed = [index for index in refused if index in reasons] or refused
    return describe_unsupported(
        [
            {"operator": nodes[i].op_type, "name": nodes[i].name, "reason": reasons.get(i, "not supported")}
            for i in blamed
        ]
    ) or _parser_errors(parser)


def _parser_errors(parser: "tensorrt.OnnxParser") -> str:
    found = [parser.get_error(number) for number in range(parser.num_errors)]
    return (
        describe_unsupported(
            [
                {
                    "operator": error.node_operator() or "graph",
                    "name": error.node_name() or str(error.node()),
                    "reason": str(error.desc()).strip().partition("\n")[0][:200],
                }
                for error in found
            ]
        )
        or "it gives no reason"
    )


def _compatibility(choice: Compatibility) -> "tensorrt.HardwareCompatibilityLevel":
    import tensorrt as trt

    levels = {
        "none": trt.HardwareCompatibilityLevel.NONE,
        "same_compute_capability": trt.HardwareCompatibilityLevel.SAME_COMPUTE_CAPABILITY,
        "ampere_plus": trt.HardwareCompatibilityLevel.AMPERE_PLUS,
    }
    return levels[choice]


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
