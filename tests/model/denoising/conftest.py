"""The model of the loops' tests."""

import pytest

from model.pipeline.loaded_model import LoadedModel
from tests.support.linear_networks import linear_model


@pytest.fixture
def model() -> LoadedModel:
    return linear_model()
