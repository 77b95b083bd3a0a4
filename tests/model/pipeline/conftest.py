"""What the comparisons of the tiny model share: diffusers with its folder."""

import pytest

from tests.support.reference import Reference
from tests.support.repository import MODEL_FOLDER


@pytest.fixture(scope="package")
def tiny_reference() -> Reference:
    """diffusers' pipelines of data/tiny-sdxl."""
    return Reference(MODEL_FOLDER)
