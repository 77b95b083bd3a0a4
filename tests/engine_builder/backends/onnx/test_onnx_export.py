"""ONNX graphs name their weights without holding them, equal eager PyTorch, and generate the same image."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from engine_builder.backends.aot_inductor.compile import example_inputs
from engine_builder.backends.built import CompileError
from engine_builder.backends.onnx import export as onnx_export
from engine_builder.backends.onnx.engine import OnnxEngine
from engine_builder.backends.onnx.export import OnnxGraph, count_operators, export_graph, graph_key, read_literals
from engine_builder.backends.onnx.graph_store import (
    BuiltGraph,
    export_model,
    load_or_export_graph,
    read_graph,
    validate_graph,
)
from engine_builder.backends.onnx.inspect_graphs import inspect_graph, write_with_zeros
from engine_builder.backends.onnx.opsets import OLD_OPSET, OPSET
from engine_builder.building.validate import InaccurateEngine
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.commands.main import app
from engine_builder.networks.network import Network, load_network
from engine_builder.networks.onnx_form import onnx_operations
from engine_builder.networks.unet import transformer_blocks
from engine_builder.releases.gc import named_blobs
from engine_builder.stores.store import WritableStore, open_writable_store
from model.api.request import GenerationRequest
from model.api.resolve import resolve
from model.engines.engine import EngineSet
from model.errors import EngineError
from model.loading.load import Loaded
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.text_to_image import generate
from model.store.precision import BF16, FP16, FP32, Precision
from tests.conftest import file_lock
from tests.engine_builder.helpers import KEPT_GRAPHS, edit_weights, folder_of
from tests.support.components import BASE_COMPONENTS, REFINER_COMPONENTS
from tests.support.repository import MODEL_FOLDER, REPOSITORY
from tests.support.tensorrt_rtx import require_tensorrt_rtx

COMPONENTS = BASE_COMPONENTS + REFINER_COMPONENTS
slow = pytest.mark.skipif(
    not os.environ.get("PREHEAT_SLOW"), reason="takes minutes: run `make slow`, which sets PREHEAT_SLOW"
)
TESTED = [pytest.param(name, marks=slow if name in REFINER_COMPONENTS else ()) for name in COMPONENTS]
SHAPES = ((1, 128, 64), (2, 64, 96), (5, 96, 192))


def load_tiny(component: str, precision: Precision = FP32) -> Network:
    """Load a component of data/tiny-sdxl or of its refiner."""
    folder = MODEL_FOLDER / "refiner" if component in REFINER_COMPONENTS else MODEL_FOLDER
    return load_network(Checkpoint(folder), component, precision)


@pytest.fixture(scope="session")
def kept() -> WritableStore:
    """A store that keeps exported graphs between test runs."""
    return open_writable_store(KEPT_GRAPHS)


@pytest.fixture(scope="session")
def graphs(kept: WritableStore, show_progress: Callable[[str], None]) -> dict[str, OnnxGraph]:
    """The components of data/tiny-sdxl in fp32, by `export_model`; with the refiner's if slow tests run."""
    refiner = Checkpoint(MODEL_FOLDER / "refiner") if os.environ.get("PREHEAT_SLOW") else None

    def report(component: str, activity: str, done: int, steps: int) -> None:
        show_progress(f"graphs {done}/{steps}: {component}: {activity}")

    with file_lock(KEPT_GRAPHS.with_suffix(".lock")):
        exported = export_model(Checkpoint(MODEL_FOLDER), refiner, FP32, kept, report)
    assert [graph.component for graph in exported] == list(COMPONENTS if refiner else BASE_COMPONENTS)
    assert all(graph.error <= 1e-4 for graph in exported)
    return {graph.component: read_graph(kept, graph.built) for graph in exported}


@pytest.fixture(scope="session")
def old_graphs(kept: WritableStore) -> dict[str, OnnxGraph]:
    """The components of data/tiny-sdxl in fp16 and the older opset; with the refiner's if slow tests run."""
    refiner = Checkpoint(MODEL_FOLDER / "refiner") if os.environ.get("PREHEAT_SLOW") else None
    with file_lock(KEPT_GRAPHS.with_suffix(".lock")):
        exported = export_model(Checkpoint(MODEL_FOLDER), refiner, FP16, kept, opset=OLD_OPSET)
    return {graph.component: read_graph(kept, graph.built) for graph in exported}


