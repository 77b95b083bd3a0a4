"""The decisions of a build of plans: options, profiles, flags, keys, memory, progress; and the records in a store."""

from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_builder.backends.aot_inductor.compile import dynamic_bucket, static_bucket
from engine_builder.backends.tensorrt.plan_options import (
    COMPATIBILITY,
    InvalidOption,
    PlanOptions,
    parse_options,
    plan_targets,
)
from engine_builder.backends.tensorrt.plan_settings import (
    NotEnoughMemory,
    ShapeRange,
    check_build_memory,
    optimization_profiles,
    plan_key,
    profile_key,
    workspace_limit,
)
from engine_builder.backends.tensorrt.plan_store import read_timing_cache, write_timing_cache
from engine_builder.backends.tensorrt.progress import PhaseProgress
from engine_builder.networks.network import Network
from engine_builder.releases.gc import named_blobs
from engine_builder.stores.local import WritableLocalStore
from model.engines.tensorrt.libraries import TENSORRT, TENSORRT_RTX, TensorRTUnavailable, installed_version
from model.loading.runtimes import make_tensorrt_target, runnable_plan_targets
from model.loading.target import Target
from model.store.manifest import Blob, Signature, TensorSpec, WeightsRecord
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


def test_profiles_are_the_shapes_of_buckets() -> None:
    one, other = optimization_profiles(UNET, [static_bucket(2, 1024, 768), dynamic_bucket(32, 16, 1024)])
    assert one == {"sample": ShapeRange(*[(2, 4, 128, 96)] * 3), "time_ids": ShapeRange(*[(2, 6)] * 3)}
    assert other["sample"] == ShapeRange((1, 4, 8, 8), (16, 4, 128, 128), (16, 4, 128, 128))
    assert other["time_ids"] == ShapeRange((1, 6), (16, 6), (16, 6))


def test_target_depends_on_compatibility() -> None:
    keys = {choice: make_tensorrt_target(H200, "trt11.4", choice).key for choice in COMPATIBILITY}
    assert keys == {
        "none": "cuda-h200-sm90-trt11.4",
        "same_compute_capability": "cuda-sm90-trt11.4",
        "ampere_plus": "cuda-ampere_plus-trt11.4",
    }
    assert [target.key for target in runnable_plan_targets(TENSORRT, H200, "trt11.4")] == list(keys.values()), (
        "in the order that servers look for them"
    )


def test_parses_options() -> None:
    for arguments, parsed in (
        ((TENSORRT, None, "none", None, 3), PlanOptions()),
        ((TENSORRT, "any", "ampere_plus", 1.5, 5), PlanOptions("any", "ampere_plus", 3 * 2**29, 5)),
        ((TENSORRT_RTX, None, "none", None, 3), PlanOptions("none", runtime="tensorrt-rtx")),
    ):
        assert parse_options(*arguments) == parsed
    for refused, message in (
        (("same", "none", None, 3), "--refit 'same' is not one .* .identical: takes the weights it was"),
        (("any", "hopper", None, 3), "--compatibility 'hopper' is not .* ampere_plus: runs on Ampere"),
        (("any", "none", -1.0, 3), "workspace of -1.0 GiB"),
    ):
        with pytest.raises(InvalidOption, match=message):
            parse_options(TENSORRT, *refused)


@pytest.mark.skipif(
    installed_version(TENSORRT) is not None, reason="shows the refusal without TensorRT: uninstall it to run this"
)
def test_target_needs_tensorrt() -> None:
    with pytest.raises(TensorRTUnavailable, match="is not installed here"):
        plan_targets(H200, [], PlanOptions())


def network(precision: Precision = FP16, **architecture: Any) -> Network:
    fake_network: Any = SimpleNamespace(
        component="unet",
        code_name="UnetNetwork",
        module=torch.nn.Identity(),
        signature=UNET,
        architecture=architecture,
        precision=precision,
        clips=(),
    )
    return fake_network


def weights(digit: str = "a") -> WeightsRecord:
    blob = Blob(sha256=digit * 64, bytes=4)
    return WeightsRecord(component="unet", precision="fp16", layout="plain", blobs=(blob,))


def key(**changed: Any) -> str:
    arguments: dict[str, Any] = {
        "network": network(),
        "targets": [make_tensorrt_target(H200, "trt11.4", "none")],
        "version": "11.4.0.106",
        "buckets": [static_bucket(2, 1024, 1024)],
        "options": PlanOptions(),
        "weights": weights(),
    }
    return plan_key(**(arguments | changed))


