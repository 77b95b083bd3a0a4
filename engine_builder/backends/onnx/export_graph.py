"""Export a network to an ONNX graph without weights, and map each initializer to a tensor of the model.

The network is exported from the meta device, so the exporter cannot fold, rename, transpose or drop a weight because of
its values. An initializer keeps its tensor's name, dtype and shape, and one graph serves every model of the
architecture. Weights are external data: a stored graph does not contain them. `write_model` writes a graph next to
safetensors files, and its initializers refer to these. ONNX Runtime and TensorRT's parser read this form. No type is
converted, because TensorRT 11 is strongly typed.
"""

import copy
import json
import logging
import os
import shutil
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
    describe_constant,
    dynamic_bucket,
    dynamic_shapes,
    trace_inputs,
    without_warnings,
)
from engine_builder.backends.built import CompileError
from engine_builder.backends.onnx.opsets import OPSET, OPSETS
from engine_builder.backends.onnx.rewrites import fix_reshapes, lower
from engine_builder.backends.onnx.translations import exporter_opset, translations
from engine_builder.kernels.fp8_conv import CONV_VERSION, has_quantized_convs
from engine_builder.kernels.fp8_linear import LINEAR_VERSION
from engine_builder.networks.network import NETWORK_VERSION, Network, digest_json, library_versions
from engine_builder.networks.onnx_form import onnx_operations
from model.engines.shapes import dtype_name
from model.store.manifest import Bucket, Signature
from model.store.precision import FP8, FP16, FP32
from model.weights.safetensors_header import HEADER_LIMIT, read_header

# Part of every graph key. Raise it when the result of an export changes for a network.
EXPORT_VERSION = 3
EXPORTED_PRECISIONS = (FP32, FP16, FP8)
WEIGHTS_FOLDER = "weights"  # next to a written graph; a placeholder in a stored graph
_LARGEST_LITERAL = 2**16  # elements of a constant that is looked for among the others; causal masks have 77 x 77
_ONNX_NAMES = {"float32": "FLOAT", "float8_e4m3fn": "FLOAT8E4M3FN"}  # other types have the same name in both
_MAX_BATCH, _MAX_SIDE = 32, 2048  # bounds of the exported dimensions (pixels); TensorRT profiles narrow them


@dataclass(frozen=True)
class OnnxGraph:
    """`model`: a serialized ModelProto without weights. `constants`: initializer -> {tensor, dtype, shape}."""

    model: bytes
    constants: dict[str, dict[str, Any]]

    def constants_json(self) -> bytes:
        """Return the map as JSON with sorted keys."""
        return json.dumps(self.constants, sort_keys=True).encode()


def graph_key(network: Network, opset: int = OPSET) -> str:
    """Return the SHA-256 of everything that decides the graph. The weights and the machine do not count."""
    return digest_json(
        {
            "recipe": EXPORT_VERSION,
            "form": NETWORK_VERSION,
            "opset": opset,
            "component": network.code_name,
            "architecture": network.architecture,
            "signature": network.signature.model_dump(mode="json"),
            "precision": network.precision.name,
            "torch": torch.__version__.split("+")[0],
            "onnx": onnx.__version__,
            "libraries": library_versions(),
        }
        # An entry of quantized networks only, so that the keys of other graphs stay what they were.
        | ({"quantized": [LINEAR_VERSION, *sorted(network.clips)]} if network.clips else {})
        | ({"convolutions": CONV_VERSION} if has_quantized_convs(network.module) else {})
    )


def export_graph(network: Network, opset: int = OPSET) -> OnnxGraph:
    """Export `network` with dynamic batch, height and width. The network itself is not changed. Raises CompileError."""
    if opset not in OPSETS:
        raise CompileError(f"ONNX opset {opset} is not supported.", f"Choose {' or '.join(map(str, OPSETS))}.")
    if network.precision not in EXPORTED_PRECISIONS:
        names = " or ".join(precision.name for precision in EXPORTED_PRECISIONS)
        raise CompileError(
            f"A network in {network.precision} cannot be exported to ONNX: ONNX Runtime could not check the graph.",
            f"Choose {names}.",
        )
    if network.precision.is_quantized and opset < OPSET:
        raise CompileError(f"ONNX opset {opset} has no numbers in {network.precision}.", f"Choose opset {OPSET}.")
    bucket = dynamic_bucket(network.multiple, _MAX_BATCH, _MAX_SIDE)
    program = _trace(network, bucket, opset)
    graph = program.graph
    tensors = network.tensors()
    weights: dict[str, ir.Value] = {}
    constants: dict[str, dict[str, Any]] = {}
    for initializer, value in list(graph.initializers.items()):
        del graph.initializers[initializer]
        value.const_value = None
        constant = describe_constant(network, tensors, initializer)
        value.name = name = constant["tensor"]
        weights[name], constants[name] = value, constant
    _cast_concat_inputs(graph)
    fix_reshapes(graph)
    _optimize(program, list(weights.values()))
    constants = {name: constant for name, constant in constants.items() if weights[name].uses()}
    for name in constants:
        tensor = tensors[name]
        weights[name].const_value = ir.ExternalTensor(
            WEIGHTS_FOLDER, 0, tensor.nbytes, _ir_dtype(tensor.dtype), shape=ir.Shape(tensor.shape), name=name
        )
        graph.initializers.add(weights[name])
    _name_dimensions(graph.inputs, network.signature.inputs)
    _name_dimensions(graph.outputs, network.signature.outputs)
    lower(program, opset)
    _strip_metadata(program)
    exported = OnnxGraph(ir.to_proto(program).SerializeToString(deterministic=True), constants)
    check_graph(exported, network.signature)
    return exported


