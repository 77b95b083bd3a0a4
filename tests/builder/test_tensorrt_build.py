"""The settings of a TensorRT build, and its calls. TensorRT is a fake that records calls; no engine is built."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from engine_builder.backends.aot_inductor.compile import dynamic_bucket, static_bucket
from engine_builder.backends.built import CompileError
from engine_builder.backends.tensorrt.build import build_plan
from engine_builder.backends.tensorrt.options import (
    COMPATIBILITY,
    REFIT,
    InvalidOption,
    PlanOptions,
    parse_options,
    plan_target,
)
from engine_builder.backends.tensorrt.plan_settings import (
    NotEnoughMemory,
    ShapeRange,
    builder_flags,
    check_build_memory,
    describe_unsupported,
    optimization_profiles,
    plan_key,
    profile_key,
    workspace_limit,
)
from engine_builder.backends.tensorrt.plan_store import BuiltPlan, read_timing_cache, write_timing_cache
from engine_builder.backends.tensorrt.progress import PhaseProgress
from engine_builder.networks.network import Network
from engine_builder.releases.gc import named_blobs
from engine_builder.stores.local import WritableLocalStore
from model.engines.signatures import Widths, pooled_text_signature, vae_decoder_signature
from model.engines.tensorrt import api as tensorrt_api
from model.loading.runtimes import make_tensorrt_target, runnable_tensorrt_targets
from model.loading.target import Target
from model.store.manifest import Benchmark, Blob, Signature, TensorSpec, WeightsRecord
from model.store.precision import FP16, FP32, Precision

GIB = 2**30
H200 = Target("cuda", "h200", "sm90", "torch2.13-cu130")
UNET = Signature(
    inputs=(
        TensorSpec(name="sample", dtype="float16", shape=("rows", 4, "height/8", "width/8")),
        TensorSpec(name="time_ids", dtype="float32", shape=("rows", 6)),
    ),
    outputs=(TensorSpec(name="noise", dtype="float16", shape=("rows", 4, "height/8", "width/8")),),
)


# -- settings ----------------------------------------------------------------------------------------------------


def test_profile_of_static_bucket_has_one_shape() -> None:
    [one, other] = optimization_profiles(UNET, [static_bucket(2, 1024, 768), static_bucket(8, 512, 512)])
    assert one == {
        "sample": ShapeRange((2, 4, 128, 96), (2, 4, 128, 96), (2, 4, 128, 96)),
        "time_ids": ShapeRange((2, 6), (2, 6), (2, 6)),
    }
    assert other["sample"].tuned == (8, 4, 64, 64) and other["time_ids"].tuned == (8, 6)


def test_profile_of_dynamic_bucket_has_its_range() -> None:
    [profile] = optimization_profiles(UNET, [dynamic_bucket(32, max_batch=16, max_side=1024)])
    assert profile["sample"] == ShapeRange((1, 4, 8, 8), (16, 4, 128, 128), (16, 4, 128, 128))
    assert profile["time_ids"] == ShapeRange((1, 6), (16, 6), (16, 6))


def test_profiles_of_every_signature() -> None:
    widths = Widths(
        tokens=77, text_width=768, text_width_2=1280, pooled_width=1280, context_width=2048, latent_channels=4,
        time_ids=6, vae_scale=8,
    )  # fmt: skip
    for signature, buckets in (
        (pooled_text_signature(widths, "float16"), [static_bucket(1, None, None), static_bucket(2, None, None)]),
        (vae_decoder_signature(widths, "float16"), [static_bucket(1, 1024, 1024)]),
    ):
        profiles = optimization_profiles(signature, buckets)
        assert len(profiles) == len(buckets)
        for profile in profiles:
            assert list(profile) == [spec.name for spec in signature.inputs]
            for spec in signature.inputs:
                for number, size in enumerate(spec.shape):
                    assert not isinstance(size, int) or profile[spec.name].smallest[number] == size


def test_flags_strip_the_plan_and_set_one_refit() -> None:
    assert builder_flags("identical", FP16) == {
        "STRIP_PLAN": True, "REFIT_IDENTICAL": True, "REFIT": False, "TF32": True
    }  # fmt: skip
    assert builder_flags("any", FP16)["REFIT"] and not builder_flags("any", FP16)["REFIT_IDENTICAL"]
    assert not builder_flags("identical", FP32)["TF32"]


def test_target_depends_on_compatibility() -> None:
    keys = {choice: make_tensorrt_target(H200, "trt11.4", choice).key for choice in COMPATIBILITY}
    assert keys == {
        "none": "cuda-h200-sm90-trt11.4",
        "same_compute_capability": "cuda-sm90-trt11.4",
        "ampere_plus": "cuda-ampere_plus-trt11.4",
    }
    assert [target.key for target in runnable_tensorrt_targets(H200, "trt11.4")] == list(keys.values()), (
        "in the order that servers look for them"
    )


def test_parses_options() -> None:
    assert parse_options("identical", "none", None, 3) == PlanOptions()
    assert parse_options("any", "ampere_plus", 1.5, 5) == PlanOptions("any", "ampere_plus", 3 * 2**29, 5)
    for arguments, message in (
        (
            ("same", "none", None, 3),
            "--refit 'same' is not one .* .identical: takes the weights it was",
        ),
        (("any", "hopper", None, 3), "--compatibility 'hopper' is not .* ampere_plus: runs on Ampere"),
        (("any", "none", -1.0, 3), "workspace of -1.0 GiB"),
    ):
        with pytest.raises(InvalidOption, match=message):
            parse_options(*arguments)
    assert set(REFIT) == {"identical", "any"}


@pytest.mark.skipif(
    tensorrt_api.installed_version() is not None, reason="shows the refusal without TensorRT: uninstall it to run this"
)
def test_target_needs_tensorrt() -> None:
    with pytest.raises(tensorrt_api.TensorRTUnavailable, match="is not installed here"):
        plan_target(H200, PlanOptions())


@pytest.mark.usefixtures("fake")
def test_target_has_tensorrts_version() -> None:
    assert plan_target(H200, PlanOptions()).key == "cuda-h200-sm90-trt11.4"
    assert plan_target(H200, PlanOptions(compatibility="ampere_plus")).key == "cuda-ampere_plus-trt11.4"


def network(precision: Precision = FP16, **architecture: Any) -> Network:
    fake_network: Any = SimpleNamespace(
        component="unet", module=torch.nn.Identity(), signature=UNET, architecture=architecture, precision=precision
    )
    return fake_network


def weights(digit: str = "a") -> WeightsRecord:
    blob = Blob(sha256=digit * 64, bytes=4)
    return WeightsRecord(component="unet", precision="fp16", layout="plain", blobs=(blob,))


def key(**changed: Any) -> str:
    arguments: dict[str, Any] = {
        "network": network(),
        "target": make_tensorrt_target(H200, "trt11.4", "none"),
        "version": "11.4.0.106",
        "buckets": [static_bucket(2, 1024, 1024)],
        "options": PlanOptions(),
        "weights": weights(),
    }
    return plan_key(**(arguments | changed))


def test_key_depends_on_everything_that_decides_a_plan() -> None:
    other_gpu = Target("cuda", "h100", "sm90", "trt11.4")
    keys = [
        key(),
        key(network=network(FP32)),
        key(network=network(layers=3)),
        key(target=other_gpu),
        key(version="11.4.1.2"),
        key(buckets=[static_bucket(2, 1024, 768)]),
        key(buckets=[static_bucket(2, 1024, 1024), static_bucket(4, 1024, 1024)]),
        key(options=PlanOptions(refit="any")),
        key(options=PlanOptions(compatibility="ampere_plus")),
        key(options=PlanOptions(workspace=GIB)),
        key(options=PlanOptions(level=5)),
        key(weights=weights("b")),
    ]
    assert len(set(keys)) == len(keys) and key() == key()
    assert len({profile_key(key(), number) for number in range(3)} | {key()}) == 4


def test_key_depends_on_weights_for_identical_refit_only() -> None:
    for_any = PlanOptions(refit="any")
    assert key(options=for_any, weights=weights("a")) == key(options=for_any, weights=weights("b"))


def test_workspace_is_explicit_or_half_of_free_memory() -> None:
    assert workspace_limit(PlanOptions(workspace=3 * GIB), 5 * GIB, 24 * GIB) == 3 * GIB
    assert workspace_limit(PlanOptions(), 5 * GIB, 24 * GIB) == 7 * GIB
    assert workspace_limit(PlanOptions(), 5 * GIB, 8 * GIB) == GIB // 4


@pytest.mark.parametrize(
    ("gpu", "host", "message"),
    [
        (10, 64, "takes about 12.0 GiB of GPU memory, and 10.0 GiB are free"),
        (24, 8, "takes about 15.0 GiB of memory, and 8.0 GiB are free"),
    ],
)
def test_refuses_builds_that_do_not_fit(gpu: int, host: int, message: str) -> None:
    with pytest.raises(NotEnoughMemory, match="Building unet " + message):
        check_build_memory("unet", 5 * GIB, 2 * GIB, gpu * GIB, host * GIB)
    check_build_memory("unet", 5 * GIB, 2 * GIB, 12 * GIB, 15 * GIB)


def test_lists_unsupported_nodes_by_frequency() -> None:
    nodes = [("IsInf", f"n{i}", "no converter") for i in range(3)]
    nodes.insert(0, ("Resize", "up", "cubic"))
    assert describe_unsupported(nodes) == "IsInf x3 (first: n0): no converter; Resize x1 (first: up): cubic"
    many = [(f"Op{i}", "n", "r") for i in range(25)]
    assert describe_unsupported(many).endswith("; and 5 more kinds")
    assert describe_unsupported([]) == ""


# -- progress -----------------------------------------------------------------------------------------------------


def test_reports_two_outer_phases_once_per_percent() -> None:
    lines: list[str] = []
    progress = PhaseProgress(lines.append)
    progress.start("Building Engine", None, 2)
    progress.start("Tactics", "Building Engine", 400)
    progress.start("Timing", "Tactics", 9)
    assert progress.step("Timing", 3)
    for step in range(400):
        assert progress.step("Tactics", step)
    progress.finish("Timing")
    progress.finish("Tactics")
    assert progress.step("Building Engine", 0) and progress.step("Building Engine", 1)
    assert lines[:3] == ["building: Building Engine 0%", "building: Tactics 0%", "building: Tactics 1%"]
    assert len(lines) == 2 + 100 + 2 and lines[-1] == "building: Building Engine 100%"
    assert not any("Timing" in line for line in lines)


def test_progress_keeps_the_interrupt_that_stops_a_build() -> None:
    def interrupt(line: str) -> None:
        if "50%" in line:
            raise KeyboardInterrupt

    progress = PhaseProgress(interrupt)
    progress.start("Tactics", None, 2)
    assert not progress.step("Tactics", 0)
    assert isinstance(progress.error, KeyboardInterrupt)
    assert not progress.step("Tactics", 1)


# -- a build ------------------------------------------------------------------------------------------------------


class FakeBuilder:
    """Records `calls` in order. The other attributes set its answers.

    `unsupported`: indices of nodes.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.unsupported: list[int] = []
        self.parses = self.builds = self.takes_profiles = self.takes_cache = True
        self.config = SimpleNamespace(
            set_flag=lambda flag: self.record("set", flag),
            clear_flag=lambda flag: self.record("clear", flag),
            set_memory_pool_limit=lambda pool, size: self.record("limit", pool, size),
            add_optimization_profile=lambda profile: (
                self.record("profile", dict(profile.shapes)) or (0 if self.takes_profiles else -1)
            ),
            create_timing_cache=lambda data: SimpleNamespace(data=data, serialize=lambda: b"updated " + data),
            set_timing_cache=lambda cache, ignore_mismatch: (
                self.record("cache", cache.data, ignore_mismatch) or self.takes_cache or not cache.data
            ),
        )

    def record(self, *call: Any) -> None:
        self.calls.append(call)

    def calls_of(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]

    def module(self) -> ModuleType:
        fake = self

        class Log:
            ERROR, INTERNAL_ERROR, WARNING, Severity = "error", "internal", "warning", str

        class Profile:
            def __init__(self) -> None:
                self.shapes: dict[str, Any] = {}

            def set_shape(self, name: str, *shapes: Any) -> None:
                self.shapes[name] = shapes

        class Builder:
            def __init__(self, log: Any) -> None:
                self.log = log
                self.create_builder_config = lambda: fake.config
                self.create_optimization_profile = Profile

            def create_network(self, flags: int) -> str:
                fake.record("network", flags)
                return "network"

            def build_serialized_network(self, network: str, config: Any) -> bytes | None:
                config.progress_monitor.phase_start("Tactics", None, 4)
                proceed = config.progress_monitor.step_complete("Tactics", 1)
                config.progress_monitor.phase_finish("Tactics")
                fake.record("build")
                if not fake.builds:
                    self.log.log("error", "Out of memory")
                return b"plan" if fake.builds and proceed else None

        class Parser:
            def __init__(self, network: str, log: Any) -> None:
                self.num_subgraphs, self.num_errors = 2, len(fake.unsupported) or int(not fake.parses)

            def supports_model_v2(self, data: bytes, path: str) -> bool:
                fake.record("supports", path)
                return not fake.unsupported

            def is_subgraph_supported(self, part: int) -> bool:
                return part == 0

            def get_subgraph_nodes(self, part: int) -> Sequence[int]:
                return fake.unsupported if part else [0]

            def get_error(self, number: int) -> Any:
                index = (fake.unsupported or [1])[number]
                return SimpleNamespace(
                    node=lambda: index, node_name=lambda: "b", node_operator=lambda: "Neg", desc=lambda: "why\nnot"
                )

            def parse_from_file(self, path: str) -> bool:
                fake.record("parse", path)
                return fake.parses

        module: Any = ModuleType("tensorrt")
        module.ILogger, module.Builder, module.OnnxParser = Log, Builder, Parser
        module.IProgressMonitor = type("IProgressMonitor", (), {})
        for name, members in {
            "BuilderFlag": "STRIP_PLAN REFIT REFIT_IDENTICAL TF32",
            "MemoryPoolType": "WORKSPACE",
            "ProfilingVerbosity": "DETAILED",
            "HardwareCompatibilityLevel": "NONE SAME_COMPUTE_CAPABILITY AMPERE_PLUS",
        }.items():
            setattr(module, name, SimpleNamespace(**{member: member for member in members.split()}))
        module.NetworkDefinitionCreationFlag = SimpleNamespace(STRONGLY_TYPED=1)
        return module


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeBuilder:
    builder = FakeBuilder()
    monkeypatch.setitem(sys.modules, "tensorrt", builder.module())
    monkeypatch.setattr(tensorrt_api, "require", lambda *_: "11.4.0.106")
    return builder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    nodes = [helper.make_node("Neg", ["x"], ["a"], "first"), helper.make_node("Neg", ["a"], ["y"], "second")]
    sides = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows"]) for name in "xy"]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", sides[:1], sides[1:])), tmp_path / "unet.onnx")
    return tmp_path / "unet.onnx"


