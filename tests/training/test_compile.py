"""Compiled training keeps the gradients of group norms exact in bfloat16."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from training.compile import compile_function  # noqa: E402

pytestmark = pytest.mark.full
# The compiler's decompositions without its code generation, which takes a minute on a CPU.
BACKEND = "aot_eager_decomp_partition"


@pytest.mark.filterwarnings("ignore")  # of the compiler, such as deprecations
def test_group_norms_keep_their_statistics_in_float32() -> None:
    """A compiled nn.GroupNorm keeps the mean and the deviation in bfloat16, so its gradient is less exact."""
    inputs, output_weights = ((torch.randn(4, 16, 8, 8) + shift).bfloat16().float() for shift in (8, 0))
    norm = nn.GroupNorm(4, 16)

    def gradient(dtype: torch.dtype, float32_norms: bool) -> Tensor:
        leaf = inputs.to(dtype, copy=True).requires_grad_()
        own_norm = copy.deepcopy(norm).to(dtype)
        torch.compiler.reset()
        if float32_norms:
            function = compile_function(lambda x: own_norm(x), own_norm, BACKEND)
        else:
            function = torch.compile(lambda x: own_norm(x), backend=BACKEND)
        (function(leaf).float() * output_weights).sum().backward()
        assert leaf.grad is not None
        return leaf.grad.float()

    exact = gradient(torch.float32, float32_norms=False)

    def relative_error(found: Tensor) -> float:
        return float((found - exact).norm() / exact.norm())

    rounding_error = relative_error(exact.bfloat16().float())  # of the exact gradient, rounded to bfloat16
    float32_error = relative_error(gradient(torch.bfloat16, float32_norms=True))
    bfloat16_error = relative_error(gradient(torch.bfloat16, float32_norms=False))
    assert float32_error < 1.1 * rounding_error < 1.5 * rounding_error < bfloat16_error
