"""A diffusers folder -> engines and weights in a store, and a draft of the release they will make.

Every step ends in a blob or a record that is written atomically, so an interrupted build leaves the store consistent
and the next one continues where it stopped. Engines are found again by their key, which leaves the weights out: a
second model of the same architecture compiles nothing, but its engines are checked anew with its own weights.
"""

import hashlib
import importlib.metadata
import json
import tempfile
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
from pydantic import BaseModel

from engine_builder.building import compile as compiler
from engine_builder.building.compile_jobs import Done, Job, compile_jobs
from engine_builder.building.engine_timing import largest_inputs, time_engine
from engine_builder.building.real_inputs import fit, real_inputs
from engine_builder.building.tuning import tuning_kept_in
from engine_builder.building.validate import validate
from engine_builder.building.weights import write_weights
from engine_builder.model_folder.release_settings import (
    read_release_defaults,
    read_schedulers,
    read_settings,
    write_tokenizers,
)
from engine_builder.networks import ModelFolder, Network, Reader, load_network
from engine_builder.tensorrt_plans.choices import Choices
from model import components
from model.components import BASE_COMPONENTS, REFINER_COMPONENTS
from model.engines import Engine
from model.engines.aot_inductor import AotInductorEngine
from model.errors import CorruptBlob, StoreError
from model.schedule import MAX_STEPS
from model.store import Store
from model.store.manifest import (
    Accuracy,
    Benchmark,
    Blob,
    Bucket,
    EngineRecord,
    Manifest,
    Precision,
    WeightsRecord,
)
from model.target import Target

_DRAFT = "draft"
_STEPS = 32  # that a GPU embeds the times of at once; more take several calls

Report = Callable[[str, str, int, int], None]
"""Told (component, what is being done, steps done, steps in all)."""


class CachedEngine(BaseModel):
    """What a store remembers under an engine key."""

    blob: Blob
    constants: Blob
    runtime_version: str
    build_seconds: float
    benchmark: Benchmark | None = None


@dataclass(frozen=True)
class BuildPlan:
    """What to build: a model folder (and its refiner's), for which device, in which precision and buckets.

    The VAE has a precision of its own, `vae_precision`; None: see `precision_of`.
    No `sizes` means dynamic engines (CPU); else one engine per (rows, height, width) and component. With `tensorrt` its
    runtime's engines are built, for a target of its own; else AOTInductor's.
    """

    model: str
    base: ModelFolder
    refiner: ModelFolder | None
    target: Target
    precision: Precision
    sizes: tuple[tuple[int, int, int], ...] = ()
    tensorrt: Choices | None = None
    vae_precision: Precision | None = None

    @property
    def components(self) -> tuple[str, ...]:
        return BASE_COMPONENTS + (REFINER_COMPONENTS if self.refiner else ())

    def folder_of(self, component: str) -> ModelFolder:
        if component not in REFINER_COMPONENTS:
            return self.base
        assert self.refiner is not None
        return self.refiner

    def precision_of(self, component: str) -> Precision:
        """The plan's precision; unless it was chosen, fp32 for the VAE of an fp16 model whose config has force_upcast,
        which overflows in fp16 (as diffusers has it, whose default is true)."""
        if component != components.VAE_DECODER:
            return self.precision
        if self.vae_precision is not None:
            return self.vae_precision
        return "fp32" if self.precision == "fp16" and self.upcasts_vae else self.precision

    @property
    def upcasts_vae(self) -> bool:
        """Whether the VAE's config says that it does not bear fp16."""
        return bool(self.base.config("vae").get("force_upcast", True))

    def buckets_of(self, network: Network) -> list[Bucket]:
        """The buckets one component is compiled for. What reads text takes one row a text, what embeds the time one a
        step, decoders one an image."""
        if network.component in (components.UNET_TIME, components.REFINER_UNET_TIME):
            return [
                compiler.static_bucket(_STEPS, None, None) if self.sizes else compiler.dynamic_bucket(None, MAX_STEPS)
            ]
        if not self.sizes:
            return [compiler.dynamic_bucket(network.multiple)]
        if network.multiple is None:
            return [compiler.static_bucket(rows, None, None) for rows in (1, 2)]
        if network.component == components.VAE_DECODER:
            return [compiler.static_bucket(1, h, w) for h, w in dict.fromkeys((h, w) for _, h, w in self.sizes)]
        return [compiler.static_bucket(*size) for size in self.sizes]

    @property
    def draft_name(self) -> str:
        return f"{self.model}.{self.target.key}.{self.precision}"


