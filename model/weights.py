"""safetensors blobs -> tensors on the device, one copy of each weight however many engines or components name it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from model.errors import CorruptBlob, StoreError
from model.store import Store
from model.store.manifest import WeightsRecord


class WeightsCache:
    """Holds what was loaded, by the digests of its blobs: equal weights are mapped once."""

    def __init__(self, store: Store, device: torch.device) -> None:
        self._store = store
        self._device = device
        self._loaded: dict[tuple[str, ...], dict[str, torch.Tensor]] = {}

    def load(self, record: WeightsRecord) -> dict[str, torch.Tensor]:
        """Tensors by name. On the CPU they are views of the mapped, verified files.

        Raises CorruptBlob or StoreError.
        """
        if record.identity not in self._loaded:
            # Hashing releases the interpreter lock, so blobs are verified side by side.
            with ThreadPoolExecutor(max_workers=8) as pool:
                paths = list(pool.map(lambda blob: self._store.get(blob.sha256, blob.bytes), record.blobs))
            tensors: dict[str, torch.Tensor] = {}
            for path in paths:
                read = _read(path, self._device)
                if twice := tensors.keys() & read.keys():
                    raise CorruptBlob(
                        f"The weights of {record.component} have {min(twice)} in two blobs: build and publish the "
                        "release again (`preheat build`, `preheat publish`)."
                    )
                tensors |= read
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
            f"Blob {path.name[:12]} is no safetensors file ({error}): build and publish the release again "
            "(`preheat build`, `preheat publish`)."
        ) from error
    except OSError as error:
        raise StoreError(f"Blob {path.name[:12]} cannot be mapped: {error.strerror or error}.") from error
