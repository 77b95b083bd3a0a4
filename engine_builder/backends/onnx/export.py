"""A network -> an ONNX graph that holds no weights, and the map that says which tensor each initializer is.

The network is exported from the meta device, so no weight can be folded, renamed, transposed or dropped for its values:
an initializer has its tensor's name, dtype and shape, and one graph serves every model of the architecture. Weights are
external data. In a store the graph stands alone; `write_model` puts it beside safetensors files and points its
initializers into them, which is how ONNX Runtime and TensorRT's parser read it. Nothing is converted: the graph has the
types of the network it was made from, as TensorRT 11, which is strongly typed, wants it.
"""

import copy
import hashlib
import json
import logging
import os
import shutil
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch
from onnx import TensorProto
from torch import nn

from engine_builder.backends.aot_inductor.compile import (
    CompileError,
    dynamic_bucket,
    dynamic_shapes,
    example_of,
    quiet,
)
from engine_builder.networks.network import (
    FORM,
    Network,
    library_versions,
    public_name,
)
from model.engines.components import dtype_name
from model.store.manifest import Bucket, Signature

# Raised whenever what comes out of an export changes for one network.
RECIPE = 1
OPSET = 20
PRECISIONS = ("fp32", "fp16")
WEIGHTS = "weights"  # where a graph in a store says its weights are: nowhere, until `write_model` names the files
_MAX_ROWS, _MAX_SIDE = 32, 2048  # what the export is asked to hold for; TensorRT's profiles narrow it


@dataclass(frozen=True)
class OnnxGraph:
    """`model`: a serialized ModelProto without weights. `constants`: initializer -> {tensor, dtype, shape}."""

    model: bytes
    constants: dict[str, dict[str, Any]]

    def constants_json(self) -> bytes:
        return json.dumps(self.constants, sort_keys=True).encode()


def graph_key(network: Network) -> str:
    """SHA-256 over all that decides the graph, which neither the weights nor the machine do."""
    recipe = {
        "recipe": RECIPE,
        "form": FORM,
        "opset": OPSET,
        "component": type(network.module).__name__,
        "architecture": network.architecture,
        "signature": network.signature.model_dump(mode="json"),
        "precision": network.precision,
        "torch": torch.__version__.split("+")[0],
        "onnx": onnx.__version__,
        "libraries": library_versions(),
    }
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()


