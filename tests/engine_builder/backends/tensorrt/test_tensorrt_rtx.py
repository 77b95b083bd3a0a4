"""Real plans of TensorRT-RTX, built without a GPU: build, publish, check, refuse.

No test deserializes a plan: without a GPU the library would end the process.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from typer.testing import CliRunner

from engine_builder.backends.aot_inductor.compile import dynamic_bucket, static_bucket
from engine_builder.backends.onnx.export_graph import export_graph, write_model
from engine_builder.backends.tensorrt.build_plans import build_plan
from engine_builder.backends.tensorrt.plan_options import PlanOptions
from engine_builder.backends.tensorrt.plan_settings import Profile, ShapeRange, optimization_profiles
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.networks.network import Network, load_network
from engine_builder.releases.publish import publish
from engine_builder.stores.store import WritableStore, open_writable_store
from model.cold_start import ColdStart
from model.engines.tensorrt.execution import Plan, PlanError
from model.engines.tensorrt.libraries import TENSORRT_RTX, TensorRTUnavailable, driver_cuda_version
from model.engines.tensorrt.plan_engine import TensorRTPlan
from model.loading.runtimes import list_targets, sort_fastest_first
from model.loading.select import select
from model.loading.target import Target, detect_targets
from model.store.manifest import EngineRecord, Manifest
from model.store.precision import FP16
from preheat.main import app
from tests.engine_builder.helpers import folder_of
from tests.support.components import BASE_COMPONENTS, REFINER_COMPONENTS
from tests.support.deployments import deployed, load_release
from tests.support.fake_tensorrt import RTX_VERSION, Fake
from tests.support.repository import MODEL_FOLDER, REPOSITORY
from tests.support.tensorrt_rtx import capabilities_of

SMALLEST = "unet_text"
OTHERS = [name for name in BASE_COMPONENTS + REFINER_COMPONENTS if name != SMALLEST]
OPTIONS = PlanOptions(refit="none", runtime="tensorrt-rtx")
CAPABILITIES = ["sm80", "sm86", "sm89"]
TARGETS = [f"cuda-{capability}-rtx1.7" for capability in CAPABILITIES]
Built = tuple[WritableStore, Manifest]
needs_no_driver = pytest.mark.skipif(
    driver_cuda_version() is not None,
    reason="shows the refusal without an NVIDIA driver: run it where there is none",
)


@pytest.fixture(autouse=True)
def never_deserialize(rtx: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("a plan is deserialized")

    monkeypatch.setattr(rtx.Runtime, "deserialize_cuda_engine", fail)


# -- plans of every component -------------------------------------------------------------------------------------


def dynamic_profile(network: Network) -> Profile:
    """Return a profile of batches 1 to 4 and sides to 512 pixels, tuned for a batch of 2 at 256x256."""
    has_size = any("height" in str(size) for spec in network.signature.inputs for size in spec.shape)
    sides = (256, 256) if has_size else (None, None)
    bucket = dynamic_bucket(network.multiple if has_size else None, max_batch=4, max_side=512)
    ends, tuned = optimization_profiles(network.signature, [bucket, static_bucket(2, *sides)])
    return {name: ShapeRange(shapes.smallest, tuned[name].tuned, shapes.largest) for name, shapes in ends.items()}


@pytest.mark.parametrize("component", [SMALLEST, *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)])
def test_builds_each_component_for_one_gpu_and_for_three(component: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint(MODEL_FOLDER / "refiner" if component in REFINER_COMPONENTS else MODEL_FOLDER)
    network = load_network(checkpoint, component, FP16)
    save_file({name: tensor.contiguous() for name, tensor in network.tensors().items()}, tmp_path / "weights")
    path = tmp_path / "model" / f"{component}.onnx"
    model = write_model(export_graph(network), [tmp_path / "weights"], path, link=True)
    profile = dynamic_profile(network)
    assert all(shapes.smallest < shapes.tuned < shapes.largest for shapes in profile.values())
    for capabilities in (*([name] for name in CAPABILITIES), CAPABILITIES):
        plan = build_plan(component, model, [profile], FP16, OPTIONS, None, capabilities).plan
        assert capabilities_of(plan) == capabilities
        assert len(plan) > (tmp_path / "weights").stat().st_size


# -- a release ----------------------------------------------------------------------------------------------------


def run(*arguments: str, status: int = 0) -> str:
    """Run a command of `preheat`. Returns its output in one line."""
    result = CliRunner().invoke(app, arguments, catch_exceptions=status == 1)
    assert result.exit_code == status, result.output
    return " ".join(result.output.split())


@pytest.fixture(scope="module")
def arguments(toy_folder: Path) -> list[str]:
    """The arguments of the build of `built`, without a store."""
    gpus = ["--gpu", "a10g", "--gpu", "A100", "--gpu", "l4"]
    return ["build", str(toy_folder), "--runtime", "tensorrt-rtx", *gpus, "--size", "64x64@1", "--size", "64x96@2"]


@pytest.fixture(scope="module")
def output() -> list[str]:
    """The output of the build of `built`."""
    return []


@pytest.fixture(scope="module")
def built(
    rtx: ModuleType,
    exported: tuple[WritableStore, Path],
    arguments: list[str],
    tmp_path_factory: pytest.TempPathFactory,
    output: list[str],
) -> Built:
    """The toy, built by `preheat build` for three GPUs in two sizes, and published."""
    folder = tmp_path_factory.mktemp("rtx") / "store"
    store = open_writable_store(shutil.copytree(folder_of(exported[0]), folder))
    output.append(run(*arguments, "--store", store.url))
    run("publish", "toy-sdxl", "--store", store.url)
    return store, store.read_release("toy-sdxl/1")


def engines_of(manifest: Manifest, component: str) -> list[EngineRecord]:
    return [engine for engine in manifest.engines if engine.component == component]


def test_build_lists_its_plans(built: Built, output: list[str]) -> None:
    assert f"for {', '.join(TARGETS)} in fp16; sizes @ batch: 64x64@1, 64x96@2" in output[0]
    assert "unet: building: Building engine 0%" in output[0]
    # The plans are listed once, not for each target.
    assert output[0].count("not run") == len(built[1].engines) // 3


def test_one_plan_of_a_component_serves_three_targets(built: Built) -> None:
    store, manifest = built
    assert manifest.targets == tuple(TARGETS) and set(manifest.components) == set(BASE_COMPONENTS)
    for component in BASE_COMPONENTS:
        engines = engines_of(manifest, component)
        [blob] = {engine.blob for engine in engines}
        assert len({engine.key for engine in engines}) == len(engines)
        assert capabilities_of(store.get(blob.sha256, blob.bytes).read_bytes()) == CAPABILITIES
        profiles = {
            target: [e.tensorrt.profile for e in engines if e.tensorrt and e.target == target] for target in TARGETS
        }
        assert all(sorted(numbers) == list(range(len(engines) // 3)) for numbers in profiles.values())
    unet_buckets = [engine.bucket for engine in engines_of(manifest, "unet") if engine.target == TARGETS[0]]
    assert {(b.batch.max, b.height.max, b.width.max) for b in unet_buckets if b.height and b.width} == {
        (1, 64, 64),
        (2, 96, 64),
    }


def test_manifest_states_what_is_known_of_plans_that_never_ran(built: Built) -> None:
    weights = {record.component: record.identity for record in built[1].weights}
    for engine in built[1].engines:
        assert (engine.runtime, engine.runtime_version) == ("tensorrt-rtx", RTX_VERSION)
        assert engine.accuracy is None and engine.benchmark is None
        assert engine.tensorrt is not None and engine.tensorrt.workspace_bytes is None
        assert engine.tensorrt.refit == "none" and engine.holds_weights
        assert engine.tensorrt.weights == weights[engine.component]


def test_building_again_builds_nothing(built: Built, arguments: list[str]) -> None:
    store, manifest = built
    again = run(*arguments, "--store", store.url)
    assert "writing weights" not in again, "the drafts of all targets are current"
    assert again.count("reused") == len(manifest.engines) // 3
    renamed = run(*arguments, "--store", store.url, "--name", "renamed")
    assert "writing weights" in renamed and "building:" not in renamed and "exporting" not in renamed
    assert publish(store, "toy-sdxl") == (manifest, False)


def test_verify_accepts_the_release_and_finds_a_damaged_plan(built: Built, tmp_path: Path) -> None:
    store = open_writable_store(shutil.copytree(folder_of(built[0]), tmp_path / "store"))
    run("verify", "toy-sdxl/1", "--store", store.url)
    path = folder_of(store) / "blobs" / "sha256" / engines_of(built[1], "unet")[0].blob.sha256
    with path.open("r+b") as file:
        file.seek(1000)
        file.write(b"damaged")
    assert "damaged" in run("verify", "toy-sdxl/1", "--store", store.url, status=1)


# -- a deployment -------------------------------------------------------------------------------------------------


def write_config(folder: Path, store: WritableStore, gpu: str, packages: bool = True) -> Path:
    """Write the config of a GPU with the release, the runtime and the packages of TensorRT-RTX."""
    config = yaml.safe_load((REPOSITORY / "truss" / "configs" / f"{gpu}.yaml").read_text())
    if packages:
        config["requirements"] += [f"tensorrt-rtx-cu13-{part}=={RTX_VERSION}" for part in ("libs", "bindings")]
    config["model_metadata"]["preheat"] |= {
        "store": store.url, "release": "toy-sdxl/1", "runtime": "tensorrt-rtx", "buckets": []
    }  # fmt: skip
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_config_of_each_gpu_is_accepted(built: Built, tmp_path: Path) -> None:
    for gpu, target in zip(("a100", "a10g", "l4"), TARGETS, strict=True):
        lines = run("check-config", str(write_config(tmp_path, built[0], gpu)))
        assert f"target {target}" in lines and "sizes 64x64@1, 64x96@2 " in lines


def test_config_of_an_h100_is_refused_in_one_sentence(built: Built, tmp_path: Path) -> None:
    lines = run("check-config", str(write_config(tmp_path, built[0], "h100")), status=1)
    assert (
        "refused TensorRT-RTX does not support the GPU h100 (compute capability 9.0); it supports 7.5, 8.0, 8.6, 8.9, "
        "12.0, 12.1. Choose a GPU with one of these, or the runtime aot_inductor or tensorrt." in lines
    )
    assert lines.count("refused") == 1


def test_config_without_the_library_is_refused(built: Built, tmp_path: Path) -> None:
    lines = run("check-config", str(write_config(tmp_path, built[0], "a10g", packages=False)), status=1)
    assert "chooses the runtime tensorrt-rtx for A10G and pins no TensorRT-RTX." in lines


@needs_no_driver
def test_machine_without_a_gpu_does_not_open_a_plan(built: Built) -> None:
    with pytest.raises(TensorRTUnavailable, match="TensorRT-RTX needs an NVIDIA GPU, and this machine has none"):
        list_targets("tensorrt-rtx", detect_targets())
    engine = engines_of(built[1], "unet")[0]
    plan = built[0].get(engine.blob.sha256, engine.blob.bytes).read_bytes()
    for device in ("cpu", "cuda"):
        with pytest.raises(TensorRTUnavailable, match="TensorRT-RTX needs an NVIDIA GPU, and PyTorch finds none here"):
            TensorRTPlan(TENSORRT_RTX, "unet", plan, RTX_VERSION, engine.signature, None, torch.device(device))


# -- the header of a plan -----------------------------------------------------------------------------------------

NOT_PLANS: dict[str, Callable[[bytes], bytes]] = {
    "8 bytes": lambda plan: plan[:8],
    "32 bytes": lambda plan: plan[:32],
    "empty": lambda plan: b"",
    "zeros": lambda plan: bytes(4096),
    "ZIP": lambda plan: b"PK\x03\x04" + bytes(4096),
    "other magic": lambda plan: b"ftrt" + plan[4:],
}


@pytest.fixture(scope="module")
def small_plan(built: Built) -> bytes:
    """The plan of a component."""
    engine = engines_of(built[1], SMALLEST)[0]
    return built[0].get(engine.blob.sha256, engine.blob.bytes).read_bytes()


def test_refuses_a_file_that_is_not_a_plan(small_plan: bytes, rtx: ModuleType) -> None:
    for name, change in NOT_PLANS.items():
        with pytest.raises(PlanError) as caught:
            Plan(rtx, bytearray(change(small_plan)), "unet")
        message = "The unet plan cannot be opened on this machine: malformed engine. Build and"
        assert str(caught.value).startswith(message), name


@needs_no_driver
def test_refuses_every_plan_without_a_gpu(small_plan: bytes, rtx: ModuleType) -> None:
    for plan in (small_plan, small_plan[:256]):  # cut after its header
        with pytest.raises(PlanError, match="cannot be opened on this machine: Error reading CUDA GPU properties"):
            Plan(rtx, bytearray(plan), "unet")


def test_stand_in_has_no_call_that_the_library_lacks(rtx: ModuleType) -> None:
    """The engines are tested with a fake, because they need a GPU."""
    fake = Fake(TENSORRT_RTX).module
    for name in ("Runtime", "Refitter", "ICudaEngine", "IExecutionContext", "IRuntimeConfig", "IRuntimeCache"):
        calls = {call for base in getattr(fake, name).__mro__[:-1] for call in vars(base) if not call.startswith("_")}
        assert calls <= set(dir(getattr(rtx, name))), name
    for name in ("DataType", "TensorIOMode", "TensorLocation", "ExecutionContextAllocationStrategy", "EngineValidity",
                 "DynamicShapesKernelSpecializationStrategy"):  # fmt: skip
        assert vars(getattr(fake, name)).keys() <= getattr(rtx, name).__members__.keys()
    diagnostics = {key: int(flag) for key, flag in rtx.EngineInvalidityDiagnostics.__members__.items()}
    assert fake.EngineInvalidityDiagnostics.__members__.items() <= diagnostics.items()


# -- with AOTInductor engines in one release ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixed(built: Built, toy_store: WritableStore, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The plans of `built` in fp16 and AOTInductor engines for this CPU in fp32, as one release."""
    folder = tmp_path_factory.mktemp("mixed") / "store"
    for store in (toy_store, built[0]):
        shutil.copytree(folder_of(store), folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("releases"))
    opened = open_writable_store(folder)
    return opened, publish(opened, "toy-sdxl")[0]


def test_cpu_serves_a_release_that_also_has_plans(mixed: Built, target: Target) -> None:
    loaded = load_release(mixed[0], deployed(mixed[1].name), list_targets("fastest", detect_targets()), ColdStart())
    assert (loaded.target, loaded.runtime) == (target.key, "aot_inductor")
    assert loaded.weight_bytes > 0


def test_gpu_serves_the_plans_of_a_release_with_cpu_engines(mixed: Built) -> None:
    gpu = Target("cuda", "a10g", "sm86", "torch2.11-cu130")
    for runtime in ("tensorrt-rtx", "fastest"):
        targets = list_targets(runtime, [gpu])  # type: ignore[arg-type]
        assert sort_fastest_first(mixed[1], targets, BASE_COMPONENTS)[0].key == TARGETS[1]
        selection = select(mixed[1], targets, deployed())
        assert selection.target == TARGETS[1] and selection.weight_blobs() == []
