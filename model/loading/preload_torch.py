"""Importing this module starts to load torch's shared libraries and to make the GPU's context, on two threads.

`import torch` would load the libraries itself, some 0.2 s on a CPU and more with CUDA's, and the first use of a GPU
would wait for its driver and its context, some 0.3 s; nothing of this interpreter could run meanwhile. `ctypes` lets
it. So what is imported before torch, and then torch, is imported beside this. Imports nothing of torch and changes
nothing of what it does: these are its own files, the first as it loads it itself, and a process has one primary context
of a device (CUDA driver API), which whoever comes next finds made. What is missing or broken, torch will say.
"""

import ctypes
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path


def load() -> None:
    """Load the libraries now. Does nothing where torch was imported."""
    if "torch" in sys.modules:
        return
    for folder in _folders():
        with suppress(OSError):
            ctypes.CDLL(str(folder / "libtorch_global_deps.so"), ctypes.RTLD_GLOBAL)
            # None of those that know Python, whose lock torch's import may hold while it waits for this.
            ctypes.CDLL(str(folder / "libtorch.so"))


def make_context() -> None:
    """Make the context of the first GPU now. Does nothing without one, and where torch is not built for one."""
    if not any((folder / "libtorch_cuda.so").exists() for folder in _folders()):
        return
    with suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def _folders() -> Iterator[Path]:
    """Where torch's libraries are."""
    spec = importlib.util.find_spec("torch")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield Path(place) / "lib"


def _begin(work: Callable[[], None], name: str) -> threading.Thread:
    thread = threading.Thread(target=work, name=f"preheat-{name}", daemon=True)
    thread.start()
    return thread


loading = _begin(load, "torch-libraries")
making = _begin(make_context, "gpu-context")
