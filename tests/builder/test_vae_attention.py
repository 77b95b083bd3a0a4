"""The attention of the VAE's middle block, in pieces."""

import pytest
import torch
import torch.nn.functional as F

from engine_builder.networks.vae import wide_attention


@pytest.mark.parametrize("max_scores", [2**29, 2 * 48 * 7, 1])
def test_pieces_compute_the_whole_attention(max_scores: int) -> None:
    queries, keys, values = torch.randn(3, 2, 48, 32)
    expected = F.scaled_dot_product_attention(queries, keys, values)
    torch.testing.assert_close(wide_attention(queries, keys, values, max_scores), expected)


def test_pieces_have_at_most_so_many_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    softmax = torch.Tensor.softmax
    monkeypatch.setattr(
        torch.Tensor, "softmax", lambda scores, dim: (sizes.append(scores.numel()), softmax(scores, dim))[1]
    )
    wide_attention(*torch.randn(3, 2, 48, 32), max_scores=2 * 48 * 7)
    assert max(sizes) == 2 * 48 * 7 and sum(sizes) == 2 * 48 * 48
