"""Which runtime serves: what is asked for, what is installed, what was measured, and what is refused."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from engine_builder.stores.local import WritableLocalStore
from model.engines.tensorrt import api as tensorrt_api
from model.engines.tensorrt.api import TensorRTUnavailable
from model.errors import EngineError, NoEngineForTarget
from model.loading.runtimes import fastest_first, request_milliseconds, targets_of
from model.loading.select import check_refit, check_tensorrt_version
from model.loading.target import Target
from model.settings import read_settings
from model.store.manifest import Benchmark, Blob, Bucket, EngineRecord, Manifest, Span, TensorRTPlan, WeightsRecord
from model.store.manifest_json import parse_manifest
from model.store.precision import FP16, FP32
from tests.conftest import REPOSITORY
from tests.support import releases
from tests.support.components import BASE_COMPONENTS

with warnings.catch_warnings(action="ignore"):  # what truss's dependencies warn of is not ours to mend
    from truss.base.truss_config import TrussConfig

VERSION = "11.4.0.106"
GPU = Target("cuda", "h200", "sm90", "torch2.13-cu130")
CPU = Target("cpu", "x86_64_v3", "", "torch2.13")
BLOB = Blob(sha256="a" * 64, bytes=1)
PLAN = TensorRTPlan(profile=0, literals=BLOB, onnx=BLOB, refit="any", workspace_bytes=1)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Say which TensorRT is installed."""
    return lambda version: monkeypatch.setattr(tensorrt_api, "installed_version", lambda: version)


@pytest.fixture(autouse=True)
def eleven(installed: Callable[[str | None], None]) -> None:
    installed(VERSION)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return releases.draft(WritableLocalStore(tmp_path_factory.mktemp("store")))


def engines_for(draft: Manifest, target: str, milliseconds: float | None, **changed: Any) -> list[EngineRecord]:
    """An engine of every component, for `target`, that takes `milliseconds`."""
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


def release(draft: Manifest, *engines: list[EngineRecord]) -> Manifest:
    return draft.model_copy(update={"engines": tuple(engine for some in engines for engine in some)})


# -- what is asked for --------------------------------------------------------------------------------------------


def test_targets_of_each_choice() -> None:
    plans = ["cuda-h200-sm90-trt11.4", "cuda-sm90-trt11.4", "cuda-ampere_plus-trt11.4"]
    assert [target.key for target in targets_of("aot_inductor", [GPU])] == [GPU.key]
    assert [target.key for target in targets_of("tensorrt", [GPU])] == plans
    assert [target.key for target in targets_of("fastest", [GPU])] == [*plans, GPU.key]
    assert targets_of("fastest", [CPU]) == targets_of("aot_inductor", [CPU]) == [CPU]


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
def test_every_gpu_with_a_config_has_plans_of_its_own(product: str, capability: str, ampere: bool) -> None:
    keys = [target.key for target in targets_of("tensorrt", [Target("cuda", product, capability, "torch2.13-cu130")])]
    assert keys[:2] == [f"cuda-{product}-{capability}-trt11.4", f"cuda-{capability}-trt11.4"]
    assert (keys[2:] == ["cuda-ampere_plus-trt11.4"]) == ampere


def test_asking_for_tensorrt_where_it_cannot_be_had_is_refused(installed: Callable[[str | None], None]) -> None:
    with pytest.raises(TensorRTUnavailable, match="needs an NVIDIA GPU, and this machine has none"):
        targets_of("tensorrt", [CPU])
    installed(None)
    with pytest.raises(TensorRTUnavailable, match="configured, and TensorRT is not installed"):
        targets_of("tensorrt", [GPU])
    assert targets_of("fastest", [GPU]) == [GPU]
    installed("10.3.0")
    with pytest.raises(TensorRTUnavailable, match="TensorRT 10.3.0 is not supported"):
        targets_of("tensorrt", [GPU])
    assert targets_of("fastest", [GPU]) == [GPU]


@pytest.mark.parametrize("gpu", ["l4", "a10g", "a100", "h100", "h200"])
def test_every_gpu_s_config_serves_tensorrt_with_two_lines_more(gpu: str) -> None:
    """Those of docs/tensorrt.md: Truss takes them, and so does the model."""
    text = (REPOSITORY / "docs" / "tensorrt.md").read_text()
    requirement = next(line.strip("- ") for line in text.splitlines() if line.strip().startswith("- tensorrt-cu13=="))
    config = TrussConfig.from_yaml(REPOSITORY / "truss" / "configs" / f"{gpu}.yaml")
    entries = config.to_dict(verbose=True)
    entries["requirements"] = [*entries["requirements"], requirement]
    entries["model_metadata"]["preheat"]["runtime"] = "tensorrt"
    changed = TrussConfig.from_dict(entries)
    changed.validate_forbid_extra()
    assert read_settings(changed.model_metadata["preheat"]).runtime == "tensorrt"
    version = requirement.partition("==")[2]
    assert tensorrt_api.version_tag(version) == "trt11.4"


