"""TensorRT plans of a release: each is opened once, from checked bytes; those of one stream share a workspace."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from engine_builder.stores.local import WritableLocalStore
from model.cold_start import ColdStart
from model.engines.tensorrt import api as tensorrt_api
from model.engines.tensorrt.plans import Plans
from model.errors import CorruptBlob, EngineError, NoEngineForTarget, OutOfDeviceMemory
from model.loading.load import Loaded, load_release
from model.loading.memory import check_memory, tensorrt_bytes
from model.loading.select import Selection, select
from model.loading.target import Target
from model.pipeline.spec import SDXL
from model.store.manifest import Blob, Bucket, EngineRecord, Manifest, Signature, Span, TensorRTPlan, TensorSpec
from tests.support import releases
from tests.support.fake_tensorrt import VERSION, Fake, FakeCuda

SIGNATURE = Signature(
    inputs=(TensorSpec(name="x", dtype="float32", shape=("rows", 4)),),
    outputs=(TensorSpec(name="y", dtype="float32", shape=("rows", 4)),),
)
CPU = torch.device("cpu")
WEIGHTS = {"layer.weight": torch.tensor([1.0, 2.0, 3.0, 4.0])}


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake()
    monkeypatch.setitem(sys.modules, "tensorrt", made.module)
    monkeypatch.setattr(tensorrt_api, "require", lambda *_: VERSION)
    monkeypatch.setattr(tensorrt_api, "installed_version", lambda: VERSION)
    cuda = FakeCuda(made.record)
    for name in ("current_stream", "Event", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    return made


@pytest.fixture
def store(tmp_path: Path) -> WritableLocalStore:
    return WritableLocalStore(tmp_path / "store")


def record(
    store: WritableLocalStore, component: str = "unet", profile: int = 0, batch: int = 1, **changed: Any
) -> EngineRecord:
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
    return releases.draft(store).engines[0].model_copy(update=entries | changed)


def test_engines_of_one_plan_open_it_once(store: WritableLocalStore, fake: Fake) -> None:
    plans = Plans(store, CPU)
    one, four = (plans.open(record(store, profile=n, batch=batch), WEIGHTS, "text") for n, batch in ((0, 1), (1, 4)))
    assert fake.calls_of("deserialize") == [("deserialize", b"plan of unet")]
    x = torch.randn(4, 4)
    torch.testing.assert_close(four.run({"x": x})["y"], x * WEIGHTS["layer.weight"] + 0.5)
    torch.testing.assert_close(one.run({"x": x[:1]})["y"], x[:1] * WEIGHTS["layer.weight"] + 0.5)


def test_engines_of_one_stream_share_a_workspace(store: WritableLocalStore, fake: Fake) -> None:
    plans = Plans(store, CPU)
    names = ("text_encoder", "text_encoder_2", "unet", "refiner_unet", "vae_decoder")
    engines = [plans.open(record(store, component=name), WEIGHTS, SDXL[name].stream) for name in names]
    for engine in engines:
        engine.run({"x": torch.zeros(1, 4)})
    text, text_2, unet, refiner, vae = (address for _, address, _ in fake.calls_of("device_memory"))
    assert unet == refiner
    assert len({text, text_2, unet, vae}) == 4  # the text encoders run concurrently


def test_a_damaged_plan_is_never_opened(store: WritableLocalStore, fake: Fake) -> None:
    broken = record(store)
    path = store.root / "blobs" / "sha256" / broken.blob.sha256
    path.write_bytes(b"plan of unex")
    with pytest.raises(CorruptBlob):
        Plans(store, CPU).open(broken, WEIGHTS, "denoising")
    assert not fake.calls


def test_damaged_literals_are_refused(store: WritableLocalStore, fake: Fake) -> None:
    for data in (b"", b"no safetensors at all"):
        literals = releases.put_blob(store, data)
        plan = record(store).tensorrt
        assert plan is not None
        broken = record(store, tensorrt=plan.model_copy(update={"literals": literals}))
        with pytest.raises(EngineError, match="constants of the unet plan cannot be used"):
            Plans(store, CPU).open(broken, WEIGHTS, "denoising")


def selection(store: WritableLocalStore, engines: list[EngineRecord], weight_bytes: int) -> Selection:
    """One unit of `weight_bytes` of weights for each component of these engines."""
    manifest = releases.draft(store)
    by_component: dict[str, list[EngineRecord]] = {}
    for engine in engines:
        by_component.setdefault(engine.component, []).append(engine)
    [weights, *_] = manifest.weights
    blobs = {name: Blob(sha256=f"{number:064d}", bytes=weight_bytes) for number, name in enumerate(by_component)}
    records = {
        name: [weights.model_copy(update={"component": name, "blobs": (blobs[name],)})] * len(some)
        for name, some in by_component.items()
    }
    return Selection(manifest, "target", by_component, records, shared={})


def test_plans_take_copies_of_weights_and_workspaces(store: WritableLocalStore) -> None:
    engines = [record(store, "unet", 0), record(store, "unet", 1), record(store, "vae_decoder", 0)]
    engines.append(record(store, "refiner_unet", 0))  # on the stream of the base's UNet
    # Each plan's copy of the weights once, and each stream's largest workspace.
    assert tensorrt_bytes(selection(store, engines, 5000)) == 3 * 5000 + 1024 + 64
    assert tensorrt_bytes(selection(store, list(releases.draft(store).engines), 5000)) == 0


def test_refuses_what_does_not_fit_before_anything_is_fetched(
    store: WritableLocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**31))
    engine = record(store, "vae_decoder", 0)
    check_memory(torch.device("cuda"), selection(store, [engine], 2**29 - 32))
    with pytest.raises(OutOfDeviceMemory, match="1.0 GiB free. .* or use a GPU with more memory"):
        check_memory(torch.device("cuda"), selection(store, [engine], 2**29))


# -- a release ----------------------------------------------------------------------------------------------------


@pytest.fixture
def published(store: WritableLocalStore) -> Manifest:
    """The stand-in release with plans that take nothing but its weights."""
    draft = releases.draft(store)
    constants = json.dumps({"w": {"tensor": "b.bias", "dtype": "float32", "shape": [4]}}).encode()
    engines = []
    for engine in draft.engines:
        made = record(
            store, engine.component, constants=releases.put_blob(store, constants), signature=engine.signature
        )
        own = next(w for w in draft.weights if w.component == engine.component)
        assert made.tensorrt is not None
        plan = made.tensorrt.model_copy(update={"refit": "identical", "weights": own.identity})
        engines.append(
            made.model_copy(update={"tensorrt": plan, "bucket": engine.bucket, "target": "cuda-x-sm90-trt11.4"})
        )
    return draft.model_copy(update={"engines": tuple(engines)})


def load(store: WritableLocalStore, manifest: Manifest) -> Loaded:
    store.write_release(manifest)
    return load_release(store, manifest.name, [Target("cpu", "", "", "")], [], ColdStart())


def on_this_cpu(manifest: Manifest) -> Manifest:
    """The fake runs on the CPU's memory: file the plans under a target that loading takes for one."""
    return manifest.model_copy(
        update={"engines": tuple(e.model_copy(update={"target": "cpu"}) for e in manifest.engines)}
    )


