"""The AOTInductor engines of a build: found by their keys or compiled, checked with the model's weights, stored."""

import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from engine_builder.backends.aot_inductor import compile as compiler
from engine_builder.backends.aot_inductor.compile_jobs import CompileJob, CompileResult, compile_jobs
from engine_builder.backends.aot_inductor.remaining_time import RemainingTime, expected_seconds
from engine_builder.backends.built import BuiltEngines, BuiltRecord, ReportActivity, put_blob
from engine_builder.building.band_engine import BandEngine
from engine_builder.building.build_plan import BuildPlan
from engine_builder.building.engine_timing import largest_inputs, time_engine
from engine_builder.building.real_inputs import Inputs, fit_to_bucket
from engine_builder.building.validate import InaccurateEngine, validate
from engine_builder.networks.network import Network
from engine_builder.stores.store import WritableStore
from model.engines.aot_inductor.compiled_engine import AotInductorEngine
from model.engines.aot_inductor.package import top_folder
from model.engines.engine import Engine
from model.errors import EngineError
from model.store.manifest import Accuracy, Benchmark, Blob, Bucket, EngineRecord


class BuiltEngine(BuiltRecord):
    """A compiled engine, stored in the record "engines/<engine key>"."""

    blob: Blob
    constants: Blob
    runtime_version: str
    build_seconds: float
    benchmark: Benchmark | None = None


@dataclass(frozen=True)
class _PlannedEngine:
    network: Network
    bucket: Bucket
    key: str
    device: str
    real_inputs: list[Inputs]
    """The component's inputs, recorded in a denoising run."""

    @property
    def component(self) -> str:
        return self.network.component

    @property
    def identity(self) -> tuple[str, str]:
        return self.component, self.key

    def open(self, package: bytes, constants: bytes) -> Engine:
        """Open a package with this model's weights."""
        device = torch.device(self.device)
        network = self.network
        engines = [
            AotInductorEngine(self.component, package, network.signature, self.bucket, constants, device)
            for _ in range(network.bands)
        ]
        for engine in engines:
            engine.bind(network.tensors())
        return engines[0] if len(engines) == 1 else BandEngine(engines)

    def open_stored(self, built: BuiltEngine, store: WritableStore) -> Engine:
        """Open a stored engine with this model's weights."""
        constants = store.get(built.constants.sha256, built.constants.bytes).read_bytes()
        return self.open(store.get(built.blob.sha256, built.blob.bytes).read_bytes(), constants)

    def check(self, engine: Engine) -> Accuracy:
        """Compare an engine with eager PyTorch. Raises InaccurateEngine."""
        return validate(self.network, engine, fit_to_bucket(self.real_inputs, self.network, self.bucket))