# -- the fastest --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensorrt", "inductor", "first"),
    [(2.0, 3.0, "trt11.4"), (3.0, 2.0, "cu130"), (None, 2.0, "cu130"), (2.0, None, "trt11.4"), (None, None, "trt11.4")],
)
def test_the_fastest_is_the_one_that_was_measured_to_be(
    draft: Manifest, tensorrt: float | None, inductor: float | None, first: str
) -> None:
    both = release(draft, engines_for(draft, "cuda-h200-sm90-trt11.4", tensorrt), engines_for(draft, GPU.key, inductor))
    ordered = fastest_first(both, targets_of("fastest", [GPU]), BASE_COMPONENTS)
    assert ordered[0].key.endswith(first)


def test_a_target_that_lacks_a_component_is_not_the_fastest(draft: Manifest) -> None:
    some = engines_for(draft, "cuda-h200-sm90-trt11.4", 0.1)[:3]
    ordered = fastest_first(
        release(draft, some, engines_for(draft, GPU.key, 9.0)), targets_of("fastest", [GPU]), BASE_COMPONENTS
    )
    assert ordered[0] == GPU


def test_plans_of_another_tensorrt_are_not_the_fastest(draft: Manifest) -> None:
    other = engines_for(draft, "cuda-h200-sm90-trt11.4", 0.1, runtime_version="11.4.0.107")
    both = release(draft, other, engines_for(draft, GPU.key, 9.0))
    assert fastest_first(both, targets_of("fastest", [GPU]), BASE_COMPONENTS)[0] == GPU


def test_plans_of_another_tensorrt_hide_no_usable_ones(draft: Manifest) -> None:
    """This GPU's own are of another patch version; those of its compute capability are not."""
    own = engines_for(draft, "cuda-h200-sm90-trt11.4", 1.0, runtime_version="11.4.0.107")
    general = engines_for(draft, "cuda-sm90-trt11.4", 2.0)
    targets = targets_of("tensorrt", [GPU])
    ordered = fastest_first(release(draft, own, general), targets, BASE_COMPONENTS)
    assert ordered == [targets[1], targets[0], targets[2]]
    assert fastest_first(release(draft, own), targets, BASE_COMPONENTS) == targets  # to be refused by name


def test_what_is_compared_is_the_precision_that_is_served(draft: Manifest) -> None:
    """Of fp16 and fp32 beside each other, fp16 is; and whichever build came last."""
    half = engines_for(draft, GPU.key, 2.0, precision=FP16)
    full = engines_for(draft, GPU.key, 9.0, precision=FP32)
    plans = engines_for(draft, "cuda-h200-sm90-trt11.4", 5.0, precision=FP16)
    for both in ((half, full), (full, half)):
        assert fastest_first(release(draft, *both, plans), targets_of("fastest", [GPU]), BASE_COMPONENTS)[0] == GPU

    of_another = engines_for(draft, "cuda-h200-sm90-trt11.4", 1.0, precision=FP16, runtime_version="11.4.0.107")
    in_full = engines_for(draft, "cuda-h200-sm90-trt11.4", 1.0, precision=FP32)  # which are not served beside those
    several = release(draft, of_another, in_full, half)
    assert fastest_first(several, targets_of("fastest", [GPU]), BASE_COMPONENTS)[0] == GPU


def test_targets_of_one_runtime_keep_their_order(draft: Manifest) -> None:
    """A faster machine measured for a lower level is no reason to leave this one's own."""
    levels = [CPU, Target("cpu", "x86_64_v2", "", "torch2.13")]
    slow, fast = (engines_for(draft, level.key, time) for level, time in zip(levels, (9.0, 1.0), strict=True))
    assert fastest_first(release(draft, slow, fast), levels, BASE_COMPONENTS) == levels


