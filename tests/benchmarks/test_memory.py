"""The growth of a process's memory."""

import numpy as np
import pytest
import torch

from benchmarks.memory import MemoryGrowth

MIB = 2**20


@pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="measures the memory of the host, and this machine uses its GPU: set CUDA_VISIBLE_DEVICES=",
)
def test_measures_the_peak_of_new_memory_only() -> None:
    kept = np.ones(200 * MIB, np.uint8)
    growth = MemoryGrowth()
    before = growth.peak_bytes()
    assert before is not None and before < 50 * MIB, "what the process had before does not count"
    freed = np.ones(100 * MIB, np.uint8)
    del freed
    after = growth.peak_bytes()
    assert after is not None and 90 * MIB < after < 150 * MIB and kept.any()
