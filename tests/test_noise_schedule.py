"""Noise schedules are read from scheduler_config.json as diffusers reads it, stored in a manifest, or refused."""

import inspect
import json
from collections.abc import Callable
from typing import Any

import pytest
from diffusers import DDIMScheduler

from model.denoising.noise_schedule import REQUIRED, SUPPORTED, NoiseSchedule
from model.errors import ManifestError
from tests.support.schedulers import DIFFUSERS_SCHEDULERS
from training.architecture import SCHEDULER as SDXL


@pytest.mark.parametrize("beta_schedule", ["linear", "scaled_linear"])
@pytest.mark.parametrize("count", [101, 500, 1000])
def test_noise_schedule_has_the_bits_of_diffusers(beta_schedule: str, count: int) -> None:
    config = SDXL | {"beta_schedule": beta_schedule, "num_train_timesteps": count, "steps_offset": 0}
    expected = DDIMScheduler.from_config(config).alphas_cumprod
    config["original_inference_steps"] = 50
    assert NoiseSchedule.from_config(config).alphas_cumprod().tolist() == expected.double().tolist()


@pytest.mark.parametrize("beta_schedule", ["linear", "scaled_linear"])
@pytest.mark.parametrize("count", [101, 500, 1000])
def test_zero_terminal_snr_has_the_numbers_of_diffusers(beta_schedule: str, count: int) -> None:
    config = SDXL | {"beta_schedule": beta_schedule, "num_train_timesteps": count, "steps_offset": 0}
    config |= {"rescale_betas_zero_snr": True, "prediction_type": "v_prediction", "original_inference_steps": 50}
    expected = DDIMScheduler.from_config(config).alphas_cumprod
    actual = NoiseSchedule.from_config(config).alphas_cumprod()
    assert actual[-1] == 0
    # torch's square root differs from NumPy's in some last bits. Near the end, small numbers magnify that.
    assert actual[:-1] == pytest.approx(expected.double().numpy()[:-1], rel=1e-4)


@pytest.mark.parametrize(
    ("key", "value"),
    [
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
def test_refuses_an_unsupported_setting_by_name(key: str, value: Any) -> None:
    with pytest.raises(ManifestError, match=key):
        NoiseSchedule.from_config(SDXL | {key: value})


@pytest.mark.parametrize("key", REQUIRED)
def test_requires_settings_whose_defaults_differ(key: str) -> None:
    """The scheduler classes of diffusers have different defaults for them."""
    with pytest.raises(ManifestError, match=f"lacks {key}"):
        NoiseSchedule.from_config({k: v for k, v in SDXL.items() if k != key})


def test_knows_every_setting_of_the_schedulers_of_diffusers() -> None:
    """Each is read, refused, or without effect. One that may be omitted has the same default in every class."""
    without_effect = {
        # parameters of clip_sample and thresholding, which are refused
        "clip_sample_range", "dynamic_thresholding_ratio", "sample_max_value",
        # parameters of Karras sigmas for Euler, and of flow matching
        "sigma_min", "sigma_max", "flow_shift", "use_dynamic_shifting", "time_shift_type",
        # parameters of the last step, which is of first order because the last sigma is zero
        "lower_order_final", "euler_at_final",
    }  # fmt: skip
    fields = set(NoiseSchedule.__dataclass_fields__)
    defaults: dict[str, set[Any]] = {}
    for kind, _ in DIFFUSERS_SCHEDULERS.values():
        for key, parameter in inspect.signature(kind.__init__).parameters.items():
            if key not in ("self", *without_effect):
                defaults.setdefault(key, set()).add(parameter.default)
    assert set(defaults) == fields | set(SUPPORTED)
    differing = {key for key, values in defaults.items() if len(values) > 1}
    # Without timestep_spacing each sampler has its class's default.
    assert differing == {*REQUIRED, "timestep_spacing"}
    with_defaults = NoiseSchedule.from_config({key: SDXL[key] for key in REQUIRED}).to_dict()
    for key in fields - differing:
        assert {with_defaults.get(key, False)} == defaults[key], key
    for key in set(SUPPORTED) - differing:
        assert defaults[key] <= set(SUPPORTED[key]), key


def test_noise_schedule_is_unchanged_by_a_manifest() -> None:
    changed = SDXL | {"timestep_spacing": "trailing", "timestep_scaling": 5.0}
    zero_snr = SDXL | {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}
    for noise_schedule in map(NoiseSchedule.from_config, (SDXL, changed, zero_snr)):
        assert NoiseSchedule.from_dict(json.loads(json.dumps(noise_schedule.to_dict()))) == noise_schedule
    assert NoiseSchedule.from_config(SDXL) != NoiseSchedule.from_config(changed)


def test_older_releases_lack_zero_terminal_snr() -> None:
    values = NoiseSchedule.from_config(SDXL).to_dict()
    assert "rescale_betas_zero_snr" not in values  # older servers refuse unknown entries
    assert not NoiseSchedule.from_dict(values).rescale_betas_zero_snr


@pytest.mark.parametrize(
    ("damage", "key"),
    [
        (lambda d: d.pop("beta_end"), "beta_end"),
        (lambda d: d.update(sigma_data=0.5), "sigma_data"),
        (lambda d: d.update(steps_offset=None), "steps_offset"),
        (lambda d: d.update(prediction_type="sample"), "prediction_type"),
    ],
    ids=["missing", "unknown", "null", "unsupported"],
)
def test_refuses_a_damaged_noise_schedule(damage: Callable[[dict[str, Any]], Any], key: str) -> None:
    values = NoiseSchedule.from_config(SDXL).to_dict()
    damage(values)
    with pytest.raises(ManifestError, match=key):
        NoiseSchedule.from_dict(values)
