"""Pytest's option --write-skipped: `make test-skipped` runs the skipped tests once their tools are installed."""

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-skipped", type=Path, metavar="FILE", help="Write the names of skipped tests to FILE.")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write the names of skipped test functions and test files, one a line, which `pytest @FILE` reads.

    Without their parameters, which may be others once the tools are installed.
    """
    file: Path | None = config.getoption("--write-skipped")
    if file is not None:
        names = dict.fromkeys(report.nodeid.partition("[")[0] for report in terminalreporter.stats.get("skipped", []))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{name}\n" for name in names))
