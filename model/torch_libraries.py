"""Importing this module starts to load torch's shared libraries, on a thread: some 0.2 s on a CPU, more with CUDA's.

`import torch` would load them itself, and nothing of this interpreter could run meanwhile; `ctypes` lets it. So what is
imported before torch is imported beside this. Imports nothing of torch and changes nothing of what it loads: these are
its own files, the first as it loads it itself. Where they are not found, torch will say so.
"""

import ctypes
import importlib.util
import sys
import threading
from contextlib import suppress
from pathlib import Path


def load() -> None:
    """Load them now. Does nothing where torch was imported."""
    if "torch" in sys.modules:
        return
    spec = importlib.util.find_spec("torch")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        with suppress(OSError):
            ctypes.CDLL(str(Path(place) / "lib" / "libtorch_global_deps.so"), ctypes.RTLD_GLOBAL)
            # None of those that know Python, whose lock torch's import may hold while it waits for this.
            ctypes.CDLL(str(Path(place) / "lib" / "libtorch.so"))


loading = threading.Thread(target=load, name="preheat-torch-libraries", daemon=True)
loading.start()
