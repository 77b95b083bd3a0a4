"""Files of the kernels that TensorRT-RTX compiled on this GPU, one for each plan, so that the next start loads them.

Machines with different GPUs or drivers may share the folder, so a file's name states both, and the library's version.
A cache holds native code and is not part of a release, so no digest is known. So a file is used only if it belongs to
this process's user and nobody else can write it. The library ignores a cache of another GPU, driver or version.
"""

import logging
import os
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger("preheat.tensorrt")

SIZE_LIMIT = 2**30  # bytes; a larger file is not a cache of one plan


class RuntimeCacheFolder:
    """A folder of caches, each named by the digest of its plan and by the machine that compiled it."""

    def __init__(self, folder: Path, machine: str, size_limit: int = SIZE_LIMIT) -> None:
        """`machine`: all that kernels depend on except the plan, such as "sm86-driver580.159.04-rtx1.7.1.116".

        size_limit: bytes of the largest cache that is read or written.
        """
        self._folder = folder
        self._machine = machine
        self._size_limit = size_limit

    def _path(self, plan: str) -> Path:
        return self._folder / f"{plan}-{self._machine}"

    def read(self, plan: str) -> bytes:
        """Return this machine's cache of a plan by its digest, or b"" if there is none that can be trusted."""
        path = self._path(plan)
        try:
            with open(path, "rb", opener=_open_without_links) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode) or status.st_size > self._size_limit:
                    return b""
                if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                    logger.warning("the runtime cache %s is not used: others can write it", path)
                    return b""
                with suppress(OSError):  # the cache folder deletes what was not used for longest
                    os.utime(file.fileno(), ns=(time.time_ns(), status.st_mtime_ns))
                return file.read()
        except OSError:
            return b""

    def write(self, plan: str, data: bytes) -> None:
        """Keep the cache of a plan, unless its file has these bytes.

        A cache above the size limit is not written. This or a failure, such as a full disk, is logged: the next start
        compiles again.
        """
        if len(data) > self._size_limit:
            logger.warning(
                "the runtime cache of a plan was not kept (%d bytes; the limit is %d)", len(data), self._size_limit
            )
            return
        if self.read(plan) == data:
            return
        temporary = None
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self._folder)  # its mode is 0600
            with open(handle, "wb") as file:
                file.write(data)
            os.replace(temporary, self._path(plan))
        except OSError as error:
            logger.warning("the runtime cache of a plan was not kept (%s)", error)
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)


def _open_without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