@pytest.fixture(scope="module")
def toy_unet(toy_folder: Path, exported: tuple[WritableStore, Path]) -> tuple[Network, OnnxGraph]:
    """The toy's UNet in fp16."""
    network = load_network(Checkpoint(toy_folder), "unet", FP16)
    found = BuiltGraph.find(exported[0], graph_key(network))
    assert found is not None
    return network, read_graph(exported[0], found)


def errors(network: Network, engine: OnnxEngine, relative: bool) -> list[float]:
    """Return the error of every output at every shape against eager PyTorch."""
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
            measured.append(float(difference.norm() / reference.double().norm() if relative else difference.max()))
    return measured


@pytest.mark.parametrize("component", TESTED)
def test_fp32_equals_eager_pytorch_at_three_shapes(component: str, graphs: dict[str, OnnxGraph]) -> None:
    network = load_tiny(component)
    engine = OnnxEngine(component, graphs[component], network.signature, network.tensors())
    assert max(errors(network, engine, relative=False)) <= 1e-4


@pytest.mark.parametrize("component", TESTED)
def test_opset_17_equals_eager_pytorch_at_three_shapes(component: str, old_graphs: dict[str, OnnxGraph]) -> None:
    network = load_tiny(component, FP16)
    engine = OnnxEngine(component, old_graphs[component], network.signature, network.tensors())
    assert max(errors(network, engine, relative=True)) <= 1e-2


@pytest.mark.parametrize("component", BASE_COMPONENTS)
def test_forms_for_onnx_equal_the_networks(component: str, toy_folder: Path) -> None:
    network = load_network(Checkpoint(toy_folder), component, FP32)
    case = example_inputs(network.signature, 2, 64, 96, "cpu")
    with torch.inference_mode():
        expected = network.module(*case.values())
        with onnx_operations():
            actual = network.module(*case.values())
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@slow
@pytest.mark.parametrize("component", ["text_encoder_2", "unet", "vae_decoder", "refiner_unet"])
def test_fp16_equals_eager_pytorch_at_three_shapes(component: str, kept: WritableStore) -> None:
    network = load_tiny(component, FP16)
    engine = OnnxEngine(component, load_or_export_graph(network, kept)[1], network.signature, network.tensors())
    assert max(errors(network, engine, relative=True)) <= 1e-2


@pytest.mark.parametrize("component", BASE_COMPONENTS)
def test_toy_in_fp16_equals_eager_pytorch(
    component: str, exported: tuple[WritableStore, Path], toy_folder: Path
) -> None:
    """The time network concatenates fp16 text and fp32 sizes."""
    network = load_network(Checkpoint(toy_folder), component, FP16)
    found = BuiltGraph.find(exported[0], graph_key(network))
    assert found is not None
    graph = read_graph(exported[0], found)
    engine = OnnxEngine(component, graph, network.signature, network.tensors())
    assert max(errors(network, engine, relative=True)) <= 1e-2
    types = {init.data_type for init in onnx.load_from_string(graph.model).graph.initializer}
    assert types <= {TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64}
    assert all(c["dtype"] == "float16" or name.endswith("position_ids") for name, c in graph.constants.items())


def test_refuses_bf16(toy_folder: Path) -> None:
    with pytest.raises(CompileError, match="in bf16 cannot be exported to ONNX.*Choose fp32 or fp16"):
        export_graph(load_network(Checkpoint(toy_folder), "vae_decoder", BF16))


@pytest.mark.parametrize("component", ["unet", "vae_decoder"])
def test_dimensions_have_the_signatures_names(component: str, graphs: dict[str, OnnxGraph]) -> None:
    graph = onnx.load_from_string(graphs[component].model).graph
    sides = [[size.dim_param for size in value.type.tensor_type.shape.dim] for value in (*graph.input, *graph.output)]
    assert all(shape[0] == "rows" for shape in sides)
    assert sides[0][2:] == ["height/8", "width/8"]


@pytest.mark.parametrize("component", BASE_COMPONENTS)
def test_graph_names_its_tensors_and_holds_none_of_them(component: str, graphs: dict[str, OnnxGraph]) -> None:
    graph, network = graphs[component], load_tiny(component)
    tensors = network.tensors()
    external = [
        init
        for init in onnx.load_from_string(graph.model).graph.initializer
        if init.data_location == TensorProto.EXTERNAL
    ]
    assert [init.name for init in external] and {init.name for init in external} == graph.constants.keys()
    for init in external:
        assert list(init.dims) == list(tensors[init.name].shape)
        assert not init.raw_data and not init.float_data
    content = graph.model + b"".join(value.numpy().tobytes() for value in read_literals(graph.model).values())
    for name, tensor in tensors.items():
        varied = tensor.numel() > 1 and tensor.is_floating_point() and tensor.unique().numel() > 1
        assert not varied or tensor.numpy().tobytes() not in content, name
    assert all(value.numel() <= 77 * 77 for value in read_literals(graph.model).values())


