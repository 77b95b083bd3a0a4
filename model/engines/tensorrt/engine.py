"""Engines built by TensorRT: stripped plans, refit on the GPU from the release's weights.

A plan holds the code of one component, with one optimization profile for each bucket. A refit copies the weights into
the plan, so the caller may free the weight tensors afterwards. No TensorRT engine was run during development;
docs/tensorrt.md explains how to run the tests with TensorRT.
"""

from collections.abc import Mapping

import torch

from model.engines.constants import map_constants
from model.engines.shapes import DTYPES, bind_shapes, dtype_name, output_shape
from model.engines.tensorrt import api
from model.errors import EngineError
from model.store.manifest import Bucket, Signature

_ALIGNMENT_BYTES = 256  # TensorRT needs it for the addresses of tensors and of workspace memory
_REBUILD_COMMANDS = "`preheat build --runtime tensorrt`, `preheat publish`"


class PlanError(EngineError):
    """A TensorRT plan cannot be used with this release, GPU or version of TensorRT."""

    remedy = f"Build and publish the release again ({_REBUILD_COMMANDS})."


class Workspace:
    """Device memory shared by engines of components that never run at the same time.

    All engines reserve memory before the first engine runs, and the workspace has the largest reserved size. If two
    consecutive runs use different streams, the second run waits for the first. The workspace does not see replays of a
    CUDA graph. So an engine that runs concurrently with a graph's replays must not share a workspace with the engines
    captured in that graph.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes = 0
        self._memory: torch.Tensor | None = None
        self._last_run: tuple[int, torch.cuda.Event] | None = None  # the handle of its stream, and its end

    @property
    def bytes(self) -> int:
        """The largest reserved size."""
        return self._bytes

    def reserve(self, byte_count: int) -> None:
        """Reserve memory for one engine.

        Raises EngineError if the memory is already allocated and too small. It cannot be allocated again, because a
        captured graph would keep the old address.
        """
        if self._memory is not None and byte_count > self._bytes:
            raise EngineError(
                "TensorRT engines were opened after others had run.", "Open all engines of a release first."
            )
        self._bytes = max(self._bytes, byte_count)

    def address(self) -> int:
        """Return the aligned address of the memory. The first call allocates the memory, which never moves."""
        if self._memory is None:
            self._memory = torch.empty(self._bytes + _ALIGNMENT_BYTES, dtype=torch.uint8, device=self._device)
        return -(-self._memory.data_ptr() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

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
    """A deserialized and refit plan. A `TensorRTEngine` runs one profile of the plan."""

    def __init__(
        self,
        component: str,
        plan_bytes: bytes,
        version: str,
        signature: Signature,
        constants: bytes,
        weights: Mapping[str, torch.Tensor],
        literals: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        """Open a plan that TensorRT `version` built for this GPU, and copy weights and literals into the plan.

        plan_bytes: the serialized plan. Its digest must have been verified.
        constants: JSON that maps the graph's names of the weights to their names in `weights`, with dtypes and shapes.
        weights: the component's weights on `device`, by their names in the release.
        literals: the graph's other tensors on `device`, which belong to the graph and not to the weights, by name.

        Raises TensorRTUnavailable, or EngineError if anything does not match.
        """
        installed = api.require(device.type)
        if installed != version:
            raise PlanError(
                f"The {component} engine was built by TensorRT {version} and this machine has {installed}, which "
                "cannot read it.",
                f"Install {version}, or build and publish the release again ({_REBUILD_COMMANDS}).",
            )
        import tensorrt as trt

        self.component = component
        self.signature = signature
        self.device = device
        self._log = api.make_logger()
        self._runtime = trt.Runtime(self._log)  # must outlive the engine
        self.engine = self._runtime.deserialize_cuda_engine(plan_bytes)
        if self.engine is None:
            raise PlanError(f"The {component} engine cannot be opened: {self.last_error()}.")
        self._check_tensors()
        self._refit(_named_tensors(component, constants, weights, literals, device))

    def last_error(self) -> str:
        """Return TensorRT's newest error, in one line."""
        return api.last_error(self._log)

    def _check_tensors(self) -> None:
        """Raise PlanError unless the plan's inputs and outputs have the signature's names and dtypes."""
        import tensorrt as trt

        plan = self.engine
        inputs = trt.TensorIOMode.INPUT
        names = [plan.get_tensor_name(index) for index in range(plan.num_io_tensors)]
        actual = {f"{'input' if plan.get_tensor_mode(name) == inputs else 'output'} {name}" for name in names}
        expected = {f"input {spec.name}" for spec in self.signature.inputs}
        expected |= {f"output {spec.name}" for spec in self.signature.outputs}
        if actual != expected:
            raise PlanError(
                f"The {self.component} plan has {', '.join(sorted(actual))}, and its manifest entry states "
                f"{', '.join(sorted(expected))}."
            )
        for spec in (*self.signature.inputs, *self.signature.outputs):
            dtype = plan.get_tensor_dtype(spec.name)
            if dtype != api.data_type(spec.dtype):
                raise PlanError(
                    f"The {self.component} plan has {spec.name} as {dtype}, and its manifest entry states {spec.dtype}."
                )

    def _refit(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy `tensors` into the plan on the current stream, and wait until the copies are finished."""
        import tensorrt as trt

        refitter = trt.Refitter(self.engine, self._log)
        # The parser adds names that the graph does not have. The plan may already hold such a tensor. If it does not,
        # get_missing_weights reports the name below.
        for name in refitter.get_all_weights():
            tensor = tensors.get(name)
            if tensor is None:
                continue
            dtype = api.data_type(dtype_name(tensor.dtype))
            prototype = refitter.get_weights_prototype(name)
            weights = trt.Weights(dtype, tensor.data_ptr(), tensor.numel())
            if prototype.dtype != dtype or prototype.size != tensor.numel():
                raise PlanError(
                    f"The {self.component} plan needs {name} as {prototype.size} values of {prototype.dtype}, not "
                    f"{dtype_name(tensor.dtype)} {list(tensor.shape)}."
                )
            if not refitter.set_named_weights(name, weights, trt.TensorLocation.DEVICE):
                raise PlanError(f"The {self.component} plan refuses {name}: {self.last_error()}.")
        if missing := refitter.get_missing_weights():
            raise PlanError(
                f"The {self.component} plan needs {len(missing)} weights that the release lacks, {missing[0]!r} first."
            )
        stream = torch.cuda.current_stream(self.device)
        refitted = refitter.refit_cuda_engine_async(stream.cuda_stream)
        stream.synchronize()  # the tensors may be freed from here on
        if not refitted:
            raise PlanError(f"The {self.component} engine cannot be refit: {self.last_error()}.")
        api.free_refit_resources(refitter)


class TensorRTEngine:
    """One profile of a plan: the engine of one bucket."""

    # Runs may not overlap: an execution context has one set of tensor addresses, and one workspace.
    concurrent = False

    def __init__(self, plan: TensorRTPlan, profile: int, bucket: Bucket, workspace: Workspace) -> None:
        """Create the execution context of a profile. Raises EngineError if that fails or the plan lacks the profile."""
        import tensorrt as trt

        self.component = plan.component
        self.signature = plan.signature
        self.bucket = bucket
        self._plan = plan
        self._workspace = workspace
        engine = plan.engine
        if profile >= engine.num_optimization_profiles:
            raise PlanError(
                f"The {self.component} plan has {engine.num_optimization_profiles} profiles, and its manifest entry "
                f"names number {profile}."
            )
        self.workspace_bytes = int(engine.get_device_memory_size_for_profile_v2(profile))
        workspace.reserve(self.workspace_bytes)
        context = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        stream = torch.cuda.current_stream(plan.device)
        if context is None or not context.set_optimization_profile_async(profile, stream.cuda_stream):
            raise EngineError(
                f"The {self.component} engine cannot be set up: {plan.last_error()}.",
                "Use a GPU with more memory, or configure fewer buckets.",
            )
        stream.synchronize()
        self._context = context
        self._has_memory = False
        self._shapes: dict[str, tuple[int, ...]] = {}

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run named tensors on the current stream. Raises EngineError.

        Run each shape once outside of a capture before a CUDA graph captures a run with that shape: TensorRT finishes
        its setup in the first run.
        """
        sizes = bind_shapes(self.signature, inputs, self.component)
        batch, height, width = sizes["rows"], sizes.get("height", 0), sizes.get("width", 0)
        if not self.bucket.holds(batch, height, width):
            raise EngineError(f"The {self.component} engine has no bucket for batch {batch} at {width}x{height}.", "")
        device = self._plan.device
        stream = torch.cuda.current_stream(device)
        if not self._has_memory:
            self._context.set_device_memory(self._workspace.address(), self.workspace_bytes)
            self._has_memory = True
        aligned = {
            spec.name: _align(inputs[spec.name], spec.name, self.component, device) for spec in self.signature.inputs
        }
        outputs = {
            spec.name: torch.empty(output_shape(spec, sizes), dtype=DTYPES[spec.dtype], device=device)
            for spec in self.signature.outputs
        }
        for name, tensor in aligned.items():
            shape = tuple(tensor.shape)
            if self._shapes.get(name) != shape:
                self._require(self._context.set_input_shape(name, shape), f"shape {list(shape)} of {name}")
                self._shapes[name] = shape
        for name, tensor in (aligned | outputs).items():
            self._require(self._context.set_tensor_address(name, tensor.data_ptr()), f"address of {name}")
        self._workspace.wait_for_last_run(stream)
        enqueued = self._context.execute_async_v3(stream.cuda_stream)
        self._workspace.record_run(stream)  # also after a failure, which may leave kernels in the stream
        self._require(enqueued, "run")
        return outputs

    def _require(self, accepted: bool, refused: str) -> None:
        """Raise EngineError unless `accepted`. `refused`: the part of the run, for the message."""
        if not accepted:
            self._shapes.clear()  # set them again: the context's state is unknown
            raise EngineError(f"TensorRT refused the {refused} of {self.component}: {self._plan.last_error()}.", "")


def _named_tensors(
    component: str,
    constants: bytes,
    weights: Mapping[str, torch.Tensor],
    literals: Mapping[str, torch.Tensor],
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Return weights and literals by the names of the graph's initializers, each contiguous.

    Checks every device, and the dtypes and shapes of the weights against `constants`. The refit checks dtype and size
    of the literals. Raises PlanError.
    """
    try:
        named = map_constants(component, constants, weights)
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
    return dense if dense.data_ptr() % _ALIGNMENT_BYTES == 0 else dense.clone()
