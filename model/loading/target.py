"""Identify this machine's device and the key under which its engines are stored.

A key is readable and complete: cuda-h200-sm90-torch2.13-cu130, cuda-a10g-sm86-trt11.4, cpu-x86_64_v3-torch2.13.
CPU engines are compiled for a named x86-64 level; a machine runs the engines of its own level and of lower ones.
"""

import importlib.util
import platform
import re
import runpy
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# Flags as /proc/cpuinfo names them, per level of the x86-64 psABI (gitlab.com/x86-psABIs, "Micro-Architecture Levels").
_LEVELS: tuple[tuple[str, frozenset[str]], ...] = (
    ("x86_64_v2", frozenset("cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3".split())),
    ("x86_64_v3", frozenset("avx avx2 bmi1 bmi2 f16c fma abm movbe xsave".split())),
    ("x86_64_v4", frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split())),
)


@dataclass(frozen=True)
class Target:
    """A device, and a runtime with its version, that an engine is compiled for.

    `device`: "cuda" or "cpu". `product`: a GPU's name, an x86-64 level or another processor's name. `capability`: for
    example "sm90"; "" on a CPU.
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
    version, cuda = _torch_version()
    return make_torch_tag(version, f"cu{cuda.replace('.', '')}" if cuda else "")


def make_torch_tag(version: str, build: str) -> str:
    """Return a version tag: "2.11.0" or "2.11.0+cu130", and build "cu130" or "" -> "torch2.11-cu130" or "torch2.11"."""
    release = ".".join(version.split("+")[0].split(".")[:2])
    return "-".join(filter(None, (f"torch{release}", build)))


def _torch_version() -> tuple[str, str | None]:
    """Return torch's version and its CUDA version.

    Does not import torch if that can be avoided, and does not wait for another thread that imports it.
    """
    module = sys.modules.get("torch")
    version, cuda = getattr(module, "__version__", None), getattr(module, "version", None)
    if version is None or cuda is None:
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.submodule_search_locations:
            variables = runpy.run_path(str(Path(spec.submodule_search_locations[0]) / "version.py"))
            return str(variables["__version__"]), variables["cuda"]
    import torch

    return torch.__version__, torch.version.cuda


def detect_targets() -> list[Target]:
    """Return the targets whose AOTInductor engines this machine can run, best first: its GPU, else its CPU's levels."""
    gpu = _detect_gpu()
    if gpu is not None:
        name, (major, minor) = gpu
        return [Target("cuda", gpu_product(name), f"sm{major}{minor}", torch_tag())]
    tag = torch_tag().split("-")[0]
    return [Target("cpu", product, "", tag) for product in cpu_products(platform.machine(), read_cpu_flags())]


def cpu_products(machine: str, flags: Iterable[str]) -> list[str]:
    """Return the products of a machine's CPU targets, best first: its x86-64 levels, or another processor's name.

    `machine`: the machine's type, such as "x86_64". `flags`: those of its CPU.
    """
    machine = machine.lower()
    if machine not in ("x86_64", "amd64"):
        return [re.sub(r"[^a-z0-9_]", "", machine) or "unknown"]
    return cpu_levels(flags)


def cpu_levels(flags: Iterable[str]) -> list[str]:
    """Return the x86-64 levels of a CPU with these flags, highest first. The baseline is always the last."""
    available, levels = frozenset(flags), ["x86_64_v1"]
    for level, needed in _LEVELS:
        if not needed <= available:
            break
        levels.append(level)
    return levels[::-1]


# Words of a device name that describe its package and not the chip. "Laptop" is kept: it is a different chip.
_PACKAGE_WORDS = re.compile(
    r"nvidia|tesla|geforce|quadro|gpu|generation|edition|workstation|server|max|q|\d+gb?|hbm\d\w*|sxm\d?|pcie|nvl"
)


def gpu_product(name: str) -> str:
    """Return a device's short product name: "NVIDIA H100 80GB HBM3" -> "h100", "Tesla T4" -> "t4".

    A slice of a GPU is a separate product ("h100mig1g10gb"): it has fewer cores than the engines were tuned for.
    """
    words = name.replace("-", " ").lower().split()
    return "".join(re.sub(r"[^a-z0-9]", "", word) for word in words if not _PACKAGE_WORDS.fullmatch(word)) or "gpu"


def _detect_gpu() -> tuple[str, tuple[int, int]] | None:
    """Return name and compute capability of GPU 0, from cuda-python or, if that is not installed, from torch.

    None without a GPU or its driver, or if torch was built for the CPU.
    """
    if _torch_version()[1] is None:
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
    """Return the flags of the first processor, or [] if the system does not list them: the baseline level remains."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        if line.startswith("flags"):
            return line.split(":", 1)[1].split()
    return []
