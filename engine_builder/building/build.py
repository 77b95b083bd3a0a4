"""Build a model: write its engines and weights to a store, and draft a release.

Each step ends with an atomic write of a blob or a record. So an interrupted build leaves the store consistent, and the
next build continues where it stopped. Engine keys leave the weights out. So a second model of the same architecture
compiles nothing, but the engines are checked again with its weights.
"""

import hashlib
import importlib.metadata
import json
import os
import tomllib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from engine_builder.backends.aot_inductor import compile as compiler
from engine_builder.backends.aot_inductor.engines import build_engines
from engine_builder.backends.aot_inductor.remaining_time import RemainingTime
from engine_builder.backends.aot_inductor.tuning import use_tuning_cache
from engine_builder.backends.built import ReportProgress
from engine_builder.backends.tensorrt.plan_settings import PLAN_VERSION
from engine_builder.building.build_plan import BuildPlan
from engine_builder.building.compare_with_diffusers import COMPARISON_VERSION, ComparisonReport, compare_once
from engine_builder.building.preview_map import PREVIEW_VERSION, with_preview_map
from engine_builder.building.real_inputs import record_real_inputs
from engine_builder.building.weights import write_weights
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.checkpoints.release_settings import (
    read_model_facts,
    read_noise_schedules,
    read_release_defaults,
    write_tokenizers,
)
from engine_builder.kernels.fp8_conv import CONV_VERSION
from engine_builder.kernels.fp8_linear import LINEAR_VERSION
from engine_builder.kernels.int8_linear import INT8_LINEAR_VERSION
from engine_builder.networks.bands import BANDS_VERSION
from engine_builder.networks.network import (
    NETWORK_VERSION,
    SIGNATURES_VERSION,
    ModuleReader,
    Network,
    digest_json,
    library_versions,
)
from engine_builder.networks.network_check import check_model
from engine_builder.networks.vae import splits_scores
from engine_builder.stores.store import WritableStore
from model.engines.tensorrt.libraries import installed_version
from model.errors import CorruptBlob
from model.loading.target import Target
from model.pipeline.components import FAMILIES
from model.pipeline.spec import UNET, VAE_DECODER
from model.store.manifest import Manifest
from model.store.precision import INT8

_DRAFT_VERSION = "draft"
_SOURCE_SUFFIXES = (".json", ".txt", ".safetensors")


@dataclass(frozen=True)
class BuildResult:
    """What a build wrote.

    `draft`: the manifest that `publish` turns into a release, with the engines of all targets. `compiled`, `reused`:
    the components that this build compiled or reused. `comparison`: of the model with diffusers; None: an earlier build
    compared it.
    """

    draft: Manifest
    compiled: tuple[str, ...]
    reused: tuple[str, ...]
    comparison: ComparisonReport | None = None


