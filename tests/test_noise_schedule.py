"""What a scheduler_config.json says of the noise: read as diffusers reads it, kept in a manifest, and the refusals."""

import inspect
import json
from collections.abc import Callable
from typing import Any

import pytest
from diffusers import DDIMScheduler

from model.denoising.noise_schedule import REQUIRED, SUPPORTED, NoiseSchedule
from model.errors import ManifestError
from tests.support.schedulers import REFERENCES
from training.architecture import SCHEDULER as SDXL


@pytest.mark.parametrize("beta_schedule", ["linear", "scaled_linear"])
@pytest.mark.parametrize("count", [101, 500, 1000])
def test_the_noise_schedule_is_the_float32_one_bit_for_bit(beta_schedule: str, count: int) -> None:
    config = SDXL | {"beta_schedule": beta_schedule, "num_train_timesteps": count, "steps_offset": 0}
    theirs = DDIMScheduler.from_config(config).alphas_cumprod
    config["original_inference_steps"] = 50
    assert NoiseSchedule.from_config(config).alphas_cumprod().tolist() == theirs.double().tolist()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("prediction_type", "v_prediction"),
        ("prediction_type", "sample"),
        ("beta_schedule", "squaredcos_cap_v2"),
        ("timestep_spacing", "sideways"),
        ("trained_betas", [0.1, 0.2]),
        ("clip_sample", True),
        ("thresholding", True),
        ("rescale_betas_zero_snr", True),
        ("final_sigmas_type", "sigma_min"),
        ("interpolation_type", "log_linear"),
        ("timestep_type", "continuous"),
        ("use_karras_sigmas", True),
        ("use_exponential_sigmas", True),
        ("use_beta_sigmas", True),
        ("use_lu_lambdas", True),
        ("use_flow_sigmas", True),
        ("algorithm_type", "dpmsolver"),
        ("solver_order", 3),
        ("solver_type", "heun"),
        ("lambda_min_clipped", -5.1),
        ("variance_type", "learned_range"),
        ("num_train_timesteps", 100),
        ("num_train_timesteps", 1000.0),
        ("num_train_timesteps", 10**9),
        ("beta_start", 0.0),
        ("beta_end", 0.0008),
        ("beta_end", float("nan")),
        ("beta_end", "0.012"),
        ("steps_offset", 10),
        ("steps_offset", -1),
        ("steps_offset", True),
        ("set_alpha_to_one", 1),
        ("original_inference_steps", 0),
        ("timestep_scaling", float("inf")),
    ],
)
def test_a_setting_that_is_not_served_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ManifestError, match=key):
        NoiseSchedule.from_config(SDXL | {key: value})


@pytest.mark.parametrize("key", REQUIRED)
def test_a_setting_the_classes_disagree_on_must_be_written(key: str) -> None:
    with pytest.raises(ManifestError, match=f"lacks {key}"):
        NoiseSchedule.from_config({k: v for k, v in SDXL.items() if k != key})


def test_every_setting_of_the_reference_is_read_refused_or_known_to_change_nothing() -> None:
    """Also that a setting left out means the same to every class, or must be written."""
    idle = {
        # bounds of what is refused above
        "clip_sample_range", "dynamic_thresholding_ratio", "sample_max_value",
        # of Karras sigmas for Euler, and of flow matching
        "sigma_min", "sigma_max", "flow_shift", "use_dynamic_shifting", "time_shift_type",
        # both concern the last step, which is first order anyway where the last sigma is zero
        "lower_order_final", "euler_at_final",
    }  # fmt: skip
    fields = set(NoiseSchedule.__dataclass_fields__)
    defaults: dict[str, set[Any]] = {}
    for kind, _ in REFERENCES.values():
        for key, parameter in inspect.signature(kind.__init__).parameters.items():
            if key not in ("self", *idle):
                defaults.setdefault(key, set()).add(parameter.default)
    assert set(defaults) == fields | set(SUPPORTED)
    left_out = {key for key, values in defaults.items() if len(values) > 1}
    assert left_out == set(REQUIRED)
    filled = NoiseSchedule.from_config({key: SDXL[key] for key in REQUIRED}).to_dict()
    for key in fields - left_out:
        assert {filled[key]} == defaults[key], key
    for key in set(SUPPORTED) - left_out:
        assert defaults[key] <= set(SUPPORTED[key]), key


def test_a_noise_schedule_survives_a_manifest() -> None:
    changed = SDXL | {"timestep_spacing": "trailing", "timestep_scaling": 5.0}
    for noise_schedule in (NoiseSchedule.from_config(SDXL), NoiseSchedule.from_config(changed)):
        assert NoiseSchedule.from_dict(json.loads(json.dumps(noise_schedule.to_dict()))) == noise_schedule
    assert NoiseSchedule.from_config(SDXL) != NoiseSchedule.from_config(changed)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda d: d.pop("beta_end"), "beta_end"),
        (lambda d: d.update(sigma_data=0.5), "sigma_data"),
        (lambda d: d.update(steps_offset=None), "steps_offset"),
        (lambda d: d.update(prediction_type="v_prediction"), "prediction_type"),
    ],
)
def test_a_damaged_noise_schedule_is_refused(damage: Callable[[dict[str, Any]], Any], named: str) -> None:
    values = NoiseSchedule.from_config(SDXL).to_dict()
    damage(values)
    with pytest.raises(ManifestError, match=named):
        NoiseSchedule.from_dict(values)
