"""Copy a release between stores, for example from a build's folder to the bucket of the servers."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from engine_builder.stores.store import WritableStore
from engine_builder.stores.writing import source_changed
from model.errors import ReleaseExists
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
    if name in destination.releases():
        return _existing_release(destination, manifest), False

    def copy(blob: Blob) -> None:
        if destination.put(source.get(blob.sha256, blob.bytes)) != blob.sha256:
            raise source_changed(f"Blob {blob.sha256[:12]}")

    with ThreadPoolExecutor(_BLOBS_AT_ONCE, thread_name_prefix="preheat-copy") as pool:
        tasks = [pool.submit(copy, blob) for blob in manifest.blobs().values()]
        try:
            for task in tasks:
                task.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    try:
        destination.write_release(manifest)
    except ReleaseExists:
        return _existing_release(destination, manifest), False
    return manifest, True


def _existing_release(store: Store, manifest: Manifest) -> Manifest:
    """Return the manifest if the store has exactly this release. Raises ReleaseExists."""
    if store.read_release(manifest.name) != manifest:
        raise ReleaseExists(
            f"{store.url} has another release {manifest.name}, and releases are written once.",
            "Publish this one under a version that is free in both stores.",
        )
    return manifest
