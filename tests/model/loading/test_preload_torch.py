"""torch's libraries and the GPU's context are loaded on threads before torch is imported."""

import subprocess
import textwrap
from pathlib import Path

from tests.model.loading.test_imports import imports_of


def test_constructing_the_model_preloads_torch() -> None:
    script = """
        import threading
        from model.model import Model

        Model(config={})
        for thread in threading.enumerate():
            if thread.name.startswith("preheat-torch"):
                thread.join()
        assert "/torch/lib/libtorch_cpu.so" in open("/proc/self/maps").read()
    """
    modules, _ = imports_of(script)
    assert "torch" not in modules


CUDA_DRIVER = r"""
    #include <stdio.h>
    static char calls[200];
    static int length = 0;
    #define RECORD(...) (length += snprintf(calls + length, sizeof calls - length, __VA_ARGS__), 0)
    extern "C" {
    int cuInit(unsigned flags) { return RECORD("init %u, ", flags), 0; }
    int cuDeviceGetCount(int *count) { *count = 2; return RECORD("count, "); }
    int cuDeviceGet(int *device, int ordinal) { *device = 7; return RECORD("device %d, ", ordinal); }
    int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = 0, RECORD("context of %d", device); }
    const char *recorded_calls() { return calls; }
    }
"""


def test_creates_the_gpu_context(tmp_path: Path) -> None:
    """The driver is compiled here. torch is a folder with the library that it has if it is built for GPUs."""
    driver = tmp_path / "libcuda.so.1"
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c++", "-", "-o", driver],
        input=textwrap.dedent(CUDA_DRIVER), text=True, check=True,
    )  # fmt: skip
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "lib" / "libtorch_cuda.so").touch()
    script = """
        import ctypes

        driver = ctypes.CDLL(sys.argv[1] + "/libcuda.so.1")  # the dynamic linker then finds it by this name
        sys.path.insert(0, sys.argv[1])
        from model.loading import preload_torch

        for thread in preload_torch.start(lambda gpus: gpus == 2):
            thread.join()
        driver.recorded_calls.restype = ctypes.c_char_p
        calls = driver.recorded_calls().decode()
        assert calls == "init 0, count, device 0, context of 7", calls
    """
    modules, _ = imports_of(script, tmp_path)
    assert "torch" not in modules


def test_imports_torch_without_operators_for_meta_tensors() -> None:
    """A third of torch's import. The server's own use of torch works, and so does a later import of the module."""
    script = """
        from model.loading import preload_torch

        preload_torch.import_torch()
        import torch
        assert not any(name.startswith("torch._decomp") for name in sys.modules), "they are imported all the same"
        noise = torch.randn(2, generator=torch.Generator().manual_seed(1))
        assert torch.equal(torch.cat([noise, noise]).chunk(2)[1], noise)

        import torch._meta_registrations
        product = torch.zeros(2, 3, device="meta") @ torch.zeros(3, 4, device="meta")
        assert product.shape == (2, 4) and torch.Generator().manual_seed(1).initial_seed() == 1
    """
    modules, _ = imports_of(script)
    assert "torch._decomp" in modules
