"""Read and write files that a user names."""

import errno
import os
import shlex
import stat
import uuid
from contextlib import suppress
from pathlib import Path

from engine_builder.error_text import cause_of
from model.errors import PreheatError
from model.store.local import FileMissing, open_regular_file

# The folder cannot be written, something is mounted on the file, or its owner cannot be given to another file.
_IRREPLACEABLE_ERRNOS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, errno.EINVAL, errno.ENOTSUP}

_OTHER_FOLDER = "Name another folder."
PICKLE_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".pkl")
"""Suffixes of files that may run code when they are read. They are not opened."""


class NotWritable(PreheatError):
    """A file cannot be written at the requested path."""

    remedy = "Name another file."


def read_file(path: Path, max_bytes: int | None = None) -> bytes:
    """Return a file's bytes.

    Raises OSError, also for a pipe or a device, whose end may never come, and for a file of more than `max_bytes`.
    """
    try:
        with open_regular_file(path) as file:
            if max_bytes is not None and os.fstat(file.fileno()).st_size > max_bytes:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
            return file.read()
    except FileMissing as error:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error


def check_writable(path: Path) -> None:
    """Raise NotWritable if `write_file` could not write `path`, for example in a missing folder. Writes nothing.

    Call it before work whose result would be lost.
    """
    if path.name in ("", ".."):
        raise NotWritable(f"{str(path)!r} is not the name of a file.")
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise NotWritable(f"{path} cannot be written: it is a link to a missing file.") from None
        _check_parent(path)
        return
    except OSError as error:
        raise NotWritable(f"{path} cannot be written: {error.strerror or error}.") from error
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise NotWritable(f"{path} cannot be written: it is {kind}.")
    if not os.access(path, os.W_OK):
        raise NotWritable(f"{path} cannot be written: {os.strerror(errno.EACCES)}.")


def write_file(path: Path, data: bytes) -> None:
    """Write a file into a folder that exists. Raises NotWritable.

    A full disk leaves an earlier file unchanged, where a new file can take its place with the same owner and
    permissions. Symbolic links are followed.
    """
    check_writable(path)
    try:
        _replace_file(path, data)
    except OSError as error:
        raise NotWritable(f"{path} cannot be written: {error.strerror or error}.") from error


def check_folder(path: Path, *files: str) -> None:
    """Raise NotWritable if `files` could not be written into the folder `path`. Writes nothing.

    The folder need not exist, the folder that contains it must.
    """
    try:
        is_folder = path.is_dir()
    except (OSError, ValueError) as error:
        raise NotWritable(f"{str(path)!r} cannot be written: {cause_of(error)}.", _OTHER_FOLDER) from error
    if is_folder:
        if not os.access(path, os.W_OK | os.X_OK):
            raise NotWritable(f"{path} cannot be written: {os.strerror(errno.EACCES)}.", _OTHER_FOLDER)
        for file in files:
            check_writable(path / file)
        return
    if os.path.lexists(path):
        raise NotWritable(f"{path} cannot be written: it is not a folder.", _OTHER_FOLDER)
    _check_parent(path)


def make_folder(path: Path) -> None:
    """Make the folder `path` if it does not exist, in a folder that exists. Raises NotWritable."""
    check_folder(path)
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise NotWritable(f"{path} cannot be written: {cause_of(error)}.", _OTHER_FOLDER) from error


def _replace_file(path: Path, data: bytes) -> None:
    """Write a temporary file in the same folder, and move it into place. Raises OSError.

    Writes into the file itself where it cannot be replaced: in /dev and /proc, and where it is mounted on its own, its
    folder is read-only, or it belongs to another user.
    """
    if path.absolute().is_relative_to("/dev") or path.absolute().is_relative_to("/proc"):
        path.write_bytes(data)
        return
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb") as file:
            with suppress(FileNotFoundError):
                earlier = target.stat()
                os.fchown(file.fileno(), earlier.st_uid, earlier.st_gid)
                os.fchmod(file.fileno(), stat.S_IMODE(earlier.st_mode))
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        if error.errno not in _IRREPLACEABLE_ERRNOS or not target.exists():
            raise
        path.write_bytes(data)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _check_parent(path: Path) -> None:
    """Raise NotWritable if no file or folder can be made at `path`, for example because its folder is missing."""
    try:
        folder = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
        if not folder.is_dir():
            raise NotWritable(f"{path} cannot be written: {folder} is not a folder.")
    except OSError as error:
        raise NotWritable(f"{path} cannot be written: {error.strerror or error}.") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise NotWritable(f"{path} cannot be written: {os.strerror(errno.EACCES)} in {folder}.")
    if folder != path.absolute().parent:
        raise NotWritable(
            f"{path} cannot be written: the folder {path.parent} does not exist.",
            f"Make it with `mkdir -p {shlex.quote(str(path.parent))}`, or name another one.",
        )
