"""Estimate the memory of a selection before anything is loaded."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from model.denoising.buffers import buffer_shapes
from model.errors import OutOfDeviceMemory
from model.loading.select import Selection
from model.pipeline.spec import SDXL, step_components, unets
from model.store.manifest import EngineRecord


def check_memory(device: torch.device, selection: Selection) -> None:
    """Refuse what cannot fit into free memory: weights, on a GPU also loop buffers. Raises OutOfDeviceMemory.

    Without this, a server on a CPU would be killed while it loads. The warm-up finds out what steps and decoding take
    in addition.
    """
    needed = sum(blob.bytes for blob in selection.weight_blobs())
    if device.type != "cuda":
        free = free_host_memory()
        if free is not None and needed > free:
            raise OutOfDeviceMemory(
                f"The weights take {needed / 2**30:.1f} GiB, and this machine has {free / 2**30:.1f} GiB free.",
                "Use a machine with more memory, or raise the container's limit.",
            )
        return
    needed += tensorrt_bytes(selection) + loop_bytes(selection.engines)
    free = torch.cuda.mem_get_info(device)[0]
    if needed > free:
        raise OutOfDeviceMemory(
            f"Weights and loops take {needed / 2**30:.1f} GiB, and this GPU has {free / 2**30:.1f} GiB free."
        )


def free_host_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes that this process may still allocate, in the machine and in its container.

    None where the system does not say. Page cache counts as free, because the kernel gives it up. Sources: proc(5), and
    the kernel's documentation of cgroup v2.
    """
    found = []
    try:
        entries = _numbers(meminfo)
        found.append((entries["MemAvailable:"] + entries.get("SwapFree:", 0)) * 2**10)
    except (OSError, KeyError, ValueError):
        pass
    try:
        used = int((cgroup / "memory.current").read_text())
        stat = _numbers(cgroup / "memory.stat")
        reclaimable = stat["active_file"] + stat["inactive_file"]
        found.append(int((cgroup / "memory.max").read_text()) - used + reclaimable)  # ValueError for "max"
    except (OSError, KeyError, ValueError):
        pass
    return min(found, default=None)


def _numbers(path: Path) -> dict[str, int]:
    """Return name -> number of a file with a name and a number on each line."""
    return {words[0]: int(words[1]) for line in path.read_text().splitlines() if len(words := line.split()) > 1}


def loop_bytes(engines: Mapping[str, Sequence[EngineRecord]]) -> int:
    """Device memory of the buffers of all denoising loops that these engines, by component, will have on a GPU."""
    total = 0
    for spec in unets():
        records = [engine for engine in engines.get(spec.name, ()) if engine.component == spec.name]
        sizes = {(e.bucket.height.max, e.bucket.width.max) for e in records if e.bucket.height and e.bucket.width}
        for height, width in sizes:
            serving = [e for e in records if e.bucket.holds(e.bucket.batch.min, height, width)]
            if all(e.bucket.batch.min == e.bucket.batch.max for e in serving):
                batches = [e.bucket.batch.max for e in serving]
                networks, by_step = step_components(spec.name, engines)
                signatures = [engines[network.name][0].signature for network in networks]
                buffers = buffer_shapes(signatures, by_step, height, width, batches)
                total += sum(buffer.bytes for buffer in buffers.values())
    return total


def tensorrt_bytes(selection: Selection) -> int:
    """Device memory of TensorRT engines in addition to the weights that they are refit from: each plan's own copy of
    the weights, and one workspace for each stream, as large as its largest engine needs."""
    copies: dict[str, int] = {}
    workspaces: dict[str, int] = {}
    for name, engines in selection.engines.items():
        for engine, weights in zip(engines, selection.weights[name], strict=True):
            if engine.tensorrt:
                copies[engine.component] = sum(blob.bytes for blob in weights.blobs)  # a variant's plan has its own
                stream = SDXL[name].stream
                workspaces[stream] = max(workspaces.get(stream, 0), engine.tensorrt.workspace_bytes)
    return sum(copies.values()) + sum(workspaces.values())