def test_graph_contains_no_paths(graphs: dict[str, OnnxGraph]) -> None:
    for graph in graphs.values():
        assert b"site-packages" not in graph.model and str(REPOSITORY).encode() not in graph.model
        assert b".py" not in graph.model


def test_models_of_one_architecture_have_the_same_graph(toy_folder: Path, folder_copy: Path) -> None:
    """The other model's weights are zeros, which are the easiest to optimize away."""
    edit_weights(folder_copy / "text_encoder", lambda tensors: [tensor.zero_() for tensor in tensors.values()])
    one, other = (load_network(Checkpoint(folder), "text_encoder", FP32) for folder in (toy_folder, folder_copy))
    assert graph_key(one) == graph_key(other)
    graph = export_graph(one)
    assert graph == export_graph(other)
    engine = OnnxEngine("text_encoder", graph, other.signature, other.tensors())
    assert max(errors(other, engine, relative=False)) == 0.0
    assert graph_key(load_network(Checkpoint(toy_folder), "text_encoder", FP16)) != graph_key(one)


def test_refuses_weights_that_do_not_fit(toy_unet: tuple[Network, OnnxGraph]) -> None:
    network, graph = toy_unet
    tensors = network.tensors()
    name = next(iter(graph.constants))
    with pytest.raises(EngineError, match=f"lack {name}"):
        OnnxEngine("unet", graph, network.signature, {key: value for key, value in tensors.items() if key != name})


