"""The choice of the runtime that serves: the setting, the installed version, the measured times, and refusals."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from engine_builder.stores.local import WritableLocalStore
from model.engines.tensorrt.api import TensorRTUnavailable, version_tag
from model.errors import EngineError, NoEngineForTarget
from model.loading.runtimes import list_targets, request_milliseconds, sort_fastest_first
from model.loading.select import check_refit, check_tensorrt_version
from model.loading.target import Target
from model.settings import read_settings
from model.store.manifest import Benchmark, Blob, Bucket, EngineRecord, Manifest, Span, TensorRTPlan, WeightsRecord
from model.store.manifest_json import parse_manifest
from model.store.precision import FP16, FP32
from tests.conftest import REPOSITORY
from tests.support import releases
from tests.support.components import BASE_COMPONENTS
from tests.support.fake_tensorrt import VERSION, install_distribution

with warnings.catch_warnings(action="ignore"):  # truss's dependencies warn about each other
    from truss.base.truss_config import TrussConfig

GPU = Target("cuda", "h200", "sm90", "torch2.13-cu130")
CPU = Target("cpu", "x86_64_v3", "", "torch2.13")
PLANS = "cuda-h200-sm90-trt11.4"
"""The target of that GPU's plans."""
BLOB = Blob(sha256="a" * 64, bytes=1)
PLAN = TensorRTPlan(profile=0, literals=BLOB, onnx=BLOB, refit="any", workspace_bytes=1)