def build(
    plan: BuildPlan,
    store: WritableStore,
    report: ReportProgress = lambda *_: None,
    tuning: Path | None = None,
    processes: int = 1,
    remaining: RemainingTime | None = None,
) -> BuildResult:
    """Write everything that the plan names to the store.

    `tuning`: folder for the compiler's measurements of the target's kernels; None: the compiler's own folder.
    `processes`: number of engines to compile at once, see `compile_jobs`. `remaining` is updated while engines compile,
    so that a caller can show the time left. Raises CheckpointError, SizesRefused, CombinationRefused,
    DiffersFromDiffusers, CompileError, InaccurateEngine, or BrokenImage if the model generates NaN.
    """
    # 1. Check everything that can be checked without work.
    check_model(plan.base, plan.refiner)
    plan.check_sizes()
    plan.check_combinations()
    facts, defaults = read_model_facts(plan.base, plan.refiner), read_release_defaults(plan.base, plan.refiner)
    schedulers = read_noise_schedules(plan.base, plan.refiner)
    source = fingerprint(plan.base, plan.refiner)
    builder = _builder_entries(plan, source)  # raises if a library is not installed
    draft = _current_draft(plan, store, source)
    if draft is not None:
        return BuildResult(draft, (), tuple(engine.component for engine in draft.engines))
    # 2. Compare the model with diffusers, before anything is compiled.
    steps = 2 * len(plan.components) + 1
    comparison = compare_once(plan, store, builder, lambda name: report(name, "comparing with diffusers", 0, steps))
    # 3. Load the networks, store their weights.
    networks: dict[str, Network] = {}
    weights = []
    reader = ModuleReader(plan.merge.change if plan.merge else None)
    for done, name in enumerate(plan.components):
        report(name, "writing weights", done, steps)
        networks[name] = plan.load(name, reader)
        weights.append(write_weights(networks[name], store))
    # 4. Record the inputs of a real denoising run, if the engines are run here.
    tokenizers = write_tokenizers(plan.base, store)
    real_inputs = {}
    if plan.runs_here:
        report("pipeline", "generating an image in eager PyTorch", len(plan.components), steps)
        sizes = {(size.height, size.width) for size in plan.sizes}
        real_inputs = record_real_inputs(networks, plan.base, plan.refiner, plan.network_device, sizes)
        report(VAE_DECODER, "fitting the map for previews", len(plan.components), steps)
        facts = with_preview_map(facts, FAMILIES[plan.base.family], networks, real_inputs)

    # 5. Build and check the engines.
    def report_engine(component: str, activity: str, finished: int) -> None:
        report(component, activity, len(plan.components) + 1 + finished, steps)

    with use_tuning_cache(tuning) if tuning else nullcontext():
        if plan.tensorrt is None:
            engines = build_engines(
                plan, networks, real_inputs, store, report_engine, processes, remaining or RemainingTime()
            )
        else:
            from engine_builder.backends.tensorrt.plan_store import build_plans

            engines = build_plans(plan, plan.tensorrt, networks, weights, real_inputs, store, report_engine)
    # 6. Draft the release: a draft for each target.
    report("release", "drafting", steps, steps)
    built = Manifest(
        model=plan.model,
        version=_DRAFT_VERSION,
        family=plan.base.family,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        builder=builder,
        settings=facts,
        defaults=defaults,
        schedulers={name: schedule.to_dict() for name, schedule in schedulers.items()},
        tokenizers=tokenizers,
        architectures={name: digest_json(network.architecture) for name, network in networks.items()},
        engines=tuple(engines.records),
        weights=tuple(weights),
        fp16_steps=plan.quantization.fp16_steps if plan.quantization else None,
    )
    for target in plan.targets:
        store.write_record("drafts", plan.draft_name(target), _draft_for(built, target).to_json())
    return BuildResult(built, tuple(engines.compiled), tuple(engines.reused), comparison)


def fingerprint(base: Checkpoint, refiner: Checkpoint | None) -> str:
    """Return the SHA-256 of the names and bytes of the model's files, and of its ControlNets' and IP-Adapters' names.

    Other files, such as READMEs, do not count.
    """
    digest = hashlib.sha256()
    roots = [base.root] + ([refiner.root] if refiner else [])
    roots += [base.vae] if base.vae else []
    roots += [folder for _, folder in base.controlnets]
    roots += [path for files in base.ip_adapters for path in (files.path, files.encoder)]
    roots += [base.safety_checker] if base.safety_checker else []
    names = [name for name, _ in base.controlnets] + [files.name for files in base.ip_adapters]
    if names:  # else the digest of a plain model would not be what it was before
        digest.update(f"{json.dumps(names)}\n".encode())
    for index, root in enumerate(roots):
        for path in sorted(_files(root)) if root.is_dir() else [root]:
            refiner_file = index == 0 and refiner and path.is_relative_to(refiner.root)
            if path.is_file() and path.suffix in _SOURCE_SUFFIXES and not refiner_file:
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, "sha256").hexdigest()
                digest.update(f"{index}/{path.relative_to(root)}={content}\n".encode())
    return digest.hexdigest()


def preheat_version() -> str:
    """Return the version in pyproject.toml. A checkout that is not installed has no other record of it."""
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
    return str(project["version"])


def _files(root: Path) -> Iterator[Path]:
    """Yield every file below a folder, following links to folders. Each folder is visited once."""
    visited: set[str] = set()
    for folder, subfolders, names in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in visited:
            subfolders.clear()
            continue
        visited.add(real)
        subfolders.sort()
        yield from (Path(folder) / name for name in names)