def build(model: Path, report: Callable[[str], None] = lambda _: None, options: PlanOptions | None = None) -> Any:
    profiles = optimization_profiles(UNET, [static_bucket(2, 512, 512), static_bucket(4, 512, 512)])
    return build_plan("unet", model, profiles, FP32, options or PlanOptions(), 3 * GIB, b"old", report)


def test_build_sets_all_options(fake: FakeBuilder, model: Path) -> None:
    lines: list[str] = []
    built = build(model, lines.append, options=PlanOptions(compatibility="same_compute_capability", level=5))
    assert (built.plan, built.timing_cache) == (b"plan", b"updated old")
    assert fake.calls_of("network") == [(2,), (2,)]  # strongly typed, for the check and for the build
    assert set(fake.calls_of("set")) == {("STRIP_PLAN",), ("REFIT_IDENTICAL",)}
    assert set(fake.calls_of("clear")) == {("REFIT",), ("TF32",)}
    assert fake.calls_of("limit") == [("WORKSPACE", 3 * GIB)]
    assert fake.calls_of("cache") == [(b"old", False)]
    assert fake.config.profiling_verbosity == "DETAILED"
    assert fake.config.hardware_compatibility_level == "SAME_COMPUTE_CAPABILITY"
    assert fake.config.builder_optimization_level == 5
    shapes = [profile for (profile,) in fake.calls_of("profile")]
    assert [profile["sample"][0] for profile in shapes] == [(2, 4, 64, 64), (4, 4, 64, 64)]
    assert all(set(profile) == {"sample", "time_ids"} for profile in shapes)
    assert lines == ["building: Tactics 0%", "building: Tactics 50%"]


