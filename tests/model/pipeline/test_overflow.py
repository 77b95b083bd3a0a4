"""The check for NaN, infinity and too large values, which one reduction on the device makes."""

import pytest
import torch

from model.pipeline.overflow import is_finite, latents_are_sane

LARGEST = {torch.float16: 65504.0, torch.bfloat16: 3.3e38, torch.float32: 3.4e38}


@pytest.mark.parametrize("dtype", LARGEST)
def test_every_value_counts(dtype: torch.dtype) -> None:
    finite = torch.zeros(2, 3, dtype=dtype)
    assert is_finite(finite, torch.ones(4)).tolist() == [True], "dtypes may differ"
    for value, expected in ((LARGEST[dtype], True), (torch.inf, False), (torch.nan, False)):
        for signed in (value, -value):
            changed = finite.clone()
            changed[1, 2] = signed
            assert is_finite(finite, changed).tolist() == [expected], signed


def test_latents_have_a_limit_of_their_own() -> None:
    assert [bool(latents_are_sane(torch.tensor([0.0, value]))) for value in (30.0, -101.0, torch.nan)] == [
        True,
        False,
        False,
    ]
