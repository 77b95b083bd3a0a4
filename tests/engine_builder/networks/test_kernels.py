"""The Triton kernels without a GPU: their results in Triton's interpreter equal PyTorch's, and they compile for GPUs.

The compiler accepts less than the interpreter. Speed is not tested.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.repository import REPOSITORY

# Folders with Triton, for environments without it: `pip install --no-deps --target FOLDER triton`. Torch's CUDA builds
# include it. Several folders, separated as in PATH, test the Triton versions of several torch versions.
FOLDERS = os.environ.get("PREHEAT_TRITON", "").split(os.pathsep)
KERNELS = {
    "_attend_kernel",
    "_attend_self_kernel",
    "_fp8_conv_kernel",
    "_geglu_kernel",
    "_int8_linear_kernel",
    "_low_rank_linear_kernel",
    "_norm_silu_e4m3_kernel",
    "_winograd_tiles_kernel",
    "_winograd_pixels_kernel",
}
SHARED_BYTES_ON_AN_A10G = 99 * 1024
SHARED_BYTES_ON_AN_L4 = 99 * 1024
SHARED_BYTES_OF_A_PROGRAM = 227 * 1024  # on an H100 or H200 (CUDA C++ Programming Guide)

pytestmark = pytest.mark.skipif(
    not FOLDERS[0] and importlib.util.find_spec("triton") is None,
    reason="Triton is not installed: name a folder that holds it in PREHEAT_TRITON",
)


def run(module: str, folder: str, environment: dict[str, str]) -> dict[str, Any]:
    """Run a module of `triton_runs` and parse its output. `folder` holds Triton, or is empty.

    It runs in its own process, because Triton reads its environment when it is imported.
    """
    path = os.pathsep.join([str(REPOSITORY), *([folder] if folder else [])])
    command = [sys.executable, "-W", "ignore", "-m", f"tests.engine_builder.networks.triton_runs.{module}"]
    ran = subprocess.run(command, env=os.environ | environment | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    printed: dict[str, Any] = json.loads(ran.stdout)
    return printed


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """Relative errors by norm, and types of run-time arguments."""
    return run("interpret", FOLDERS[0], {"TRITON_INTERPRET": "1"})


# A number whose last bits differ may be rounded to the next E4M3 number, an eighth away. It happens to few of them.
LIMITS = {
    "text": 1e-5, "images": 1e-5, "self": 1e-5, "geglu": 1e-5, "low rank": 1e-5, "winograd": 1e-5, "half": 2e-3,
    "int8": 1e-6, "fp8 conv": 1e-5, "fp8 upsample": 1e-5, "scaled": 3e-3,
    "nan": 0.5, "norm steps": 1.5, "norm share": 1e-3,
}  # fmt: skip


def test_kernels_equal_pytorch(interpreted: dict[str, Any]) -> None:
    for kernel, limit in LIMITS.items():
        errors = {case: error for case, error in interpreted["errors"].items() if case.startswith(f"{kernel},")}
        assert len(errors) >= 2 and all(error < limit for error in errors.values()), errors  # NaN is not less


def test_kernels_take_no_floats_at_run_time(interpreted: dict[str, Any]) -> None:
    """A float would be a double in a compiled engine, and all arithmetic with it would be in fp64."""
    assert interpreted["types"].keys() == KERNELS
    for kernel, types in interpreted["types"].items():
        assert set(types) <= {"tensor", "int"}, kernel


@pytest.mark.parametrize(
    "folder", [pytest.param(folder, marks=[pytest.mark.full] * (folder != FOLDERS[0])) for folder in FOLDERS]
)
def test_every_kernel_compiles_for_a_gpu(folder: str, tmp_path: Path) -> None:
    """With the first folder's Triton. `make full` compiles with the others, too."""
    shared_bytes = run("compile", folder, {"TRITON_CACHE_DIR": str(tmp_path)})
    assert shared_bytes.keys() == KERNELS
    assert max(most["90"] for most in shared_bytes.values()) <= SHARED_BYTES_OF_A_PROGRAM
    assert shared_bytes["_int8_linear_kernel"]["86"] <= SHARED_BYTES_ON_AN_A10G
    assert shared_bytes["_fp8_conv_kernel"]["89"] <= SHARED_BYTES_ON_AN_L4
