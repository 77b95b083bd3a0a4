"""Estimate the GPU memory of a selection before anything is loaded."""

from collections.abc import Mapping, Sequence

import torch

from model.denoising.buffers import buffer_shapes
from model.engines import components
from model.engines.tensorrt.plans import stream_of
from model.errors import OutOfDeviceMemory
from model.loading.select import Selection
from model.store.manifest import EngineRecord


def check_memory(device: torch.device, selection: Selection) -> None:
    """Refuse what cannot fit: weights and loop buffers against the GPU's free memory. Raises OutOfDeviceMemory.

    The warm-up finds out what steps and decoding take in addition.
    """
    if device.type != "cuda":
        return
    needed = sum(blob.bytes for blob in selection.weight_blobs())
    needed += tensorrt_bytes(selection) + loop_bytes(selection.engines)
    free = torch.cuda.mem_get_info(device)[0]
    if needed > free:
        raise OutOfDeviceMemory(
            f"Weights and loops take {needed / 2**30:.1f} GiB, and this GPU has {free / 2**30:.1f} GiB free."
        )


def loop_bytes(engines: Mapping[str, Sequence[EngineRecord]]) -> int:
    """Device memory of the buffers of all denoising loops that these engines, by component, will have on a GPU."""
    total = 0
    for name in (components.UNET, components.REFINER_UNET):
        records = engines.get(name, ())
        sizes = {(e.bucket.height.max, e.bucket.width.max) for e in records if e.bucket.height and e.bucket.width}
        for height, width in sizes:
            serving = [e for e in records if e.bucket.holds(e.bucket.batch.min, height, width)]
            if all(e.bucket.batch.min == e.bucket.batch.max for e in serving):
                batches = [e.bucket.batch.max for e in serving]
                buffers = buffer_shapes(serving[0].signature, height, width, batches)
                total += sum(buffer.bytes for buffer in buffers.values())
    return total


def tensorrt_bytes(selection: Selection) -> int:
    """Device memory of TensorRT engines in addition to the weights that they are refit from: each plan's own copy of
    the weights, and one workspace for each stream, as large as its largest engine needs."""
    copies, workspaces = 0, dict[str, int]()
    for name, engines in selection.engines.items():
        plans = [engine.tensorrt for engine in engines if engine.tensorrt]
        if plans:
            copies += sum(blob.bytes for blob in selection.weights[name][0].blobs)
            stream = stream_of(name)
            workspaces[stream] = max(workspaces.get(stream, 0), *(plan.workspace_bytes for plan in plans))
    return copies + sum(workspaces.values())
