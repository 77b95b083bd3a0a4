"""ONNX graphs name their weights without holding them, equal eager PyTorch, and generate the same image."""

import functools
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from diffusers.models import Transformer2DModel
from onnx import TensorProto
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from engine_builder.backends.aot_inductor.compile import example_inputs
from engine_builder.backends.built import CompileError
from engine_builder.backends.onnx import export_graph as onnx_export
from engine_builder.backends.onnx.export_graph import OnnxGraph, export_graph, graph_key, read_literals
from engine_builder.backends.onnx.graph_store import (
    BuiltGraph,
    export_model,
    load_or_export_graph,
    read_graph,
    validate_graph,
)
from engine_builder.backends.onnx.onnx_engine import OnnxEngine
from engine_builder.backends.onnx.opsets import OLD_OPSET, OPSET
from engine_builder.building.validate import InaccurateEngine
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.networks.network import Network, load_network
from engine_builder.networks.unet import transformer_blocks
from engine_builder.releases.gc import named_blobs
from engine_builder.stores.store import WritableStore, open_writable_store
from model.api.resolve import resolve
from model.engines.engine import EngineSet
from model.errors import EngineError
from model.loading.load import Loaded
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.text_to_image import generate
from model.request_fields import GenerationRequest
from model.store.precision import BF16, FP16, FP32
from preheat.main import app
from tests.engine_builder.helpers import edit_weights, folder_of
from tests.support.components import BASE_COMPONENTS, REFINER_COMPONENTS
from tests.support.repository import MODEL_FOLDER, REPOSITORY

COMPONENTS = BASE_COMPONENTS + REFINER_COMPONENTS
# Precision, opset and largest error of each kind of graph: of the toy, and of data/tiny-sdxl with its refiner.
KINDS = {
    "toy": (FP16, OPSET, 1e-2),
    "fp32": (FP32, OPSET, 1e-4),
    "fp16": (FP16, OPSET, 1e-2),
    "opset 17": (FP16, OLD_OPSET, 1e-2),
}
TINY = [kind for kind in KINDS if kind != "toy"]
SHAPES = ((1, 128, 64), (2, 64, 96), (5, 96, 192))
GraphOf = Callable[[str, str], tuple[Network, OnnxGraph]]
"""Returns the network of a component and its graph of a kind."""


def cases(quick: tuple[str, ...], tiny: tuple[str, ...] = COMPONENTS) -> pytest.MarkDecorator:
    """Run a test with components of the toy, of which only `quick` are in `make test`, and of data/tiny-sdxl."""
    toys = [pytest.param("toy", name, marks=() if name in quick else pytest.mark.full) for name in BASE_COMPONENTS]
    toys = toys if tiny is COMPONENTS else [case for case in toys if case.values[1] in quick]
    more = [pytest.param(kind, name, marks=pytest.mark.full) for kind in TINY for name in tiny]
    return pytest.mark.parametrize(("kind", "component"), toys + more)


@pytest.fixture(scope="session")
def graph_of(exported: tuple[WritableStore, Path], toy_folder: Path) -> GraphOf:
    """Return a function that returns a network and its graph."""

    @functools.cache
    def load(kind: str, component: str) -> tuple[Network, OnnxGraph]:
        precision, opset, _ = KINDS[kind]
        tiny = MODEL_FOLDER / "refiner" if component in REFINER_COMPONENTS else MODEL_FOLDER
        network = load_network(Checkpoint(toy_folder if kind == "toy" else tiny), component, precision)
        if kind != "toy":
            return network, export_graph(network, opset)
        found = BuiltGraph.find(exported[0], graph_key(network))
        assert found is not None
        return network, read_graph(exported[0], found)

    return load


@pytest.fixture
def toy_unet(graph_of: GraphOf) -> tuple[Network, OnnxGraph]:
    """The toy's UNet in fp16."""
    return graph_of("toy", "unet")


