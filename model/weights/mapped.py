"""Tensors that are views of a blob's bytes in CPU memory, mapped from its file or already in memory."""

import mmap
from pathlib import Path

import torch

from model.errors import StoreError
from model.store.manifest import Blob
from model.weights.safetensors_header import InvalidHeader, invalid_weights, read_header, refuse_empty
from model.weights.stream import Tensors, tensor_view


def map_file(path: Path, blob: Blob) -> Tensors:
    """Map a verified file and return its tensors as views. Raises CorruptBlob or StoreError."""
    refuse_empty(blob)
    try:
        with path.open("rb") as file:
            # A private mapping, so that no tensor can change the file.
            mapped = mmap.mmap(file.fileno(), blob.bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError) as error:
        raise StoreError(
            f"Blob {path.name[:12]} cannot be mapped: {error}.", "Start again. If it persists, check the disk."
        ) from error
    return tensors_in(mapped, blob)


def tensors_in(data: mmap.mmap | bytearray, blob: Blob) -> Tensors:
    """Return the tensors of a blob's verified bytes as views. Raises CorruptBlob."""
    refuse_empty(blob)
    try:
        extents = read_header(memoryview(data), blob.bytes)
    except InvalidHeader as error:
        raise invalid_weights(blob.sha256, error) from error
    flat = torch.frombuffer(data, dtype=torch.uint8)
    return {name: tensor_view(flat[extent.start : extent.end], extent) for name, extent in extents.items()}