def export_graph(network: Network) -> OnnxGraph:
    """Export `network`, dynamic in rows, height and width. Raises CompileError for what cannot be exported.

    The network itself is left as it is, on its device.
    """
    if network.precision not in PRECISIONS:
        raise CompileError(
            f"A network in {network.precision} is not exported to ONNX, whose convolutions have no such type in opset "
            f"{OPSET}: choose {' or '.join(PRECISIONS)}."
        )
    bucket = dynamic_bucket(network.multiple, _MAX_ROWS, _MAX_SIDE)
    program = _trace(network, bucket)
    graph = program.graph
    tensors = network.tensors()
    weights: dict[str, ir.Value] = {}
    for initializer, value in list(graph.initializers.items()):
        del graph.initializers[initializer]
        value.const_value = None
        value.name = name = public_name(initializer)
        if name not in tensors:
            raise CompileError(
                f"The ONNX graph of {network.component} needs {name}, which is no tensor of the model: its wrapper "
                "must compute it, because engines hold no data."
            )
        weights[name] = value
    _type_concats(graph)
    _optimize(program, list(weights.values()))
    used = {name: tensors[name] for name, value in weights.items() if value.uses()}
    for name, tensor in used.items():
        weights[name].const_value = ir.ExternalTensor(
            WEIGHTS, 0, tensor.nbytes, _ir_dtype(tensor.dtype), shape=ir.Shape(tensor.shape), name=name
        )
        graph.initializers.add(weights[name])
    _name_dimensions(graph.inputs, network.signature.inputs)
    _name_dimensions(graph.outputs, network.signature.outputs)
    _forget_origins(program)
    made = OnnxGraph(
        ir.to_proto(program).SerializeToString(deterministic=True),
        {
            name: {"tensor": name, "dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}
            for name, tensor in used.items()
        },
    )
    check_graph(made, network.signature)
    return made


def _trace(network: Network, bucket: Bucket) -> ir.Model:
    example = {name: tensor.to("meta") for name, tensor in example_of(network, bucket, "cpu").items()}
    names = [[spec.name for spec in specs] for specs in (network.signature.inputs, network.signature.outputs)]
    try:
        with quiet(), _silent("torch.onnx"):
            exported = torch.export.export(
                on_meta(network.module),
                tuple(example.values()),
                dynamic_shapes=dynamic_shapes(network, bucket),
                strict=False,
            )
            program = torch.onnx.export(
                exported,
                dynamo=True,
                external_data=True,
                input_names=names[0],
                output_names=names[1],
                opset_version=OPSET,
                optimize=False,  # done in _optimize, where it cannot reach the weights
                verbose=False,
            )
    except Exception as error:  # torch's own, of many kinds; whatever it is, there is no graph
        said = str(error).strip().partition("\n")[0][:300]
        raise CompileError(
            f"The {network.component} could not be exported to ONNX ({said}): its wrapper may compute only with its "
            "inputs, parameters and buffers."
        ) from error
    assert program is not None
    return program.model


def on_meta(module: nn.Module) -> nn.Module:
    """A copy of a module whose parameters and buffers have shapes and no data."""
    tensors: list[torch.Tensor] = [*module.parameters(), *module.buffers()]
    bare = {id(tensor): _bare(tensor) for tensor in tensors}
    return copy.deepcopy(module, bare)


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    data = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")  # also of channels last, plain
    return nn.Parameter(data, requires_grad=False) if isinstance(tensor, nn.Parameter) else data


def _type_concats(graph: ir.Graph) -> None:
    """torch.cat promotes its inputs to one type and the exporter leaves that out: say it with casts."""
    for node in list(graph):
        wanted = node.outputs[0].dtype
        if node.op_type != "Concat" or wanted is None:
            continue
        for index, value in enumerate(node.inputs):
            if value is not None and value.dtype != wanted:
                cast = ir.node("Cast", [value], {"to": ir.AttrInt64("to", wanted)})
                cast.outputs[0].dtype, cast.outputs[0].shape = wanted, value.shape
                graph.insert_before(node, cast)
                node.replace_input_with(index, cast.outputs[0])


def _optimize(program: ir.Model, weights: Sequence[ir.Value]) -> None:
    """Fold and simplify, with the weights among the inputs: what has no value cannot be folded or merged."""
    from onnxscript import optimizer

    program.graph.inputs.extend(weights)
    optimizer.optimize(program)
    for value in weights:
        program.graph.inputs.remove(value)


def _name_dimensions(values: Sequence[ir.Value], specs: Sequence[Any]) -> None:
    """Call dynamic dimensions what the signature calls them: "rows", "height/8"."""
    for value, spec in zip(values, specs, strict=True):
        value.shape = ir.Shape(spec.shape)


def _forget_origins(program: ir.Model) -> None:
    """Drop what the exporter notes of itself: source files, stack traces, symbols that no longer name a dimension."""
    program.metadata_props.clear()
    program.graph.metadata_props.clear()
    program.producer_name, program.producer_version = "preheat", str(RECIPE)
    program.graph.name = "graph"
    borders = {id(value) for value in [*program.graph.inputs, *program.graph.outputs]}
    for value in program.graph.initializers.values():
        value.metadata_props.clear()
    for value in program.graph.inputs:
        value.metadata_props.clear()
    for node in program.graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
            if id(value) not in borders:
                value.shape = value.type = None


def check_graph(graph: OnnxGraph, signature: Signature) -> None:
    """Hold a graph to its signature and map: ONNX's own checker, shape inference, names, types and shapes.

    Raises CompileError.
    """
    model = onnx.load_from_string(graph.model)
    try:
        bare = _weights_as_inputs(model)
        onnx.checker.check_model(bare)
        inferred = onnx.shape_inference.infer_shapes(bare, check_type=True, strict_mode=True, data_prop=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise CompileError(f"The exported ONNX graph is not sound: {str(error)[:300]}") from error
    inputs = list(inferred.graph.input)[: len(model.graph.input)]
    for found, specs in ((inputs, signature.inputs), (inferred.graph.output, signature.outputs)):
        said = [(value.name, _type_name(value.type.tensor_type.elem_type), _shape(value)) for value in found]
        wanted = [(spec.name, spec.dtype, spec.shape) for spec in specs]
        if said != wanted:
            raise CompileError(f"The exported ONNX graph takes or gives {said}, and the signature says {wanted}.")
    external = {init.name: init for init in model.graph.initializer if init.data_location == TensorProto.EXTERNAL}
    for name, constant in graph.constants.items():
        found_dtype = _type_name(external[name].data_type) if name in external else None
        if found_dtype != constant["dtype"] or list(external[name].dims) != constant["shape"]:
            raise CompileError(f"The initializer {name} of the ONNX graph is not the tensor of that name.")
    if external.keys() != graph.constants.keys():
        raise CompileError(
            f"The ONNX graph has weights that the map lacks: {sorted(external.keys() - graph.constants)}."
        )


def _weights_as_inputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with its weights among the inputs: the checker would look for files of external data."""
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    external = [init for init in bare.graph.initializer if init.data_location == TensorProto.EXTERNAL]
    for init in external:
        bare.graph.input.append(onnx.helper.make_tensor_value_info(init.name, init.data_type, list(init.dims)))
        bare.graph.initializer.remove(init)
    return bare


def operators(graph: bytes) -> dict[str, int]:
    """How often each operator stands in a graph."""
    counts: dict[str, int] = {}
    for node in onnx.load_from_string(graph).graph.node:
        name = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
        counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items()))


def literals(graph: bytes) -> dict[str, torch.Tensor]:
    """The graph's own small constants, by initializer: they are no weights, but a stripped plan is refit with them."""
    found = {}
    for initializer in onnx.load_from_string(graph).graph.initializer:
        if initializer.data_location != TensorProto.EXTERNAL:
            array = onnx.numpy_helper.to_array(initializer)
            found[initializer.name] = torch.from_numpy(array.copy())
    return found


def write_model(graph: OnnxGraph, weights: Sequence[Path], path: Path, link: bool = False) -> Path:
    """Write `path` (.onnx) and, in the folder `weights` beside it, the safetensors files it points into.

    With `link`, files are linked where the file system can: for a folder that nobody writes to, such as one that
    TensorRT's parser reads and that is deleted then. ONNX's checker refuses links. Raises CompileError where a tensor
    is in none of the files, or not as the graph has it.
    """
    model = onnx.load_from_string(graph.model)
    folder = path.parent / WEIGHTS
    folder.mkdir(parents=True, exist_ok=True)
    places: dict[str, tuple[str, int, int]] = {}
    for file in weights:
        placed = folder / f"{file.name}.safetensors"
        if not placed.exists():
            _link(file, placed) if link else shutil.copyfile(file, placed)
        for name, (start, size) in tensor_places(file).items():
            places[name] = (f"{WEIGHTS}/{placed.name}", start, size)
    for initializer in model.graph.initializer:
        if initializer.data_location != TensorProto.EXTERNAL:
            continue
        tensor = graph.constants[initializer.name]["tensor"]
        location, offset, length = places.get(tensor, ("", 0, 0))
        expected = int(next(entry.value for entry in initializer.external_data if entry.key == "length"))
        if length != expected:
            raise CompileError(f"The weights lack {tensor}, or have it in another shape or precision.")
        del initializer.external_data[:]
        for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
            initializer.external_data.add(key=key, value=value)
    path.write_bytes(model.SerializeToString(deterministic=True))
    return path


def tensor_places(file: Path) -> dict[str, tuple[int, int]]:
    """Where each tensor lies in a safetensors file: name -> (bytes from its start, bytes)."""
    with file.open("rb") as opened:
        (header,) = struct.unpack("<Q", opened.read(8))
        entries = json.loads(opened.read(header))
    entries.pop("__metadata__", None)
    spans = {name: entry["data_offsets"] for name, entry in entries.items()}
    return {name: (8 + header + start, end - start) for name, (start, end) in spans.items()}


def _link(source: Path, destination: Path) -> None:
    try:
        os.link(source, destination)
    except OSError:
        shutil.copyfile(source, destination)


def _ir_dtype(dtype: torch.dtype) -> ir.DataType:
    return ir.DataType[{"float32": "FLOAT"}.get(dtype_name(dtype), dtype_name(dtype).upper())]


def _type_name(element: int) -> str:
    name = str(TensorProto.DataType.Name(element))
    return {"FLOAT": "float32"}.get(name, name.lower())


def _shape(value: onnx.ValueInfoProto) -> tuple[int | str, ...]:
    return tuple(size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim)


@contextmanager
def _silent(name: str) -> Iterator[None]:
    """The exporter warns of torchvision's operators, which nothing here has."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
