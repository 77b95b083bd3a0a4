"""NVIDIA's two libraries with TensorRT's interface: TensorRT and TensorRT-RTX. Finds them and checks their versions.

TensorRT builds a plan on the GPU that will run it. TensorRT-RTX builds on any machine, for the GPUs that it is given,
and compiles the kernels on the GPU when the plan is loaded. Importing this module imports neither torch nor a library.
"""

import ctypes
import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

from model.errors import EngineError

PlanRuntime = Literal["tensorrt", "tensorrt-rtx"]


class TensorRTUnavailable(EngineError):
    """The library is not installed, is a version that is not supported, or has no GPU or driver that it supports."""

    remedy = (
        "Install the library (docs/tensorrt.md) on a machine with an NVIDIA GPU, or choose the runtime aot_inductor."
    )


@dataclass(frozen=True)
class Library:
    """One of the two libraries.

    runtime: its name in manifests and settings.
    title: its name in messages.
    module: the name of its Python module.
    distributions: the packages that may contain the module.
    tag: the beginning of its part of a target key.
    oldest: the oldest supported version, (major, minor): the first with every call in use.
    unsupported_major: the first major version that is not supported, because it is not known.
    capabilities: the compute capabilities that it supports; empty: all of the GPUs that Preheat supports.
    cuda: the oldest CUDA version, (major, minor), that the driver must support; (0, 0): any.
    compiles_on_target: true if kernels are compiled when a plan is loaded. Such plans can be built on any machine.
    """

    runtime: PlanRuntime
    title: str
    module: str
    distributions: tuple[str, ...]
    tag: str
    oldest: tuple[int, int]
    unsupported_major: int
    capabilities: tuple[str, ...] = ()
    cuda: tuple[int, int] = (0, 0)
    compiles_on_target: bool = False

    @property
    def build_command(self) -> str:
        """The command that builds plans, for messages. GPU is a placeholder for the name of a GPU."""
        return f"preheat build --runtime {self.runtime}" + (" --gpu GPU" if self.compiles_on_target else "")

    def version_tag(self, version: str) -> str:
        """Return the library's part of a target key: "11.4.0.106" -> "trt11.4".

        Raises TensorRTUnavailable for versions that are not supported.
        """
        match = re.match(r"(\d+)\.(\d+)", version)
        numbers = (int(match[1]), int(match[2])) if match else (0, 0)
        if numbers < self.oldest or numbers[0] >= self.unsupported_major:
            raise TensorRTUnavailable(
                f"{self.title} {version[:40]} is not supported.",
                f"Install {self.oldest[0]}.{self.oldest[1]} or later, below {self.unsupported_major} "
                "(docs/tensorrt.md).",
            )
        return f"{self.tag}{numbers[0]}.{numbers[1]}"

    def check_capability(self, capability: str, gpu: str) -> None:
        """Raise TensorRTUnavailable if the library does not support a compute capability such as "sm90".

        `gpu`: the name of the GPU, for the message.
        """
        if self.capabilities and capability not in self.capabilities:
            supported = ", ".join(f"{name[2:-1]}.{name[-1]}" for name in self.capabilities)
            raise TensorRTUnavailable(
                f"{self.title} does not support the GPU {gpu} (compute capability {capability[2:-1]}."
                f"{capability[-1:]}); it supports {supported}.",
                "Choose a GPU with one of these, or the runtime aot_inductor or tensorrt.",
            )

    def check_driver(self, cuda: tuple[int, int] | None) -> None:
        """Raise TensorRTUnavailable if the driver is too old. `cuda`: the driver's CUDA version; None: no driver."""
        if cuda is not None and cuda < self.cuda:
            raise TensorRTUnavailable(
                f"{self.title} needs a driver for CUDA {self.cuda[0]}.{self.cuda[1]} or later, and this machine's "
                f"driver supports CUDA {cuda[0]}.{cuda[1]}.",
                "Update the NVIDIA driver, or choose the runtime aot_inductor.",
            )


TENSORRT = Library(
    "tensorrt", "TensorRT", "tensorrt", ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"), "trt", (10, 16), 12
)
# Compute capabilities: `ComputeCapability` of the 1.7.1 module. Its packages for CUDA 13 need a driver for CUDA 13.
TENSORRT_RTX = Library(
    "tensorrt-rtx",
    "TensorRT-RTX",
    "tensorrt_rtx_bindings",
    ("tensorrt-rtx-cu13-bindings",),
    "rtx",
    (1, 7),
    2,
    ("sm75", "sm80", "sm86", "sm89", "sm120", "sm121"),
    (13, 0),
    compiles_on_target=True,
)
LIBRARIES: dict[str, Library] = {library.runtime: library for library in (TENSORRT, TENSORRT_RTX)}


def installed_version(library: Library) -> str | None:
    """Return the version of an installed library ("11.4.0.106"), or None. Does not load its shared objects."""
    if importlib.util.find_spec(library.module) is None:
        return None
    for name in library.distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return str(importlib.import_module(library.module).__version__)


def import_library(library: Library) -> ModuleType:
    """Return the library's module. It can build, but not run, without a GPU. Raises TensorRTUnavailable."""
    version = installed_version(library)
    if version is None:
        raise TensorRTUnavailable(f"{library.title} is not installed here.")
    library.version_tag(version)
    try:
        return importlib.import_module(library.module)
    except Exception as error:  # the import opens shared objects, which can fail in many ways
        raise TensorRTUnavailable(
            f"{library.title} {version} is installed but cannot be imported ({error!s:.200})."
        ) from error


def require(library: Library, device: str = "cuda") -> str:
    """Return the library's version if plans can run on a device of that type. A Runtime is then safe.

    Without a GPU a Runtime can be made, but its deserialization ends the process. Raises TensorRTUnavailable.
    """
    import torch

    version = installed_version(library)
    if version is None:
        raise TensorRTUnavailable(f"{library.title} is not installed here.")
    library.version_tag(version)
    if device != "cuda" or not torch.cuda.is_available():
        raise TensorRTUnavailable(f"{library.title} needs an NVIDIA GPU, and PyTorch finds none here.")
    major, minor = torch.cuda.get_device_capability()
    library.check_capability(f"sm{major}{minor}", torch.cuda.get_device_name())
    library.check_driver(driver_cuda_version())
    import_library(library)
    return version


def driver_cuda_version(open_library: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> tuple[int, int] | None:
    """Return the newest CUDA version that the installed driver supports, (major, minor), or None without a driver."""
    try:
        driver = open_library("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return number.value // 1000, number.value % 1000 // 10


def driver_version(open_library: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> str:
    """Return the version of the installed driver, such as "580.159.04", or "unknown"."""
    try:
        nvml = open_library("libnvidia-ml.so.1")
    except OSError:
        return "unknown"
    if nvml.nvmlInit_v2() != 0:
        return "unknown"
    version = ctypes.create_string_buffer(80)  # NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE
    error = nvml.nvmlSystemGetDriverVersion(version, len(version))
    nvml.nvmlShutdown()
    return "unknown" if error else version.value.decode()
