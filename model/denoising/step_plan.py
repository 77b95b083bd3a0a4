"""The numbers of an image's steps on one denoiser: small, without tensors, and sent to other ranks as they are."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.denoising.loop_schedule import LoopSchedule
from model.engines.features import CONTROL


class StepNeeds(NamedTuple):
    """What one step of an image needs of its denoiser.

    entries: batch entries: 2 if the step is guided, else 1. slots: the most entries of this step and of later ones.
    features: see `model.engines.features`. exact: true if it runs on a denoiser that is not quantized. networks: those
    before the denoiser whose outputs are added. zero_negative: true if it is guided against zeros.
    """

    entries: int
    slots: int
    features: frozenset[str] = frozenset()
    exact: bool = False
    networks: tuple[str, ...] = ()
    zero_negative: bool = False

    @property
    def guided(self) -> bool:
        """True if the step takes an entry for each half of guidance."""
        return self.entries == 2


@dataclass(frozen=True, eq=False)
class StepPlan:
    """The steps of one denoiser for an image. A step of the loop evaluates the denoiser once: arrays are by evaluation.

    guidance: float32 [steps], the guidance scale, at least 1.
    guidance_rescale: how much of the change of the prediction's standard deviation is corrected, 0 to 1.
    entries: int8 [steps], batch entries of the denoiser that the step takes: 2 if it is guided, else 1.
    zero_negative: true if the unconditional half has zeros in place of an encoded text.
    requested_step: int64 [steps], the requested step that the evaluation belongs to, counted from the first step of
        all denoisers. Heun evaluates a denoiser twice in most of them.
    needs: for each step the features that the denoiser must have, see `model.engines.features`.
    uses: by network before the denoiser, bool [steps], true where its outputs are added.
    exact: bool [steps], true if the step runs on a denoiser that is not quantized.
    """

    schedule: LoopSchedule
    guidance: NDArray[np.float32]
    guidance_rescale: float
    entries: NDArray[np.int8]
    zero_negative: bool
    requested_step: NDArray[np.int64]
    needs: tuple[frozenset[str], ...]
    uses: Mapping[str, NDArray[np.bool_]]
    exact: NDArray[np.bool_]

    @property
    def steps(self) -> int:
        """The number of evaluations."""
        return len(self.schedule)

    @property
    def sampler_steps(self) -> int:
        """The number of steps of the sampler, forecasted ones included."""
        return int(self.schedule.step[-1])

    def steps_of(self, evaluation: int) -> int:
        """Return the number of the sampler's steps that an evaluation stands for."""
        return int(self.schedule.step[evaluation + 1] - self.schedule.step[evaluation])

    @cached_property
    def by_step(self) -> tuple[StepNeeds, ...]:
        """What each step needs. Equal steps have the same object."""
        slots = np.maximum.accumulate(self.entries[::-1])[::-1]
        made: dict[StepNeeds, StepNeeds] = {}
        found = []
        for step in range(self.steps):
            needs = StepNeeds(
                int(self.entries[step]),
                int(slots[step]),
                self.needs[step],
                bool(self.exact[step]),
                tuple(name for name, used in self.uses.items() if used[step]),
                self.zero_negative and bool(self.entries[step] == 2),
            )
            found.append(made.setdefault(needs, needs))
        return tuple(found)


def needs_by_step(
    always: Collection[str], uses: Mapping[str, NDArray[np.bool_]], steps: int
) -> tuple[frozenset[str], ...]:
    """Return `StepPlan.needs`: `always`, and the feature "control" in the steps that use a network."""
    is_controlled = np.any([*uses.values(), np.zeros(steps, np.bool_)], axis=0)
    return tuple(frozenset(always) | ({CONTROL} if used else set()) for used in is_controlled)
