"""Options of pytest that select tests: --write-skipped and --part.

`make test-skipped` runs the skipped tests once their tools are installed. `make full PART=2/10` runs a tenth of the
tests marked `full`.
"""

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-skipped", type=Path, metavar="FILE", help="Write the names of skipped tests to FILE.")
    parser.addoption("--part", metavar="K/N", help="Run part K of N: every N-th file that has selected tests.")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave only the tests of --part, after -m has selected."""
    if part := config.getoption("--part"):
        number, _, parts = part.partition("/")
        files = sorted({item.path for item in items})
        chosen = set(files[int(number) - 1 :: int(parts)])
        config.hook.pytest_deselected(items=[item for item in items if item.path not in chosen])
        items[:] = [item for item in items if item.path in chosen]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write the names of skipped test functions and test files, one a line, which `pytest @FILE` reads.

    Without their parameters, which may be others once the tools are installed.
    """
    file: Path | None = config.getoption("--write-skipped")
    if file is not None:
        names = dict.fromkeys(report.nodeid.partition("[")[0] for report in terminalreporter.stats.get("skipped", []))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{name}\n" for name in names))
