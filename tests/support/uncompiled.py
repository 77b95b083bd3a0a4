"""Engines without compiled code, for tests of what a release computes: they run the module that was to be compiled.

A build compares each compiled engine with eager PyTorch (test_build.py), so such a release gives the same images, and
its build takes a tenth of the time. Its packages open only in the process that built them.
"""

import copy
import io
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from engine_builder.backends.aot_inductor import compile as compiler
from engine_builder.backends.aot_inductor.compile import CompiledNetwork, describe_constant, write_identity
from engine_builder.building import preview_map
from engine_builder.building.build import build
from engine_builder.building.build_plan import BuildPlan
from engine_builder.networks.network import Network
from engine_builder.releases.publish import publish
from engine_builder.stores.store import WritableStore, open_writable_store
from model.engines.aot_inductor import compiled_engine as engine_module
from model.engines.aot_inductor.container import Container
from model.engines.aot_inductor.package import Identity
from model.loading.target import Target
from model.store.manifest import Bucket

_ENTRY = "uncompiled.so"  # in the place of the library; its content is an index of `_modules`
_modules: list[tuple[nn.Module, int]] = []  # with the number of inputs


class _AnyCode(Container):
    """Opens a package of either kind, in the place of `Container`."""

    def __new__(cls, package: bytes, device: torch.device) -> Container:
        return object.__new__(UncompiledCode if _ENTRY.encode() in package else cls)


class UncompiledCode(_AnyCode):
    """Runs a module with the weights that it is given."""

    def __init__(self, package: bytes, device: torch.device) -> None:
        with zipfile.ZipFile(io.BytesIO(package)) as archive:
            [name] = [name for name in archive.namelist() if name.endswith(_ENTRY)]
            self._module, self._inputs = _modules[int(archive.read(name))]
        self._tensors: dict[str, torch.Tensor] = {}

    @property
    def constants(self) -> set[str]:
        return set(_named_tensors(self._module))

    @property
    def input_count(self) -> int:
        return self._inputs

    def load_constants(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            outputs = torch.func.functional_call(self._module, self._tensors, tuple(inputs), tie_weights=False)
        return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


def _named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _leave_uncompiled(network: Network, target: Target, bucket: Bucket, package: Path) -> CompiledNetwork:
    """Implements `compile_network`."""
    module = copy.deepcopy(network.module)
    _modules.append((module, len(network.signature.inputs)))
    with zipfile.ZipFile(package, "w") as archive:
        archive.writestr(f"{package.stem}/{_ENTRY}", str(len(_modules) - 1))
    write_identity(package, Identity(bucket=bucket, signature=network.signature))
    tensors = network.tensors()
    return CompiledNetwork(
        package, {name: describe_constant(network, tensors, name) for name in _named_tensors(module)}
    )


def publish_uncompiled(plan: BuildPlan, folder: Path) -> WritableStore:
    """Build a plan without compiling, and publish it in a new store in `folder`, as version 1. Returns the store.

    Its map for previews is fitted in a few steps, because the whole fit is half of the build.
    """
    store = open_writable_store(folder)
    with builds_without_compiling(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(preview_map, "_STEPS", 20)
        build(plan, store)
    publish(store, plan.model)
    return store


@contextmanager
def builds_without_compiling() -> Iterator[None]:
    """Let builds with one process store engines without compiled code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "compile_network", _leave_uncompiled)
        yield


def open_uncompiled_engines() -> None:
    """Let all loads of this process open engines of both kinds."""
    engine_module.Container = _AnyCode  # type: ignore[misc]
