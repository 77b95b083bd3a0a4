"""Sampler schedules against the schedulers of diffusers that they replace, and their refusals.

The reference is a real scheduler, made by `from_config` from SDXL's own scheduler_config.json. It is called as the two
SDXL pipelines call it. `make test` runs a part of all combinations, which has each pair of values.
"""

import inspect
import re
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionXLImg2ImgPipeline

from model.denoising.noise_schedule import OWN_SPACING
from model.denoising.sampler_specs import SAMPLERS, SPECS, sampler_spec, skipped_steps
from model.denoising.samplers import SamplerSchedule, sampler_schedule, skip_steps, split_schedule
from model.errors import RequestRefused
from model.validation import MAX_STEPS
from tests.support import schedulers
from tests.support.schedulers import SHAPE, TOLERANCE, Inpainted, denoise, read_noise_schedule
from training.architecture import SCHEDULER as SDXL

# diffusers 0.42.1 calls np.array on tensors of a torch whose __array__ takes no `copy`: a defect of diffusers.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

REFINABLE = tuple(name for name in SAMPLERS if name != "Heun")
STEPS = (1, 2, 3, 14, 15, 30, 100)  # DPM++ solvers change below 15
SPACINGS = ("leading", "trailing", "linspace", OWN_SPACING)
PREDICTIONS = ("epsilon", "v_prediction")
every_third = pytest.mark.parametrize("interval", [3, pytest.param(1, marks=pytest.mark.full)], ids=["third", "all"])


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def max_steps(sampler: str) -> int:
    return 50 if sampler in ("LCM", "Heun") else 100


def entries(sampler: str, steps: int) -> int:
    """Runs of the UNet for that many steps."""
    return 2 * steps - 1 if sampler == "Heun" else steps


def config_with(spacing: str) -> dict[str, Any]:
    """Return SDXL's config with another spacing of timesteps, or without one."""
    without = {key: value for key, value in SDXL.items() if key != "timestep_spacing"}
    return without if spacing == OWN_SPACING else without | {"timestep_spacing": spacing}


def diffusers_scheduler(sampler: str, steps: int, config: dict[str, Any]) -> Any:
    kind, settings = schedulers.DIFFUSERS_SCHEDULERS[sampler]
    scheduler = kind.from_config(config, **settings)  # type: ignore[attr-defined]
    scheduler.set_timesteps(steps)
    return scheduler


def tolerance_of(schedule: SamplerSchedule) -> float:
    """Heun's second entry divides by the ratio of two sigmas, and rounding errors with it."""
    sigmas = schedule.noising[::2, 1]
    rounding = 2**-24 * float((sigmas[:-1] / sigmas[1:]).max(initial=1.0))
    return max(TOLERANCE, 2 * rounding) if schedule.sampler == "Heun" else TOLERANCE


@every_third
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_schedule_denoises_like_diffusers(sampler: str, interval: int) -> None:
    for steps, spacing, prediction in list(product(STEPS, SPACINGS, PREDICTIONS))[::interval]:
        if steps > max_steps(sampler):
            continue
        config = config_with(spacing) | {"prediction_type": prediction}
        scheduler = diffusers_scheduler(sampler, steps, config)
        schedule = sampler_schedule(sampler, steps, read_noise_schedule(config))
        assert len(schedule) == schedule.steps == entries(sampler, steps)
        assert schedule.timesteps.tolist() == scheduler.timesteps.tolist(), (steps, spacing)
        schedulers.check_denoises_alike(schedule, scheduler, tolerance_of(schedule))


SPLITS = [
    (0.8, "leading"), (0.5, "leading"), (0.95, "leading"), (0.01, "leading"), (0.8, "trailing"), (0.999, "trailing"),
    (0.5, "linspace"),
]  # fmt: skip


