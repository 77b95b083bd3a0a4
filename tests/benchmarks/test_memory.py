"""The growth of a process's memory."""

import os
import subprocess
import sys

# A process of its own, because in one that ran other tests, threads may free memory at any time.
MEASURE = """
import gc

import numpy as np

from benchmarks.memory import MemoryGrowth

MIB = 2**20
kept = np.ones(200 * MIB, np.uint8)
garbage = [np.ones(200 * MIB, np.uint8)]
garbage.append(garbage)
del garbage
growth = MemoryGrowth()
before = growth.peak_bytes()
gc.collect()
freed = np.ones(100 * MIB, np.uint8)
del freed
after = growth.peak_bytes()
assert kept.all()
print(before // MIB, after // MIB)
"""


def test_measures_the_peak_of_new_memory_only() -> None:
    result = subprocess.run(
        [sys.executable, "-c", MEASURE],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    before, after = map(int, result.stdout.split())
    assert before < 50, "what the process had before does not count"
    assert 90 < after < 150, "neither does what was garbage before"
