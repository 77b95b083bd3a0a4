"""The switch between the forms of networks with Triton kernels, for GPUs, and with PyTorch's own operations."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_PLAIN = ContextVar("_PLAIN", default=False)


@contextmanager
def plain_operations() -> Iterator[None]:
    """Run PyTorch's own operations in place of the Triton kernels, to validate engines against them."""
    before = _PLAIN.set(True)
    try:
        yield
    finally:
        _PLAIN.reset(before)


def is_plain() -> bool:
    """True inside of `plain_operations`."""
    return _PLAIN.get()


def has_kernels(tensor: Tensor) -> bool:
    """True if the forms for GPUs are used for `tensor`."""
    return tensor.is_cuda and not is_plain()


def has_half_kernels(tensor: Tensor) -> bool:
    """True if the Triton kernels, which compute in half precision only, may be used for `tensor`."""
    return has_kernels(tensor) and tensor.dtype in (torch.float16, torch.bfloat16)
