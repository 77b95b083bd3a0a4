"""A network -> TensorRT engines in a store: found again by their key, or built, checked and kept."""

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from pydantic import BaseModel
from safetensors.torch import load, save_file

from engine_builder.backends.onnx.export import (
    OnnxGraph,
    write_model,
)
from engine_builder.backends.onnx.graph_store import (
    KeptGraph,
    graph_of,
)
from engine_builder.backends.tensorrt.build import build_plan
from engine_builder.backends.tensorrt.options import Choices
from engine_builder.backends.tensorrt.plan_settings import (
    check_build_memory,
    plan_key,
    profile_key,
    profiles,
    workspace_limit,
)
from engine_builder.building.engine_timing import largest_inputs, time_engine
from engine_builder.building.validate import InaccurateEngine, validate
from engine_builder.building.weights import cut
from engine_builder.networks.network import Network
from model.engines.tensorrt import api
from model.engines.tensorrt.engine import (
    TensorRTEngine,
    TensorRTPlan,
    Workspace,
)
from model.errors import CorruptBlob, EngineError
from model.loading.target import Target
from model.store.manifest import Accuracy, Benchmark, Blob, Bucket, EngineRecord, WeightsRecord
from model.store.manifest import TensorRTPlan as PlanRecord
from model.store.store import Store

Report = Callable[[str], None]
Real = Callable[[Bucket], list[dict[str, torch.Tensor]]]
"""The component's inputs of a real denoising run, at a bucket's rows."""
_Checked = tuple[list[TensorRTEngine], list[Accuracy]]


class KeptPlan(BaseModel):
    """What a store remembers of a plan, in the record "engines/<plan key>". A list has an entry a profile."""

    plan: Blob
    constants: Blob
    literals: Blob
    onnx: Blob
    runtime_version: str
    build_seconds: float
    workspace_bytes: list[int]
    benchmarks: list[Benchmark]

    def blobs(self) -> tuple[Blob, ...]:
        return self.plan, self.constants, self.literals, self.onnx


def build_engines(
    network: Network,
    target: Target,
    buckets: Sequence[Bucket],
    choices: Choices,
    weights: WeightsRecord,
    real: Real,
    store: Store,
    report: Report = lambda _: None,
) -> tuple[list[EngineRecord], bool]:
    """The component's engines, one a bucket, all of one plan; and whether it was built now.

    Every engine is held against eager PyTorch with this model's weights, also one that was there, which is built anew
    where it fails. Raises TensorRTUnavailable, CompileError, NotEnoughMemory or InaccurateEngine; then nothing is kept.
    """
    device = next(iter(network.tensors().values())).device
    version = api.require(device)
    key = plan_key(network, target, version, buckets, choices, weights)
    kept = find_plan(store, key)
    checked: _Checked | None = None
    if kept is not None:
        graph, seconds = graph_of(network, store), kept.build_seconds
        data = store.get(kept.plan.sha256, kept.plan.bytes).read_bytes()
        report("refitting and checking")
        try:
            checked = _check(network, data, version, graph, buckets, real, store)
        except (InaccurateEngine, EngineError) as error:
            report(f"to be built anew: the plan that was kept is of no use. {error}")
    if kept is None or checked is None:
        report("exporting to ONNX")
        graph = graph_of(network, store)
        data, seconds = _build(network, target, buckets, choices, graph, store, report)
        report("refitting and checking")
        kept, checked = None, _check(network, data, version, graph, buckets, real, store)
    engines, accuracies = checked
    if kept is None:
        kept = KeptPlan(
            plan=Blob(sha256=store.put_bytes(data), bytes=len(data)),
            constants=graph[0].constants,
            literals=graph[0].literals,
            onnx=graph[0].graph,
            runtime_version=version,
            build_seconds=round(seconds, 1),
            workspace_bytes=[engine.workspace_bytes for engine in engines],
            benchmarks=[
                time_engine(engine, largest_inputs(network.signature, engine.bucket, device.type)) for engine in engines
            ],
        )
        store.write_record("engines", key, kept.model_dump_json().encode())
        new = True
    else:
        new = False
    records = [
        EngineRecord(
            component=network.component,
            key=profile_key(key, number),
            target=target.key,
            runtime="tensorrt",
            runtime_version=kept.runtime_version,
            bucket=bucket,
            precision=network.precision,
            layout=weights.layout,
            signature=network.signature,
            blob=kept.plan,
            constants=kept.constants,
            accuracy=accuracies[number],
            build_seconds=kept.build_seconds,
            benchmark=kept.benchmarks[number],
            tensorrt=PlanRecord(
                profile=number,
                literals=kept.literals,
                onnx=kept.onnx,
                refit=choices.refit,
                weights=weights.identity if choices.refit == "identical" else (),
                workspace_bytes=kept.workspace_bytes[number],
            ),
        )
        for number, bucket in enumerate(buckets)
    ]
    return records, new


