"""The order of folders, and what runs before torch is imported."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.repository import PACKAGES, REPOSITORY

# From the bottom to the top: a module imports its own layer and those before it. A layer is a set of folders and files.
LAYERS: tuple[set[str], ...] = (
    {"errors", "statuses"},
    {"validation"},
    {"store"},
    {"settings", "cold_start", "child_process"},
    {"deployment"},
    {"cuda", "images", "weights"},
    {"engines"},
    {"denoising"},
    {"prompts"},
    {"adapters", "pipeline"},
    {"metrics"},
    {"scheduling"},
    {"request_fields"},
    {"loading", "ranks"},
    {"serving"},
    {"workers"},
    {"api"},
    {"model"},
)
# These run before torch is imported, or in a process that never imports it.
TORCH_FREE = (
    "model.adapters.layers", "model.store", "model.settings", "model.validation", "model.api.request",
    "model.api.resolve", "model.deployment",
    "model.engines.signatures",
    "model.engines.tensorrt.libraries", "model.engines.tensorrt.execution", "model.engines.tensorrt.runtime_caches",
    "model.request_fields", "model.pipeline.spec", "model.pipeline.components", "model.pipeline.families",
    "model.loading.select", "model.loading.runtimes",
    "model.loading.served", "model.loading.target", "model.loading.prefetch", "model.loading.prefetch_worker",
    "model.loading.preload_torch", "model.child_process",
    "model.workers.channel", "model.workers.messages", "model.workers.pool", "model.workers.process",
    "model.workers.worker",
)  # fmt: skip
NOT_IMPORTED = {
    "model": ("engine_builder", "gateway", "benchmarks", "preheat"),
    "engine_builder": ("gateway", "benchmarks", "preheat"),
    "gateway": ("benchmarks", "preheat", "engine_builder.networks", "engine_builder.building", "model.engines"),
    "benchmarks": ("preheat.commands",),
}
# A feature of the denoiser is a row of a table. Only these modules name one.
FEATURE_MODULES = ("model/engines/features.py", "model/pipeline/control.py", "model/pipeline/image_prompt.py")
OLD_NAMES = re.compile(
    r"UNET_CONTROLLED|UNET_IP|UNET_LORA|UNET_GUIDED|unet_controlled|unet_ip|unet_lora|unet_guided"
    r"|\bcontrolled\b|image_prompted|MixedLoop|unet_of_loop"
)
Graph = dict[str, set[str]]


def modules(*packages: str) -> dict[str, Path]:
    """Return name -> file of all modules of these top-level packages."""
    files = [path for package in packages for path in (REPOSITORY / package).rglob("*.py")]
    return {
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): path for path in files
    }


def imports(path: Path, known: Iterable[str]) -> Iterator[str]:
    """Yield the modules of `known` that a file imports, also in functions and for type checks."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in known else str(node.module)


@pytest.fixture(scope="module")
def graph() -> Graph:
    files = modules(*PACKAGES)
    return {name: {found for found in imports(path, files) if found in files} for name, path in files.items()}


def layer(module: str) -> int:
    """Return the number of a module's layer, from the bottom."""
    part = module.split(".")[1]
    return next(number for number, parts in enumerate(LAYERS) if part in parts)


def upward_imports(graph: Graph) -> list[str]:
    """Return the imports of model/ that lead to a higher layer, and those of a package that it does not import."""
    found = []
    for module, imported_modules in graph.items():
        for imported in imported_modules - {"model"}:
            is_higher = (
                module.startswith("model.") and imported.startswith("model.") and layer(imported) > layer(module)
            )
            if is_higher or imported.startswith(NOT_IMPORTED.get(module.partition(".")[0], ())):
                found.append(f"{module} -> {imported}")
    return sorted(found)


def find_cycle(graph: Graph) -> list[str]:
    """Return the modules of an import cycle, or an empty list."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_modules_import_lower_layers_only(graph: Graph) -> None:
    assert upward_imports(graph) == [] and find_cycle(graph) == []


@pytest.mark.parametrize(
    "module, imported, is_cycle",
    [
        ("model.pipeline.prompt", "model.api.request", False),
        ("model.loading.load", "engine_builder.building.build", False),
        ("model.errors", "model.store.store", True),
        ("gateway.backends", "preheat.local_server.client", False),
    ],
)
def test_finds_a_wrong_import(graph: Graph, module: str, imported: str, is_cycle: bool) -> None:
    changed = graph | {module: graph[module] | {imported}}
    assert upward_imports(changed) == [f"{module} -> {imported}"] and bool(find_cycle(changed)) == is_cycle


def old_names(text: str) -> list[str]:
    """Return the lines with a name of a feature's former special cases, each with its number."""
    return [f"{number}: {line.strip()}" for number, line in enumerate(text.splitlines(), 1) if OLD_NAMES.search(line)]


def test_features_have_no_special_cases() -> None:
    files = {path.relative_to(REPOSITORY).as_posix(): path.read_text() for path in modules("model").values()}
    found = {name: lines for name, text in files.items() if (lines := old_names(text))}
    assert "model/engines/features.py" in found  # it maps the names of older releases
    assert [f"{name}:{line}" for name in sorted(found.keys() - {*FEATURE_MODULES}) for line in found[name]] == []


def test_package_inits_are_empty() -> None:
    """A re-export would import torch for every module of the package."""
    folders = [path for package in PACKAGES for path in (REPOSITORY / package).rglob("__init__.py")]
    assert len(folders) > 20
    assert [path for path in folders if path.stat().st_size] == []


def test_modules_before_torch_import_neither_torch_nor_numpy() -> None:
    names = [name for name in modules("model") if name.startswith(TORCH_FREE)]
    assert set(TORCH_FREE) - {"model.store"} <= set(names) and len(names) > 20
    script = f"""
import sys, {", ".join(names)}
print({{"torch", "numpy"}} & set(sys.modules))
import model.denoising.samplers
print({{"torch", "numpy"}} & set(sys.modules))
"""
    ran = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["set()", "{'numpy'}"]  # the second line shows that imports are noticed


def test_a_feature_with_a_component_and_a_stage_takes_under_eighty_lines() -> None:
    assert len((REPOSITORY / "tests" / "test_extension.py").read_text().splitlines()) < 80
