"""safetensors blobs -> tensors on the device, one copy of each weight however many engines or components name it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from model.errors import CorruptBlob
from model.store import Store
from model.store.manifest import WeightsRecord


class WeightsCache:
    """Holds what was loaded, by the digests of its blobs: equal weights are mapped once."""

    def __init__(self, store: Store, device: torch.device) -> None:
        self._store = store
        self._device = device
        self._loaded: dict[tuple[str, ...], dict[str, torch.Tensor]] = {}

    def load(self, record: WeightsRecord) -> dict[str, torch.Tensor]:
        """Tensors by name. On the CPU they are views of the mapped, verified files. Raises CorruptBlob."""
        if record.identity not in self._loaded:
            # Hashing releases the interpreter lock, so blobs are verified side by side.
            with ThreadPoolExecutor(max_workers=8) as pool:
                paths = list(pool.map(lambda blob: self._store.get(blob.sha256, blob.bytes), record.blobs))
            tensors: dict[str, torch.Tensor] = {}
            for path in paths:
                tensors.update(_read(path, self._device))
            self._loaded[record.identity] = tensors
        return self._loaded[record.identity]

    @property
    def bytes(self) -> int:
        """Bytes of all tensors held."""
        return sum(t.nbytes for tensors in self._loaded.values() for t in tensors.values())


def _read(path: Path, device: torch.device) -> dict[str, torch.Tensor]:
    try:
        return load_file(path, device=str(device))
    except SafetensorError as error:
        raise CorruptBlob(
            f"Blob {path.name[:12]} is no safetensors file ({error}): publish the release again."
        ) from error
