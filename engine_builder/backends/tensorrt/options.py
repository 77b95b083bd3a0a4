"""The options of a TensorRT build, and the cost of each choice. Imports neither TensorRT nor ONNX."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from model.engines.tensorrt import api
from model.errors import PreheatError
from model.loading.runtimes import Compatibility, make_tensorrt_target
from model.loading.target import Target

Refit = Literal["identical", "any"]
Choice = TypeVar("Choice", bound=str)

# The cost of each choice, for the command's help and the docs. From NVIDIA's documentation; not measured here.
COMPATIBILITY: dict[Compatibility, str] = {
    "none": "the fastest plan, for GPUs of the product it was built on",
    "same_compute_capability": "runs on every GPU of one compute capability; tuned for the one it was built on",
    "ampere_plus": "runs on Ampere and newer GPUs; kernels use at most 48 KiB of shared memory, and fewer are tried",
}
REFIT: dict[Refit, str] = {
    "identical": "takes the weights it was built with; TensorRT may have used their values, so each model of the "
    "architecture needs a build",
    "any": "takes the weights of every model of the architecture; NVIDIA warns that this refit may cost accuracy, so "
    "each model is checked when it is built",
}


class InvalidOption(PreheatError):
    """An option of a TensorRT build is unknown or out of range."""


@dataclass(frozen=True)
class PlanOptions:
    """The options of a TensorRT build; part of every plan key.

    `workspace`: bytes of GPU memory for kernels; None: half of what the weights leave free.
    `level`: TensorRT's builder_optimization_level, 0 (fast) to 5 (thorough).
    """

    refit: Refit = "identical"
    compatibility: Compatibility = "none"
    workspace: int | None = None
    level: int = 3


def parse_options(refit: str, compatibility: str, workspace: float | None, level: int) -> PlanOptions:
    """Parse options as typed; `workspace` in GiB. Raises InvalidOption with the choices and their costs."""
    if workspace is not None and not 0 < workspace < 1024:
        raise InvalidOption(f"A workspace of {workspace} GiB is not valid.", "Give more than 0, or omit --workspace.")
    return PlanOptions(
        refit=_parse_choice(REFIT, refit, "--refit"),
        compatibility=_parse_choice(COMPATIBILITY, compatibility, "--compatibility"),
        workspace=None if workspace is None else int(workspace * 2**30),
        level=level,
    )


def _parse_choice(choices: Mapping[Choice, str], value: str, option: str) -> Choice:
    for choice in choices:
        if choice == value:
            return choice
    costs = "; ".join(f"{choice}: {cost}" for choice, cost in choices.items())
    raise InvalidOption(f"{option} {value[:40]!r} is not one of its choices.", f"Choose one ({costs}).")


def plan_target(gpu: Target, options: PlanOptions) -> Target:
    """Return the target of plans built on this machine. `gpu`: its AOTInductor target. Raises TensorRTUnavailable."""
    return make_tensorrt_target(gpu, api.version_tag(api.require(gpu.device)), options.compatibility)