def errors(network: Network, engine: OnnxEngine) -> list[float]:
    """Return the error of every output at every shape against eager PyTorch: absolute in fp32, otherwise relative."""
    measured = []
    for seed, (batch, height, width) in enumerate(SHAPES):
        case = example_inputs(network.signature, batch, height, width, "cpu", seed)
        with torch.inference_mode():
            expected = network.module(*case.values())
        outputs = engine.run(case)
        assert [(n, t.dtype) for n, t in outputs.items()] == [
            (spec.name, reference.dtype) for spec, reference in zip(network.signature.outputs, expected, strict=True)
        ]
        for reference, output in zip(expected, outputs.values(), strict=True):
            difference = (output.double() - reference.double()).abs()
            absolute = network.precision == FP32
            measured.append(float(difference.max() if absolute else difference.norm() / reference.double().norm()))
    return measured


@cases(quick=("text_encoder_2", "unet_time", "unet", "vae_decoder"))
def test_equals_eager_pytorch_at_three_shapes(kind: str, component: str, graph_of: GraphOf) -> None:
    """The time network concatenates fp16 text and fp32 sizes."""
    network, graph = graph_of(kind, component)
    assert max(errors(network, OnnxEngine(component, graph, network.signature, network.tensors()))) <= KINDS[kind][2]
    types = {init.data_type for init in onnx.load_from_string(graph.model).graph.initializer}
    assert types <= {TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64}
    dtype = {FP32: "float32", FP16: "float16"}[network.precision]
    assert all(c["dtype"] == dtype or name.endswith("position_ids") for name, c in graph.constants.items())


@cases(quick=("text_encoder", "unet", "vae_decoder"))
def test_graph_names_its_tensors_and_holds_none_of_them(kind: str, component: str, graph_of: GraphOf) -> None:
    network, graph = graph_of(kind, component)
    tensors, model = network.tensors(), onnx.load_from_string(graph.model)
    external = [init for init in model.graph.initializer if init.data_location == TensorProto.EXTERNAL]
    assert external and {init.name for init in external} == graph.constants.keys()
    for init in external:
        assert list(init.dims) == list(tensors[init.name].shape)
        assert not init.raw_data and not init.float_data
    content = graph.model + b"".join(value.numpy().tobytes() for value in read_literals(graph.model).values())
    for name, tensor in tensors.items():
        varied = tensor.numel() > 1 and tensor.is_floating_point() and tensor.unique().numel() > 1
        assert not varied or tensor.numpy().tobytes() not in content, name
    assert all(value.numel() <= 77 * 77 for value in read_literals(graph.model).values())
    assert all(path not in graph.model for path in (b"site-packages", str(REPOSITORY).encode(), b".py"))
    sides = [
        [size.dim_param for size in v.type.tensor_type.shape.dim] for v in (*model.graph.input, *model.graph.output)
    ]
    assert all(shape[0] == "rows" for shape in sides)
    if component in ("unet", "vae_decoder"):
        scale = network.signature.inputs[0].shape[2:]
        assert tuple(sides[0][2:]) == scale and all("height/" in str(side) or "width/" in str(side) for side in scale)


def test_refuses_bf16(toy_folder: Path) -> None:
    with pytest.raises(CompileError, match="in bf16 cannot be exported to ONNX.*Choose fp32 or fp16"):
        export_graph(load_network(Checkpoint(toy_folder), "vae_decoder", BF16))


def test_models_of_one_architecture_have_the_same_graph(toy_folder: Path, folder_copy: Path) -> None:
    """The other model's weights are zeros, which are the easiest to optimize away."""
    edit_weights(folder_copy / "text_encoder", lambda tensors: [tensor.zero_() for tensor in tensors.values()])
    one, other = (load_network(Checkpoint(folder), "text_encoder", FP32) for folder in (toy_folder, folder_copy))
    assert graph_key(one) == graph_key(other)
    graph = export_graph(one)
    assert graph == export_graph(other)
    assert max(errors(other, OnnxEngine("text_encoder", graph, other.signature, other.tensors()))) == 0.0
    assert graph_key(load_network(Checkpoint(toy_folder), "text_encoder", FP16)) != graph_key(one)


