"""A fake module of TensorRT 11 or TensorRT-RTX. Its plans are ONNX graphs, which ONNX Runtime runs on raw addresses.

It records calls and can refuse them. As TensorRT documents, a stripped plan runs only with the weights of its refit,
and only with shapes of its profile. The fake shows nothing about the library itself. All memory is the CPU's.
"""

import ctypes
import json
import struct
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from engine_builder.backends.tensorrt import build_plans as tensorrt_build
from engine_builder.backends.tensorrt import plan_store
from model.engines.tensorrt import plan_engine as tensorrt_engine
from model.engines.tensorrt.libraries import TENSORRT, TENSORRT_RTX, Library

VERSION, RTX_VERSION = "11.4.0.106", "1.7.1.116"
WORKSPACE_BYTES = 4096  # of the first profile; the next one needs as much more
_DIAGNOSTICS = {"VERSION_MISMATCH": 1, "UNSUPPORTED_CC": 2, "MALFORMED_ENGINE": 32}
_TYPES = {
    TensorProto.FLOAT: "FLOAT",
    TensorProto.FLOAT16: "HALF",
    TensorProto.BFLOAT16: "BF16",
    TensorProto.INT64: "INT64",
    TensorProto.INT32: "INT32",
    TensorProto.UINT8: "UINT8",
    TensorProto.BOOL: "BOOL",
}
_ENUMS = {
    "BuilderFlag": "STRIP_PLAN REFIT REFIT_IDENTICAL TF32",
    "DataType": " ".join(_TYPES.values()),
    "DynamicShapesKernelSpecializationStrategy": "LAZY EAGER",
    "EngineValidity": "VALID INVALID",
    "ExecutionContextAllocationStrategy": "USER_MANAGED",
    "HardwareCompatibilityLevel": "NONE SAME_COMPUTE_CAPABILITY AMPERE_PLUS",
    "MemoryPoolType": "WORKSPACE",
    "ProfilingVerbosity": "DETAILED",
    "TensorIOMode": "INPUT OUTPUT",
    "TensorLocation": "DEVICE HOST",
}


class Fake:
    """The fake `module` and its recorded `calls`. Add the names of calls to `refuse`.

    kernels: what TensorRT-RTX compiles for each plan in this process.
    invalid: the diagnostics of a plan's header, as names; None: the header is valid. Only TensorRT-RTX reads it.
    """

    def __init__(self, library: Library = TENSORRT) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.refuse: set[str] = set()
        self.kernels = b"+kernels"
        self.invalid: list[str] | None = None
        self.module = _module(self, library)

    def calls_of(self, *names: str) -> list[tuple[Any, ...]]:
        """Return the calls of these names, in order, with their arguments."""
        return [call for call in self.calls if call[0] in names]

    def record(self, name: str, *arguments: Any) -> bool:
        """Record a call. Returns False if it is to be refused."""
        self.calls.append((name, *arguments))
        return name not in self.refuse


def affine_plan(*, stripped: bool = True, name: str = "graph", width: int = 4, **changes: Any) -> bytes:
    """Return a plan of y = x * w + b with profiles of batch 1 and of batch 2 to 4.

    `name` makes different plans. `width`: elements of w. `changes`: `inputs`, names; `output`, a type; `extra`, a
    weight that the graph also has, and whether the plan holds it.
    """
    weights = {"w": np.ones(width, np.float32), "b": np.ones(4, np.float32)}
    held = {} if stripped else weights
    if extra := changes.get("extra"):
        weights[extra[0]] = np.ones(3, np.float32)
        held |= {extra[0]: weights[extra[0]]} if extra[1] else {}
    inputs = [
        helper.make_tensor_value_info(one, TensorProto.FLOAT, ["rows", 4]) for one in changes.get("inputs", ("x",))
    ]
    output = helper.make_tensor_value_info("y", changes.get("output", TensorProto.FLOAT), ["rows", 4])
    nodes = [helper.make_node("Mul", ["x", "w"], ["product"]), helper.make_node("Add", ["product", "b"], ["y"])]
    graph = helper.make_graph(
        nodes, name, inputs, [output], [numpy_helper.from_array(v, k) for k, v in weights.items()]
    )
    for initializer in graph.initializer:
        if initializer.name not in held:
            _strip(initializer)
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])
    return _serialize([{"x": ((1, 4), (1, 4), (1, 4))}, {"x": ((2, 4), (4, 4), (4, 4))}], model)


