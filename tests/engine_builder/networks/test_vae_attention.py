"""The attention of the VAE's middle block, in pieces."""

import pytest
import torch
import torch.nn.functional as F

from engine_builder.backends.aot_inductor import compile
from engine_builder.backends.aot_inductor.compile import engine_key, static_bucket
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.networks.network import load_network
from engine_builder.networks.vae import wide_attention
from model.loading.target import Target
from model.store.precision import FP32
from tests.support.repository import MODEL_FOLDER


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


@pytest.mark.parametrize(("side", "in_pieces"), [(1024, False), (2048, True)])
def test_keys_of_large_images_state_the_pieces(side: int, in_pieces: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of an earlier build, with all scores in memory, is not used again."""
    decoder = load_network(Checkpoint(MODEL_FOLDER), "vae_decoder", FP32)
    gpu, bucket = Target("cuda", "h100", "sm90", "torch2.11-cu130"), static_bucket(1, side, side)
    key = engine_key(decoder, gpu, bucket)
    monkeypatch.setattr(compile, "splits_scores", lambda *_: False)
    assert (key != engine_key(decoder, gpu, bucket)) == in_pieces
