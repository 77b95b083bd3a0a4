"""Load the GPU's math libraries on a thread, while weights are streamed.

The first matrix product of a process loads cuBLAS, the first convolution and the first attention load cuDNN's
libraries. The first runs of engines would otherwise do this. The thread starts before engines are fetched.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
import torch.nn.functional as F

from model.cold_start import ColdStart

logger = logging.getLogger("preheat")


@contextmanager
def loading_libraries(wanted: bool, cold_start: ColdStart) -> Iterator[None]:
    """Load cuBLAS and cuDNN while the block runs, and wait for them at its end. Records the phase `libraries`.

    `wanted`: false on a CPU, and if no engine uses these libraries; then this does nothing. Errors are left to the
    first engine that runs, which reports them.
    """
    if not wanted:
        yield
        return
    device = torch.device("cuda:0")
    thread = threading.Thread(target=_load, args=[device, cold_start], name="preheat-gpu-libraries", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@torch.inference_mode()
def _load(device: torch.device, cold_start: ColdStart) -> None:
    with cold_start.phase("libraries"):
        for use in (_use_cublas, _use_convolution, _use_attention):
            try:
                with torch.cuda.stream(_stream_of(use, device)):
                    use(device)
            except RuntimeError as error:
                logger.debug("%s: %s", use.__name__, error)


@cache
def _stream_of(use: Callable[[torch.device], None], device: torch.device) -> torch.cuda.Stream:
    """Return the same stream at each load: torch has 32, and one of them captures graphs."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _use_cublas(device: torch.device) -> None:
    """Multiply matrices with and without a bias: cuBLASLt and cuBLAS."""
    matrix = torch.zeros(256, 256, dtype=torch.float16, device=device)
    torch.addmm(matrix[0], matrix, matrix)
    torch.mm(matrix, matrix)


def _use_convolution(device: torch.device) -> None:
    image = torch.zeros(1, 64, 32, 32, dtype=torch.float16, device=device).to(memory_format=torch.channels_last)
    weight = torch.zeros(64, 64, 3, 3, dtype=torch.float16, device=device).to(memory_format=torch.channels_last)
    F.conv2d(image, weight, padding=1)


def _use_attention(device: torch.device) -> None:
    queries = torch.zeros(1, 2, 256, 64, dtype=torch.float16, device=device)
    torch.ops.aten._scaled_dot_product_cudnn_attention(queries, queries, queries, None, False)