Install = Callable[[str | None], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Install:
    """Install a TensorRT of a version; None: uninstall it."""
    return lambda version: install_distribution(monkeypatch, tmp_path, version)


@pytest.fixture(autouse=True)
def installed(install: Install) -> None:
    install(VERSION)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return releases.draft_release(WritableLocalStore(tmp_path_factory.mktemp("store")))


def engines_for(draft: Manifest, target: str, milliseconds: float | None, **changed: Any) -> list[EngineRecord]:
    """An engine of every component for `target`. Its benchmark has `milliseconds`."""
    tensorrt = "trt" in target
    entries: dict[str, Any] = {
        "target": target,
        "key": f"{abs(hash(target)):064x}"[:64],
        "runtime": "tensorrt" if tensorrt else "aot_inductor",
        "runtime_version": VERSION if tensorrt else "2.13.0",
        "tensorrt": PLAN if tensorrt else None,
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


@pytest.mark.parametrize(
    ("product", "capability", "ampere"),
    [
        ("l4", "sm89", True),
        ("a10g", "sm86", True),
        ("a100", "sm80", True),
        ("h100", "sm90", True),
        ("t4", "sm75", False),
    ],
)
def test_each_gpu_of_a_config_has_its_own_plans(product: str, capability: str, ampere: bool) -> None:
    keys = [target.key for target in list_targets("tensorrt", [Target("cuda", product, capability, "torch2.13-cu130")])]
    assert keys[:2] == [f"cuda-{product}-{capability}-trt11.4", f"cuda-{capability}-trt11.4"]
    assert (keys[2:] == ["cuda-ampere_plus-trt11.4"]) == ampere


def test_refuses_tensorrt_without_a_gpu() -> None:
    with pytest.raises(TensorRTUnavailable, match="needs an NVIDIA GPU, and this machine has none"):
        list_targets("tensorrt", [CPU])


@pytest.mark.parametrize(
    ("version", "words"),
    [(None, "configured, and TensorRT is not installed"), ("10.3.0", "TensorRT 10.3.0 is not supported")],
)
def test_refuses_tensorrt_that_cannot_be_used(version: str | None, words: str, install: Install) -> None:
    install(version)
    with pytest.raises(TensorRTUnavailable, match=words):
        list_targets("tensorrt", [GPU])
    assert list_targets("fastest", [GPU]) == [GPU]


@pytest.mark.parametrize("gpu", ["l4", "a10g", "a100", "h100", "h200"])
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
    assert version_tag(requirement.partition("==")[2]) == "trt11.4"


# -- the measured times -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensorrt", "inductor", "first"),
    [(2.0, 3.0, "trt11.4"), (3.0, 2.0, "cu130"), (None, 2.0, "cu130"), (2.0, None, "trt11.4"), (None, None, "trt11.4")],
)
def test_faster_benchmark_comes_first(
    draft: Manifest, tensorrt: float | None, inductor: float | None, first: str
) -> None:
    plans, inductors = engines_for(draft, PLANS, tensorrt), engines_for(draft, GPU.key, inductor)
    assert first_for_gpu(release_of(draft, plans, inductors)).key.endswith(first)


def test_target_without_all_components_is_not_first(draft: Manifest) -> None:
    incomplete = engines_for(draft, PLANS, 0.1)[:3]
    assert first_for_gpu(release_of(draft, incomplete, engines_for(draft, GPU.key, 9.0))) == GPU


def test_plans_of_another_tensorrt_are_not_first(draft: Manifest) -> None:
    other = engines_for(draft, PLANS, 0.1, runtime_version="11.4.0.107")
    assert first_for_gpu(release_of(draft, other, engines_for(draft, GPU.key, 9.0))) == GPU


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


def test_unusable_fp16_plans_do_not_make_fp32_plans_first(draft: Manifest) -> None:
    """The plans of fp32 are not served, because those of fp16 exist. The latter have another patch version."""
    fp16_plans = engines_for(draft, PLANS, 1.0, precision=FP16, runtime_version="11.4.0.107")
    fp32_plans = engines_for(draft, PLANS, 1.0, precision=FP32)
    inductors = engines_for(draft, GPU.key, 2.0, precision=FP16)
    assert first_for_gpu(release_of(draft, fp16_plans, fp32_plans, inductors)) == GPU


def test_targets_of_one_runtime_keep_their_order(draft: Manifest) -> None:
    """The engines of a lower level may have been measured on a faster machine."""
    levels = [CPU, Target("cpu", "x86_64_v2", "", "torch2.13")]
    slow, fast = (engines_for(draft, level.key, time) for level, time in zip(levels, (9.0, 1.0), strict=True))
    assert sort_fastest_first(release_of(draft, slow, fast), levels, BASE_COMPONENTS) == levels


def measured(engine: EngineRecord, component: str, batch: int, milliseconds: float) -> EngineRecord:
    """The engine as one of that component and batch, with that benchmark."""
    bucket = Bucket(batch=Span(min=batch, max=batch), height=Span(min=64, max=64), width=Span(min=64, max=64))
    changes = {"component": component, "bucket": bucket, "benchmark": Benchmark(median=milliseconds, runs=1)}
    return engine.model_copy(update=changes)


MILLISECONDS = {  # component -> batch -> benchmark
    "text_encoder": {1: 1.0, 2: 2.0},
    "text_encoder_2": {2: 4.0},
    "unet_text": {1: 9.0, 2: 8.0},
    "unet_time": {32: 0.5},
    "unet": {2: 100.0, 8: 1.0},
    "vae_decoder": {1: 50.0, 4: 5.0},
}
OTHER_COMPONENTS = 2.0 + 4.0 + 8.0 + 0.5 + 50.0


def test_request_takes_thirty_guided_steps_and_one_decoding(draft: Manifest) -> None:
    engines = [
        measured(engine, engine.component, batch, milliseconds)
        for engine in draft.engines
        for batch, milliseconds in MILLISECONDS[engine.component].items()
    ]
    assert request_milliseconds(draft, engines, BASE_COMPONENTS) == OTHER_COMPONENTS + 30 * 100.0
    with_refiner = (*BASE_COMPONENTS, "refiner_unet")
    assert request_milliseconds(draft, engines, with_refiner) == OTHER_COMPONENTS + 30 * 100.0
    unguided = [engine for engine in engines if engine.component != "unet"]
    unguided += [measured(unguided[0], "unet", 1, 1.0)]
    assert request_milliseconds(draft, unguided, BASE_COMPONENTS) is None


@pytest.mark.parametrize(
    ("variants", "step"),
    [
        ({"unet_guided": 90.0}, 90.0),
        ({"unet_guided": 90.0, "unet": 45.0, "unet_unconditional": 40.0}, 85.0),
        ({"unet_guided": 90.0, "unet": 50.0, "unet_unconditional": 50.0}, 90.0),  # two that overlap take less
        ({"unet": 45.0, "unet_unconditional": 40.0}, 85.0),
    ],
)
def test_step_runs_the_faster_of_one_call_and_two(draft: Manifest, variants: dict[str, float], step: float) -> None:
    """One call computes both halves of the guidance, or each half has an engine of batch 1."""
    batches = {"unet": 1, "unet_unconditional": 1, "unet_guided": 2}
    engines = [
        measured(engine, engine.component, batch, milliseconds)
        for engine in draft.engines
        for batch, milliseconds in MILLISECONDS[engine.component].items()
        if engine.component != "unet" or "unet_guided" in variants
    ]
    engines += [measured(engines[0], name, batches[name], time) for name, time in variants.items()]
    assert request_milliseconds(draft, engines, BASE_COMPONENTS) == OTHER_COMPONENTS + 30 * step


# -- refusals -----------------------------------------------------------------------------------------------------


def test_refuses_plans_of_another_tensorrt_by_version(draft: Manifest) -> None:
    plans = engines_for(draft, PLANS, 1.0)
    check_tensorrt_version(draft, plans)
    with pytest.raises(
        NoEngineForTarget, match=f"plans of TensorRT {VERSION}, and this machine has 11.4.1.2"
    ) as caught:
        check_tensorrt_version(draft, plans, "11.4.1.2")
    assert f"Install {VERSION}" in str(caught.value) and "preheat build --runtime tensorrt" in str(caught.value)
    check_tensorrt_version(draft, engines_for(draft, GPU.key, 1.0), "11.4.1.2")


def test_identical_refit_takes_its_own_weights_only(draft: Manifest) -> None:
    own, other = (
        WeightsRecord(component="unet", precision=FP16, layout="plain", blobs=(Blob(sha256=c * 64, bytes=1),))
        for c in "bc"
    )
    identical = PLAN.model_copy(update={"refit": "identical", "weights": own.identity})
    bound, free = (draft.engines[0].model_copy(update={"tensorrt": plan}) for plan in (identical, PLAN))
    check_refit(bound, own)
    check_refit(free, other)
    check_refit(draft.engines[0], other)
    with pytest.raises(
        EngineError, match="takes only the weights it was built with, and the release has others.*--refit any"
    ):
        check_refit(bound, other)


# -- in a manifest ------------------------------------------------------------------------------------------------


def test_manifest_keeps_tensorrt_and_benchmarks(draft: Manifest) -> None:
    both = release_of(draft, engines_for(draft, PLANS, 2.0), engines_for(draft, GPU.key, None))
    assert parse_manifest(both.to_json(), both.name) == both
    assert BLOB.sha256 in both.blobs()


def test_manifest_without_tensorrt_has_no_new_entries(draft: Manifest) -> None:
    """An older version refuses entries that it does not know."""
    assert b"tensorrt" not in draft.to_json() and b"benchmark" not in draft.to_json()


@pytest.mark.parametrize(
    "changes",
    [
        {"refit": "identical"},
        {"refit": "any", "weights": ("a" * 64,)},
        {"profile": -1},
        {"literals": {"sha256": "a" * 64, "bytes": 2**40}},
        {"unknown": 1},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_refuses_an_inconsistent_plan(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TensorRTPlan.model_validate(PLAN.model_dump() | changes)


def test_refuses_a_plan_of_another_runtime(draft: Manifest) -> None:
    entries = draft.engines[0].model_dump() | {"tensorrt": PLAN.model_dump()}
    with pytest.raises(ValidationError, match="only a TensorRT engine has a plan"):
        EngineRecord.model_validate(entries)


def test_blobs_of_a_manifest_include_those_of_plans(draft: Manifest, tmp_path: Path) -> None:
    """Copying, verifying and garbage collection use `Manifest.blobs`."""
    store = WritableLocalStore(tmp_path / "store")
    onnx, literals = (Blob(sha256=store.put_bytes(data), bytes=len(data)) for data in (b"onnx", b"literals"))
    plan = PLAN.model_copy(update={"onnx": onnx, "literals": literals})
    manifest = release_of(draft, engines_for(draft, PLANS, 2.0, tensorrt=plan))
    assert {onnx.sha256, literals.sha256} <= manifest.blobs().keys()
