"""Few-step models: the samplers of Turbo and Lightning, and UNets that take the guidance scale as an input (LCM)."""

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionXLPipeline

from engine_builder.backends.onnx.export_graph import export_graph
from engine_builder.backends.onnx.graph_store import validate_graph
from engine_builder.checkpoints.folder import Checkpoint, CheckpointError
from engine_builder.checkpoints.release_settings import read_model_facts, read_noise_schedules, read_release_defaults
from engine_builder.networks.network import load_network
from model.api.resolve import resolve
from model.engines import signatures
from model.engines.engine import EngineSet
from model.loading.load import Loaded
from model.loading.served import read_defaults
from model.loading.target import Target
from model.pipeline import spec
from model.pipeline.guidance import embed_guidance
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.text_to_image import generate
from model.request_fields import GenerationRequest
from model.store.precision import FP16
from tests.engine_builder.helpers import edit_json
from tests.support import toy_sdxl
from tests.support.images import largest_difference
from tests.support.linear_networks import PLAIN, WIDTHS, Stub, linear_model, stub
from tests.support.parity import TOLERANCE, check_all_differ, check_images, image_of, load, params_of, publish
from tests.support.reference import Reference
from tests.support.repository import MODEL_FOLDER

GUIDANCE_WIDTH = 24  # of the guidance embedding of the distilled toy


@pytest.fixture(scope="module")
def distilled_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy with a UNet that embeds guidance, as distilled ones do, and an LCM's defaults."""
    folder = tmp_path_factory.mktemp("distilled") / "toy-lcm"
    toy_sdxl.write(folder, MODEL_FOLDER / "tokenizer", timestep_cond=GUIDANCE_WIDTH)
    defaults = {"scheduler": "LCM", "num_inference_steps": 4, "guidance_scale": 7.5}
    (folder / "defaults.json").write_text(json.dumps(defaults))
    return folder


