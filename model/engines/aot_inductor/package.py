"""A look at a `.pt2` package before the C++ loader unpacks it: the loader writes where the archive's names lead, out of
its own folder too. That an engine is native code anyway makes it no better: a package of ours never does that."""

import stat
import zipfile
from pathlib import Path

from model.errors import EngineError

_ENTRIES = 10_000


def check_package(component: str, path: Path) -> None:
    """Refuse an archive that is none, or would not stay in the folder, or in the room, it is unpacked in.

    Raises EngineError.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            problem = _problem(archive.infolist(), path.stat().st_size)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        problem = f"it is no package: {' '.join(str(error).split())[:100]}"
    if problem:
        raise EngineError(f"The {component} engine cannot be opened ({problem}): build it again (`preheat build`).")


def _problem(entries: list[zipfile.ZipInfo], size: int) -> str:
    """What is wrong with the archive's list of contents, "" if nothing is."""
    if len(entries) > _ENTRIES:
        return f"its package holds more than {_ENTRIES} files"
    names = [entry.filename for entry in entries]
    if len(set(names)) < len(names):
        return "its package holds two files of one name"
    for entry in entries:
        shown = repr(entry.filename[:80])
        # As it lies in the archive: zipfile itself cuts a name at a NUL.
        name = entry.orig_filename
        parts = name.removesuffix("/").split("/")
        if ".." in parts or "" in parts or "\\" in name or ":" in name or not name.isprintable():
            return f"its package holds {shown}, which leads out of the folder it is unpacked in"
        if stat.S_ISLNK(entry.external_attr >> 16):
            return f"its package holds {shown}, which is a link"
        if entry.compress_type != zipfile.ZIP_STORED:
            return f"its package holds {shown}, which is compressed, and nothing of a package is"
    if sum(entry.file_size for entry in entries) > size:
        return "its package claims to hold more than it has bytes"
    return ""