def _trace(network: Network, bucket: Bucket, opset: int) -> ir.Model:
    example = {name: tensor.to("meta") for name, tensor in trace_inputs(network, bucket, "cpu").items()}
    try:
        with without_warnings(), _without_log("torch.onnx"), onnx_operations():
            exported = torch.export.export(
                _copy_without_data(network.module),
                tuple(example.values()),
                dynamic_shapes=dynamic_shapes(network, bucket),
                strict=False,
            )
            program = torch.onnx.export(
                exported,
                dynamo=True,
                external_data=True,
                input_names=[spec.name for spec in network.signature.inputs],
                output_names=[spec.name for spec in network.signature.outputs],
                opset_version=exporter_opset(opset),
                custom_translation_table=translations(opset),
                optimize=False,  # done in _optimize, where it cannot change the weights
                verbose=False,
            )
    except Exception as error:  # the exporter raises many types
        reason = str(error).strip().partition("\n")[0][:300]
        raise CompileError(
            f"The {network.component} could not be exported to ONNX ({reason}).",
            "Its wrapper may compute only with its inputs, parameters and buffers.",
        ) from error
    assert program is not None
    return program.model


def _copy_without_data(module: nn.Module) -> nn.Module:
    """Return a copy of a module on the meta device: its parameters and buffers have shapes but no data."""
    tensors: list[torch.Tensor] = [*module.parameters(), *module.buffers()]
    memo = {id(tensor): _empty_like(tensor) for tensor in tensors}
    return copy.deepcopy(module, memo)


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    data = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")  # contiguous, also for a channels_last tensor
    return nn.Parameter(data, requires_grad=False) if isinstance(tensor, nn.Parameter) else data


def _cast_concat_inputs(graph: ir.Graph) -> None:
    """Insert the casts that the exporter omits: torch.cat promotes its inputs to one type."""
    for node in list(graph):
        dtype = node.outputs[0].dtype
        if node.op_type != "Concat" or dtype is None:
            continue
        for index, value in enumerate(node.inputs):
            if value is not None and value.dtype != dtype:
                cast = ir.node("Cast", [value], {"to": ir.AttrInt64("to", dtype)})
                cast.outputs[0].dtype, cast.outputs[0].shape = dtype, value.shape
                graph.insert_before(node, cast)
                node.replace_input_with(index, cast.outputs[0])


def _optimize(program: ir.Model, weights: Sequence[ir.Value]) -> None:
    """Fold and simplify with the weights as inputs, so that no weight is folded or merged."""
    from onnx_ir.passes.common import DeduplicateInitializersPass
    from onnxscript import optimizer

    program.graph.inputs.extend(weights)
    optimizer.optimize(program)
    DeduplicateInitializersPass(_LARGEST_LITERAL)(program)
    for value in weights:
        program.graph.inputs.remove(value)


def _name_dimensions(values: Sequence[ir.Value], specs: Sequence[Any]) -> None:
    """Give dynamic dimensions the names of the signature: "rows", "height/8"."""
    for value, spec in zip(values, specs, strict=True):
        value.shape = ir.Shape(spec.shape)


def _strip_metadata(program: ir.Model) -> None:
    """Remove the exporter's metadata: source files, stack traces, and symbols that no longer name a dimension."""
    program.metadata_props.clear()
    program.graph.metadata_props.clear()
    program.producer_name, program.producer_version = "preheat", str(EXPORT_VERSION)
    program.graph.name = "graph"
    boundary = {id(value) for value in [*program.graph.inputs, *program.graph.outputs]}
    for value in program.graph.initializers.values():
        value.metadata_props.clear()
    for value in program.graph.inputs:
        value.metadata_props.clear()
    for node in program.graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
            if id(value) not in boundary:
                value.shape = value.type = None


