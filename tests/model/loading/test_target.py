"""Detection of targets: levels from CPU flags, products from the names that GPUs report, runtime tags and keys."""

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pydantic import TypeAdapter

from model.errors import ConfigError
from model.loading.target import (
    Target,
    cpu_levels,
    cpu_products,
    detect_targets,
    gpu_product,
    read_cpu_flags,
    torch_tag,
)
from model.store.manifest import Name

V2 = "cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3".split()
V3 = [*V2, *"avx avx2 bmi1 bmi2 f16c fma abm movbe xsave".split()]
V4 = [*V3, *"avx512f avx512bw avx512cd avx512dq avx512vl".split()]


def test_level_requires_each_of_its_flags_and_the_one_below() -> None:
    assert cpu_levels([]) == ["x86_64_v1"]
    assert cpu_levels([*V4, "amx_tile", "fpu"]) == ["x86_64_v4", "x86_64_v3", "x86_64_v2", "x86_64_v1"]
    for level, flags, flags_below in ((2, V2, []), (3, V3, V2), (4, V4, V3)):
        assert cpu_levels(flags)[0] == f"x86_64_v{level}"
        for flag in set(flags) - set(flags_below):
            assert cpu_levels(set(flags) - {flag})[0] == f"x86_64_v{level - 1}", flag
    # Some virtual machines report AVX-512 without FMA.
    assert cpu_levels(set(V4) - {"fma"}) == ["x86_64_v2", "x86_64_v1"]


# As nvidia-smi and cudaGetDeviceProperties print them.
PRODUCTS = {
    "Tesla T4": "t4",
    "Tesla V100-SXM2-16GB": "v100",
    "NVIDIA A10G": "a10g",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100 80GB PCIe": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA GH200 144G HBM3e": "gh200",
    "NVIDIA L40S": "l40s",
    "NVIDIA GeForce RTX 4090 Laptop GPU": "rtx4090laptop",
    "NVIDIA GeForce RTX 4070 Ti SUPER": "rtx4070tisuper",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtxpro6000blackwell",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": "rtxpro6000blackwell",
    "NVIDIA A100-SXM4-40GB MIG 3g.20gb": "a100mig3g20gb",
    "NVIDIA H200 MIG 1g.18gb+me": "h200mig1g18gbme",
}


def test_product_is_the_chip_without_its_package() -> None:
    assert {name: gpu_product(name) for name in PRODUCTS} == PRODUCTS
    for name in ("", "NVIDIA", "NVIDIA 80GB", "../../x", "Ünïcode GPU™", "a\nb"):
        TypeAdapter(Name).validate_python(Target("cuda", gpu_product(name), "sm90", "torch2.13-cu130").key)


def test_key_names_every_part() -> None:
    assert Target("cuda", "h200", "sm90", "torch2.13-cu130").key == "cuda-h200-sm90-torch2.13-cu130"
    assert Target("cuda", "", "sm86", "rtx1.7").key == "cuda-sm86-rtx1.7"
    assert Target("cpu", "x86_64_v3", "", "torch2.13").key == "cpu-x86_64_v3-torch2.13"


def test_tag_has_the_versions_of_torch_and_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, cuda, tag in (
        ("2.13.0+cu130", "13.0", "torch2.13-cu130"),
        ("2.13.1", "12.8", "torch2.13-cu128"),
        ("3.0.0a0+git123", None, "torch3.0"),
    ):
        use_torch(monkeypatch, version, cuda)
        assert torch_tag() == tag


# -- detection ----------------------------------------------------------------------------------------------------


# cudaError_t of the CUDA runtime
CUDA_SUCCESS = 0
CUDA_ERROR_INSUFFICIENT_DRIVER = 35  # the real binding returned it, and None, on a machine without a driver
CUDA_ERROR_INVALID_DEVICE = 101


@dataclass
class FakeRuntime:
    """Replaces cuda.bindings.runtime. Each call returns (error, value)."""

    count: tuple[int, int | None] = (CUDA_SUCCESS, 1)
    properties: tuple[int, Any] = (CUDA_SUCCESS, SimpleNamespace(name=b"NVIDIA H200" + b"\0" * 245, major=9, minor=0))

    cudaError_t = SimpleNamespace(cudaSuccess=CUDA_SUCCESS)  # the binding's own name

    def cudaGetDeviceCount(self) -> tuple[int, int | None]:
        return self.count

    def cudaGetDeviceProperties(self, index: int) -> tuple[int, Any]:
        assert index == 0
        return self.properties


