"""What a person chooses of a TensorRT build, and what it costs. Needs neither TensorRT nor ONNX."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch

from model.engines.tensorrt import api
from model.errors import PreheatError
from model.loading.runtimes import (
    Compatibility,
    tensorrt_target,
)
from model.loading.target import Target

Refit = Literal["identical", "any"]
Choice = TypeVar("Choice", bound=str)

# What each choice costs, for the command's help and the docs. From NVIDIA's documentation; not measured here.
COMPATIBILITY: dict[Compatibility, str] = {
    "none": "the fastest plan, for GPUs of the product it was built on",
    "same_compute_capability": "runs on every GPU of one compute capability; tuned for the one it was built on",
    "ampere_plus": "runs on Ampere and all that is newer; kernels keep to 48 KiB of shared memory, and fewer are tried",
}
REFIT: dict[Refit, str] = {
    "identical": "takes the weights it was built with; TensorRT may have used their values, so another model of the "
    "architecture is built anew",
    "any": "takes the weights of every model of the architecture; NVIDIA warns that plain refit may cost accuracy, so "
    "each model's is checked when it is built",
}


class BadChoice(PreheatError):
    """An option of a TensorRT build that there is not."""


@dataclass(frozen=True)
class Choices:
    """What a person chooses of a TensorRT build. `workspace`: bytes of GPU memory that a kernel may take, None for half
    of what is left beside the weights. `level`: TensorRT's builder_optimization_level, 0 (fast) to 5 (thorough)."""

    refit: Refit = "identical"
    compatibility: Compatibility = "none"
    workspace: int | None = None
    level: int = 3


def read_choices(refit: str, compatibility: str, workspace: float | None, level: int) -> Choices:
    """What was typed; `workspace` in GiB. Raises BadChoice naming what there is and what it costs."""
    if workspace is not None and not 0 < workspace < 1024:
        raise BadChoice(f"A workspace of {workspace} GiB is none: give more than 0, or leave it to the build.")
    return Choices(
        refit=_one_of(REFIT, refit, "--refit"),
        compatibility=_one_of(COMPATIBILITY, compatibility, "--compatibility"),
        workspace=None if workspace is None else int(workspace * 2**30),
        level=level,
    )


def _one_of(known: Mapping[Choice, str], value: str, option: str) -> Choice:
    for choice in known:
        if choice == value:
            return choice
    costs = "; ".join(f"{choice}: {cost}" for choice, cost in known.items())
    raise BadChoice(f"{option} {value[:40]!r} is none of its choices ({costs}).")


def target_of(gpu: Target, choices: Choices) -> Target:
    """The target of plans built on this machine, which AOTInductor's target names. Raises TensorRTUnavailable."""
    version = api.require(torch.device(gpu.device))
    return tensorrt_target(gpu, api.version_tag(version), choices.compatibility)
