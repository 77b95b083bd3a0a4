"""How busy this machine's GPUs are, and how much of their memory is in use, while other processes use them."""

import shutil
import statistics
import subprocess
import tempfile
from typing import Any, Self

_INTERVAL_MS = 250
_QUERY = "--query-gpu=utilization.gpu,memory.used"


class GpuUse:
    """Samples all GPUs with nvidia-smi while the `with` block runs. Without nvidia-smi nothing is sampled.

    A GPU's utilization is the share of the time, since the driver's last sample, in which a kernel ran.
    """

    def __init__(self) -> None:
        self.entries: dict[str, Any] = {}
        """After the block: `gpu_idle_percent`, the mean of all samples, and `memory_gib`, the most of one GPU."""

    def __enter__(self) -> Self:
        self._process: subprocess.Popen[bytes] | None = None
        if program := shutil.which("nvidia-smi"):
            self._output = tempfile.TemporaryFile()
            command = [program, _QUERY, "--format=csv,noheader,nounits", f"--loop-ms={_INTERVAL_MS}"]
            self._process = subprocess.Popen(command, stdout=self._output, stderr=subprocess.DEVNULL)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        self._process.terminate()
        self._process.wait()
        with self._output:
            self._output.seek(0)
            lines = [line.split(b",") for line in self._output.read().splitlines(keepends=True) if line.endswith(b"\n")]
        samples = [(float(busy), float(mib)) for busy, mib in lines]
        if samples:
            self.entries = {
                "gpu_idle_percent": round(100 - statistics.mean(busy for busy, _ in samples), 2),
                "memory_gib": round(max(mib for _, mib in samples) / 1024, 2),
            }
