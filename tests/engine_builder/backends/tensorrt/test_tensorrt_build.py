"""Builds of plans: every call of the library, refusals, progress and interrupts.

Small graphs are built by the real TensorRT-RTX. A fake that records calls shows what only TensorRT has: timing cache,
hardware compatibility, and flags of plans without weights.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from engine_builder.backends.built import CompileError
from engine_builder.backends.tensorrt import build_plans as tensorrt_build
from engine_builder.backends.tensorrt.build_plans import SerializedPlan, build_plan
from engine_builder.backends.tensorrt.plan_options import PlanOptions
from engine_builder.backends.tensorrt.plan_settings import Profile, ShapeRange
from model.engines.tensorrt.libraries import TENSORRT_RTX, TensorRTUnavailable
from model.store.precision import FP16, FP32, Precision
from tests.support.fake_tensorrt import Fake, install_fake
from tests.support.tensorrt_rtx import capabilities_of

GIB = 2**30
RTX = PlanOptions(refit="none", runtime="tensorrt-rtx")
PROFILE = {"x": ShapeRange((1, 4), (2, 4), (8, 4))}
OTHER_PROFILE = {"x": ShapeRange((16, 4), (16, 4), (16, 4))}


# -- a build with TensorRT-RTX ------------------------------------------------------------------------------------


def write_graph(
    path: Path, nodes: Sequence[onnx.NodeProto], dtype: int = TensorProto.FLOAT, inputs: Sequence[str] = "x",
    shape: Sequence[str | int] = ("rows", 4), opset: int = 20,
) -> Path:  # fmt: skip
    """Write a graph of inputs and an output y of one shape. Its weight w is a 4x4 matrix."""
    weight = numpy_helper.from_array(np.arange(16, dtype=np.float32).reshape(4, 4), "w")
    weights = [weight] if any("w" in node.input for node in nodes) else []
    values = [helper.make_tensor_value_info(name, dtype, shape) for name in (*inputs, "y")]
    graph = helper.make_graph(nodes, "graph", values[:-1], values[-1:], initializer=weights)
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", opset)]), path)
    return path


@pytest.fixture
def product(tmp_path: Path, rtx: ModuleType) -> Path:
    """The graph of -x @ w."""
    nodes = [helper.make_node("Neg", ["x"], ["a"], "first"), helper.make_node("MatMul", ["a", "w"], ["y"], "second")]
    return write_graph(tmp_path / "product.onnx", nodes)


def build_rtx(
    graph: Path, report: Callable[[str], None] = lambda _: None, options: PlanOptions = RTX,
    precision: Precision = FP32, profiles: Sequence[Profile] = (PROFILE,), workspace: int | None = None,
    capabilities: Sequence[str] = ("sm86",),
) -> SerializedPlan:  # fmt: skip
    return build_plan("unet", graph, profiles, precision, options, workspace, capabilities, report=report)


@pytest.fixture
def configs(rtx: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The network and the configuration of each build, as the library has them when the build begins."""
    seen: list[Any] = []
    build_network = rtx.Builder.build_serialized_network

    def record(builder: Any, network: Any, config: Any) -> Any:
        seen.append((network, config))
        return build_network(builder, network, config)

    monkeypatch.setattr(rtx.Builder, "build_serialized_network", record)
    yield seen
    seen.clear()  # before the library's other objects are freed


def test_rtx_builds_a_plan_that_holds_its_weights(product: Path) -> None:
    lines: list[str] = []
    built = build_rtx(product, lines.append)
    assert built.timing_cache == b"" and built.build_seconds > 0
    assert isinstance(built.plan, memoryview) and built.plan.itemsize == 1 and len(built.plan) > 10_000
    assert capabilities_of(built.plan) == ["sm86"]
    assert lines[:2] == ["building: Building engine 0%", "building: Cloning network graph 0%"]
    assert len(lines) > 3 and all(line.startswith("building: ") for line in lines)


@pytest.mark.usefixtures("rtx")
def test_rtx_builds_for_all_of_its_capabilities(tmp_path: Path) -> None:
    graph = write_graph(tmp_path / "graph.onnx", [helper.make_node("Neg", ["x"], ["y"])])
    capabilities = [*TENSORRT_RTX.capabilities]
    assert capabilities_of(build_rtx(graph, capabilities=capabilities).plan) == capabilities


