"""The releases of a deployment on one device, some with their weights on it and some without.

Each slot has engines and loops of its own, on weights at fixed addresses. All releases of a deployment have the same
engines, so the weights of any release can fill a slot, and nothing is opened or captured for it. The scheduler decides
which releases have a slot; see `model.scheduling.weight_slots`.
"""

import copy
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from model.adapters.block_scales import unet_blocks
from model.cold_start import ColdStart
from model.deployment import Deployment
from model.engines.tensorrt.runtime_caches import RuntimeCacheFolder
from model.errors import CorruptBlob, PreheatError, StoreError
from model.loading.alike import check_alike
from model.loading.embeddings import NewEmbeddings, later_versions, read_embeddings
from model.loading.load import Loaded, load, open_tokenizers, read_blobs, resolve
from model.loading.memory import check_memory, common_weights, free_memory, further_bytes, needed_bytes
from model.loading.runtimes import find_targets, runtime_cache_folder
from model.loading.select import Selection
from model.loading.target import Target
from model.loading.token_tables import check_token_ids, token_tables
from model.prompts.tokenizer import ClipTokenizer
from model.scheduling.weight_slots import Slot
from model.store.manifest import Fp16Steps
from model.store.store import Store

_MARGIN = 1.1  # of the memory of another slot, for what grows later

logger = logging.getLogger("preheat")


