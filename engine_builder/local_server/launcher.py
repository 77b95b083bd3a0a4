"""Run the image's main.py as the image runs it. server.py starts this file in a process of its own.

With `-S -P` neither this file's folder nor the entries of .pth files (an editable install, say) are on the import path.
The path is the argument, so an import that fails in the image fails here. Two things differ from the image: the server
listens on the loopback address only, and it ends with the process that started it. Imports only the standard library
and what the server imports anyway.

    python -S -P launcher.py IMPORT_PATH    # os.pathsep-joined; the image's /app is first, and the current folder
"""

import os
import runpy
import signal
import sys
import threading
from typing import Any


def _end_with_parent() -> None:
    """Kill this process group when the parent closes its end of stdin, or dies."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def _listen_on_loopback_only() -> None:
    import uvicorn

    class LoopbackConfig(uvicorn.Config):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "host": "127.0.0.1"})

    uvicorn.Config = LoopbackConfig  # type: ignore[misc]


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.path[:] = sys.argv[1].split(os.pathsep)
    _listen_on_loopback_only()
    # As __main__, so that the model's child processes find the server's main module, not this one.
    runpy.run_path("main.py", run_name="__main__")
