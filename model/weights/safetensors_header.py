"""Read the header of a safetensors file: dtype, shape and byte range of each tensor. Headers are untrusted.

The format (huggingface.co/docs/safetensors, "Format"): 8 bytes of header length (little endian), the header (JSON: name
-> dtype, shape, data_offsets), then the bytes of all tensors without gaps. The `safetensors` library is not used,
because the header of a blob is needed before the blob is complete.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

from model.errors import CorruptBlob
from model.store.manifest_json import refuse_repeated_keys

_PREFIX_BYTES = 8  # of the header length
HEADER_LIMIT = 4 * 2**20  # bytes; the header of SDXL's UNet has some 150 KiB
_MAX_TENSORS = 2**14  # SDXL's UNet has 1,680
_MAX_NAME_CHARACTERS = 512  # the limit of tensor names in an engine's map of constants
_MAX_DIMENSIONS = 8
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Extent:
    """A tensor's dtype (in safetensors' notation), shape, and bytes `start` to `end` of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class InvalidHeader(ValueError):
    """The header is invalid. `invalid_weights` puts the message into the error for the blob."""


def read_header(first_bytes: bytes | memoryview, size: int) -> dict[str, Extent]:
    """Return extents by tensor name, in the order of their bytes.

    `first_bytes`: the start of a file of `size` bytes, with the whole header. The extents cover the rest of the file
    without gap or overlap, and each is aligned to its item size. Raises InvalidHeader.
    """
    if size < _PREFIX_BYTES:
        raise InvalidHeader(f"it has {size} bytes")
    length = int.from_bytes(first_bytes[:_PREFIX_BYTES], "little")
    if length > HEADER_LIMIT:
        raise InvalidHeader(f"its header would have {length} bytes, more than {HEADER_LIMIT}")
    end = _PREFIX_BYTES + length
    if end > size:
        raise InvalidHeader("its header is longer than the file")
    try:
        entries = json.loads(bytes(first_bytes[_PREFIX_BYTES:end]), object_pairs_hook=refuse_repeated_keys)
    except (ValueError, RecursionError) as error:
        raise InvalidHeader(f"its header is not JSON: {str(error)[:100]!r}") from error
    if not isinstance(entries, dict):
        raise InvalidHeader("its header is not an object")
    entries.pop("__metadata__", None)  # unused
    if len(entries) > _MAX_TENSORS:
        raise InvalidHeader(f"it names more than {_MAX_TENSORS} tensors")
    extents = {name: _extent(name, entry, end) for name, entry in entries.items()}
    ordered = dict(sorted(extents.items(), key=lambda item: (item[1].start, item[1].end)))
    at = end
    for name, extent in ordered.items():
        if extent.start != at:
            raise InvalidHeader(f"the bytes of {name[:80]!r} do not begin where those before it end")
        at = extent.end
    if at != size:
        raise InvalidHeader(f"its tensors end at byte {at} of {size}")
    return ordered


def invalid_weights(digest: str, cause: InvalidHeader) -> CorruptBlob:
    """Return the error for a blob that is not a valid safetensors file."""
    return CorruptBlob(f"Blob {digest[:12]} is not a safetensors file of weights: {cause}.")


def _extent(name: str, entry: Any, base: int) -> Extent:
    shown = repr(name[:80])
    if not name or len(name) > _MAX_NAME_CHARACTERS:
        raise InvalidHeader(f"a tensor's name has {len(name)} characters")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise InvalidHeader(f"{shown} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise InvalidHeader(f"{shown} has an unknown dtype")
    if not _valid_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise InvalidHeader(f"{shown} has an invalid shape")
    if not _valid_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise InvalidHeader(f"{shown} has invalid offsets")
    item = ITEM_BYTES[dtype]
    if math.prod(shape) * item != offsets[1] - offsets[0]:
        raise InvalidHeader(f"the shape and the bytes of {shown} disagree")
    if (base + offsets[0]) % item:
        raise InvalidHeader(f"{shown} is not aligned to its item size")
    return Extent(dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _valid_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**48 for value in values)