def _draft_for(built: Manifest, target: Target) -> Manifest:
    """Return a manifest with the engines of one target."""
    return built.model_copy(update={"engines": tuple(e for e in built.engines if e.target == target.key)})


def _current_draft(plan: BuildPlan, store: WritableStore, source: str) -> Manifest | None:
    """Return the draft of an earlier, finished build of exactly this plan, if all of its blobs are intact."""
    drafts = [_current_draft_of(plan, target, store, source) for target in plan.targets]
    found = [draft for draft in drafts if draft is not None]
    if len(found) < len(drafts):
        return None
    return found[0].model_copy(update={"engines": tuple(engine for draft in found for engine in draft.engines)})


def _current_draft_of(plan: BuildPlan, target: Target, store: WritableStore, source: str) -> Manifest | None:
    data = store.read_record("drafts", plan.draft_name(target))
    if data is None:
        return None
    try:
        draft = Manifest.model_validate_json(data)
    except ValueError:
        return None
    unets = [engine.bucket for engine in draft.engines if engine.component == UNET]
    planned = [compiler.static_bucket(*size) for size in plan.sizes]
    matches = draft.builder == _builder_entries(plan, source) and set(draft.architectures) == set(plan.components)
    matches = matches and all(engine.precision == plan.precision_of(engine.component) for engine in draft.engines)
    matches = matches and len(unets) == (len(planned) or 1) and all(bucket in unets for bucket in planned)
    if not matches or (not planned and unets[0].batch.min == unets[0].batch.max):
        return None
    try:
        for digest, blob in draft.blobs().items():
            store.get(digest, blob.bytes)
    except CorruptBlob:
        return None  # building again replaces a damaged blob, as the error's remedy states
    return draft


def _builder_entries(plan: BuildPlan, source: str) -> dict[str, str]:
    """Return the manifest's `builder` entries: versions, source and options.

    Drafts with equal entries and equal sizes are equal.
    """
    versions = {"preheat": preheat_version(), "torch": importlib.metadata.version("torch")} | library_versions()
    versions |= {
        "form": str(NETWORK_VERSION),
        "signatures": str(SIGNATURES_VERSION),
        "recipe": str(compiler.COMPILER_VERSION),
        "comparison": str(COMPARISON_VERSION),
        "preview": str(PREVIEW_VERSION),
    }
    options = {}
    if plan.tensorrt:
        plans = {"version": installed_version(plan.tensorrt.plan_library), "recipe": PLAN_VERSION}
        options = {"tensorrt": json.dumps(asdict(plan.tensorrt) | plans, sort_keys=True)}
    if plan.merge:
        options |= {"adapters": json.dumps(plan.merge.sources)}
    if plan.lora_rank:
        options |= {"lora_rank": str(plan.lora_rank)}
    if plan.bands:
        options["bands"] = json.dumps([BANDS_VERSION, *plan.bands])
    if plan.target.device == "cuda" and any(splits_scores(1, size.height * size.width // 64) for size in plan.sizes):
        options["attention"] = "in pieces"
    if plan.sizes and plan.text_chunks != 1:
        options["text_chunks"] = str(plan.text_chunks)
    if plan.quantization:
        version = INT8_LINEAR_VERSION if plan.quantization.precision == INT8 else LINEAR_VERSION
        options |= {"quantization": plan.quantization.digest, plan.quantization.precision.name: str(version)}
        if plan.quantization.policy.convolutions or plan.quantization.policy.vae_convolutions:
            options["fp8_convolutions"] = str(CONV_VERSION)
    if preset := plan.base.preset:
        options["preset"] = json.dumps([preset.name, preset.scheduler, preset.defaults], sort_keys=True)
    if plan.base.ip_adapters:
        options["ip_images"] = str(plan.base.ip_images)
    if plan.base.embedding_rows:
        options["embedding_rows"] = str(plan.base.embedding_rows)
    if plan.base.vae:
        options["vae"] = plan.base.vae.name
    return versions | {"source": source} | options
