"""Build, refit, run and capture with the real TensorRT. Skipped without it or a GPU; docs/tensorrt.md has the commands.

The tests were written against TensorRT's interface. They have not been run.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine_builder.backends.aot_inductor.compile import build_target, example_inputs
from engine_builder.backends.tensorrt.plan_options import PlanOptions
from engine_builder.building.build import build
from engine_builder.building.build_plan import BuildPlan, Size
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.releases.publish import publish
from engine_builder.stores.store import WritableStore, open_writable_store
from model.api.resolve import resolve
from model.cold_start import ColdStart
from model.engines.tensorrt.libraries import TENSORRT, installed_version
from model.engines.tensorrt.plans import Plans
from model.loading.load import Loaded
from model.loading.runtimes import list_targets, make_tensorrt_target
from model.loading.target import detect_targets
from model.pipeline.spec import UNET
from model.pipeline.text_to_image import generate
from model.request_fields import GenerationRequest
from model.store.manifest import Manifest
from model.store.precision import FP16
from model.weights.cache import WeightsCache
from tests.engine_builder.helpers import Tensors, edit_weights
from tests.support.deployments import deployed, load_release
from tests.support.reference import Reference
from tests.support.repository import MODEL_FOLDER, REPOSITORY


def _missing() -> str:
    if installed_version(TENSORRT) is None:
        return "TensorRT is not installed: see docs/tensorrt.md"
    return "" if torch.cuda.is_available() else "TensorRT needs an NVIDIA GPU that PyTorch can use"


pytestmark = [pytest.mark.tensorrt, pytest.mark.skipif(bool(_missing()), reason=_missing() or "-")]

SIZES = (Size(2, 256, 256), Size(4, 256, 256))


def plan_of(folder: Path = MODEL_FOLDER, name: str = "tiny-sdxl", options: PlanOptions | None = None) -> BuildPlan:
    options = options or PlanOptions()
    version = installed_version(TENSORRT)
    assert version is not None
    target = make_tensorrt_target(build_target(), TENSORRT.version_tag(version), options.compatibility)
    return BuildPlan(name, Checkpoint(folder), None, target, FP16, SIZES, tensorrt=options)


@pytest.fixture(scope="module")
def built(
    tmp_path_factory: pytest.TempPathFactory, show_progress: Callable[[str], None]
) -> tuple[WritableStore, Manifest]:
    """data/tiny-sdxl without its refiner, in fp16, published."""
    store = open_writable_store(tmp_path_factory.mktemp("tensorrt") / "store")
    started = time.perf_counter()
    build(
        plan_of(),
        store,
        lambda component, activity, done, steps: show_progress(f"{done}/{steps} {component}: {activity}"),
    )
    manifest, _ = publish(store, "tiny-sdxl")
    show_progress(f"built for {', '.join(manifest.targets)} in {time.perf_counter() - started:.0f} s")
    return store, manifest


@pytest.fixture(scope="module")
def served(built: tuple[WritableStore, Manifest]) -> Loaded:
    return load_release(built[0], deployed(built[1].name), list_targets("tensorrt", detect_targets()), ColdStart())


@pytest.fixture
def changed_folder(tmp_path: Path) -> Path:
    """data/tiny-sdxl with a slightly changed UNet."""
    folder = Path(shutil.copytree(MODEL_FOLDER, tmp_path / "tiny", ignore=shutil.ignore_patterns("refiner")))
    generator = torch.Generator().manual_seed(1)

    def add_noise(tensors: Tensors) -> None:
        for tensor in tensors.values():
            tensor.add_(0.02 * torch.randn(tensor.shape, generator=generator))

    edit_weights(folder / "unet", add_noise)
    return folder


def test_image_equals_diffusers(served: Loaded) -> None:
    """fp16 against fp32: the same image, not the same bits."""
    request = GenerationRequest(prompt="a large red circle on a blue background", seed=7, num_inference_steps=20)
    params = resolve(request, served.served)
    image = generate(served.model, [params])[0][0].astype(int)
    expected = Reference(MODEL_FOLDER).generate(params).astype(int)
    assert np.abs(image - expected).mean() <= 2
    assert served.runtime == "tensorrt"


def test_cuda_graph_captures_and_replays_an_engine(built: tuple[WritableStore, Manifest]) -> None:
    store, manifest = built
    device = torch.device("cuda", 0)
    record = next(e for e in manifest.engines if e.component == UNET and e.bucket.batch.max == 2)
    weights = next(w for w in manifest.weights if w.component == UNET)
    tensors = WeightsCache(store, device).load(weights)
    engine = Plans(store, device).open(record, tensors, stream="denoising")
    cases = [example_inputs(record.signature, 2, 256, 256, "cuda", seed) for seed in (1, 2)]
    with torch.inference_mode():
        expected = [{name: t.clone() for name, t in engine.run(case).items()} for case in cases]
        inputs = {name: tensor.clone() for name, tensor in cases[0].items()}
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                engine.run(inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outputs = engine.run(inputs)
        for case, reference in zip(cases, expected, strict=True):
            for name, tensor in case.items():
                inputs[name].copy_(tensor)
            graph.replay()
            torch.cuda.synchronize()
            for name, tensor in reference.items():
                torch.testing.assert_close(outputs[name], tensor, rtol=0, atol=0)


def test_refit_any_takes_another_models_weights(
    built: tuple[WritableStore, Manifest], changed_folder: Path, tmp_path: Path
) -> None:
    """The second model's engines are found, refit and compared with its own eager PyTorch, without a build."""
    identical = build(replace(plan_of(changed_folder, "changed")), built[0])
    assert "unet" in identical.compiled and "text_encoder" in identical.reused
    store, options = open_writable_store(tmp_path / "store"), PlanOptions(refit="any")
    first, second = (build(plan_of(*model, options), store) for model in ((MODEL_FOLDER, "a"), (changed_folder, "b")))
    assert set(first.compiled) == set(plan_of().components) and second.compiled == ()
    assert {e.key for e in first.draft.engines} == {e.key for e in second.draft.engines}


def test_require_raises_without_a_gpu(built: tuple[WritableStore, Manifest]) -> None:
    """Deserializing a plan there would be a segmentation fault."""
    script = (
        "from model.engines.tensorrt.libraries import TENSORRT, TensorRTUnavailable, require\n"
        "try:\n    require(TENSORRT)\n"
        "except TensorRTUnavailable as error:\n    print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0 and "needs an NVIDIA GPU" in result.stdout, result.stderr
