"""The limits that a report must keep, from a TOML file of numbers. An entry that the file lacks has its default.

min_latents_decibels_median = 20.0
max_true_loss_points = 1.0
"""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field

from engine_builder.quantization.toml_file import TomlSettings
from engine_builder.quantization.validation.report import ValidationReport
from model.errors import PreheatError

Distance = Annotated[float, Field(ge=0, le=1)]


class BadThresholds(PreheatError):
    """A file of thresholds cannot be read, or has an unknown or impossible entry."""

    remedy = "See docs/quantization.md for the entries of a file of thresholds."


class Thresholds(TomlSettings):
    """The limits. "median" and "worst" are over all prompts, or for UNet calls over all calls that were compared."""

    min_prompts: Annotated[int, Field(ge=1)] = 32
    min_steps: Annotated[int, Field(ge=1)] = 8
    """Steps of each image. FP8 errors add up over the steps."""
    min_unet_decibels_median: float = 25.0
    min_unet_decibels_worst: float = 12.0
    min_latents_decibels_median: float = 20.0
    min_latents_decibels_worst: float = 5.0
    min_psnr_decibels_median: float = 20.0
    min_psnr_decibels_worst: float = 10.0
    max_perceptual_distance_median: Distance = 0.2
    max_perceptual_distance_worst: Distance = 0.7
    max_true_loss_points: Annotated[float, Field(ge=0, le=100)] = 1.0
    """Percentage points of prompt-true pictures. Not checked if the report has no verdicts."""

    @classmethod
    def for_check(cls, prompts: int, steps: int) -> Self:
        """Return the defaults for a check of that extent, which may be smaller than `preheat publish` accepts."""
        return cls(min_prompts=min(prompts, cls().min_prompts), min_steps=min(steps, cls().min_steps))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file of thresholds. Raises BadThresholds."""
        return cls.read_as(path, "is not a file of thresholds", BadThresholds)


def violations(report: ValidationReport, thresholds: Thresholds) -> list[str]:
    """Return a sentence with value and limit for each threshold that the report does not keep."""
    found = []
    if len(report.prompts) < thresholds.min_prompts:
        found.append(f"The report has {len(report.prompts)} prompts; at least {thresholds.min_prompts} are required.")
    steps = min(prompt.steps for prompt in report.prompts)
    if steps < thresholds.min_steps:
        found.append(f"The report has images of {steps} steps; at least {thresholds.min_steps} are required.")
    summary = report.summary
    subjects = {
        "unet_decibels": "SQNR of UNet calls",
        "latents_decibels": "SQNR of final latents",
        "psnr_decibels": "PSNR of pictures",
        "perceptual_distance": "perceptual distance of pictures",
    }
    if summary.unet_decibels is None:
        found.append("The report has no UNet call in 8 bits, because all steps ran in fp16.")
        del subjects["unet_decibels"]
    for entry, subject in subjects.items():
        for statistic in ("median", "worst"):
            value: float = getattr(getattr(summary, entry), statistic)
            if entry == "perceptual_distance":
                limit: float = getattr(thresholds, f"max_{entry}_{statistic}")
                if value > limit:
                    found.append(f"The {statistic} {subject} is {value:.4f}; at most {limit:g} is allowed.")
            else:
                limit = getattr(thresholds, f"min_{entry}_{statistic}")
                if value < limit:
                    found.append(f"The {statistic} {subject} is {value:.2f} dB; at least {limit:g} dB is required.")
    loss = summary.true_loss_points
    # Rounding of percentages must not refuse a loss that equals the limit.
    if loss is not None and loss > thresholds.max_true_loss_points + 1e-9:
        found.append(
            f"The share of prompt-true pictures fell by {loss:.2f} percentage points, from "
            f"{summary.reference_true:.2f} to {summary.quantized_true:.2f} %; at most "
            f"{thresholds.max_true_loss_points:g} points are allowed."
        )
    return found
