"""Identify this machine's device and the key under which its engines are stored.

A key names the device and the runtime, for example cuda-h200-sm90-torch2.13-cu130, cuda-a10g-sm86-trt11.4 or
cpu-x86_64_v3-torch2.13. CPU engines are compiled for a named x86-64 level. A machine runs the engines of its own level
and of lower levels.
"""

import importlib.util
import os
import platform
import re
import runpy
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from model.errors import ConfigError

# The flags that a level requires in addition to the level before, as /proc/cpuinfo names them. The levels are those of
# the x86-64 psABI (gitlab.com/x86-psABIs, "Micro-Architecture Levels").
_FLAGS_ADDED_BY_LEVEL: tuple[tuple[str, frozenset[str]], ...] = (
    ("x86_64_v2", frozenset("cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3".split())),
    ("x86_64_v3", frozenset("avx avx2 bmi1 bmi2 f16c fma abm movbe xsave".split())),
    ("x86_64_v4", frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split())),
)


@dataclass(frozen=True)
class Target:
    """A device, and a runtime with its version, that an engine is compiled for.

    device: "cuda" or "cpu".
    product: a GPU's short name such as "h200", an x86-64 level such as "x86_64_v3", or another processor's name. For
        TensorRT also "" or "ampere_plus", if the engine runs on several GPUs.
    capability: the GPU's compute capability such as "sm90", or "".
    runtime_tag: the runtime and its version, such as "torch2.13-cu130".
    """

    device: str
    product: str
    capability: str
    runtime_tag: str

    @property
    def key(self) -> str:
        """The target's name in manifests."""
        return "-".join(part for part in (self.device, self.product, self.capability, self.runtime_tag) if part)


def torch_tag() -> str:
    """Return the version tag of the AOTInductor runtime: "torch2.13", with "-cu130" if torch was built for CUDA."""
    torch_version, cuda_version = _torch_versions()
    return make_torch_tag(torch_version, f"cu{cuda_version.replace('.', '')}" if cuda_version else "")


def make_torch_tag(torch_version: str, cuda_build: str) -> str:
    """Return the version tag of the AOTInductor runtime.

    torch_version: such as "2.11.0" or "2.11.0+cu130". Only the first two numbers count.
    cuda_build: such as "cu130", which gives "torch2.11-cu130"; "" gives "torch2.11".
    """
    major_minor = ".".join(torch_version.split("+")[0].split(".")[:2])
    return f"torch{major_minor}-{cuda_build}" if cuda_build else f"torch{major_minor}"


def _torch_versions() -> tuple[str, str | None]:
    """Return the versions of torch and of the CUDA that it was built for, or None without CUDA.

    Reads the versions from the imported module, else from torch's file version.py. So a call neither imports torch nor
    waits for a thread that imports torch. Imports torch only if that file cannot be found.
    """
    torch_module = sys.modules.get("torch")
    torch_version = getattr(torch_module, "__version__", None)
    version_module = getattr(torch_module, "version", None)
    if torch_version is not None and version_module is not None:
        return torch_version, version_module.cuda
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.submodule_search_locations:
        variables = runpy.run_path(str(Path(spec.submodule_search_locations[0]) / "version.py"))
        return str(variables["__version__"]), variables["cuda"]
    import torch

    return torch.__version__, torch.version.cuda


def detect_targets() -> list[Target]:
    """Return the targets whose AOTInductor engines this machine can run, best first.

    A machine with a GPU has one target. Others have a target for each x86-64 level that the CPU supports. Raises
    ConfigError if CUDA_VISIBLE_DEVICES names GPUs and none can be used: a process whose GPU has failed must not serve
    from the CPU.
    """
    gpu = _detect_gpu()
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if gpu is None and named not in ("", "-1") and _torch_versions()[1] is not None:
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES is {named}, and no such GPU can be used.",
            "Check the GPU with nvidia-smi, or set CUDA_VISIBLE_DEVICES= to use the CPU.",
        )
    if gpu is not None:
        name, (major, minor) = gpu
        return [Target("cuda", gpu_product(name), f"sm{major}{minor}", torch_tag())]
    tag = torch_tag().split("-")[0]  # without the CUDA version, which CPU engines do not depend on
    return [Target("cpu", product, "", tag) for product in cpu_products(platform.machine(), read_cpu_flags())]


def cpu_products(machine: str, flags: Iterable[str]) -> list[str]:
    """Return the products of a machine's CPU targets, best first: its x86-64 levels, or another processor's name.

    machine: the machine's type, such as "x86_64". flags: the flags of its CPU, which count only on x86-64.
    """
    machine = machine.lower()
    if machine not in ("x86_64", "amd64"):
        return [re.sub(r"[^a-z0-9_]", "", machine) or "unknown"]
    return cpu_levels(flags)


def cpu_levels(flags: Iterable[str]) -> list[str]:
    """Return the x86-64 levels of a CPU with these flags, highest first. The baseline x86_64_v1 is always the last."""
    available, levels = frozenset(flags), ["x86_64_v1"]
    for level, added_flags in _FLAGS_ADDED_BY_LEVEL:
        if not added_flags <= available:
            break
        levels.append(level)
    return levels[::-1]


# Words of a device name that do not distinguish chips, such as brands, memory sizes and boards. "Laptop" is missing,
# because a laptop GPU is a different chip.
_IGNORED_WORD = re.compile(
    r"nvidia|tesla|geforce|quadro|gpu|generation|edition|workstation|server|max|q|\d+gb?|hbm\d\w*|sxm\d?|pcie|nvl"
)


def gpu_product(name: str) -> str:
    """Return a device's short product name: "NVIDIA H100 80GB HBM3" -> "h100", "Tesla T4" -> "t4".

    A MIG slice is a product of its own ("h100mig1g10gb"), because it has fewer cores than the whole GPU.
    """
    words = name.replace("-", " ").lower().split()
    return "".join(re.sub(r"[^a-z0-9]", "", word) for word in words if not _IGNORED_WORD.fullmatch(word)) or "gpu"


def _detect_gpu() -> tuple[str, tuple[int, int]] | None:
    """Return the name and compute capability of GPU 0, or None.

    None if there is no GPU or no driver, or if torch was built without CUDA. Reads both from cuda-python if it is
    installed. Otherwise imports torch.
    """
    if _torch_versions()[1] is None:
        return None
    try:
        from cuda.bindings import runtime  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        import torch

        if not torch.cuda.is_available():
            return None
        return torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0)
    error, count = runtime.cudaGetDeviceCount()
    if error != runtime.cudaError_t.cudaSuccess or not count:
        return None
    error, properties = runtime.cudaGetDeviceProperties(0)
    if error != runtime.cudaError_t.cudaSuccess:
        return None
    name = properties.name.split(b"\0")[0].decode() if isinstance(properties.name, bytes) else str(properties.name)
    return name, (int(properties.major), int(properties.minor))


def read_cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Return the flags of the first processor, or [] if the system does not list flags."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        if line.startswith("flags"):
            return line.split(":", 1)[1].split()
    return []
