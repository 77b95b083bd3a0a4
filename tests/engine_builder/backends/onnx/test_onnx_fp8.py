"""ONNX graphs of UNets in FP8: nodes that quantize and dequantize, by the calibration and policy of the engines."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from diffusers import AutoencoderKL
from onnx import TensorProto
from typer.testing import CliRunner

from engine_builder.backends.aot_inductor.compile import example_inputs
from engine_builder.backends.built import CompileError
from engine_builder.backends.onnx.export_graph import OnnxGraph, export_graph, graph_key
from engine_builder.backends.onnx.graph_store import BuiltGraph, read_graph, validate_graph
from engine_builder.backends.onnx.onnx_engine import OnnxEngine
from engine_builder.backends.onnx.opsets import OLD_OPSET
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.kernels.fp8_conv import can_quantize_conv
from engine_builder.kernels.fp8_linear import QuantizedLinear, can_quantize
from engine_builder.networks.network import Network, load_network, public_name
from engine_builder.quantization.policy import Policy
from engine_builder.quantization.quantize import quantize_layers
from engine_builder.stores.store import WritableStore, open_writable_store
from model.store.precision import FP16
from preheat.main import app
from tests.support.repository import MODEL_FOLDER

KEPT = ["*.proj_in", "*.ff.*"]
E4M3 = TensorProto.FLOAT8E4M3FN


def quantized_layers(network: Network) -> dict[str, QuantizedLinear]:
    modules = network.module.named_modules()
    return {public_name(name): module for name, module in modules if isinstance(module, QuantizedLinear)}


@pytest.fixture(scope="module")
def written(toy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[WritableStore, Path]:
    """The toy in FP8, by `preheat calibrate` and `preheat export-onnx`, in a store and a folder."""
    root = tmp_path_factory.mktemp("fp8")
    (root / "prompts.txt").write_text("a circle\na square\n")
    store = ["--store", str(root / "store")]
    size = ["--steps", "2", "--size", "64x64"]
    (root / "policy.toml").write_text(f"keep_fp16 = {json.dumps(KEPT)}")
    fp8 = ["--precision", "fp8", "--policy", str(root / "policy.toml")]
    for arguments in (
        ["calibrate", str(toy_folder), "--prompts", str(root / "prompts.txt"), *size, *store],
        ["export-onnx", str(toy_folder), *fp8, "--out", str(root / "out"), *store],
    ):
        ran = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert ran.exit_code == 0, ran.output
    return open_writable_store(root / "store"), root / "out"


@pytest.fixture(scope="module")
def unet(toy_folder: Path) -> Network:
    """The toy's UNet in FP8, without a calibration."""
    network = load_network(Checkpoint(toy_folder), "unet", FP16)
    linears = [public_name(name) for name, module in network.module.named_modules() if can_quantize(module)]
    return quantize_layers(network, {name: 8.0 for name in Policy(keep_fp16=KEPT).select(linears)})


@pytest.fixture(scope="module")
def graph(unet: Network) -> OnnxGraph:
    """The graph of all calibrations."""
    return export_graph(unet)


def count_operators(graph: bytes) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load_from_string(graph).graph.node)


def test_each_layer_quantizes_its_input_and_dequantizes_both_factors(unet: Network, graph: OnnxGraph) -> None:
    layers = quantized_layers(unet)
    counts = count_operators(graph.model)
    assert (counts["QuantizeLinear"], counts["DequantizeLinear"]) == (len(layers), 2 * len(layers))
    model = onnx.load_from_string(graph.model)
    producers = {output: node for node in model.graph.node for output in node.output}
    names = {init.name: init for init in model.graph.initializer}
    found = set()
    for node in model.graph.node:
        if node.op_type != "QuantizeLinear":
            continue
        [layer] = [name for name in layers if node.input[1] == f"{name}.input_scale"]
        found.add(layer)
        assert names[f"{layer}.weight"].data_type == E4M3 and names[node.input[1]].data_type == TensorProto.FLOAT
    assert found == layers.keys()
    for node in model.graph.node:  # each product of a quantized layer has two dequantized factors
        if node.op_type == "MatMul" and any(_origin(name, producers) == "DequantizeLinear" for name in node.input):
            assert [_origin(name, producers) for name in node.input] == ["DequantizeLinear"] * 2


