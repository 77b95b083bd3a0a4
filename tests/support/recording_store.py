"""A store that records the blobs that are fetched, and those that are read."""

from collections.abc import Callable, Iterable
from pathlib import Path

from model.store.local import LocalStore
from model.store.manifest import Blob
from model.store.sink import Sink


class RecordingStore(LocalStore):
    """Records the digests of the blobs that it fetches, and of those that it reads."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.fetched: set[str] = set()
        self.blobs_read: set[str] = set()

    def fetch(self, blobs: Iterable[Blob], is_stopped: Callable[[], bool] = lambda: False) -> None:
        blobs = list(blobs)
        self.fetched |= {blob.sha256 for blob in blobs}
        super().fetch(blobs)

    def get(self, digest: str, size: int) -> Path:
        self.blobs_read.add(digest)
        return super().get(digest, size)

    def read(self, digest: str, into: memoryview) -> None:
        self.blobs_read.add(digest)
        super().read(digest, into)

    def stream(self, digest: str, size: int, sink: Sink) -> None:
        self.blobs_read.add(digest)
        super().stream(digest, size, sink)
