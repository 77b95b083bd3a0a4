"""Plans of a release: each is opened once, from verified bytes. Those of one stream share a workspace."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from engine_builder.stores.local import WritableLocalStore
from model.cold_start import ColdStart
from model.engines.tensorrt.libraries import TENSORRT_RTX
from model.engines.tensorrt.plans import Plans
from model.engines.tensorrt.runtime_caches import RuntimeCacheFolder
from model.errors import ConfigError, CorruptBlob, EngineError, OutOfDeviceMemory
from model.loading.alike import check_alike
from model.loading.load import Loaded
from model.loading.memory import check_memory, tensorrt_bytes
from model.loading.select import Selection, select
from model.loading.target import Target
from model.pipeline.components import COMPONENTS
from model.store.manifest import Blob, Bucket, EngineRecord, Manifest, Signature, Span, TensorRTPlan, TensorSpec
from tests.support import releases
from tests.support.deployments import deployed, load_release
from tests.support.fake_tensorrt import (
    RTX_VERSION,
    VERSION,
    Fake,
    affine_plan,
    install_distribution,
    install_fake,
)

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
def rtx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fake:
    install_distribution(monkeypatch, tmp_path, RTX_VERSION, TENSORRT_RTX)
    return install_fake(monkeypatch, TENSORRT_RTX)[0]


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
        "blob": releases.put_blob(store, affine_plan(name=component)),
        "constants": releases.put_blob(store, constants),
        "tensorrt": plan,
    }
    return releases.draft_release(store).engines[0].model_copy(update=entries | changes)


def test_opens_a_plan_once_for_all_of_its_engines(store: WritableLocalStore, fake: Fake) -> None:
    plans = Plans(store, CPU)
    records = engine_record(store, profile=0, batch=1), engine_record(store, profile=1, batch=4)
    one, four = (plans.open(record, WEIGHTS, "text") for record in records)
    assert fake.calls_of("deserialize") == [("deserialize", affine_plan(name="unet"))]
    x = torch.randn(4, 4)
    torch.testing.assert_close(four.run({"x": x})["y"], x * WEIGHTS["layer.weight"] + 0.5)
    torch.testing.assert_close(one.run({"x": x[:1]})["y"], x[:1] * WEIGHTS["layer.weight"] + 0.5)


def test_engines_of_one_stream_share_a_workspace(store: WritableLocalStore, fake: Fake) -> None:
    plans = Plans(store, CPU)
    names = ("text_encoder", "text_encoder_2", "unet", "refiner_unet", "vae_decoder")
    engines = [plans.open(engine_record(store, component=name), WEIGHTS, COMPONENTS[name].stream) for name in names]
    for engine in engines:
        engine.run({"x": torch.zeros(1, 4)})
    text, text_2, unet, refiner, vae = (address for _, address, _ in fake.calls_of("device_memory"))
    assert unet == refiner
    assert len({text, text_2, unet, vae}) == 4  # the text encoders run concurrently


def test_refuses_a_damaged_plan(store: WritableLocalStore, fake: Fake) -> None:
    broken = engine_record(store)
    path = store.root / "blobs" / "sha256" / broken.blob.sha256
    path.write_bytes(path.read_bytes()[:-1] + b"x")
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


def as_holder(engine: EngineRecord) -> EngineRecord:
    """Return the record as that of a plan of TensorRT-RTX that holds its weights and has not run."""
    assert engine.tensorrt is not None
    plan = engine.tensorrt.model_copy(update={"refit": "none", "workspace_bytes": None})
    changes = {"runtime": "tensorrt-rtx", "runtime_version": RTX_VERSION, "tensorrt": plan, "accuracy": None}
    return engine.model_copy(update=changes)


def test_memory_of_plans_is_weights_and_workspaces(store: WritableLocalStore) -> None:
    """One copy of the weights for each plan, and the largest workspace of each stream, if it is known."""
    engines = [engine_record(store, *one) for one in (("unet", 0), ("unet", 1), ("vae_decoder", 0))]
    engines.append(engine_record(store, "refiner_unet", 0))  # on the stream of the base's UNet
    assert tensorrt_bytes(select_engines(store, engines, 5000)) == 3 * 5000 + 1024 + 64
    assert tensorrt_bytes(select_engines(store, list(releases.draft_release(store).engines), 5000)) == 0
    holder = as_holder(engines[2])
    assert tensorrt_bytes(select_engines(store, [holder], 5000)) == 5000
    assert select_engines(store, [holder], 5000).streamed_weights() == []


def test_refuses_plans_that_do_not_fit_into_memory(store: WritableLocalStore) -> None:
    gpu, decoder, unet = torch.device("cuda"), engine_record(store, "vae_decoder", 0), engine_record(store, "unet", 1)
    gib = 2**30
    for engines, weights, needed in (
        ([decoder], gib // 2 - 32, gib),  # the weights, their copy in the plan, and a workspace
        ([as_holder(decoder)], gib, gib),  # weights inside of a plan are on the GPU once
        ([as_holder(decoder), unet], gib // 2, 3 * gib // 2 + 1024),
    ):
        selection = select_engines(store, engines, weights)
        check_memory(gpu, selection, free=needed)
        with pytest.raises(OutOfDeviceMemory, match="GiB free. .* or use a GPU with more memory"):
            check_memory(gpu, selection, free=needed - 1)


def test_plans_share_no_server(store: WritableLocalStore) -> None:
    """The weights of another release would leave the plan's own as they are."""
    selection = select_engines(store, [engine_record(store, "unet", 1)], 1000)
    check_alike([selection])
    with pytest.raises(ConfigError, match="cannot share a server. Plans of TensorRT have their own copies"):
        check_alike([selection, selection])


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