def _serialize(profiles: list[Any], model: onnx.ModelProto) -> bytes:
    header = json.dumps(profiles).encode()
    return struct.pack("<Q", len(header)) + header + model.SerializeToString()


def _strip(initializer: TensorProto) -> None:
    """Remove the values of a weight."""
    stripped = TensorProto(name=initializer.name, data_type=initializer.data_type, dims=initializer.dims)
    stripped.data_location = TensorProto.EXTERNAL
    size = int(np.prod(initializer.dims)) * np.dtype(_numpy_dtype(initializer.data_type)).itemsize
    for key, value in (("location", "stripped"), ("offset", "0"), ("length", str(size))):
        stripped.external_data.add(key=key, value=value)
    initializer.CopyFrom(stripped)


def _array_at(address: int, dtype: Any, shape: tuple[int, ...]) -> Any:
    """Return the array at an address. It shares the memory."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_byte * count).from_address(address), dtype).reshape(shape)


def _numpy_dtype(element: int) -> Any:
    return helper.tensor_dtype_to_np_dtype(element)


class _Logger:
    ERROR, INTERNAL_ERROR, WARNING, INFO, VERBOSE = "error", "internal", "warning", "info", "verbose"
    Severity = str

    def __init__(self) -> None:
        pass


class _Parser:
    num_errors = 0

    def __init__(self, network: Any, log: Any) -> None:
        self._network = network

    def supports_model_v2(self, data: bytes, path: str) -> bool:
        return bool(onnx.load_from_string(data).graph.node)

    def parse_from_file(self, path: str) -> bool:
        self._network.model = model = onnx.load(path, load_external_data=False)
        for initializer in model.graph.initializer:
            if initializer.data_location == TensorProto.EXTERNAL:
                location = {entry.key: entry.value for entry in initializer.external_data}
                size = (Path(path).parent / location["location"]).stat().st_size
                assert int(location["offset"]) + int(location["length"]) <= size
        return True


def _make_builder(fake: Fake) -> type:
    class Builder:
        def __init__(self, log: Any) -> None:
            self.create_network = lambda flags: SimpleNamespace(flags=flags, model=None)

        def create_optimization_profile(self) -> Any:
            shapes: dict[str, Any] = {}
            return SimpleNamespace(shapes=shapes, set_shape=lambda name, *ends: shapes.update({name: ends}))

        def create_builder_config(self) -> Any:
            config = SimpleNamespace(flags=set(), profiles=[])
            config.set_flag, config.clear_flag = config.flags.add, config.flags.discard
            config.set_memory_pool_limit = lambda pool, size: fake.record("limit", pool, size)
            config.add_optimization_profile = lambda profile: config.profiles.append(profile.shapes) or 0
            config.create_timing_cache = lambda data: SimpleNamespace(data=data, serialize=lambda: data + b"+")
            config.set_timing_cache = lambda cache, ignore_mismatch: (
                fake.record("cache", cache.data, ignore_mismatch) or not cache.data
            )
            return config

        def build_serialized_network(self, network: Any, config: Any) -> bytes:
            fake.record("build", network, config)
            assert network.flags == 2 and "STRIP_PLAN" in config.flags
            names = {value.name for value in network.model.graph.input}
            assert all(set(profile) == names for profile in config.profiles), "a dynamic input without a profile"
            for initializer in network.model.graph.initializer:
                _strip(initializer)
            config.progress_monitor.phase_start("Building", None, 1)
            assert config.progress_monitor.step_complete("Building", 0)
            config.progress_monitor.phase_finish("Building")
            return _serialize(config.profiles, network.model)

    return Builder


def _make_engine(fake: Fake) -> type:
    class Engine:
        def __init__(self, data: bytes) -> None:
            [length] = struct.unpack("<Q", data[:8])
            self.profiles = json.loads(data[8 : 8 + length])
            self.model = onnx.load_from_string(data[8 + length :])
            graph = self.model.graph
            self.weights = {init.name: init for init in graph.initializer}
            self.inputs = {value.name: value.type.tensor_type.elem_type for value in graph.input}
            self.outputs = {value.name: value.type.tensor_type.elem_type for value in graph.output}
            self.num_io_tensors = len(self.inputs) + len(self.outputs)
            self.num_optimization_profiles = len(self.profiles)
            self.session: Any = None

        def get_tensor_name(self, index: int) -> str:
            return [*self.inputs, *self.outputs][index]

        def get_tensor_mode(self, name: str) -> str:
            return "INPUT" if name in self.inputs else "OUTPUT"

        def get_tensor_dtype(self, name: str) -> str:
            return _TYPES[(self.inputs | self.outputs)[name]]

        def get_device_memory_size_for_profile_v2(self, profile: int) -> int:
            return WORKSPACE_BYTES * (profile + 1)

        def create_execution_context(self, strategy: Any) -> Any:
            return fake.module.IExecutionContext(self) if fake.record("context", strategy) else None

        def _open_session(self) -> None:
            options = onnxruntime.SessionOptions()
            options.log_severity_level = 3
            self.session = onnxruntime.InferenceSession(
                self.model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )

    return Engine


def _make_refitter(fake: Fake) -> type:
    class Refitter:
        def __init__(self, engine: Any, log: Any) -> None:
            self._engine, self._weights = engine, dict[str, Any]()

        def get_all_weights(self) -> list[str]:
            return list(self._engine.weights)

        def get_weights_prototype(self, name: str) -> Any:
            init = self._engine.weights[name]
            return SimpleNamespace(dtype=_TYPES[init.data_type], size=int(np.prod(init.dims)))

        def set_named_weights(self, name: str, weights: Any, location: str) -> bool:
            init = self._engine.weights[name]
            self._weights[name] = _array_at(weights.ptr, _numpy_dtype(init.data_type), tuple(init.dims)).copy()
            return fake.record("set_weights", name, location)

        def get_missing_weights(self) -> list[str]:
            weights = self._engine.weights.items()
            return [n for n, one in weights if one.data_location == TensorProto.EXTERNAL and n not in self._weights]

        def refit_cuda_engine_async(self, stream: int) -> bool:
            for name, value in self._weights.items():
                self._engine.weights[name].CopyFrom(numpy_helper.from_array(value, name))
            self._engine._open_session()
            return fake.record("refit", stream)

    return Refitter


def _make_context(fake: Fake) -> type:
    class Context:
        def __init__(self, engine: Any) -> None:
            self._engine, self._profile = engine, -1
            self._shapes, self._addresses = dict[str, tuple[int, ...]](), dict[str, int]()

        def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
            self._profile = profile
            return fake.record("profile", profile, stream)

        def set_device_memory(self, memory: int, size: int) -> None:
            assert memory % 256 == 0 and size >= WORKSPACE_BYTES
            fake.record("device_memory", memory, size)

        def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
            smallest, _, largest = self._engine.profiles[self._profile][name]
            self._shapes[name] = shape
            within = all(low <= size <= high for low, size, high in zip(smallest, shape, largest, strict=True))
            return fake.record("shape", name, shape) and within

        def set_tensor_address(self, name: str, memory: int) -> bool:
            self._addresses[name] = memory
            return fake.record("address", name, memory) and memory % 64 == 0

        def execute_async_v3(self, stream: int) -> bool:
            engine = self._engine
            if engine.session is None:
                engine._open_session()
            inputs = {
                name: _array_at(self._addresses[name], _numpy_dtype(kind), self._shapes[name])
                for name, kind in engine.inputs.items()
            }
            for name, output in zip(engine.outputs, engine.session.run(None, inputs), strict=True):
                _array_at(self._addresses[name], output.dtype, output.shape)[...] = output
            return fake.record("execute", stream)

    return Context


class _Weights:
    def __init__(self, kind: str, ptr: int, count: int) -> None:
        self.dtype, self.ptr, self.size = kind, ptr, count


def _module(fake: Fake, library: Library) -> ModuleType:
    class Runtime:
        def __init__(self, log: Any) -> None:
            self.log = log

        def deserialize_cuda_engine(self, data: Any) -> Any:
            if not fake.record("deserialize", bytes(data)):
                self.log.log("error", "The engine plan file is generated on an incompatible device\nmore")
                return None
            return module.ICudaEngine(bytes(data))

    module: Any = ModuleType(library.module)
    module.__version__ = VERSION if library is TENSORRT else RTX_VERSION
    module.__spec__ = ModuleSpec(library.module, None)  # so that importlib finds it
    module.ILogger, module.OnnxParser, module.Weights, module.Runtime = _Logger, _Parser, _Weights, Runtime
    module.Builder, module.ICudaEngine = _make_builder(fake), _make_engine(fake)
    module.Refitter, module.IExecutionContext = _make_refitter(fake), _make_context(fake)
    module.IProgressMonitor = type("IProgressMonitor", (), {"__init__": lambda self: None})
    module.NetworkDefinitionCreationFlag = SimpleNamespace(STRONGLY_TYPED=1)
    for name, members in _ENUMS.items():
        setattr(module, name, SimpleNamespace(**{member: member for member in members.split()}))
    if library is TENSORRT_RTX:
        _make_rtx(fake, module)
    return module


def _make_rtx(fake: Fake, module: Any) -> None:
    """Add the calls that only TensorRT-RTX has."""

    class RuntimeCache:
        def __init__(self) -> None:
            self.data = b""

        def deserialize(self, data: bytes) -> bool:
            accepted = fake.record("load_cache", data)
            self.data = data if accepted else self.data
            return accepted

        def serialize(self) -> bytes:
            return self.data if fake.kernels in self.data else self.data + fake.kernels

    class RuntimeConfig:
        dynamic_shapes_kernel_specialization_strategy = "LAZY"

        def create_runtime_cache(self) -> RuntimeCache:
            return RuntimeCache()

        def set_execution_context_allocation_strategy(self, strategy: str) -> None:
            self.strategy = strategy

        def set_runtime_cache(self, cache: RuntimeCache) -> bool:
            self.cache = cache
            return True

    class Engine(module.ICudaEngine):
        def create_runtime_config(self) -> RuntimeConfig:
            return RuntimeConfig()

    class Runtime(module.Runtime):
        def get_engine_validity(self, data: bytes) -> tuple[str, int]:
            fake.record("validity")
            if fake.invalid is None:
                return "VALID", 0
            if not fake.invalid:
                self.log.log("internal", "Error reading CUDA GPU properties")
            return "INVALID", sum(_DIAGNOSTICS[name] for name in fake.invalid)

    module.ICudaEngine, module.Runtime = Engine, Runtime
    module.IRuntimeConfig, module.IRuntimeCache = RuntimeConfig, RuntimeCache
    module.EngineInvalidityDiagnostics = SimpleNamespace(__members__=_DIAGNOSTICS)


class FakeCuda:
    """torch.cuda's streams and events without a GPU. Calls are passed to `record`."""

    def __init__(self, record: Callable[..., Any]) -> None:
        self.current = 7
        self.capturing = False
        self._record = record

    def current_stream(self, device: object = None) -> Any:
        handle = self.current
        return SimpleNamespace(
            cuda_stream=handle,
            synchronize=lambda: self._record("synchronize", handle),
            wait_event=lambda event: self._record("wait", handle, event.recorded),
        )

    def Event(self) -> Any:
        event = SimpleNamespace(recorded=None)
        event.record = lambda stream: setattr(event, "recorded", stream.cuda_stream)
        return event

    def is_current_stream_capturing(self) -> bool:
        return self.capturing


