"""Run a network whose weights are in half precision with float32 arithmetic, without a second copy of its weights."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_HALVES = (torch.float16, torch.bfloat16)
_STORED_TYPES = ContextVar("_STORED_TYPES", default=False)


class _FloatArithmetic(TorchFunctionMode):
    """Converts each half-precision operand to float32 when an operation reads it."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _STORED_TYPES.get():
            return function(*args, **(kwargs or {}))
        return function(*_widen(args), **{key: _widen(value) for key, value in (kwargs or {}).items()})


def _widen(value: Any) -> Any:
    """Return a value with float32 in place of half precision: tensors, types, and those in lists."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in _HALVES else value
    if isinstance(value, torch.dtype):
        return torch.float32 if value in _HALVES else value
    return type(value)(map(_widen, value)) if type(value) in (list, tuple) else value


@contextmanager
def float_arithmetic() -> Iterator[None]:
    """Compute in float32, on a GPU without TF32. One operand at a time has a float32 copy."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32
    cudnn.allow_tf32 = matmul.allow_tf32 = False
    try:
        with _FloatArithmetic():
            yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32 = before


@contextmanager
def stored_types() -> Iterator[None]:
    """Keep half precision inside of `float_arithmetic`, to load weights."""
    before = _STORED_TYPES.set(True)
    try:
        yield
    finally:
        _STORED_TYPES.reset(before)
