"""Engines that TensorRT built: stripped plans, refit from the release's weights on the GPU.

A plan holds one component's code for all of its buckets, an optimization profile each, and takes one copy of the
weights, its own: after the refit the tensors it was refit from are no longer needed. Not executed where this was
written, for want of TensorRT; docs/tensorrt.md says how to run its tests.
"""

from collections.abc import Mapping

import torch

from model.engines.components import (
    DTYPES,
    dtype_name,
    solve,
)
from model.engines.constants import map_constants
from model.engines.tensorrt import api
from model.errors import EngineError
from model.store.manifest import Bucket, Signature, TensorSpec

_ALIGNMENT = 256  # bytes; what TensorRT asks of the address of a tensor and of device memory
_AGAIN = "build and publish the release again (`preheat build --runtime tensorrt`, `preheat publish`)."


class Workspace:
    """Device memory that the engines of components which never run at the same time use in turn.

    All of them ask for it before the first runs; it is as large as the largest needs. On another stream than the last
    one that used it, a run first waits for that one. It cannot see into a CUDA graph that is replayed: engines that are
    captured in one must not share it with engines that run beside its replays on another stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes = 0
        self._memory: torch.Tensor | None = None
        self._used: tuple[int, torch.cuda.Event] | None = None

    @property
    def bytes(self) -> int:
        return self._bytes

    def reserve(self, size: int) -> None:
        """Ask for `size` bytes. Raises EngineError once engines run: a captured graph would keep the old address."""
        if self._memory is not None and size > self._bytes:
            raise EngineError("TensorRT engines were opened after others had run: open all of a release's first.")
        self._bytes = max(self._bytes, size)

    def address(self) -> int:
        """Where it lies; it is allocated when first asked for, and never moves."""
        if self._memory is None:
            self._memory = torch.empty(self._bytes + _ALIGNMENT, dtype=torch.uint8, device=self._device)
        return -(-self._memory.data_ptr() // _ALIGNMENT) * _ALIGNMENT

    def enter(self, stream: torch.cuda.Stream) -> None:
        """Make `stream` wait for the last use on another one. Not in a capture, which may not wait for what is outside
        of it: whoever captures has waited."""
        if self._used is None or self._used[0] == stream.cuda_stream or torch.cuda.is_current_stream_capturing():
            return
        stream.wait_event(self._used[1])

    def leave(self, stream: torch.cuda.Stream) -> None:
        """Note a use. In a capture nothing is noted: an event of a graph means nothing outside of it."""
        if not torch.cuda.is_current_stream_capturing():
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
            self._used = (stream.cuda_stream, event)


class TensorRTPlan:
    """A deserialized plan with its weights in it, from which the engines of its profiles are made."""

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
        """`data` are verified bytes of a plan that TensorRT `version` built for this GPU; `constants`, `literals` and
        `weights` are what the engine record names, the tensors on `device`. Weights are read and not kept.

        Raises TensorRTUnavailable, or EngineError where anything disagrees.
        """
        installed = api.require(device)
        if installed != version:
            raise EngineError(
                f"The {component} engine was built by TensorRT {version} and this machine has {installed}, which "
                f"cannot read it: install {version}, or {_AGAIN}"
            )
        import tensorrt as trt

        self.component = component
        self.signature = signature
        self.device = device
        self._log = api.make_logger()
        self._runtime = trt.Runtime(self._log)  # must outlive the engine
        self.engine = self._runtime.deserialize_cuda_engine(data)
        if self.engine is None:
            raise EngineError(f"The {component} engine cannot be opened ({api.last_error(self._log)}): {_AGAIN}")
        self._check_border()
        self._refit(_named(component, constants, weights, literals, device))

    def _check_border(self) -> None:
        """The plan's tensors are the signature's."""
        import tensorrt as trt

        engine = self.engine
        found = {
            engine.get_tensor_name(i): engine.get_tensor_mode(engine.get_tensor_name(i))
            for i in range(engine.num_io_tensors)
        }
        wanted = {spec.name: trt.TensorIOMode.INPUT for spec in self.signature.inputs}
        wanted |= {spec.name: trt.TensorIOMode.OUTPUT for spec in self.signature.outputs}
        specs = [*self.signature.inputs, *self.signature.outputs]
        if found != wanted or any(engine.get_tensor_dtype(s.name) != api.data_type(DTYPES[s.dtype]) for s in specs):
            raise EngineError(
                f"The {self.component} plan takes and gives {', '.join(found)}, and its record says "
                f"{', '.join(wanted)}, or of other types: {_AGAIN}"
            )

    def _refit(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the weights into the engine, on the GPU, on the current stream; returns when they are there."""
        import tensorrt as trt

        refitter = trt.Refitter(self.engine, self._log)
        # What the parser made itself has names of its own; whether the plan needs it is said below.
        for name in refitter.get_all_weights():
            tensor = tensors.get(name)
            if tensor is None:
                continue
            kind = api.data_type(tensor.dtype)
            prototype = refitter.get_weights_prototype(name)
            given = trt.Weights(kind, tensor.data_ptr(), tensor.numel())
            if prototype.dtype != kind or prototype.size != tensor.numel():
                raise EngineError(
                    f"The {self.component} plan wants {name} as {prototype.size} values of {prototype.dtype}, not "
                    f"{dtype_name(tensor.dtype)} {list(tensor.shape)}: {_AGAIN}"
                )
            if not refitter.set_named_weights(name, given, trt.TensorLocation.DEVICE):
                raise EngineError(
                    f"The {self.component} plan does not take {name} ({api.last_error(self._log)}): {_AGAIN}"
                )
        if missing := refitter.get_missing_weights():
            raise EngineError(
                f"The {self.component} plan wants {len(missing)} weights that nothing here has, {missing[0]!r} first: "
                f"{_AGAIN}"
            )
        stream = torch.cuda.current_stream(self.device)
        done = refitter.refit_cuda_engine_async(stream.cuda_stream)
        stream.synchronize()  # the tensors may be freed from here on
        if not done:
            raise EngineError(f"The {self.component} engine cannot be refit ({api.last_error(self._log)}): {_AGAIN}")
        api.release_refit(refitter)