def test_refuses_a_wrapper_with_a_constant_tensor() -> None:
    class WithConstant(torch.nn.Module):
        def forward(self, latents: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (latents.repeat_interleave(8, 2).repeat_interleave(8, 3)[:, :3] * self.scale,)

    network = load_tiny("vae_decoder")
    module = WithConstant()
    module.scale = torch.randn(3, 1, 1)
    with pytest.raises(CompileError, match="could not be exported .*device"):
        export_graph(replace(network, module=module))


def test_refuses_a_damaged_graph(toy_unet: tuple[Network, OnnxGraph]) -> None:
    network, graph = toy_unet
    model = onnx.load_from_string(graph.model)
    model.graph.node[0].op_type = "NoSuchOperator"
    with pytest.raises(CompileError, match="is invalid"):
        onnx_export.check_graph(replace(graph, model=model.SerializeToString()), network.signature)
    constants = dict(graph.constants)
    name = next(iter(constants))
    constants[name] = constants[name] | {"shape": [1, 2, 3]}
    with pytest.raises(CompileError, match=f"{name} of the ONNX graph"):
        onnx_export.check_graph(replace(graph, constants=constants), network.signature)


def test_refuses_a_graph_with_other_results(toy_unet: tuple[Network, OnnxGraph]) -> None:
    network, graph = toy_unet
    model = onnx.load_from_string(graph.model)
    node = next(node for node in model.graph.node if node.op_type == "Sigmoid")
    node.op_type = "Tanh"
    with pytest.raises(InaccurateEngine, match="The ONNX graph of unet differs by"):
        validate_graph(network, replace(graph, model=model.SerializeToString()))


# -- in a store and in a folder -----------------------------------------------------------------------------------


def test_onnx_runtime_opens_the_commands_output(exported: tuple[WritableStore, Path], toy_folder: Path) -> None:
    _, out = exported
    assert {path.name for path in out.iterdir()} == {"weights"} | {f"{name}.onnx" for name in BASE_COMPONENTS}
    for name in BASE_COMPONENTS:
        onnx.checker.check_model(out / f"{name}.onnx", full_check=True)
    network = load_network(Checkpoint(toy_folder), "unet", FP16)
    session = onnxruntime.InferenceSession(out / "unet.onnx", providers=["CPUExecutionProvider"])
    case = example_inputs(network.signature, 2, 64, 96, "cpu")
    [actual] = session.run(None, {name: tensor.numpy() for name, tensor in case.items()})
    with torch.inference_mode():
        [expected] = network.module(*case.values())
    assert np.linalg.norm(actual - expected.numpy()) / np.linalg.norm(expected.numpy()) <= 1e-2


def test_weights_are_stored_once(exported: tuple[WritableStore, Path], toy_folder: Path) -> None:
    store, _ = exported
    tensor = load_network(Checkpoint(toy_folder), "unet", FP16).tensors()["conv_in.weight"]
    data = tensor.numpy().tobytes()
    assert sum(data in store.get(digest, size).read_bytes() for digest, size, _ in store.blobs()) == 1


def test_exporting_again_exports_nothing(exported: tuple[WritableStore, Path], toy_folder: Path) -> None:
    store, _ = exported
    before = {digest for digest, _, _ in store.blobs()}
    again = export_model(Checkpoint(toy_folder), None, FP16, store)
    assert not any(graph.is_new for graph in again)
    assert {digest for digest, _, _ in store.blobs()} == before


def test_gc_keeps_graphs(exported: tuple[WritableStore, Path]) -> None:
    store, _ = exported
    named = named_blobs(store)
    for key in store.records("onnx"):
        found = BuiltGraph.find(store, key)
        assert found is not None and {blob.sha256 for blob in found.blobs()} <= named


def test_exports_again_if_the_stored_graph_is_damaged(
    exported: tuple[WritableStore, Path], toy_folder: Path, tmp_path: Path
) -> None:
    store = open_writable_store(shutil.copytree(folder_of(exported[0]), tmp_path / "store"))
    network = load_network(Checkpoint(toy_folder), "text_encoder", FP16)
    found = BuiltGraph.find(store, graph_key(network))
    assert found is not None
    path = store.get(found.graph.sha256, found.graph.bytes)
    path.write_bytes(path.read_bytes()[:-1])
    assert BuiltGraph.find(store, graph_key(network)) is None
    assert load_or_export_graph(network, store)[0].graph == found.graph
    assert BuiltGraph.find(store, graph_key(network)) is not None


def test_write_model_refuses_weights_that_lack_a_tensor(toy_unet: tuple[Network, OnnxGraph], tmp_path: Path) -> None:
    network, graph = toy_unet
    tensors = network.tensors()
    name = next(iter(graph.constants))
    incomplete = {key: tensor for key, tensor in tensors.items() if key != name}
    for number, saved in enumerate((incomplete, tensors | {name: tensors[name].float()})):
        file = tmp_path / f"weights-{number}"
        save_file({key: tensor.contiguous() for key, tensor in saved.items()}, file)
        with pytest.raises(CompileError, match=f"lack {name}"):
            onnx_export.write_model(graph, [file], tmp_path / f"{number}.onnx")


def test_write_model_links_or_copies_weights(toy_unet: tuple[Network, OnnxGraph], tmp_path: Path) -> None:
    network, graph = toy_unet
    file = tmp_path / "blob"
    save_file({key: tensor.contiguous() for key, tensor in network.tensors().items()}, file)
    onnx_export.write_model(graph, [file], tmp_path / "linked" / "unet.onnx", link=True)
    [linked] = (tmp_path / "linked" / "weights").iterdir()
    assert linked.samefile(file)
    onnx_export.write_model(graph, [file], tmp_path / "copied" / "unet.onnx")
    [copied] = (tmp_path / "copied" / "weights").iterdir()
    assert not copied.samefile(file) and load_file(copied).keys() == load_file(file).keys()


# -- the whole pipeline -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refiner", [False, pytest.param(True, marks=slow)], ids=["base", "refined"])
def test_pipeline_generates_aot_inductors_image(refiner: bool, graphs: dict[str, OnnxGraph], loaded: Loaded) -> None:
    engines = dict(loaded.model.engines)
    for component, graph in graphs.items():
        network = load_tiny(component)
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


def test_tensorrts_parser_supports_every_operator(
    graphs: dict[str, OnnxGraph], old_graphs: dict[str, OnnxGraph]
) -> None:
    for graph in graphs.values():
        assert count_operators(graph.model).keys() <= SUPPORTED
        assert onnx.load_from_string(graph.model).opset_import[0].version == OPSET
    for graph in old_graphs.values():
        assert count_operators(graph.model).keys() <= SUPPORTED_BEFORE
        model = onnx.load_from_string(graph.model)
        assert (model.opset_import[0].version, model.ir_version) == (OLD_OPSET, 8)
        # A causal mask of 77 x 77 elements is stored once, not for each layer.
        assert sum(value.nbytes for value in read_literals(graph.model).values()) < 2**14


@pytest.mark.parametrize("component", ["text_encoder", "text_encoder_2", "unet", "vae_decoder"])
@pytest.mark.parametrize("opset", [OPSET, OLD_OPSET])
def test_attention_is_the_pattern_that_tensorrt_fuses(
    component: str, opset: int, graphs: dict[str, OnnxGraph], old_graphs: dict[str, OnnxGraph]
) -> None:
    """Queries, keys and values get one Reshape and one Transpose each, or a text encoder's together."""
    graph = onnx.load_from_string((graphs if opset == OPSET else old_graphs)[component].model).graph
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
    assert len(softmaxes) == count_attentions(load_tiny(component))
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
    if network.component == "vae_decoder":
        return 1
    layers = int(network.architecture["num_hidden_layers"])
    return layers - 1 if network.component == "text_encoder" else layers  # the first encoder's last layer is not used


@pytest.mark.parametrize("component", ["unet", "vae_decoder"])
def test_each_norm_is_one_node(component: str, graphs: dict[str, OnnxGraph], old_graphs: dict[str, OnnxGraph]) -> None:
    modules = list(load_tiny(component).module.modules())
    norms = [sum(isinstance(module, norm) for module in modules) for norm in (torch.nn.GroupNorm, torch.nn.LayerNorm)]
    for graph, group_norm in ((graphs, "GroupNormalization"), (old_graphs, "InstanceNormalization")):
        counts = count_operators(graph[component].model)
        assert [counts[group_norm], counts.get("LayerNormalization", 0)] == norms


@pytest.mark.parametrize("component", ["unet", "vae_decoder"])
@pytest.mark.parametrize("opset", [OPSET, OLD_OPSET])
def test_shapes_are_constants(
    component: str, opset: int, graphs: dict[str, OnnxGraph], old_graphs: dict[str, OnnxGraph]
) -> None:
    """Only a transformer's output gets the shape of another tensor, because its height and width are both dynamic."""
    graph = (graphs if opset == OPSET else old_graphs)[component]
    nodes = onnx.load_from_string(graph.model).graph.node
    constants = set(read_literals(graph.model))
    shapes = {node.output[0] for node in nodes if node.op_type == "Shape"}
    assert len(shapes) == {"unet": 7, "vae_decoder": 1}[component]
    for node in nodes:
        assert node.op_type not in ("Gather", "Squeeze", "Range", "Expand", "Where")
        if node.op_type == "Reshape":
            assert node.input[1] in constants | shapes
        if node.op_type == "Slice":
            assert constants.issuperset(node.input[1:])


@pytest.mark.parametrize(
    ("component", "layers", "kernels"), [("text_encoder", 156, 21), ("unet", 1930, 270), ("vae_decoder", 835, 85)]
)
def test_tensorrt_rtx_fuses_the_graphs(
    component: str, layers: int, kernels: int, old_graphs: dict[str, OnnxGraph], tmp_path: Path
) -> None:
    """The numbers are those of TensorRT-RTX 1.7.1, see docs/tensorrt.md. Fewer are better."""
    require_tensorrt_rtx()
    path = tmp_path / "graph.onnx"
    path.write_bytes(old_graphs[component].model)
    found = inspect_graph(path, pixels=256)
    assert found.layers <= layers
    assert found.kernels is not None and found.kernels <= kernels


def test_zeros_replace_the_weights(toy_unet: tuple[Network, OnnxGraph], tmp_path: Path) -> None:
    network, graph = toy_unet
    (tmp_path / "unet.onnx").write_bytes(graph.model)
    (tmp_path / "copy").mkdir()
    model = onnx.load(write_with_zeros(tmp_path / "unet.onnx", tmp_path / "copy"))
    arrays = {init.name: onnx.numpy_helper.to_array(init) for init in model.graph.initializer}
    assert all(arrays[name].shape == tuple(tensor.shape) for name, tensor in network.tensors().items())
    assert not any(arrays[name].any() for name in network.tensors())


def test_refuses_other_opsets(toy_folder: Path) -> None:
    network = load_network(Checkpoint(toy_folder), "unet_text", FP16)
    assert graph_key(network) != graph_key(network, OLD_OPSET)
    with pytest.raises(CompileError, match="ONNX opset 18 is not supported. Choose 21 or 17."):
        export_graph(network, 18)
    result = CliRunner().invoke(app, ["export-onnx", str(toy_folder), "--opset", "18"])
    assert result.exit_code == 2 and "18 is not supported; choose 21 or 17" in result.output
