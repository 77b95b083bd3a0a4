"""Each promise of docs/features.md, of docs/trust.md and of docs/requests.md has tests, and these exist."""

import ast
import re
from functools import cache

from tests.promises import CAPABILITIES, CHECKS, REQUESTS, TRUST
from tests.support.repository import REPOSITORY


def section(page: str, title: str) -> str:
    return (REPOSITORY / page).read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]


def column(text: str, number: int) -> list[str]:
    """Return the cells of a column of a table, without its header."""
    rows = [line.split("|") for line in text.splitlines() if line.startswith("|")]
    return [row[number].strip() for row in rows[2:]]


def test_every_promise_has_tests() -> None:
    assert column(section("docs/features.md", "What it can do"), 1) == [*CAPABILITIES]
    points = [line[2:] for line in section("docs/features.md", "What is checked").splitlines() if line.startswith("- ")]
    checked = column(section("docs/trust.md", "What is checked"), 2)
    for texts, promises in ((points, CHECKS), (checked, TRUST)):
        assert all(text.startswith(promise) for text, promise in zip(texts, promises, strict=True))
    assert re.findall(r"^## (.*)", (REPOSITORY / "docs" / "requests.md").read_text(), re.MULTILINE) == [*REQUESTS]


@cache
def functions_of(path: str) -> dict[str, bool]:
    """Return the test functions of a file, and whether `make test` runs any of their cases."""
    tree = ast.parse((REPOSITORY / path).read_text())
    of_module = any("pytestmark = pytest.mark.full" in ast.unparse(statement) for statement in tree.body)
    return {
        function.name: not of_module and "pytest.mark.full" not in map(ast.unparse, function.decorator_list)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
    }


def test_make_test_holds_every_promise() -> None:
    """Tests marked `full` exist, and are not the only ones of a promise."""
    for promise, tests in (CAPABILITIES | CHECKS | TRUST | REQUESTS).items():
        names = [test.split("::") for test in tests]
        missing = [test for test, (path, name) in zip(tests, names, strict=True) if name not in functions_of(path)]
        assert missing == [], promise
        assert any(functions_of(path)[name] for path, name in names), promise
