"""TensorRT-RTX for tests that build real plans. It needs no GPU for that.

Without a GPU nothing may deserialize a plan: the library would end the process.
"""

import os
from types import ModuleType

import pytest

from model.engines.tensorrt.libraries import TENSORRT_RTX, import_library, installed_version

INSTALL = ".venv/bin/pip install --editable '.[tensorrt-rtx]'"


def require_tensorrt_rtx() -> ModuleType:
    """Return the library's module. Without it the test is skipped, or fails if PREHEAT_REQUIRE_TENSORRT_RTX is set."""
    if installed_version(TENSORRT_RTX) is None:
        reason = f"TensorRT-RTX is not installed: {INSTALL}"
        if os.environ.get("PREHEAT_REQUIRE_TENSORRT_RTX"):
            pytest.fail(reason)
        pytest.skip(reason)
    return import_library(TENSORRT_RTX)
