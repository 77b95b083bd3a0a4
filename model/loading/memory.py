"""Estimate the memory of a selection before anything is loaded."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch

from model.denoising.buffers import buffer_shapes
from model.denoising.ranks import Ranks
from model.engines.engine import Engine, EngineSet
from model.errors import OutOfDeviceMemory
from model.loading.select import Selection
from model.pipeline.components import find_component, unets
from model.pipeline.denoisers import StepEngines, engine_sets, find_denoiser
from model.store.manifest import EngineRecord


def check_memory(device: torch.device, selection: Selection, free: int | None = None, ranks: int = 1) -> None:
    """Raise OutOfDeviceMemory if a selection does not fit into free memory; see `needed_bytes`.

    Without this check, a server on a CPU would be killed while it loads. `free`: the bytes of free memory; None: the
    bytes that the device reports. `ranks`: the number of ranks that divide the batches of the loops.
    """
    needed = needed_bytes(device, selection, ranks)
    free = free_memory(device) if free is None else free
    if free is None or needed <= free:
        return
    if device.type != "cuda":
        raise OutOfDeviceMemory(
            f"The weights take {needed / 2**30:.1f} GiB, and this machine has {free / 2**30:.1f} GiB free.",
            "Use a machine with more memory, or raise the container's limit.",
        )
    raise OutOfDeviceMemory(
        f"Weights and loops take {needed / 2**30:.1f} GiB, and this GPU has {free / 2**30:.1f} GiB free."
    )


def needed_bytes(device: torch.device, selection: Selection, ranks: int = 1) -> int:
    """Return the bytes of the weights, and on a GPU of the loops and TensorRT.

    The warm-up allocates the further memory of steps and decoding.
    """
    needed = sum(blob.bytes for blob in selection.weight_blobs())
    if device.type != "cuda":
        return needed
    engines = selection.engines if selection.fp16_steps is not None else _of_first_precision(selection.engines)
    return needed + tensorrt_bytes(selection) + loop_bytes(engines, ranks)


def common_weights(selections: Sequence[Selection], has_adapters: bool) -> frozenset[str]:
    """Return the digests of the weights that several releases share on the device.

    The set is empty with adapters: a merge into the weights of one release must not change another one.
    """
    if len(selections) == 1 or has_adapters:
        return frozenset()
    return frozenset.intersection(*(frozenset(blob.sha256 for blob in one.weight_blobs()) for one in selections))


def further_bytes(device: torch.device, selection: Selection, common: Collection[str]) -> int:
    """Return the bytes of a release that is loaded after the first one, whose weights `common` it shares."""
    shared = sum(blob.bytes for blob in selection.weight_blobs() if blob.sha256 in common)
    return needed_bytes(device, selection) - shared


def free_memory(device: torch.device) -> int | None:
    """Return the bytes of free memory of the device. None if the system does not report it."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_memory()


def _of_first_precision(engines: Mapping[str, Sequence[EngineRecord]]) -> dict[str, list[EngineRecord]]:
    """Return the engines in each component's first precision. Images that are compared with fp16 are in no loop."""
    return {name: [e for e in records if e.precision == records[0].precision] for name, records in engines.items()}


def free_host_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes that this process may still allocate, in the machine and in its container.

    None if the system does not report it. Page cache counts as free, because the kernel reclaims it. Sources: proc(5),
    and the kernel's documentation of cgroup v2.
    """
    free_bytes = []
    try:
        entries = _read_numbers(meminfo)
        free_bytes.append((entries["MemAvailable:"] + entries.get("SwapFree:", 0)) * 2**10)
    except (OSError, KeyError, ValueError):
        pass
    try:
        used = int((cgroup / "memory.current").read_text())
        stat = _read_numbers(cgroup / "memory.stat")
        reclaimable = stat["active_file"] + stat["inactive_file"]
        free_bytes.append(int((cgroup / "memory.max").read_text()) - used + reclaimable)  # ValueError for "max"
    except (OSError, KeyError, ValueError):
        pass
    return min(free_bytes, default=None)


def _read_numbers(path: Path) -> dict[str, int]:
    """Read a file that has a name and a number on each line."""
    return {words[0]: int(words[1]) for line in path.read_text().splitlines() if len(words := line.split()) > 1}


def loop_bytes(engines: Mapping[str, Sequence[EngineRecord]], ranks: int = 1) -> int:
    """Return the device memory of the buffers of all denoising loops on a GPU. `engines`: by component.

    Engines in a component's second precision run steps in fp16. `ranks`: the number of ranks that divide
    the batches. Each rank has buffers for all entries.
    """
    served, exact = (_engine_sets(engines, is_first) for is_first in (True, False))
    quantized = {e.component for records in engines.values() for e in records[:1] if e.precision.is_quantized}
    of_ranks = Ranks()
    of_ranks.size = ranks
    total = 0
    for unet in unets():
        if unet.name not in served:
            continue
        buckets = [engine.bucket for engine in served[unet.name].engines]
        for height, width in {(one.height.max, one.width.max) for one in buckets if one.height and one.width}:
            denoiser = find_denoiser(StepEngines(served, exact, quantized), unet.name, height, width, of_ranks)
            if denoiser.plain.engines.is_static(height, width):
                shapes = [shape for _, shape in denoiser.shapes(height, width)]
                total += sum(buffer.bytes for buffer in buffer_shapes(shapes, height, width).values())
    return total


def _engine_sets(engines: Mapping[str, Sequence[EngineRecord]], is_first: bool) -> dict[str, EngineSet]:
    """Return the engines in the first precision of each component, or the others, as a load groups them."""
    records = [e for one in engines.values() for e in one if (e.precision == one[0].precision) == is_first]
    return engine_sets(cast(list[Engine], records))  # all but their code is known


def tensorrt_bytes(selection: Selection) -> int:
    """Return the device memory of TensorRT engines in addition to the weights that are streamed.

    That is each plan's own copy of the weights, and for each stream one workspace of the largest size in use. An
    unknown size counts as 0.
    """
    copies: dict[str, int] = {}
    workspaces: dict[str, int] = {}
    for name, engines in selection.engines.items():
        for engine, weights in zip(engines, selection.weights[name], strict=True):
            if engine.tensorrt:
                copies[engine.component] = sum(blob.bytes for blob in weights.blobs)  # a variant's plan has its own
                stream = find_component(name).stream
                workspaces[stream] = max(workspaces.get(stream, 0), engine.tensorrt.workspace_bytes or 0)
    return sum(copies.values()) + sum(workspaces.values())
