"""A fake `tensorrt` module whose plans are ONNX graphs without constants, run by ONNX Runtime on the CPU.

It covers all steps of TensorRT engines: export, files, parser, profiles, stripped plan, refit by name from raw
addresses, shapes, execution on raw addresses. As TensorRT documents, a plan runs only with the weights of its refit,
and only with shapes of its profile. The fake shows nothing about TensorRT itself.
"""

import ctypes
import json
import struct
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto

VERSION = "11.4.0.106"
_TYPES = {
    TensorProto.FLOAT: "FLOAT",
    TensorProto.FLOAT16: "HALF",
    TensorProto.BFLOAT16: "BF16",
    TensorProto.INT64: "INT64",
    TensorProto.INT32: "INT32",
    TensorProto.UINT8: "UINT8",
    TensorProto.BOOL: "BOOL",
}


def _array_at(address: int, dtype: Any, shape: tuple[int, ...]) -> Any:
    """Return the array at an address. It shares the memory."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_byte * count).from_address(address), dtype).reshape(shape)


def _numpy_dtype(element: int) -> Any:
    return onnx.helper.tensor_dtype_to_np_dtype(element)


class _Logger:
    ERROR, INTERNAL_ERROR, WARNING, INFO, VERBOSE = "error", "internal", "warning", "info", "verbose"
    Severity = str

    def __init__(self) -> None:
        pass


class _Parser:
    def __init__(self, network: Any, log: Any) -> None:
        self._network = network
        self.num_errors = self.num_subgraphs = 0

    def supports_model_v2(self, data: bytes, path: str) -> bool:
        return bool(onnx.load_from_string(data).graph.node)

    def parse_from_file(self, path: str) -> bool:
        onnx.load(path, load_external_data=False)
        for initializer in (model := onnx.load(path, load_external_data=False)).graph.initializer:
            if initializer.data_location == TensorProto.EXTERNAL:
                location = {entry.key: entry.value for entry in initializer.external_data}
                size = (Path(path).parent / location["location"]).stat().st_size
                assert int(location["offset"]) + int(location["length"]) <= size
        self._network.model = model
        return True


class _Builder:
    def __init__(self, log: Any) -> None:
        self.create_network = lambda flags: SimpleNamespace(flags=flags, model=None)

    def create_optimization_profile(self) -> Any:
        shapes: dict[str, Any] = {}
        return SimpleNamespace(shapes=shapes, set_shape=lambda name, *ends: shapes.update({name: ends}))

    def create_builder_config(self) -> Any:
        config = SimpleNamespace(flags=set(), profiles=[], cache=b"")
        config.set_flag = config.flags.add
        config.clear_flag = config.flags.discard
        config.set_memory_pool_limit = lambda pool, size: None
        config.add_optimization_profile = lambda profile: config.profiles.append(profile.shapes) or 0
        config.create_timing_cache = lambda data: SimpleNamespace(data=data, serialize=lambda: data + b"+")
        config.set_timing_cache = lambda cache, ignore_mismatch: True
        return config

    def build_serialized_network(self, network: Any, config: Any) -> bytes:
        assert network.flags == 2 and "STRIP_PLAN" in config.flags
        model = network.model
        names = {value.name for value in model.graph.input}
        assert all(set(profile) == names for profile in config.profiles), "a dynamic input without a profile"
        for initializer in model.graph.initializer:
            stripped = TensorProto(name=initializer.name, data_type=initializer.data_type, dims=initializer.dims)
            stripped.data_location = TensorProto.EXTERNAL
            size = int(np.prod(initializer.dims)) * np.dtype(_numpy_dtype(initializer.data_type)).itemsize
            for key, value in (("location", "stripped"), ("offset", "0"), ("length", str(size))):
                stripped.external_data.add(key=key, value=value)
            initializer.CopyFrom(stripped)
        config.progress_monitor.phase_start("Building", None, 1)
        assert config.progress_monitor.step_complete("Building", 0)
        config.progress_monitor.phase_finish("Building")
        header = json.dumps(config.profiles).encode()
        return struct.pack("<Q", len(header)) + header + model.SerializeToString()


class _Engine:
    def __init__(self, plan: bytes | memoryview) -> None:
        data = bytes(plan)
        (length,) = struct.unpack("<Q", data[:8])
        self.profiles = json.loads(data[8 : 8 + length])
        self.data = data[8 + length :]
        graph = onnx.load_from_string(self.data).graph
        self.weights = {init.name: init for init in graph.initializer}
        self.inputs = {value.name: value.type.tensor_type.elem_type for value in graph.input}
        self.outputs = {value.name: value.type.tensor_type.elem_type for value in graph.output}
        self.num_io_tensors = len(self.inputs) + len(self.outputs)
        self.num_optimization_profiles = len(self.profiles)
        self.session: Any = None
        self.get_device_memory_size_for_profile_v2 = lambda profile: 4096
        self.create_execution_context = lambda strategy: _Context(self)

    def get_tensor_name(self, index: int) -> str:
        return [*self.inputs, *self.outputs][index]

    def get_tensor_mode(self, name: str) -> str:
        return "INPUT" if name in self.inputs else "OUTPUT"

    def get_tensor_dtype(self, name: str) -> str:
        return _TYPES[(self.inputs | self.outputs)[name]]


class _Refitter:
    def __init__(self, engine: _Engine, log: Any) -> None:
        self._engine = engine
        self._weights: dict[str, Any] = {}

    def get_all_weights(self) -> list[str]:
        return list(self._engine.weights)

    def get_weights_prototype(self, name: str) -> Any:
        init = self._engine.weights[name]
        return SimpleNamespace(dtype=_TYPES[init.data_type], size=int(np.prod(init.dims)))

    def set_named_weights(self, name: str, weights: Any, location: str) -> bool:
        init = self._engine.weights[name]
        self._weights[name] = _array_at(weights.ptr, _numpy_dtype(init.data_type), tuple(init.dims)).copy()
        return location == "DEVICE"

    def get_missing_weights(self) -> list[str]:
        return [name for name in self._engine.weights if name not in self._weights]

    def refit_cuda_engine_async(self, stream: int) -> bool:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        model = onnx.load_from_string(self._engine.data)
        for initializer in model.graph.initializer:
            if initializer.name in self._weights:  # otherwise ONNX Runtime names the missing one
                initializer.CopyFrom(onnx.numpy_helper.from_array(self._weights[initializer.name], initializer.name))
        self._engine.session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        return True


class _Context:
    def __init__(self, engine: _Engine) -> None:
        self._engine, self._profile = engine, -1
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self._profile = profile
        return True

    def set_device_memory(self, memory: int, size: int) -> None:
        assert memory % 256 == 0 and size >= 4096

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        smallest, _, largest = self._engine.profiles[self._profile][name]
        self._shapes[name] = shape
        return all(low <= size <= high for low, size, high in zip(smallest, shape, largest, strict=True))

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._addresses[name] = memory
        return memory % 64 == 0

    def execute_async_v3(self, stream: int) -> bool:
        engine = self._engine
        inputs = {
            name: _array_at(self._addresses[name], _numpy_dtype(kind), self._shapes[name])
            for name, kind in engine.inputs.items()
        }
        for name, output in zip(engine.outputs, engine.session.run(None, inputs), strict=True):
            _array_at(self._addresses[name], output.dtype, output.shape)[...] = output
        return True


class _Weights:
    def __init__(self, kind: str, ptr: int, count: int) -> None:
        self.dtype, self.ptr, self.size = kind, ptr, count


def module() -> ModuleType:
    """Return the fake module, to be registered in sys.modules as "tensorrt"."""
    fake: Any = ModuleType("tensorrt")
    fake.__version__ = VERSION
    fake.__spec__ = ModuleSpec("tensorrt", None)  # so that importlib finds it
    fake.ILogger, fake.Builder, fake.OnnxParser = _Logger, _Builder, _Parser
    fake.Refitter, fake.Weights = _Refitter, _Weights
    fake.IProgressMonitor = type("IProgressMonitor", (), {"__init__": lambda self: None})
    fake.Runtime = lambda log: SimpleNamespace(deserialize_cuda_engine=_Engine)
    fake.NetworkDefinitionCreationFlag = SimpleNamespace(STRONGLY_TYPED=1)
    for name, members in {
        "BuilderFlag": "STRIP_PLAN REFIT REFIT_IDENTICAL TF32",
        "DataType": " ".join(_TYPES.values()),
        "ExecutionContextAllocationStrategy": "USER_MANAGED",
        "HardwareCompatibilityLevel": "NONE SAME_COMPUTE_CAPABILITY AMPERE_PLUS",
        "MemoryPoolType": "WORKSPACE",
        "ProfilingVerbosity": "DETAILED",
        "TensorIOMode": "INPUT OUTPUT",
        "TensorLocation": "DEVICE HOST",
    }.items():
        setattr(fake, name, SimpleNamespace(**{member: member for member in members.split()}))
    return fake
