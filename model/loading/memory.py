"""Estimate the memory of a selection before anything is loaded."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from model.denoising.buffers import COND_BY_SLOT, buffer_shapes
from model.errors import OutOfDeviceMemory
from model.loading.select import Selection
from model.pipeline.components import find_component, loop_unets, step_components
from model.pipeline.spec import CONTROLNET, control_inputs_by_step, controlled_unet, controlnets_of, ip_unet
from model.store.manifest import EngineRecord, Signature


def check_memory(device: torch.device, selection: Selection, free: int | None = None, ranks: int = 1) -> None:
    """Raise OutOfDeviceMemory if the weights, and on a GPU the loops and TensorRT, do not fit into free memory.

    Without this check, a server on a CPU would be killed while it loads. The warm-up allocates the further memory of
    steps and decoding. `free`: the bytes of free memory; None: those that the device reports. `ranks`: those that
    divide the batches of the loops.
    """
    needed = sum(blob.bytes for blob in selection.weight_blobs())
    if device.type != "cuda":
        free = free_host_memory() if free is None else free
        if free is not None and needed > free:
            raise OutOfDeviceMemory(
                f"The weights take {needed / 2**30:.1f} GiB, and this machine has {free / 2**30:.1f} GiB free.",
                "Use a machine with more memory, or raise the container's limit.",
            )
        return
    engines = selection.engines if selection.fp16_steps is not None else _of_first_precision(selection.engines)
    needed += tensorrt_bytes(selection) + loop_bytes(engines, ranks)
    free = torch.cuda.mem_get_info(device)[0] if free is None else free
    if needed > free:
        raise OutOfDeviceMemory(
            f"Weights and loops take {needed / 2**30:.1f} GiB, and this GPU has {free / 2**30:.1f} GiB free."
        )


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

    `ranks`: those that divide the batches. Each has buffers for all entries.
    """
    total = 0
    for spec in loop_unets():
        of_unet = [engine for engine in engines.get(spec.name, ()) if engine.component == spec.name]
        by_precision = _by_precision(of_unet)
        for records in by_precision:
            total += _loop_bytes(spec.name, records, engines, ranks, keeps_conditioning=len(by_precision) > 1)
    return total


def _by_precision(records: Sequence[EngineRecord]) -> list[list[EngineRecord]]:
    """Divide engines of one component by their precision. Each has loops of its own."""
    return [[e for e in records if e.precision == precision] for precision in {e.precision for e in records}]


def _loop_bytes(
    unet: str,
    records: Sequence[EngineRecord],
    engines: Mapping[str, Sequence[EngineRecord]],
    ranks: int,
    keeps_conditioning: bool,
) -> int:
    """Return the bytes of the buffers of one UNet's loops, one for each size.

    records: its engines. keeps_conditioning: images keep theirs for another loop (`model.denoising.mixed_loop`).
    """
    total = 0
    sizes = {(e.bucket.height.max, e.bucket.width.max) for e in records if e.bucket.height and e.bucket.width}
    for height, width in sizes:
        serving = [e for e in records if e.bucket.holds(e.bucket.batch.min, height, width)]
        if all(e.bucket.batch.min == e.bucket.batch.max for e in serving):
            batches = [ranks * e.bucket.batch.max for e in serving]
            networks, by_step = step_components(unet, engines)
            signatures = [engines[network.name][0].signature for network in networks]
            controlnets = {}
            if _signature_at(engines, controlled_unet(unet), height, width):
                found = {
                    name: _signature_at(engines, f"{CONTROLNET}.{name}", height, width)
                    for name in controlnets_of(engines)
                }
                controlnets = {name: signature for name, signature in found.items() if signature}
                by_step += control_inputs_by_step(controlnets)
            image_prompted = _signature_at(engines, ip_unet(unet), height, width)
            buffers = buffer_shapes(signatures, by_step, height, width, batches, controlnets, image_prompted)
            total += sum(buffer.bytes for buffer in buffers.values())
            if keeps_conditioning:
                total += sum(buffer.bytes for name, buffer in buffers.items() if name.startswith(COND_BY_SLOT))
    return total


def _signature_at(
    engines: Mapping[str, Sequence[EngineRecord]], name: str, height: int, width: int
) -> Signature | None:
    """Return the signature of a component's engines at a size in pixels, None if it has none there."""
    records = engines.get(name, ())
    return next((e.signature for e in records if e.bucket.holds(e.bucket.batch.min, height, width)), None)


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
                stream = find_component(name)[0].stream
                workspaces[stream] = max(workspaces.get(stream, 0), engine.tensorrt.workspace_bytes or 0)
    return sum(copies.values()) + sum(workspaces.values())
