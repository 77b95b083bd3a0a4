"""Linears in FP8 (E4M3): weights and inputs are divided by one scale each, rounded to E4M3, and multiplied.

Products are summed in fp32, on a Hopper GPU with the lower precision of its fast accumulation. On a CPU, for tests and
`preheat check-fp8`, the same numbers are multiplied in fp32. torch._scaled_mm takes over 1,000 times as long there,
because oneDNN has only reference code for E4M3 on most CPUs. An exported network has torch._scaled_mm on every device.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine_builder.kernels.rounding import rounds_inputs
from engine_builder.networks.onnx_form import is_for_onnx
from model.weights.fp8 import E4M3_MAX, quantize

# Part of every quantized engine's key. Raise it when the code of a quantized network on a GPU changes: here, or where
# blocks.py and kernels.py take or return E4M3.
LINEAR_VERSION = 2
MULTIPLE = 16  # of a product's width and depth


class QuantizedTensors(nn.Module):
    """The tensors of a linear in 8 bits. weight: [out, in]. bias: [out] in `dtype`, or None."""

    weight_scale: Tensor
    input_scale: Tensor

    def __init__(
        self, weight: Tensor, weight_scale: Tensor, input_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = dtype
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("weight_scale", weight_scale)
        self.register_buffer("input_scale", input_scale)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)


class QuantizedLinear(QuantizedTensors):
    """[..., in] -> [..., out] of the linear's type. Takes that type, or E4M3 that is divided by `input_scale`.

    weight: E4M3 [out, in]. weight_scale, input_scale: float32 scalars: a quantized number times its scale is the number
    that it stands for. bias: [out], or None.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        if is_for_onnx():
            from engine_builder.networks.onnx_operations import quantized_linear

            rounded: Tensor = quantized_linear(inputs, self.weight, self.input_scale, self.weight_scale, self.bias)
            return rounded
        if not rounds_inputs():
            bias = None if self.bias is None else self.bias.float()
            return F.linear(inputs.float(), self.weight.float() * self.weight_scale, bias).to(self.dtype)
        numbers = self.quantize_inputs(inputs).reshape(-1, self.in_features)
        # The compiler would turn scalars that are factors of an elementwise product into literals of the code.
        if numbers.is_cuda or torch.compiler.is_compiling():
            product = torch._scaled_mm(
                numbers,
                self.weight.t(),
                scale_a=self.input_scale,
                scale_b=self.weight_scale,
                bias=self.bias,
                out_dtype=self.dtype,
                use_fast_accum=True,
            )
        else:
            scaled = numbers.float() @ self.weight.float().t() * (self.input_scale * self.weight_scale)
            product = (scaled if self.bias is None else scaled + self.bias.float()).to(self.dtype)
        return product.reshape(*inputs.shape[:-1], self.out_features)

    def quantize_inputs(self, inputs: Tensor) -> Tensor:
        """Return inputs as E4M3. Those that are E4M3 are returned as they are."""
        return inputs if inputs.dtype == torch.float8_e4m3fn else quantize(inputs, self.input_scale)


def quantize_linear(linear: nn.Linear, input_clip: float) -> QuantizedLinear:
    """Return a linear in FP8. `input_clip`: the absolute input that is mapped to the largest number of E4M3."""
    weight = linear.weight.detach()
    weight_scale = weight.abs().max().float() / E4M3_MAX
    return QuantizedLinear(
        quantize(weight, weight_scale),
        weight_scale,
        torch.tensor(input_clip / E4M3_MAX, dtype=torch.float32, device=weight.device),
        None if linear.bias is None else linear.bias.detach(),
        weight.dtype,
    )


def can_quantize(module: nn.Module) -> bool:
    """True for a linear whose width and depth suit an FP8 product, and whose weights are present and not all zero."""
    if not isinstance(module, nn.Linear) or module.weight is None or not bool(module.weight.any()):
        return False
    return module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0
