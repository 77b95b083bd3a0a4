"""Engines of TensorRT and TensorRT-RTX, on torch tensors. The calls to the library are in `execution`.

A plan holds the code of one component, with one optimization profile for each bucket. A stripped plan holds no weights:
a refit copies them into the plan on the GPU, so the caller may free the weight tensors afterwards. docs/log/builds.md
lists what ran on a real library.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from model.engines.constants import map_constants, read_constants
from model.engines.shapes import DTYPES, bind_shapes, shape_at
from model.engines.tensorrt.execution import ALIGNMENT_BYTES, Execution, Plan, PlanError, RuntimeCache
from model.engines.tensorrt.libraries import Library, import_library, require
from model.errors import EngineError
from model.store.manifest import Bucket, Signature

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Workspace:
    """Device memory shared by engines of components that never run at the same time. It has the largest reserved size.

    All engines reserve memory before the first engine runs. If two consecutive runs use different streams, the second
    run waits for the first. The workspace does not see replays of a CUDA graph. So an engine that runs concurrently
    with a graph's replays must not share a workspace with the engines captured in that graph.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes = 0
        self._buffer: torch.Tensor | None = None
        self._last_run: tuple[int, torch.cuda.Event] | None = None  # the handle of its stream, and its end

    def reserve(self, byte_count: int) -> None:
        """Reserve memory for one engine.

        Raises EngineError if the memory is already allocated and too small. It cannot be allocated again, because a
        captured graph would keep the old address.
        """
        if self._buffer is not None and byte_count > self._bytes:
            raise EngineError(
                "Engines of plans were opened after others had run.", "Open all engines of a release first."
            )
        self._bytes = max(self._bytes, byte_count)

    def address(self) -> int:
        """Return the aligned address of the memory. The first call allocates the memory, which never moves."""
        if self._buffer is None:
            self._buffer = torch.empty(self._bytes + ALIGNMENT_BYTES, dtype=torch.uint8, device=self._device)
        return -(-self._buffer.data_ptr() // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def wait_for_last_run(self, stream: torch.cuda.Stream) -> None:
        """Make `stream` wait for the last run, if that run used another stream.

        During the capture of a CUDA graph this does nothing, because a graph cannot wait for work outside the graph.
        The code that captures must wait before the capture.
        """
        if self._last_run is None or torch.cuda.is_current_stream_capturing():
            return
        last_stream, last_end = self._last_run
        if last_stream != stream.cuda_stream:
            stream.wait_event(last_end)

    def record_run(self, stream: torch.cuda.Stream) -> None:
        """Record the end of a run on `stream`.

        During a capture this does nothing, because an event of a graph has no meaning outside the graph.
        """
        if not torch.cuda.is_current_stream_capturing():
            end = torch.cuda.Event()  # type: ignore[no-untyped-call]
            end.record(stream)
            self._last_run = (stream.cuda_stream, end)


class TensorRTPlan:
    """A deserialized plan with its weights. A `TensorRTEngine` runs one profile of the plan."""

    def __init__(
        self,
        library: Library,
        component: str,
        plan_bytes: "Buffer",
        version: str,
        signature: Signature,
        tensors: Mapping[str, torch.Tensor] | None,
        device: torch.device,
        runtime_cache: bytes = b"",
    ) -> None:
        """Open a plan that `version` of the library built for this GPU, and copy `tensors` into the plan.

        plan_bytes: the serialized plan. Its digest must have been verified.
        tensors: the initializers of the graph by name, see `named_tensors`; None: the plan holds its weights.
        runtime_cache: kernels that an earlier process compiled for the plan, or empty. Only TensorRT-RTX has them.

        Raises TensorRTUnavailable, or EngineError if anything does not match.
        """
        installed = require(library, device.type)
        if installed != version:
            raise PlanError(
                f"The {component} engine was built by {library.title} {version} and this machine has {installed}, "
                "which cannot read it.",
                f"Install {version}, or build and publish the release again (`{library.build_command}`, `preheat "
                "publish`).",
            )
        self.component = component
        self.signature = signature
        self.device = device
        self.plan = Plan(import_library(library), plan_bytes, component, library.title)
        self.plan.check_tensors(
            {spec.name: spec.dtype for spec in signature.inputs}, {spec.name: spec.dtype for spec in signature.outputs}
        )
        if tensors is not None:
            self.plan.refit(tensors, torch.cuda.current_stream(device))
        self.runtime_cache = RuntimeCache(self.plan, runtime_cache) if library.compiles_on_target else None


class TensorRTEngine:
    """One profile of a plan: the engine of one bucket."""

    def __init__(self, plan: TensorRTPlan, profile: int, bucket: Bucket, workspace: Workspace) -> None:
        """Create the execution context of a profile. Raises EngineError if that fails or the plan lacks the profile."""
        self.component = plan.component
        self.signature = plan.signature
        self.bucket = bucket
        self._device = plan.device
        self._workspace = workspace
        self._execution = Execution(plan.plan, profile, torch.cuda.current_stream(plan.device), plan.runtime_cache)
        self.workspace_bytes = self._execution.workspace_bytes
        workspace.reserve(self.workspace_bytes)
        self._has_memory = False

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run named tensors on the current stream. Raises EngineError.

        Run each shape once outside of a capture before a CUDA graph captures a run with that shape.
        """
        sizes = bind_shapes(self.signature, inputs, self.component)
        batch, height, width = sizes["rows"], sizes.get("height", 0), sizes.get("width", 0)
        if not self.bucket.holds(batch, height, width):
            raise EngineError(f"The {self.component} engine has no bucket for batch {batch} at {width}x{height}.", "")
        device = self._device
        stream = torch.cuda.current_stream(device)
        if not self._has_memory:
            self._execution.set_workspace(self._workspace.address())
            self._has_memory = True
        aligned = {
            spec.name: _align(inputs[spec.name], spec.name, self.component, device) for spec in self.signature.inputs
        }
        outputs = {
            spec.name: torch.empty(shape_at(spec.shape, sizes), dtype=DTYPES[spec.dtype], device=device)
            for spec in self.signature.outputs
        }
        self._execution.set_tensors(aligned, outputs)
        self._workspace.wait_for_last_run(stream)
        try:
            self._execution.enqueue(stream, torch.cuda.is_current_stream_capturing())
        finally:
            self._workspace.record_run(stream)  # also after a failure, which may leave kernels in the stream
        return outputs


def named_tensors(
    component: str,
    constants: bytes,
    weights: Mapping[str, torch.Tensor],
    literals: Mapping[str, torch.Tensor],
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Return weights and literals by the names of the graph's initializers, each contiguous: what a refit takes.

    constants: JSON that maps the graph's names of the weights to their names in `weights`, with dtypes and shapes.
    weights: the component's weights on `device`, by their names in the release.
    literals: the graph's other tensors on `device`, which belong to the graph and not to the weights, by name.

    Checks every device, and the dtypes and shapes of the weights against `constants`. The refit checks dtype and size
    of the literals. Raises PlanError.
    """
    try:
        named = map_constants(component, read_constants(component, constants), weights)
    except EngineError as error:
        raise PlanError(error.args[0]) from error
    if duplicates := named.keys() & literals.keys():
        raise PlanError(f"The {component} engine has {min(duplicates)} among its weights and among its literals.")
    named |= literals
    for name, tensor in named.items():
        if tensor.device.type != device.type:
            raise PlanError(f"{component}: {name} is on {tensor.device} and must be on {device.type}.")
    # Weights that other engines need with channels last are copied, because a refit needs contiguous memory.
    return {name: tensor.contiguous() for name, tensor in named.items()}


def _align(tensor: torch.Tensor, name: str, component: str, device: torch.device) -> torch.Tensor:
    """Return the tensor, or a copy that TensorRT can read: contiguous and at an aligned address."""
    if tensor.device.type != device.type:
        raise EngineError(f"{component}: input {name} is on {tensor.device}, and the engine is on {device.type}.", "")
    dense = tensor.contiguous()
    return dense if dense.data_ptr() % ALIGNMENT_BYTES == 0 else dense.clone()
