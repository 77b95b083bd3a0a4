"""Sample how busy GPUs are, and how much of their memory is in use, while other processes use them."""

import re
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any, Self

_INTERVAL_MS = 250
_SAMPLE = re.compile(rb"(\d+), (\d+)\n")


def gpu_ids(count: int | None = None) -> list[str]:
    """Return nvidia-smi's names of torch's first `count` GPUs, by default of all. Empty on a CPU."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = torch.cuda.device_count()
    return [f"GPU-{torch.cuda.get_device_properties(gpu).uuid}" for gpu in range(min(count or found, found))]


class GpuUse:
    """Samples GPUs with nvidia-smi while the `with` block runs. Lines that are not samples are left out.

    A GPU's utilization is the share of the time since the driver's last sample in which a kernel ran.
    """

    def __init__(self, ids: Sequence[str]) -> None:
        """`ids`: from `gpu_ids`. Empty: nothing is sampled."""
        self._ids = ids
        self._process: subprocess.Popen[bytes] | None = None
        self.entries: dict[str, Any] = {}
        """After the block: `gpus`, `gpu_idle_percent` (the mean) and `memory_gib` (the most of a GPU). Or empty."""

    def __enter__(self) -> Self:
        if self._ids and (program := shutil.which("nvidia-smi")):
            self._output = tempfile.TemporaryFile()
            query = ["--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits"]
            command = [program, f"--id={','.join(self._ids)}", *query, f"--loop-ms={_INTERVAL_MS}"]
            self._process = subprocess.Popen(command, stdout=self._output, stderr=subprocess.DEVNULL)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        self._process.terminate()
        self._process.wait()
        with self._output:
            self._output.seek(0)
            samples = [(int(busy), int(mib)) for busy, mib in _SAMPLE.findall(self._output.read())]
        if samples:
            self.entries = {
                "gpus": len(self._ids),
                "gpu_idle_percent": round(100 - statistics.mean(busy for busy, _ in samples), 2),
                "memory_gib": round(max(mib for _, mib in samples) / 1024, 2),
            }
