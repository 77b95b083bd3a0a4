"""The noise schedule that a model was trained with."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.errors import ManifestError
from model.validation import MAX_STEPS, MAX_TRAIN_TIMESTEPS

Floats = NDArray[np.float64]

OWN_SPACING = "default"  # timestep_spacing of a model that leaves it to the samplers: each has its diffusers class's
SUPPORTED = {
    "beta_schedule": ("scaled_linear", "linear"),
    "timestep_spacing": ("leading", "trailing", "linspace", OWN_SPACING),
    "prediction_type": ("epsilon", "v_prediction"),
}

_ADDED_FIELDS = {"rescale_betas_zero_snr"}  # since the first version of a release's manifest


class InvalidSchedule(ManifestError):
    """A field of a noise schedule has an invalid value. `problem`: the sentence after the field's name."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"noise schedule: {field} {problem}")
        self.field, self.problem = field, problem


def check_fields(schedule: Any) -> None:
    """Raise InvalidSchedule for a field of a noise schedule that has another type, or no SUPPORTED value."""
    for field in fields(schedule):
        value, kind = getattr(schedule, field.name), field.type
        assert isinstance(kind, type)
        # An int is accepted for a float; a bool, though a subclass of int, is not.
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise InvalidSchedule(field.name, f"is {value!r:.80}, not of type {kind.__name__}.")
        if field.name in SUPPORTED and value not in SUPPORTED[field.name]:
            served = " or ".join(SUPPORTED[field.name])
            raise InvalidSchedule(field.name, f"is {value!r:.80}; served: {served}.")


@dataclass(frozen=True)
class NoiseSchedule:
    """The noise that a model was trained with, and the spacing of inference steps. Fields are named as in diffusers.

    An instance is always valid: the constructor raises InvalidSchedule. Only LCM uses
    `original_inference_steps` and `timestep_scaling`. `timestep_spacing` may be OWN_SPACING.
    """

    num_train_timesteps: int
    beta_start: float
    beta_end: float
    beta_schedule: str
    timestep_spacing: str
    steps_offset: int
    set_alpha_to_one: bool
    prediction_type: str = "epsilon"
    original_inference_steps: int = 50
    timestep_scaling: float = 10.0
    rescale_betas_zero_snr: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.rescale_betas_zero_snr and self.prediction_type == "epsilon":
            raise InvalidSchedule(
                "prediction_type",
                "is epsilon, and rescale_betas_zero_snr is true. At zero signal, noise says nothing about the image.",
            )
        count = self.num_train_timesteps
        ranges: dict[str, tuple[float, float]] = {
            "num_train_timesteps": (MAX_STEPS + 1, MAX_TRAIN_TIMESTEPS),
            # The first of n timesteps with leading spacing, (n - 1) * (count // n) + offset, must be below count.
            "steps_offset": (0, count // MAX_STEPS - 1),
            "original_inference_steps": (1, count),
            "timestep_scaling": (1e-3, 1e3),
            "beta_start": (1e-8, 0.5),
            "beta_end": (1e-8, 0.5),
        }
        for name, (minimum, maximum) in ranges.items():
            value = getattr(self, name)
            if not minimum <= value <= maximum:
                raise InvalidSchedule(name, f"is {value!r:.80}, not {minimum} to {maximum}.")
        if self.beta_start > self.beta_end:
            raise InvalidSchedule("beta_start", f"is {self.beta_start}, more than beta_end, {self.beta_end}.")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values, for a release's manifest.

        An entry that was added later is omitted if it is false, so that older versions can read the release.
        """
        return {key: value for key, value in asdict(self).items() if value or key not in _ADDED_FIELDS}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "NoiseSchedule":
        """Invert `to_dict`. Raises ManifestError for a missing or unknown field, or a value out of range."""
        mismatched = (set(values) ^ {field.name for field in fields(cls)}) - (_ADDED_FIELDS - set(values))
        if mismatched:
            raise ManifestError(f"noise schedule: missing or unknown: {', '.join(sorted(map(str, mismatched)))}.")
        return cls(**values)

    def spacing(self, default: str) -> str:
        """Return the spacing of timesteps for a sampler whose diffusers class has this default."""
        return default if self.timestep_spacing == OWN_SPACING else self.timestep_spacing

    def alphas_cumprod(self) -> Floats:
        """Return the signal's share of the variance at each training timestep, float64 [num_train_timesteps].

        It is the running product of 1 - beta: Ho et al. 2020 (DDPM), section 2. "scaled_linear" is linear in
        sqrt(beta), as in latent diffusion. Values are rounded where torch.linspace and torch.cumprod round in float32.
        This changes the last sigmas by 1 part in 40,000, which matters where Karras timesteps are rounded to integers.
        With `rescale_betas_zero_snr` the last entry is 0.
        """
        scaled, count = self.beta_schedule == "scaled_linear", self.num_train_timesteps
        start, end = (np.float32(b**0.5 if scaled else b) for b in (self.beta_start, self.beta_end))
        stride, index = float((end - start) / np.float32(count - 1)), np.arange(count)
        from_start, from_end = float(start) + stride * index, float(end) - stride * index[::-1]
        line = np.where(index < count // 2, from_start, from_end).astype(np.float32)
        alphas = (np.float32(1) - (line * line if scaled else line)).astype(np.float64)
        if self.rescale_betas_zero_snr:
            alphas = _without_terminal_signal(alphas)
        return np.cumprod(alphas).astype(np.float32).astype(np.float64)


def _without_terminal_signal(alphas: Floats) -> Floats:
    """Return the 1 - beta of a schedule that ends at zero signal: Lin et al. 2023 (arXiv 2305.08891), algorithm 1.

    Each operation is rounded to float32, as in diffusers' `rescale_zero_terminal_snr`.
    """
    signal = np.sqrt(np.cumprod(alphas).astype(np.float32))
    first, last = signal[0], signal[-1]
    shifted = (signal - last) * (first / (first - last))
    squared = shifted * shifted
    betas = np.float32(1) - np.append(squared[:1], squared[1:] / squared[:-1])
    return (np.float32(1) - betas).astype(np.float64)