def install_fake(monkeypatch: pytest.MonkeyPatch, library: Library = TENSORRT) -> tuple[Fake, FakeCuda]:
    """Make the fakes what importing the library and torch.cuda return, as on a machine with a GPU."""
    fake = Fake(library)
    cuda = FakeCuda(fake.record)
    monkeypatch.setitem(sys.modules, library.module, fake.module)
    for module in (tensorrt_build, plan_store, tensorrt_engine):
        monkeypatch.setattr(module, "require", lambda *_: fake.module.__version__)
    for name in ("current_stream", "Event", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    return fake, cuda


def install_distribution(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    version: str | None,
    library: Library = TENSORRT,
    name: str | None = None,
) -> None:
    """Install a version of a library, whose shared objects are missing, in a new folder below `folder`.

    None: hide the library if it is installed. `name`: the package; None: the first of the library's.
    """
    monkeypatch.delitem(sys.modules, library.module, raising=False)
    if version is None:
        monkeypatch.setitem(sys.modules, library.module, None)
        return
    name = name or library.distributions[0]
    site = folder / f"{name}-{version}"
    (site / library.module).mkdir(parents=True)
    (site / library.module / "__init__.py").write_text("raise ImportError('libnvinfer.so was not found')\n")
    metadata = site / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(site)