@dataclass(frozen=True)
class _Wanted:
    """An engine of the release to be."""

    network: Network
    bucket: Bucket
    key: str

    @property
    def component(self) -> str:
        return self.network.component

    @property
    def name(self) -> tuple[str, str]:
        return self.component, self.key


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
    """Bring everything the plan names into the store. Raises ModelFolderError, CompileError, InaccurateEngine, or
    BrokenImage where the model draws no numbers.

    `tuning`: the folder that keeps what the compiler measures of the target's kernels; None: the compiler's own.
    `processes`: how many engines are compiled side by side; see `engine_builder.building.compile_jobs`.
    """
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
        networks[name] = load_network(plan.folder_of(name), name, plan.precision_of(name), plan.target.device, reader)
        weights.append(write_weights(networks[name], store))
    report("pipeline", "drawing a picture in eager PyTorch", len(plan.components), steps)
    settings, tokenizers = read_settings(plan.base, plan.refiner), write_tokenizers(plan.base, store)
    schedulers = read_schedulers(plan.base, plan.refiner)
    sizes = {(height, width) for _, height, width in plan.sizes}
    real = real_inputs(networks, settings, tokenizers, schedulers, store, plan.target.device, sizes)
    with tuning_kept_in(tuning) if tuning else nullcontext():
        engines, compiled, reused = _build_engines(plan, networks, weights, real, store, report, steps, processes)
    report("release", "drafting", steps, steps)
    draft = Manifest(
        model=plan.model,
        version=_DRAFT,
        family="sdxl",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        builder=builder,
        settings=settings,
        defaults=read_release_defaults(plan.base),
        schedulers={name: schedule.to_dict() for name, schedule in schedulers.items()},
        tokenizers=tokenizers,
        architectures={name: _digest(network.architecture) for name, network in networks.items()},
        engines=tuple(engines),
        weights=tuple(weights),
    )
    store.write_record("drafts", plan.draft_name, draft.to_json())
    return BuildResult(draft, tuple(compiled), tuple(reused))


def _build_engines(
    plan: BuildPlan,
    networks: dict[str, Network],
    weights: list[WeightsRecord],
    real: dict[str, list[dict[str, torch.Tensor]]],
    store: Store,
    report: Report,
    steps: int,
    processes: int,
) -> tuple[list[EngineRecord], list[str], list[str]]:
    """Every component's engines, and the components that were compiled and those that were found."""
    if plan.tensorrt is not None:
        return _build_tensorrt(plan, plan.tensorrt, networks, weights, real, store, report, steps)
    wanted = [
        _Wanted(network, bucket, compiler.engine_key(network, plan.target, bucket))
        for network in networks.values()
        for bucket in plan.buckets_of(network)
    ]
    missing: dict[str, _Wanted] = {}  # by key: two components of one architecture share an engine, not its check
    for engine in wanted:
        if engine.key not in missing and find_engine(store, engine.key) is None:
            missing[engine.key] = engine
    checked: dict[tuple[str, str], Accuracy] = {}

    def tell(engine: _Wanted, doing: str) -> None:
        of = [other.key for other in wanted if other.component == engine.component]
        number = f" ({of.index(engine.key) + 1} of {len(of)})" if len(of) > 1 else ""
        left = {other.component for other in wanted if other.name not in checked}
        report(engine.component, f"{doing}{number}", len(plan.components) + 1 + len(networks.keys() - left), steps)

    with tempfile.TemporaryDirectory(prefix="preheat-") as folder:
        jobs = [
            Job(
                key, plan.folder_of(engine.component), engine.component, engine.network.precision, plan.target,
                engine.bucket, Path(folder) / f"{engine.component}-{key[:12]}.pt2",
            )
            for key, engine in missing.items()
        ]  # fmt: skip
        begun = compile_jobs(jobs, networks, processes, lambda job: tell(missing[job.key], "compiling"))
        with closing(begun) as compiling:
            for done in compiling:
                engine = missing[done.job.key]
                checked[engine.name] = _keep(plan, engine, done, real[engine.component], store)
                done.job.package.unlink()
    engines: list[EngineRecord] = []
    compiled: list[str] = []
    reused: list[str] = []
    for engine in wanted:
        cached = find_engine(store, engine.key)
        if cached is None:
            raise StoreError(f"The engine of the {engine.component} was kept and is gone again from {store.url}.")
        if engine.name in checked:
            compiled.append(engine.component)
        else:
            reused.append(engine.component)
            tell(engine, "checking")
            checked[engine.name] = _check(plan, engine, cached, real[engine.component], store)
        if cached.benchmark is None and plan.target.device == "cuda":
            cached = _time(plan, engine, cached, store)
        engines.append(
            EngineRecord(
                component=engine.component,
                key=engine.key,
                target=plan.target.key,
                runtime="aot_inductor",
                bucket=engine.bucket,
                precision=engine.network.precision,
                layout=engine.network.layout,
                signature=engine.network.signature,
                accuracy=checked[engine.name],
                **cached.model_dump(),
            )
        )
    return engines, compiled, reused


