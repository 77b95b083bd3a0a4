"""Copy a release from one store to another: from the folder it was built in to the bucket that it is served from."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from model.errors import ReleaseExists, StoreError
from model.store.manifest import Blob, Manifest
from model.store.store import Store

_BLOBS_AT_ONCE = 4


def copy_release(
    source: Store, destination: Store, name: str, report: Callable[[Manifest], None] = lambda manifest: None
) -> tuple[Manifest, bool]:
    """Copy `name`: its blobs, verified on the way, and then its manifest. Returns that, and whether it is new there.

    `report` is told what is about to be copied. Doing it again goes on where it stopped. Raises ReleaseNotFound,
    ReleaseExists (another release has that name there), CorruptBlob or StoreError.
    """
    manifest = source.read_release(name)
    report(manifest)
    if name in destination.releases():
        return _same(destination, manifest), False

    def copy(blob: Blob) -> None:
        if destination.put(source.get(blob.sha256, blob.bytes)) != blob.sha256:
            raise StoreError(f"Blob {blob.sha256[:12]} changed while it was copied: do it again.")

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
        return _same(destination, manifest), False
    return manifest, True


def _same(store: Store, manifest: Manifest) -> Manifest:
    if store.read_release(manifest.name) != manifest:
        raise ReleaseExists(
            f"{store.url} has another release {manifest.name} and releases are written once: publish this one under a "
            "version that is free in both stores."
        )
    return manifest
