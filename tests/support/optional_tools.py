"""Tools that tests need and that a machine may lack."""

import os
from typing import NoReturn

import pytest


def skip_without(tool: str, reason: str) -> NoReturn:
    """Skip the test, or fail it if PREHEAT_REQUIRE_`tool` is set. `reason`: what is missing, and how to install it."""
    if os.environ.get(f"PREHEAT_REQUIRE_{tool}"):
        pytest.fail(reason)
    pytest.skip(reason)
