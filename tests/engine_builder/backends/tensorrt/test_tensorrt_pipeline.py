"""TensorRT engines from a model's folder to an image, with a fake TensorRT that runs their ONNX graphs.

The tests cover Preheat's part. A plan without constants gets all of them by name from the release's blobs. Profiles
hold the shapes that run. Engines are reused, refused and selected. The fake is tests/support/fake_tensorrt.py.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine_builder.backends.tensorrt.plan_options import PlanOptions
from engine_builder.backends.tensorrt.plan_settings import NotEnoughMemory
from engine_builder.backends.tensorrt.plan_store import read_timing_cache
from engine_builder.building.build import build
from engine_builder.building.build_plan import BuildPlan, Size
from engine_builder.releases.publish import publish
from engine_builder.stores.store import WritableStore, open_writable_store
from model.api.resolve import resolve
from model.cold_start import ColdStart
from model.loading.load import Loaded
from model.loading.target import Target, detect_targets
from model.pipeline.text_to_image import generate
from model.request_fields import GenerationRequest
from model.store.manifest import Manifest
from model.store.precision import FP16
from tests.engine_builder.helpers import PlanOf, edit_weights, folder_of
from tests.support.deployments import deployed, load_release
from tests.support.fake_tensorrt import VERSION, WORKSPACE_BYTES, install_fake

TARGET = Target("cpu", "fake_gpu", "", "trt11.4")


@pytest.fixture(scope="module", autouse=True)
def gpu_memory() -> Iterator[dict[str, int]]:
    """Use the fake of TensorRT on the CPU. Yields the bytes of the GPU's memory, which tests may change."""
    memory = {"free": 2**33, "total": 2**34}
    with pytest.MonkeyPatch.context() as patch:
        install_fake(patch)
        patch.setattr(torch.cuda, "mem_get_info", lambda *_: (memory["free"], memory["total"]))
        yield memory


@pytest.fixture(scope="module")
def plan(toy_plan: BuildPlan) -> BuildPlan:
    return replace(
        toy_plan, target=TARGET, precision=FP16, tensorrt=PlanOptions(), sizes=(Size(1, 64, 64), Size(2, 64, 64))
    )


@pytest.fixture(scope="module")
def progress() -> list[str]:
    """The lines that the build of `built` reports."""
    return []


@pytest.fixture(scope="module")
def built(
    plan: BuildPlan, exported: tuple[WritableStore, Path], tmp_path_factory: pytest.TempPathFactory, progress: list[str]
) -> tuple[WritableStore, Manifest]:
    """The toy's plans, built from graphs that were exported before, and published."""
    folder = tmp_path_factory.mktemp("tensorrt") / "store"
    store = open_writable_store(shutil.copytree(folder_of(exported[0]), folder))
    result = build(plan, store, lambda component, activity, *_: progress.append(f"{component} {activity}"))
    assert set(result.compiled) == set(plan.components)
    return store, publish(store, plan.model)[0]


def generate_one(loaded: Loaded) -> np.ndarray:
    request = GenerationRequest(prompt="a circle", negative_prompt="a line", seed=3, num_inference_steps=6)
    return generate(loaded.model, [resolve(request, loaded.served)])[0][0].astype(int)


def test_plans_generate_aot_inductors_image(built: tuple[WritableStore, Manifest], toy_store: WritableStore) -> None:
    """Plans in fp16, AOTInductor in fp32."""
    loaded = load_release(built[0], deployed(built[1].name), [TARGET], ColdStart())
    assert (loaded.runtime, loaded.target) == ("tensorrt", TARGET.key)
    expected = generate_one(load_release(toy_store, deployed("toy-sdxl/1"), detect_targets(), ColdStart()))
    image = generate_one(loaded)
    assert image.std() > 10 and np.abs(image - expected).max() <= 8


