"""Every scheduler_config.json that diffusers writes is read as diffusers reads it; the rest is named or refused."""

import inspect
import itertools
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import diffusers.schedulers
import pytest
from diffusers.loaders.single_file_utils import SCHEDULER_DEFAULT_CONFIG

from engine_builder.building.compare_schedulers import MAX_DIFFERENCE, compare_sampler
from engine_builder.checkpoints.folder import Checkpoint, CheckpointError
from engine_builder.checkpoints.presets import PRESETS
from engine_builder.checkpoints.scheduler_config import (
    CLASS_KEYS,
    MODEL,
    OPTIONS,
    REPLACED_CLASSES,
    USUAL,
    WITHOUT_EFFECT,
    read_scheduler,
    read_scheduler_config,
)
from model.denoising.noise_schedule import NoiseSchedule
from model.denoising.sampler_specs import SAMPLERS, SPECS
from model.store.manifest import Family
from tests.engine_builder.helpers import edit_json
from tests.support.schedulers import DIFFUSERS_SCHEDULERS, EDM_SCHEDULERS, read_noise_schedule
from training.architecture import SCHEDULER as SDXL

# diffusers 0.42.1 gives tensors to NumPy in ways that are deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning", "ignore::FutureWarning")

FAMILIES: tuple[Family, ...] = ("sdxl", "sd")
NEEDS_TORCHSDE = "DPMSolverSDEScheduler"
CLASSES = (*CLASS_KEYS, "DDIMParallelScheduler", *(name for name in REPLACED_CLASSES if name != NEEDS_TORCHSDE))
SD_15 = {  # the first published scheduler_config.json of Stable Diffusion 1.5
    "_class_name": "PNDMScheduler", "_diffusers_version": "0.6.0", "beta_end": 0.012, "beta_schedule": "scaled_linear",
    "beta_start": 0.00085, "num_train_timesteps": 1000, "set_alpha_to_one": False, "skip_prk_steps": True,
    "steps_offset": 1, "trained_betas": None, "clip_sample": False,
}  # fmt: skip


def kind_of(name: str) -> Any:
    return getattr(diffusers.schedulers, name)


def saved(scheduler: Any) -> dict[str, Any]:
    """Return the entries of the file that diffusers saves."""
    entries: dict[str, Any] = json.loads(scheduler.to_json_string())
    return entries


@pytest.fixture(scope="module")
def defaults() -> dict[str, dict[str, Any]]:
    """The saved config of each class with its defaults."""
    return {name: saved(kind_of(name)()) for name in CLASSES}


@pytest.mark.parametrize("family", FAMILIES)
def test_reads_the_defaults_of_every_class(family: Family, defaults: dict[str, dict[str, Any]]) -> None:
    for name in CLASSES:
        assert_defaults(name, family, defaults)


def assert_defaults(name: str, family: Family, defaults: dict[str, dict[str, Any]]) -> None:
    read = read_scheduler_config(defaults[name], family)
    assert compare_sampler(read.config, read.schedule, read.sampler) < MAX_DIFFERENCE
    replaced = name in REPLACED_CLASSES
    # diffusers' SDXL pipelines keep the default of DDIM, which clips; those of Stable Diffusion do not.
    clips = name.startswith("DDIM") and family == "sdxl"
    assert len(read.warnings) == replaced or clips
    for warning in read.warnings:
        assert ("clip_sample true" if clips else name) in warning and f"use {read.sampler}" in warning


def test_class_name_alone_means_its_defaults(defaults: dict[str, dict[str, Any]]) -> None:
    """diffusers fills in what a file lacks."""
    for name in CLASSES:
        alone, full = (read_scheduler_config(entries, "sd") for entries in ({"_class_name": name}, defaults[name]))
        assert (alone.sampler, alone.warnings) == (full.sampler, full.warnings), name
        if isinstance(alone.schedule, NoiseSchedule) and isinstance(full.schedule, NoiseSchedule):
            assert alone.schedule.alphas_cumprod().tolist() == full.schedule.alphas_cumprod().tolist(), name
        else:
            assert alone.schedule == full.schedule, name


