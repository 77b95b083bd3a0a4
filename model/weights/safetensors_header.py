"""Where the tensors of a safetensors file lie. A header is a stranger's claim: nothing of it is used before it adds up.

The format (huggingface.co/docs/safetensors, "Format"): 8 bytes of header length (little endian), the header (JSON: name
-> dtype, shape, data_offsets), then the bytes of all tensors, without gaps. Headers are read here and not by the
`safetensors` library, because a blob on its way to the device has one long before it is whole.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

from model.errors import CorruptBlob
from model.store.manifest import Blob

PREFIX = 8  # bytes
HEADER_LIMIT = 4 * 2**20  # bytes; a blob of SDXL's UNet has some 150 KiB
_TENSORS_LIMIT = 2**14  # SDXL's UNet has 1,680
_NAME_LIMIT = 512  # characters, as in a map of constants
_DIMENSIONS = 8
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Extent:
    """A tensor's dtype (as safetensors writes it), shape, and bytes `start` to `end`, counted from the file's first."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class BadHeader(ValueError):
    """What is wrong with a header, for `damaged` to say."""


def header_end(prefix: bytes | memoryview, size: int) -> int:
    """The first 8 bytes of a file of `size` bytes -> where its header ends. Raises BadHeader."""
    if size < PREFIX:
        raise BadHeader(f"it has {size} bytes")
    length = int.from_bytes(prefix[:PREFIX], "little")
    if length > HEADER_LIMIT:
        raise BadHeader(f"its header would have {length} bytes, more than {HEADER_LIMIT}")
    if PREFIX + length > size:
        raise BadHeader("its header is longer than the file")
    return PREFIX + length


def read_header(start: bytes | memoryview, size: int) -> dict[str, Extent]:
    """The beginning of a file of `size` bytes, its header included -> extents by name, in order of their bytes.

    They follow each other without gap or overlap to the end of the file, and each lies at a multiple of its item's
    size. Raises BadHeader.
    """
    end = header_end(start, size)
    try:
        entries = json.loads(bytes(start[PREFIX:end]), object_pairs_hook=_no_key_twice)
    except (ValueError, RecursionError) as error:
        raise BadHeader(f"its header is not JSON: {str(error)[:100]!r}") from error
    if not isinstance(entries, dict):
        raise BadHeader("its header is no object")
    entries.pop("__metadata__", None)  # notes, which nothing reads
    if len(entries) > _TENSORS_LIMIT:
        raise BadHeader(f"it names more than {_TENSORS_LIMIT} tensors")
    found = {name: _extent(name, entry, end) for name, entry in entries.items()}
    ordered = dict(sorted(found.items(), key=lambda item: (item[1].start, item[1].end)))
    at = end
    for name, extent in ordered.items():
        if extent.start != at:
            raise BadHeader(f"the bytes of {name[:80]!r} do not begin where those before it end")
        at = extent.end
    if at != size:
        raise BadHeader(f"its tensors end at byte {at} of {size}")
    return ordered


def damaged(digest: str, why: BadHeader) -> CorruptBlob:
    """The sentence a person reads."""
    return CorruptBlob(
        f"Blob {digest[:12]} is no safetensors file of weights ({why}): build and publish the release again "
        "(`preheat build`, `preheat publish`)."
    )


def refuse_empty(blob: Blob) -> None:
    """A blob without a byte has no header that could be read. Raises CorruptBlob."""
    if not blob.bytes:
        raise damaged(blob.sha256, BadHeader("it has 0 bytes"))


def _extent(name: str, entry: Any, base: int) -> Extent:
    shown = repr(name[:80])
    if not name or len(name) > _NAME_LIMIT:
        raise BadHeader(f"a tensor's name has {len(name)} characters")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise BadHeader(f"{shown} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise BadHeader(f"{shown} has an unknown dtype")
    if not _sizes(shape) or len(shape) > _DIMENSIONS:
        raise BadHeader(f"the shape of {shown} is none")
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise BadHeader(f"the offsets of {shown} are none")
    item = ITEM_BYTES[dtype]
    if math.prod(shape) * item != offsets[1] - offsets[0]:
        raise BadHeader(f"the shape of {shown} does not take the bytes that it has")
    if (base + offsets[0]) % item:
        raise BadHeader(f"the bytes of {shown} lie askew")
    return Extent(dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**48 for value in values)


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found
