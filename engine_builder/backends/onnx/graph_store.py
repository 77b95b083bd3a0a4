"""ONNX graphs in a store: exported once per architecture, checked against eager PyTorch, written to a folder.

A stored graph is a blob without weights. Its weights are the release's safetensors blobs. AOTInductor engines and
TensorRT plans use the same blobs, so weights are stored once.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import save

from engine_builder.backends.aot_inductor.compile import example_inputs
from engine_builder.backends.built import BuiltRecord, ReportProgress, put_blob
from engine_builder.backends.onnx.export_graph import OnnxGraph, export_graph, graph_key, read_literals, write_model
from engine_builder.backends.onnx.opsets import OPSET
from engine_builder.building.validate import InaccurateEngine, rounding_errors
from engine_builder.building.weights import write_weights
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.files import make_folder
from engine_builder.networks.network import ModuleReader, Network, load_network
from engine_builder.networks.network_check import check_model
from engine_builder.quantization.quantization_plan import Quantization
from engine_builder.stores.store import WritableStore
from model.pipeline.components import COMPONENTS, FAMILIES
from model.pipeline.spec import model_parts
from model.store.manifest import Blob, WeightsRecord
from model.store.manifest_json import parse_constants
from model.store.precision import Precision
from model.store.store import Store

# Largest error of a graph in ONNX Runtime, by the dtype of matrix products: fp32 absolute, others relative (by norm).
# In FP8 a difference in the last bit of an activation can round it to the next number of four significant bits.
MAX_ERROR = {"float32": 1e-4, "float16": 1e-2, "float8_e4m3fn": 5e-2}


class BuiltGraph(BuiltRecord):
    """An exported graph, stored in the record "onnx/<graph key>"."""

    kind: ClassVar[str] = "onnx"

    graph: Blob
    constants: Blob
    literals: Blob
    export_seconds: float


@dataclass(frozen=True)
class ExportedComponent:
    """One component's graph and weights in a store.

    `error`: the largest error, see MAX_ERROR. `is_new`: the graph was exported by this call.
    """

    component: str
    built: BuiltGraph
    weights: WeightsRecord
    error: float
    is_new: bool


def export_model(
    base: Checkpoint,
    refiner: Checkpoint | None,
    precision: Precision,
    store: WritableStore,
    report: ReportProgress = lambda *_: None,
    opset: int = OPSET,
    quantization: Quantization | None = None,
) -> list[ExportedComponent]:
    """Write every component's graph and weights to the store, and check each graph with the model's weights.

    `opset`: one of `opsets.OPSETS`. `quantization`: how networks are quantized, for an 8-bit precision. All other
    components are in fp16 then. Raises CheckpointError, CompileError, CalibrationError or InaccurateEngine.
    """
    assert (quantization is not None) == precision.is_quantized
    check_model(base, refiner)
    names = [spec.name for spec in FAMILIES[base.family].specs(*model_parts(refiner is not None))]
    exported = []
    reader = ModuleReader()
    for done, name in enumerate(names):
        checkpoint = refiner if refiner is not None and COMPONENTS[name].part == "refiner" else base
        report(name, "loading", done, len(names))
        network = load_network(checkpoint, name, precision.unquantized, reader=reader)
        if quantization is not None and quantization.covers(name):
            network, _ = quantization.apply(network)
        report(name, "writing weights", done, len(names))
        weights = write_weights(network, store)
        stored = BuiltGraph.find(store, graph_key(network, opset))
        report(name, "checking" if stored else "exporting", done, len(names))
        started = time.perf_counter()
        graph = read_graph(store, stored) if stored else export_graph(network, opset)
        seconds = time.perf_counter() - started
        error = validate_graph(network, graph)
        built = stored or _write_graph(store, graph_key(network, opset), graph, seconds)
        exported.append(ExportedComponent(name, built, weights, error, is_new=stored is None))
    report("graphs", "done", len(names), len(names))
    return exported


def load_or_export_graph(network: Network, store: WritableStore) -> tuple[BuiltGraph, OnnxGraph]:
    """Return a network's graph from the store, or export and store it. Raises CompileError."""
    stored = BuiltGraph.find(store, graph_key(network))
    if stored is not None:
        return stored, read_graph(store, stored)
    started = time.perf_counter()
    graph = export_graph(network)
    return _write_graph(store, graph_key(network), graph, time.perf_counter() - started), graph


def _write_graph(store: WritableStore, key: str, graph: OnnxGraph, seconds: float) -> BuiltGraph:
    built = BuiltGraph(
        graph=put_blob(store, graph.model),
        constants=put_blob(store, graph.constants_json()),
        literals=put_blob(store, save(read_literals(graph.model))),
        export_seconds=round(seconds, 1),
    )
    built.write(store, key)
    return built


def read_graph(store: Store, built: BuiltGraph) -> OnnxGraph:
    """Read a stored graph. Raises CorruptBlob, ManifestError or StoreError."""
    model, constants = (store.get(blob.sha256, blob.bytes).read_bytes() for blob in (built.graph, built.constants))
    return OnnxGraph(model, {name: entry.model_dump(mode="json") for name, entry in parse_constants(constants).items()})


def validate_graph(network: Network, graph: OnnxGraph) -> float:
    """Compare a graph in ONNX Runtime with eager PyTorch on random inputs of three shapes. Returns the largest error.

    Raises InaccurateEngine.
    """
    from engine_builder.backends.onnx.onnx_engine import OnnxEngine

    engine = OnnxEngine(network.component, graph, network.signature, network.tensors())
    step = network.multiple or 8
    largest_error, limit = 0.0, MAX_ERROR[network.precision.compute]
    for seed, (batch, height, width) in enumerate(((1, 64, 64), (2, 64, 64 + 2 * step), (3, 64 + 3 * step, 64)), 1):
        inputs = example_inputs(network.signature, batch, height, width, "cpu", seed)
        with torch.inference_mode():
            expected = network.module(*inputs.values())
        for index, (reference, output) in enumerate(zip(expected, engine.run(inputs).values(), strict=True)):
            error = _error(reference, output, network.precision)
            if not error <= limit:  # also for NaN
                rounding = rounding_errors(network, inputs, index, output, reference)
                if rounding is None or not rounding.engine_is_as_near:
                    raise InaccurateEngine(
                        f"The ONNX graph of {network.component} differs by {error:.2e} from eager PyTorch; "
                        f"{network.precision} allows {limit:.0e}. It was not stored.",
                        "Export with another --precision.",
                    )
            largest_error = max(largest_error, error)
    return largest_error


def _error(reference: torch.Tensor, output: torch.Tensor, precision: Precision) -> float:
    """Return the error that MAX_ERROR limits. It is NaN if either tensor holds NaN."""
    difference = output.double() - reference.double()
    if precision.compute == "float32":
        return float(difference.abs().max())
    return float(difference.norm() / reference.double().norm())


def write_folder(store: Store, exported: list[ExportedComponent], folder: Path) -> list[Path]:
    """Write each graph to `folder`/<component>.onnx, and the weights that they share to `folder`/weights.

    Raises CompileError, StoreError or NotWritable.
    """
    written = []
    make_folder(folder)
    for component in exported:
        weights = [store.get(blob.sha256, blob.bytes) for blob in component.weights.blobs]
        graph = read_graph(store, component.built)
        written.append(write_model(graph, weights, folder / f"{component.component}.onnx"))
    return written
