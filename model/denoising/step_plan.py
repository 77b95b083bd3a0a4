"""The numbers of an image's steps on one denoiser: small, without tensors, and sent to other ranks as they are."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from model.denoising.samplers import SamplerSchedule


@dataclass(frozen=True, eq=False)
class StepPlan:
    """The steps of one denoiser for an image. A step of the loop evaluates the denoiser once: arrays are by evaluation.

    guidance: float32 [steps], the guidance scale, at least 1.
    guidance_rescale: how much of the change of the prediction's standard deviation is corrected, 0 to 1.
    entries: int8 [steps], batch entries of the denoiser that the step takes: 2 if it is guided, else 1. They never
        increase.
    requested_step: int64 [steps], the requested step that the evaluation belongs to, counted from the first step of
        all denoisers. Heun evaluates a denoiser twice in most of them.
    controls: by ControlNet that the image uses, bool [steps], true where its outputs are added.
    image_prompts: true if the steps use an IP-Adapter, whose inputs are in the conditioning.
    """

    schedule: SamplerSchedule
    guidance: NDArray[np.float32]
    guidance_rescale: float
    entries: NDArray[np.int8]
    requested_step: NDArray[np.int64]
    controls: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    image_prompts: bool = False

    @property
    def steps(self) -> int:
        """The number of evaluations."""
        return self.schedule.steps