def test_key_depends_on_everything_that_decides_a_plan() -> None:
    other_gpu, gpu = Target("cuda", "h100", "sm90", "trt11.4"), make_tensorrt_target(H200, "trt11.4", "none")
    changes: list[dict[str, Any]] = [
        {"network": network(FP32)},
        {"network": network(layers=3)},
        *({"targets": targets} for targets in ([other_gpu], [gpu, other_gpu])),
        {"version": "11.4.1.2"},
        *({"buckets": [static_bucket(2, 1024, 1024), static_bucket(*size)]} for size in ((2, 1024, 768), (4, 64, 64))),
        *({"options": PlanOptions(refit=refit)} for refit in ("any", "none")),
        *(
            {"options": PlanOptions(**one)}
            for one in ({"compatibility": "ampere_plus"}, {"workspace": GIB}, {"level": 5})
        ),
        {"weights": weights("b")},
    ]
    keys = [key(), *(key(**one) for one in changes)]
    assert len(set(keys)) == len(keys) and key() == key()
    assert len({profile_key(key(), number) for number in range(3)} | {key()}) == 4
    assert len({profile_key(key(), 0, target) for target in (None, gpu, other_gpu)}) == 3


def test_key_depends_on_the_weights_that_a_plan_is_bound_to() -> None:
    for refit, depends in (("identical", True), ("none", True), ("any", False)):
        options = PlanOptions(refit=refit)  # type: ignore[arg-type]
        assert (key(options=options, weights=weights("a")) != key(options=options, weights=weights("b"))) == depends


def test_workspace_is_explicit_or_half_of_free_memory() -> None:
    assert workspace_limit(PlanOptions(workspace=3 * GIB), 5 * GIB, 24 * GIB) == 3 * GIB
    assert workspace_limit(PlanOptions(), 5 * GIB, 24 * GIB) == 7 * GIB
    assert workspace_limit(PlanOptions(), 5 * GIB, 8 * GIB) == GIB // 4
    assert workspace_limit(PlanOptions(), 5 * GIB, free_gpu=None) is None, "a build without a GPU has no limit"
    assert workspace_limit(PlanOptions(workspace=3 * GIB), 5 * GIB, free_gpu=None) == 3 * GIB


def test_refuses_builds_that_do_not_fit() -> None:
    """A build without a GPU needs memory of the host only."""
    weights, workspace = 5 * GIB, 2 * GIB
    for gpu, host, message in (
        (10 * GIB, 64 * GIB, "takes about 12.0 GiB of GPU memory, and 10.0 GiB are free"),
        (24 * GIB, 8 * GIB, "takes about 15.0 GiB of memory, and 8.0 GiB are free"),
        (None, 14 * GIB, "takes about 15.0 GiB of memory, and 14.0 GiB are free"),
    ):
        with pytest.raises(NotEnoughMemory, match="Building unet " + message):
            check_build_memory("unet", weights, workspace, gpu, host)
    check_build_memory("unet", weights, workspace, 12 * GIB, 15 * GIB)
    check_build_memory("unet", weights, None, None, 15 * GIB)


# -- progress -----------------------------------------------------------------------------------------------------


def test_reports_each_start_and_then_one_line_a_second() -> None:
    """Of the two outer levels of phases."""
    lines: list[str] = []
    seconds = 0.0
    progress = PhaseProgress(lines.append, lambda: seconds)
    progress.start("Building Engine", None, 2)
    progress.start("Tactics", "Building Engine", 400)
    progress.start("Timing", "Tactics", 9)
    for step in range(400):  # four steps a second
        seconds += 0.25
        assert progress.step("Tactics", step) and progress.step("Timing", 3)
    progress.finish("Tactics")
    seconds += 1
    assert progress.step("Building Engine", 1)
    assert lines == [
        "building: Building Engine 0%",
        *(f"building: Tactics {percent}%" for percent in range(101)),
        "building: Building Engine 100%",
    ]


def test_progress_keeps_the_interrupt_that_stops_a_build() -> None:
    lines: list[str] = []

    def interrupt(line: str) -> None:
        lines.append(line)
        if "50%" in line:
            raise KeyboardInterrupt

    seconds = count(step=2.0)
    progress = PhaseProgress(interrupt, lambda: next(seconds))
    progress.start("Tactics", None, 2)
    assert not progress.step("Tactics", 0)
    assert isinstance(progress.error, KeyboardInterrupt)
    progress.start("Serializing", None, 2)
    assert not progress.step("Tactics", 1)
    assert lines == ["building: Tactics 0%", "building: Tactics 50%"], "the caller is not called again"


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
