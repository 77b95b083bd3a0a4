"""Engines built by TensorRT: stripped plans, refit on the GPU from the release's weights.

A plan holds one component's code for all of its buckets, with one optimization profile each. A refit copies the weights
into it, so the tensors that it was refit from may be freed. No TensorRT engine was run during development;
docs/tensorrt.md explains how to run its tests.
"""

from collections.abc import Mapping

import torch

from model.engines.constants import map_constants
from model.engines.shapes import DTYPES, bind_shapes, dtype_name, output_shape
from model.engines.tensorrt import api
from model.errors import EngineError
from model.store.manifest import Bucket, Signature

_ALIGNMENT_BYTES = 256  # of tensor addresses and of device memory that TensorRT uses
_REBUILD = "Build and publish the release again (`preheat build --runtime tensorrt`, `preheat publish`)."


class PlanError(EngineError):
    """A TensorRT plan cannot be used with this release, GPU or version of TensorRT."""

    remedy = _REBUILD


class Workspace:
    """Device memory shared by engines of components that never run at the same time.

    All engines reserve before the first one runs, and the workspace has the largest reserved size. A run on another
    stream than the previous run first waits for that run. Replays of a CUDA graph are not tracked. So engines that run
    concurrently with the replays of a graph must not share a workspace with engines captured in it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes = 0
        self._memory: torch.Tensor | None = None
        self._last_use: tuple[int, torch.cuda.Event] | None = None

    @property
    def bytes(self) -> int:
        """The largest reserved size."""
        return self._bytes

    def reserve(self, size: int) -> None:
        """Reserve `size` bytes. Raises EngineError after a run: a captured graph would keep the old address."""
        if self._memory is not None and size > self._bytes:
            raise EngineError(
                "TensorRT engines were opened after others had run.", "Open all engines of a release first."
            )
        self._bytes = max(self._bytes, size)

    def address(self) -> int:
        """Return the aligned address. Memory is allocated at the first call and never moves."""
        if self._memory is None:
            self._memory = torch.empty(self._bytes + _ALIGNMENT_BYTES, dtype=torch.uint8, device=self._device)
        return -(-self._memory.data_ptr() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    def enter(self, stream: torch.cuda.Stream) -> None:
        """Make `stream` wait for the last use on another stream.

        A capture may not wait for work outside of it, so its caller must have waited.
        """
        last = self._last_use
        if last is None or last[0] == stream.cuda_stream or torch.cuda.is_current_stream_capturing():
            return
        stream.wait_event(last[1])

    def leave(self, stream: torch.cuda.Stream) -> None:
        """Record a use, except during a capture: an event of a graph has no meaning outside of it."""
        if not torch.cuda.is_current_stream_capturing():
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
            self._last_use = (stream.cuda_stream, event)


class TensorRTPlan:
    """A deserialized and refit plan. `TensorRTEngine` runs one profile of it."""

    def __init__(
        self,
        component: str,
        data: bytes,
        version: str,
        signature: Signature,
        constants: bytes,
        weights: Mapping[str, torch.Tensor],
        literals: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        """`data`: verified bytes of a plan that TensorRT `version` built for this GPU. `constants`, `literals` and
        `weights` belong to the engine record, with tensors on `device`. Weights are copied.

        Raises TensorRTUnavailable, or EngineError if anything does not match.
        """
        installed = api.require(device.type)
        if installed != version:
            raise PlanError(
                f"The {component} engine was built by TensorRT {version} and this machine has {installed}, which "
                "cannot read it.",
                f"Install {version}, or build and publish the release again (`preheat build --runtime tensorrt`, "
                "`preheat publish`).",
            )
        import tensorrt as trt

        self.component = component
        self.signature = signature
        self.device = device
        self._log = api.make_logger()
        self._runtime = trt.Runtime(self._log)  # must outlive the engine
        self.engine = self._runtime.deserialize_cuda_engine(data)
        if self.engine is None:
            raise PlanError(f"The {component} engine cannot be opened: {self.last_error()}.")
        self._check_tensors()
        self._refit(_named_tensors(component, constants, weights, literals, device))

    def last_error(self) -> str:
        """Return TensorRT's newest error, in one line."""
        return api.last_error(self._log)

    def _check_tensors(self) -> None:
        """Raise PlanError unless the plan's inputs and outputs are those of the signature."""
        import tensorrt as trt

        engine = self.engine
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        actual = {name: engine.get_tensor_mode(name) for name in names}
        expected = {spec.name: trt.TensorIOMode.INPUT for spec in self.signature.inputs}
        expected |= {spec.name: trt.TensorIOMode.OUTPUT for spec in self.signature.outputs}
        specs = [*self.signature.inputs, *self.signature.outputs]
        if actual != expected or any(engine.get_tensor_dtype(s.name) != api.data_type(s.dtype) for s in specs):
            raise PlanError(
                f"The {self.component} plan has the tensors {', '.join(actual)}, and its record states "
                f"{', '.join(expected)}, or other types."
            )

    def _refit(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the weights into the engine on the current stream, and wait until they are copied."""
        import tensorrt as trt

        refitter = trt.Refitter(self.engine, self._log)
        # Some names come from the parser and not from the graph. If the plan needs one, it is reported as missing.
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

    concurrent = False  # a context has one set of addresses, and its component one workspace

    def __init__(self, plan: TensorRTPlan, profile: int, bucket: Bucket, workspace: Workspace) -> None:
        """Create the execution context of a profile. Raises EngineError if that fails or the plan lacks the profile."""
        import tensorrt as trt

        self.component = plan.component
        self.signature = plan.signature
        self.bucket = bucket
        self._plan = plan
        self._workspace = workspace
        engine = plan.engine
        if not profile < engine.num_optimization_profiles:
            raise PlanError(
                f"The {self.component} plan has {engine.num_optimization_profiles} profiles, and its record names "
                f"number {profile}."
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

        Before a CUDA graph captures it, this bucket must have run at the same shape outside of a capture. TensorRT
        finishes its setup in that run.
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
                self._check(self._context.set_input_shape(name, shape), f"shape {list(shape)} of {name}")
                self._shapes[name] = shape
        for name, tensor in (aligned | outputs).items():
            self._check(self._context.set_tensor_address(name, tensor.data_ptr()), f"address of {name}")
        self._workspace.enter(stream)
        self._check(self._context.execute_async_v3(stream.cuda_stream), "run")
        self._workspace.leave(stream)
        return outputs

    def _check(self, accepted: bool, what: str) -> None:
        if not accepted:
            self._shapes.clear()
            raise EngineError(f"TensorRT refused the {what} of {self.component}: {self._plan.last_error()}.", "")


def _named_tensors(
    component: str,
    constants: bytes,
    weights: Mapping[str, torch.Tensor],
    literals: Mapping[str, torch.Tensor],
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Return the tensors on the GPU by the names of the graph's initializers, with checked dtypes and shapes."""
    try:
        named = map_constants(component, constants, weights)
    except EngineError as error:
        raise PlanError(error.args[0]) from error
    if duplicates := named.keys() & literals.keys():
        raise PlanError(f"The {component} engine has {min(duplicates)} among its weights and its own constants.")
    named |= literals
    for name, tensor in named.items():
        if tensor.device.type != device.type:
            raise PlanError(f"{component}: {name} is on {tensor.device} and must be on {device.type}.")
    # Weights that other engines need channels last are copied for the refit.
    return {name: tensor.contiguous() for name, tensor in named.items()}


def _align(tensor: torch.Tensor, name: str, component: str, device: torch.device) -> torch.Tensor:
    """Return the tensor, or a copy, as TensorRT can read it: contiguous and at an aligned address."""
    if tensor.device.type != device.type:
        raise EngineError(f"{component}: input {name} is on {tensor.device}, its engine on {device.type}.", "")
    dense = tensor.contiguous()
    return dense if dense.data_ptr() % _ALIGNMENT_BYTES == 0 else dense.clone()
