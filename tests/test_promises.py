"""Each promise of the README has tests, and these exist."""

import ast

from tests.promises import CAPABILITIES, CHECKS
from tests.support.repository import REPOSITORY


def readme_section(title: str) -> str:
    return (REPOSITORY / "README.md").read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_every_promise_of_the_readme_has_tests() -> None:
    table = [line.split("|")[1].strip() for line in readme_section("What it can do").splitlines() if "|" in line]
    assert table[2:] == [*CAPABILITIES]  # after the header and the rule
    points = [line[2:] for line in readme_section("What is checked").splitlines() if line.startswith("- ")]
    assert len(points) == len(CHECKS)
    assert all(point.startswith(check) for point, check in zip(points, CHECKS, strict=True))


def test_tests_of_promises_exist() -> None:
    missing = []
    for test in {test for tests in (CAPABILITIES | CHECKS).values() for test in tests}:
        path, _, name = test.partition("::")
        functions = ast.walk(ast.parse((REPOSITORY / path).read_text()))
        if not any(isinstance(function, ast.FunctionDef) and function.name == name for function in functions):
            missing.append(test)
    assert missing == []