@every_third
@pytest.mark.parametrize("sampler", REFINABLE)
def test_base_and_refiner_denoise_like_the_two_pipelines(sampler: str, interval: int) -> None:
    for steps, (frac, spacing) in list(product((1, 2, 15, 20), SPLITS))[::interval]:
        config = config_with(spacing)
        noise_schedule = read_noise_schedule(config)
        base, refiner = split_schedule(sampler_schedule(sampler, steps, noise_schedule), noise_schedule, frac)
        latents, generator = schedulers.initial_latents(base.init_sigma)
        after_base = denoise(base, latents, generator)
        result = denoise(refiner, after_base, generator)

        scheduler = diffusers_scheduler(sampler, steps, config)
        cutoff = int(round(1000 - (frac * 1000)))  # StableDiffusionXLPipeline.__call__, 8.1
        timesteps = scheduler.timesteps[: sum(bool(t >= cutoff) for t in scheduler.timesteps)]
        if hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(0)
        latents, reference_generator = schedulers.initial_latents(scheduler.init_noise_sigma)
        expected = schedulers.denoise_with_diffusers(scheduler, timesteps, latents, reference_generator)
        assert base.timesteps.tolist() == timesteps.tolist(), (steps, frac, spacing)
        schedulers.assert_close(after_base, expected)

        scheduler = diffusers_scheduler(sampler, steps, config)
        pipeline = SimpleNamespace(scheduler=scheduler)
        timesteps, count = StableDiffusionXLImg2ImgPipeline.get_timesteps(pipeline, steps, 0.3, "cpu", frac)
        assert refiner.timesteps.tolist() == timesteps.tolist(), (steps, frac, spacing)
        assert len(refiner) == count == steps - len(base)
        schedulers.assert_close(
            result, schedulers.denoise_with_diffusers(scheduler, timesteps, expected, reference_generator)
        )
        assert torch.equal(generator.get_state(), reference_generator.get_state())


@every_third
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_starts_from_an_image_like_diffusers(sampler: str, interval: int) -> None:
    image, noise = torch.randn((2, *SHAPE), generator=torch.Generator().manual_seed(1))
    inpainted = Inpainted(image, noise, (torch.arange(5) > 2).float())
    for steps, strength, spacing in list(product((20, 33), (0.05, 0.3, 0.5, 0.9999, 1.0), SPACINGS))[::interval]:
        config = config_with(spacing)
        whole = sampler_schedule(sampler, steps, read_noise_schedule(config))
        schedule = skip_steps(whole, whole.order * skipped_steps(strength, steps))
        for kept in (None, inpainted):
            scheduler = diffusers_scheduler(sampler, steps, config)
            pipeline = SimpleNamespace(scheduler=scheduler)
            timesteps, count = StableDiffusionXLImg2ImgPipeline.get_timesteps(pipeline, steps, strength, "cpu")
            assert schedule.timesteps.tolist() == timesteps.tolist(), (steps, strength, spacing)
            assert schedule.steps == entries(sampler, count)
            expected = diffusers_scheduler(sampler, steps, config).add_noise(image, noise, timesteps[:1])
            start = float(schedule.noising[0, 0]) * image + float(schedule.noising[0, 1]) * noise
            schedulers.assert_close(start, expected)
            generator, reference_generator = (torch.Generator().manual_seed(2) for _ in range(2))
            result = denoise(schedule, start, generator, inpainted=kept)
            expected = schedulers.denoise_with_diffusers(scheduler, timesteps, expected, reference_generator, kept)
            schedulers.assert_close(result, expected)
            assert torch.equal(generator.get_state(), reference_generator.get_state())
        assert torch.equal(result[..., :3], image[..., :3])  # the last step keeps the image itself


def test_refuses_a_strength_that_leaves_no_step() -> None:
    for steps in range(1, MAX_STEPS + 1):
        too_small = (1 - 1e-9) / steps
        with pytest.raises(RequestRefused, match=f"of {steps} steps leaves no step. Set at least ") as refused:
            skipped_steps(too_small, steps, "masks.0.strength")
        assert refused.value.field == "masks.0.strength"
        accepted = float(str(refused.value).removesuffix(".").rpartition(" ")[2])
        assert skipped_steps(accepted, steps) == steps - 1