def test_manifest_describes_every_engine(built: tuple[WritableStore, Manifest], plan: BuildPlan) -> None:
    """Buckets are profiles of one plan."""
    store, manifest = built
    for engine in manifest.engines:
        assert engine.runtime == "tensorrt" and engine.runtime_version == VERSION
        assert engine.accuracy is not None and engine.accuracy.relative <= 5e-3 and engine.benchmark is not None
        assert engine.tensorrt is not None
        assert engine.tensorrt.workspace_bytes == WORKSPACE_BYTES * (engine.tensorrt.profile + 1)
        weights = next(w for w in manifest.weights if w.component == engine.component)
        assert engine.tensorrt.weights == weights.identity
    assert {engine.component for engine in manifest.engines} == set(plan.components)
    unets = [engine for engine in manifest.engines if engine.component == "unet"]
    assert len(unets) == 2 and len({engine.blob for engine in unets}) == 1 and len({e.key for e in unets}) == 2
    assert [engine.tensorrt.profile for engine in unets if engine.tensorrt] == [0, 1]
    cache = read_timing_cache(store, plan.target)
    assert set(cache) == set(b"+") and len(cache) >= len(plan.components), "builds share the timing cache"


def test_build_reports_progress(built: tuple[WritableStore, Manifest], progress: list[str]) -> None:
    activities = [line.removeprefix("unet ") for line in progress if line.startswith("unet ")]
    if "building: Building 100%" in activities:  # more than a second after the start
        activities.remove("building: Building 100%")
    comparing, *activities = activities
    assert comparing == "comparing with diffusers"
    assert activities == ["writing weights", "exporting to ONNX", "building: Building 0%", "refitting and checking"]


@pytest.mark.full
def test_another_version_of_the_library_builds_again(
    built: tuple[WritableStore, Manifest], plan: BuildPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft's target names 11.4 alone."""
    store = open_writable_store(shutil.copytree(folder_of(built[0]), tmp_path / "store"))
    newer = "11.4.1.1"
    monkeypatch.setattr(sys.modules["tensorrt"], "__version__", newer)
    result = build(plan, store)
    assert set(result.compiled) == set(plan.components)
    assert {engine.runtime_version for engine in result.draft.engines} == {newer}


def test_rebuilds_only_a_stored_plan_that_fails_its_check(
    built: tuple[WritableStore, Manifest], plan: BuildPlan, tmp_path: Path
) -> None:
    """The record of the UNet's plan names the VAE's. The other plans are reused."""
    store = open_writable_store(shutil.copytree(folder_of(built[0]), tmp_path / "store"))
    assert build(plan, store).compiled == ()
    records = {key: json.loads(store.read_record("engines", key) or b"") for key in store.records("engines")}
    plans = {engine.component: engine.blob for engine in built[1].engines}
    [unet] = [key for key, record in records.items() if record.get("plan", {}).get("sha256") == plans["unet"].sha256]
    record = records[unet] | {"plan": plans["vae_decoder"].model_dump()}
    store.write_record("engines", unet, json.dumps(record).encode())
    lines: list[str] = []
    rebuilt = build(
        replace(plan, model="rebuilt"), store, lambda name, activity, *_: lines.append(f"{name} {activity}")
    )
    assert rebuilt.compiled == ("unet",) and {*rebuilt.reused} == {*plan.components} - {"unet"}
    assert [line for line in lines if line.startswith("unet rebuilding: the stored plan failed its check. ")]
    assert {engine.key for engine in rebuilt.draft.engines} == {engine.key for engine in built[1].engines}
    assert next(e.blob for e in rebuilt.draft.engines if e.component == "unet") == plans["unet"]


@pytest.mark.full
def test_only_refit_any_takes_another_models_weights(
    built: tuple[WritableStore, Manifest], plan: BuildPlan, folder_copy: Path, plan_of: PlanOf
) -> None:
    """test_plan_settings.py has the keys, and test_plans.py the refusal of other weights."""
    edit_weights(folder_copy / "unet", lambda tensors: [tensor.mul_(1.1) for tensor in tensors.values()])
    other = replace(plan, model="other", base=plan_of(folder_copy, "other").base)
    store = built[0]
    assert set(build(other, store).compiled) == {"unet", "unet_text", "unet_time"}
    for_any = PlanOptions(refit="any")
    build(replace(plan, tensorrt=for_any), store)
    assert build(replace(other, tensorrt=for_any), store).compiled == ()


def test_refused_build_stores_no_plan(
    plan: BuildPlan, tmp_path: Path, gpu_memory: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gpu_memory, "free", 2**20)
    store = open_writable_store(tmp_path / "store")
    with pytest.raises(NotEnoughMemory, match="Building text_encoder takes about .* GiB of GPU memory"):
        build(plan, store)
    assert store.records("engines") == [] and store.records("drafts") == []
