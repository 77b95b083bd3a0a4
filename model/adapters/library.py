"""The adapters that a deployment offers: read from the store in the background, kept on the device, and merged.

The least recently used adapters leave the device when their bytes exceed a limit. They are read again when they are
needed, from the store's cache if it has one. A merge keeps no reference to an adapter.
"""

import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType

import torch

from model.adapters.changes import AdapterChanges, Change
from model.adapters.layers import AdapterSet, Layer, Scale
from model.adapters.merge import AdaptableWeights
from model.adapters.packing import Packing, can_pack
from model.errors import AdapterError, PreheatError, RequestRefused
from model.store.adapter_forms import element_count, stored_shape
from model.store.adapter_record import AdapterRecord
from model.store.store import Store
from model.weights.stream import stream_weights

logger = logging.getLogger("preheat")


class AdapterLibrary:
    """`merge` runs on the thread of all device work. Other threads may call `prepare` and `add`."""

    def __init__(
        self,
        store: Store,
        records: Sequence[AdapterRecord],
        weights: AdaptableWeights | None,
        device: torch.device,
        cache_bytes: int,
        layers: Mapping[str, Layer] = MappingProxyType({}),
        packing: Packing | None = None,
    ) -> None:
        """`records`: the adapters that requests may name. `weights`: None while the model's are not on the device.

        `cache_bytes`: of factors on the device, in float32. `layers`: the model's.

        `packing`: of the UNet that takes adapters as inputs; None: adapters are merged.
        """
        self.layers, self.packing = layers, packing
        self.active: AdapterSet | None = ()
        """The merged adapters. None: a merge has failed, so the weights are invalid."""
        self.on_loaded: Callable[[], None] = lambda: None
        """Called on a thread of its own when an adapter was loaded, or failed to load."""
        self._store, self._device, self._cache_bytes = store, device, cache_bytes
        self._records: dict[str, AdapterRecord] = {}
        self._sizes: dict[str, int] = {}
        self._misfits: dict[str, str] = {}  # why adapters that were added do not fit
        self._add_records(records)
        self.weights = weights
        self._lock = threading.Lock()  # guards the next three
        self._loaded: OrderedDict[str, AdapterChanges] = OrderedDict()  # the least recently used first
        self._loading: dict[str, Future[None]] = {}
        self._failures: dict[str, AdapterError] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="preheat-adapters")

    def for_other_weights(self) -> "AdapterLibrary":
        """Return a library of the same adapters for a model whose weights are not on the device."""
        return AdapterLibrary(
            self._store,
            [*self._records.values()],
            None,
            self._device,
            self._cache_bytes,
            self.layers,
            self.packing,
        )

    def add(self, records: Sequence[AdapterRecord]) -> None:
        """Let requests name further adapters. Any thread may call it."""
        for record in records:
            if record.name not in self._records:
                try:
                    check_fit(record, self.layers, "this model")
                except AdapterError as error:
                    self._misfits[record.name] = error.args[0]
                self._add_records([record])

    def check(self, adapters: AdapterSet) -> None:
        """Raise RequestRefused if one of these adapters does not fit the model."""
        for name, _ in adapters:
            if name in self._misfits:
                raise RequestRefused("loras", self._misfits[name])

    def _add_records(self, records: Iterable[AdapterRecord]) -> None:
        for record in records:
            self._sizes[record.name] = _device_bytes(record)
            self._records[record.name] = record

    def use(self, weights: AdaptableWeights | None) -> None:
        """Change these weights from now on, into which no adapter is merged; None: no weights."""
        self.weights, self.active = weights, ()

    @property
    def on_device(self) -> tuple[str, ...]:
        """The adapters whose factors are on the device. Any thread may read it."""
        with self._lock:
            return tuple(self._loaded)

    def prepare(self, groups: Sequence[Collection[str]]) -> None:
        """Start to load the adapters of `groups` that are not on the device, in order, as far as the limit allows.

        The first group is always loaded. Adapters that are loaded for a group are kept until the next call. One that
        failed is not tried again before `forget_failures`.
        """
        keep: list[str] = []
        for number, names in enumerate(groups):
            more = [name for name in dict.fromkeys(names) if name not in keep]
            if number and sum(self._sizes[name] for name in keep + more) > self._cache_bytes:
                break
            keep += more
        with self._lock:
            self._evict(keep)
            for name in keep:
                if name not in self._loaded and name not in self._loading and name not in self._failures:
                    self._loading[name] = self._pool.submit(self._load, name)

    def failure(self, names: Collection[str]) -> AdapterError | None:
        """Return why one of these adapters could not be loaded, or None."""
        with self._lock:
            return next((self._failures[name] for name in names if name in self._failures), None)

    def forget_failures(self) -> None:
        """Let the next `prepare` try all adapters again."""
        with self._lock:
            self._failures = {}

    def has(self, names: Collection[str]) -> bool:
        """True if these adapters are on the device."""
        with self._lock:
            return all(name in self._loaded for name in names)

    def load(self, names: Collection[str]) -> None:
        """Load adapters, and return when they are on the device. Raises AdapterError."""
        self.forget_failures()
        while not self.has(names):
            self.prepare([names])
            for loading in list(self._loading.values()):
                loading.result()
            if (failure := self.failure(names)) is not None:
                raise failure

    def can_pack(self, adapters: AdapterSet) -> bool:
        """True if a UNet takes these adapters as inputs: they change only its linears, and fit into its rank."""
        if self.packing is None or not adapters:
            return False
        records = [self._records[name] for name, _ in adapters]
        ranks = [max(layer.rank or math.inf for layer in record.layers.values()) for record in records]
        return sum(ranks) <= self.packing.rank and all(can_pack(record.layers, self.layers) for record in records)

    def changes(self, adapters: AdapterSet) -> list[tuple[AdapterChanges, Scale]]:
        """Return the changes of adapters that are on the device, with their scales."""
        with self._lock:
            for name, _ in adapters:
                self._loaded.move_to_end(name)
            return [(self._loaded[name], scale) for name, scale in adapters]

    def merge(self, adapters: AdapterSet) -> None:
        """Merge adapters that are on the device (`prepare`) into the weights, in place of the active ones.

        After an error the weights are a mixture, which the next merge replaces.
        """
        assert self.weights is not None
        changes, self.active = self.changes(adapters), None
        self.weights.merge(changes)
        self.active = adapters

    def close(self) -> None:
        """End the loading thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _load(self, name: str) -> None:
        try:
            with torch.inference_mode():
                record = self._records[name]
                try:
                    changes = load_changes(self._store, record, self._device)
                finally:
                    self._store.unpin(record.blobs)
            with self._lock:
                self._loaded[name] = changes
        except Exception as error:
            cause = str(error) if isinstance(error, PreheatError) else f"{type(error).__name__}: {error}"
            logger.error("adapter %s cannot be loaded: %s", name, cause)
            with self._lock:
                self._failures[name] = AdapterError(f"Adapter {name} cannot be loaded. {cause}", "")
        finally:
            with self._lock:
                del self._loading[name]
            self.on_loaded()

    def _evict(self, keep: Collection[str]) -> None:
        """Drop the least recently used adapters beyond the limit, but none of `keep`."""
        total = sum(self._sizes[name] for name in {*self._loaded, *keep})
        for name in [name for name in self._loaded if name not in keep]:
            if total <= self._cache_bytes:
                break
            del self._loaded[name]
            total -= self._sizes[name]


def _device_bytes(record: AdapterRecord) -> int:
    """Return the bytes of an adapter's parts on the device, in float32."""
    return 4 * sum(element_count(layer.part_shapes) for layer in record.layers.values())


