"""Call an AOTInductor package through its C interface (torch/csrc/inductor/aoti_runtime/interface.h).

torch's own loader holds Python's interpreter lock during a run. On a CPU a run is the whole computation, and no other
thread could answer a health check meanwhile. On a GPU the first run loads the kernels, and no other thread could load
weights or the kernels of other packages meanwhile. ctypes releases the lock.
"""

import ctypes
import io
import shutil
import struct
import weakref
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from model.engines.aot_inductor.unpacked import make_folder

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class _Constant(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("tensor", ctypes.c_void_p)]


class Container:
    """The compiled code of one package. Not thread-safe. Raises RuntimeError, like torch's loader."""

    def __init__(self, package: bytes, device: torch.device) -> None:
        """Open a package that was compiled for `device`."""
        folder = make_folder()
        # The first run reads kernels of a GPU from the folder, so it stays as long as the container.
        delete = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        try:
            self._library = ctypes.CDLL(str(_unpack(package, folder)))
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            delete()
            raise RuntimeError(str(error)) from error
        if device.type == "cpu":
            delete()  # the library stays mapped
        self._device = device
        handle = ctypes.c_void_p()
        self._call(
            "CreateWithDevice",
            ctypes.byref(handle),
            ctypes.c_size_t(1),
            b"cpu" if device.type == "cpu" else f"cuda:{device.index or 0}".encode(),
            str(folder).encode(),
        )
        self._handle = handle
        self._names = self._constant_names()
        self._references: list[int] = []  # to the constants
        # Not at exit, when a thread may still run the code.
        weakref.finalize(self, _close, self._library, handle, self._references).atexit = False

    @property
    def constants(self) -> set[str]:
        """The names of the constants that `load_constants` requires."""
        return set(self._names)

    def load_constants(self, tensors: dict[str, torch.Tensor]) -> None:
        """Alias `tensors`, one for each of `constants`. Call it before `run`, which would crash otherwise."""
        pointers = _pointers([tensors[name] for name in self._names])
        self._references += pointers
        pairs = zip(self._names.values(), pointers, strict=True)
        entries = (_Constant * len(pointers))(*(_Constant(name, pointer) for name, pointer in pairs))
        self._call(
            "UpdateUserManagedConstantBufferPairs",
            self._handle,
            entries,
            ctypes.c_size_t(len(pointers)),
            ctypes.c_bool(False),
            ctypes.c_bool(True),
        )

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run contiguous tensors in the order of the signature, and return the outputs. Nothing is checked here.

        On a GPU the work is queued on the current stream.
        """
        stream = torch.cuda.current_stream(self._device).cuda_stream if self._device.type == "cuda" else None
        pointers = (ctypes.c_void_p * len(inputs))(*_pointers(inputs))  # freed by the callee
        outputs = (ctypes.c_void_p * self._count("Outputs"))()
        self._call(
            "RunSingleThreaded",
            self._handle,
            pointers,
            ctypes.c_size_t(len(pointers)),
            outputs,
            ctypes.c_size_t(len(outputs)),
            ctypes.c_void_p(stream),
            None,  # no operators of other modules
        )
        return _tensors(list(outputs))

    @property
    def input_count(self) -> int:
        """The number of tensors that `run` takes. Another number would end the process."""
        return self._count("Inputs")

    def _count(self, kind: str) -> int:
        count = ctypes.c_size_t()
        self._call(f"GetNum{kind}", self._handle, ctypes.byref(count))
        return count.value

    def _constant_names(self) -> dict[str, bytes]:
        """Return name in the exported program -> name in the compiled code, for each constant."""
        names = {}
        for index in range(self._count("Constants")):
            compiled, exported = ctypes.c_char_p(), ctypes.c_char_p()
            self._call("GetConstantName", self._handle, ctypes.c_size_t(index), ctypes.byref(compiled))
            self._call("GetConstantOriginalFQN", self._handle, ctypes.c_size_t(index), ctypes.byref(exported))
            assert compiled.value is not None and exported.value is not None
            names[exported.value.decode()] = compiled.value
        return names

    def _call(self, function: str, *arguments: Any) -> None:
        try:
            call = getattr(self._library, f"AOTInductorModelContainer{function}")
        except AttributeError as error:
            raise RuntimeError(f"its library has no AOTInductorModelContainer{function}") from error
        if call(*arguments):
            raise RuntimeError(f"AOTInductorModelContainer{function} failed; standard error has the reason")


def _unpack(package: bytes, folder: Path) -> Path:
    """Write the library of a package and the files beside it, such as kernels, to `folder`. Returns the library's path.

    Raises RuntimeError, ValueError or BadZipFile for a damaged package.
    """
    with zipfile.ZipFile(io.BytesIO(package)) as archive:
        if (damaged := archive.testzip()) is not None:
            raise RuntimeError(f"its entry {damaged} is damaged")
        [library] = [entry for entry in archive.infolist() if entry.filename.endswith(".so")]
        _check_library(archive.read(library))
        beside = PurePosixPath(library.filename).parent
        for entry in archive.infolist():
            path = PurePosixPath(entry.filename)
            if path.parent == beside and not entry.is_dir():
                (folder / path.name).write_bytes(archive.read(entry))
    return folder / PurePosixPath(library.filename).name


def _check_library(data: bytes) -> None:
    """Refuse an ELF file that ends within a segment: the dynamic linker would map it and end the process (SIGBUS).

    Raises ValueError. Offsets are those of elf(5) for 64 bits; the linker itself refuses every other kind of file.
    """
    try:
        [table] = struct.unpack_from("<Q", data, 32)  # e_phoff
        entry_bytes, count = struct.unpack_from("<HH", data, 54)  # e_phentsize, e_phnum
        for entry in range(table, table + entry_bytes * count, entry_bytes or 1):
            offset, length = struct.unpack_from("<8xQ16xQ", data, entry)  # p_offset, p_filesz
            if offset + length > len(data):
                raise ValueError("its library is shorter than its header states")
    except struct.error as error:
        raise ValueError("its library is shorter than its header states") from error


def _close(library: ctypes.CDLL, handle: ctypes.c_void_p, references: list[int]) -> None:
    library.AOTInductorModelContainerDelete(handle)
    _tensors(references)  # frees them


def _pointers(tensors: list[torch.Tensor]) -> list[int]:
    """Return a new C++ reference to each tensor. The receiver must free it."""
    return [_get_pointer(capsule, None) for capsule in torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(tensors)]


def _tensors(pointers: Sequence[int | None]) -> list[torch.Tensor]:
    """Return the tensors that `_pointers` referenced, and free the references."""
    capsules = [_new_capsule(pointer, None, None) for pointer in pointers]
    return list(torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(capsules))