def _origin(name: str, producers: dict[str, onnx.NodeProto]) -> str:
    """Return the operator that made a tensor, before any transposition."""
    while name in producers and producers[name].op_type == "Transpose":
        name = producers[name].input[0]
    return producers[name].op_type if name in producers else ""


def test_scales_are_weights(unet: Network, graph: OnnxGraph) -> None:
    """One graph serves every model of the architecture, and every calibration."""
    tensors = {name for layer in quantized_layers(unet) for name in (f"{layer}.input_scale", f"{layer}.weight_scale")}
    assert tensors <= graph.constants.keys()
    for init in onnx.load_from_string(graph.model).graph.initializer:
        assert (init.data_location == TensorProto.EXTERNAL) == (init.name in graph.constants), init.name


def test_equals_eager_pytorch_and_rounds(unet: Network, graph: OnnxGraph, toy_folder: Path) -> None:
    """It differs from fp16 by the rounding, and other scales round to other numbers."""
    assert validate_graph(unet, graph) <= 2e-2
    case = example_inputs(unet.signature, 2, 64, 64, "cpu", 1)
    with torch.inference_mode():
        [expected] = load_network(Checkpoint(toy_folder), "unet", FP16).module(*case.values())
    coarse = {n: 16 * t if n.endswith("input_scale") else t for n, t in unet.tensors().items()}
    found, other = (
        OnnxEngine("unet", graph, unet.signature, weights).run(case)["noise"] for weights in (unet.tensors(), coarse)
    )
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    assert 2e-3 < error < 0.2 and not torch.equal(found, other)


@pytest.mark.parametrize("bias", [True, False])
def test_layer_equals_numpy(bias: bool, toy_folder: Path, unet: Network) -> None:
    """One layer alone, against E4M3 of ml_dtypes: rounding to the nearest even number, and clipping."""
    layer = next(layer for layer in quantized_layers(unet).values() if (layer.bias is not None) == bias)

    class Alone(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor]:
            return (self.layer(tokens),)

    signature = load_network(Checkpoint(toy_folder), "unet_text", FP16).signature
    spec = signature.inputs[0].model_copy(update={"name": "tokens", "shape": ("rows", 7, layer.in_features)})
    result = signature.outputs[0].model_copy(update={"name": "result", "shape": ("rows", 7, layer.out_features)})
    signature = signature.model_copy(update={"inputs": (spec,), "outputs": (result,)})
    alone = replace(unet, component="unet_text", module=Alone(), signature=signature, multiple=None)
    exported = export_graph(alone)
    inputs = 6 * torch.randn(3, 7, layer.in_features, generator=torch.Generator().manual_seed(0)).half()
    found = OnnxEngine("unet_text", exported, signature, alone.tensors()).run({"tokens": inputs})["result"]
    scale, weight_scale = layer.input_scale.numpy(), layer.weight_scale.numpy()
    rounded = (inputs.float().numpy() / scale).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    weight = layer.weight.detach().view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    expected = (rounded * scale) @ (weight * weight_scale).T
    expected += 0 if layer.bias is None else layer.bias.detach().double().numpy()
    assert (np.abs(inputs.numpy()) > 8).any(), "some inputs are clipped"
    np.testing.assert_allclose(found.numpy(), expected.astype(np.float16), rtol=2e-3, atol=2e-3)


