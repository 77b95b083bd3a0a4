"""A network's tensors -> ordered safetensors blobs in the store."""

from collections.abc import Iterator

import torch
from safetensors.torch import save

from engine_builder.networks.network import Network
from model.errors import PreheatError
from model.store.manifest import BLOB_LIMIT, Blob, WeightsRecord
from model.store.store import Store
from model.weights.layout import to_stored

_HEADER_ALLOWANCE = 2**20  # bytes left for a blob's safetensors header
_LIMIT = BLOB_LIMIT - _HEADER_ALLOWANCE


def write_weights(network: Network, store: Store, limit: int = _LIMIT) -> WeightsRecord:
    """Keep all of a network's tensors, cut into blobs of `limit` bytes of them; equal tensors give equal digests."""
    blobs = []
    for tensors in cut(network.tensors(), limit):
        data = save({name: to_stored(tensor, network.layout).cpu() for name, tensor in tensors.items()})
        blobs.append(Blob(sha256=store.put_bytes(data), bytes=len(data)))
    return WeightsRecord(
        component=network.component, precision=network.precision, layout=network.layout, blobs=tuple(blobs)
    )


def cut(tensors: dict[str, torch.Tensor], limit: int = _LIMIT) -> Iterator[dict[str, torch.Tensor]]:
    """Groups of tensors, in order of their names, of at most `limit` bytes each. A larger single tensor is refused."""
    group: dict[str, torch.Tensor] = {}
    size = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        if tensor.nbytes > limit:
            raise PreheatError(f"{name} alone has {tensor.nbytes} bytes; a weight blob holds at most {limit}.")
        if group and size + tensor.nbytes > limit:
            yield group
            group, size = {}, 0
        group[name] = tensor
        size += tensor.nbytes
    if group:
        yield group