def _check(
    network: Network,
    data: bytes,
    version: str,
    graph: tuple[KeptGraph, OnnxGraph],
    buckets: Sequence[Bucket],
    real: Real,
    store: Store,
) -> _Checked:
    """Open a plan's engines with this model's weights and hold them against eager PyTorch.

    Raises InaccurateEngine or EngineError.
    """
    device = next(iter(network.tensors().values())).device
    literals = load(store.get(graph[0].literals.sha256, graph[0].literals.bytes).read_bytes())
    plan = TensorRTPlan(
        network.component,
        data,
        version,
        network.signature,
        graph[1].constants_json(),
        network.tensors(),
        {name: tensor.to(device) for name, tensor in literals.items()},
        device,
    )
    workspace = Workspace(device)
    engines = [TensorRTEngine(plan, number, bucket, workspace) for number, bucket in enumerate(buckets)]
    return engines, [validate(network, engine, real(engine.bucket)) for engine in engines]


def _build(
    network: Network,
    target: Target,
    buckets: Sequence[Bucket],
    choices: Choices,
    graph: tuple[KeptGraph, OnnxGraph],
    store: Store,
    report: Report,
) -> tuple[bytes, float]:
    tensors = network.tensors()
    weight_bytes = sum(tensor.nbytes for tensor in tensors.values())
    free_gpu, _ = torch.cuda.mem_get_info()
    workspace = workspace_limit(choices, weight_bytes, free_gpu)
    check_build_memory(network.component, weight_bytes, workspace, free_gpu, _free_memory())
    with tempfile.TemporaryDirectory(prefix="preheat-") as folder:
        files = []
        for number, group in enumerate(cut(tensors)):
            files.append(Path(folder) / f"{number}")
            save_file({name: tensor.contiguous().cpu() for name, tensor in group.items()}, files[-1])
        model = write_model(graph[1], files, Path(folder) / "model" / f"{network.component}.onnx", link=True)
        built = build_plan(
            network.component,
            model,
            profiles(network.signature, buckets),
            network.precision,
            choices,
            workspace,
            read_timing_cache(store, target),
            report,
        )
    write_timing_cache(store, target, built.timing_cache)
    return built.data, built.seconds


def find_plan(store: Store, key: str) -> KeptPlan | None:
    """The plan under a key, if its blobs are there and intact."""
    data = store.read_record("engines", key)
    if data is None:
        return None
    try:
        kept = KeptPlan.model_validate_json(data)
        for blob in kept.blobs():
            store.get(blob.sha256, blob.bytes)
    except (ValueError, CorruptBlob):
        return None
    return kept


def read_timing_cache(store: Store, target: Target) -> bytes:
    """What earlier builds learned of a target's kernels; empty where there was none, or it is damaged.

    It is kept by target, because one of another GPU would choose kernels by the wrong times.
    """
    data = store.read_record("timing", target.key)
    try:
        blob = Blob.model_validate(json.loads(data)) if data else None
        return store.get(blob.sha256, blob.bytes).read_bytes() if blob else b""
    except (ValueError, CorruptBlob):
        return b""


def write_timing_cache(store: Store, target: Target, data: bytes) -> None:
    """Keep a build's timing cache, which holds what it was given; of two builds at once the last one's stays."""
    blob = Blob(sha256=store.put_bytes(data), bytes=len(data))
    store.write_record("timing", target.key, blob.model_dump_json().encode())


def _free_memory() -> int:
    """Bytes that can be had without swapping, as Linux says; the free pages where it does not."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