def load_changes(store: Store, record: AdapterRecord, device: torch.device) -> AdapterChanges:
    """Copy an adapter's parts to the device, and check them. Raises AdapterError, CorruptBlob or StoreError."""
    tensors: dict[str, torch.Tensor] = {}
    for blob_tensors in stream_weights(store, record.blobs, device).values():
        tensors |= blob_tensors
    changes = {}
    for name, layer in record.layers.items():
        parts = {role: tensors.pop(f"{name}.{role}", None) for role in layer.part_shapes}
        found = {role: part.float() for role, part in parts.items() if part is not None}
        if {role: tuple(part.shape) for role, part in found.items()} != dict(layer.part_shapes):
            raise AdapterError(
                f"The tensors of {name} in adapter {record.name} have other shapes than its record states."
            )
        changes[name] = Change(layer.form or "matrix", found, layer.scale)
    if tensors:
        raise AdapterError(f"Adapter {record.name} has {min(tensors)}, which its record does not state.")
    largest = torch.stack([part.abs().amax() for change in changes.values() for part in change.parts.values()])
    if not bool(torch.isfinite(largest).all()):
        raise AdapterError(f"Adapter {record.name} has NaN or infinite values.")
    return changes


def check_fit(record: AdapterRecord, layers: Mapping[str, Layer], model: str) -> list[Layer]:
    """Return the layers of a model that an adapter changes. `model`: in messages.

    Raises AdapterError if the model lacks one of them.
    """
    fitting = []
    for name, entry in record.layers.items():
        layer = layers.get(name)
        if layer is None or stored_shape(entry.shape) != stored_shape(layer.shape):
            has = "no such layer" if layer is None else f"{list(layer.shape)}"
            raise AdapterError(
                f"Adapter {record.name} does not fit {model}: it changes {name} of the shape {list(entry.shape)}, and "
                f"the model has {has}.",
                "Remove it from `loras` in the config, or serve a release of the model that it was trained for.",
            )
        fitting.append(layer)
    return fitting
