"""The engines of plans of a build: found by their plans' keys or built, checked with the model's weights, stored."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load, save_file

from engine_builder.backends.built import BuiltEngines, BuiltRecord, ReportActivity, put_blob
from engine_builder.backends.onnx.export_graph import OnnxGraph, write_model
from engine_builder.backends.onnx.graph_store import BuiltGraph, load_or_export_graph
from engine_builder.backends.tensorrt.build_plans import SerializedPlan, build_plan
from engine_builder.backends.tensorrt.plan_options import PlanOptions
from engine_builder.backends.tensorrt.plan_settings import (
    check_build_memory,
    optimization_profiles,
    plan_key,
    profile_key,
    workspace_limit,
)
from engine_builder.building.build_plan import BuildPlan
from engine_builder.building.engine_timing import largest_inputs, time_engine
from engine_builder.building.real_inputs import Inputs, fit_to_bucket
from engine_builder.building.validate import InaccurateEngine, validate
from engine_builder.building.weights import group_tensors
from engine_builder.networks.network import Network
from engine_builder.stores.store import WritableStore
from model.engines.tensorrt.libraries import import_library, require
from model.engines.tensorrt.plan_engine import TensorRTEngine, TensorRTPlan, Workspace, named_tensors
from model.errors import CorruptBlob, EngineError
from model.loading.target import Target
from model.store.manifest import Accuracy, Benchmark, Blob, Bucket, EngineRecord, WeightsRecord
from model.store.manifest import TensorRTPlan as PlanEntry


class BuiltPlan(BuiltRecord):
    """A component's plan, stored in the record "engines/<plan key>". The lists have one entry per profile.

    They are empty for a plan that was built without its GPU.
    """

    plan: Blob
    constants: Blob
    literals: Blob
    onnx: Blob
    runtime_version: str
    build_seconds: float
    workspace_bytes: list[int]
    benchmarks: list[Benchmark]


@dataclass(frozen=True)
class _ComponentPlan:
    """One component, and everything that its plan is built and checked with."""

    network: Network
    targets: tuple[Target, ...]
    buckets: Sequence[Bucket]
    options: PlanOptions
    version: str
    weights: WeightsRecord
    real_inputs: list[Inputs]
    store: WritableStore

    @property
    def runs_here(self) -> bool:
        """True if the plan is built on its GPU, and is checked there."""
        return not self.options.plan_library.compiles_on_target

    def build(self, graph: OnnxGraph, report: Callable[[str], None]) -> SerializedPlan:
        """Build the plan. Raises NotEnoughMemory or CompileError."""
        network = self.network
        tensors = network.tensors()
        weight_bytes = sum(tensor.nbytes for tensor in tensors.values())
        free_gpu = torch.cuda.mem_get_info()[0] if self.runs_here else None
        workspace = workspace_limit(self.options, weight_bytes, free_gpu)
        check_build_memory(network.component, weight_bytes, workspace, free_gpu, _free_host_bytes())
        with tempfile.TemporaryDirectory(prefix="preheat-") as folder:
            files = []
            for number, group in enumerate(group_tensors(tensors)):
                files.append(Path(folder) / f"{number}")
                save_file({name: tensor.contiguous().cpu() for name, tensor in group.items()}, files[-1])
            model = write_model(graph, files, Path(folder) / "model" / f"{network.component}.onnx", link=True)
            built = build_plan(
                network.component,
                model,
                optimization_profiles(network.signature, self.buckets),
                network.precision,
                self.options,
                workspace,
                [target.capability for target in self.targets],
                read_timing_cache(self.store, self.targets[0]) if self.runs_here else b"",
                report,
            )
        if self.runs_here:
            write_timing_cache(self.store, self.targets[0], built.timing_cache)
        return built

    def check(
        self, data: bytes | memoryview, stored: BuiltGraph, graph: OnnxGraph
    ) -> tuple[list[TensorRTEngine], list[Accuracy]]:
        """Open a plan's engines with this model's weights and compare them with eager PyTorch.

        Raises InaccurateEngine or EngineError.
        """
        network = self.network
        device = _device(network)
        tensors = None
        if self.options.refit != "none":
            literals = load(self.store.get(stored.literals.sha256, stored.literals.bytes).read_bytes())
            on_device = {name: tensor.to(device) for name, tensor in literals.items()}
            tensors = named_tensors(network.component, graph.constants_json(), network.tensors(), on_device, device)
        plan = TensorRTPlan(
            self.options.plan_library, network.component, data, self.version, network.signature, tensors, device
        )
        workspace = Workspace(device)
        engines = [TensorRTEngine(plan, number, bucket, workspace) for number, bucket in enumerate(self.buckets)]
        return engines, [
            validate(network, engine, fit_to_bucket(self.real_inputs, network, engine.bucket)) for engine in engines
        ]

    def check_stored(self, plan: Blob, stored: BuiltGraph, graph: OnnxGraph) -> list[Accuracy]:
        """Return the accuracies of a stored plan; see `check`. The plan is in memory only until this method returns."""
        return self.check(self.store.get(plan.sha256, plan.bytes).read_bytes(), stored, graph)[1]


def build_plans(
    plan: BuildPlan,
    options: PlanOptions,
    networks: dict[str, Network],
    weights: Sequence[WeightsRecord],
    real_inputs: dict[str, list[Inputs]],
    store: WritableStore,
    report: ReportActivity,
) -> BuiltEngines:
    """Build one plan per component, with a profile per bucket, or reuse stored ones.

    `weights`: a record per component, in their order. `real_inputs`: recorded inputs by component. Every engine of
    TensorRT is compared with eager PyTorch on this model's weights. A stored plan that fails is built again. Plans of
    TensorRT-RTX are not run, because their GPU is elsewhere. Raises TensorRTUnavailable, CompileError, NotEnoughMemory
    or InaccurateEngine; then nothing is stored.
    """
    engines = BuiltEngines()
    library = options.plan_library
    version = str(import_library(library).__version__) if library.compiles_on_target else require(library)
    for finished, (component, network) in enumerate(networks.items()):
        planned = _ComponentPlan(
            network,
            plan.targets,
            plan.buckets_of(network),
            options,
            version,
            weights[finished],
            real_inputs.get(component, []),
            store,
        )

        def progress(activity: str, component: str = component, finished: int = finished) -> None:
            report(component, activity, finished)

        records, is_new = _build_component(planned, progress)
        engines.records += records
        (engines.compiled if is_new else engines.reused).append(component)
    return engines


def _build_component(planned: _ComponentPlan, report: Callable[[str], None]) -> tuple[list[EngineRecord], bool]:
    """Return the engines of one component, and True if this call built their plan."""
    network, store = planned.network, planned.store
    key = plan_key(network, planned.targets, planned.version, planned.buckets, planned.options, planned.weights)
    built = BuiltPlan.find(store, key)
    accuracies: list[Accuracy] = []
    if built is not None and planned.runs_here:
        stored, graph = load_or_export_graph(network, store)
        report("refitting and checking")
        try:
            accuracies = planned.check_stored(built.plan, stored, graph)
        except (InaccurateEngine, EngineError) as error:
            report(f"rebuilding: the stored plan failed its check. {error}")
            built = None
    is_new = built is None
    if built is None:
        report("exporting to ONNX")
        stored, graph = load_or_export_graph(network, store)
        serialized = planned.build(graph, report)
        engines: list[TensorRTEngine] = []
        if planned.runs_here:
            report("refitting and checking")
            engines, accuracies = planned.check(serialized.plan, stored, graph)
        device = _device(network).type
        built = BuiltPlan(
            plan=put_blob(store, serialized.plan),
            constants=stored.constants,
            literals=stored.literals,
            onnx=stored.graph,
            runtime_version=planned.version,
            build_seconds=round(serialized.build_seconds, 1),
            workspace_bytes=[engine.workspace_bytes for engine in engines],
            benchmarks=[
                time_engine(engine, largest_inputs(network.signature, engine.bucket, device)) for engine in engines
            ],
        )
        built.write(store, key)
    return list(_engine_records(planned, key, built, accuracies)), is_new


def _engine_records(
    planned: _ComponentPlan, key: str, built: BuiltPlan, accuracies: Sequence[Accuracy]
) -> Iterator[EngineRecord]:
    """Yield the record of each target and profile of a plan. The measured entries are None for a plan that has not run.

    A plan of TensorRT-RTX serves several targets. Then the keys of their engines differ.
    """
    network, refit = planned.network, planned.options.refit
    several = len(planned.targets) > 1
    for target in planned.targets:
        for number, bucket in enumerate(planned.buckets):
            yield EngineRecord(
                component=network.component,
                key=profile_key(key, number, target if several else None),
                target=target.key,
                runtime=planned.options.runtime,
                runtime_version=built.runtime_version,
                bucket=bucket,
                precision=network.precision,
                layout=planned.weights.layout,
                signature=network.signature,
                blob=built.plan,
                constants=built.constants,
                accuracy=accuracies[number] if accuracies else None,
                build_seconds=built.build_seconds,
                benchmark=built.benchmarks[number] if built.benchmarks else None,
                tensorrt=PlanEntry(
                    profile=number,
                    literals=built.literals,
                    onnx=built.onnx,
                    refit=refit,
                    weights=() if refit == "any" else planned.weights.identity,
                    workspace_bytes=built.workspace_bytes[number] if built.workspace_bytes else None,
                ),
            )


def read_timing_cache(store: WritableStore, target: Target) -> bytes:
    """Return the kernel times that earlier builds for a target measured. Empty if they are missing or damaged.

    The cache is stored by target: another GPU's times would select slow kernels.
    """
    data = store.read_record("timing", target.key)
    try:
        blob = Blob.model_validate(json.loads(data)) if data else None
        return store.get(blob.sha256, blob.bytes).read_bytes() if blob else b""
    except (ValueError, CorruptBlob):
        return b""


def write_timing_cache(store: WritableStore, target: Target, data: bytes) -> None:
    """Store a build's timing cache, which includes the previous cache. The last of two concurrent builds wins."""
    store.write_record("timing", target.key, put_blob(store, data).model_dump_json().encode())


def _device(network: Network) -> torch.device:
    return next(iter(network.tensors().values())).device


def _free_host_bytes() -> int:
    """Return the bytes available without swapping, as Linux reports them; elsewhere the free pages."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
