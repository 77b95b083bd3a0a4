"""Linear transforms of convolution weights: the forms in which engines read them. Each acts on the kernel's rows and
columns only, so the transform of a low-rank product is the product of the output factor and the transformed input
factor.
"""

import torch
from torch import Tensor


def winograd_weight(weight: Tensor) -> Tensor:
    """Return G weight G^T, [16, out, in], of a convolution weight [out, in, 3, 3].

    The basis of F(2x2, 3x3): see `engine_builder.kernels.winograd`. It is computed in fp32 or wider and rounded once.
    """
    exact = torch.promote_types(weight.dtype, torch.float32)
    axis = torch.tensor([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], dtype=exact, device=weight.device)
    transformed = torch.kron(axis, axis) @ weight.to(exact).flatten(2).flatten(0, 1).T
    return transformed.to(weight.dtype).reshape(-1, *weight.shape[:2])


def restore_winograd(weight: Tensor) -> Tensor:
    """Invert `winograd_weight` up to rounding: [16, out, in] -> [out, in, 3, 3]."""
    exact = torch.promote_types(weight.dtype, torch.float32)
    axis = torch.tensor([[1, 0, 0, 0], [0, 1, -1, 0], [0, 0, 0, 1]], dtype=exact, device=weight.device)
    taps = torch.kron(axis, axis) @ weight.to(exact).flatten(1)
    return taps.T.to(weight.dtype).reshape(*weight.shape[1:], 3, 3)


def phase_weights(weight: Tensor) -> Tensor:
    """Return the weights of the four phases, [4 out, in, 2, 2], from convolution weights [out, in, 3, 3].

    The phases are in the order: both even, odd columns, odd rows, both odd. Sums are in fp32 or wider and rounded once.
    In an even row the kernel's second and third row read the same pixels, in an odd row the first and second. The same
    holds for columns.
    """
    kernel = weight.to(torch.promote_types(weight.dtype, torch.float32))
    rows = [torch.stack(taps, 2) for taps in _phase_taps(*kernel.unbind(2))]
    phases = [torch.stack(taps, 3) for row in rows for taps in _phase_taps(*row.unbind(3))]
    return torch.cat(phases).to(weight.dtype)


def restore_phases(weight: Tensor) -> Tensor:
    """Invert `phase_weights` up to rounding: [4 out, in, 2, 2] -> [out, in, 3, 3].

    Each tap but the middle ones is one tap of a phase. The middle one of a row or a column is a difference.
    """
    even, odd_columns, odd_rows, odd = weight.chunk(4)

    def row(left: Tensor, right: Tensor) -> Tensor:
        return torch.stack([left[..., 0], left[..., 1] - right[..., 1], right[..., 1]], -1)

    first = row(even[..., 0, :], odd_columns[..., 0, :])
    last = row(odd_rows[..., 1, :], odd[..., 1, :])
    first_two = row(odd_rows[..., 0, :], odd[..., 0, :])
    return torch.stack([first, first_two - first, last], -2)


def _phase_taps(first: Tensor, second: Tensor, third: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the two taps of the even phase and the two of the odd phase."""
    return (first, second + third), (first + second, third)