@pytest.fixture(scope="module")
def distilled(distilled_folder: Path, target: Target, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """The distilled toy, built, published and loaded."""
    store = publish("toy-lcm", Checkpoint(distilled_folder), target, tmp_path_factory.mktemp("distilled"))
    return load(store, "toy-lcm/1")


def test_guidance_is_embedded_as_in_diffusers() -> None:
    embed = StableDiffusionXLPipeline.get_guidance_scale_embedding
    for width, scale in itertools.product((24, 25, 256), (0.0, 0.5, 1.0, 1.7, 7.3, 7.5, 30.0)):
        expected = embed(None, torch.tensor(scale - 1).repeat(1), embedding_dim=width)
        assert torch.equal(embed_guidance(np.array([scale]), width), expected), (width, scale)


def test_distilled_model_generates_the_image_of_diffusers(distilled: Loaded, distilled_folder: Path) -> None:
    requests = {
        (scheduler, guidance): params_of(
            distilled, scheduler=scheduler, guidance_scale=guidance, negative_prompt=negative, num_inference_steps=4
        )
        for scheduler in ("LCM", "Euler")
        for guidance, negative in ((0.0, None), (1.0, "a green triangle"), (2.5, None), (7.5, "a green triangle"))
    }
    check_images(distilled.model, Reference(distilled_folder), *requests.values())
    # Guidance changes the image, so the comparison would notice a wrong one.
    check_all_differ(distilled.model, requests["LCM", 1.0], requests["LCM", 7.5])
    check_all_differ(distilled.model, requests["Euler", 0.0], requests["Euler", 1.0])


def test_serves_the_defaults_of_the_model(distilled: Loaded) -> None:
    params = resolve(GenerationRequest(prompt="a circle"), distilled.served)
    assert (params.scheduler, params.num_inference_steps, params.guidance_scale) == ("LCM", 4, 7.5)


def distilled_linear_model() -> LoadedModel:
    """Return the linear model with a base that embeds guidance and a refiner that does not."""
    model = linear_model()
    signature = signatures.unet_time_signature(replace(WIDTHS, timestep_cond=GUIDANCE_WIDTH), "float32")
    model.engines[spec.UNET_TIME] = EngineSet([Stub(spec.UNET_TIME, signature)])
    return model


def test_only_the_refiner_runs_guided_steps() -> None:
    model = distilled_linear_model()
    _, _, [warning] = generate(model, [replace(PLAIN, negative_prompt="four", use_refiner=True)])
    assert warning.startswith("negative_prompt: this model's UNet") and "only the refiner does" in warning
    assert {len(step["sample"]) for step in stub(model, spec.UNET).seen} == {1}
    assert {len(step["sample"]) for step in stub(model, spec.REFINER_UNET).seen} == {2}


@pytest.mark.full
def test_time_network_with_guidance_exports_to_onnx(distilled_folder: Path) -> None:
    network = load_network(Checkpoint(distilled_folder), spec.UNET_TIME, FP16)
    assert validate_graph(network, export_graph(network)) <= 1e-2


# The entries of each published model's scheduler_config.json that differ from SDXL's.
SCHEDULER_CONFIGS: dict[str, dict[str, Any]] = {
    "Turbo": {"_class_name": "EulerAncestralDiscreteScheduler", "timestep_spacing": "trailing"},
    "Lightning": {
        "_class_name": "EulerDiscreteScheduler",
        "timestep_spacing": "trailing",
        "timestep_type": "discrete",
        "rescale_betas_zero_snr": False,
        "sigma_max": None,
        "sigma_min": None,
    },
}
SAMPLERS = {"Turbo": "Euler a", "Lightning": "Euler"}


def write_few_step_model(kind: str, folder: Path) -> Path:
    """Copy data/tiny-sdxl without its refiner, with the scheduler of such a model and a defaults.json."""
    shutil.copytree(MODEL_FOLDER, folder, ignore=shutil.ignore_patterns("refiner"))
    scheduler = folder / "scheduler" / "scheduler_config.json"
    scheduler.write_text(json.dumps(json.loads(scheduler.read_text()) | SCHEDULER_CONFIGS[kind]))
    class_name = json.loads(scheduler.read_text())["_class_name"]
    edit_json(folder / "model_index.json", scheduler=["diffusers", class_name])
    defaults = {"num_inference_steps": 4, "guidance_scale": 0.0, "width": 128, "height": 192}
    (folder / "defaults.json").write_text(json.dumps(defaults))
    return folder


@pytest.mark.parametrize("kind", SCHEDULER_CONFIGS)
def test_few_steps_generate_the_image_of_diffusers(kind: str, loaded: Loaded, tmp_path: Path) -> None:
    folder = write_few_step_model(kind, tmp_path / "model")
    base = Checkpoint(folder)
    settings = read_model_facts(base, None)
    model = replace(loaded.model, settings=settings, noise_schedules=read_noise_schedules(base, None), loops={})
    native = {"native_width": settings.native_width, "native_height": settings.native_height}
    served = replace(loaded.served, defaults=read_defaults(read_release_defaults(base, None)), **native)
    batch = []
    for steps in (1, 2, 4):
        request = GenerationRequest(prompt="a large red circle on a blue background", seed=7, num_inference_steps=steps)
        params = resolve(request, served)
        assert (params.scheduler, params.guidance_scale) == (SAMPLERS[kind], 0.0)
        assert (params.width, params.height) == (128, 192)
        assert generate(model, [params])[2] == []
        batch.append(params)
    check_images(model, Reference(folder), *batch)
    check_all_differ(model, *batch)
    # SDXL's own schedule, with leading timesteps, gives another image.
    leading = replace(model, noise_schedules=loaded.model.noise_schedules, loops={})
    for params in batch:
        assert largest_difference(image_of(model, params), image_of(leading, params)) > 5 * TOLERANCE


@pytest.mark.parametrize("size", [{"width": 100}, {"height": "512"}, {"height": 32}, {"width": True}], ids=str)
def test_refuses_an_invalid_native_size(size: dict[str, Any], tmp_path: Path) -> None:
    folder = write_few_step_model("Turbo", tmp_path / "model")
    (folder / "defaults.json").write_text(json.dumps(size))
    with pytest.raises(CheckpointError, match=f"defaults.json: {next(iter(size))} is .* a multiple of 32"):
        read_model_facts(Checkpoint(folder), None)
