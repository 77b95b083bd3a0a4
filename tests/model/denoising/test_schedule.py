"""Sampler schedules against the schedulers of diffusers that they replace, and their refusals.

The reference is a real scheduler, made by `from_config` from SDXL's own scheduler_config.json. It is called as the two
SDXL pipelines call it. The network is a function that both sides call.
"""

import inspect
import re
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionXLImg2ImgPipeline

from model.denoising.noise_schedule import OWN_SPACING
from model.denoising.sampler_names import (
    SAMPLERS,
    TAKE_SIGMAS,
    TAKE_TIMESTEPS,
    sampler_name,
    skipped_steps,
)
from model.denoising.samplers import (
    COEFFICIENTS,
    KNOWN_COEFFICIENTS,
    SamplerSchedule,
    pad_schedules,
    sampler_schedule,
    skip_steps,
    split_schedule,
)
from model.errors import RequestRefused
from model.validation import MAX_STEPS
from tests.support.schedulers import DIFFUSERS_SCHEDULERS, read_noise_schedule
from training.architecture import SCHEDULER as SDXL

# diffusers 0.42.1 calls np.array on tensors of a torch whose __array__ takes no `copy`: a defect of diffusers.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

REFINABLE = tuple(name for name in SAMPLERS if name != "Heun")
STEPS = (1, 2, 3, 14, 15, 30, 100)  # DPM++ solvers change below 15
SPACINGS = ("leading", "trailing", "linspace", OWN_SPACING)
PREDICTIONS = ("epsilon", "v_prediction")
SHAPE = (1, 4, 3, 5)
TOLERANCE = 1e-5  # relative to the largest latent; both sides are float32


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def max_steps(sampler: str) -> int:
    return 50 if sampler in ("LCM", "Heun") else 100


def pairs(samplers: tuple[str, ...] = SAMPLERS, steps: tuple[int, ...] = STEPS) -> list[tuple[str, int]]:
    """Samplers with numbers of steps that they accept."""
    return [(name, n) for name in samplers for n in steps if n <= max_steps(name)]


def entries(sampler: str, steps: int) -> int:
    """Runs of the UNet for that many steps."""
    return 2 * steps - 1 if sampler == "Heun" else steps


def config_with(spacing: str) -> dict[str, Any]:
    """Return SDXL's config with another spacing of timesteps, or without one."""
    without = {key: value for key, value in SDXL.items() if key != "timestep_spacing"}
    return without if spacing == OWN_SPACING else without | {"timestep_spacing": spacing}


def diffusers_scheduler(sampler: str, steps: int, config: dict[str, Any]) -> Any:
    kind, settings = DIFFUSERS_SCHEDULERS[sampler]
    scheduler = kind.from_config(config, **settings)
    scheduler.set_timesteps(steps)
    return scheduler


def predict_noise(model_input: torch.Tensor, timestep: float) -> torch.Tensor:
    """A prediction that depends on both arguments, differently at each position."""
    tilt = torch.linspace(0.5, 1.5, model_input.numel()).reshape(SHAPE)
    return 0.3 * model_input * tilt + 0.2 * float(np.sin(timestep / 7)) * tilt.flip(-1)


class Inpainted(NamedTuple):
    """The latents and noise of an image that is kept where the mask is 0."""

    image: torch.Tensor
    noise: torch.Tensor
    mask: torch.Tensor


def denoise(
    schedule: SamplerSchedule,
    latents: torch.Tensor,
    generator: torch.Generator,
    padding: int = 0,
    inpainted: Inpainted | None = None,
) -> torch.Tensor:
    """Run the steps of the device's loop for one image, in float32, then `padding` further ones."""
    timesteps, coefficients = pad_schedules([schedule], schedule.steps + padding)
    previous, noise = torch.zeros(SHAPE), torch.zeros(SHAPE)
    for i, step in enumerate(torch.from_numpy(coefficients[0])):
        c_in, a, b, x_coef, denoised_coef, prev_coef, noise_coef, known_coef, known_noise_coef = step
        eps = predict_noise(c_in * latents, timesteps[0, i])
        denoised = a * latents + b * eps
        if i < schedule.steps and schedule.draws_noise[i]:
            noise = torch.randn(SHAPE, generator=generator)
        latents = x_coef * latents + denoised_coef * denoised + prev_coef * previous + noise_coef * noise
        previous = denoised
        if inpainted is not None:
            known = known_coef * inpainted.image + known_noise_coef * inpainted.noise
            latents = inpainted.mask * latents + (1 - inpainted.mask) * known
    return latents