@pytest.fixture
def holder_release(plan_release: Manifest) -> Manifest:
    """The toy release with plans of TensorRT-RTX that hold its weights. It is not written to the store."""
    return plan_release.model_copy(update={"engines": tuple(as_holder(engine) for engine in plan_release.engines)})


def load(store: WritableLocalStore, manifest: Manifest, caches: RuntimeCacheFolder | None = None) -> Loaded:
    store.write_release(manifest)
    return load_release(store, deployed(manifest.name), [CPU_TARGET], ColdStart(), caches=caches)


def test_loads_plans_and_refits_them_from_the_weights(
    store: WritableLocalStore, plan_release: Manifest, fake: Fake
) -> None:
    loaded = load(store, plan_release)
    assert loaded.runtime == "tensorrt"
    assert len(fake.calls_of("deserialize")) == len(fake.calls_of("refit")) == len(plan_release.components)


def test_loads_plans_that_hold_weights_without_other_weights(
    store: WritableLocalStore, holder_release: Manifest, rtx: Fake
) -> None:
    weights = {blob.sha256 for record in holder_release.weights for blob in record.blobs}
    selection = select(holder_release, [CPU_TARGET], deployed())
    assert selection.weight_blobs() == [] and not weights & {blob.sha256 for blob in selection.blobs()}
    store.write_release(holder_release)
    for digest in weights:
        (store.root / "blobs" / "sha256" / digest).unlink()
    loaded = load_release(store, deployed(holder_release.name), [CPU_TARGET], ColdStart())
    blobs = {blob.sha256: blob.bytes for record in holder_release.weights for blob in record.blobs}
    assert loaded.runtime == "tensorrt-rtx" and loaded.weight_bytes == sum(blobs.values())
    assert len(rtx.calls_of("deserialize")) == len(holder_release.components)
    assert not rtx.calls_of("set_weights", "refit")


@pytest.fixture
def caches(tmp_path: Path) -> RuntimeCacheFolder:
    return RuntimeCacheFolder(tmp_path / "caches", "sm86")


def start(store: WritableLocalStore, manifest: Manifest, caches: RuntimeCacheFolder) -> None:
    """Load the release and keep the kernels that it compiled, as a server does."""
    plans = load_release(store, deployed(manifest.name), [CPU_TARGET], ColdStart(), caches=caches).plans
    assert plans is not None
    plans.keep_compiled_kernels()


def kept_kernels(holder_release: Manifest, caches: RuntimeCacheFolder) -> set[bytes]:
    return {caches.read(engine.blob.sha256) for engine in holder_release.engines}


def test_keeps_compiled_kernels_for_the_next_start(
    store: WritableLocalStore, holder_release: Manifest, rtx: Fake, caches: RuntimeCacheFolder
) -> None:
    """A later config may have more buckets, and the library may refuse a file."""
    load(store, holder_release, caches)
    assert kept_kernels(holder_release, caches) == {b""}, "not before the warm-up"
    for kernels, kept in ((b"+kernels", b"+kernels"), (b"+kernels", b"+kernels"), (b"+more", b"+kernels+more")):
        rtx.kernels = kernels
        start(store, holder_release, caches)
        assert kept_kernels(holder_release, caches) == {kept}
    loaded = [b"+kernels"] * 2 * len(holder_release.components)
    assert [data for _, data in rtx.calls_of("load_cache")] == loaded
    rtx.refuse = {"load_cache"}
    start(store, holder_release, caches)
    assert kept_kernels(holder_release, caches) == {b"+more"}


def test_refuses_weights_that_a_plan_was_not_built_with(
    store: WritableLocalStore, plan_release: Manifest, fake: Fake
) -> None:
    unet, other = (next(w for w in plan_release.weights if w.component == name) for name in ("unet", "vae_decoder"))
    swapped = tuple(w.model_copy(update={"blobs": other.blobs}) if w is unet else w for w in plan_release.weights)
    with pytest.raises(EngineError, match="The unet plan takes only the weights it was built with"):
        load(store, plan_release.model_copy(update={"weights": swapped}))
    assert not fake.calls


def test_fetches_the_literals_of_plans(store: WritableLocalStore, plan_release: Manifest) -> None:
    fetched = {blob.sha256 for blob in select(plan_release, [CPU_TARGET], deployed()).blobs()}
    for engine in plan_release.engines:
        assert engine.tensorrt is not None and engine.tensorrt.literals.sha256 in fetched
        assert engine.tensorrt.onnx.sha256 not in fetched, "a server does not use the graph"