def test_rtx_gets_all_options(product: Path, rtx: ModuleType, configs: list[Any]) -> None:
    options = PlanOptions(refit="none", runtime="tensorrt-rtx", level=5)
    profiles, capabilities = [PROFILE, OTHER_PROFILE], ["sm80", "sm89"]
    build_rtx(product, options=options, profiles=profiles, workspace=GIB, capabilities=capabilities)
    build_rtx(product, precision=FP16)
    [(network, config), (_, of_fp16)] = configs
    assert network.get_flag(rtx.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    assert config.num_optimization_profiles == 2 and config.builder_optimization_level == 5
    assert config.get_memory_pool_limit(rtx.MemoryPoolType.WORKSPACE) == GIB
    assert config.profiling_verbosity == rtx.ProfilingVerbosity.DETAILED
    numbers = range(config.num_compute_capabilities)
    assert [config.get_compute_capability(n) for n in numbers] == [
        rtx.ComputeCapability.SM80, rtx.ComputeCapability.SM89
    ]  # fmt: skip
    flags = rtx.BuilderFlag.__members__.items()
    assert [{name for name, flag in flags if one.get_flag(flag)} for one in (config, of_fp16)] == [set(), {"TF32"}]


def test_rtx_names_unsupported_nodes_before_it_builds(tmp_path: Path, configs: list[Any]) -> None:
    """The listed nodes are those that the parser refuses, not their supported neighbours."""
    nodes = [
        helper.make_node("Neg", ["x"], ["a"], "supported"),
        helper.make_node("Det", ["a"], ["b"], "first_det"),
        helper.make_node("StringNormalizer", ["b"], ["c"], "text"),
        helper.make_node("Det", ["c"], ["d"], "second_det"),
        helper.make_node("Custom", ["d"], ["y"], "foreign", domain="acme"),
    ]
    with pytest.raises(CompileError) as caught:
        build_rtx(write_graph(tmp_path / "graph.onnx", nodes))
    message = str(caught.value)
    assert message.startswith(
        "TensorRT-RTX does not support these nodes of unet's ONNX graph: Det x2 (first: first_det):"
    )
    assert "not supported; StringNormalizer x1 (first: text): not supported; Custom x1 (first: foreign): " in message
    assert "Plugin not found" in message and "Neg" not in message and not configs


def test_rtx_refuses_a_graph_that_cannot_be_read(product: Path, configs: list[Any]) -> None:
    other = product.with_name("other.onnx")
    for content in (b"not a graph", b"\x08\x0a\x12"):
        other.write_bytes(content)
        with pytest.raises(CompileError, match="^TensorRT-RTX cannot read unet's ONNX graph: .*Failed to parse the"):
            build_rtx(other)
    onnx.save(onnx.load(product), product, save_as_external_data=True, location="weights", size_threshold=0)
    build_rtx(product)
    (product.parent / "weights").unlink()
    with pytest.raises(CompileError, match="^TensorRT-RTX cannot read unet's ONNX graph: Failed to import initializer"):
        build_rtx(product)
    assert len(configs) == 1


def test_failed_build_has_the_librarys_reason(product: Path) -> None:
    with pytest.raises(CompileError, match=r"TensorRT-RTX refused the shapes of unet: x \[8, 4\] to \[1, 4\]\.$"):
        build_rtx(product, profiles=[{"x": ShapeRange((8, 4), (2, 4), (1, 4))}])
    for profiles, reason in (
        ([{"x": ShapeRange((1, 5), (2, 5), (8, 5))}], "profile has min=5, opt=5, max=5 but tensor has 4"),
        ([], "no optimization profile has been defined"),
    ):
        with pytest.raises(CompileError) as caught:
            build_rtx(product, profiles=profiles)
        message = str(caught.value)
        assert message.startswith("TensorRT-RTX could not build unet (IBuilder::buildSerializedNetwork: ")
        assert reason in message and message.endswith("). Give other --size, or choose the runtime aot_inductor.")


@pytest.mark.parametrize("at", ["Building engine", "Building engine from subgraph"])
def test_interrupt_stops_a_build(at: str, product: Path, configs: list[Any]) -> None:
    lines: list[str] = []

    def interrupt(line: str) -> None:
        lines.append(line)
        if line.startswith(f"building: {at} "):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_rtx(product, interrupt)
    assert lines[-1] == f"building: {at} 0%" and len(configs) == 1
    build_rtx(product)  # the library is usable afterwards


# -- a build with TensorRT ----------------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return install_fake(monkeypatch)[0]


def build_with_fake(folder: Path, options: PlanOptions) -> SerializedPlan:
    graph = write_graph(folder / "graph.onnx", [helper.make_node("MatMul", ["x", "w"], ["y"])])
    return build_plan("unet", graph, [PROFILE, OTHER_PROFILE], FP32, options, 3 * GIB, timing_cache=b"old")


def test_tensorrt_gets_all_options(fake: Fake, tmp_path: Path) -> None:
    built = build_with_fake(tmp_path, PlanOptions(compatibility="same_compute_capability", level=5))
    assert built.timing_cache == b"old+" and len(built.plan) > 0
    [(_, _, config)] = fake.calls_of("build")
    assert config.flags == {"STRIP_PLAN", "REFIT_IDENTICAL"} and config.builder_optimization_level == 5
    assert fake.calls_of("limit", "cache") == [("limit", "WORKSPACE", 3 * GIB), ("cache", b"old", False)]
    assert config.hardware_compatibility_level == "SAME_COMPUTE_CAPABILITY"
    assert config.profiles == [{"x": ((1, 4), (2, 4), (8, 4))}, {"x": ((16, 4), (16, 4), (16, 4))}]


def test_replaces_a_timing_cache_of_another_version(fake: Fake, tmp_path: Path) -> None:
    fake.refuse = {"cache"}
    assert build_with_fake(tmp_path, PlanOptions()).timing_cache == b"+"
    assert fake.calls_of("cache") == [("cache", b"old", False), ("cache", b"", False)]


def test_tensorrt_builds_only_on_a_gpu(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> str:
        raise TensorRTUnavailable("TensorRT needs an NVIDIA GPU.")

    monkeypatch.setattr(tensorrt_build, "require", refuse)
    with pytest.raises(TensorRTUnavailable, match="needs an NVIDIA GPU"):
        build_with_fake(tmp_path, PlanOptions())
    assert not fake.calls