@every_third
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_timesteps_equal_those_of_diffusers_at_all_lengths(sampler: str, interval: int) -> None:
    # Karras timesteps are rounded, so a slightly wrong sigma gives another integer at one of these lengths.
    ignores_spacing = sampler == "LCM" or "Karras" in sampler
    spacings = SPACINGS[:1] if ignores_spacing else SPACINGS
    for spacing, betas in product(spacings, ({}, {"beta_schedule": "linear", "beta_start": 1e-4, "beta_end": 0.02})):
        config = config_with(spacing) | betas
        noise_schedule = read_noise_schedule(config)
        for steps in range(1, max_steps(sampler) + 1, interval):
            expected = diffusers_scheduler(sampler, steps, config).timesteps.tolist()
            actual = sampler_schedule(sampler, steps, noise_schedule).timesteps.tolist()
            if len(expected) != entries(sampler, steps):  # the deviation that the module documents
                assert (steps, spacing, expected.pop()) == (61, "trailing", -1)
            assert actual == expected, (steps, spacing)


@pytest.mark.parametrize(
    ("sampler", "changed"),
    [
        ("DDIM", {"set_alpha_to_one": True}),
        ("DDIM", {"steps_offset": 0}),
        ("LCM", {"original_inference_steps": 25}),
        ("LCM", {"timestep_scaling": 0.01}),
        ("Euler", {"steps_offset": 3, "num_train_timesteps": 700}),
        ("DPM++ 2M Karras", {"beta_schedule": "linear"}),
    ],
)
def test_every_field_of_the_noise_schedule_counts(sampler: str, changed: dict[str, Any]) -> None:
    plain = sampler_schedule(sampler, 8, read_noise_schedule(SDXL))
    schedule = sampler_schedule(sampler, 8, read_noise_schedule(SDXL | changed))
    schedulers.check_denoises_alike(schedule, diffusers_scheduler(sampler, 8, SDXL | changed))
    assert not np.array_equal(plain.coefficients, schedule.coefficients)


def test_either_part_may_be_empty() -> None:
    noise_schedule = read_noise_schedule(SDXL)
    for sampler in REFINABLE:
        whole = sampler_schedule(sampler, 4, noise_schedule)
        assert [len(part) for part in split_schedule(whole, noise_schedule, 1.0)] == [4, 0]
        for frac in (0.0, 0.0001):
            base, refiner = split_schedule(whole, noise_schedule, frac)
            assert not base and np.array_equal(refiner.coefficients, whole.coefficients)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_padding_does_not_change_the_latents(sampler: str) -> None:
    part = sampler_schedule(sampler, 6, read_noise_schedule(SDXL))
    unpadded, padded = (denoise(part, *schedulers.initial_latents(part.init_sigma), padding) for padding in (0, 9))
    assert torch.equal(padded, unpadded)


def test_shared_schedules_are_read_only() -> None:
    schedule = sampler_schedule("Euler", 3, read_noise_schedule(SDXL))
    assert sampler_schedule("Euler", 3, read_noise_schedule(SDXL)) is schedule
    for array in (schedule.timesteps, schedule.coefficients, schedule.draws_noise):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


ZERO_SNR = SDXL | {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}


@pytest.mark.parametrize("sampler", REFINABLE)
def test_zero_terminal_snr_denoises_like_diffusers(sampler: str) -> None:
    for spacing, steps in product(("trailing", "leading"), (1, 4, 30)):
        config = ZERO_SNR | {"timestep_spacing": spacing}
        schedule = sampler_schedule(sampler, steps, read_noise_schedule(config))
        # A step of diffusers' Euler subtracts numbers as large as the first latents.
        tolerance = max(TOLERANCE, 2 * 2**-24 * schedule.init_sigma)
        schedulers.check_denoises_alike(schedule, diffusers_scheduler(sampler, steps, config), tolerance)


def test_heun_at_zero_terminal_snr() -> None:
    """diffusers' Heun ignores the setting. Its scheduler gets the noise schedule of diffusers' Euler."""
    scheduler = diffusers_scheduler("Heun", 8, ZERO_SNR)
    scheduler.alphas_cumprod = diffusers_scheduler("Euler", 8, ZERO_SNR).alphas_cumprod
    scheduler.set_timesteps(8)
    schedulers.check_denoises_alike(sampler_schedule("Heun", 8, read_noise_schedule(ZERO_SNR)), scheduler)


SPACED: list[dict[str, Any]] = [
    {"timesteps": (999, 640, 333, 100, 7)},
    {"timesteps": (500,)},
    {"timesteps": (999, 1, 0)},
    {"sigmas": (14.5, 8.1, 3.0, 0.7, 0.05, 0.0)},
    {"sigmas": (10.0, 2.0, 0.3)},  # ends with noise
    {"sigmas": (120.0, 5.0, 0.001, 0.0)},  # beyond training
]