# The constructors of KDPM2 take a second each.
@pytest.mark.parametrize("name", [name for name in CLASSES if not name.startswith("KDPM2")])
def test_reads_what_a_class_makes_of_other_configs(name: str, defaults: dict[str, dict[str, Any]]) -> None:
    converted = {"_class_name": "EulerDiscreteScheduler"} | SCHEDULER_DEFAULT_CONFIG
    for other in (converted, SDXL, SD_15, *defaults.values()):
        try:
            config = saved(kind_of(name).from_config(other))
        except (ValueError, TypeError, NotImplementedError):  # diffusers cannot make one of the other
            assert other in defaults.values()
            continue
        for family in FAMILIES:
            read = read_scheduler_config(config, family)
        if other is converted:
            assert compare_sampler(read.config, read.schedule, read.sampler) < MAX_DIFFERENCE


def test_reads_the_sampler_that_diffusers_has_saved() -> None:
    for sampler, (kind, settings) in DIFFUSERS_SCHEDULERS.items():
        read = read_scheduler_config(saved(kind.from_config(SDXL, **settings)), "sdxl")
        assert (read.sampler, read.schedule, read.warnings) == (sampler, read_noise_schedule(SDXL), ())


def test_reads_the_sampler_of_each_edm_class() -> None:
    for sampler, (kind, settings) in EDM_SCHEDULERS.items():
        read = read_scheduler_config(saved(kind(**settings)), "sdxl")
        assert (read.sampler, read.warnings) == (sampler, ())


# A value of each key that differs from the default, which is refused, named in a warning, or has diffusers' images.
CHANGED: dict[str, tuple[Any, ...]] = {
    "num_train_timesteps": (500, 1500, 100, 10**9, 0, -1, 1000.0, "1000", None, True, math.nan),
    "beta_start": (0.001, 0.5, 0, -1.0, "0.001", None, math.nan, math.inf, [0.1] * 1000),
    "beta_end": (0.01, 1.0, 0.0001, "0.01", None, math.nan, {}),
    "beta_schedule": ("linear", "squaredcos_cap_v2", "sideways", None, 1),
    "trained_betas": ([0.1, 0.2] * 500, "x", {}),
    "prediction_type": ("v_prediction", "sample", "flow_prediction", None, 3),
    "timestep_spacing": ("trailing", "linspace", "default", "sideways", None, []),
    "steps_offset": (0, 2, 10, -1, 1.0, True, None, "1", 10**9),
    "set_alpha_to_one": (True, None, 1, "yes"),
    "rescale_betas_zero_snr": (True, None, 1, "yes"),
    "original_inference_steps": (25, 0, 10**9, None, "50"),
    "timestep_scaling": (5.0, 0.0, math.inf, None, "10"),
    "use_karras_sigmas": (True, None, 1, "yes"),
    "use_exponential_sigmas": (True, None, 1, "yes"),
    "use_beta_sigmas": (True, None, "yes"),
    "use_lu_lambdas": (True, None, "yes"),
    "use_flow_sigmas": (True, None, "yes"),
    "clip_sample": (True, None, 1, "yes"),
    "clip_sample_range": (2.0, None),
    "thresholding": (True, None, "yes"),
    "dynamic_thresholding_ratio": (0.5,),
    "sample_max_value": (2.0,),
    "interpolation_type": ("log_linear", "cubic", None),
    "timestep_type": ("continuous", "sideways", None),
    "final_sigmas_type": ("sigma_min", "one", None),
    "sigma_min": (0.01, 0.0, -1.0, "x", math.nan),
    "sigma_max": (50.0, 0.5, "x", math.inf),
    "sigma_data": (1.0, 0.0, None, "x"),
    "rho": (5.0, 0.0, None, "7"),
    "sigma_schedule": ("exponential", "sideways", None),
    "algorithm_type": ("sde-dpmsolver++", "dpmsolver", "sde-dpmsolver", "deis", "data_prediction", None),
    "solver_order": (1, 3, 4, 2.0, "2", None),
    "solver_type": ("heun", "logrho", "bh2", "sideways", None),
    "lower_order_final": (False,),
    "euler_at_final": (True,),
    "flow_shift": (3.0,),
    "lambda_min_clipped": (-5.1, "x", None),
    "variance_type": ("learned", "learned_range", "fixed_small", "sideways"),
    "use_dynamic_shifting": (True,),
    "time_shift_type": ("linear",),
}


