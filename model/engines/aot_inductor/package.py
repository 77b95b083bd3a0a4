"""Check a `.pt2` package before torch's C++ loader unpacks it.

The loader writes wherever the archive's names lead, also outside its own folder. No package built by Preheat does that.
"""

import stat
import zipfile
from pathlib import Path

from model.errors import EngineError

_MAX_ENTRIES = 10_000


def check_package(component: str, path: Path) -> None:
    """Refuse a file that is not an archive, or that would write outside its folder or more bytes than it has.

    Raises EngineError.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            problem = _problem(archive.infolist(), path.stat().st_size)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        problem = f"it is not a package: {' '.join(str(error).split())[:100]}"
    if problem:
        raise EngineError(f"The {component} engine cannot be opened ({problem}).")


def _problem(entries: list[zipfile.ZipInfo], size: int) -> str:
    """Describe the first problem in the archive's list of entries, "" if there is none."""
    if len(entries) > _MAX_ENTRIES:
        return f"its package holds more than {_MAX_ENTRIES} files"
    names = [entry.filename for entry in entries]
    if len(set(names)) < len(names):
        return "its package holds two files with the same name"
    for entry in entries:
        shown = repr(entry.filename[:80])
        # The name as stored: zipfile itself cuts a name at a NUL.
        name = entry.orig_filename
        parts = name.removesuffix("/").split("/")
        if ".." in parts or "" in parts or "\\" in name or ":" in name or not name.isprintable():
            return f"its package holds {shown}, which leads out of the folder it is unpacked in"
        if stat.S_ISLNK(entry.external_attr >> 16):
            return f"its package holds {shown}, which is a link"
        if entry.compress_type != zipfile.ZIP_STORED:
            return f"its package holds {shown}, which is compressed; engine packages are stored uncompressed"
    if sum(entry.file_size for entry in entries) > size:
        return "its entries claim more bytes than the file has"
    return ""
