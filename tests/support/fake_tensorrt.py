"""A fake module of TensorRT that records every call, with an engine that computes y = x * w + b from raw addresses.

It has the interface of TensorRT 11 or TensorRT-RTX. It shows that Preheat calls the library in the right
order and with the right addresses, and how it handles refusals. It shows nothing about the library itself. All memory
is the CPU's.
"""

import ctypes
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from model.engines.tensorrt import engine as tensorrt_engine
from model.engines.tensorrt.libraries import TENSORRT, Library

VERSION = "11.4.0.106"
RTX_VERSION = "1.7.1.116"


def floats(address: int, count: int) -> Any:
    """Return the float32 array at an address. It shares the memory."""
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))


class Fake:
    """The fake `module` and its recorded `calls`. Change `weights` or `profiles`, or add calls to `refuse`.

    kernels: what TensorRT-RTX compiles for each plan in this process.
    invalid: the diagnostics of a plan's header, as names; None: the header is valid. Only TensorRT-RTX reads it.
    """

    def __init__(self, version: str = VERSION) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.refuse: set[str] = set()
        self.weights = {"w": 4, "b": 4}
        self.names = {"x": "INPUT", "y": "OUTPUT"}
        self.dtypes = {"x": "FLOAT", "y": "FLOAT"}
        self.profiles = [64, 1024]
        self.kernels = b"+kernels"
        self.invalid: list[str] | None = None
        self.module = _module(self)
        self.module.__version__ = version
        if version == RTX_VERSION:
            _make_rtx(self, self.module)

    def calls_of(self, *names: str) -> list[tuple[Any, ...]]:
        """Return the calls of these names, in order, with their arguments."""
        return [call for call in self.calls if call[0] in names]

    def call_names(self) -> list[str]:
        return [call[0] for call in self.calls]

    def record(self, name: str, *arguments: Any) -> bool:
        """Record a call. Returns False if it is to be refused."""
        self.calls.append((name, *arguments))
        return name not in self.refuse


def _module(fake: Fake) -> ModuleType:
    class Logger:
        ERROR, INTERNAL_ERROR, WARNING, INFO, VERBOSE = "error", "internal", "warning", "info", "verbose"
        Severity = str

        def __init__(self) -> None:
            pass

    class Runtime:
        def __init__(self, log: Any) -> None:
            self.log = log

        def deserialize_cuda_engine(self, data: bytes) -> "Engine | None":
            if not fake.record("deserialize", data):
                self.log.log("error", "The engine plan file is generated on an incompatible device\nmore")
                return None
            return Engine()

    class Engine:
        def __init__(self) -> None:
            self.held: dict[str, Any] = {}
            self.num_optimization_profiles = len(fake.profiles)

        @property
        def num_io_tensors(self) -> int:
            return len(fake.names)

        def get_tensor_name(self, index: int) -> str:
            return list(fake.names)[index]

        def get_tensor_mode(self, name: str) -> str:
            return fake.names[name]

        def get_tensor_dtype(self, name: str) -> str:
            return fake.dtypes[name]

        def get_device_memory_size_for_profile_v2(self, profile: int) -> int:
            return fake.profiles[profile]

        def create_execution_context(self, strategy: Any) -> "Context | None":
            return Context(self) if fake.record("context", strategy) else None

    class Refitter:
        def __init__(self, engine: Engine, log: Any) -> None:
            self.engine, self.weights = engine, dict[str, Any]()

        def get_all_weights(self) -> list[str]:
            return list(fake.weights)

        def get_weights_prototype(self, name: str) -> Any:
            return SimpleNamespace(dtype="FLOAT", size=fake.weights[name])

        def set_named_weights(self, name: str, weights: Any, location: str) -> bool:
            self.weights[name] = weights
            return fake.record("set_weights", name, location)

        def get_missing_weights(self) -> list[str]:
            if "missing" in fake.refuse:
                return ["w"]
            return [] if "kept in plan" in fake.refuse else [name for name in fake.weights if name not in self.weights]

        def refit_cuda_engine_async(self, stream: int) -> bool:
            for name, weights in self.weights.items():
                self.engine.held[name] = floats(weights.ptr, weights.size).copy()
            return fake.record("refit", stream)

        def release_refit_resources(self) -> bool:
            return fake.record("release_refit")

    class Context:
        def __init__(self, engine: Engine) -> None:
            self.engine, self.addresses, self.shape = engine, dict[str, int](), (0,)

        def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
            return fake.record("profile", profile, stream)

        def set_device_memory(self, memory: int, size: int) -> None:
            fake.record("device_memory", memory, size)

        def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
            self.shape = shape
            return fake.record("shape", name, shape)

        def get_tensor_shape(self, name: str) -> tuple[int, ...]:
            return self.shape

        def set_tensor_address(self, name: str, memory: int) -> bool:
            self.addresses[name] = memory
            return fake.record("address", name, memory)

        def execute_async_v3(self, stream: int) -> bool:
            rows, held = self.shape[0], self.engine.held
            x, y = (floats(self.addresses[name], rows * 4).reshape(rows, 4) for name in ("x", "y"))
            y[:] = x * held["w"] + held["b"]
            return fake.record("execute", stream)

    class Weights:
        def __init__(self, kind: str, ptr: int, count: int) -> None:
            self.dtype, self.ptr, self.size = kind, ptr, count

    module: Any = ModuleType("tensorrt")
    module.__spec__ = ModuleSpec("tensorrt", None)  # so that importlib finds it
    module.ILogger, module.Runtime, module.Refitter, module.Weights = Logger, Runtime, Refitter, Weights
    module.ICudaEngine, module.IExecutionContext = Engine, Context
    for name, members in {
        "DataType": "BF16 BOOL FLOAT HALF INT32 INT64 UINT8",
        "TensorIOMode": "INPUT OUTPUT",
        "TensorLocation": "DEVICE HOST",
        "ExecutionContextAllocationStrategy": "USER_MANAGED",
    }.items():
        setattr(module, name, SimpleNamespace(**{member: member for member in members.split()}))
    return module


