"""A diffusers folder -> engines and weights in a store, and a draft of the release they will make.

Every step ends in a blob or a record that is written atomically, so an interrupted build leaves the store consistent
and the next one continues where it stopped. Engines are found again by their key, which leaves the weights out: a
second model of the same architecture compiles nothing, but its engines are checked anew with its own weights.
"""

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch

from engine_builder.backends.aot_inductor import compile as compiler
from engine_builder.backends.aot_inductor.engines import (
    Report,
    build_engines,
)
from engine_builder.backends.aot_inductor.tuning import tuning_kept_in
from engine_builder.backends.tensorrt.options import Choices
from engine_builder.building.build_plan import BuildPlan
from engine_builder.building.real_inputs import fit, real_inputs
from engine_builder.building.weights import write_weights
from engine_builder.checkpoints.release_settings import (
    read_release_defaults,
    read_schedulers,
    read_settings,
    write_tokenizers,
)
from engine_builder.networks.network import (
    FORM,
    Network,
    Reader,
    library_versions,
    load_network,
)
from model.engines import components
from model.errors import CorruptBlob
from model.store.manifest import EngineRecord, Manifest, WeightsRecord
from model.store.store import Store

_DRAFT = "draft"


@dataclass(frozen=True)
class BuildResult:
    """The draft that `publish` will turn into a release, and what this build had to do for it."""

    draft: Manifest
    compiled: tuple[str, ...]
    reused: tuple[str, ...]


def build(
    plan: BuildPlan,
    store: Store,
    report: Report = lambda *_: None,
    tuning: Path | None = None,
    processes: int = 1,
) -> BuildResult:
    """Bring everything the plan names into the store. Raises ModelFolderError, SizesRefused, CompileError,
    InaccurateEngine, or BrokenImage where the model draws no numbers.

    `tuning`: the folder that keeps what the compiler measures of the target's kernels; None: the compiler's own.
    `processes`: how many engines are compiled side by side; see `engine_builder.backends.aot_inductor.compile_jobs`.
    """
    plan.check_sizes()
    read_release_defaults(plan.base, plan.refiner)  # a wrong one is said before anything is compiled
    source = fingerprint(plan)
    builder = _builder(plan, source)  # raises where something is not installed: before the work, not after it
    draft = _current_draft(plan, store, source)
    if draft is not None:
        return BuildResult(draft, (), tuple(engine.component for engine in draft.engines))
    steps = 2 * len(plan.components) + 1
    networks: dict[str, Network] = {}
    weights = []
    reader = Reader()
    for done, name in enumerate(plan.components):
        report(name, "writing weights", done, steps)
        networks[name] = load_network(
            plan.folder_of(name),
            name,
            plan.precision_of(name),
            plan.target.device,
            reader,
            plain=plan.tensorrt is not None,
        )
        weights.append(write_weights(networks[name], store))
    report("pipeline", "drawing a picture in eager PyTorch", len(plan.components), steps)
    settings, tokenizers = read_settings(plan.base, plan.refiner), write_tokenizers(plan.base, store)
    schedulers = read_schedulers(plan.base, plan.refiner)
    sizes = {(height, width) for _, height, width in plan.sizes}
    real = real_inputs(networks, settings, tokenizers, schedulers, store, plan.target.device, sizes)
    with tuning_kept_in(tuning) if tuning else nullcontext():
        if plan.tensorrt is not None:
            made = _build_tensorrt(plan, plan.tensorrt, networks, weights, real, store, report, steps)
        else:
            made = build_engines(plan, networks, real, store, report, steps, processes)
    engines, compiled, reused = made
    report("release", "drafting", steps, steps)
    draft = Manifest(
        model=plan.model,
        version=_DRAFT,
        family="sdxl",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        builder=builder,
        settings=settings,
        defaults=read_release_defaults(plan.base, plan.refiner),
        schedulers={name: schedule.to_dict() for name, schedule in schedulers.items()},
        tokenizers=tokenizers,
        architectures={name: _digest(network.architecture) for name, network in networks.items()},
        engines=tuple(engines),
        weights=tuple(weights),
    )
    store.write_record("drafts", plan.draft_name, draft.to_json())
    return BuildResult(draft, tuple(compiled), tuple(reused))


