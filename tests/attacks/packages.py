"""Packages of engines with entries that a builder never writes."""

import io
import stat
import zipfile

from tests.stand_ins import releases


def with_entry(name: str, data: bytes = b"x", compression: int = zipfile.ZIP_STORED, mode: int = 0o644) -> bytes:
    """A true engine's package, and one entry more."""
    buffer = io.BytesIO(releases.toy().engine)
    with zipfile.ZipFile(buffer, "a") as archive:
        entry = zipfile.ZipInfo(name)
        entry.external_attr = (mode if stat.S_IFMT(mode) else stat.S_IFREG | mode) << 16
        archive.writestr(entry, data, compress_type=compression)
    return buffer.getvalue()
