"""The calls to TensorRT that open, refit and run a plan. The library gets tensors as addresses, streams as handles.

This module imports neither torch nor TensorRT: it takes the module of the library. So the same calls run on TensorRT
10.16 and 11.4, and on TensorRT-RTX 1.7. All differences between the versions are here.
"""

import logging
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from model.errors import EngineError

if TYPE_CHECKING:
    import tensorrt
    import torch
    from typing_extensions import Buffer

logger = logging.getLogger("preheat.tensorrt")

ALIGNMENT_BYTES = 256  # TensorRT needs it for the addresses of tensors and of workspace memory
_DATA_TYPES = {
    "float32": "FLOAT",
    "float16": "HALF",
    "bfloat16": "BF16",
    "int64": "INT64",
    "int32": "INT32",
    "uint8": "UINT8",
    "bool": "BOOL",
}


class PlanError(EngineError):
    """A plan cannot be used with this release, GPU or version of the library."""

    remedy = "Build and publish the release again (`preheat build`, `preheat publish`)."


def make_logger(module: ModuleType) -> "tensorrt.ILogger":
    """Return a logger that sends the library's messages to this process's log. Its `last_error` is the newest, or "".

    Errors are logged as warnings, because the caller raises an error with the same message.
    """
    if TYPE_CHECKING:
        import tensorrt as trt
    else:
        trt = module

    class Log(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.last_error = ""

        def log(self, severity: trt.ILogger.Severity, msg: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.last_error = msg
                logger.warning(msg)
            elif severity == trt.ILogger.WARNING:
                logger.info(msg)
            else:
                logger.debug(msg)

    return Log()


def last_error(log: "tensorrt.ILogger") -> str:
    """Return the first line of the library's newest error, for a message."""
    reported = str(getattr(log, "last_error", "")).strip().partition("\n")[0][:300]
    return reported.rstrip(".") or "no reason given"


class Plan:
    """A deserialized plan. A GPU must be present: without one the library ends the process."""

    def __init__(self, module: ModuleType, data: "Buffer", name: str, title: str = "TensorRT") -> None:
        """Deserialize `data`, whose digest must have been verified. `name`: the component; both names are for messages.

        Raises PlanError if the plan is of another GPU or version, or damaged. TensorRT-RTX can report the reason from
        the plan's header. The rest of such a plan is not read.
        """
        if TYPE_CHECKING:
            import tensorrt as trt
        else:
            trt = module
        self.module = module
        self.name = name
        self.title = title
        self.log = make_logger(module)
        self._runtime = trt.Runtime(self.log)  # must outlive the engine
        if reasons := _invalidity(module, self._runtime, self.log, data):
            raise PlanError(f"The {name} plan cannot be opened on this machine: {reasons}.")
        self.engine = self._runtime.deserialize_cuda_engine(data)
        if self.engine is None:
            raise PlanError(f"The {name} engine cannot be opened: {self.last_error()}.")

    def last_error(self) -> str:
        """Return the library's newest error, in one line."""
        return last_error(self.log)

    @property
    def profiles(self) -> int:
        """The number of optimization profiles."""
        return self.engine.num_optimization_profiles

    def check_tensors(self, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> None:
        """Raise PlanError unless the plan takes `inputs` and returns `outputs`, each name -> dtype."""
        engine = self.engine
        mode = self.module.TensorIOMode.INPUT
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        actual = {f"{'input' if engine.get_tensor_mode(name) == mode else 'output'} {name}" for name in names}
        expected = {f"input {name}" for name in inputs} | {f"output {name}" for name in outputs}
        if actual != expected:
            raise PlanError(
                f"The {self.name} plan has {', '.join(sorted(actual))}, and its manifest entry states "
                f"{', '.join(sorted(expected))}."
            )
        for name, dtype in {**inputs, **outputs}.items():
            found = engine.get_tensor_dtype(name)
            if found != _data_type(self.module, dtype):
                raise PlanError(f"The {self.name} plan has {name} as {found}, and its manifest entry states {dtype}.")

    def refit(self, tensors: "Mapping[str, torch.Tensor]", stream: "torch.cuda.Stream") -> None:
        """Copy contiguous tensors of the device into the plan, by name. They may be freed afterwards.

        Raises PlanError.
        """
        module = self.module
        refitter: Any = module.Refitter(self.engine, self.log)
        # The parser adds names that the graph does not have. The plan may already hold such a tensor. If it does not,
        # get_missing_weights reports the name below.
        for name in refitter.get_all_weights():
            tensor = tensors.get(name)
            if tensor is None:
                continue
            name_of_dtype = str(tensor.dtype).removeprefix("torch.")
            dtype = _data_type(module, name_of_dtype)
            prototype = refitter.get_weights_prototype(name)
            if prototype.dtype != dtype or prototype.size != tensor.numel():
                raise PlanError(
                    f"The {self.name} plan needs {name} as {prototype.size} values of {prototype.dtype}, not "
                    f"{name_of_dtype} {list(tensor.shape)}."
                )
            weights = module.Weights(dtype, tensor.data_ptr(), tensor.numel())
            if not refitter.set_named_weights(name, weights, module.TensorLocation.DEVICE):
                raise PlanError(f"The {self.name} plan refuses {name}: {self.last_error()}.")
        if missing := refitter.get_missing_weights():
            raise PlanError(
                f"The {self.name} plan needs {len(missing)} weights that the release lacks, {missing[0]!r} first."
            )
        refitted = refitter.refit_cuda_engine_async(stream.cuda_stream)
        stream.synchronize()
        if not refitted:
            raise PlanError(f"The {self.name} engine cannot be refit: {self.last_error()}.")
        if hasattr(refitter, "release_refit_resources"):  # TensorRT 10 frees them with the refitter
            refitter.release_refit_resources()


def _invalidity(module: ModuleType, runtime: Any, log: "tensorrt.ILogger", data: "Buffer") -> str:
    """Return why a plan's header does not fit this machine. Empty if it fits, or if the library cannot tell."""
    if not hasattr(runtime, "get_engine_validity"):
        return ""
    validity, diagnostics = runtime.get_engine_validity(data)
    if validity != module.EngineValidity.INVALID:
        return ""
    flags = module.EngineInvalidityDiagnostics.__members__
    names = [name.lower().replace("_", " ") for name, flag in flags.items() if int(diagnostics) & int(flag)]
    return ", ".join(names) or last_error(log)


def _data_type(module: ModuleType, dtype: str) -> Any:
    """Return the library's type for a dtype name such as "float16"."""
    return getattr(module.DataType, _DATA_TYPES[dtype])


class RuntimeCache:
    """The kernels that TensorRT-RTX compiled on this GPU for one plan. The next start loads them instead.

    The library checks that a cache fits the GPU, the driver and its own version, and ignores another one.
    """

    def __init__(self, plan: Plan, data: bytes = b"") -> None:
        """Create the cache of a plan. `data`: a cache of an earlier process, or empty.

        The cache also takes the kernels that are compiled later. The library ignores `data` that does not fit.
        """
        config: Any = plan.engine.create_runtime_config()  # type: ignore[attr-defined, unused-ignore]
        self.cache = config.create_runtime_cache()
        if data:
            self.cache.deserialize(data)

    def serialize(self) -> bytes:
        """Return the cache for a later process."""
        return bytes(self.cache.serialize())


class Execution:
    """One optimization profile of a plan. Runs may not overlap."""

    def __init__(
        self, plan: Plan, profile: int, stream: "torch.cuda.Stream", runtime_cache: RuntimeCache | None = None
    ) -> None:
        """Create the execution context of a profile on `stream`.

        Raises PlanError if the plan lacks the profile, or EngineError.
        """
        self._plan = plan
        if profile >= plan.profiles:
            raise PlanError(
                f"The {plan.name} plan has {plan.profiles} profiles, and its manifest entry names number {profile}."
            )
        self.workspace_bytes = int(plan.engine.get_device_memory_size_for_profile_v2(profile))
        context = _create_context(plan, runtime_cache)
        if context is None or not context.set_optimization_profile_async(profile, stream.cuda_stream):
            raise EngineError(
                f"The {plan.name} engine cannot be set up: {plan.last_error()}.",
                "Use a GPU with more memory, or configure fewer buckets.",
            )
        stream.synchronize()
        self._context = context
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._shapes_that_ran: set[tuple[tuple[int, ...], ...]] = set()

    def set_workspace(self, address: int) -> None:
        """Use `workspace_bytes` of device memory at an aligned address. Call it before the first run."""
        self._context.set_device_memory(address, self.workspace_bytes)

    def set_tensors(self, inputs: "Mapping[str, torch.Tensor]", outputs: "Mapping[str, torch.Tensor]") -> None:
        """Set the shapes of the inputs and all addresses, which must be aligned. Raises EngineError."""
        for name, tensor in inputs.items():
            shape = tuple(tensor.shape)
            if self._shapes.get(name) != shape:
                self._require(self._context.set_input_shape(name, shape), f"shape {list(shape)} of {name}")
                self._shapes[name] = shape
        for name, tensor in {**inputs, **outputs}.items():
            self._require(self._context.set_tensor_address(name, tensor.data_ptr()), f"address of {name}")

    def enqueue(self, stream: "torch.cuda.Stream", is_capturing: bool) -> None:
        """Run on a stream. Raises EngineError.

        `is_capturing`: a CUDA graph captures the stream. The library finishes its setup in the first run of a shape,
        which a capture does not allow. So each shape must run once before it is captured.
        """
        shapes = tuple(self._shapes.values())
        if is_capturing and shapes not in self._shapes_that_ran:
            raise EngineError(f"{self._plan.name}: a CUDA graph captures a shape that has not run before.", "")
        self._require(self._context.execute_async_v3(stream.cuda_stream), "run")
        self._shapes_that_ran.add(shapes)

    def _require(self, accepted: bool, refused: str) -> None:
        """Raise EngineError unless `accepted`. `refused`: the part of the run, for the message."""
        if not accepted:
            self._shapes.clear()  # set them again: the context's state is unknown
            plan = self._plan
            raise EngineError(f"{plan.title} refused the {refused} of {plan.name}: {plan.last_error()}.", "")


def _create_context(plan: Plan, runtime_cache: RuntimeCache | None) -> Any:
    """Return an execution context whose workspace the caller provides, or None."""
    engine: Any = plan.engine
    strategy = plan.module.ExecutionContextAllocationStrategy.USER_MANAGED
    if runtime_cache is None:
        return engine.create_execution_context(strategy)
    config = engine.create_runtime_config()
    config.set_execution_context_allocation_strategy(strategy)
    # Kernels for a shape are compiled in its first run. The default compiles them in the background, so that a CUDA
    # graph captured meanwhile would keep the slower kernels.
    config.dynamic_shapes_kernel_specialization_strategy = plan.module.DynamicShapesKernelSpecializationStrategy.EAGER
    config.set_runtime_cache(runtime_cache.cache)
    return engine.create_execution_context(config)
