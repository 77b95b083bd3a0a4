"""Noise schedules have the numbers of diffusers, and are stored in a manifest."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from diffusers import DDIMScheduler

from model.denoising.noise_schedule import NoiseSchedule
from model.errors import ManifestError
from tests.support.schedulers import read_noise_schedule
from training.architecture import SCHEDULER as SDXL


@pytest.mark.parametrize("zero_snr", [False, True])
def test_noise_schedule_has_the_numbers_of_diffusers(zero_snr: bool) -> None:
    for beta_schedule, count in itertools.product(["linear", "scaled_linear"], [101, 500, 1000]):
        config = SDXL | {"beta_schedule": beta_schedule, "num_train_timesteps": count, "steps_offset": 0}
        config |= {"rescale_betas_zero_snr": True, "prediction_type": "v_prediction"} if zero_snr else {}
        expected = DDIMScheduler.from_config(config).alphas_cumprod.double().numpy()
        actual = read_noise_schedule(config | {"original_inference_steps": 50}).alphas_cumprod()
        if zero_snr:
            # torch's square root differs from NumPy's in some last bits. Near the end, small numbers magnify that.
            assert actual[-1] == 0 and actual[:-1] == pytest.approx(expected[:-1], rel=1e-4)
        else:
            assert actual.tolist() == expected.tolist()


def test_noise_schedule_is_unchanged_by_a_manifest() -> None:
    changed = SDXL | {"timestep_spacing": "trailing", "timestep_scaling": 5.0}
    zero_snr = SDXL | {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}
    for noise_schedule in map(read_noise_schedule, (SDXL, changed, zero_snr)):
        assert NoiseSchedule.from_dict(json.loads(json.dumps(noise_schedule.to_dict()))) == noise_schedule
    assert read_noise_schedule(SDXL) != read_noise_schedule(changed)


def test_older_releases_lack_zero_terminal_snr() -> None:
    values = read_noise_schedule(SDXL).to_dict()
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
    values = read_noise_schedule(SDXL).to_dict()
    damage(values)
    with pytest.raises(ManifestError, match=key):
        NoiseSchedule.from_dict(values)
