"""Copy releases and adapters between stores, for example from a build's folder to the bucket of the servers."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from engine_builder.stores.store import WritableStore
from engine_builder.stores.writing import adapter_exists, source_changed
from model.errors import AdapterExists, ReleaseExists
from model.store.adapter_record import AdapterRecord
from model.store.manifest import Blob, Manifest
from model.store.store import Store

_BLOBS_AT_ONCE = 4


def copy_release(
    source: Store, destination: WritableStore, name: str, report: Callable[[Manifest], None] = lambda manifest: None
) -> tuple[Manifest, bool]:
    """Verify and copy the blobs of `name`, then its manifest. Returns the manifest, and False if it existed already.

    `report` receives the manifest before the copy begins. A repeated call continues where the last one stopped. Raises
    ReleaseNotFound, ReleaseExists (another release of that name), CorruptBlob or StoreError.
    """
    manifest = source.read_release(name)
    report(manifest)
    if name in destination.releases(manifest.model):
        return _existing_release(destination, manifest), False
    _copy_blobs(source, destination, manifest.blobs().values())
    try:
        destination.write_release(manifest)
    except ReleaseExists:
        return _existing_release(destination, manifest), False
    return manifest, True


def copy_adapter(
    source: Store,
    destination: WritableStore,
    name: str,
    report: Callable[[AdapterRecord], None] = lambda record: None,
) -> tuple[AdapterRecord, bool]:
    """Verify and copy the blobs of an adapter, then its record. Returns the record, and False if it existed already.

    `report` receives the record before the copy begins. Raises AdapterNotFound, AdapterError, AdapterExists (another
    adapter of that name), CorruptBlob or StoreError.
    """
    record = source.read_adapter(name)
    report(record)
    if name not in destination.adapters():
        _copy_blobs(source, destination, record.blobs)
        try:
            destination.write_adapter(record)
        except AdapterExists:
            pass  # written meanwhile, and compared below
        else:
            return record, True
    if (existing := destination.read_adapter(name)) != record:
        raise adapter_exists(existing, record)
    return record, False


def _copy_blobs(source: Store, destination: WritableStore, blobs: Iterable[Blob]) -> None:
    """Verify and copy blobs, several at once. Stops at the first error."""

    def copy(blob: Blob) -> None:
        if destination.put(source.get(blob.sha256, blob.bytes)) != blob.sha256:
            raise source_changed(f"Blob {blob.sha256[:12]}")

    with ThreadPoolExecutor(_BLOBS_AT_ONCE, thread_name_prefix="preheat-copy") as pool:
        tasks = [pool.submit(copy, blob) for blob in blobs]
        try:
            for task in tasks:
                task.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _existing_release(store: Store, manifest: Manifest) -> Manifest:
    """Return the manifest if the store has exactly this release. Raises ReleaseExists."""
    if store.read_release(manifest.name) != manifest:
        raise ReleaseExists(
            f"{store.url} has another release {manifest.name}, and releases are written once.",
            "Publish this one under a version that is free in both stores.",
        )
    return manifest
