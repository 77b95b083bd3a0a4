"""What all backends share: records of built engines and graphs, progress reports, a build's result and its error.

The key of a record covers everything that was compiled. A record is reused only if every blob it names is intact. This
module does not know what the blobs contain.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Self

from pydantic import BaseModel

from engine_builder.stores.store import WritableStore
from model.errors import CorruptBlob, PreheatError
from model.store.manifest import Blob, EngineRecord

ReportProgress = Callable[[str, str, int, int], None]
"""Called with the component, the current activity, the number of finished steps and the number of all steps."""
ReportActivity = Callable[[str, str, int], None]
"""Called with the component, the current activity and the number of components that are finished."""


class CompileError(PreheatError):
    """A network could not be exported or compiled."""


class BuiltRecord(BaseModel):
    """Base of the records. Stored JSON outlives a version: fields are added, never renamed or reordered."""

    kind: ClassVar[str] = "engines"

    def blobs(self) -> list[Blob]:
        """Return every blob that the record names."""
        return [value for _, value in self if isinstance(value, Blob)]

    @classmethod
    def find(cls, store: WritableStore, key: str) -> Self | None:
        """Return the record under a key, or None if it or one of its blobs is missing or damaged."""
        data = store.read_record(cls.kind, key)
        if data is None:
            return None
        try:
            record = cls.model_validate_json(data)
            for blob in record.blobs():
                store.get(blob.sha256, blob.bytes)
        except (ValueError, CorruptBlob):
            return None
        return record

    def write(self, store: WritableStore, key: str) -> None:
        """Store the record under a key."""
        store.write_record(self.kind, key, self.model_dump_json().encode())


@dataclass
class BuiltEngines:
    """The engine records of a build. `compiled` and `reused` name a component once per engine or plan."""

    records: list[EngineRecord] = field(default_factory=list)
    compiled: list[str] = field(default_factory=list)
    reused: list[str] = field(default_factory=list)


def put_blob(store: WritableStore, data: bytes | memoryview) -> Blob:
    """Store bytes as a blob."""
    return Blob(sha256=store.put_bytes(data), bytes=len(data))
