"""The noise of models in the EDM formulation, and noise schedules of either kind.

The formulation is that of Karras et al. 2022 (arXiv 2206.00364). Playground V2.5 is such a model. Its x is
x0 + sigma * noise. Its UNet reads 0.25 * ln(sigma) as the timestep.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from model.denoising.noise_schedule import InvalidSchedule, NoiseSchedule, check_fields
from model.errors import ManifestError

_FORMULATION = ("formulation", "edm")  # an entry of a manifest's schedule that NoiseSchedule does not have
_RANGES = {"sigma_min": (1e-6, 1.0), "sigma_max": (1.0, 1e4), "sigma_data": (1e-3, 1e3), "rho": (1.0, 100.0)}


@dataclass(frozen=True)
class EdmSchedule:
    """Fields are named as in diffusers' EDM schedulers. The constructor raises InvalidSchedule."""

    sigma_min: float = 0.002
    sigma_max: float = 80.0
    sigma_data: float = 0.5
    rho: float = 7.0
    prediction_type: str = "epsilon"

    def __post_init__(self) -> None:
        check_fields(self)
        for name, (minimum, maximum) in _RANGES.items():
            if not minimum <= getattr(self, name) <= maximum:
                raise InvalidSchedule(name, f"is {getattr(self, name)!r:.80}, not {minimum} to {maximum}.")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values, for a release's manifest."""
        return dict([_FORMULATION]) | asdict(self)


AnyNoiseSchedule = NoiseSchedule | EdmSchedule


def schedule_from_dict(values: Mapping[str, Any]) -> AnyNoiseSchedule:
    """Invert `to_dict` of either class. Raises ManifestError for a missing, unknown or invalid field."""
    name, formulation = _FORMULATION
    if name not in values:
        return NoiseSchedule.from_dict(values)
    mismatched = set(values) ^ {name, *(field.name for field in fields(EdmSchedule))}
    if mismatched or values[name] != formulation:
        raise ManifestError(
            f"noise schedule: missing or unknown: {', '.join(sorted(map(str, mismatched))) or f'{values[name]!r:.80}'}."
        )
    return EdmSchedule(**{key: value for key, value in values.items() if key != name})
