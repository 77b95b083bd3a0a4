"""The layout of model/ and engine_builder/: which module may import which."""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# From the bottom to the top: a module imports its own layer and those before it. A layer is a set of folders and files.
LAYERS: tuple[set[str], ...] = (
    {"errors"},
    {"validation"},
    {"store"},
    {"settings", "cold_start"},
    {"cuda", "images", "weights"},
    {"engines"},
    {"denoising"},
    {"pipeline"},
    {"metrics"},
    {"scheduling"},
    {"loading"},
    {"api"},
    {"model"},
)
# These run before torch is imported, or in a process that never imports it.
TORCH_FREE = (
    "model.store", "model.settings", "model.validation", "model.api.request", "model.engines.signatures",
    "model.engines.tensorrt.api", "model.pipeline.spec", "model.loading.select", "model.loading.runtimes",
    "model.loading.served", "model.loading.target", "model.loading.prefetch", "model.loading.prefetch_worker",
    "model.loading.preload_torch",
)  # fmt: skip
Graph = dict[str, set[str]]


def modules(*packages: str) -> dict[str, Path]:
    """Module name -> file, for all modules of these top-level packages."""
    files = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


def imports(path: Path, known: Iterable[str]) -> Iterator[str]:
    """The modules of `known` that a file imports, in functions and for type checks too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in known else str(node.module)


@pytest.fixture(scope="module")
def graph() -> Graph:
    every = modules("model", "engine_builder")
    return {name: {found for found in imports(path, every) if found in every} for name, path in every.items()}


def layer(module: str) -> int:
    part = module.split(".")[1]
    return next(number for number, parts in enumerate(LAYERS) if part in parts)


def upward_imports(graph: Graph) -> list[str]:
    """Imports of model/ that lead to a higher layer, or out of model/."""
    found = []
    for module, targets in graph.items():
        if module.startswith("model."):
            for target in targets - {"model"}:
                if not target.startswith("model.") or layer(target) > layer(module):
                    found.append(f"{module} -> {target}")
    return sorted(found)


def cycle(graph: Graph) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def with_arrow(graph: Graph, module: str, target: str) -> Graph:
    return graph | {module: graph[module] | {target}}


def test_every_module_of_model_has_a_layer(graph: Graph) -> None:
    assert all(layer(module) >= 0 for module in graph if module.startswith("model."))


def test_no_module_imports_a_higher_layer(graph: Graph) -> None:
    assert upward_imports(graph) == []


@pytest.mark.parametrize(
    "module, target",
    [
        ("model.pipeline.prompt", "model.api.request"),
        ("model.denoising.step", "model.pipeline.params"),
        ("model.store.local", "model.settings"),
        ("model.loading.load", "engine_builder.building.build"),
    ],
)
def test_an_upward_import_is_found(graph: Graph, module: str, target: str) -> None:
    assert upward_imports(with_arrow(graph, module, target)) == [f"{module} -> {target}"]


def test_there_is_no_import_cycle(graph: Graph) -> None:
    assert cycle(graph) == []


def test_an_import_cycle_is_found(graph: Graph) -> None:
    assert cycle(with_arrow(graph, "model.errors", "model.store.store"))


def test_package_inits_are_empty() -> None:
    """A re-export would import torch for every module of the package."""
    folders = [path for package in ("model", "engine_builder") for path in (ROOT / package).rglob("__init__.py")]
    assert len(folders) > 20
    assert [path for path in folders if path.stat().st_size] == []


def heavy_imports(names: Iterable[str], more: str = "") -> set[str]:
    """Which of torch and numpy a fresh interpreter has after importing these modules."""
    script = f"import sys, {', '.join(names)}{more}; print({{'torch', 'numpy'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: set[str] = eval(done.stdout)
    return found


def test_modules_before_torch_import_neither_torch_nor_numpy() -> None:
    names = [name for name in modules("model") if name.startswith(TORCH_FREE)]
    assert set(TORCH_FREE) - {"model.store"} <= set(names) and len(names) > 20
    assert heavy_imports(names) == set()
    assert heavy_imports(names, ", model.denoising.samplers") == {"numpy"}


def test_new_component_and_stage_take_few_lines() -> None:
    assert len((ROOT / "tests" / "test_extension.py").read_text().splitlines()) < 60
