"""What compiling the training must not change: the gradient that goes through a group norm in bfloat16."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from training.compiled import WideGroupNorm, compiled, widen_group_norms  # noqa: E402


@pytest.mark.filterwarnings("ignore")  # deprecations and the like, inside the compiler
def test_group_norms_keep_their_statistics_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compiler's own decompositions, without its code generation, which takes a minute on a CPU. Left as they
    are, the mean and the deviation of compiled norms are those of eight bits."""
    compile_with = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **how: compile_with(function, backend="aot_eager_decomp_partition", **how)
    )
    pictures, wanted = ((torch.randn(4, 16, 8, 8) + shift).bfloat16().float() for shift in (8, 0))

    def gradient(norm: nn.Module, dtype: torch.dtype, widened: bool) -> Tensor:
        inputs = pictures.to(dtype, copy=True).requires_grad_()
        norm = copy.deepcopy(norm).to(dtype)
        run = compiled(lambda x: norm(x), norm) if widened else torch.compile(lambda x: norm(x))
        torch._dynamo.reset()
        (run(inputs).float() * wanted).sum().backward()
        assert inputs.grad is not None
        return inputs.grad.float()

    norm = nn.GroupNorm(4, 16)
    exact = gradient(norm, torch.float32, widened=False)

    def wrong(found: Tensor) -> float:
        return float((found - exact).norm() / exact.norm())

    left, widened = (wrong(gradient(norm, torch.bfloat16, widened=widened)) for widened in (False, True))
    rounding = wrong(exact.bfloat16().float())  # of the gradient itself
    assert widened < 1.1 * rounding < 1.5 * rounding < left


def test_uncompiled_group_norms_stay_what_they_were() -> None:
    network = nn.Sequential(nn.GroupNorm(4, 16), nn.Conv2d(16, 16, 1), nn.GroupNorm(4, 16, affine=False))
    inputs = torch.randn(2, 16, 4, 4)
    before, names = network(inputs), list(network.state_dict())
    widen_group_norms(network)
    assert [type(module) for module in network] == [WideGroupNorm, nn.Conv2d, WideGroupNorm]
    assert torch.equal(network(inputs), before)
    assert list(network.state_dict()) == names
