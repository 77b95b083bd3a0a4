"""The options of a build of plans, and the cost of each choice. Imports neither a library nor ONNX."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from engine_builder.gpus import find_capability
from model.engines.tensorrt.libraries import (
    LIBRARIES,
    TENSORRT_RTX,
    Library,
    PlanRuntime,
    import_library,
    require,
)
from model.errors import PreheatError
from model.loading.runtimes import Compatibility, make_tensorrt_target
from model.loading.target import Target

Refit = Literal["identical", "any", "none"]
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
    "none": "holds the weights it was built with, so each plan of a release has a copy of its own",
}


class InvalidOption(PreheatError):
    """An option of a TensorRT build is unknown or out of range."""


@dataclass(frozen=True)
class PlanOptions:
    """The options of a build of plans; part of every plan key.

    `workspace`: bytes of GPU memory for kernels; None: half of what the weights leave free, or no limit if the plans
    are built without their GPU. `level`: the library's builder_optimization_level, 0 (fast) to 5 (thorough).
    """

    refit: Refit = "identical"
    compatibility: Compatibility = "none"
    workspace: int | None = None
    level: int = 3
    runtime: PlanRuntime = "tensorrt"

    @property
    def plan_library(self) -> Library:
        """The library that builds and runs the plans."""
        return LIBRARIES[self.runtime]


def parse_options(
    library: Library, refit: str | None, compatibility: str, workspace: float | None, level: int
) -> PlanOptions:
    """Parse options as typed; `workspace` in GiB. Raises InvalidOption with the choices and their costs.

    Without `refit` it is "identical", or "none" for TensorRT-RTX. That library can strip a plan only on a GPU that runs
    it: it then compiles kernels, which failed on an H100 (docs/log/builds.md).
    """
    if workspace is not None and not 0 < workspace < 1024:
        raise InvalidOption(f"A workspace of {workspace} GiB is not valid.", "Give more than 0, or omit --workspace.")
    if library.compiles_on_target and compatibility != "none":
        raise InvalidOption(
            f"--compatibility {compatibility[:40]} is an option of TensorRT.", "Name the GPUs with --gpu instead."
        )
    chosen = _parse_choice(REFIT, refit or ("none" if library.compiles_on_target else "identical"), "--refit")
    if library.compiles_on_target and chosen != "none":
        raise InvalidOption(
            f"--refit {chosen} is an option of TensorRT: plans of {library.title} hold their weights.",
            "Choose --refit none, or leave it out.",
        )
    return PlanOptions(
        refit=chosen,
        compatibility=_parse_choice(COMPATIBILITY, compatibility, "--compatibility"),
        workspace=None if workspace is None else int(workspace * 2**30),
        level=level,
        runtime=library.runtime,
    )


def _parse_choice(choices: Mapping[Choice, str], value: str, option: str) -> Choice:
    for choice in choices:
        if choice == value:
            return choice
    costs = "; ".join(f"{choice}: {cost}" for choice, cost in choices.items())
    raise InvalidOption(f"{option} {value[:40]!r} is not one of its choices.", f"Choose one ({costs}).")


def plan_targets(gpu: Target, gpus: Sequence[str], options: PlanOptions) -> tuple[Target, ...]:
    """Return the targets of a build, one for each compute capability.

    `gpu`: the AOTInductor target of this machine, for which TensorRT builds. `gpus`: the names of the GPUs for which
    TensorRT-RTX builds. Raises TensorRTUnavailable, InvalidOption or UnknownGpu.
    """
    library = options.plan_library
    if not library.compiles_on_target:
        if gpus:
            raise InvalidOption(
                f"{library.title} builds on the GPU that runs the plan, so --gpu has no effect.",
                f"Build on that GPU, or choose --runtime {TENSORRT_RTX.runtime}.",
            )
        tag = library.version_tag(require(library, gpu.device))
        return (make_tensorrt_target(gpu, tag, options.compatibility),)
    if not gpus:
        raise InvalidOption(
            f"{library.title} builds for any of its GPUs, and none is named.", "Name one or more, such as --gpu a10g."
        )
    capabilities = sorted({find_capability(name) for name in gpus}, key=lambda name: int(name[2:]))
    tag = library.version_tag(str(import_library(library).__version__))
    return tuple(Target("cuda", "", capability, tag) for capability in capabilities)