def denoise_with_diffusers(
    scheduler: Any,
    timesteps: torch.Tensor,
    latents: torch.Tensor,
    generator: torch.Generator,
    inpainted: Inpainted | None = None,
) -> torch.Tensor:
    """Run the loop of the SDXL pipelines, with their `prepare_extra_step_kwargs`."""
    parameters = set(inspect.signature(scheduler.step).parameters)
    extra = {key: value for key, value in (("eta", 0.0), ("generator", generator)) if key in parameters}
    for i, t in enumerate(timesteps):
        eps = predict_noise(scheduler.scale_model_input(latents, t), float(t))
        latents = scheduler.step(eps, t, latents, **extra, return_dict=False)[0]
        if inpainted is not None:  # StableDiffusionXLInpaintPipeline.__call__, 11
            known = inpainted.image
            if i < len(timesteps) - 1:
                known = scheduler.add_noise(known, inpainted.noise, torch.tensor([timesteps[i + 1]]))
            latents = (1 - inpainted.mask) * known + inpainted.mask * latents
    return latents


def initial_latents(init_sigma: float, seed: int) -> tuple[torch.Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SHAPE, generator=generator) * init_sigma, generator


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert torch.isfinite(expected).all()
    assert float((actual - expected).abs().max() / expected.abs().max()) < tolerance


def tolerance_of(schedule: SamplerSchedule) -> float:
    """Heun's second entry divides by the ratio of two sigmas, and rounding errors with it."""
    sigmas = schedule.noising[::2, 1]
    rounding = 2**-24 * float((sigmas[:-1] / sigmas[1:]).max(initial=1.0))
    return max(TOLERANCE, 2 * rounding) if schedule.sampler == "Heun" else TOLERANCE


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize(("sampler", "steps"), pairs())
def test_schedule_denoises_like_diffusers(sampler: str, steps: int, spacing: str, prediction: str) -> None:
    config = config_with(spacing) | {"prediction_type": prediction}
    scheduler = diffusers_scheduler(sampler, steps, config)
    schedule = sampler_schedule(sampler, steps, read_noise_schedule(config))
    assert len(schedule) == schedule.steps == entries(sampler, steps)
    assert schedule.timesteps.tolist() == scheduler.timesteps.tolist()
    assert schedule.init_sigma == pytest.approx(float(scheduler.init_noise_sigma), rel=1e-6)

    latents, generator = initial_latents(schedule.init_sigma, seed=7)
    result = denoise(schedule, latents, generator)
    latents, reference_generator = initial_latents(scheduler.init_noise_sigma, seed=7)
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(0)
    expected = denoise_with_diffusers(scheduler, scheduler.timesteps, latents, reference_generator)
    assert_close(result, expected, tolerance_of(schedule))
    assert torch.equal(generator.get_state(), reference_generator.get_state())


