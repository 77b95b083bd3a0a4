"""ONNX graphs of a model in a store: exported once an architecture, held against eager PyTorch, written out for others.

A graph is a blob that holds no weights; the weights are the release's own safetensors blobs, so they are there once,
whoever reads them: AOTInductor engines, TensorRT plans, or ONNX Runtime through `write_folder`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import BaseModel
from safetensors.torch import save

from engine_builder.backends.aot_inductor.compile import example_inputs
from engine_builder.backends.onnx.export import (
    OnnxGraph,
    export_graph,
    graph_key,
    literals,
    write_model,
)
from engine_builder.building.validate import InaccurateEngine
from engine_builder.building.weights import write_weights
from engine_builder.networks.network import (
    ModelFolder,
    Network,
    Reader,
    load_network,
)
from model.engines.components import (
    BASE_COMPONENTS,
    REFINER_COMPONENTS,
)
from model.errors import CorruptBlob
from model.store.manifest import Blob, Precision, WeightsRecord
from model.store.manifest_json import parse_constants
from model.store.store import Store

# What a graph may differ from eager PyTorch in ONNX Runtime: fp32 absolutely, fp16 relatively (by norm).
ABSOLUTE = {"fp32": 1e-4}
RELATIVE = {"fp16": 1e-2}

Report = Callable[[str, str, int, int], None]


class KeptGraph(BaseModel):
    """What a store remembers of a graph, in the record "onnx/<graph key>"."""

    graph: Blob
    constants: Blob
    literals: Blob
    export_seconds: float

    def blobs(self) -> tuple[Blob, Blob, Blob]:
        return self.graph, self.constants, self.literals


@dataclass(frozen=True)
class Exported:
    """One component's graph and weights in a store. `error` is its largest difference from eager PyTorch, absolute for
    fp32 and relative for fp16."""

    component: str
    kept: KeptGraph
    weights: WeightsRecord
    error: float
    new: bool


def export_model(
    base: ModelFolder, refiner: ModelFolder | None, precision: Precision, store: Store, report: Report = lambda *_: None
) -> list[Exported]:
    """Every component's graph and weights into the store, each graph checked with this model's weights.

    Raises ModelFolderError, CompileError or InaccurateEngine.
    """
    names = BASE_COMPONENTS + (REFINER_COMPONENTS if refiner else ())
    made = []
    reader = Reader()
    for done, name in enumerate(names):
        folder = refiner if refiner is not None and name in REFINER_COMPONENTS else base
        report(name, "loading", done, len(names))
        network = load_network(folder, name, precision, reader=reader)
        report(name, "writing weights", done, len(names))
        weights = write_weights(network, store)
        kept = find_graph(store, graph_key(network))
        report(name, "exporting" if kept is None else "checking", done, len(names))
        new = kept is None
        began = time.perf_counter()
        graph = read_graph(store, kept) if kept else export_graph(network)
        seconds = time.perf_counter() - began
        error = check_graph_runs(network, graph)
        kept = kept or keep_graph(store, network, graph, seconds)
        made.append(Exported(name, kept, weights, error, new))
    report("graphs", "done", len(names), len(names))
    return made


def graph_of(network: Network, store: Store) -> tuple[KeptGraph, OnnxGraph]:
    """A network's graph, from the store or exported now. Raises CompileError."""
    kept = find_graph(store, graph_key(network))
    if kept is not None:
        return kept, read_graph(store, kept)
    began = time.perf_counter()
    graph = export_graph(network)
    return keep_graph(store, network, graph, time.perf_counter() - began), graph


def keep_graph(store: Store, network: Network, graph: OnnxGraph, seconds: float) -> KeptGraph:
    """A graph, its map and its literals as blobs, and the record that finds them again."""
    parts = (graph.model, graph.constants_json(), save(literals(graph.model)))
    blobs = [Blob(sha256=store.put_bytes(data), bytes=len(data)) for data in parts]
    kept = KeptGraph(graph=blobs[0], constants=blobs[1], literals=blobs[2], export_seconds=round(seconds, 1))
    store.write_record("onnx", graph_key(network), kept.model_dump_json().encode())
    return kept


def find_graph(store: Store, key: str) -> KeptGraph | None:
    """The graph under a key, if its blobs are there and intact."""
    data = store.read_record("onnx", key)
    if data is None:
        return None
    try:
        kept = KeptGraph.model_validate_json(data)
        for blob in kept.blobs():
            store.get(blob.sha256, blob.bytes)
    except (ValueError, CorruptBlob):
        return None
    return kept


def read_graph(store: Store, kept: KeptGraph) -> OnnxGraph:
    """A kept graph. Raises CorruptBlob, ManifestError or StoreError."""
    model, constants = (store.get(b.sha256, b.bytes).read_bytes() for b in (kept.graph, kept.constants))
    return OnnxGraph(model, {name: entry.model_dump(mode="json") for name, entry in parse_constants(constants).items()})


def check_graph_runs(network: Network, graph: OnnxGraph) -> float:
    """Run a graph in ONNX Runtime and the network in eager PyTorch on random inputs of three shapes; the largest error.

    Raises InaccurateEngine.
    """
    from engine_builder.backends.onnx.engine import OnnxEngine

    engine = OnnxEngine(network.component, graph, network.signature, network.tensors())
    step = network.multiple or 8
    worst = 0.0
    for seed, (rows, height, width) in enumerate(((1, 64, 64), (2, 64, 64 + 2 * step), (3, 64 + 3 * step, 64)), 1):
        case = example_inputs(network.signature, rows, height, width, "cpu", seed)
        with torch.inference_mode():
            expected = network.module(*case.values())
        for reference, output in zip(expected, engine.run(case).values(), strict=True):
            worst = max(worst, difference(reference, output, network.precision))
    limit = (ABSOLUTE | RELATIVE)[network.precision]
    if not worst <= limit:
        raise InaccurateEngine(
            f"The ONNX graph of {network.component} is off by {worst:.2e} from eager PyTorch, more than {limit:.0e} "
            f"for {network.precision}: it was not kept."
        )
    return worst


def difference(reference: torch.Tensor, output: torch.Tensor, precision: Precision) -> float:
    """The largest absolute error for fp32, the relative error by norm for fp16. NaN where either is not a number."""
    apart = output.double() - reference.double()
    if precision in ABSOLUTE:
        return float(apart.abs().max())
    return float(apart.norm() / reference.double().norm())


def write_folder(store: Store, exported: list[Exported], folder: Path) -> list[Path]:
    """`folder`/<component>.onnx, and the weights they share in `folder`/weights. Raises CompileError, StoreError."""
    written = []
    folder.mkdir(parents=True, exist_ok=True)
    for one in exported:
        weights = [store.get(blob.sha256, blob.bytes) for blob in one.weights.blobs]
        written.append(write_model(read_graph(store, one.kept), weights, folder / f"{one.component}.onnx"))
    return written