def _build_tensorrt(
    plan: BuildPlan,
    choices: Choices,
    networks: dict[str, Network],
    weights: list[WeightsRecord],
    real: dict[str, list[dict[str, torch.Tensor]]],
    store: Store,
    report: Report,
    steps: int,
) -> tuple[list[EngineRecord], list[str], list[str]]:
    """One plan for all of a component's buckets; see `engine_builder.backends.tensorrt.plan_store`."""
    from engine_builder.backends.tensorrt.plan_store import build_engines as build_plans

    engines: list[EngineRecord] = []
    compiled: list[str] = []
    reused: list[str] = []
    for done, (name, network) in enumerate(networks.items()):
        step = len(plan.components) + 1 + done

        def tell(doing: str, component: str = name, step: int = step) -> None:
            report(component, doing, step, steps)

        made, new = build_plans(
            network,
            plan.target,
            plan.buckets_of(network),
            choices,
            weights[done],
            partial(fit, real[name], network),
            store,
            tell,
        )
        engines += made
        (compiled if new else reused).append(name)
    return engines, compiled, reused


def fingerprint(plan: BuildPlan) -> str:
    """SHA-256 over every file of the model's folders, its name and bytes; READMEs and the like left out."""
    digest = hashlib.sha256()
    roots = [plan.base.root] + ([plan.refiner.root] if plan.refiner else [])
    for index, root in enumerate(roots):
        for path in sorted(_files(root)):
            inside = index == 0 and plan.refiner and path.is_relative_to(plan.refiner.root)
            if path.is_file() and path.suffix in (".json", ".txt", ".safetensors") and not inside:
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, "sha256").hexdigest()
                digest.update(f"{index}/{path.relative_to(root)}={content}\n".encode())
    return digest.hexdigest()


def _files(root: Path) -> Iterator[Path]:
    """Every file below a folder, also behind links to folders; each folder once."""
    seen: set[str] = set()
    for folder, folders, names in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders.sort()
        yield from (Path(folder) / name for name in names)


def _current_draft(plan: BuildPlan, store: Store, source: str) -> Manifest | None:
    """The draft of an earlier, finished build of exactly this plan, if all of its blobs are still there and intact."""
    data = store.read_record("drafts", plan.draft_name)
    if data is None:
        return None
    try:
        draft = Manifest.model_validate_json(data)
    except ValueError:
        return None
    unets = [engine.bucket for engine in draft.engines if engine.component == components.UNET]
    same = draft.builder == _builder(plan, source) and set(draft.architectures) == set(plan.components)
    same = same and all(engine.precision == plan.precision_of(engine.component) for engine in draft.engines)
    if plan.sizes:
        planned = [compiler.static_bucket(*size) for size in plan.sizes]
        same = same and len(unets) == len(planned) and all(bucket in unets for bucket in planned)
    else:
        same = same and len(unets) == 1 and unets[0].rows.min < unets[0].rows.max
    if not same:
        return None
    try:
        for digest, blob in draft.blobs().items():
            store.get(digest, blob.bytes)
    except CorruptBlob:
        return None  # a damaged blob is mended by building, which is what its error message promises
    return draft


def _builder(plan: BuildPlan, source: str) -> dict[str, str]:
    """What a draft was made with and of; drafts that agree in it, and in their sizes, are one."""
    chosen = {"tensorrt": json.dumps(asdict(plan.tensorrt), sort_keys=True)} if plan.tensorrt else {}
    return _versions() | {"source": source} | chosen


def _versions() -> dict[str, str]:
    versions = {name: importlib.metadata.version(name) for name in ("preheat", "torch")} | library_versions()
    return versions | {"form": str(FORM), "recipe": str(compiler.RECIPE)}


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