@pytest.mark.parametrize(
    ("frac", "spacing"),
    [
        (0.8, "leading"),
        (0.5, "leading"),
        (0.95, "leading"),
        (0.01, "leading"),
        (0.8, "trailing"),
        (0.999, "trailing"),
        (0.5, "linspace"),
    ],
)
@pytest.mark.parametrize(("sampler", "steps"), pairs(REFINABLE, steps=(1, 2, 15, 20)))
def test_base_and_refiner_denoise_like_the_two_pipelines(sampler: str, steps: int, frac: float, spacing: str) -> None:
    config = config_with(spacing)
    noise_schedule = read_noise_schedule(config)
    base, refiner = split_schedule(sampler_schedule(sampler, steps, noise_schedule), noise_schedule, frac)

    latents, generator = initial_latents(base.init_sigma, seed=11)
    after_base = denoise(base, latents, generator)
    result = denoise(refiner, after_base, generator)

    scheduler = diffusers_scheduler(sampler, steps, config)
    cutoff = int(round(1000 - (frac * 1000)))  # StableDiffusionXLPipeline.__call__, 8.1
    timesteps = scheduler.timesteps[: sum(bool(t >= cutoff) for t in scheduler.timesteps)]
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(0)
    latents, reference_generator = initial_latents(scheduler.init_noise_sigma, seed=11)
    expected = denoise_with_diffusers(scheduler, timesteps, latents, reference_generator)
    assert base.timesteps.tolist() == timesteps.tolist()
    assert_close(after_base, expected)

    scheduler = diffusers_scheduler(sampler, steps, config)
    pipeline = SimpleNamespace(scheduler=scheduler)
    timesteps, count = StableDiffusionXLImg2ImgPipeline.get_timesteps(pipeline, steps, 0.3, "cpu", frac)
    assert refiner.timesteps.tolist() == timesteps.tolist()
    assert len(refiner) == count == steps - len(base)
    assert_close(result, denoise_with_diffusers(scheduler, timesteps, expected, reference_generator))
    assert torch.equal(generator.get_state(), reference_generator.get_state())


@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("strength", [0.05, 0.3, 0.5, 0.9999, 1.0])
@pytest.mark.parametrize(("sampler", "steps"), pairs(steps=(20, 33)))
def test_starts_from_an_image_like_diffusers(sampler: str, steps: int, strength: float, spacing: str) -> None:
    config = config_with(spacing)
    whole = sampler_schedule(sampler, steps, read_noise_schedule(config))
    schedule = skip_steps(whole, whole.order * skipped_steps(strength, steps))
    scheduler = diffusers_scheduler(sampler, steps, config)
    pipeline = SimpleNamespace(scheduler=scheduler)
    timesteps, count = StableDiffusionXLImg2ImgPipeline.get_timesteps(pipeline, steps, strength, "cpu")
    assert schedule.timesteps.tolist() == timesteps.tolist()
    assert schedule.steps == entries(sampler, count)

    image, noise = torch.randn((2, *SHAPE), generator=torch.Generator().manual_seed(1))
    expected_start = scheduler.add_noise(image, noise, timesteps[:1])
    start = float(schedule.noising[0, 0]) * image + float(schedule.noising[0, 1]) * noise
    assert_close(start, expected_start)
    inpainted = Inpainted(image, noise, (torch.arange(5) > 2).float())
    for kept in (None, inpainted):
        generator, reference_generator = (torch.Generator().manual_seed(2) for _ in range(2))
        scheduler = diffusers_scheduler(sampler, steps, config)
        StableDiffusionXLImg2ImgPipeline.get_timesteps(SimpleNamespace(scheduler=scheduler), steps, strength, "cpu")
        result = denoise(schedule, start, generator, inpainted=kept)
        assert_close(result, denoise_with_diffusers(scheduler, timesteps, expected_start, reference_generator, kept))
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


@pytest.mark.parametrize("betas", [{}, {"beta_schedule": "linear", "beta_start": 1e-4, "beta_end": 0.02}])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_timesteps_equal_those_of_diffusers_at_all_lengths(sampler: str, betas: dict[str, Any]) -> None:
    # Karras timesteps are rounded, so a slightly wrong sigma gives another integer at one of these lengths.
    ignores_spacing = sampler == "LCM" or "Karras" in sampler
    for spacing in SPACINGS[:1] if ignores_spacing else SPACINGS:
        config = config_with(spacing) | betas
        noise_schedule = read_noise_schedule(config)
        for steps in range(1, max_steps(sampler) + 1):
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
    scheduler = diffusers_scheduler(sampler, 8, SDXL | changed)
    assert schedule.timesteps.tolist() == scheduler.timesteps.tolist()
    latents, generator = initial_latents(schedule.init_sigma, seed=3)
    result = denoise(schedule, latents, generator)
    latents, reference_generator = initial_latents(scheduler.init_noise_sigma, seed=3)
    assert_close(result, denoise_with_diffusers(scheduler, scheduler.timesteps, latents, reference_generator))
    assert not np.array_equal(plain.coefficients, schedule.coefficients)


