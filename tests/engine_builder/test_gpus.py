"""GPUs by name, and the targets of a build for them. No GPU and no driver is needed."""

import pytest

from engine_builder.backends.tensorrt.plan_options import InvalidOption, PlanOptions, parse_options, plan_targets
from engine_builder.gpus import CAPABILITIES, UnknownGpu, find_capability
from model.engines.tensorrt.libraries import TENSORRT_RTX
from model.loading.target import Target, gpu_product
from tests.support.tensorrt_rtx import require_tensorrt_rtx

CPU = Target("cpu", "x86_64_v3", "", "torch2.13")
RTX = PlanOptions(refit="none", runtime="tensorrt-rtx")


def test_finds_the_capability_of_a_gpu() -> None:
    for name, capability in (
        ("t4", "sm75"), ("a100", "sm80"), ("NVIDIA A100-SXM4-80GB", "sm80"), ("A10G", "sm86"),
        ("NVIDIA GeForce RTX 3090", "sm86"), ("L4", "sm89"), ("A100_40GB", "sm80"), ("RTX_PRO_6000", "sm120"),
    ):  # fmt: skip
        assert find_capability(name) == capability, name


def test_refuses_other_gpus() -> None:
    for name in ("H100", "h200", "B200", "NVIDIA H100 80GB HBM3"):
        with pytest.raises(
            UnknownGpu, match=r"^TensorRT-RTX does not support the GPU \w+ .*; it supports 7\.5, 8\.0"
        ) as no:
            find_capability(name)
        assert str(no.value).endswith("Build on that GPU with --runtime aot_inductor or tensorrt.")
    for name in ("", "a1000", "sm86", "8.6", "\u202e", "x" * 1000):
        with pytest.raises(UnknownGpu, match="^The GPU .* is not known. Choose from t4, a100, ") as caught:
            find_capability(name)
        assert len(str(caught.value)) < 300 and "h100" not in str(caught.value)


def test_every_gpu_has_the_name_that_its_device_reports() -> None:
    """The names are compared with `gpu_product` of the device's own name."""
    assert all(gpu_product(name) == name for name in CAPABILITIES)
    assert {capability for capability in CAPABILITIES.values() if capability in TENSORRT_RTX.capabilities} == {
        *TENSORRT_RTX.capabilities
    }


# -- the targets of a build ---------------------------------------------------------------------------------------


def keys(*gpus: str) -> list[str]:
    return [target.key for target in plan_targets(CPU, gpus, RTX)]


def test_a_build_has_one_target_for_each_capability() -> None:
    require_tensorrt_rtx()
    assert keys("l4") == ["cuda-sm89-rtx1.7"]
    assert keys("l4", "a100", "a10g", "A10G", "a40") == ["cuda-sm80-rtx1.7", "cuda-sm86-rtx1.7", "cuda-sm89-rtx1.7"]
    assert keys("rtx5090", "t4") == ["cuda-sm75-rtx1.7", "cuda-sm120-rtx1.7"], "in the order of the numbers"


def test_a_build_of_rtx_needs_a_gpu_by_name() -> None:
    with pytest.raises(InvalidOption, match="TensorRT-RTX builds for any of its GPUs, and none is named. .*--gpu a10g"):
        keys()
    with pytest.raises(UnknownGpu):
        keys("a10g", "h100")


def test_tensorrt_takes_no_gpu_by_name() -> None:
    """It builds on the GPU that runs the plan."""
    with pytest.raises(InvalidOption, match="TensorRT builds on the GPU .*, so --gpu has no effect. .*tensorrt-rtx"):
        plan_targets(CPU, ["a10g"], PlanOptions())


# -- the options of a build ---------------------------------------------------------------------------------------


def test_refuses_options_of_tensorrt_for_rtx() -> None:
    for refit in ("identical", "any"):
        with pytest.raises(InvalidOption, match=f"--refit {refit} is an option of TensorRT: .* Choose --refit none"):
            parse_options(TENSORRT_RTX, refit, "none", None, 3)
    for one in ("ampere_plus", "same_compute_capability", "unknown"):
        with pytest.raises(InvalidOption, match=f"--compatibility {one} is an option of TensorRT. Name the GPUs"):
            parse_options(TENSORRT_RTX, None, one, None, 3)


def test_every_capability_of_the_library_is_listed() -> None:
    names = require_tensorrt_rtx().ComputeCapability.__members__.keys() - {"NONE", "CURRENT"}
    assert names == {capability.upper() for capability in TENSORRT_RTX.capabilities}