@pytest.mark.full
def test_convolutions_are_quantized_and_equal_eager_pytorch() -> None:
    """Of the tiny model. Weights have a scale for each output. The first and the last convolution stay in fp16."""
    network = load_network(Checkpoint(MODEL_FOLDER), "unet", FP16)
    names = [public_name(name) for name, module in network.module.named_modules() if can_quantize_conv(module)]
    unet = quantize_layers(network, {name: 8.0 for name in names})
    graph = export_graph(unet)
    counts = count_operators(graph.model)
    assert (counts["QuantizeLinear"], counts["DequantizeLinear"]) == (len(names), 2 * len(names)) and len(names) > 5
    model = onnx.load_from_string(graph.model)
    producers = {output: node.op_type for node in model.graph.node for output in node.output}
    convs = [node for node in model.graph.node if node.op_type == "Conv"]
    rounded = [node for node in convs if producers.get(node.input[0]) == "DequantizeLinear"]
    assert len(rounded) == len(names) < len(convs)
    assert all(producers[node.input[1]] == "DequantizeLinear" for node in rounded)
    assert {f"{name}.weight_scale" for name in names} <= graph.constants.keys()
    assert validate_graph(unet, graph) <= 2e-2


@pytest.mark.full
def test_deep_decoder_of_other_rounding_errors_is_exported(tmp_path: Path) -> None:
    """31 quantized convolutions follow each other, as in SDXL's decoder. The graph rounds as often as eager PyTorch."""
    torch.manual_seed(0)
    AutoencoderKL(
        block_out_channels=(32, 64, 64, 64), layers_per_block=2, down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4, norm_num_groups=32, force_upcast=False,
    ).save_pretrained(tmp_path)  # fmt: skip
    exact = load_network(replace(Checkpoint(MODEL_FOLDER), vae=tmp_path), "vae_decoder", FP16)
    names = [public_name(name) for name, module in exact.module.named_modules() if can_quantize_conv(module)]
    decoder = quantize_layers(exact, {name: 4.0 for name in names})
    assert len(names) == 31 and validate_graph(decoder, export_graph(decoder)) > 5e-2


@pytest.mark.full
def test_command_writes_a_checked_graph(written: tuple[WritableStore, Path], unet: Network, graph: OnnxGraph) -> None:
    """ONNX's checker and ONNX Runtime open the files. Other components are in fp16."""
    store, out = written
    built = BuiltGraph.find(store, graph_key(unet))
    assert built is not None and read_graph(store, built).model == graph.model
    for path in sorted(out.glob("*.onnx")):
        onnx.checker.check_model(path, full_check=True)
        counts = count_operators(onnx.load(path, load_external_data=False).SerializeToString())
        assert ("QuantizeLinear" in counts) == (path.stem == "unet"), path.stem
    names = {init.name for init in onnx.load(out / "unet.onnx", load_external_data=False).graph.initializer}
    quantized = {name.removesuffix(".input_scale") for name in names if name.endswith(".input_scale")}
    assert any(name.endswith(".proj_out") for name in quantized), "the policy, not the default one"
    assert not any(name.endswith(".proj_in") or ".ff." in name for name in quantized)
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    onnxruntime.InferenceSession(out / "unet.onnx", options, providers=["CPUExecutionProvider"])


def test_key_names_the_quantized_layers(unet: Network, toy_folder: Path) -> None:
    exact = load_network(Checkpoint(toy_folder), "unet", FP16)
    fewer = quantize_layers(exact, dict(list(unet.clips.items())[:3]))
    other_clips = quantize_layers(exact, {name: 2 * clip for name, clip in unet.clips.items()})
    assert len({graph_key(network) for network in (exact, unet, fewer)}) == 3
    assert graph_key(other_clips) == graph_key(unet)


def test_older_opset_is_refused(unet: Network) -> None:
    with pytest.raises(CompileError, match="opset 17 has no numbers in fp8.*Choose opset 21"):
        export_graph(unet, OLD_OPSET)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--precision", "fp8"], "no intact calibration"),
        (["--precision", "fp8", "--opset", "17"], "has no FP8"),
        (["--policy", "policy.toml"], "is an option of --precision fp8"),
    ],
)
def test_command_refuses(arguments: list[str], message: str, toy_folder: Path, tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["export-onnx", str(toy_folder), "--store", str(tmp_path / "store"), *arguments])
    assert ran.exit_code != 0
    said = f"{ran.output} {ran.exception}"
    assert message in " ".join(said.replace("│", " ").split()), said