def build_engines(
    plan: BuildPlan,
    networks: dict[str, Network],
    real_inputs: dict[str, list[Inputs]],
    store: WritableStore,
    report: ReportActivity,
    processes: int,
    remaining: RemainingTime,
) -> BuiltEngines:
    """Build every component's engines, or reuse stored ones. Raises CompileError or InaccurateEngine.

    `real_inputs`: recorded inputs by component. `remaining` is updated when an engine starts and finishes compiling.
    """
    planned = [
        _PlannedEngine(
            network,
            bucket,
            compiler.engine_key(network, plan.target, bucket),
            plan.target.device,
            real_inputs[component],
        )
        for component, network in networks.items()
        for bucket in plan.buckets_of(network)
    ]
    # Engine key -> checked record. Another build may overwrite the store's record meanwhile.
    built: dict[str, BuiltEngine] = {}
    accuracies: dict[tuple[str, str], Accuracy] = {}

    def progress(engine: _PlannedEngine, activity: str, reason: str = "") -> None:
        keys = [other.key for other in planned if other.component == engine.component]
        number = f" ({keys.index(engine.key) + 1} of {len(keys)})" if len(keys) > 1 else ""
        unfinished = {other.component for other in planned if other.identity not in accuracies}
        report(engine.component, f"{activity}{number}{reason}", len(networks.keys() - unfinished))

    # Engine key -> engine to compile. Components of one architecture share it, and each checks it with its own weights.
    missing: dict[str, _PlannedEngine] = {}
    for engine in planned:
        stored = built.get(engine.key) or BuiltEngine.find(store, engine.key)
        if stored is not None:
            built[engine.key] = stored
            progress(engine, "checking")
            try:
                accuracies[engine.identity] = engine.check(engine.open_stored(stored, store))
                continue
            except (InaccurateEngine, EngineError) as error:
                progress(engine, "recompiling", f": the stored engine failed its check. {error}")
        missing.setdefault(engine.key, engine)
    with tempfile.TemporaryDirectory(prefix="preheat-") as folder:
        jobs = [
            CompileJob(
                key, plan.checkpoint_of(engine.component), engine.component, engine.network.precision.unquantized,
                plan.target, engine.bucket, Path(folder) / f"{top_folder(engine.component, key)}.pt2",
                engine.network.clips, engine.network.precision, plan.lora_rank, plan.unet_chunks,
            )
            for key, engine in missing.items()
        ]  # fmt: skip

        def report_start(job: CompileJob, blocked: bool) -> None:
            remaining.mark_started(job.key)
            progress(missing[job.key], "compiling", ": again, because its processes blocked" if blocked else "")

        expected = {job.key: expected_seconds(job.component, plan.target.device) for job in jobs}
        remaining.plan(expected, min(processes, len(jobs)))
        results = compile_jobs(jobs, networks, processes, report_start)
        with closing(results):
            for result in results:
                engine = missing[result.job.key]
                remaining.mark_finished(engine.key)
                progress(engine, "checking")
                built[engine.key], accuracies[engine.identity] = _check_and_store(engine, result, store)
                result.job.package.unlink()
    engines = BuiltEngines()
    for engine in planned:
        (engines.compiled if engine is missing.get(engine.key) else engines.reused).append(engine.component)
        if engine is not missing.get(engine.key, engine):  # compiled for another component
            progress(engine, "checking")
            accuracies[engine.identity] = engine.check(engine.open_stored(built[engine.key], store))
        # The bands of an image run at the same time on several GPUs, which one GPU cannot time.
        is_timed = plan.target.device == "cuda" and engine.network.bands == 1
        if built[engine.key].benchmark is None and is_timed:
            built[engine.key] = _time_and_store(engine, built[engine.key], store)
        engines.records.append(
            EngineRecord(
                component=engine.component,
                key=engine.key,
                target=plan.target.key,
                runtime="aot_inductor",
                bucket=engine.bucket,
                precision=engine.network.precision,
                layout=engine.network.layout,
                signature=engine.network.signature,
                accuracy=accuracies[engine.identity],
                **built[engine.key].model_dump(),
            )
        )
    return engines


def _check_and_store(
    planned: _PlannedEngine, result: CompileResult, store: WritableStore
) -> tuple[BuiltEngine, Accuracy]:
    """Check a compiled engine, and store it only if it is accurate. Raises InaccurateEngine."""
    constants, package = result.compiled.constants_json(), result.compiled.package
    accuracy = planned.check(planned.open(package.read_bytes(), constants))
    built = BuiltEngine(
        blob=Blob(sha256=store.put(package), bytes=package.stat().st_size),
        constants=put_blob(store, constants),
        runtime_version=torch.__version__.split("+")[0],
        build_seconds=round(result.seconds, 1),
    )
    built.write(store, planned.key)
    return built, accuracy


def _time_and_store(planned: _PlannedEngine, built: BuiltEngine, store: WritableStore) -> BuiltEngine:
    """Time an engine while nothing is compiling, and store the result.

    A GPU's release can also have another runtime's engines, and a deployment can select the fastest.
    """
    inputs = largest_inputs(planned.network.signature, planned.bucket, planned.device)
    timed = built.model_copy(update={"benchmark": time_engine(planned.open_stored(built, store), inputs)})
    timed.write(store, planned.key)
    return timed