def test_replaces_a_timing_cache_of_another_version(fake: FakeBuilder, model: Path) -> None:
    fake.takes_cache = False
    assert build(model).timing_cache == b"updated "
    assert fake.calls_of("cache") == [(b"old", False), (b"", False)]


def test_refuses_unsupported_nodes_before_building(fake: FakeBuilder, model: Path) -> None:
    fake.unsupported = [1]
    with pytest.raises(CompileError, match=r"does not support these nodes of unet.*Neg x1 \(first: second\): why\."):
        build(model)
    assert not fake.calls_of("parse") and not fake.calls_of("build")


def test_refuses_a_graph_that_does_not_parse(fake: FakeBuilder, model: Path) -> None:
    fake.parses = False
    with pytest.raises(CompileError, match=r"cannot read unet's ONNX graph: Neg x1 \(first: b\): why\."):
        build(model)
    assert not fake.calls_of("build")


def test_refused_profile_is_named_by_its_shapes(fake: FakeBuilder, model: Path) -> None:
    fake.takes_profiles = False
    shapes = r"sample \[2, 4, 64, 64\] to \[2, 4, 64, 64\], time_ids"
    with pytest.raises(CompileError, match=f"refused the shapes of unet: {shapes}"):
        build(model)
    assert not fake.calls_of("build")