class Releases:
    """Loads the releases of a deployment, each for the first of the targets that it has engines for."""

    def __init__(
        self,
        store: Store,
        deployment: Deployment,
        targets: Sequence[Target],
        cold_start: ColdStart,
        caches: RuntimeCacheFolder | None = None,
    ) -> None:
        """Read the manifests. `caches`: see `load`.

        Raises ReleaseNotFound, ManifestError, UntrustedRelease, MissingComponent, NoEngineForTarget, OutOfDeviceMemory,
        AdapterNotFound, AdapterError or StoreError, and ConfigError for releases that cannot share a server. No blob is
        read before.
        """
        self._store, self._caches, self._cold_start, self._targets = store, caches, cold_start, targets
        self._device = torch.device("cuda:0" if targets[0].device == "cuda" else "cpu")
        if self._device.type == "cuda":
            # The host has little work, and waking a thread on each of its cores takes longer than the work.
            torch.set_num_threads(1)
        with cold_start.phase("resolve"):
            deployment = deployment.resolved(store)
            self._resolved = [resolve(store, deployment.alone(release), targets) for release in deployment.releases]
            check_alike([one.selection for one in self._resolved])
            check_memory(self._device, self._resolved[0].selection, ranks=deployment.ranks)
        self._free_before = free_memory(self._device)
        self._used_by_first = 0
        selections = [one.selection for one in self._resolved]
        self._common = common_weights(selections, bool(deployment.adapters.names))
        self._first: Loaded | None = None
        # By release: later versions that cannot be used, or differ in more than embeddings.
        self._other_versions: set[tuple[int, str]] = set()
        self._stopped = threading.Event()

    def __len__(self) -> int:
        return len(self._resolved)

    def name(self, index: int) -> str:
        """The name of a release."""
        return self._resolved[index].release

    def open(self, index: int) -> Loaded:
        """Load a release with engines of its own. Raises what `load` raises."""
        first = self._first
        loaded = load(
            self._store,
            self._resolved[index],
            self._device,
            self._cold_start if first is None else ColdStart(is_exported=False),
            self._caches,
            self._common,
            {} if first is None else first.slot.fixed,
            self._stopped.is_set,
        )
        if first is None:
            self._first = loaded
        return loaded

    def without_weights(self, index: int) -> Loaded:
        """Return what requests of a release need before its weights are on the device. `open` was called before.

        Its model must `run_on` the model of a slot with its weights before its engines are used. Most releases have the
        tokenizers of the first one, which are opened once. Raises StoreError, CorruptBlob, ManifestError or
        MissingComponent.
        """
        first, one = self._first, self._resolved[index]
        assert first is not None
        selection, tokenizers = one.selection, first.model.tokenizers
        if selection.manifest.tokenizers != self._resolved[0].selection.manifest.tokenizers:
            tokenizers = self._open_tokenizers(selection)
        library, served = first.model.adapters, one.served
        if library is not None:
            library, served = library.for_other_weights(), replace(served, unet_blocks=unet_blocks(library.layers))
        model = first.model.sharing(
            tokenizers=dict(tokenizers),  # the release's own: it may get embeddings
            noise_schedules=dict(one.noise_schedules),
            settings=selection.manifest.settings,
            fp16_steps=selection.fp16_steps or Fp16Steps(),
            adapters=library,
            benchmarks=one.benchmarks(),
        )
        return replace(first, model=model, served=served, release=one.release, weight_bytes=0, plans=None)

    def _open_tokenizers(self, selection: Selection) -> dict[str, ClipTokenizer]:
        blobs = [record.blob for record in selection.manifest.tokenizers.values()] + token_tables(selection)
        self._store.fetch(blobs)
        contents = read_blobs(self._store, blobs, selection)
        tokenizers = open_tokenizers(selection, contents)
        check_token_ids(selection, tokenizers, contents)
        return tokenizers

    def fetch(self, index: int) -> None:
        """Copy a release's weights onto this machine. Raises CorruptBlob or StoreError."""
        blobs = [blob for record in self._resolved[index].streamed_weights() for blob in record.blobs]
        self._store.fetch((blob for blob in blobs if blob.sha256 not in self._common), self._stopped.is_set)

    def fill(self, index: int, slot: Slot) -> None:
        """Replace a slot's weights by a release's. Nothing may use the slot meanwhile.

        After an error the slot holds a mixture. Raises EngineError, CorruptBlob or StoreError.
        """
        slot.weights.fill(self._store, self._resolved[index].streamed_weights(), self._device, self._stopped.is_set)

    def stop(self) -> None:
        """Let `fetch`, `open` and `fill` raise Unavailable soon. Any thread may call it."""
        self._stopped.set()

    def find_embeddings(self, index: int, tokenizers: Mapping[str, ClipTokenizer]) -> NewEmbeddings | None:
        """Return what the next version of a release adds that differs from it in added embeddings only, or None.

        Versions are taken in their order, so that a server that starts later ends with the same one. `tokenizers`:
        the release's. Raises what `read_embeddings` raises.
        """
        one = self._resolved[index]
        for name in later_versions(self._store, one.selection.manifest):
            if (index, name) in self._other_versions:
                continue
            try:
                found = read_embeddings(
                    self._store, name, one.selection, one.deployment, self._targets, tokenizers, self._common
                )
            except PreheatError as error:
                if isinstance(error, CorruptBlob) or not isinstance(error, StoreError):
                    self._other_versions.add((index, name))
                raise
            if found is not None:
                return found
            self._other_versions.add((index, name))
            current = one.selection.manifest.name
            logger.warning("%s is not taken over: it differs from %s in more than added embeddings.", name, current)
        return None

    def use_embeddings(self, index: int, found: NewEmbeddings) -> None:
        """From now on, load the weights of a release with these embeddings."""
        self._resolved[index] = replace(self._resolved[index], selection=found.selection)

    def has_room(self) -> bool:
        """True if the device has the memory of another slot, as far as is known.

        That is what the first one has taken with its graphs, or the estimate if that is more, and the limit of unused
        adapters, which are on the device later.
        """
        free, before = free_memory(self._device), self._free_before
        if free is None or before is None:
            return True
        self._used_by_first = self._used_by_first or max(1, before - free)
        selection, adapters = self._resolved[0].selection, self._resolved[0].deployment.adapters
        further = further_bytes(self._device, selection, self._common)
        fixed = needed_bytes(self._device, selection) - further
        used = self._used_by_first if self._device.type == "cuda" else 0  # of a host, other processes use memory too
        later = adapters.cache_bytes if adapters.names else 0
        return free >= _MARGIN * max(further, used - fixed) + later


def slot_of(loaded: Loaded) -> Slot:
    """Return the slot that a release was loaded into with engines of its own."""
    library = loaded.model.adapters
    return Slot(copy.copy(loaded.model), loaded.slot, None if library is None else library.weights)


def open_releases(store: Store, deployment: Deployment, cache_folder: Path, cold_start: ColdStart) -> Releases:
    """Return a deployment's releases on this machine, whose GPU or CPU decides the target.

    `cache_folder`: for kernels that TensorRT-RTX compiles. Raises TensorRTUnavailable, and what `Releases` raises.
    """
    targets = find_targets(deployment.runtime)
    return Releases(store, deployment, targets, cold_start, runtime_cache_folder(cache_folder, targets))


def load_deployment(store: Store, deployment: Deployment, cache_folder: Path, cold_start: ColdStart) -> Loaded:
    """Load the only release of a deployment on this machine. See `open_releases` and `load`."""
    return open_releases(store, deployment, cache_folder, cold_start).open(0)
