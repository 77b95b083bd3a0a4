"""Run the image's main.py as the image runs it. server.py starts this file in a process of its own.

With `-S -P` the import path holds neither this file's folder nor entries of .pth files, such as editable installs. The
path is an argument, so an import that fails in the image fails here, too. Two things differ from the image: the server
accepts connections on an inherited socket, and it ends with the process that started it. This file imports only the
standard library and modules that the server imports anyway.

    python -S -P launcher.py SOCKET IMPORT_PATH

SOCKET is the descriptor of a listening socket. IMPORT_PATH holds folders joined by os.pathsep. The first is the image's
/app, which is also the current folder.
"""

import os
import runpy
import signal
import socket
import sys
import threading
from typing import Any


def _end_with_parent() -> None:
    """Kill this process group when the parent ends, or closes its end of stdin."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def _accept_from(descriptor: int) -> None:
    """Make uvicorn use this listening socket instead of its configured address."""
    import uvicorn

    class InheritingServer(uvicorn.Server):
        async def serve(self, sockets: Any = None) -> None:
            await super().serve([socket.socket(fileno=descriptor)])

    uvicorn.Server = InheritingServer  # type: ignore[misc]


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.path[:] = sys.argv[2].split(os.pathsep)
    _accept_from(int(sys.argv[1]))
    # As __main__, so that the model's child processes find the server's main module, not this one.
    runpy.run_path("main.py", run_name="__main__")