def use_torch(monkeypatch: pytest.MonkeyPatch, version: str, cuda: str | None, has_gpu: bool = False) -> None:
    """Replace torch by a fake with these versions of torch and CUDA, which reports an L4 if `has_gpu`."""
    fake: Any = ModuleType("torch")
    fake.__version__ = version
    fake.version = SimpleNamespace(cuda=cuda)
    fake.cuda = SimpleNamespace(
        is_available=lambda: has_gpu,
        get_device_name=lambda index: "NVIDIA L4",
        get_device_capability=lambda index: (8, 9),
    )
    monkeypatch.setitem(sys.modules, "torch", fake)


def use_cuda_python(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime) -> None:
    """Replace cuda-python by a fake with this runtime."""
    bindings: Any = ModuleType("cuda.bindings")
    bindings.runtime = runtime
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)


def test_gpu_is_the_only_target(monkeypatch: pytest.MonkeyPatch) -> None:
    use_torch(monkeypatch, "2.13.0+cu130", "13.0")
    use_cuda_python(monkeypatch, FakeRuntime())
    assert [target.key for target in detect_targets()] == ["cuda-h200-sm90-torch2.13-cu130"]


def test_machine_without_a_usable_gpu_has_cpu_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    use_torch(monkeypatch, "2.13.0+cu130", "13.0")
    for runtime in (
        FakeRuntime(count=(CUDA_ERROR_INSUFFICIENT_DRIVER, None)),
        FakeRuntime(count=(CUDA_SUCCESS, 0)),
        FakeRuntime(properties=(CUDA_ERROR_INVALID_DEVICE, None)),
    ):
        use_cuda_python(monkeypatch, runtime)
        targets = detect_targets()
        assert {target.device for target in targets} == {"cpu"}
        assert {target.runtime_tag for target in targets} == {"torch2.13"}, "CPU engines do not depend on CUDA"


def test_named_gpu_that_fails_is_no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose GPU has failed would otherwise serve from the CPU, if the release has engines for it."""
    use_torch(monkeypatch, "2.13.0+cu130", "13.0")
    use_cuda_python(monkeypatch, FakeRuntime(count=(CUDA_SUCCESS, 0)))
    for none_named in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none_named)
        assert detect_targets()[0].device == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES is 1, and no such GPU"):
        detect_targets()


def test_torch_reports_the_gpu_without_cuda_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)  # `import cuda.bindings` fails
    use_torch(monkeypatch, "2.13.0+cu130", "13.0", has_gpu=True)
    assert [target.key for target in detect_targets()] == ["cuda-l4-sm89-torch2.13-cu130"]
    use_torch(monkeypatch, "2.13.0+cu130", "13.0", has_gpu=False)
    assert {target.device for target in detect_targets()} == {"cpu"}


def test_ignores_the_gpu_if_torch_is_built_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    use_torch(monkeypatch, "2.13.0+cpu", None, has_gpu=True)
    use_cuda_python(monkeypatch, FakeRuntime())
    assert {target.device for target in detect_targets()} == {"cpu"}


def test_only_x86_cpus_have_levels() -> None:
    for machine in ("x86_64", "AMD64"):
        assert cpu_products(machine, V3) == ["x86_64_v3", "x86_64_v2", "x86_64_v1"]
    for machine, product in {"aarch64": "aarch64", "": "unknown", "a-b/C": "abc"}.items():
        assert cpu_products(machine, V3) == [product]


def test_reads_the_flags_of_the_first_processor(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    assert read_cpu_flags(cpuinfo) == []
    for text, flags in (
        ("processor : 0\nflags\t\t: fpu sse4_1 avx\n\nprocessor : 1\nflags\t: fpu\n", ["fpu", "sse4_1", "avx"]),
        ("processor : 0\nFeatures : fp asimd\n", []),
    ):
        cpuinfo.write_text(text)
        assert read_cpu_flags(cpuinfo) == flags
