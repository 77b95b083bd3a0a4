"""docs/architecture.md lists the functions that run. The tracer counts functions as the page states."""

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
from engine_builder.architecture.trace import Function, FunctionId, Recording, Tracer, mark_steps, subtract
from engine_builder.stores.store import WritableStore

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "architecture.md"
OUTER = """
from .inner import Shape, helper
from . import inner

from functools import cached_property

class Outer:
    class Nested:
        @property
        def height(self): return 1
        @cached_property
        def width(self): return 2

def read_properties(): return Outer.Nested().height + Outer.Nested().width
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
Functions = dict[FunctionId, Function]


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
        with tracer.recording() as recording:
            work()
        stop_tracing()
        found.update(recording.functions)

    worker = threading.Thread(target=trace, name=thread)
    worker.start()
    worker.join()
    return found


def test_page_lists_the_functions_that_run(store: WritableStore, release: str, tmp_path: Path) -> None:
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
    entered = [name for (_, name), function in functions.items() if function.is_entry]
    assert entered == ["enter", "helper"]
    assert functions["outer", "local"].call_count == 2
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
    with tracer.recording() as recording:
        resumed.set()
        worker.join()
    assert [name for _, name in recording.functions] == ["run_forever", "helper", "_private", "Shape.__init__"]


def recording_of(*functions: Function) -> Recording:
    return Recording({function.id: function for function in functions})


def entry(module: str, name: str, call_count: int = 1) -> Function:
    return Function(FunctionId(module, name), "traced", caller=None, call_count=call_count, is_entry=True)


def helper(name: str, caller: Function) -> Function:
    """Return a function of the caller's module that only the caller called."""
    return Function(FunctionId(caller.module, name), "traced", caller.id, call_count=1)


def test_marks_functions_that_run_in_every_step() -> None:
    def record_calls(**call_counts: int) -> Recording:
        return recording_of(*(entry("loop", name, count) for name, count in call_counts.items()))

    four_steps = record_calls(step=4, twice=8, prompt=6, once=1)
    eight_steps = record_calls(step=8, twice=16, prompt=6, once=1)
    mark_steps(four_steps, eight_steps, additional_steps=4)
    assert [id.name for id, function in four_steps.functions.items() if function.in_each_step] == ["step", "twice"]


def test_difference_keeps_the_callers_of_a_new_function() -> None:
    enter, guide = entry("loop", "enter"), entry("step", "guide")
    cached = helper("cached", caller=enter)
    make = helper("make", caller=cached)
    difference = subtract(recording_of(enter, cached, make, guide), recording_of(enter, cached, guide))
    assert [*difference.functions.values()] == [enter, cached, make]


def test_leaves_out_nested_and_cached_properties(outer: ModuleType, tmp_path: Path) -> None:
    functions = record(tmp_path, outer.read_properties)
    assert [id.name for id in functions] == ["read_properties"]


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