def _make_rtx(fake: Fake, module: Any) -> None:
    """Add the calls that only TensorRT-RTX has."""

    class RuntimeCache:
        def __init__(self) -> None:
            self.data = b""

        def deserialize(self, data: bytes) -> bool:
            accepted = fake.record("load_cache", data)
            if accepted:
                self.data = data
            return accepted

        def serialize(self) -> bytes:
            fake.record("serialize_cache")
            return self.data if fake.kernels in self.data else self.data + fake.kernels

    class RuntimeConfig:
        dynamic_shapes_kernel_specialization_strategy = "LAZY"

        def __init__(self) -> None:
            self._strategy, self._cache = "STATIC", None

        def create_runtime_cache(self) -> RuntimeCache:
            return RuntimeCache()

        def set_execution_context_allocation_strategy(self, strategy: str) -> None:
            self._strategy = strategy

        def get_execution_context_allocation_strategy(self) -> str:
            return self._strategy

        def set_runtime_cache(self, cache: RuntimeCache) -> bool:
            self._cache = cache
            return True

        def get_runtime_cache(self) -> RuntimeCache | None:
            return self._cache

    class Engine(module.ICudaEngine):
        def create_runtime_config(self) -> RuntimeConfig:
            return RuntimeConfig()

    class Runtime(module.Runtime):
        def get_engine_validity(self, data: bytes) -> tuple[str, int]:
            fake.record("validity", data)
            if fake.invalid is None:
                return "VALID", 0
            if not fake.invalid:
                self.log.log("internal", "Error reading CUDA GPU properties")
            return "INVALID", sum(_DIAGNOSTICS[name] for name in fake.invalid)

        def deserialize_cuda_engine(self, data: bytes) -> Any:
            return Engine() if super().deserialize_cuda_engine(data) else None

    module.ICudaEngine, module.Runtime = Engine, Runtime
    module.IRuntimeConfig, module.IRuntimeCache = RuntimeConfig, RuntimeCache
    module.EngineValidity = SimpleNamespace(VALID="VALID", INVALID="INVALID")
    module.EngineInvalidityDiagnostics = SimpleNamespace(__members__=_DIAGNOSTICS)
    module.DynamicShapesKernelSpecializationStrategy = SimpleNamespace(LAZY="LAZY", EAGER="EAGER")


_DIAGNOSTICS = {"VERSION_MISMATCH": 1, "UNSUPPORTED_CC": 2, "MALFORMED_ENGINE": 32}


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
    fake = Fake(VERSION if library is TENSORRT else RTX_VERSION)
    cuda = FakeCuda(fake.record)
    monkeypatch.setitem(sys.modules, library.module, fake.module)
    monkeypatch.setattr(tensorrt_engine, "require", lambda *_: fake.module.__version__)
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