def test_steps_that_draw_noise() -> None:
    """Ancestral samplers and SDE solvers draw noise at the last step, too. LCM does not."""
    noise_schedule = read_noise_schedule(SDXL)
    draws_noise = {name: sampler_schedule(name, 3, noise_schedule).draws_noise.tolist() for name in SAMPLERS}
    always, never = [True] * 3, [False] * 3
    assert draws_noise == {
        "Euler": never,
        "Euler a": always,
        "DDIM": never,
        "DPM++ 2M": never,
        "DPM++ 2M Karras": never,
        "DPM++ 2M SDE Karras": always,
        "LCM": [True, True, False],
        "Heun": [False] * 5,
    }


@pytest.mark.parametrize("sampler", REFINABLE)
def test_first_step_of_each_part_ignores_the_previous_one(sampler: str) -> None:
    noise_schedule = read_noise_schedule(SDXL)
    whole = sampler_schedule(sampler, 20, noise_schedule)
    prev = COEFFICIENTS.index("prev")
    multistep = sampler.startswith("DPM++")
    for part in (whole, *split_schedule(whole, noise_schedule, 0.6)):
        assert part.coefficients[0, prev] == 0
        assert (part.coefficients[1, prev] != 0) == multistep
    # splitting does not change the whole schedule
    assert (whole.coefficients[12, prev] != 0) == multistep


@pytest.mark.parametrize("sampler", REFINABLE)
def test_either_part_may_be_empty(sampler: str) -> None:
    noise_schedule = read_noise_schedule(SDXL)
    whole = sampler_schedule(sampler, 4, noise_schedule)
    base, refiner = split_schedule(whole, noise_schedule, 1.0)
    assert (len(base), len(refiner)) == (4, 0)
    assert not refiner
    for frac in (0.0, 0.0001):
        base, refiner = split_schedule(whole, noise_schedule, frac)
        assert (len(base), len(refiner)) == (0, 4)
        assert np.array_equal(refiner.coefficients, whole.coefficients)


@pytest.mark.parametrize("frac", [-0.5, 1.01, float("nan")])
def test_refuses_an_invalid_fraction(frac: float) -> None:
    noise_schedule = read_noise_schedule(SDXL)
    with pytest.raises(RequestRefused, match="denoising_frac") as refused:
        split_schedule(sampler_schedule("Euler", 4, noise_schedule), noise_schedule, frac)
    assert refused.value.field == "denoising_frac"


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_padding_does_not_change_the_latents(sampler: str) -> None:
    part = sampler_schedule(sampler, 6, read_noise_schedule(SDXL))
    unpadded, padded = (denoise(part, *initial_latents(part.init_sigma, seed=5), padding) for padding in (0, 9))
    assert torch.equal(padded, unpadded)


def test_pads_schedules_to_one_length() -> None:
    noise_schedule = read_noise_schedule(SDXL)
    tables = [sampler_schedule(name, n, noise_schedule) for name, n in (("Euler", 3), ("LCM", 5))]
    timesteps, coefficients = pad_schedules(tables, 5)
    assert timesteps.dtype == coefficients.dtype == np.float32
    assert timesteps.shape == (2, 5)
    assert coefficients.shape == (2, 5, len(COEFFICIENTS + KNOWN_COEFFICIENTS))
    assert timesteps[0].tolist() == [*tables[0].timesteps, 0, 0]
    assert np.array_equal(coefficients[1, :, : len(COEFFICIENTS)], tables[1].coefficients.astype(np.float32))
    assert np.array_equal(coefficients[1, :-1, len(COEFFICIENTS) :], tables[1].noising[1:].astype(np.float32))
    assert coefficients[1, -1, len(COEFFICIENTS) :].tolist() == [1, 0]
    with pytest.raises(RequestRefused, match="num_inference_steps"):
        pad_schedules(tables, 4)
    assert [part.shape for part in pad_schedules([], 4)] == [(0, 4), (0, 4, 9)]