def test_refuses_weights_that_do_not_fit(toy_unet: tuple[Network, OnnxGraph], tmp_path: Path) -> None:
    """In ONNX Runtime, and in a folder."""
    network, graph = toy_unet
    tensors, name = network.tensors(), next(iter(graph.constants))
    incomplete = {key: tensor for key, tensor in tensors.items() if key != name}
    with pytest.raises(EngineError, match=f"lack {name}"):
        OnnxEngine("unet", graph, network.signature, incomplete)
    for number, saved in enumerate((incomplete, tensors | {name: tensors[name].float()})):
        file = tmp_path / f"weights-{number}"
        save_file({key: tensor.contiguous() for key, tensor in saved.items()}, file)
        with pytest.raises(CompileError, match=f"lack {name}"):
            onnx_export.write_model(graph, [file], tmp_path / f"{number}.onnx")


def test_refuses_a_wrapper_with_a_constant_tensor(toy_folder: Path) -> None:
    class WithConstant(torch.nn.Module):
        def forward(self, latents: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (latents.repeat_interleave(2, 2).repeat_interleave(2, 3)[:, :3] * self.scale,)

    module = WithConstant()
    module.scale = torch.randn(3, 1, 1)
    with pytest.raises(CompileError, match="could not be exported .*device"):
        export_graph(replace(load_network(Checkpoint(toy_folder), "vae_decoder", FP32), module=module))


def test_refuses_a_damaged_graph(toy_unet: tuple[Network, OnnxGraph]) -> None:
    network, graph = toy_unet

    def with_operator(before: str, after: str) -> OnnxGraph:
        model = onnx.load_from_string(graph.model)
        next(node for node in model.graph.node if node.op_type == before).op_type = after
        return replace(graph, model=model.SerializeToString())

    with pytest.raises(CompileError, match="is invalid"):
        onnx_export.check_graph(with_operator("MatMul", "NoSuchOperator"), network.signature)
    name, constant = next(iter(graph.constants.items()))
    constants = graph.constants | {name: constant | {"shape": [1, 2, 3]}}
    with pytest.raises(CompileError, match=f"{name} of the ONNX graph"):
        onnx_export.check_graph(replace(graph, constants=constants), network.signature)
    with pytest.raises(InaccurateEngine, match="The ONNX graph of unet differs by"):
        validate_graph(network, with_operator("Sigmoid", "Tanh"))


# -- in a store and in a folder -----------------------------------------------------------------------------------


def test_onnx_runtime_opens_the_commands_output(
    exported: tuple[WritableStore, Path], toy_unet: tuple[Network, OnnxGraph]
) -> None:
    store, out = exported
    assert {path.name for path in out.iterdir()} == {"weights"} | {f"{name}.onnx" for name in BASE_COMPONENTS}
    for name in BASE_COMPONENTS:
        onnx.checker.check_model(out / f"{name}.onnx", full_check=True)
    network, _ = toy_unet
    session = onnxruntime.InferenceSession(out / "unet.onnx", providers=["CPUExecutionProvider"])
    case = example_inputs(network.signature, 2, 64, 96, "cpu")
    [actual] = session.run(None, {name: tensor.numpy() for name, tensor in case.items()})
    with torch.inference_mode():
        [expected] = network.module(*case.values())
    assert np.linalg.norm(actual - expected.numpy()) / np.linalg.norm(expected.numpy()) <= 1e-2
    data = network.tensors()["conv_in.weight"].numpy().tobytes()
    blobs = [store.get(digest, size).read_bytes() for digest, size, _ in store.blobs()]
    assert sum(data in blob for blob in blobs) == 1, "weights are stored once"


def test_exporting_again_exports_only_damaged_graphs(
    exported: tuple[WritableStore, Path], toy_folder: Path, tmp_path: Path
) -> None:
    store = open_writable_store(shutil.copytree(folder_of(exported[0]), tmp_path / "store"))
    before = {digest for digest, _, _ in store.blobs()}
    assert not any(graph.is_new for graph in export_model(Checkpoint(toy_folder), None, FP16, store))
    assert {digest for digest, _, _ in store.blobs()} == before
    network = load_network(Checkpoint(toy_folder), "unet_text", FP16)
    found = BuiltGraph.find(store, graph_key(network))
    assert found is not None and {blob.sha256 for blob in found.blobs()} <= named_blobs(store), "gc keeps graphs"
    path = store.get(found.graph.sha256, found.graph.bytes)
    path.write_bytes(path.read_bytes()[:-1])
    assert BuiltGraph.find(store, graph_key(network)) is None
    assert load_or_export_graph(network, store)[0].graph == found.graph
    assert BuiltGraph.find(store, graph_key(network)) is not None


def test_write_model_links_or_copies_weights(toy_unet: tuple[Network, OnnxGraph], tmp_path: Path) -> None:
    network, graph = toy_unet
    file = tmp_path / "blob"
    save_file({key: tensor.contiguous() for key, tensor in network.tensors().items()}, file)
    for name, link in (("linked", True), ("copied", False)):
        onnx_export.write_model(graph, [file], tmp_path / name / "unet.onnx", link=link)
        [written] = (tmp_path / name / "weights").iterdir()
        assert written.samefile(file) == link and load_file(written).keys() == load_file(file).keys()


# -- the whole pipeline -------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("refiner", [False, True], ids=["base", "refined"])
def test_pipeline_generates_aot_inductors_image(refiner: bool, graph_of: GraphOf, loaded: Loaded) -> None:
    """In fp32. test_tensorrt_pipeline.py has the image of the toy's graphs in fp16."""
    engines = dict(loaded.model.engines)
    for component in COMPONENTS if refiner else BASE_COMPONENTS:
        network, graph = graph_of("fp32", component)
        engines[component] = EngineSet([OnnxEngine(component, graph, network.signature, network.tensors())])
    through_onnx: LoadedModel = replace(loaded.model, engines=engines)
    request = GenerationRequest(
        prompt="two green squares on a white background", seed=5, num_inference_steps=10, use_refiner=refiner
    )
    params = resolve(request, loaded.served)
    images = [generate(model, [params])[0][0].astype(int) for model in (loaded.model, through_onnx)]
    assert np.abs(images[0] - images[1]).max() <= 2
    assert images[0].std() > 10


# -- what TensorRT makes of the graphs ----------------------------------------------------------------------------

# Operators of our graphs in docs/operators.md of onnx-tensorrt 10.15, which supports them for some inputs at least.
SUPPORTED = set(
    "Add ArgMax Cast Concat Conv Cos Equal Gather GatherND Gelu Gemm GroupNormalization LayerNormalization MatMul Mul "
    "Range Reshape Shape Sigmoid Sin Slice Softmax Split Squeeze Transpose Unsqueeze Where".split()
)
# The same of 8.6.
SUPPORTED_BEFORE = SUPPORTED - {"Gelu", "GroupNormalization"} | {"Div", "Erf", "InstanceNormalization"}
FUSED = ("text_encoder_2", "unet", "vae_decoder")


@cases(quick=BASE_COMPONENTS)
def test_tensorrts_parser_supports_every_operator(kind: str, component: str, graph_of: GraphOf) -> None:
    model = onnx.load_from_string(graph_of(kind, component)[1].model)
    is_old = kind == "opset 17"
    assert {node.op_type for node in model.graph.node} <= (SUPPORTED_BEFORE if is_old else SUPPORTED)
    assert model.opset_import[0].version == (OLD_OPSET if is_old else OPSET)
    assert not is_old or model.ir_version == 8
    # A causal mask of 77 x 77 elements is stored once, not for each layer.
    literals = read_literals(model.SerializeToString()).values()
    assert kind == "fp32" or sum(value.nbytes for value in literals) < 2**14


@cases(quick=FUSED, tiny=FUSED)
def test_attention_is_the_pattern_that_tensorrt_fuses(kind: str, component: str, graph_of: GraphOf) -> None:
    """Queries, keys and values get one Reshape and one Transpose each, or a text encoder's together."""
    network, exported = graph_of(kind, component)
    graph = onnx.load_from_string(exported.model).graph
    made_by = {name: node for node in graph.node for name in node.output}

    def operators(name: str, *path: int) -> list[str]:
        """Follow the input with that number from node to node. Returns the operators."""
        found = []
        for number in path:
            found.append(made_by[name].op_type)
            name = made_by[name].input[number]
        return found

    is_text = component.startswith("text")
    mask = ["Add"] if is_text else []
    source = ["Gather", "Transpose", "Reshape"] if is_text else ["Transpose", "Reshape"]
    steps = [0] * len(source)
    softmaxes = [node for node in graph.node if node.op_type == "Softmax"]
    assert len(softmaxes) == count_attentions(network)
    for softmax in softmaxes:
        before = [0] * len(mask)
        assert operators(softmax.input[0], *before, 0, 0, *steps) == [*mask, "MatMul", "Mul", *source]
        keys = ["Transpose", *source] if is_text else source  # the UNet's two transposes of keys are one
        assert operators(softmax.input[0], *before, 1, *[0] * len(keys)) == [*mask, "MatMul", *keys]
        [product] = [node for node in graph.node if softmax.output[0] in node.input]
        assert operators(product.output[0], 1, *steps) == ["MatMul", *source]


def count_attentions(network: Network) -> int:
    """Return the number of attentions that a component computes."""
    if network.component == "unet":
        return 2 * len(list(transformer_blocks(network.module.network)))
    return 1 if network.component == "vae_decoder" else int(network.architecture["num_hidden_layers"])


@cases(quick=FUSED[1:], tiny=FUSED[1:])
def test_norms_and_shapes_are_few_nodes(kind: str, component: str, graph_of: GraphOf) -> None:
    """Each norm is one node. Only a transformer's output gets the shape of another tensor: its sides are dynamic."""
    network, exported = graph_of(kind, component)
    nodes = onnx.load_from_string(exported.model).graph.node
    counts = Counter(node.op_type for node in nodes)
    modules = Counter(type(module) for module in network.module.modules())
    group_norm = "InstanceNormalization" if kind == "opset 17" else "GroupNormalization"
    assert counts[group_norm] == modules[torch.nn.GroupNorm]
    assert counts["LayerNormalization"] == modules[torch.nn.LayerNorm]
    constants = set(read_literals(exported.model))
    shapes = {node.output[0] for node in nodes if node.op_type == "Shape"}
    assert len(shapes) == (modules[Transformer2DModel] if component == "unet" else 1)
    for node in nodes:
        assert node.op_type not in ("Gather", "Squeeze", "Range", "Expand", "Where")
        if node.op_type == "Reshape":
            assert node.input[1] in constants | shapes
        if node.op_type == "Slice":
            assert constants.issuperset(node.input[1:])


def test_refuses_other_opsets(toy_folder: Path) -> None:
    network = load_network(Checkpoint(toy_folder), "unet_text", FP16)
    assert graph_key(network) != graph_key(network, OLD_OPSET)
    with pytest.raises(CompileError, match="ONNX opset 18 is not supported. Choose 21 or 17."):
        export_graph(network, 18)
    result = CliRunner().invoke(app, ["export-onnx", str(toy_folder), "--opset", "18"])
    assert result.exit_code == 2 and "18 is not supported; choose 21 or 17" in result.output
