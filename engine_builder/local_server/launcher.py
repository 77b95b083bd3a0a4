"""Run the image's main.py as the image would: see server.py, which starts this file in a process of its own.

Started with `-S -P`, so that neither this file's folder nor what a .pth file names (an editable install of
this very repository, say) is on the import path: the path is what is given, and an import that would fail in
the image fails here. Two things differ from the image: the server listens on the loopback address only, and
it ends with the process that started it. Imports the standard library and what the server imports anyway.

    python -S -P launcher.py IMPORT_PATH    # os.pathsep-joined, the image's /app first and current
"""

import os
import runpy
import signal
import sys
import threading
from typing import Any


def _end_with_parent() -> None:
    """Kill this process group once the parent has closed its end of our stdin, which its death does too."""
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
    # As __main__, so that processes which the model spawns find the server's main module, not this one.
    runpy.run_path("main.py", run_name="__main__")