class TensorRTEngine:
    """One profile of a plan: the engine of one bucket."""

    overlaps = False  # a context has one set of addresses, and its component one workspace

    def __init__(self, plan: TensorRTPlan, profile: int, bucket: Bucket, workspace: Workspace) -> None:
        """Raises EngineError where the plan has no such profile."""
        import tensorrt as trt

        self.component = plan.component
        self.signature = plan.signature
        self.bucket = bucket
        self._plan = plan
        self._workspace = workspace
        engine = plan.engine
        if not profile < engine.num_optimization_profiles:
            raise EngineError(
                f"The {self.component} plan has {engine.num_optimization_profiles} profiles and no number {profile}: "
                f"{_AGAIN}"
            )
        self.workspace_bytes = int(engine.get_device_memory_size_for_profile_v2(profile))
        workspace.reserve(self.workspace_bytes)
        context = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        stream = torch.cuda.current_stream(plan.device)
        if context is None or not context.set_optimization_profile_async(profile, stream.cuda_stream):
            raise EngineError(
                f"The {self.component} engine cannot be set up ({api.last_error(plan._log)}): use a GPU with more "
                "memory, or fewer buckets in the config."
            )
        stream.synchronize()
        self._context = context
        self._placed = False
        self._shapes: dict[str, tuple[int, ...]] = {}

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Named tensors in and out on the current stream, which may be one that a CUDA graph captures, once this bucket
        has run outside of a capture at the same shape: TensorRT sets itself up then. Raises EngineError."""
        sizes = solve(self.signature, inputs, self.component)
        rows, height, width = sizes["rows"], sizes.get("height", 0), sizes.get("width", 0)
        if not self.bucket.holds(rows, height, width):
            raise EngineError(f"The {self.component} engine has no bucket for {rows} rows at {width}x{height}.")
        device = self._plan.device
        stream = torch.cuda.current_stream(device)
        if not self._placed:
            self._context.set_device_memory(self._workspace.address(), self.workspace_bytes)
            self._placed = True
        given = {
            spec.name: _placed(inputs[spec.name], spec.name, self.component, device) for spec in self.signature.inputs
        }
        outputs = {
            spec.name: torch.empty(_shape(spec, sizes), dtype=DTYPES[spec.dtype], device=device)
            for spec in self.signature.outputs
        }
        for name, tensor in given.items():
            shape = tuple(tensor.shape)
            if self._shapes.get(name) != shape:
                self._ask(self._context.set_input_shape(name, shape), f"shape {list(shape)} of {name}")
                self._shapes[name] = shape
        for name, tensor in (given | outputs).items():
            self._ask(self._context.set_tensor_address(name, tensor.data_ptr()), f"address of {name}")
        self._workspace.enter(stream)
        self._ask(self._context.execute_async_v3(stream.cuda_stream), "run")
        self._workspace.leave(stream)
        return outputs

    def _ask(self, agreed: bool, what: str) -> None:
        if not agreed:
            self._shapes.clear()
            raise EngineError(f"TensorRT refused the {what} of {self.component} ({api.last_error(self._plan._log)}).")


def _named(
    component: str,
    constants: bytes,
    weights: Mapping[str, torch.Tensor],
    literals: Mapping[str, torch.Tensor],
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Initializer of the graph -> tensor on the GPU, each with the dtype and shape that the record's map says."""
    named = map_constants(component, constants, weights, _AGAIN)
    if both := named.keys() & literals.keys():
        raise EngineError(f"The {component} engine has {min(both)} among its weights and its own constants: {_AGAIN}")
    named |= literals
    for name, tensor in named.items():
        if tensor.device.type != device.type:
            raise EngineError(f"{component}: {name} is on {tensor.device} and must be on {device.type}: {_AGAIN}")
    # Weights kept with channels last for other engines are turned for as long as the refit lasts.
    return {name: tensor.contiguous() for name, tensor in named.items()}


def _placed(tensor: torch.Tensor, name: str, component: str, device: torch.device) -> torch.Tensor:
    """The tensor where TensorRT can read it: contiguous, and not a slice that begins between two aligned addresses."""
    if tensor.device.type != device.type:
        raise EngineError(f"{component}: input {name} is on {tensor.device}, its engine on {device.type}.")
    flat = tensor.contiguous()
    return flat if flat.data_ptr() % _ALIGNMENT == 0 else flat.clone()


def _shape(spec: TensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    shape = []
    for dimension in spec.shape:
        symbol, _, divisor = str(dimension).partition("/")
        shape.append(dimension if isinstance(dimension, int) else sizes[symbol] // int(divisor or 1))
    return tuple(shape)
