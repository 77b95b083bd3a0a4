"""A model in the EDM formulation whose VAE normalizes latents, like Playground V2.5."""

import itertools
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine_builder.checkpoints.folder import Checkpoint, CheckpointError
from engine_builder.checkpoints.release_settings import read_model_facts, read_noise_schedules, read_release_defaults
from model.denoising.edm_schedule import EdmSchedule, schedule_from_dict
from model.denoising.sampler_specs import SAMPLERS
from model.denoising.samplers import sampler_schedule, served_samplers, split_schedule
from model.errors import ManifestError, RequestRefused
from model.loading.load import Loaded
from model.loading.target import Target
from model.pipeline.text_to_image import generate
from model.store.manifest import ModelFacts
from tests.engine_builder.helpers import edit_json
from tests.support import toy_sdxl
from tests.support.images import largest_difference
from tests.support.parity import TOLERANCE, check_images, image_of, load, params_of, picture, publish
from tests.support.reference import Reference
from tests.support.repository import MODEL_FOLDER
from tests.support.schedulers import EDM_SCHEDULERS, check_denoises_alike, read_edm_schedule

CASES = 6
EDM_SAMPLERS = served_samplers(EdmSchedule())
# Of playgroundai/playground-v2.5-1024px-aesthetic.
SCHEDULER: dict[str, Any] = {
    "_class_name": "EDMDPMSolverMultistepScheduler", "algorithm_type": "dpmsolver++", "euler_at_final": False,
    "dynamic_thresholding_ratio": 0.995, "final_sigmas_type": "zero", "lower_order_final": True, "rho": 7.0,
    "num_train_timesteps": 1000, "prediction_type": "epsilon", "sample_max_value": 1.0, "sigma_data": 0.5,
    "sigma_max": 80.0, "sigma_min": 0.002, "solver_order": 2, "solver_type": "midpoint", "thresholding": False,
}  # fmt: skip
NORMALIZATION = {"latents_mean": [-0.6, 0.9, -0.4, 1.5], "latents_std": [2.5, 1.9, 2.2, 1.4]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy with Playground V2.5's scheduler and a VAE that normalizes latents."""
    root = toy_sdxl.write(tmp_path_factory.mktemp("edm") / "toy-edm", MODEL_FOLDER / "tokenizer")
    (root / "scheduler" / "scheduler_config.json").write_text(json.dumps(SCHEDULER))
    edit_json(root / "vae" / "config.json", **NORMALIZATION)
    edit_json(root / "model_index.json", scheduler=["diffusers", "EDMDPMSolverMultistepScheduler"])
    return root


@pytest.fixture(scope="module")
def edm(folder: Path, target: Target, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load(publish("toy-edm", Checkpoint(folder), target, tmp_path_factory.mktemp("edm")), "toy-edm/1")


def test_image_is_that_of_diffusers(edm: Loaded, folder: Path) -> None:
    reference, generator = Reference(folder), random.Random(0)
    for number in range(CASES):
        params = params_of(
            edm,
            scheduler=EDM_SAMPLERS[number % len(EDM_SAMPLERS)],
            num_inference_steps=generator.randint(2, 16),
            guidance_scale=generator.choice((1.0, 3.0, 5.0)),
            negative_prompt=generator.choice((None, "", "a green triangle")),
            width=generator.choice((64, 96)),
            seed=generator.randrange(2**32),
        )
        check_images(edm.model, reference, params)
    for sampler in EDM_SAMPLERS:
        params = params_of(edm, scheduler=sampler, num_inference_steps=10, image=picture(0))
        check_images(edm.model, reference, replace(params, strength=0.5))


def test_normalization_changes_the_image(edm: Loaded) -> None:
    """So the comparisons above can fail."""
    params = params_of(edm, num_inference_steps=6)
    plain = replace(edm.model, settings=edm.model.settings.model_copy(update=dict.fromkeys(NORMALIZATION)), loops={})
    assert largest_difference(image_of(edm.model, params), image_of(plain, params)) > 5 * TOLERANCE


@pytest.mark.parametrize("sampler", EDM_SAMPLERS)
def test_schedule_denoises_like_diffusers(sampler: str) -> None:
    changes: list[dict[str, Any]] = [{}, {"prediction_type": "v_prediction", "sigma_data": 1.0}, {"rho": 3.0}]
    for steps, changed in itertools.product((1, 2, 3, 14, 15, 30, 100), changes):
        config = SCHEDULER | changed
        kind, settings = EDM_SCHEDULERS[sampler]
        scheduler: Any = kind.from_config(config, **settings)  # type: ignore[attr-defined]
        scheduler.set_timesteps(steps)
        schedule = sampler_schedule(sampler, steps, read_edm_schedule(config))
        # Both sides round numbers as large as the initial latents, and the result is a hundredth of these.
        check_denoises_alike(schedule, scheduler, 1e-6 * schedule.init_sigma, same_noise=sampler != "Euler")


def test_refuses_other_samplers_by_name(edm: Loaded) -> None:
    for sampler in set(SAMPLERS) - set(EDM_SAMPLERS):
        with pytest.raises(RequestRefused, match="EDM formulation. Set one of Euler, DPM") as refused:
            generate(edm.model, [params_of(edm, scheduler=sampler)])
        assert refused.value.field == "scheduler"


def test_release_has_the_facts_of_the_model(edm: Loaded) -> None:
    assert edm.served.defaults.scheduler == "DPM++ 2M Karras"
    settings = edm.model.settings
    assert (list(settings.latents_mean or ()), list(settings.latents_std or ())) == tuple(NORMALIZATION.values())
    assert edm.model.noise_schedules["base"] == EdmSchedule()


def test_schedule_is_unchanged_by_a_manifest() -> None:
    schedule = read_edm_schedule(SCHEDULER | {"sigma_data": 1.0})
    assert schedule_from_dict(json.loads(json.dumps(schedule.to_dict()))) == schedule
    for damage in ({"sigma_max": None}, {"formulation": "other"}, {"unknown": 1}, {"sigma_data": float("nan")}):
        with pytest.raises(ManifestError, match="noise schedule"):
            schedule_from_dict(schedule.to_dict() | damage)
    with pytest.raises(RequestRefused, match="has no refiner"):
        split_schedule(sampler_schedule("Euler", 4, schedule), schedule, 0.5)


def test_manifest_without_normalization_has_no_entry_of_it() -> None:
    """So older servers read it."""
    plain = read_model_facts(Checkpoint(MODEL_FOLDER), None)
    entries = plain.model_dump(mode="json")
    assert not set(NORMALIZATION) & set(entries)
    normalized = entries | NORMALIZATION
    assert ModelFacts.model_validate(normalized).latents_std == tuple(NORMALIZATION["latents_std"])
    for damage in ({"latents_std": None}, {"latents_mean": [0.0]}, {"latents_std": [1.0, 1.0, 0.0, 1.0]}):
        with pytest.raises(ValueError, match="latents"):
            ModelFacts.model_validate(normalized | damage)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"latents_std": None}, "latents_std is None"),
        ({"latents_mean": [0.0]}, r"latents_mean is \[0.0\]"),
        ({"latents_mean": ["0"] * 4}, "latents_mean is"),
        ({"latents_std": [1.0, 1.0, 0.0, 1.0]}, "latents_std is"),
    ],
)
def test_refuses_an_invalid_normalization(entries: dict[str, Any], words: str, folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    edit_json(copy / "vae" / "config.json", **entries)
    with pytest.raises(CheckpointError, match=words):
        read_model_facts(Checkpoint(copy), None)


def test_refuses_what_is_not_served(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="EDM formulation, which has no refiner"):
        read_noise_schedules(Checkpoint(folder), Checkpoint(MODEL_FOLDER / "refiner"))
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    (copy / "defaults.json").write_text('{"scheduler": "DDIM"}')
    with pytest.raises(CheckpointError, match="scheduler: 'DDIM' is not served by a model in the EDM formulation"):
        read_release_defaults(Checkpoint(copy), None)