def test_a_release_of_plans_is_loaded_and_refit_from_its_weights(
    store: WritableLocalStore, published: Manifest, fake: Fake
) -> None:
    loaded = load(store, on_this_cpu(published))
    assert loaded.runtime == "tensorrt"
    assert len(fake.calls_of("deserialize")) == len(fake.calls_of("refit")) == len(published.components)


def test_other_weights_than_a_plan_was_built_with_are_refused(
    store: WritableLocalStore, published: Manifest, fake: Fake
) -> None:
    unet, other = (next(w for w in published.weights if w.component == name) for name in ("unet", "vae_decoder"))
    swapped = tuple(w.model_copy(update={"blobs": other.blobs}) if w is unet else w for w in published.weights)
    with pytest.raises(EngineError, match="The unet plan takes only the weights it was built with"):
        load(store, on_this_cpu(published).model_copy(update={"weights": swapped}))
    assert not fake.calls


def test_plans_of_another_tensorrt_are_refused_before_anything_is_read(
    store: WritableLocalStore, published: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorrt_api, "installed_version", lambda: "11.5.0.1")
    monkeypatch.setattr(store, "fetch", lambda blobs: pytest.fail("fetched"))
    with pytest.raises(NoEngineForTarget, match=f"plans of TensorRT {VERSION}, and this machine has 11.5.0.1"):
        load(store, on_this_cpu(published))


def test_literals_are_fetched_with_a_release(store: WritableLocalStore, published: Manifest) -> None:
    manifest = on_this_cpu(published)
    fetched = {blob.sha256 for blob in select(manifest, [Target("cpu", "", "", "")], []).blobs()}
    for engine in published.engines:
        assert engine.tensorrt is not None and engine.tensorrt.literals.sha256 in fetched
        assert engine.tensorrt.onnx.sha256 not in fetched, "a server has no use for the graph"
