"""A linear with a low-rank change for each entry of the batch: y = x W^T + b + (x D^T) U."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine_builder.kernels.kernel_form import has_half_kernels
from model.adapters.packing import PackedLayer

LOW_RANK_VERSION = 2  # part of the keys of engines with these linears. Raise it when their code changes
_MIN_OUTPUTS = 2**24  # of a product. In smaller ones the kernel leaves multiprocessors without a tile; not measured


class LowRankVectors:
    """The inputs of the current call, which all linears read. Not a tensor attribute: an export would refuse that."""

    down: Tensor
    up: Tensor


class LowRankLinear(nn.Module):
    """A linear with a low-rank change for each batch entry. It has one part for each layer that shares the weight."""

    def __init__(self, linear: nn.Linear, parts: Sequence[PackedLayer], rank: int, vectors: LowRankVectors) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._parts, self._rank, self._vectors = parts, rank, vectors

    def forward(self, inputs: Tensor) -> Tensor:
        """[batch, tokens, in] -> [batch, tokens, out]. The inputs may be those of the batch's first entries only."""
        narrow = self.narrow(inputs)
        if self.has_kernel(inputs):
            from engine_builder.kernels import attention_kernels as kernels

            out: Tensor = kernels.low_rank_linear(
                inputs.contiguous(), self.weight, self.bias, narrow, self.up(), len(self._parts)
            )
            return out
        changes = []
        for index, part in enumerate(self._parts):
            out_features = part.layer.shape[0]
            up = self._vectors.up[: inputs.shape[0], part.up : part.up + self._rank * out_features]
            of_part = narrow[..., index * self._rank : (index + 1) * self._rank]
            changes.append(torch.bmm(of_part, up.reshape(inputs.shape[0], self._rank, out_features)))
        change = torch.cat(changes, -1) if len(changes) > 1 else changes[0]
        return F.linear(inputs, self.weight, self.bias) + change

    def has_kernel(self, inputs: Tensor) -> bool:
        """True if kernels add the change in the product: a change of its own reads and writes all outputs again."""
        if not has_half_kernels(inputs):
            return False
        batch, tokens, inner = inputs.shape
        widths = {part.layer.shape[0] for part in self._parts}
        fits = tokens % 128 == 0 and inner % 64 == 0 and self._rank % 16 == 0
        is_large = batch * tokens * self.out_features >= _MIN_OUTPUTS
        # The compute capabilities of `blocks.geglu`.
        has_tensor_memory = torch.cuda.get_device_capability(inputs.device)[0] in (9, 10)
        return fits and len(widths) == 1 and min(widths) % 128 == 0 and is_large and has_tensor_memory

    def narrow(self, inputs: Tensor) -> Tensor:
        """[batch, tokens, in] -> x D^T, [batch, tokens, parts * rank]."""
        first, width = self._parts[0].down, len(self._parts) * self._rank
        down = self._vectors.down[: inputs.shape[0], first : first + width * self.in_features]
        return torch.bmm(inputs, down.reshape(inputs.shape[0], width, self.in_features).transpose(1, 2))

    def up(self) -> Tensor:
        """Return U of all parts, [batch, parts * rank * out / parts]. It is a part of the input, and is not copied."""
        first = self._parts[0].up
        return self._vectors.up[:, first : first + self._rank * self.out_features]
