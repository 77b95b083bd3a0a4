"""The imports of a cold start, in a fresh interpreter. Each further package costs time at every start."""

import ctypes
import importlib.util
import json
import subprocess
import sys
import textwrap
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from engine_builder.stores.local import WritableLocalStore
from model.loading import preload_torch
from tests.support.releases import cpu_target
from tests.support.repository import REPOSITORY

HEAVY = (
    "diffusers", "transformers", "torch._inductor", "torch._dynamo", "torch.fx.experimental.symbolic_shapes", "sympy",
    "networkx", "scipy", "boto3", "botocore", "engine_builder", "matplotlib", "accelerate", "huggingface_hub", "truss",
)  # fmt: skip
# The packages of the server image, and those that they need.
THIRD_PARTY = {
    "torch", "torchgen", "functorch", "numpy", "tqdm", "typing_extensions",  # torch, and what it imports itself
    "pydantic", "pydantic_core", "annotated_types", "typing_inspection",
    "tokenizers", "PIL", "prometheus_client",
    "starlette", "anyio", "sniffio", "idna",
    "uvicorn", "h11", "click", "watchfiles",  # of Truss, which has imported them before the model
    "python_multipart",  # of the gateway, not in a server image; starlette imports it if it is installed
    "model",
}  # fmt: skip

REPORT = """
    import json

    def report(before):
        names = sorted(set(sys.modules) - before)
        third_party = set()
        for name in {name.partition(".")[0] for name in names}:
            origin = getattr(sys.modules.get(name), "__file__", None) or ""
            if "-packages" in origin or name == "model":
                third_party.add(name)
        print(json.dumps({"modules": names, "third_party": sorted(third_party)}))
"""


def imports_of(script: str, *arguments: object) -> tuple[set[str], set[str]]:
    """Run a script. Return the modules that it imports, and the names of their third-party packages."""
    whole = "import sys\nbefore = set(sys.modules)\n" + textwrap.dedent(REPORT) + textwrap.dedent(script)
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", whole + "\nreport(before)\n", *map(str, arguments)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout.splitlines()[-1])
    return set(report["modules"]), set(report["third_party"])


def heavy(modules: set[str]) -> set[str]:
    return {name for name in modules for package in HEAVY if name == package or name.startswith(package + ".")}


def test_importing_the_model_imports_no_torch() -> None:
    """It starts no thread either. Truss imports and constructs the model before the load, which imports torch."""
    modules, third_party = imports_of(
        "import threading, model.model; assert threading.active_count() == 1, threading.enumerate()"
    )
    assert not heavy(modules) and "torch" not in modules
    assert third_party <= THIRD_PARTY - {"torch", "tokenizers", "PIL"}, third_party


def test_loading_a_release_imports_nothing_heavy(valid_store: WritableLocalStore) -> None:
    script = """
        import torch
        with_torch = set(sys.modules)
        import model.model
        import model.loading.releases, model.loading.warmup
        further = set(sys.modules) - with_torch
        # `import torch` itself imports some modules of torch.export and torch.fx. The server must add none.
        assert not [name for name in further if name.startswith(("torch.export", "torch._export", "torch.fx"))], further

        from model.cold_start import ColdStart
        from model.deployment import Deployment
        from model.loading.releases import Releases
        from model.store.store import open_store
        from model.loading.target import Target

        target = Target(*sys.argv[2:])
        loaded = Releases(open_store(sys.argv[1]), Deployment(("toy/1",)), [target], ColdStart()).open(0)
        y = loaded.model.engines["unet"].run({"x": torch.ones(1, 4, 8, 8)}, 64, 64)["y"]
        assert y.shape == (1, 4, 8, 8) and torch.isfinite(y).all()
    """
    modules, third_party = imports_of(script, valid_store.url, *astuple(cpu_target()))
    assert not heavy(modules)
    assert third_party <= THIRD_PARTY, f"new: {third_party - THIRD_PARTY}"
    assert {"torch", "tokenizers", "pydantic", "model"} <= third_party, "imports are not noticed"


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


@pytest.mark.parametrize("gpus_in_use, contexts", [(2, 1), (1, 0)])
def test_creates_the_gpu_context(
    gpus_in_use: int, contexts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch is a folder with the library that it has if it is built for GPUs."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cuda.so").touch()
    torch = SimpleNamespace(submodule_search_locations=[tmp_path])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: torch)

    def count(argument: Any) -> int:
        argument._obj.value = 2  # of ctypes.byref
        return 0

    driver = Mock(**{f"{name}.return_value": 0 for name in ("cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain")})
    driver.cuDeviceGetCount = count
    monkeypatch.setattr(ctypes, "CDLL", lambda *_: driver)
    preload_torch.create_context(lambda gpus: gpus == gpus_in_use)
    driver.cuInit.assert_called_once_with(0)
    assert driver.cuDevicePrimaryCtxRetain.call_count == contexts


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
