"""Detection of targets: levels from CPU flags, products from the names that GPUs report, runtime tags and keys."""

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
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


def test_lists_levels_from_the_highest_down() -> None:
    assert cpu_levels([]) == ["x86_64_v1"]
    assert cpu_levels(V2) == ["x86_64_v2", "x86_64_v1"]
    assert cpu_levels(V3) == ["x86_64_v3", "x86_64_v2", "x86_64_v1"]
    assert cpu_levels([*V4, "amx_tile", "fpu"]) == ["x86_64_v4", "x86_64_v3", "x86_64_v2", "x86_64_v1"]


@pytest.mark.parametrize(("level", "flags", "flags_below"), [(2, V2, []), (3, V3, V2), (4, V4, V3)])
def test_level_requires_each_of_its_flags(level: int, flags: list[str], flags_below: list[str]) -> None:
    for flag in set(flags) - set(flags_below):
        assert f"x86_64_v{level}" not in cpu_levels(set(flags) - {flag}), flag


def test_level_requires_the_one_below() -> None:
    """Some virtual machines report AVX-512 without FMA."""
    assert cpu_levels(set(V4) - {"fma"}) == ["x86_64_v2", "x86_64_v1"]


# As nvidia-smi and cudaGetDeviceProperties print them.
PRODUCTS = {
    "Tesla T4": "t4",
    "Tesla V100-SXM2-16GB": "v100",
    "NVIDIA L4": "l4",
    "NVIDIA A10": "a10",
    "NVIDIA A10G": "a10g",
    "NVIDIA A30": "a30",
    "NVIDIA A40": "a40",
    "NVIDIA A100-SXM4-40GB": "a100",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100-PCIE-40GB": "a100",
    "NVIDIA A100 80GB PCIe": "a100",
    "NVIDIA H100 PCIe": "h100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 NVL": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA H200 NVL": "h200",
    "NVIDIA GH200 480GB": "gh200",
    "NVIDIA GH200 144G HBM3e": "gh200",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "gb200",
    "NVIDIA L40": "l40",
    "NVIDIA L40S": "l40s",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "NVIDIA GeForce RTX 4090 D": "rtx4090d",
    "NVIDIA GeForce RTX 4090 Laptop GPU": "rtx4090laptop",
    "NVIDIA GeForce RTX 4070 Ti SUPER": "rtx4070tisuper",
    "NVIDIA GeForce RTX 3060": "rtx3060",
    "NVIDIA RTX A6000": "rtxa6000",
    "NVIDIA RTX 6000 Ada Generation": "rtx6000ada",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtxpro6000blackwell",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "rtxpro6000blackwell",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": "rtxpro6000blackwell",
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb": "h100mig1g10gb",
    "NVIDIA A100-SXM4-40GB MIG 3g.20gb": "a100mig3g20gb",
    "NVIDIA H200 MIG 1g.18gb+me": "h200mig1g18gbme",
}


@pytest.mark.parametrize(("name", "product"), PRODUCTS.items())
def test_product_is_the_chip_without_its_package(name: str, product: str) -> None:
    assert gpu_product(name) == product


@pytest.mark.parametrize("name", ["", "NVIDIA", "NVIDIA 80GB", "../../x", "Ünïcode GPU™", "a\nb"])
def test_product_is_always_valid_in_a_key(name: str) -> None:
    key = Target("cuda", gpu_product(name), "sm90", "torch2.13-cu130").key
    TypeAdapter(Name).validate_python(key)


@pytest.mark.parametrize(
    ("parts", "key"),
    [
        (("cuda", "h200", "sm90", "torch2.13-cu130"), "cuda-h200-sm90-torch2.13-cu130"),
        (("cuda", "a10g", "sm86", "trt11.4"), "cuda-a10g-sm86-trt11.4"),
        (("cuda", "", "sm86", "rtx1.7"), "cuda-sm86-rtx1.7"),
        (("cpu", "x86_64_v3", "", "torch2.13"), "cpu-x86_64_v3-torch2.13"),
    ],
)
def test_key_names_every_part(parts: tuple[str, str, str, str], key: str) -> None:
    assert Target(*parts).key == key
    TypeAdapter(Name).validate_python(key)


