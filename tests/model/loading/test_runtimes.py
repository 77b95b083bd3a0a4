"""The choice of the runtime that serves: the setting, the installed versions, the measured times, and refusals."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from engine_builder.releases.publish import merge_drafts
from engine_builder.stores.local import WritableLocalStore
from model.engines.tensorrt.libraries import TENSORRT, TENSORRT_RTX, Library, TensorRTUnavailable
from model.errors import EngineError, NoEngineForTarget
from model.loading import runtimes
from model.loading.runtimes import list_targets, request_milliseconds, runtime_cache_folder, sort_fastest_first
from model.loading.select import check_plan_versions, check_refit
from model.loading.target import Target
from model.settings import read_settings
from model.store.manifest import Benchmark, Blob, Bucket, EngineRecord, Manifest, Span, TensorRTPlan, WeightsRecord
from model.store.manifest_json import parse_manifest
from model.store.precision import FP8, FP16, FP32
from tests.support import releases
from tests.support.components import BASE_COMPONENTS
from tests.support.fake_tensorrt import RTX_VERSION, VERSION, install_distribution
from tests.support.repository import REPOSITORY

with warnings.catch_warnings(action="ignore"):  # truss's dependencies warn about each other
    from truss.base.truss_config import TrussConfig

GPU = Target("cuda", "h200", "sm90", "torch2.13-cu130")
A10G = Target("cuda", "a10g", "sm86", "torch2.13-cu130")
CPU = Target("cpu", "x86_64_v3", "", "torch2.13")
PLANS = "cuda-h200-sm90-trt11.4"
"""The target of that GPU's plans."""
RTX_PLANS = "cuda-sm86-rtx1.7"
BLOB = Blob(sha256="a" * 64, bytes=1)
PLAN = TensorRTPlan(profile=0, literals=BLOB, onnx=BLOB, refit="any", workspace_bytes=1)


Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Install:
    """Install a version of a library, by default TensorRT; None: uninstall it."""
    return lambda version, library=TENSORRT: install_distribution(monkeypatch, tmp_path, version, library)


@pytest.fixture(autouse=True)
def installed(install: Install) -> None:
    """Install TensorRT alone."""
    install(VERSION)
    install(None, TENSORRT_RTX)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return releases.draft_release(WritableLocalStore(tmp_path_factory.mktemp("store")))


def engines_for(draft: Manifest, target: str, milliseconds: float | None, **changed: Any) -> list[EngineRecord]:
    """An engine of every component for `target`. Its benchmark has `milliseconds`."""
    tag = target.rpartition("-")[2][:3]
    runtime, version = {"trt": ("tensorrt", VERSION), "rtx": ("tensorrt-rtx", RTX_VERSION)}.get(
        tag, ("aot_inductor", "2.13.0")
    )
    entries: dict[str, Any] = {
        "target": target,
        "key": f"{abs(hash(target)):064x}"[:64],
        "runtime": runtime,
        "runtime_version": version,
        "tensorrt": PLAN if runtime != "aot_inductor" else None,
        "benchmark": Benchmark(median=milliseconds, runs=20) if milliseconds else None,
    }
    return [engine.model_copy(update=entries | changed) for engine in draft.engines]


def release_of(draft: Manifest, *engines: list[EngineRecord]) -> Manifest:
    return draft.model_copy(update={"engines": tuple(engine for records in engines for engine in records)})


def first_for_gpu(manifest: Manifest) -> Target:
    """The first target that "fastest" tries on the GPU."""
    return sort_fastest_first(manifest, list_targets("fastest", [GPU]), BASE_COMPONENTS)[0]


# -- the setting --------------------------------------------------------------------------------------------------


def test_targets_of_each_choice() -> None:
    plans = ["cuda-h200-sm90-trt11.4", "cuda-sm90-trt11.4", "cuda-ampere_plus-trt11.4"]
    assert [target.key for target in list_targets("aot_inductor", [GPU])] == [GPU.key]
    assert [target.key for target in list_targets("tensorrt", [GPU])] == plans
    assert [target.key for target in list_targets("fastest", [GPU])] == [*plans, GPU.key]
    assert list_targets("fastest", [CPU]) == list_targets("aot_inductor", [CPU]) == [CPU]