def fingerprint(plan: BuildPlan) -> str:
    """SHA-256 over every file of the model's folders, its name and bytes; READMEs and the like left out."""
    digest = hashlib.sha256()
    roots = [plan.base.root] + ([plan.refiner.root] if plan.refiner else [])
    for index, root in enumerate(roots):
        for path in sorted(root.rglob("*")):
            inside = index == 0 and plan.refiner and path.is_relative_to(plan.refiner.root)
            if path.is_file() and path.suffix in (".json", ".txt", ".safetensors") and not inside:
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, "sha256").hexdigest()
                digest.update(f"{index}/{path.relative_to(root)}={content}\n".encode())
    return digest.hexdigest()


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


def find_engine(store: Store, key: str) -> CachedEngine | None:
    """The engine kept under a key, if its record is sound and its blobs are intact."""
    data = store.read_record("engines", key)
    if data is None:
        return None
    try:
        cached = CachedEngine.model_validate_json(data)
        for blob in (cached.blob, cached.constants):
            store.get(blob.sha256, blob.bytes)
    except (ValueError, CorruptBlob):
        return None
    return cached


def _keep(plan: BuildPlan, wanted: _Wanted, done: Done, real: list[dict[str, torch.Tensor]], store: Store) -> Accuracy:
    """Check what was compiled, and only then keep it."""
    constants, package = done.compiled.constants_json(), done.compiled.package
    engine = _open(plan, wanted, package, constants)
    accuracy = validate(wanted.network, engine, fit(real, wanted.network, wanted.bucket))
    cached = CachedEngine(
        blob=Blob(sha256=store.put(package), bytes=package.stat().st_size),
        constants=Blob(sha256=store.put_bytes(constants), bytes=len(constants)),
        runtime_version=torch.__version__.split("+")[0],
        build_seconds=round(done.seconds, 1),
    )
    store.write_record("engines", wanted.key, cached.model_dump_json().encode())
    return accuracy


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
    """One plan for all of a component's buckets; see `engine_builder.tensorrt_plans.store`."""
    from engine_builder.tensorrt_plans.store import build_engines

    engines: list[EngineRecord] = []
    compiled: list[str] = []
    reused: list[str] = []
    for done, (name, network) in enumerate(networks.items()):
        step = len(plan.components) + 1 + done

        def tell(doing: str, component: str = name, step: int = step) -> None:
            report(component, doing, step, steps)

        made, new = build_engines(
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


def _time(plan: BuildPlan, wanted: _Wanted, cached: CachedEngine, store: Store) -> CachedEngine:
    """Measure an engine, while nothing is compiled beside it, and remember that: on a GPU a release can have another
    runtime's engines, too, and a deployment take the faster."""
    inputs = largest_inputs(wanted.network.signature, wanted.bucket, plan.target.device)
    timed = cached.model_copy(update={"benchmark": time_engine(_open_kept(plan, wanted, cached, store), inputs)})
    store.write_record("engines", wanted.key, timed.model_dump_json().encode())
    return timed


def _check(
    plan: BuildPlan, wanted: _Wanted, cached: CachedEngine, real: list[dict[str, torch.Tensor]], store: Store
) -> Accuracy:
    """Hold an engine that is already there against this model's weights."""
    engine = _open_kept(plan, wanted, cached, store)
    return validate(wanted.network, engine, fit(real, wanted.network, wanted.bucket))


def _open_kept(plan: BuildPlan, wanted: _Wanted, cached: CachedEngine, store: Store) -> Engine:
    package = store.get(cached.blob.sha256, cached.blob.bytes)
    constants = store.get(cached.constants.sha256, cached.constants.bytes).read_bytes()
    return _open(plan, wanted, package, constants)


def _open(plan: BuildPlan, wanted: _Wanted, package: Path, constants: bytes) -> Engine:
    return AotInductorEngine(
        wanted.component,
        package,
        wanted.network.signature,
        wanted.bucket,
        constants,
        wanted.network.tensors(),
        torch.device(plan.target.device),
    )


def _builder(plan: BuildPlan, source: str) -> dict[str, str]:
    """What a draft was made with and of; drafts that agree in it, and in their sizes, are one."""
    chosen = {"tensorrt": json.dumps(asdict(plan.tensorrt), sort_keys=True)} if plan.tensorrt else {}
    return _versions() | {"source": source} | chosen


def _versions() -> dict[str, str]:
    names = ("preheat", "torch", "diffusers", "transformers")
    return {name: importlib.metadata.version(name) for name in names} | {"recipe": str(compiler.RECIPE)}


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
