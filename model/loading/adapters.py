"""The adapters that a deployment offers: their records are checked before weights are read, their factors later."""

from collections.abc import Mapping, Sequence

import torch

from model.adapters.layers import COMPONENTS, find_layers
from model.adapters.library import AdapterLibrary, check_fit
from model.adapters.merge import AdaptableWeights, Weights, copied_bytes
from model.adapters.packing import make_packing, rank_of
from model.deployment import Deployment, ServedAdapters
from model.errors import AdapterError, OutOfDeviceMemory
from model.loading.memory import free_host_memory
from model.loading.select import Selection
from model.pipeline.spec import UNET
from model.store.adapter_record import AdapterRecord
from model.store.precision import INT8
from model.store.signature import check_signature
from model.store.store import Store

_RESERVED_BYTES = 12 * 2**30  # of a GPU's memory, for the steps' activations and graphs, and for decoding


def read_adapters(store: Store, deployment: Deployment, selection: Selection) -> list[AdapterRecord]:
    """Read the records of a deployment's adapters that have no patterns, and check their signatures.

    Weights in 8 bits are quantized again after a merge, from those that they were quantized from. Most changes are
    smaller than the rounding of 8 bits, and would be lost if they were added to rounded weights. Raises
    AdapterNotFound, UntrustedRelease, StoreError, or AdapterError, also if the release lacks unquantized weights.
    """
    names = deployment.adapters.names
    if names and any(engine.tensorrt for engines in selection.engines.values() for engine in engines):
        raise AdapterError(
            "Plans of TensorRT have their own copies of the weights, so adapters cannot be merged.",
            "Set `runtime: aot_inductor`, or remove `loras` from the config.",
        )
    if names and selection.engines[UNET][0].precision == INT8:
        raise AdapterError(
            "Adapters are not merged into weights in int8.",
            "Set another `precision`, or remove `loras` from the config.",
        )
    records = [store.read_adapter(name) for name in deployment.adapters.fixed]
    for record in records:
        check_signature(record, deployment.public_keys)
    if names and (served := selection.weights[UNET][0].precision).is_quantized and selection.unquantized is None:
        raise AdapterError(
            f"Release {selection.manifest.name} has no {served.unquantized} weights of its UNet, which adapters need "
            f"with precision {served}.",
            f"Build it also in {served.unquantized} (`preheat build`) and publish a new release, or remove `loras` "
            "from the config.",
        )
    return records


def open_library(
    store: Store,
    records: Sequence[AdapterRecord],
    weights: Weights,
    originals: Mapping[str, torch.Tensor] | None,
    release: str,
    device: torch.device,
    adapters: ServedAdapters,
    lora_down: int = 0,
) -> AdapterLibrary:
    """Copy the weights that the adapters change, and return the library.

    With patterns, all weights that an adapter may change are copied.

    `originals`: the UNet's weights in 16 bits or more, if the served ones have 8. The copies stay on the GPU if its
    memory suffices, otherwise in host memory. `lora_down`: elements of this input of the UNet that takes adapters as
    inputs; 0: there is none.

    Raises AdapterError for an adapter that does not fit the release, and OutOfDeviceMemory if the copies fit nowhere.
    """
    shapes = {
        name: {tensor: tuple(t.shape) for tensor, t in weights[name][0].items()}
        for name in COMPONENTS
        if name in weights
    }
    layers = find_layers(shapes)
    changed = {layer.name: layer for record in records for layer in check_fit(record, layers, f"release {release}")}
    if adapters.patterns:
        changed = layers
    needed = copied_bytes(weights, changed.values())
    is_gpu = device.type == "cuda"
    on_host = is_gpu and torch.cuda.mem_get_info(device)[0] < needed + _RESERVED_BYTES
    if (on_host or not is_gpu) and (free := free_host_memory()) is not None and needed > free:
        raise OutOfDeviceMemory(
            f"The copies of the weights that adapters change take {needed / 2**30:.1f} GiB, and this machine has "
            f"{free / 2**30:.1f} GiB free.",
            "Use a machine with more memory, or remove `loras` from the config.",
        )
    adaptable = AdaptableWeights(weights, changed.values(), {UNET: originals} if originals else None, on_host)
    packing = make_packing(layers, rank_of(layers, lora_down)) if lora_down else None
    return AdapterLibrary(store, records, adaptable, device, adapters.cache_bytes, layers, packing)
