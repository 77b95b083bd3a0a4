"""Shapes of stored weights."""

import pytest
import torch

from model.weights.layout import from_stored, stored_shape, to_stored


@pytest.mark.parametrize("layout", ["plain", "channels_last"])
@pytest.mark.parametrize("shape", [(7,), (5, 3), (6, 4, 3, 2), (6, 4, 1, 1)])
def test_stored_shape_is_the_shape_of_a_written_tensor(shape: tuple[int, ...], layout: str) -> None:
    written = to_stored(torch.zeros(shape), layout)
    assert stored_shape(shape, layout) == tuple(written.shape)
    assert tuple(from_stored(written, layout).shape) == shape
