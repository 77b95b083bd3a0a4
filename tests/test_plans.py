"""TensorRT plans of a release: each is opened once, from verified bytes. Those of one stream share a workspace."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from engine_builder.stores.local import WritableLocalStore
from model.cold_start import ColdStart
from model.engines.tensorrt.plans import Plans
from model.errors import CorruptBlob, EngineError, NoEngineForTarget, OutOfDeviceMemory
from model.loading.load import Loaded, load_release
from model.loading.memory import check_memory, tensorrt_bytes
from model.loading.select import Selection, select
from model.loading.target import Target
from model.pipeline.spec import SDXL
from model.store.manifest import Blob, Bucket, EngineRecord, Manifest, Signature, Span, TensorRTPlan, TensorSpec
from tests.support import releases
from tests.support.fake_tensorrt import VERSION, Fake, install_distribution, install_fake

SIGNATURE = Signature(
    inputs=(TensorSpec(name="x", dtype="float32", shape=("rows", 4)),),
    outputs=(TensorSpec(name="y", dtype="float32", shape=("rows", 4)),),
)
CPU, CPU_TARGET = torch.device("cpu"), Target("cpu", "", "", "")
WEIGHTS = {"layer.weight": torch.tensor([1.0, 2.0, 3.0, 4.0])}


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fake:
    install_distribution(monkeypatch, tmp_path, VERSION)
    return install_fake(monkeypatch)[0]


@pytest.fixture
def store(tmp_path: Path) -> WritableLocalStore:
    return WritableLocalStore(tmp_path / "store")


def engine_record(
    store: WritableLocalStore, component: str = "unet", profile: int = 0, batch: int = 1, **changes: Any
) -> EngineRecord:
    """Return the record of an engine that computes y = x * w + b, with its blobs in the store."""
    constants = json.dumps({"w": {"tensor": "layer.weight", "dtype": "float32", "shape": [4]}}).encode()
    plan = TensorRTPlan(
        profile=profile,
        literals=releases.put_blob(store, save({"b": torch.full((4,), 0.5), "mask": torch.ones(3, dtype=torch.bool)})),
        onnx=releases.put_blob(store, b"graph"),
        refit="any",
        workspace_bytes=(64, 1024)[profile],
    )
    entries: dict[str, Any] = {
        "component": component,
        "runtime": "tensorrt",
        "runtime_version": VERSION,
        "bucket": Bucket(batch=Span(min=batch, max=batch)),
        "signature": SIGNATURE,
        "blob": releases.put_blob(store, f"plan of {component}".encode()),
        "constants": releases.put_blob(store, constants),
        "tensorrt": plan,
    }
    return releases.draft_release(store).engines[0].model_copy(update=entries | changes)


def test_opens_a_plan_once_for_all_of_its_engines(store: WritableLocalStore, fake: Fake) -> None:
    plans = Plans(store, CPU)
    records = engine_record(store, profile=0, batch=1), engine_record(store, profile=1, batch=4)
    one, four = (plans.open(record, WEIGHTS, "text") for record in records)
    assert fake.calls_of("deserialize") == [("deserialize", b"plan of unet")]
    x = torch.randn(4, 4)
    torch.testing.assert_close(four.run({"x": x})["y"], x * WEIGHTS["layer.weight"] + 0.5)
    torch.testing.assert_close(one.run({"x": x[:1]})["y"], x[:1] * WEIGHTS["layer.weight"] + 0.5)


def test_engines_of_one_stream_share_a_workspace(store: WritableLocalStore, fake: Fake) -> None:
    plans = Plans(store, CPU)
    names = ("text_encoder", "text_encoder_2", "unet", "refiner_unet", "vae_decoder")
    engines = [plans.open(engine_record(store, component=name), WEIGHTS, SDXL[name].stream) for name in names]
    for engine in engines:
        engine.run({"x": torch.zeros(1, 4)})
    text, text_2, unet, refiner, vae = (address for _, address, _ in fake.calls_of("device_memory"))
    assert unet == refiner
    assert len({text, text_2, unet, vae}) == 4  # the text encoders run concurrently


def test_refuses_a_damaged_plan(store: WritableLocalStore, fake: Fake) -> None:
    broken = engine_record(store)
    path = store.root / "blobs" / "sha256" / broken.blob.sha256
    path.write_bytes(b"plan of unex")
    with pytest.raises(CorruptBlob):
        Plans(store, CPU).open(broken, WEIGHTS, "denoising")
    assert not fake.calls


def test_refuses_damaged_literals(store: WritableLocalStore, fake: Fake) -> None:
    for data in (b"", b"not a safetensors file"):
        literals = releases.put_blob(store, data)
        plan = engine_record(store).tensorrt
        assert plan is not None
        broken = engine_record(store, tensorrt=plan.model_copy(update={"literals": literals}))
        with pytest.raises(EngineError, match="constants of the unet plan cannot be used"):
            Plans(store, CPU).open(broken, WEIGHTS, "denoising")


def select_engines(store: WritableLocalStore, engines: list[EngineRecord], weight_bytes: int) -> Selection:
    """Return a selection of engines in which each component has `weight_bytes` of weights."""
    manifest = releases.draft_release(store)
    by_component: dict[str, list[EngineRecord]] = {}
    for engine in engines:
        by_component.setdefault(engine.component, []).append(engine)
    [weights, *_] = manifest.weights
    blobs = {name: Blob(sha256=f"{number:064d}", bytes=weight_bytes) for number, name in enumerate(by_component)}
    records = {
        name: [weights.model_copy(update={"component": name, "blobs": (blobs[name],)})] * len(records)
        for name, records in by_component.items()
    }
    return Selection(manifest, "target", by_component, records, shared={})


def test_memory_of_plans_is_weights_and_workspaces(store: WritableLocalStore) -> None:
    engines = [engine_record(store, "unet", 0), engine_record(store, "unet", 1), engine_record(store, "vae_decoder", 0)]
    engines.append(engine_record(store, "refiner_unet", 0))  # on the stream of the base's UNet
    # One copy of the weights for each plan, and the largest workspace of each stream.
    assert tensorrt_bytes(select_engines(store, engines, 5000)) == 3 * 5000 + 1024 + 64
    assert tensorrt_bytes(select_engines(store, list(releases.draft_release(store).engines), 5000)) == 0


def test_refuses_plans_that_do_not_fit_into_memory(store: WritableLocalStore) -> None:
    gpu, engine = torch.device("cuda"), engine_record(store, "vae_decoder", 0)
    check_memory(gpu, select_engines(store, [engine], 2**29 - 32), free=2**30)
    with pytest.raises(OutOfDeviceMemory, match="1.0 GiB free. .* or use a GPU with more memory"):
        check_memory(gpu, select_engines(store, [engine], 2**29), free=2**30)


# -- a release ----------------------------------------------------------------------------------------------------


@pytest.fixture
def plan_release(store: WritableLocalStore) -> Manifest:
    """The toy release with plans that accept only its weights. It is not written to the store."""
    draft = releases.draft_release(store)
    constants = json.dumps({"w": {"tensor": "b.bias", "dtype": "float32", "shape": [4]}}).encode()
    engines = []
    for engine in draft.engines:
        record = engine_record(
            store,
            engine.component,
            constants=releases.put_blob(store, constants),
            signature=engine.signature,
            bucket=engine.bucket,
            target="cpu",  # the fake uses the CPU's memory
        )
        weights = next(record for record in draft.weights if record.component == engine.component)
        assert record.tensorrt is not None
        plan = record.tensorrt.model_copy(update={"refit": "identical", "weights": weights.identity})
        engines.append(record.model_copy(update={"tensorrt": plan}))
    return draft.model_copy(update={"engines": tuple(engines)})


def load(store: WritableLocalStore, manifest: Manifest) -> Loaded:
    store.write_release(manifest)
    return load_release(store, manifest.name, [CPU_TARGET], [], ColdStart())


def test_loads_plans_and_refits_them_from_the_weights(
    store: WritableLocalStore, plan_release: Manifest, fake: Fake
) -> None:
    loaded = load(store, plan_release)
    assert loaded.runtime == "tensorrt"
    assert len(fake.calls_of("deserialize")) == len(fake.calls_of("refit")) == len(plan_release.components)


def test_refuses_weights_that_a_plan_was_not_built_with(
    store: WritableLocalStore, plan_release: Manifest, fake: Fake
) -> None:
    unet, other = (next(w for w in plan_release.weights if w.component == name) for name in ("unet", "vae_decoder"))
    swapped = tuple(w.model_copy(update={"blobs": other.blobs}) if w is unet else w for w in plan_release.weights)
    with pytest.raises(EngineError, match="The unet plan takes only the weights it was built with"):
        load(store, plan_release.model_copy(update={"weights": swapped}))
    assert not fake.calls


def test_refuses_plans_of_another_tensorrt_before_any_read(
    store: WritableLocalStore, plan_release: Manifest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install_distribution(monkeypatch, tmp_path, "11.5.0.1")
    store.write_release(plan_release)
    shutil.rmtree(store.root / "blobs")
    with pytest.raises(NoEngineForTarget, match=f"plans of TensorRT {VERSION}, and this machine has 11.5.0.1"):
        load_release(store, plan_release.name, [CPU_TARGET], [], ColdStart())


def test_fetches_the_literals_of_plans(store: WritableLocalStore, plan_release: Manifest) -> None:
    fetched = {blob.sha256 for blob in select(plan_release, [CPU_TARGET], []).blobs()}
    for engine in plan_release.engines:
        assert engine.tensorrt is not None and engine.tensorrt.literals.sha256 in fetched
        assert engine.tensorrt.onnx.sha256 not in fetched, "a server does not use the graph"