def test_schedule_is_made_once() -> None:
    first = sampler_schedule("DPM++ 2M", 7, read_noise_schedule(SDXL))
    assert sampler_schedule("DPM++ 2M", 7, read_noise_schedule(SDXL)) is first


def test_schedule_is_read_only() -> None:
    part = sampler_schedule("Euler", 3, read_noise_schedule(SDXL))
    for array in (part.timesteps, part.coefficients, part.draws_noise):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_refuses_too_many_and_too_few_steps(sampler: str) -> None:
    noise_schedule = read_noise_schedule(SDXL)
    limit = max_steps(sampler)
    assert len(sampler_schedule(sampler, limit, noise_schedule)) == entries(sampler, limit)
    for steps in (0, -1, limit + 1):
        with pytest.raises(RequestRefused, match=f"{steps} is not 1 to {limit}") as refused:
            sampler_schedule(sampler, steps, noise_schedule)
        assert refused.value.field == "num_inference_steps"


def test_refuses_heun_with_a_refiner() -> None:
    noise_schedule = read_noise_schedule(SDXL)
    with pytest.raises(RequestRefused, match="Heun cannot be used with the refiner") as refused:
        split_schedule(sampler_schedule("Heun", 4, noise_schedule), noise_schedule, 0.5)
    assert refused.value.field == "scheduler"


ZERO_SNR = SDXL | {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}


@pytest.mark.parametrize("spacing", ["trailing", "leading"])
@pytest.mark.parametrize(("sampler", "steps"), pairs(REFINABLE, steps=(1, 4, 30)))
def test_zero_terminal_snr_denoises_like_diffusers(sampler: str, steps: int, spacing: str) -> None:
    config = ZERO_SNR | {"timestep_spacing": spacing}
    scheduler = diffusers_scheduler(sampler, steps, config)
    schedule = sampler_schedule(sampler, steps, read_noise_schedule(config))
    assert schedule.timesteps.tolist() == scheduler.timesteps.tolist()
    assert schedule.init_sigma == pytest.approx(float(scheduler.init_noise_sigma), rel=1e-6)
    latents, generator = initial_latents(schedule.init_sigma, seed=7)
    result = denoise(schedule, latents, generator)
    latents, reference_generator = initial_latents(scheduler.init_noise_sigma, seed=7)
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(0)
    expected = denoise_with_diffusers(scheduler, scheduler.timesteps, latents, reference_generator)
    # A step of diffusers' Euler subtracts numbers as large as the first latents.
    assert_close(result, expected, max(TOLERANCE, 2 * 2**-24 * schedule.init_sigma))


def test_heun_at_zero_terminal_snr() -> None:
    """diffusers' Heun ignores the setting. Its scheduler gets the noise schedule of diffusers' Euler."""
    scheduler = diffusers_scheduler("Heun", 8, ZERO_SNR)
    scheduler.alphas_cumprod = diffusers_scheduler("Euler", 8, ZERO_SNR).alphas_cumprod
    scheduler.set_timesteps(8)
    schedule = sampler_schedule("Heun", 8, read_noise_schedule(ZERO_SNR))
    latents, generator = initial_latents(schedule.init_sigma, seed=7)
    expected = denoise_with_diffusers(scheduler, scheduler.timesteps, latents.clone(), generator)
    assert_close(denoise(schedule, latents, generator), expected)


