"""Compare a model with diffusers before anything is compiled: its networks, tokenizers, and two steps of its pipeline.

The engines of a build are compared with the wrappers in `engine_builder.networks`. This compares the wrappers with what
users mean by the model's folder: the modules that diffusers and transformers make of it.
"""

import json
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TypeVar

import torch
from torch import Tensor

from engine_builder.building.build_plan import BuildPlan
from engine_builder.building.compare_schedulers import MAX_DIFFERENCE, compare_sampler
from engine_builder.building.counterparts import Counterparts
from engine_builder.building.diffusers_networks import comparisons
from engine_builder.building.diffusers_pipeline import different_tokens, largest_difference
from engine_builder.building.validate import relative_error
from engine_builder.checkpoints.release_settings import read_tokenizers
from engine_builder.checkpoints.scheduler_config import read_scheduler
from engine_builder.kernels.float_arithmetic import float_arithmetic
from engine_builder.kernels.kernel_form import plain_operations
from engine_builder.networks.network import digest_json, library_versions
from engine_builder.networks.quiet import quiet_libraries
from engine_builder.stores.store import WritableStore
from model.errors import PreheatError
from model.store.precision import StorageDtype

# Part of every draft. Raise it when a comparison is added, so that models are compared again.
COMPARISON_VERSION = 1
_RECORDS = "comparisons"
# Largest difference of an image's levels, of 255, by the type of the stored weights.
IMAGE_LIMITS: dict[StorageDtype, int] = {"float32": 2, "float16": 4, "bfloat16": 8}

Result = TypeVar("Result")


class DiffersFromDiffusers(PreheatError):
    """A model would give other images than diffusers, because a form of its files is not supported here."""

    remedy = "This model cannot be served yet. Report it with the JSON files of its folder."


@dataclass(frozen=True)
class Difference:
    """The distance of a result from the library's, and its limit. The error is relative, by norm, unless stated."""

    name: str
    error: float
    limit: float


@dataclass(frozen=True)
class ComparisonReport:
    """The differences of all networks, of the default sampler's steps, and of an image in levels of 255.

    seconds: of the comparison.
    added_bytes: by how much the process's largest memory grew.
    """

    networks: tuple[Difference, ...]
    sampler: Difference
    image: Difference
    seconds: float
    added_bytes: int

    def to_json(self) -> bytes:
        """Return the report as a record of a store."""
        return json.dumps(asdict(self)).encode()


def compare_once(
    plan: BuildPlan, store: WritableStore, builder: Mapping[str, str], report: Callable[[str], None] = lambda _: None
) -> ComparisonReport | None:
    """Compare what a plan builds, unless the store has the report of the same files and components. Then return None.

    `builder`: the manifest's entries, which have the model's digest and all versions. Raises as
    `compare_with_diffusers` does.
    """
    key = digest_json([dict(builder), plan.components, plan.network_device, plan.precision.unquantized.name])
    if store.read_record(_RECORDS, key) is not None:
        return None
    compared = compare_with_diffusers(plan, report)
    store.write_record(_RECORDS, key, compared.to_json())
    return compared


def compare_with_diffusers(plan: BuildPlan, report: Callable[[str], None] = lambda _: None) -> ComparisonReport:
    """Compare everything that a plan builds. `report` is called with what is compared next.

    Raises DiffersFromDiffusers and CheckpointError.
    """
    started, peak = time.perf_counter(), _peak_bytes()
    tokenizers = read_tokenizers(plan.base)
    for name, tokenizer in tokenizers.items():
        report(name)
        if (text := different_tokens(plan.base.root / name, tokenizer)) is not None:
            raise DiffersFromDiffusers(
                f"{plan.base.root / name} encodes {text!r:.60} in other tokens than transformers does."
            )
    report("the sampler")
    read = read_scheduler(plan.base)
    sampler = Difference(read.sampler, compare_sampler(read.config, read.schedule, read.sampler), MAX_DIFFERENCE)
    if not sampler.error <= sampler.limit:
        raise DiffersFromDiffusers(
            f"The steps of {read.sampler} differ from the steps of {read.config['_class_name']} by {sampler.error:.1e} "
            f"(relative); at most {sampler.limit:.0e} is allowed. Nothing was compiled."
        )
    pair = Counterparts(plan)
    differences = []
    with torch.inference_mode(), plain_operations(), float_arithmetic(), quiet_libraries():
        for name, compare in comparisons(pair, tokenizers):
            report(name)
            for component, ours, library in _run(name, compare):
                error = max(_finite_error(*outputs) for outputs in zip(ours, library, strict=True))
                limit = pair.limit(component.partition(" ")[0])
                differences.append(Difference(component, error, limit))
                if not error <= limit:  # also for NaN
                    raise DiffersFromDiffusers(
                        f"{component} of {plan.base.root} differs from {_libraries()} by {error:.1e} (relative, by "
                        f"norm); at most {limit:.0e} is allowed. Nothing was compiled."
                    )
        report("an image")
        limit = IMAGE_LIMITS[pair.storage]
        level = _run("an image", lambda: largest_difference(pair, tokenizers))
    if level > limit:
        raise DiffersFromDiffusers(
            f"An image of {plan.base.root} differs from the image of {_libraries()} by {level} of 255 levels; at most "
            f"{limit} are allowed. Nothing was compiled."
        )
    return ComparisonReport(
        tuple(differences),
        sampler,
        Difference("image", level, limit),
        time.perf_counter() - started,
        max(0, _peak_bytes() - peak),
    )


def _run(name: str, compare: Callable[[], Result]) -> Result:
    """Return the result of a comparison. Raises DiffersFromDiffusers if a network cannot run."""
    try:
        return compare()
    except PreheatError:
        raise
    except Exception as error:  # the libraries raise many types for a config that they do not support
        reason = " ".join(str(error).split())[:200]
        raise DiffersFromDiffusers(
            f"The comparison of {name} with {_libraries()} failed ({type(error).__name__}: {reason}). Nothing was "
            "compiled."
        ) from error


def _finite_error(ours: Tensor, library: Tensor) -> float:
    """Return the relative error of the finite numbers. Infinity for another shape, or other numbers that are finite.

    NaN and infinity at the same places are equal: a broken model is refused when it generates an image.
    """
    if ours.shape != library.shape or not torch.equal(ours.isfinite(), library.isfinite()):
        return float("inf")
    return relative_error(*(tensor[library.isfinite()] for tensor in (ours, library)))


def _libraries() -> str:
    return " and ".join(f"{name} {version}" for name, version in library_versions().items())


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
