"""The check of 8-bit engines of deep networks, whose rounding errors are independent of eager PyTorch's."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch

from engine_builder.building.eager_engine import EagerEngine
from engine_builder.building.validate import InaccurateEngine, tolerance, validate
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.networks.fp8_conv import QuantizedConv
from engine_builder.networks.kernel_form import plain_operations
from engine_builder.networks.network import Network, load_network
from engine_builder.networks.rounding import unrounded_inputs
from engine_builder.quantization.calibrate import observing
from engine_builder.quantization.policy import Policy
from engine_builder.quantization.quantize import quantize_network
from engine_builder.quantization.ranges import InputRange
from model.store.manifest import Bucket, Span
from model.store.precision import FP8, FP32, INT8
from tests.support.repository import MODEL_FOLDER

BUCKET = Bucket(batch=Span(min=1, max=1), height=Span(min=512, max=512), width=Span(min=512, max=512))


@pytest.fixture(scope="module")
def decoder() -> Network:
    """The tiny model's VAE decoder with its convolutions in FP8."""
    network = load_network(Checkpoint(MODEL_FOLDER), "vae_decoder", FP32, plain=True)
    ranges: dict[str, InputRange] = {}
    with observing(network.module, ranges), torch.inference_mode():
        network.module(torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0)))
    return quantize_network(network, ranges, Policy(vae_convolutions=["*"]))[0]


class ChangedEngine(EagerEngine):
    """Runs a network whose quantized convolutions return what `change` makes of their outputs."""

    def __init__(self, network: Network, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(network.component, network.module, network.signature)
        self.bucket = BUCKET
        self._network, self._change = network, change

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        convs = [module for module in self._network.module.modules() if isinstance(module, QuantizedConv)]
        handles = [conv.register_forward_hook(lambda _module, _inputs, out: self._change(out)) for conv in convs]
        try:
            return super().run(inputs)
        finally:
            for handle in handles:
                handle.remove()


def with_noise(share: float) -> Callable[[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return lambda out: out * (1 + share * torch.randn(out.shape, generator=generator))


def test_other_rounding_errors_of_the_same_size_pass(decoder: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last bits of fp16 differ in each layer. The distance to eager PyTorch is nearly that of the rounding."""
    monkeypatch.setitem(_errors(), "float8_e4m3fn", 1e-4)
    accuracy = validate(decoder, ChangedEngine(decoder, with_noise(5e-4)), ())
    assert tolerance(decoder, "cpu") < 1e-3 < accuracy.relative


@pytest.mark.parametrize(
    "change",
    [with_noise(0.1), lambda out: 0.9 * out, lambda out: out.roll(1, 3), lambda out: out * torch.nan],
    ids=["noise", "scale", "shift", "nan"],
)
def test_larger_errors_are_refused(decoder: Network, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(
        InaccurateEngine,
        match=r"vae_decoder engine \(512x512@1\) .* random inputs, and entry 1 .* without rounded inputs is ",
    ):
        validate(decoder, ChangedEngine(decoder, change), ())


def test_names_the_entry_that_is_worst(decoder: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(out: torch.Tensor) -> torch.Tensor:
        out[2] = 0
        return out

    engine = ChangedEngine(decoder, change)
    engine.bucket = Bucket(batch=Span(min=4, max=4), height=BUCKET.height, width=BUCKET.width)
    monkeypatch.setattr("engine_builder.building.validate._random_cases", lambda *_: [])
    inputs = {"latents": torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(2))}
    with pytest.raises(InaccurateEngine, match=r"\(512x512@4\) .* inputs of a denoising run, and entry 3 of the batch"):
        validate(decoder, engine, [inputs])


def test_only_8_bit_engines_may_differ_by_rounding(decoder: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_errors(), "float32", 1e-4)
    with pytest.raises(InaccurateEngine, match="fp32 allows 1e-04"):
        validate(replace(decoder, precision=FP32), ChangedEngine(decoder, with_noise(5e-4)), ())


def test_unrounded_inputs_leave_the_error_of_the_weights() -> None:
    """In every kind of quantized layer. Outside of the switch, and of another network, inputs are rounded."""
    torch.manual_seed(0)
    from engine_builder.networks.fp8_conv import quantize_conv
    from engine_builder.networks.fp8_linear import quantize_linear
    from engine_builder.networks.int8_linear import quantize_linear as quantize_to_int8

    conv, linear = torch.nn.Conv2d(32, 32, 3, padding=1), torch.nn.Linear(64, 32)
    scale = torch.rand(64) / 20 + 0.02
    layers = {
        "conv": (quantize_conv(conv, 4.0), torch.randn(1, 32, 6, 6)),
        FP8.name: (quantize_linear(linear, 4.0), torch.randn(5, 64)),
        INT8.name: (quantize_to_int8(linear, scale), torch.randn(5, 64)),
    }
    for name, (layer, inputs) in layers.items():
        with torch.inference_mode(), plain_operations():
            rounded = layer(inputs)
            with unrounded_inputs():
                exact = layer(inputs)
            assert torch.equal(layer(inputs), rounded), name
        weight = layer.weight.float() * layer.weight_scale.reshape(-1, *[1] * (layer.weight.ndim - 1))
        if name == "conv":
            expected = torch.nn.functional.conv2d(inputs, weight * 1.0, layer.bias, padding=1)
        else:
            divisor = layer.input_scale if name == INT8.name else torch.ones(())
            expected = torch.nn.functional.linear(inputs / divisor, weight, layer.bias)
        torch.testing.assert_close(exact, expected, atol=1e-4, rtol=1e-4)
        assert (rounded - exact).abs().max() > 1e-3, name


def _errors() -> dict[str, float]:
    from engine_builder.building import validate as module

    return module._MAX_RELATIVE_ERROR