def test_plans_of_a_gpu(install: Install) -> None:
    """One plan of RTX serves all GPUs of a compute capability, because kernels are compiled on the GPU."""
    install(RTX_VERSION, TENSORRT_RTX)
    for product, capability in (("l4", "sm89"), ("a10g", "sm86"), ("a100", "sm80"), ("t4", "sm75")):
        gpu = Target("cuda", product, capability, "torch2.13-cu130")
        own = [f"cuda-{product}-{capability}-trt11.4", f"cuda-{capability}-trt11.4"]
        own += ["cuda-ampere_plus-trt11.4"] if product != "t4" else []
        rtx = f"cuda-{capability}-rtx1.7"
        assert [target.key for target in list_targets("tensorrt", [gpu])] == own
        assert [target.key for target in list_targets("tensorrt-rtx", [gpu])] == [rtx]
        assert [target.key for target in list_targets("fastest", [gpu])] == [*own, rtx, gpu.key]


def test_refuses_plans_without_a_gpu(install: Install) -> None:
    install(RTX_VERSION, TENSORRT_RTX)
    for library in (TENSORRT, TENSORRT_RTX):
        words = f"^{library.title} needs an NVIDIA GPU, and this machine has none"
        with pytest.raises(TensorRTUnavailable, match=words):
            list_targets(library.runtime, [CPU])


