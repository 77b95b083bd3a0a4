"""Load torch's shared libraries and create the GPU's context on threads, while other modules are imported.

`import torch` would load the libraries itself (some 0.2 s on a CPU, more with CUDA's). The first use of a GPU would
wait some 0.3 s for its context. No Python code could run meanwhile; `ctypes` releases the interpreter lock. This
changes nothing for torch: the files are its own, loaded as it loads them, and a process has one primary context for a
device (CUDA driver API). Errors are left to torch, which reports them.

`import_torch` leaves out a module of torch that a server never uses, and that takes a third of the import.
"""

import ctypes
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

# Registers operators for tensors without data (the device "meta"), and imports torch's decompositions for them. Only
# tracing and compilation need them.
_UNUSED_MODULE = "torch._meta_registrations"


def import_torch() -> None:
    """Import torch without operators on the meta device. If torch is imported already, this does nothing.

    Code that needs them afterwards can import `torch._meta_registrations`.
    """
    if "torch" in sys.modules:
        return
    # torch would otherwise search the metadata of all installed packages for further backends, and a server has none.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    placeholder = sys.modules.setdefault(_UNUSED_MODULE, ModuleType(_UNUSED_MODULE))
    try:
        import torch
    finally:
        if sys.modules.get(_UNUSED_MODULE) is placeholder:
            del sys.modules[_UNUSED_MODULE]
    if set_metaclass := getattr(torch._C, "_set_generator_metaclass", None):
        # From torch 2.13 on, torch._prims.rng_prims, which the module above imports, completes the class Generator.
        from torch._opaque_base import OpaqueBaseMeta

        set_metaclass(OpaqueBaseMeta)


def start(wants_context: Callable[[int], bool]) -> list[threading.Thread]:
    """Start `load_libraries` and `create_context` on threads of their own, and return the threads."""
    threads = [
        threading.Thread(target=load_libraries, name="preheat-torch-libraries", daemon=True),
        threading.Thread(target=create_context, args=[wants_context], name="preheat-gpu-context", daemon=True),
    ]
    for thread in threads:
        thread.start()
    return threads


def load_libraries() -> None:
    """Load torch's libraries now. Does nothing if torch is imported."""
    if "torch" in sys.modules:
        return
    for folder in _library_folders():
        with suppress(OSError):
            ctypes.CDLL(str(folder / "libtorch_global_deps.so"), ctypes.RTLD_GLOBAL)
            # Libraries that need Python's lock are left out: the import of torch may hold it and wait for this thread.
            ctypes.CDLL(str(folder / "libtorch.so"))


def create_context(wanted: Callable[[int], bool]) -> None:
    """Create the context of the first GPU now, if `wanted` is true for the number of visible GPUs.

    Does nothing without a GPU, or if torch was not built for one.
    """
    if (driver := _initialized_driver()) is None:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if wanted(_count(driver)) and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def count_gpus() -> int:
    """Return the number of GPUs that this process can use, 0 for a CPU. Creates no context."""
    all_visible = "CUDA_VISIBLE_DEVICES" not in os.environ
    if all_visible and len(list(Path("/dev").glob("nvidia[0-9]*"))) == 1 and _is_built_for_gpus():
        return 1  # without waiting for the driver, which the start of a server with one GPU need not do
    driver = _initialized_driver()
    return 0 if driver is None else _count(driver)


def _initialized_driver() -> ctypes.CDLL | None:
    """Return the initialized driver, or None without a GPU, or if torch was not built for one."""
    if not _is_built_for_gpus():
        return None
    with suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) == 0:
            return driver
    return None


def _count(driver: ctypes.CDLL) -> int:
    count = ctypes.c_int()
    return count.value if driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0


def _is_built_for_gpus() -> bool:
    return any((folder / "libtorch_cuda.so").exists() for folder in _library_folders())


def _library_folders() -> Iterator[Path]:
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield Path(folder) / "lib"