def test_a_request_is_thirty_steps_of_two_rows_and_one_decoding(draft: Manifest) -> None:
    def at(rows: int, milliseconds: float) -> dict[str, Any]:
        bucket = Bucket(batch=Span(min=rows, max=rows), height=Span(min=64, max=64), width=Span(min=64, max=64))
        return {"bucket": bucket, "benchmark": Benchmark(median=milliseconds, runs=1)}

    engines = [
        engine.model_copy(update=at(rows, milliseconds))
        for engine in draft.engines
        for rows, milliseconds in {
            "text_encoder": {1: 1.0, 2: 2.0},
            "text_encoder_2": {2: 4.0},
            "unet_text": {1: 9.0, 2: 8.0},
            "unet_time": {32: 0.5},
            "unet": {2: 100.0, 8: 1.0},
            "vae_decoder": {1: 50.0, 4: 5.0},
        }[engine.component].items()
    ]
    assert request_milliseconds(draft, engines, BASE_COMPONENTS) == 2.0 + 4.0 + 8.0 + 0.5 + 30 * 100.0 + 50.0
    assert request_milliseconds(draft, engines, (*BASE_COMPONENTS, "refiner_unet")) == 3064.5
    one_row = [engine for engine in engines if engine.component != "unet"] + [
        engine.model_copy(update=at(1, 1.0)) for engine in draft.engines if engine.component == "unet"
    ]
    assert request_milliseconds(draft, one_row, BASE_COMPONENTS) is None

    def also(**milliseconds: float) -> list[EngineRecord]:
        [unet, *_] = [engine for engine in draft.engines if engine.component == "unet"]
        rows = {"unet": 1, "unet_unconditional": 1, "unet_guided": 2}
        changes = {name: {"component": name} | at(rows[name], time) for name, time in milliseconds.items()}
        return engines + [unet.model_copy(update=change) for change in changes.values()]

    assert request_milliseconds(draft, also(unet_guided=90.0), BASE_COMPONENTS) == 64.5 + 30 * 90.0
    two_rows = {("unet", 2), ("unet", 8), ("unet_guided", 2)}
    branches = also(unet_guided=90.0, unet=45.0, unet_unconditional=40.0)
    assert request_milliseconds(draft, branches, BASE_COMPONENTS) == 64.5 + 30 * 85.0
    # Which take less beside each other than the two after each other.
    beside = also(unet_guided=90.0, unet=50.0, unet_unconditional=50.0)
    assert request_milliseconds(draft, beside, BASE_COMPONENTS) == 64.5 + 30 * 90.0
    unmeasured = [engine for engine in branches if (engine.component, engine.bucket.batch.max) not in two_rows]
    assert request_milliseconds(draft, unmeasured, BASE_COMPONENTS) == 64.5 + 30 * 85.0


# -- refusals -----------------------------------------------------------------------------------------------------


def test_plans_of_another_tensorrt_are_refused_by_name(
    draft: Manifest, installed: Callable[[str | None], None]
) -> None:
    plans = engines_for(draft, "cuda-h200-sm90-trt11.4", 1.0)
    check_tensorrt_version(draft, plans)
    installed("11.4.1.2")
    with pytest.raises(
        NoEngineForTarget, match=f"plans of TensorRT {VERSION}, and this machine has 11.4.1.2"
    ) as caught:
        check_tensorrt_version(draft, plans)
    assert f"Install {VERSION}" in str(caught.value) and "preheat build --runtime tensorrt" in str(caught.value)
    check_tensorrt_version(draft, engines_for(draft, GPU.key, 1.0))


def test_an_identical_refit_takes_its_own_weights_alone(draft: Manifest) -> None:
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


def test_what_is_said_of_tensorrt_is_read_again(draft: Manifest) -> None:
    both = release(draft, engines_for(draft, "cuda-h200-sm90-trt11.4", 2.0), engines_for(draft, GPU.key, None))
    assert parse_manifest(both.to_json(), both.name) == both
    assert BLOB.sha256 in both.blobs()


def test_a_release_without_it_is_written_as_before(draft: Manifest) -> None:
    """Byte by byte what an older version wrote, and reads: it refuses entries that it does not know."""
    assert b"tensorrt" not in draft.to_json() and b"benchmark" not in draft.to_json()


def test_what_contradicts_itself_is_refused() -> None:
    for changed in (
        {"refit": "identical"},
        {"refit": "any", "weights": ("a" * 64,)},
        {"profile": -1},
        {"literals": {"sha256": "a" * 64, "bytes": 2**40}},
        {"unknown": 1},
    ):
        with pytest.raises(ValidationError):
            TensorRTPlan.model_validate(PLAN.model_dump() | changed)


def test_only_a_tensorrt_engine_says_how_it_is_refit(draft: Manifest) -> None:
    entries = draft.engines[0].model_dump() | {"tensorrt": PLAN.model_dump()}
    with pytest.raises(ValidationError, match="only a TensorRT engine has a plan"):
        EngineRecord.model_validate(entries)


def test_copies_take_plans_along(draft: Manifest, tmp_path: Path) -> None:
    """`Manifest.blobs` is what copy, verify and gc go by."""
    store = WritableLocalStore(tmp_path)
    onnx, literals = (Blob(sha256=store.put_bytes(data), bytes=len(data)) for data in (b"onnx", b"literals"))
    plan = PLAN.model_copy(update={"onnx": onnx, "literals": literals})
    made = release(draft, engines_for(draft, "cuda-h200-sm90-trt11.4", 2.0, tensorrt=plan))
    assert {onnx.sha256, literals.sha256} <= made.blobs().keys()
