"""The switch with which quantized layers compute with inputs that are not rounded to 8 bits.

In a deep network of quantized layers the rounding errors of two correct implementations are independent: a difference
in the last bit rounds some input to the next number, and the layers after it amplify that. So an engine's distance to
eager PyTorch is as large as the rounding error itself. What can be compared is the distance of each of them to the
network without that error.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_ROUNDED = ContextVar("_ROUNDED", default=True)


@contextmanager
def unrounded_inputs() -> Iterator[None]:
    """Compute quantized layers with inputs as they are, and with the numbers that their weights stand for.

    For the plain form of networks (`kernel_form.plain_operations`), in eager PyTorch.
    """
    before = _ROUNDED.set(False)
    try:
        yield
    finally:
        _ROUNDED.reset(before)


def rounds_inputs() -> bool:
    """False inside of `unrounded_inputs`."""
    return _ROUNDED.get()