@pytest.mark.parametrize(
    ("version", "cuda", "tag"),
    [
        ("2.13.0+cu130", "13.0", "torch2.13-cu130"),
        ("2.13.0+cpu", None, "torch2.13"),
        ("2.13.1", "12.8", "torch2.13-cu128"),
        ("3.0.0a0+git123", None, "torch3.0"),
    ],
)
def test_tag_has_the_versions_of_torch_and_cuda(
    version: str, cuda: str | None, tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_torch(monkeypatch, version, cuda)
    assert torch_tag() == tag


def test_finds_the_tag_while_torch_is_being_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """While torch is being imported, sys.modules has a module that lacks the versions."""
    expected = torch_tag()
    unfinished = ModuleType("torch")
    unfinished.__spec__ = torch.__spec__
    monkeypatch.setitem(sys.modules, "torch", unfinished)
    assert torch_tag() == expected


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


def remove_cuda_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `import cuda.bindings` fail, as without cuda-python."""
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)


RTX_PRO = SimpleNamespace(name="NVIDIA RTX PRO 6000 Blackwell Server Edition", major=12, minor=0)


@pytest.mark.parametrize(
    ("runtime", "key"),
    [
        (FakeRuntime(), "cuda-h200-sm90-torch2.13-cu130"),
        (FakeRuntime(properties=(CUDA_SUCCESS, RTX_PRO)), "cuda-rtxpro6000blackwell-sm120-torch2.13-cu130"),
    ],
    ids=["capability 9.0", "capability 12.0"],
)
def test_gpu_is_the_only_target(runtime: FakeRuntime, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_torch(monkeypatch, "2.13.0+cu130", "13.0")
    use_cuda_python(monkeypatch, runtime)
    assert [target.key for target in detect_targets()] == [key]


@pytest.mark.parametrize(
    "runtime",
    [
        FakeRuntime(count=(CUDA_ERROR_INSUFFICIENT_DRIVER, None)),
        FakeRuntime(count=(CUDA_SUCCESS, 0)),
        FakeRuntime(properties=(CUDA_ERROR_INVALID_DEVICE, None)),
    ],
    ids=["no driver", "no device", "lost device"],
)
def test_machine_without_a_usable_gpu_has_cpu_targets(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    use_torch(monkeypatch, "2.13.0+cu130", "13.0")
    use_cuda_python(monkeypatch, runtime)
    targets = detect_targets()
    assert {target.device for target in targets} == {"cpu"}
    assert {target.runtime_tag for target in targets} == {"torch2.13"}, "CPU engines do not depend on CUDA"


@pytest.mark.parametrize(("named", "is_refused"), [("1", True), ("", False), ("-1", False), (None, False)])
def test_named_gpu_that_fails_is_no_cpu(named: str | None, is_refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose GPU has failed would otherwise serve from the CPU, if the release has engines for it."""
    use_torch(monkeypatch, "2.13.0+cu130", "13.0")
    use_cuda_python(monkeypatch, FakeRuntime(count=(CUDA_SUCCESS, 0)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    if is_refused:
        with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES is 1, and no such GPU"):
            detect_targets()
    else:
        assert detect_targets()[0].device == "cpu"


def test_torch_reports_the_gpu_without_cuda_python(monkeypatch: pytest.MonkeyPatch) -> None:
    use_torch(monkeypatch, "2.13.0+cu130", "13.0", has_gpu=True)
    remove_cuda_python(monkeypatch)
    assert [target.key for target in detect_targets()] == ["cuda-l4-sm89-torch2.13-cu130"]


def test_torch_reports_no_gpu_without_cuda_python(monkeypatch: pytest.MonkeyPatch) -> None:
    use_torch(monkeypatch, "2.13.0+cu130", "13.0", has_gpu=False)
    remove_cuda_python(monkeypatch)
    assert {target.device for target in detect_targets()} == {"cpu"}


def test_ignores_the_gpu_if_torch_is_built_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    use_torch(monkeypatch, "2.13.0+cpu", None, has_gpu=True)
    use_cuda_python(monkeypatch, FakeRuntime())
    assert {target.device for target in detect_targets()} == {"cpu"}


@pytest.mark.parametrize("machine", ["x86_64", "AMD64"])
def test_x86_cpu_has_its_level_and_lower_levels(machine: str) -> None:
    assert cpu_products(machine, V3) == ["x86_64_v3", "x86_64_v2", "x86_64_v1"]


@pytest.mark.parametrize(
    ("machine", "product"), [("aarch64", "aarch64"), ("arm64", "arm64"), ("", "unknown"), ("a-b/C", "abc")]
)
def test_other_processor_has_one_product(machine: str, product: str) -> None:
    """Flags do not give other processors an x86-64 level. They cannot run x86 code."""
    assert cpu_products(machine, V3) == [product]


@pytest.mark.parametrize(
    ("cpuinfo", "flags"),
    [
        (None, []),
        ("processor : 0\nflags\t\t: fpu sse4_1 avx\n\nprocessor : 1\nflags\t: fpu\n", ["fpu", "sse4_1", "avx"]),
        ("processor : 0\nFeatures : fp asimd\n", []),
    ],
    ids=["no file", "x86", "no line of flags"],
)
def test_reads_the_flags_of_the_first_processor(cpuinfo: str | None, flags: list[str], tmp_path: Path) -> None:
    if cpuinfo is not None:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert read_cpu_flags(tmp_path / "cpuinfo") == flags


def test_detects_this_machine() -> None:
    targets = detect_targets()
    for target in targets:
        TypeAdapter(Name).validate_python(target.key)
    assert {target.device for target in targets} == {"cuda" if torch.cuda.is_available() else "cpu"}
    assert {target.runtime_tag.split("-")[0] for target in targets} == {torch_tag().split("-")[0]}
