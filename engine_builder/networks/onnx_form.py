"""The switch between the forms of networks for PyTorch and for ONNX."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_ONNX = ContextVar("_ONNX", default=False)


@contextmanager
def onnx_operations() -> Iterator[None]:
    """Compute in the forms that make small ONNX graphs. The results are the same."""
    before = _ONNX.set(True)
    try:
        yield
    finally:
        _ONNX.reset(before)


def is_for_onnx() -> bool:
    """True inside of `onnx_operations`."""
    return _ONNX.get()
