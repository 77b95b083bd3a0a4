"""Rewrites of an exported graph that keep its results: constant shapes, literals stored once, an older opset."""

import onnx_ir as ir

from engine_builder.backends.onnx.opsets import OLD_OPSET

_OLD_IR_VERSION = 8  # of the onnx release that came with opset 17


def fix_reshapes(graph: ir.Graph) -> None:
    """Give each Reshape a constant shape if it can have one.

    A dimension of a known size becomes that number, one that stays in its place 0, and one other -1. The exporter
    computes every shape from the sizes of its tensors, in several nodes. Results of the exporter have symbolic shapes,
    which are compared here.
    """
    for node in graph:
        if node.op_type != "Reshape" or node.inputs[1] is None or ir.convenience.get_const_tensor(node.inputs[1]):
            continue
        shape = _constant_shape(node.inputs[0].shape if node.inputs[0] else None, node.outputs[0].shape)
        if shape is None:
            continue
        name = "shape_" + "_".join(map(str, shape)).replace("-", "m")
        if name not in graph.initializers:
            tensor = ir.tensor(shape, dtype=ir.DataType.INT64, name=name)
            graph.register_initializer(
                ir.Value(
                    name=name, const_value=tensor, shape=ir.Shape([len(shape)]), type=ir.TensorType(ir.DataType.INT64)
                )
            )
        node.replace_input_with(1, graph.initializers[name])
        node.attributes.pop("allowzero", None)


def _constant_shape(before: ir.Shape | None, after: ir.Shape | None) -> list[int] | None:
    """Return the shape argument of a Reshape from one shape to another, or None if it must be computed."""
    if before is None or after is None:
        return None
    shape = []
    for index, size in enumerate(after):
        if isinstance(size, int):
            shape.append(size)
        elif index < len(before) and before[index] == size:
            shape.append(0)
        else:
            shape.append(-1)
    return shape if shape.count(-1) <= 1 else None


def lower(program: ir.Model, opset: int) -> None:
    """Declare `opset`. The exporter writes 18 at least; `translations` leave one difference between 17 and 18."""
    if opset == OLD_OPSET:
        for node in program.graph.all_nodes():
            if node.op_type == "Split":
                node.attributes.pop("num_outputs", None)  # 17: as many equal parts as there are outputs
        program.ir_version = _OLD_IR_VERSION
    program.graph.opset_imports[""] = opset
