"""The check of 8-bit engines of deep networks, whose rounding errors are independent of eager PyTorch's."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import nn

from engine_builder.building import validate as validation
from engine_builder.building.eager_engine import EagerEngine
from engine_builder.building.validate import InaccurateEngine, tolerance, validate
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.kernels.fp8_conv import QuantizedConv, quantize_conv
from engine_builder.kernels.fp8_linear import quantize_linear
from engine_builder.kernels.int8_linear import quantize_linear as quantize_to_int8
from engine_builder.kernels.kernel_form import plain_operations
from engine_builder.kernels.rounding import unrounded_inputs
from engine_builder.networks.network import Network, load_network
from engine_builder.quantization.policy import Policy
from engine_builder.quantization.quantize import quantize_network
from model.store.manifest import Bucket, Span
from model.store.precision import FP32
from tests.support.quantization import ranges_of
from tests.support.repository import MODEL_FOLDER

SIDE = Span(min=128, max=128)


@pytest.fixture(scope="module")
def decoder() -> Network:
    """The tiny model's VAE decoder with its convolutions in FP8."""
    network = load_network(Checkpoint(MODEL_FOLDER), "vae_decoder", FP32, plain=True)
    ranges = ranges_of(network, [torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))])
    return quantize_network(network, ranges, Policy(vae_convolutions=["*"]))[0]


class ChangedEngine(EagerEngine):
    """Runs a network whose quantized convolutions return what `change` makes of their outputs."""

    def __init__(self, network: Network, change: Callable[[torch.Tensor], torch.Tensor], batch: int = 1) -> None:
        super().__init__(network.component, network.module, network.signature)
        self.bucket = Bucket(batch=Span(min=batch, max=batch), height=SIDE, width=SIDE)
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
    """The last bits of fp16 differ in each layer. The distance to eager PyTorch is nearly that of the rounding.

    Only 8-bit engines may differ so.
    """
    for name in ("float8_e4m3fn", "float32"):
        monkeypatch.setitem(validation._MAX_RELATIVE_ERROR, name, 1e-4)
    accuracy = validate(decoder, ChangedEngine(decoder, with_noise(5e-4)), ())
    assert tolerance(decoder, "cpu") < 1e-3 < accuracy.relative
    with pytest.raises(InaccurateEngine, match="fp32 allows 1e-04"):
        validate(replace(decoder, precision=FP32), ChangedEngine(decoder, with_noise(5e-4)), ())


@pytest.mark.parametrize(
    "change",
    [with_noise(0.1), lambda out: 0.9 * out, lambda out: out.roll(1, 3), lambda out: out * torch.nan],
    ids=["noise", "scale", "shift", "nan"],
)
def test_larger_errors_are_refused(decoder: Network, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(
        InaccurateEngine,
        match=r"vae_decoder engine \(128x128@1\) .* random inputs, and entry 1 .* without rounded inputs is ",
    ):
        validate(decoder, ChangedEngine(decoder, change), ())


def test_names_the_entry_that_is_worst(decoder: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(out: torch.Tensor) -> torch.Tensor:
        out[2] = 0
        return out

    monkeypatch.setattr(validation, "_random_cases", lambda *_: [])
    inputs = {"latents": torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(2))}
    with pytest.raises(InaccurateEngine, match=r"\(128x128@4\) .* inputs of a denoising run, and entry 3 of the batch"):
        validate(decoder, ChangedEngine(decoder, change, batch=4), [inputs])


def test_unrounded_inputs_leave_the_error_of_the_weights() -> None:
    """In every kind of quantized layer. Outside of the switch, and of another network, inputs are rounded."""
    conv, linear = nn.Conv2d(32, 32, 3, padding=1), nn.Linear(64, 32)
    image, tokens = torch.randn(1, 32, 6, 6), torch.randn(5, 64)
    in_int8 = quantize_to_int8(linear, torch.rand(64) / 20 + 0.02)
    for layer, inputs in ((quantize_conv(conv, 4.0), image), (quantize_linear(linear, 4.0), tokens), (in_int8, tokens)):
        with torch.inference_mode(), plain_operations():
            rounded = layer(inputs)
            with unrounded_inputs():
                exact = layer(inputs)
            assert torch.equal(layer(inputs), rounded), layer
        weight = layer.weight.float() * layer.weight_scale.reshape(-1, *[1] * (layer.weight.ndim - 1))
        if inputs is image:
            expected = nn.functional.conv2d(inputs, weight, layer.bias, padding=1)
        else:
            divisor = layer.input_scale if layer is in_int8 else 1
            expected = nn.functional.linear(inputs / divisor, weight, layer.bias)
        torch.testing.assert_close(exact, expected, atol=1e-4, rtol=1e-4)
        assert (rounded - exact).abs().max() > 1e-3, layer
