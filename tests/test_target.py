"""Which device this is: levels from flags, products from the names that GPUs report, keys that are complete."""

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from model.loading import target
from model.loading.target import Target, cpu_levels, detect_targets, gpu_product, torch_tag
from model.store.manifest import Name

V2 = "cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3".split()
V3 = [*V2, *"avx avx2 bmi1 bmi2 f16c fma abm movbe xsave".split()]
V4 = [*V3, *"avx512f avx512bw avx512cd avx512dq avx512vl".split()]


def test_levels_are_nested_and_the_highest_comes_first() -> None:
    assert cpu_levels([]) == ["x86_64_v1"]
    assert cpu_levels(V2) == ["x86_64_v2", "x86_64_v1"]
    assert cpu_levels(V3) == ["x86_64_v3", "x86_64_v2", "x86_64_v1"]
    assert cpu_levels([*V4, "amx_tile", "fpu"]) == ["x86_64_v4", "x86_64_v3", "x86_64_v2", "x86_64_v1"]


@pytest.mark.parametrize(("level", "flags"), [(2, V2), (3, V3), (4, V4)])
def test_a_level_takes_every_one_of_its_flags(level: int, flags: list[str]) -> None:
    below = set(flags[len({2: [], 3: V2, 4: V3}[level]) :])
    for flag in below:
        assert f"x86_64_v{level}" not in cpu_levels(set(flags) - {flag}), flag


def test_a_level_is_not_had_without_the_one_below() -> None:
    """AVX-512 without FMA: some virtual machines report it."""
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
def test_a_product_is_the_chip_without_its_packing(name: str, product: str) -> None:
    assert gpu_product(name) == product


@pytest.mark.parametrize("name", ["", "NVIDIA", "NVIDIA 80GB", "../../x", "Ünïcode GPU™", "a\nb"])
def test_a_product_is_always_fit_for_a_key(name: str) -> None:
    key = Target("cuda", gpu_product(name), "sm90", "torch2.13-cu130").key
    TypeAdapter(Name).validate_python(key)


@pytest.mark.parametrize(
    ("parts", "key"),
    [
        (("cuda", "h200", "sm90", "torch2.13-cu130"), "cuda-h200-sm90-torch2.13-cu130"),
        (("cuda", "a10g", "sm86", "trt11.4"), "cuda-a10g-sm86-trt11.4"),
        (("cpu", "x86_64_v3", "", "torch2.13"), "cpu-x86_64_v3-torch2.13"),
    ],
)
def test_a_key_is_readable_and_complete(parts: tuple[str, str, str, str], key: str) -> None:
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
def test_the_tag_says_torch_and_cuda(monkeypatch: pytest.MonkeyPatch, version: str, cuda: str | None, tag: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert torch_tag() == tag


def test_a_torch_that_another_thread_is_importing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    tag = torch_tag()
    half = ModuleType("torch")
    half.__spec__ = torch.__spec__
    monkeypatch.setitem(sys.modules, "torch", half)  # as it stands there while its first lines run
    assert torch_tag() == tag


# -- detection ----------------------------------------------------------------------------------------------------


@dataclass
class FakeRuntime:
    """cuda.bindings.runtime, whose calls return (error, value); errors as a machine without a driver gives them."""

    count: tuple[int, int | None] = (0, 1)
    properties: tuple[int, Any] = (0, SimpleNamespace(name=b"NVIDIA H200" + b"\0" * 245, major=9, minor=0))

    cudaError_t = SimpleNamespace(cudaSuccess=0)  # the binding's own name

    def cudaGetDeviceCount(self) -> tuple[int, int | None]:
        return self.count

    def cudaGetDeviceProperties(self, index: int) -> tuple[int, Any]:
        assert index == 0
        return self.properties


def install(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime | None) -> None:
    """Put cuda-python there, or take it away."""
    bindings = ModuleType("cuda.bindings")
    if runtime is not None:
        bindings.runtime = runtime  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings if runtime is not None else None)


@pytest.fixture
def cuda_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch as built for CUDA 13.0."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")


@pytest.mark.usefixtures("cuda_torch")
def test_a_gpu_is_the_only_target_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeRuntime())
    assert [found.key for found in detect_targets()] == ["cuda-h200-sm90-torch2.13-cu130"]


@pytest.mark.usefixtures("cuda_torch")
def test_two_digits_of_capability_stay_two(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA RTX PRO 6000 Blackwell Server Edition", major=12, minor=0)
    install(monkeypatch, FakeRuntime(properties=(0, properties)))
    assert [found.key for found in detect_targets()] == ["cuda-rtxpro6000blackwell-sm120-torch2.13-cu130"]


@pytest.mark.usefixtures("cuda_torch")
@pytest.mark.parametrize(
    "runtime",
    [FakeRuntime(count=(35, None)), FakeRuntime(count=(0, 0)), FakeRuntime(properties=(101, None))],
    ids=["no driver", "no device", "a device that is lost"],
)
def test_cuda_python_without_a_gpu_is_no_error(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime) -> None:
    """35 and None are what the real binding returned on a machine without a driver."""
    install(monkeypatch, runtime)
    assert target._detect_gpu() is None
    assert {found.device for found in detect_targets()} == {"cpu"}


@pytest.mark.usefixtures("cuda_torch")
def test_without_cuda_python_torch_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert target._detect_gpu() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA L4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 9))
    assert [found.key for found in detect_targets()] == ["cuda-l4-sm89-torch2.13-cu130"]


def test_a_gpu_that_this_torch_cannot_use_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    install(monkeypatch, FakeRuntime())
    assert target._detect_gpu() is None


def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "_detect_gpu", lambda: None)


def test_a_cpu_runs_its_own_level_and_those_below(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch)
    monkeypatch.setattr(target.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(target, "_cpu_flags", lambda: V3)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert [found.key for found in detect_targets()] == [
        "cpu-x86_64_v3-torch2.13", "cpu-x86_64_v2-torch2.13", "cpu-x86_64_v1-torch2.13",
    ]  # fmt: skip


@pytest.mark.parametrize("machine", ["aarch64", "arm64", ""])
def test_another_processor_is_not_taken_for_an_old_x86(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    """Opening x86 code there would fail in the loader."""
    without_gpu(monkeypatch)
    monkeypatch.setattr(target.platform, "machine", lambda: machine)
    assert [found.product for found in detect_targets()] == [machine or "unknown"]


def test_no_list_of_flags_leaves_the_baseline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(target, "Path", lambda _: tmp_path / "cpuinfo")
    assert target._cpu_flags() == []
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags\t\t: fpu sse4_1 avx\n\nprocessor : 1\nflags\t: fpu\n")
    assert target._cpu_flags() == ["fpu", "sse4_1", "avx"]
    (tmp_path / "cpuinfo").write_text("processor : 0\nFeatures : fp asimd\n")
    assert target._cpu_flags() == []


def test_this_machine_says_what_it_is_without_an_error() -> None:
    found = detect_targets()
    assert found and len({each.device for each in found}) == 1
    for each in found:
        TypeAdapter(Name).validate_python(each.key)
    if not torch.cuda.is_available():
        assert target._detect_gpu() is None
