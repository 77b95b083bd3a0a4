"""Write a network's tensors to the store as ordered safetensors blobs."""

from collections.abc import Iterator

import torch
from safetensors.torch import save

from engine_builder.backends.built import put_blob
from engine_builder.networks.network import Network
from engine_builder.stores.store import WritableStore
from model.errors import PreheatError
from model.store.manifest import BLOB_LIMIT, WeightsRecord
from model.weights.layout import to_stored

_HEADER_BYTES = 2**20  # reserved in a blob for its safetensors header
_BLOB_BYTES = BLOB_LIMIT - _HEADER_BYTES  # of all tensors in a blob


def write_weights(network: Network, store: WritableStore, limit: int = _BLOB_BYTES) -> WeightsRecord:
    """Store all tensors of a network, at most `limit` bytes of them in one blob. Equal tensors give equal digests."""
    blobs = []
    for tensors in group_tensors(network.tensors(), limit):
        data = save({name: to_stored(tensor, network.layout).cpu() for name, tensor in tensors.items()})
        blobs.append(put_blob(store, data))
    return WeightsRecord(
        component=network.component, precision=network.precision, layout=network.layout, blobs=tuple(blobs)
    )


def group_tensors(tensors: dict[str, torch.Tensor], limit: int = _BLOB_BYTES) -> Iterator[dict[str, torch.Tensor]]:
    """Yield groups of at most `limit` bytes, in the order of names. Raises PreheatError if one tensor is larger."""
    group: dict[str, torch.Tensor] = {}
    size = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        if tensor.nbytes > limit:
            raise PreheatError(f"{name} has {tensor.nbytes} bytes; a blob of weights holds at most {limit}.")
        if group and size + tensor.nbytes > limit:
            yield group
            group, size = {}, 0
        group[name] = tensor
        size += tensor.nbytes
    if group:
        yield group