def test_every_key_is_in_one_group() -> None:
    grouped = [*USUAL, *OPTIONS, *MODEL, *WITHOUT_EFFECT]
    assert sorted(grouped) == sorted(set().union(*CLASS_KEYS.values()))


@pytest.mark.parametrize("name", CLASS_KEYS)
def test_no_key_is_silently_wrong(name: str) -> None:
    """A key that diffusers adds to a class is missing from the tables, and fails this test."""
    keys = [key for key in inspect.signature(kind_of(name).__init__).parameters if key != "self"]
    assert sorted(CLASS_KEYS[name]) == sorted(keys)
    base = saved(kind_of(name).from_config({key: SDXL[key] for key in SDXL if key in keys}))
    for key in keys:
        for value in CHANGED[key]:
            try:
                read = read_scheduler_config(base | {key: value}, "sdxl")
            except CheckpointError as error:
                words = re.sub(r"^scheduler_config.json: ", "", str(error))
                assert re.search(rf"\b{key}\b", words) and error.remedy and len(words) < 400, words
                continue
            if not any(warning.startswith(f"{key} ") for warning in read.warnings):
                # diffusers 0.42.1 fails to add null to false. Older versions read it as false.
                config = base | ({} if value is None else {key: value})
                assert compare_sampler(config, read.schedule, read.sampler) < MAX_DIFFERENCE, (key, value)


SETTINGS: dict[str, dict[str, Any]] = {
    "v": {"timestep_spacing": "trailing", "prediction_type": "v_prediction"},
    "zero SNR": {"timestep_spacing": "trailing", "prediction_type": "v_prediction", "rescale_betas_zero_snr": True},
    "linear": {"timestep_spacing": "linspace", "beta_schedule": "linear", "beta_start": 0.0001, "beta_end": 0.02},
    "700": {"num_train_timesteps": 700, "steps_offset": 3, "set_alpha_to_one": True},
    "LCM": {"original_inference_steps": 25, "timestep_scaling": 5.0},
}


def test_options_are_those_of_diffusers() -> None:
    for sampler, (name, changed) in zip(SAMPLERS, itertools.cycle(SETTINGS.items()), strict=False):
        kind, settings = DIFFUSERS_SCHEDULERS[sampler]
        read = read_scheduler_config(SDXL | changed | settings | {"_class_name": kind.__name__}, "sdxl")
        assert read.sampler == sampler and not read.warnings, name
        assert compare_sampler(read.config, read.schedule, sampler) < MAX_DIFFERENCE, (sampler, name)


def test_each_sampler_is_diffusers_for_the_config_of_each_other_one() -> None:
    """The config of a sampler with Karras' spacing does not give it to the others."""
    for own, spec in SPECS.items():
        name, options = spec.diffusers
        read = read_scheduler_config(SDXL | {"_class_name": name, **options}, "sdxl")
        assert read.sampler == own
        for sampler in SPECS:
            assert compare_sampler(read.config, read.schedule, sampler) < MAX_DIFFERENCE, (own, sampler)


def test_keys_of_other_classes_are_ignored() -> None:
    """diffusers' ancestral Euler has no Karras sigmas, and clips nothing."""
    others = {"use_karras_sigmas": True, "clip_sample": True, "solver_order": 3, "algorithm_type": "data_prediction"}
    read = read_scheduler_config(SDXL | others | {"_class_name": "EulerAncestralDiscreteScheduler"}, "sdxl")
    assert (read.sampler, read.schedule, read.warnings) == ("Euler a", read_noise_schedule(SDXL), ())


def test_stable_diffusion_changes_what_diffusers_changes() -> None:
    """Its pipelines set steps_offset to 1 and clip_sample to false."""
    for changed in ({"steps_offset": 0}, {"steps_offset": 7}, {"clip_sample": True}, {"_class_name": "DDIMScheduler"}):
        read = read_scheduler_config(SD_15 | changed, "sd")
        assert read.schedule == read_scheduler_config(SD_15, "sd").schedule
        assert len(read.warnings) == (read.sampler == "Euler")  # in place of PNDM
    assert read_noise_schedule(SDXL | {"steps_offset": 0}).steps_offset == 0  # SDXL's do not