@pytest.mark.parametrize(
    ("library", "gpu", "version", "cuda", "words"),
    [
        (TENSORRT, GPU, None, (13, 0), "configured, and TensorRT is not installed"),
        (TENSORRT, GPU, "10.3.0", (13, 0), "TensorRT 10.3.0 is not supported"),
        (TENSORRT_RTX, A10G, None, (13, 0), "runtime tensorrt-rtx is configured, and TensorRT-RTX is not installed"),
        (TENSORRT_RTX, A10G, "1.6.0.1", (13, 0), "TensorRT-RTX 1.6.0.1 is not supported"),
        (TENSORRT_RTX, A10G, RTX_VERSION, (12, 8), "needs a driver for CUDA 13.0 or later, .* supports CUDA 12.8"),
        (TENSORRT_RTX, GPU, RTX_VERSION, (13, 0), "does not support the GPU h200 .compute capability 9.0."),
    ],
)
def test_refuses_a_library_that_cannot_be_used(
    library: Library, gpu: Target, version: str | None, cuda: tuple[int, int], words: str,
    install: Install, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    install(version, library)
    monkeypatch.setattr(runtimes, "driver_cuda_version", lambda: cuda)
    with pytest.raises(TensorRTUnavailable, match=words):
        list_targets(library.runtime, [gpu])
    tag = "trt" if library is TENSORRT else "rtx"
    assert not [target for target in list_targets("fastest", [gpu]) if tag in target.key]


def test_kept_kernels_are_of_this_gpu_driver_and_library(
    install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(RTX_VERSION, TENSORRT_RTX)
    monkeypatch.setattr(runtimes, "driver_cuda_version", lambda: (13, 0))
    monkeypatch.setattr(runtimes, "driver_version", lambda: "580.159.04")
    for choice in ("tensorrt-rtx", "fastest"):
        caches = runtime_cache_folder(tmp_path, list_targets(choice, [A10G]))
        assert caches is not None
        caches.write("a" * 64, b"kernels")
        name = f"{'a' * 64}-sm86-driver580.159.04-rtx{RTX_VERSION}"
        assert [path.name for path in (tmp_path / "runtime-caches").iterdir()] == [name]
    assert runtime_cache_folder(tmp_path, list_targets("tensorrt", [A10G])) is None
    assert runtime_cache_folder(tmp_path, list_targets("fastest", [GPU])) is None, "TensorRT-RTX has no H200"


@pytest.mark.parametrize("gpu", ["l4", "h200"])
def test_gpu_config_with_two_more_lines_serves_tensorrt(gpu: str) -> None:
    """Truss and the model accept the lines of docs/tensorrt.md."""
    text = (REPOSITORY / "docs" / "tensorrt.md").read_text()
    requirement = next(line.strip("- ") for line in text.splitlines() if line.strip().startswith("- tensorrt-cu13=="))
    config = TrussConfig.from_yaml(REPOSITORY / "truss" / "configs" / f"{gpu}.yaml")
    entries = config.to_dict(verbose=True)
    entries["requirements"] = [*entries["requirements"], requirement]
    entries["model_metadata"]["preheat"]["runtime"] = "tensorrt"
    changed = TrussConfig.from_dict(entries)
    changed.validate_forbid_extra()
    assert read_settings(changed.model_metadata["preheat"]).runtime == "tensorrt"
    assert TENSORRT.version_tag(requirement.partition("==")[2]) == "trt11.4"


# -- the measured times -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensorrt", "rtx", "inductor", "first"),
    [
        (2.0, 9.0, 3.0, "trt11.4"), (3.0, 9.0, 2.0, "cu130"), (2.0, 1.0, 3.0, "rtx1.7"), (2.0, None, 3.0, "trt11.4"),
        (None, None, 2.0, "cu130"), (2.0, None, None, "trt11.4"), (None, None, None, "trt11.4"),
    ],
)  # fmt: skip
def test_faster_benchmark_comes_first(
    draft: Manifest, tensorrt: float | None, rtx: float | None, inductor: float | None, first: str, install: Install
) -> None:
    """Plans of TensorRT-RTX have no benchmark if they were built without their GPU."""
    install(RTX_VERSION, TENSORRT_RTX)
    times = {"cuda-sm86-trt11.4": tensorrt, RTX_PLANS: rtx, A10G.key: inductor}
    release = release_of(draft, *(engines_for(draft, target, time) for target, time in times.items()))
    ordered = sort_fastest_first(release, list_targets("fastest", [A10G]), BASE_COMPONENTS)
    assert ordered[0].key.endswith(first)


def test_target_that_cannot_serve_is_not_first(draft: Manifest) -> None:
    """It lacks components, or its plans are of another TensorRT."""
    inductors = engines_for(draft, GPU.key, 9.0)
    for plans in (engines_for(draft, PLANS, 0.1)[:3], engines_for(draft, PLANS, 0.1, runtime_version="11.4.0.107")):
        assert first_for_gpu(release_of(draft, plans, inductors)) == GPU


def test_plans_of_another_tensorrt_do_not_hide_usable_ones(draft: Manifest) -> None:
    """The plans of this GPU have another patch version than those of its compute capability."""
    own = engines_for(draft, PLANS, 1.0, runtime_version="11.4.0.107")
    general = engines_for(draft, "cuda-sm90-trt11.4", 2.0)
    targets = list_targets("tensorrt", [GPU])
    ordered = sort_fastest_first(release_of(draft, own, general), targets, BASE_COMPONENTS)
    assert ordered == [targets[1], targets[0], targets[2]]
    assert sort_fastest_first(release_of(draft, own), targets, BASE_COMPONENTS) == targets  # to be refused by name


def test_compares_the_precision_that_is_served(draft: Manifest) -> None:
    """If a target has fp16 and fp32 engines, those of fp16 are served. The order of their builds does not matter."""
    fp16 = engines_for(draft, GPU.key, 2.0, precision=FP16)
    fp32 = engines_for(draft, GPU.key, 9.0, precision=FP32)
    plans = engines_for(draft, PLANS, 5.0, precision=FP16)
    for both in ((fp16, fp32), (fp32, fp16)):
        assert first_for_gpu(release_of(draft, *both, plans)) == GPU
    fp8 = [engine.model_copy(update={"precision": FP8}) if engine.component == "unet" else engine for engine in fp16]
    release = release_of(draft, engines_for(draft, PLANS, 1.0, precision=FP16), fp8)
    assert first_for_gpu(release).key == PLANS
    assert sort_fastest_first(release, list_targets("fastest", [GPU]), BASE_COMPONENTS, precision=FP8)[0] == GPU


def test_targets_of_one_runtime_keep_their_order(draft: Manifest) -> None:
    """The engines of a lower level may have been measured on a faster machine."""
    levels = [CPU, Target("cpu", "x86_64_v2", "", "torch2.13")]
    slow, fast = (engines_for(draft, level.key, time) for level, time in zip(levels, (9.0, 1.0), strict=True))
    assert sort_fastest_first(release_of(draft, slow, fast), levels, BASE_COMPONENTS) == levels


def measured(draft: Manifest, component: str, batch: int, milliseconds: float) -> EngineRecord:
    """An engine of that component and batch, with that benchmark."""
    bucket = Bucket(batch=Span(min=batch, max=batch), height=Span(min=64, max=64), width=Span(min=64, max=64))
    changes = {"component": component, "bucket": bucket, "benchmark": Benchmark(median=milliseconds, runs=1)}
    return draft.engines[0].model_copy(update=changes)


MILLISECONDS = {  # component -> batch -> benchmark
    "text_encoder": {1: 1.0, 2: 2.0},
    "text_encoder_2": {2: 4.0},
    "unet_text": {1: 9.0, 2: 8.0},
    "unet_time": {32: 0.5},
    "vae_encoder": {1: 70.0},  # not part of text to image
    "vae_decoder": {1: 50.0, 4: 5.0},
}
OTHER_COMPONENTS = 2.0 + 4.0 + 8.0 + 0.5 + 50.0


@pytest.mark.parametrize(
    ("of_unets", "step"),
    [
        ({("unet", 2): 100.0, ("unet", 8): 1.0}, 100.0),
        ({("unet", 1): 1.0}, 2 * 1.0),
        ({("unet_guided", 2): 90.0, ("unet", 2): 80.0}, 90.0),  # the loop runs the variant where it has the batch
        ({("unet_guided", 4): 90.0, ("unet", 2): 100.0}, 100.0),
        ({}, None),
    ],
)
def test_request_takes_thirty_guided_steps_and_one_decoding(
    draft: Manifest, of_unets: dict[tuple[str, int], float], step: float | None
) -> None:
    of_others = {(name, batch): time for name, times in MILLISECONDS.items() for batch, time in times.items()}
    engines = [measured(draft, name, batch, time) for (name, batch), time in (of_others | of_unets).items()]
    expected = None if step is None else OTHER_COMPONENTS + 30 * step
    assert request_milliseconds(draft, engines, BASE_COMPONENTS) == expected


# -- refusals -----------------------------------------------------------------------------------------------------


def test_refuses_plans_of_another_tensorrt_by_version(draft: Manifest) -> None:
    plans = engines_for(draft, PLANS, 1.0)
    check_plan_versions(draft, plans)
    with pytest.raises(
        NoEngineForTarget, match=f"plans of TensorRT {VERSION}, and this machine has 11.4.1.2"
    ) as caught:
        check_plan_versions(draft, plans, {"tensorrt": "11.4.1.2"})
    assert f"Install {VERSION}" in str(caught.value) and "preheat build --runtime tensorrt`" in str(caught.value)
    check_plan_versions(draft, engines_for(draft, GPU.key, 1.0), {"tensorrt": "11.4.1.2"})


def test_versions_belong_to_their_library(draft: Manifest) -> None:
    plans = engines_for(draft, RTX_PLANS, None)
    check_plan_versions(draft, plans, {"tensorrt-rtx": RTX_VERSION})
    words = f"plans of TensorRT-RTX {RTX_VERSION}, and this machine has none"
    for versions in ({"tensorrt": RTX_VERSION, "tensorrt-rtx": None}, None):  # None: it is not installed
        with pytest.raises(NoEngineForTarget, match=words) as caught:
            check_plan_versions(draft, plans, versions)
        assert "`preheat build --runtime tensorrt-rtx --gpu GPU`" in str(caught.value)


def test_identical_refit_takes_its_own_weights_only(draft: Manifest) -> None:
    own, other = (
        WeightsRecord(component="unet", precision=FP16, layout="plain", blobs=(Blob(sha256=c * 64, bytes=1),))
        for c in "bc"
    )
    check_refit(engines_for(draft, PLANS, None)[0], other)
    for target, refit, words in (
        (PLANS, "identical", "takes only the weights it was built with, and the release has others.*--refit any"),
        (RTX_PLANS, "none", "holds the weights it was built with, .* others.*--runtime tensorrt-rtx --gpu GPU`"),
    ):
        plan = PLAN.model_copy(update={"refit": refit, "weights": own.identity})
        [bound, *_] = engines_for(draft, target, None, tensorrt=plan)
        check_refit(bound, own)
        with pytest.raises(EngineError, match=words):
            check_refit(bound, other)


# -- in a manifest ------------------------------------------------------------------------------------------------


def test_manifest_keeps_plans(draft: Manifest) -> None:
    """Older versions know no plan without measured entries. Entries of other engines stay as they were."""
    assert b"tensorrt" not in draft.to_json() and b"benchmark" not in draft.to_json()
    plan = PLAN.model_copy(update={"refit": "none", "weights": ("a" * 64,), "workspace_bytes": None})
    not_run = engines_for(draft, RTX_PLANS, None, accuracy=None, tensorrt=plan)
    all_three = release_of(draft, not_run, engines_for(draft, PLANS, 2.0), engines_for(draft, GPU.key, None))
    assert parse_manifest(all_three.to_json(), all_three.name) == all_three and BLOB.sha256 in all_three.blobs()
    for engine, entry in zip(all_three.engines, json.loads(all_three.to_json())["engines"], strict=True):
        assert ("accuracy" not in entry) == engine.holds_weights == (engine.runtime == "tensorrt-rtx")


def test_refuses_an_inconsistent_plan(draft: Manifest) -> None:
    of_weights = {"weights": ("a" * 64,)}
    for changes in (
        {"refit": "identical"}, {"refit": "any"} | of_weights, {"refit": "none"}, {"refit": "some"} | of_weights,
        {"profile": -1}, {"literals": {"sha256": "a" * 64, "bytes": 2**40}}, {"unknown": 1},
    ):  # fmt: skip
        with pytest.raises(ValidationError):
            TensorRTPlan.model_validate(PLAN.model_dump() | changes)
    entries = draft.engines[0].model_dump() | {"tensorrt": PLAN.model_dump()}
    with pytest.raises(ValidationError, match="only an engine of TensorRT or TensorRT-RTX has a plan"):
        EngineRecord.model_validate(entries)


@pytest.mark.parametrize("runtime", ["aot_inductor", "tensorrt"])
def test_refuses_an_engine_that_was_not_compared(draft: Manifest, runtime: str) -> None:
    """TensorRT builds on the GPU that runs the plan, so its plans are always checked."""
    target = GPU.key if runtime == "aot_inductor" else PLANS
    [engine, *_] = engines_for(draft, target, None)
    assert EngineRecord.model_validate(engine.model_dump()) == engine
    with pytest.raises(ValidationError, match="the engine was not compared with eager PyTorch"):
        EngineRecord.model_validate(engine.model_dump() | {"accuracy": None})


HOLDER = PLAN.model_copy(update={"refit": "none", "weights": ("a" * 64,)})


@pytest.mark.parametrize(
    ("target", "changed", "schema"),
    [
        (GPU.key, {}, 1),
        (PLANS, {}, 1),
        (PLANS, {"tensorrt": HOLDER}, 2),
        (RTX_PLANS, {}, 2),
        (RTX_PLANS, {"tensorrt": HOLDER, "accuracy": None}, 2),
        (PLANS, {"tensorrt": PLAN.model_copy(update={"workspace_bytes": None})}, 2),
    ],
    ids=["aot", "stripped plan", "plan with weights", "RTX", "RTX, not run", "unknown workspace"],
)
def test_release_states_the_oldest_schema(draft: Manifest, target: str, changed: dict[str, Any], schema: int) -> None:
    """An older server refuses a newer schema by its number, and reads all others as before."""
    engines = engines_for(draft, target, None, **changed)
    merged = merge_drafts([release_of(draft, engines_for(draft, GPU.key, None), engines)])
    assert merged.schema_version == schema
    assert parse_manifest(merged.to_json(), merged.name) == merged


def test_reads_new_entries_that_state_schema_1(draft: Manifest) -> None:
    """Releases with such entries were written before schema 2 existed."""
    rtx = release_of(draft, engines_for(draft, RTX_PLANS, None))
    data = rtx.to_json()
    assert b'"schema_version": 1' in data and parse_manifest(data, rtx.name).to_json() == data
