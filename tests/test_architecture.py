"""docs/architecture.md has the walks of the current code. Its tracer counts functions as the page states."""

import ast
import importlib
import importlib.util
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from engine_builder.architecture.promises import CAPABILITIES, CHECKS
from engine_builder.architecture.trace import Function, Tracer, Walk, mark_steps, without
from engine_builder.stores.store import WritableStore

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "architecture.md"
OUTER = """
from .inner import Shape, helper
from . import inner

def enter(): return sum(local(n) for n in [1, 2]) + (lambda: helper())()
def local(n): return n
def run_forever(wait):
    wait()
    return helper()
"""
INNER = """
def helper(): return _private()
def _private():
    def nested(): return Shape().side
    return nested()

class Shape:
    def __init__(self): self.length = 2
    @property
    def side(self): return self.length
"""
Functions = dict[tuple[str, str], Function]


@pytest.fixture
def outer(tmp_path: Path) -> Iterator[ModuleType]:
    for name, text in (("__init__", ""), ("inner", INNER), ("outer", OUTER)):
        (tmp_path / f"{name}.py").write_text(text)
    spec = importlib.util.spec_from_file_location("traced", tmp_path / "__init__.py", submodule_search_locations=[])
    assert spec is not None and spec.loader is not None
    spec.submodule_search_locations = [str(tmp_path)]
    sys.modules["traced"] = importlib.util.module_from_spec(spec)
    yield importlib.import_module("traced.outer")
    for name in [name for name in sys.modules if name.startswith("traced")]:
        del sys.modules[name]


def stop_tracing() -> None:
    sys.setprofile(None)
    threading.setprofile(None)  # type: ignore[arg-type]


def record(folder: Path, work: Callable[[], object], thread: str = "traced") -> Functions:
    """Run `work` in a thread of that name, and return the recorded functions. A tracer ignores pytest's own thread."""
    tracer = Tracer(folder, ["traced"])
    found: Functions = {}

    def trace() -> None:
        tracer.install()
        with tracer.recording() as walk:
            work()
        stop_tracing()
        found.update(walk.functions)

    worker = threading.Thread(target=trace, name=thread)
    worker.start()
    worker.join()
    return found


def test_page_has_the_walks_of_the_code(store: WritableStore, release: str, tmp_path: Path) -> None:
    page = tmp_path / "architecture.md"
    command = [sys.executable, "-m", "engine_builder.architecture.document", store.url, release, "--out", str(page)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    remedy = f"Run `python -m engine_builder.architecture.document {store.url} {release}`."
    assert PAGE.read_text() == page.read_text(), remedy


def test_counts_functions_entered_from_another_module(outer: ModuleType, tmp_path: Path) -> None:
    functions = record(tmp_path, outer.enter)
    assert [*functions] == [
        ("outer", "enter"), ("outer", "local"), ("inner", "helper"), ("inner", "_private"), ("inner", "Shape.__init__"),
    ]  # fmt: skip
    entered = [name for (_, name), function in functions.items() if function.is_entered]
    assert entered == ["enter", "helper"]
    assert functions["outer", "local"].calls == 2
    assert functions["inner", "helper"].caller == ("outer", "enter")


def test_lists_a_function_that_ran_before_recording(outer: ModuleType, tmp_path: Path) -> None:
    tracer = Tracer(tmp_path, ["traced"])
    started, resumed = threading.Event(), threading.Event()

    def work() -> None:
        tracer.install()
        outer.run_forever(lambda: (started.set(), resumed.wait()))
        stop_tracing()

    worker = threading.Thread(target=work, name="traced")
    worker.start()
    started.wait()
    with tracer.recording() as walk:
        resumed.set()
        worker.join()
    assert [name for _, name in walk.functions] == ["run_forever", "helper", "_private", "Shape.__init__"]


def walk_of(*functions: Function) -> Walk:
    return Walk({function.key: function for function in functions})


def test_marks_functions_that_run_in_every_step() -> None:
    def walk(**calls: int) -> Walk:
        return walk_of(*(Function(("loop", name), "traced", None, count, True) for name, count in calls.items()))

    four = walk(step=4, twice=8, prompt=6, once=1)
    mark_steps(four, walk(step=8, twice=16, prompt=6, once=1), 4)
    assert [name for (_, name), function in four.functions.items() if function.in_each_step] == ["step", "twice"]


def test_difference_keeps_the_callers_of_a_new_function() -> None:
    enter = Function(("loop", "enter"), "traced", None, 1, True)
    cached = Function(("loop", "cached"), "traced", enter.key, 1)
    make = Function(("loop", "make"), "traced", cached.key, 1)
    other = Function(("step", "guide"), "traced", enter.key, 1, True)
    difference = without(walk_of(enter, cached, make, other), walk_of(enter, cached, other))
    assert [*difference.functions.values()] == [enter, cached, make]


def test_ignores_other_threads(outer: ModuleType, tmp_path: Path) -> None:
    assert record(tmp_path, outer.enter, thread="other") == {}


def readme_section(title: str) -> str:
    return (REPOSITORY / "README.md").read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_every_promise_of_the_readme_has_tests() -> None:
    table = [line.split("|")[1].strip() for line in readme_section("What it can do").splitlines() if "|" in line]
    assert table[2:] == [*CAPABILITIES]  # after the header and the rule
    points = [line[2:] for line in readme_section("What is checked").splitlines() if line.startswith("- ")]
    assert len(points) == len(CHECKS)
    assert all(point.startswith(check) for point, check in zip(points, CHECKS, strict=True))


@pytest.mark.parametrize("test", sorted({test for tests in (CAPABILITIES | CHECKS).values() for test in tests}))
def test_test_of_a_promise_exists(test: str) -> None:
    path, _, name = test.partition("::")
    functions = ast.walk(ast.parse((REPOSITORY / path).read_text()))
    assert any(isinstance(function, ast.FunctionDef) and function.name == name for function in functions)