def test_failed_build_has_reason_and_remedy(fake: FakeBuilder, model: Path) -> None:
    fake.builds = False
    with pytest.raises(CompileError, match=r"could not build unet \(Out of memory\)\. Give more --workspace"):
        build(model)


def test_interrupted_build_raises_the_interrupt(fake: FakeBuilder, model: Path) -> None:
    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(model, interrupt)


# -- in a store ---------------------------------------------------------------------------------------------------


def test_timing_caches_are_stored_by_target(tmp_path: Path) -> None:
    store = WritableLocalStore(tmp_path)
    targets = [make_tensorrt_target(H200, tag, choice) for tag in ("trt10.16", "trt11.4") for choice in COMPATIBILITY]
    for number, target in enumerate(targets):
        assert read_timing_cache(store, target) == b""
        write_timing_cache(store, target, str(number).encode())
    assert [read_timing_cache(store, target) for target in targets] == [str(n).encode() for n in range(len(targets))]
    [path] = [path for path in (tmp_path / "blobs" / "sha256").iterdir() if path.read_bytes() == b"0"]
    path.write_bytes(b"9")
    assert read_timing_cache(store, targets[0]) == b""
    store.write_record("timing", targets[1].key, b"{")
    assert read_timing_cache(store, targets[1]) == b""


def test_gc_keeps_timing_caches(tmp_path: Path) -> None:
    store = WritableLocalStore(tmp_path)
    write_timing_cache(store, make_tensorrt_target(H200, "trt11.4", "none"), b"times")
    assert {digest for digest, _, _ in store.blobs()} <= named_blobs(store)


def test_finds_a_plan_only_if_all_blobs_are_intact(tmp_path: Path) -> None:
    store = WritableLocalStore(tmp_path)
    blobs = [Blob(sha256=store.put_bytes(data), bytes=len(data)) for data in (b"plan", b"{}", b"literals", b"onnx")]
    built = BuiltPlan(
        plan=blobs[0], constants=blobs[1], literals=blobs[2], onnx=blobs[3], runtime_version="11.4.0.106",
        build_seconds=1.0, workspace_bytes=[1], benchmarks=[Benchmark(median=1.0, runs=2)],
    )  # fmt: skip
    built.write(store, "k")
    assert BuiltPlan.find(store, "k") == built and BuiltPlan.find(store, "other") is None
    (tmp_path / "blobs" / "sha256" / blobs[3].sha256).write_bytes(b"ONNX")
    assert BuiltPlan.find(store, "k") is None
