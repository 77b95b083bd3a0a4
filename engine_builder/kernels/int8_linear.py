"""Linears in INT8: inputs and weights are rounded to 8-bit integers, and multiplied with sums in int32.

Each input channel has a scale, which the weight's columns absorb before they are rounded. So channels with outliers
take their range from the weight. Source: Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization
for Large Language Models", 2023. There the scales are folded into the norm before the linear. Here they are part of the
rounding, which every linear has, so attention's and GEGLU's outputs are smoothed as well.

Int8 has no NaN. A broken image is noticed all the same, because NaN stays in the values that bypass a linear.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine_builder.kernels.fp8_linear import QuantizedTensors
from engine_builder.kernels.kernel_form import has_kernels
from engine_builder.kernels.rounding import rounds_inputs
from model.weights.int8 import INT8_MAX, quantize

INT8_LINEAR_VERSION = 2  # part of every INT8 engine's key; raise it when the code of a quantized network changes
DEPTH_MULTIPLE = 64  # of the products that the Triton kernel computes
_SMALLEST_MAXIMUM = 1e-5  # of a channel that was always zero


class Int8Linear(QuantizedTensors):
    """[..., in] -> [..., out] of the linear's type. Takes that type, or int8 that is divided by `input_scale`.

    weight: int8 [out, in]. input_scale: float32 [in]. weight_scale: float32 [out]. A quantized input times its
    channel's scale is the number that it stands for. A quantized weight times its row's scale is the weight times its
    column's input scale. bias: [out], or None.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        if not rounds_inputs():
            bias = None if self.bias is None else self.bias.float()
            weight = self.weight.float() * self.weight_scale[:, None]
            return F.linear(inputs.float() / self.input_scale, weight, bias).to(self.dtype)
        shape = (*inputs.shape[:-1], self.out_features)
        rows = self.quantize_inputs(inputs).reshape(-1, self.in_features)
        if has_kernels(inputs) and self.in_features % DEPTH_MULTIPLE == 0:
            from engine_builder.kernels.int8_kernels import int8_linear

            # cuBLAS would write sums of 32 bits, which another kernel then reads.
            out: Tensor = int8_linear(rows.contiguous(), self.weight, self.weight_scale, self.bias, self.dtype)
            return out.reshape(shape)
        product = torch._int_mm(rows, self.weight.t())
        scaled = product.float() * self.weight_scale
        if self.bias is not None:
            scaled = scaled + self.bias.float()
        return scaled.to(self.dtype).reshape(shape)

    def quantize_inputs(self, inputs: Tensor) -> Tensor:
        """Return inputs as int8. Those that are int8 are returned as they are."""
        return inputs if inputs.dtype == torch.int8 else quantize(inputs, self.input_scale)


def smoothing_scales(weight: Tensor, channel_maxima: Tensor, strength: float) -> Tensor:
    """Return what each input channel is divided by, float32 [in]: maximum^strength / weight maximum^(1 - strength).

    weight: [out, in]. channel_maxima: [in], the largest absolute inputs. Equation 4 of SmoothQuant. A strength of 0
    leaves the outliers to the inputs, 1 moves them to the weights.
    """
    inputs = channel_maxima.float().clamp(min=_SMALLEST_MAXIMUM)
    weights = weight.abs().amax(0).float().clamp(min=_SMALLEST_MAXIMUM)
    return inputs**strength / weights ** (1 - strength)


def quantize_linear(linear: nn.Linear, input_scale: Tensor) -> Int8Linear:
    """Return a linear in INT8. `input_scale`: float32 [in], on any device."""
    weight = linear.weight.detach()
    input_scale = input_scale.to(weight.device)
    smoothed = weight.float() * input_scale
    weight_scale = smoothed.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / INT8_MAX
    return Int8Linear(
        quantize(smoothed, weight_scale[:, None]),
        weight_scale,
        input_scale,
        None if linear.bias is None else linear.bias.detach(),
        weight.dtype,
    )
