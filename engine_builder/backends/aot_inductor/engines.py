"""AOTInductor's engines of a build: found by their keys or compiled, checked with this model's weights, and kept."""

import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import BaseModel

from engine_builder.backends.aot_inductor import compile as compiler
from engine_builder.backends.aot_inductor.compile_jobs import (
    Done,
    Job,
    compile_jobs,
)
from engine_builder.building.build_plan import BuildPlan
from engine_builder.building.engine_timing import largest_inputs, time_engine
from engine_builder.building.real_inputs import fit
from engine_builder.building.validate import InaccurateEngine, validate
from engine_builder.networks.network import Network
from model.engines.aot_inductor.engine import AotInductorEngine
from model.engines.engine import Engine
from model.errors import CorruptBlob, EngineError
from model.store.manifest import Accuracy, Benchmark, Blob, Bucket, EngineRecord
from model.store.store import Store

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


def build_engines(
    plan: BuildPlan,
    networks: dict[str, Network],
    real: dict[str, list[dict[str, torch.Tensor]]],
    store: Store,
    report: Report,
    steps: int,
    processes: int,
) -> tuple[list[EngineRecord], list[str], list[str]]:
    """Every component's engines, and the components that were compiled and those that were found."""
    wanted = [
        _Wanted(network, bucket, compiler.engine_key(network, plan.target, bucket))
        for network in networks.values()
        for bucket in plan.buckets_of(network)
    ]
    kept: dict[str, CachedEngine] = {}  # by key, as it was checked: another build may replace what the store has
    checked: dict[tuple[str, str], Accuracy] = {}

    def tell(engine: _Wanted, doing: str, why: str = "") -> None:
        of = [other.key for other in wanted if other.component == engine.component]
        number = f" ({of.index(engine.key) + 1} of {len(of)})" if len(of) > 1 else ""
        left = {other.component for other in wanted if other.name not in checked}
        done = len(plan.components) + 1 + len(networks.keys() - left)
        report(engine.component, f"{doing}{number}{why}", done, steps)

    missing: dict[str, _Wanted] = {}  # by key: two components of one architecture share an engine, not its check
    for engine in wanted:
        found = kept.get(engine.key) or find_engine(store, engine.key)
        if found is not None:
            kept[engine.key] = found
            tell(engine, "checking")
            try:
                checked[engine.name] = _check(plan, engine, found, real[engine.component], store)
                continue
            except (InaccurateEngine, EngineError) as error:
                tell(engine, "to be compiled anew", f": the one that was kept is of no use. {error}")
        missing.setdefault(engine.key, engine)
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
                kept[engine.key], checked[engine.name] = _keep(plan, engine, done, real[engine.component], store)
                done.job.package.unlink()
    engines: list[EngineRecord] = []
    compiled: list[str] = []
    reused: list[str] = []
    for engine in wanted:
        (compiled if engine is missing.get(engine.key) else reused).append(engine.component)
        if engine is not missing.get(engine.key, engine):  # which another component was the first to need
            tell(engine, "checking")
            checked[engine.name] = _check(plan, engine, kept[engine.key], real[engine.component], store)
        if kept[engine.key].benchmark is None and plan.target.device == "cuda":
            kept[engine.key] = _time(plan, engine, kept[engine.key], store)
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
                **kept[engine.key].model_dump(),
            )
        )
    return engines, compiled, reused


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


def _keep(
    plan: BuildPlan, wanted: _Wanted, done: Done, real: list[dict[str, torch.Tensor]], store: Store
) -> tuple[CachedEngine, Accuracy]:
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
    return cached, accuracy


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