@pytest.mark.parametrize("spaced", SPACED, ids=str)
def test_explicit_steps_denoise_like_diffusers(spaced: dict[str, Any]) -> None:
    steps = len(spaced["timesteps"]) if "timesteps" in spaced else len(spaced["sigmas"]) - 1
    for sampler, prediction in product(("Euler", "DPM++ 2M", "LCM", "Heun"), PREDICTIONS):
        config = SDXL | {"prediction_type": prediction}
        noise_schedule = read_noise_schedule(config)
        if "sigmas" in spaced and sampler != "Euler":
            with pytest.raises(
                RequestRefused, match=f"{re.escape(sampler)} takes none. Set scheduler to one of Euler."
            ):
                sampler_schedule(sampler, steps, noise_schedule, **spaced)
            continue
        scheduler = diffusers_scheduler(sampler, 1, config)
        scheduler.set_timesteps(**{key: list(values) for key, values in spaced.items()})
        schedule = sampler_schedule(sampler, steps, noise_schedule, **spaced)
        schedulers.check_denoises_alike(schedule, scheduler, tolerance_of(schedule))


def test_explicit_steps_are_taken_by_the_samplers_of_diffusers_that_take_them() -> None:
    for sampler, (kind, settings) in schedulers.DIFFUSERS_SCHEDULERS.items():
        accepted = set(inspect.signature(kind.set_timesteps).parameters)  # type: ignore[attr-defined]
        # The class takes timesteps, but not together with Karras sigmas.
        takes = [field in accepted and "use_karras_sigmas" not in settings for field in ("timesteps", "sigmas")]
        assert takes == [field in SPECS[sampler].takes for field in ("timesteps", "sigmas")], sampler


def refuse(message: str, field: str, sampler: str, steps: int, frac: float | None = None, **options: Any) -> None:
    """Check that a schedule is refused. `frac`: that its division into base and refiner is."""
    noise_schedule = read_noise_schedule(SDXL | options.pop("config", {}))
    with pytest.raises(RequestRefused, match=message) as refused:
        schedule = sampler_schedule(sampler, steps, noise_schedule, **options)
        if frac is not None:
            split_schedule(schedule, noise_schedule, frac)
    assert refused.value.field == field


def test_refuses_what_a_sampler_cannot_do() -> None:
    for sampler in SAMPLERS:
        limit = max_steps(sampler)
        assert len(sampler_schedule(sampler, limit, read_noise_schedule(SDXL))) == entries(sampler, limit)
        for steps in (0, -1, limit + 1):
            refuse(f"{steps} is not 1 to {limit}", "num_inference_steps", sampler, steps)
    for frac in (-0.5, 1.01, float("nan")):
        refuse("denoising_frac", "denoising_frac", "Euler", 4, frac)
    refuse("Heun cannot be used with the refiner", "scheduler", "Heun", 4, 0.5)
    refuse("1000 is not 0 to 999", "timesteps", "Euler", 2, timesteps=(1000, 3))
    distilled = {"original_inference_steps": 20}
    assert len(sampler_schedule("LCM", 20, read_noise_schedule(SDXL | distilled))) == 20
    refuse("1 to 20", "num_inference_steps", "LCM", 21, config=distilled)


def test_accepts_public_names_and_class_names() -> None:
    assert [sampler_spec(name).name for name in SAMPLERS] == list(SAMPLERS)
    classes = {
        kind.__name__: name for name, (kind, settings) in schedulers.DIFFUSERS_SCHEDULERS.items() if not settings
    }
    assert {name: sampler_spec(name).name for name in classes} == classes
    assert sampler_schedule("DPMSolverMultistepScheduler", 4, read_noise_schedule(SDXL)).sampler == "DPM++ 2M"


@pytest.mark.parametrize("name", ["euler", "", "PNDMScheduler", "DPM++ 3M"])
def test_refusal_of_an_unknown_sampler_lists_the_known_ones(name: str) -> None:
    for known in (repr(name), *SAMPLERS, "LCMScheduler"):
        refuse(re.escape(known), "scheduler", name, 4)
