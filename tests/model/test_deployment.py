"""A `Deployment` has the same meaning everywhere: prefetch and load read the same blobs, and no field is lost."""

import pickle
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from engine_builder.adapters.add import add_adapter
from engine_builder.building.build import build
from engine_builder.building.build_plan import BuildPlan
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.checkpoints.safety_checker import find_safety_checker
from engine_builder.releases import signing
from engine_builder.releases.publish import merge_drafts, read_drafts
from engine_builder.stores.local import WritableLocalStore
from model.cold_start import ColdStart
from model.deployment import Deployment, ServedAdapters, ServedPrecision
from model.engines.aot_inductor import compiled_engine
from model.loading.prefetch_worker import fetch_selected
from model.loading.target import Target, detect_targets
from model.settings import ServedBucket, read_settings
from model.store.manifest import Fp16Steps
from model.store.precision import FP8, FP16, FP32
from tests.support import recorded, toy_safety_checker
from tests.support.adapters import PACKABLE, module_shapes, random_deltas, write_adapter
from tests.support.deployments import deployed, load_release
from tests.support.parity import picture
from tests.support.recording_store import RecordingStore
from tests.support.uncompiled import builds_without_compiling

KEY = Ed25519PrivateKey.generate()
SIZE = (ServedBucket(height=64, width=64, rows=2),)
ADAPTERS, IN_FP8 = ServedAdapters(("style",), 2**20), ServedPrecision(FP8, Fp16Steps())
VALUES: dict[str, Any] = {
    "releases": ("toy/2",),
    "public_keys": (signing.public_key(KEY),),
    "runtime": "fastest",
    "buckets": SIZE,
    "precision": ServedPrecision(FP8, Fp16Steps(first=1), compares=True),
    "adapters": ADAPTERS,
    "safety": "flag",
    "ranks": 2,
    "bands": 2,
    "components": frozenset({"text_encoder", "vae_decoder"}),
}
"""A value of each field that is not its default."""
SETTINGS: dict[str, Any] = {
    "release": "toy/2", "public_key": str(signing.public_key(KEY)), "runtime": "fastest", "safety": "flag",
    "buckets": [{"height": 64, "width": 64, "rows": 2}], "precision": "fp8", "fp16_steps": {"first": 1},
    "loras": ["style"], "lora_cache_bytes": 2**20,
}  # fmt: skip


def test_each_field_has_a_value() -> None:
    names = [field.name for field in fields(Deployment)]
    assert list(VALUES) == names
    assert not [name for name in names if getattr(deployed(), name) == VALUES[name]]


@pytest.mark.parametrize("name", [*VALUES, "all"])
def test_survives_the_way_to_another_process(name: str) -> None:
    deployment = replace(deployed(), **(VALUES if name == "all" else {name: VALUES[name]}))
    for copy in (pickle.loads(pickle.dumps(deployment)), Deployment.from_json(deployment.to_json())):
        assert copy == deployment and hash(copy) == hash(deployment)
        assert {field: type(value) for field, value in vars(copy).items()} == {
            field: type(value) for field, value in vars(deployment).items()
        }


def test_follows_from_settings() -> None:
    wanted = {name: VALUES[name] for name in VALUES if name not in ("components", "ranks", "bands")}
    wanted["precision"] = ServedPrecision(FP8, Fp16Steps(first=1))
    assert Deployment.of(read_settings(SETTINGS)) == Deployment(**wanted)
    divided = {"release": "toy/2", "gpus_per_image": 4, "bands_per_image": 2}
    assert Deployment.of(read_settings(divided)) == Deployment(("toy/2",), ranks=2, bands=2)
    assert Deployment.of(read_settings({"release": "toy/2", "compare_every": 9})).precision.compares


def test_follower_loads_neither_adapters_nor_the_safety_checker() -> None:
    follower = Deployment(**VALUES).of_follower()
    assert follower == Deployment(**VALUES | {"adapters": ServedAdapters(), "safety": "off"})


@pytest.fixture(scope="module", autouse=True)
def _opens_uncompiled_bands() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_engine, "_Loader", lambda package, device: compiled_engine.Container(package))
        yield


@pytest.fixture(scope="module")
def store(toy_folder: Path, target: Target, tmp_path_factory: pytest.TempPathFactory) -> WritableLocalStore:
    """A store with the toy in fp32, fp16 and FP8, for adapters and two bands, and with a safety checker, as toy/1.

    The signed toy/2 has the same content. toy/3 has no UNet that takes adapters as inputs.
    """
    root = tmp_path_factory.mktemp("deployment")
    checker = toy_safety_checker.write(root / "checker", [picture(seed) for seed in range(6)])
    checkpoint = Checkpoint(toy_folder, safety_checker=find_safety_checker(str(checker)))
    plan = BuildPlan("toy", checkpoint, None, target, FP32, lora_rank=4, bands=(2,))
    static = recorded.quantized(replace(plan, target=recorded.H100, sizes=recorded.SIZES), FP8)
    quantized = replace(static, target=target, sizes=plan.sizes)
    store = WritableLocalStore(root / "store")
    with builds_without_compiling():
        for one in (plan, replace(plan, precision=FP16), quantized):
            build(one, store)
    manifest = merge_drafts(read_drafts(store, "toy")[0])
    store.write_release(manifest.model_copy(update={"version": "1"}))
    store.write_release(signing.sign(manifest.model_copy(update={"version": "2"}), KEY))
    engines = tuple(engine for engine in manifest.engines if not engine.component.startswith("unet_lora"))
    store.write_release(manifest.model_copy(update={"version": "3", "engines": engines}))
    deltas = random_deltas(module_shapes(toy_folder), PACKABLE, 4, 0, 0.25)
    add_adapter(store, "style", write_adapter(root / "style.safetensors", deltas, "peft"), key=KEY)
    return store


CASES: dict[str, dict[str, Any]] = {name: {name: value} for name, value in VALUES.items()} | {
    "public_keys": {"releases": ("toy/2",), "public_keys": VALUES["public_keys"]},
    "fp32": {"precision": ServedPrecision(FP32)},
    "fp16, adapters": {"precision": ServedPrecision(FP16), "adapters": ADAPTERS},
    "FP8, adapters": {"precision": IN_FP8, "adapters": ADAPTERS},
    "FP8, merged adapters": {"releases": ("toy/3",), "precision": IN_FP8, "adapters": ADAPTERS},
}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES.keys())
def test_prefetch_fetches_what_the_load_reads(store: WritableLocalStore, changes: dict[str, Any]) -> None:
    deployment, targets = replace(deployed(), **changes), detect_targets()
    prefetching, loading = RecordingStore(store.root), RecordingStore(store.root)
    fetch_selected(prefetching, [store.read_release(deployment.releases[0])], deployment, targets)
    loaded = load_release(loading, deployment, targets, ColdStart())
    if loaded.model.adapters is not None:
        loaded.model.adapters.close()
    assert prefetching.fetched == loading.blobs_read