def check_graph(graph: OnnxGraph, signature: Signature) -> None:
    """Check a graph with ONNX's checker and shape inference, and compare it with its signature and map of constants.

    Raises CompileError.
    """
    model = onnx.load_from_string(graph.model)
    try:
        without_files = _weights_as_inputs(model)
        onnx.checker.check_model(without_files)
        inferred = onnx.shape_inference.infer_shapes(without_files, check_type=True, strict_mode=True, data_prop=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise CompileError(f"The exported ONNX graph is invalid: {str(error)[:300]}") from error
    inputs = list(inferred.graph.input)[: len(model.graph.input)]
    for values, specs in ((inputs, signature.inputs), (inferred.graph.output, signature.outputs)):
        actual = [(value.name, _type_name(value.type.tensor_type.elem_type), _shape(value)) for value in values]
        expected = [(spec.name, spec.dtype, spec.shape) for spec in specs]
        if actual != expected:
            raise CompileError(f"The exported ONNX graph takes or returns {actual}, expected {expected}.")
    external = {init.name: init for init in model.graph.initializer if init.data_location == TensorProto.EXTERNAL}
    for name, constant in graph.constants.items():
        dtype = _type_name(external[name].data_type) if name in external else None
        if dtype != constant["dtype"] or list(external[name].dims) != constant["shape"]:
            raise CompileError(f"The initializer {name} of the ONNX graph differs from the tensor of that name.")
    if external.keys() != graph.constants.keys():
        raise CompileError(
            f"The ONNX graph has weights that its map of constants lacks: {sorted(external.keys() - graph.constants)}."
        )


def _weights_as_inputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the graph with its weights as inputs. Otherwise the checker looks for the files of external data."""
    converted = onnx.ModelProto()
    converted.CopyFrom(model)
    external = [init for init in converted.graph.initializer if init.data_location == TensorProto.EXTERNAL]
    for init in external:
        converted.graph.input.append(onnx.helper.make_tensor_value_info(init.name, init.data_type, list(init.dims)))
        converted.graph.initializer.remove(init)
    return converted


def read_literals(graph: bytes) -> dict[str, torch.Tensor]:
    """Return the small constants inside a serialized graph, by initializer. A stripped plan is refit with them, too."""
    tensors = {}
    for initializer in onnx.load_from_string(graph).graph.initializer:
        if initializer.data_location != TensorProto.EXTERNAL:
            array = onnx.numpy_helper.to_array(initializer)
            tensors[initializer.name] = torch.from_numpy(array.copy())
    return tensors


def write_model(graph: OnnxGraph, weights: Sequence[Path], path: Path, link: bool = False) -> Path:
    """Write the graph to `path` (.onnx), and copy the safetensors files `weights` into a folder next to it.

    `link`: make hard links instead of copies if possible. Use it for a temporary folder that is only read: ONNX's
    checker refuses links. Raises CompileError if no file has a tensor in the graph's shape and type.
    """
    model = onnx.load_from_string(graph.model)
    folder = path.parent / WEIGHTS_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    locations: dict[str, tuple[str, int, int]] = {}
    for file in weights:
        copied = folder / f"{file.name}.safetensors"
        if not copied.exists():
            _link(file, copied) if link else shutil.copyfile(file, copied)
        with file.open("rb") as opened:
            extents = read_header(opened.read(HEADER_LIMIT), file.stat().st_size)
        for name, extent in extents.items():
            locations[name] = (f"{WEIGHTS_FOLDER}/{copied.name}", extent.start, extent.end - extent.start)
    for initializer in model.graph.initializer:
        if initializer.data_location != TensorProto.EXTERNAL:
            continue
        tensor = graph.constants[initializer.name]["tensor"]
        location, offset, length = locations.get(tensor, ("", 0, 0))
        expected = int(next(entry.value for entry in initializer.external_data if entry.key == "length"))
        if length != expected:
            raise CompileError(f"The weights lack {tensor}, or its shape or precision differs from the graph's.")
        del initializer.external_data[:]
        for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
            initializer.external_data.add(key=key, value=value)
    path.write_bytes(model.SerializeToString(deterministic=True))
    return path


def _link(source: Path, destination: Path) -> None:
    try:
        os.link(source, destination)
    except OSError:
        shutil.copyfile(source, destination)


def _ir_dtype(dtype: torch.dtype) -> ir.DataType:
    name = dtype_name(dtype)
    return ir.DataType[_ONNX_NAMES.get(name, name.upper())]


def _type_name(element: int) -> str:
    name = str(TensorProto.DataType.Name(element))
    return {onnx_name: own for own, onnx_name in _ONNX_NAMES.items()}.get(name, name.lower())


def _shape(value: onnx.ValueInfoProto) -> tuple[int | str, ...]:
    return tuple(size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim)


@contextmanager
def _without_log(name: str) -> Iterator[None]:
    """Suppress a logger's warnings. The exporter warns about operators of torchvision, which is not used."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
