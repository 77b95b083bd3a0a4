"""Count the layers of TensorRT-RTX's network of an ONNX graph, and the kernels of its plan.

Needs neither a GPU nor weights: they are replaced by a sparse file of zeros, and scales by 1. Graphs of
`preheat export-onnx` and stored graphs are read. A plan is built for one compute capability, by default the A10G's. Its
kernels are counted in the description of its operations, and so are the weights that it holds in 8 bits (equal ones
once). TensorRT-RTX does not document that description; 1.7.1 has one line for each operation and for each tensor.
"""

import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from model.engines.shapes import shape_at
from model.engines.tensorrt.libraries import TENSORRT_RTX, import_library

_PAGE = 4096  # bytes
_BATCH = 2
_KERNEL = re.compile(rb"\n  (?:function|runtime_function|runtime_fusion|fully_connected|corrltn)=\{")
_WEIGHT_IN_8_BITS = re.compile(rb"\n  tensor=\{[^\n]* const_payload_size=[^\n]* type=(?:fp8_e4m3|int8) ")


@dataclass(frozen=True)
class Inspection:
    """What TensorRT-RTX makes of a graph. All but `layers` are None without a build."""

    layers: int
    kernels: int | None
    weights_in_8_bits: int | None


def inspect_graph(
    graph: Path, pixels: int | None = None, capability: str = "sm86", with_weights: bool = False
) -> Inspection:
    """Parse a graph. With `pixels`, also build its plan for a batch of 2 at `pixels` x `pixels`, for a compute
    capability such as "sm86". `with_weights`: read the graph's own weights, which lie next to it.

    Raises TensorRTUnavailable without the library, and ValueError if it refuses the graph.
    """
    trt = import_library(TENSORRT_RTX)
    log = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    with tempfile.TemporaryDirectory() as folder:
        if not parser.parse_from_file(str(graph if with_weights else write_with_zeros(graph, Path(folder)))):
            raise ValueError(f"TensorRT-RTX cannot read {graph}: {parser.get_error(0).desc()}")
        layers = int(network.num_layers)
        if pixels is None:
            return Inspection(layers, None, None)
        plan = builder.build_serialized_network(network, _make_config(trt, builder, graph, pixels, capability))
    if plan is None:
        raise ValueError(f"TensorRT-RTX cannot build {graph}.")
    executed, _, _ = bytes(plan).partition(b"\n  add={")  # after it, the parts of fused products are defined
    return Inspection(layers, len(_KERNEL.findall(executed)), len(_WEIGHT_IN_8_BITS.findall(executed)))


def _make_config(trt: Any, builder: Any, graph: Path, pixels: int, capability: str) -> Any:
    """Return a build's configuration with one static profile."""
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(getattr(trt.ComputeCapability, capability.upper()), 0)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    profile = builder.create_optimization_profile()
    sizes = {"rows": _BATCH, "height": pixels, "width": pixels}
    for value in onnx.load(graph, load_external_data=False).graph.input:
        dimensions = [size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim]
        profile.set_shape(value.name, *[shape_at(dimensions, sizes)] * 3)
    config.add_optimization_profile(profile)
    return config


def write_with_zeros(graph: Path, folder: Path) -> Path:
    """Write a copy of a graph to `folder`, with a file of zeros as its external data. Returns the copy's path."""
    model = onnx.load(graph, load_external_data=False)
    size = 0
    for initializer in model.graph.initializer:
        if initializer.data_location == TensorProto.EXTERNAL and not initializer.dims:  # a scale, which may not be zero
            initializer.CopyFrom(onnx.numpy_helper.from_array(np.array(1, np.float32), initializer.name))
        if initializer.data_location == TensorProto.EXTERNAL:
            length = next(int(entry.value) for entry in initializer.external_data if entry.key == "length")
            del initializer.external_data[:]
            for key, value in (("location", "zeros"), ("offset", str(size)), ("length", str(length))):
                initializer.external_data.add(key=key, value=value)
            size += -(-length // _PAGE) * _PAGE  # TensorRT refuses two weights at one address
    (folder / "zeros").touch()
    os.truncate(folder / "zeros", size)
    copy = folder / graph.name
    copy.write_bytes(model.SerializeToString())
    return copy