SPACED: dict[str, dict[str, Any]] = {
    "few": {"timesteps": (999, 640, 333, 100, 7)},
    "one": {"timesteps": (500,)},
    "last": {"timesteps": (999, 1, 0)},
    "sigmas": {"sigmas": (14.5, 8.1, 3.0, 0.7, 0.05, 0.0)},
    "noisy end": {"sigmas": (10.0, 2.0, 0.3)},
    "beyond training": {"sigmas": (120.0, 5.0, 0.001, 0.0)},
}


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("spaced", SPACED.values(), ids=SPACED)
@pytest.mark.parametrize("sampler", ["Euler", "DPM++ 2M", "LCM", "Heun"])
def test_explicit_steps_denoise_like_diffusers(sampler: str, spaced: dict[str, Any], prediction: str) -> None:
    kind, settings = DIFFUSERS_SCHEDULERS[sampler]
    config = SDXL | {"prediction_type": prediction}
    steps = len(spaced["timesteps"]) if "timesteps" in spaced else len(spaced["sigmas"]) - 1
    noise_schedule = read_noise_schedule(config)
    if "sigmas" in spaced and sampler != "Euler":
        with pytest.raises(RequestRefused, match=f"{re.escape(sampler)} takes none. Set scheduler to one of Euler."):
            sampler_schedule(sampler, steps, noise_schedule, **spaced)
        return
    scheduler = kind.from_config(config, **settings)
    scheduler.set_timesteps(**{key: list(values) for key, values in spaced.items()})
    schedule = sampler_schedule(sampler, steps, noise_schedule, **spaced)
    assert schedule.timesteps == pytest.approx(scheduler.timesteps.double().numpy(), rel=1e-5)
    assert schedule.init_sigma == pytest.approx(float(scheduler.init_noise_sigma), rel=1e-6)
    latents, generator = initial_latents(schedule.init_sigma, seed=7)
    result = denoise(schedule, latents, generator)
    latents, reference_generator = initial_latents(scheduler.init_noise_sigma, seed=7)
    scheduler.set_begin_index(0)
    expected = denoise_with_diffusers(scheduler, scheduler.timesteps, latents, reference_generator)
    assert_close(result, expected, tolerance_of(schedule))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_explicit_steps_are_taken_by_the_samplers_of_diffusers_that_take_them(sampler: str) -> None:
    kind, settings = DIFFUSERS_SCHEDULERS[sampler]
    accepted = set(inspect.signature(kind.set_timesteps).parameters)
    # The class takes timesteps, but not together with Karras sigmas.
    takes = {field: field in accepted and "use_karras_sigmas" not in settings for field in ("timesteps", "sigmas")}
    assert takes == {"timesteps": sampler in TAKE_TIMESTEPS, "sigmas": sampler in TAKE_SIGMAS}


def test_refuses_a_timestep_beyond_training() -> None:
    with pytest.raises(RequestRefused, match="1000 is not 0 to 999") as refused:
        sampler_schedule("Euler", 2, read_noise_schedule(SDXL), timesteps=(1000, 3))
    assert refused.value.field == "timesteps"


def test_lcm_has_at_most_the_steps_of_its_distillation() -> None:
    noise_schedule = read_noise_schedule(SDXL | {"original_inference_steps": 20})
    assert len(sampler_schedule("LCM", 20, noise_schedule)) == 20
    with pytest.raises(RequestRefused, match="1 to 20"):
        sampler_schedule("LCM", 21, noise_schedule)


def test_accepts_public_names_and_class_names() -> None:
    assert [sampler_name(name) for name in SAMPLERS] == list(SAMPLERS)
    classes = {kind.__name__: name for name, (kind, settings) in DIFFUSERS_SCHEDULERS.items() if not settings}
    assert {name: sampler_name(name) for name in classes} == classes
    noise_schedule = read_noise_schedule(SDXL)
    assert sampler_schedule("DPMSolverMultistepScheduler", 4, noise_schedule).sampler == "DPM++ 2M"


@pytest.mark.parametrize("name", ["euler", "", "PNDMScheduler", "DPM++ 3M"])
def test_refusal_of_an_unknown_sampler_lists_the_known_ones(name: str) -> None:
    for function in (sampler_name, lambda n: sampler_schedule(n, 4, read_noise_schedule(SDXL))):
        with pytest.raises(RequestRefused) as refused:
            function(name)
        assert refused.value.field == "scheduler"
        for known in (repr(name), *SAMPLERS, "LCMScheduler"):
            assert known in str(refused.value)
