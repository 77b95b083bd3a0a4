"""TensorRT-RTX for tests that build real plans. It needs no GPU for that.

Without a GPU nothing may deserialize a plan: the library would end the process.
"""

from types import ModuleType

from model.engines.tensorrt.libraries import TENSORRT_RTX, import_library, installed_version
from tests.support.optional_tools import skip_without

INSTALL = ".venv/bin/pip install --editable '.[tensorrt-rtx]'"


def require_tensorrt_rtx() -> ModuleType:
    """Return the library's module. Without it the test is skipped, or fails if PREHEAT_REQUIRE_TENSORRT_RTX is set."""
    if installed_version(TENSORRT_RTX) is None:
        skip_without("TENSORRT_RTX", f"TensorRT-RTX is not installed: {INSTALL}")
    return import_library(TENSORRT_RTX)


def capabilities_of(plan: bytes | memoryview) -> list[str]:
    """Return the compute capabilities in the header of a plan, such as ["sm80", "sm86"].

    The header has a bit for each supported capability. NVIDIA documents neither. They were found by comparing plans of
    1.7.1.
    """
    assert bytes(plan[:4]) == bytes(plan[28:32]) == b"vtrt"
    bits = int.from_bytes(plan[32:36], "little")
    assert bits < 1 << len(TENSORRT_RTX.capabilities)
    return [name for number, name in enumerate(TENSORRT_RTX.capabilities) if bits >> number & 1]