@pytest.mark.parametrize(
    ("name", "changed", "sampler"),
    [
        ("UniPCMultistepScheduler", {}, "DPM++ 2M"),
        ("UniPCMultistepScheduler", {"use_karras_sigmas": True}, "DPM++ 2M Karras"),
        ("KDPM2DiscreteScheduler", {}, "Heun"),
        ("KDPM2AncestralDiscreteScheduler", {}, "Euler a"),
        ("DDPMScheduler", {"clip_sample": True}, "Euler a"),
        ("TCDScheduler", {}, "DDIM"),
        ("SASolverScheduler", {}, "DPM++ 2M Karras"),
        (NEEDS_TORCHSDE, {}, "DPM++ 2M SDE Karras"),
        ("EulerDiscreteScheduler", {"use_karras_sigmas": True}, "Euler"),
        ("DPMSolverMultistepScheduler", {"solver_order": 1}, "DDIM"),
        ("DPMSolverMultistepScheduler", {"solver_order": 3}, "DPM++ 2M"),
        ("DPMSolverMultistepScheduler", {"solver_type": "heun"}, "DPM++ 2M"),
        ("DPMSolverMultistepScheduler", {"use_lu_lambdas": True}, "DPM++ 2M Karras"),
        ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}, "Euler a"),
        ("EDMDPMSolverMultistepScheduler", {"sigma_schedule": "exponential"}, "DPM++ 2M Karras"),
    ],
)
def test_default_sampler_is_the_nearest(name: str, changed: dict[str, Any], sampler: str) -> None:
    """As docs/log/correctness.md measured it. The warning says what requests without `scheduler` use."""
    read = read_scheduler_config(SDXL | changed | {"_class_name": name}, "sdxl")
    [warning] = read.warnings
    assert read.sampler == sampler and f"Requests without `scheduler` use {sampler}" in warning
    assert name in warning and "defaults.json" in warning
    if name not in REPLACED_CLASSES:
        [(key, value)] = changed.items()
        assert warning.startswith(f"{key} {json.dumps(value)} is not served for {name}. ")


def test_refuses_an_unknown_class_by_name() -> None:
    names = ("FlowMatchEulerDiscreteScheduler", "IPNDMScheduler", "CosineDPMSolverMultistepScheduler", "", None, 3, [])
    for name in names:
        with pytest.raises(CheckpointError, match=r"_class_name is .*EulerDiscreteScheduler.*UniPC") as refused:
            read_scheduler_config(SDXL | {"_class_name": name}, "sdxl")
        assert repr(name) in str(refused.value)


def test_remedy_names_the_common_value() -> None:
    for key, value, remedy in (
        ("beta_start", None, "commonly 0.00085."),
        ("num_train_timesteps", 0, "commonly 1000."),
        ("prediction_type", "sample", "commonly epsilon, or v_prediction."),
        ("solver_order", 7, "Set 2."),
        ("trained_betas", [0.1], "Set null if the model was trained without it."),
    ):
        config = SDXL | {"_class_name": "DPMSolverMultistepScheduler", key: value}
        with pytest.raises(CheckpointError, match=rf"/x/s.json: {key} is .*{re.escape(remedy)}$"):
            read_scheduler_config(config, "sdxl", "/x/s.json")


def test_comparison_finds_another_schedule() -> None:
    for sampler, wrong in (("Euler", {"steps_offset": 0}), ("DPM++ 2M Karras", {"beta_schedule": "linear"})):
        assert compare_sampler(SDXL, read_noise_schedule(SDXL), sampler) < MAX_DIFFERENCE
        assert compare_sampler(SDXL, read_noise_schedule(SDXL | wrong), sampler) > MAX_DIFFERENCE


def test_class_is_that_of_the_index(toy_folder: Path, tmp_path: Path) -> None:
    """As in diffusers, which reads the entries of the file with the class of model_index.json."""
    folder = Path(shutil.copytree(toy_folder, tmp_path / "model"))
    edit_json(folder / "model_index.json", scheduler=["diffusers", "DDIMScheduler"])
    read = read_scheduler(Checkpoint(folder))
    assert read.sampler == "DDIM"
    [warning] = read.warnings
    assert "'EulerDiscreteScheduler' and model_index.json 'DDIMScheduler'. The second one is used" in warning
    assert read_scheduler(Checkpoint(folder, preset=PRESETS["lightning-4"])).warnings == ()
