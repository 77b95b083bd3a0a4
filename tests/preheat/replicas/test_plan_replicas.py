"""`preheat plan-replicas`: from measured rows to a recommendation."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from benchmarks.rows import append_rows, make_row
from preheat.commands.plan_replicas import read_curve
from preheat.main import app
from tests.support.repository import REPOSITORY


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan-replicas", *arguments])


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """The rows of closed loops with a server that generates four images at once."""
    rows = [
        make_row(f"closed loop, {clients} clients 64x64", [1.0], "s", "fp32", 10, 1, images_per_second=rate)
        for clients, rate in ((1, 2.0), (2, 3.0), (4, 4.0), (8, 4.1), (16, 4.0))
    ]
    rows.append(make_row("open loop, 2.00 requests/s 64x64", [1.0], "s", "fp32", 10, 1))
    append_rows(tmp_path / "load.json", rows)
    return tmp_path / "load.json"


def test_curve_ends_where_more_clients_only_queue(measured: Path) -> None:
    assert read_curve(measured) == pytest.approx({1: 0.05, 2: 2 / 30, 4: 0.1})


def test_curve_is_of_the_last_measurement(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["preheat", "load", "another/1"])
    case = "closed loop, 2 clients 64x64"
    append_rows(measured, [make_row(case, [1.0], "s", "fp32", 10, 1, images_per_second=1.0)])
    assert read_curve(measured) == {2: 0.2}
    listed = make_row(case, [1.0], "s", "fp32", 10, 1, images_per_second=1.0, requests="mix")
    append_rows(measured, [listed])
    assert read_curve(measured) == {2: 0.2}, "the steps of a list of requests take different times"
    measured.write_text(json.dumps([listed.to_dict()]))
    ran = plan("constant:1", "--load", str(measured), "--cold-start", "1", "--p99", "3")
    assert ran.exit_code == 2 and "no closed loops of equal requests" in " ".join(ran.output.replace("│", " ").split())


def test_writes_settings_of_the_platform(measured: Path, tmp_path: Path) -> None:
    out, plot_file = tmp_path / "production.json", tmp_path / "plan.png"
    ran = plan(
        "constant:3", "--load", str(measured), "--steps", "10", "--cold-start", "20", "--p99", "3", "--hours", "0.3",
        "--max-replica", "3", "--out", str(out), "--plot", str(plot_file),
    )  # fmt: skip
    assert ran.exit_code == 0, ran.output
    settings = json.loads(out.read_text())
    assert settings.keys() == json.loads((REPOSITORY / "truss" / "autoscaling" / "production.json").read_text()).keys()
    assert settings["concurrency_target"] == 4 and 1 <= settings["min_replica"] <= settings["max_replica"] == 3
    assert json.loads(ran.output.splitlines()[-1]) == settings
    assert plot_file.read_bytes().startswith(b"\x89PNG")


def test_forecasts_raise_the_throughput_of_a_replica() -> None:
    """30 steps are 16 evaluations."""
    common = ("constant:1", "--curve", "1:0.02", "--cold-start", "5", "--p99", "30", "--hours", "0.02")
    for options, rate in (((), 1 / 0.6), (("--forecast", "fast"), 1 / 0.32)):
        assert f"generates at most {rate:.2f} images/s" in plan(*common, *options).output


def test_prints_what_images_cost() -> None:
    """A replica that always runs makes 0.25 requests a second: 900 in the hour that costs 3.6."""
    ran = plan(
        "constant:0.25", "--curve", "1:0.1", "--steps", "10", "--cold-start", "1", "--p99", "30", "--hours", "1",
        "--max-replica", "1", "--per-hour", "3.6",
    )  # fmt: skip
    assert ran.exit_code == 0 and "1,000" in ran.output
    rows = [line.replace("best", "").split() for line in ran.output.splitlines() if line.count("%") == 2]
    costs = {float(cells[-2]) for cells in rows}
    assert costs and all(cost == pytest.approx(4, rel=0.2) for cost in costs)
    assert "1,000" not in plan("constant:1", "--curve", "1:0.1", "--cold-start", "1", "--p99", "30").output
    assert plan("constant:1", "--curve", "1:0.1", "--cold-start", "1", "--p99", "1", "--per-hour", "nan").exit_code == 2


def test_reports_an_unreachable_target(measured: Path) -> None:
    ran = plan(
        "constant:3", "--load", str(measured), "--steps", "10", "--cold-start", "20", "--p99", "0.2", "--hours", "0.2"
    )
    assert ran.exit_code == 1
    assert "No setting keeps p99 within 0.2 s" in ran.output


def test_refuses_an_invalid_curve() -> None:
    for arguments in (
        ["--curve", "1:x"], ["--curve", "0:1"], ["--curve", ""], [], ["--curve", "1:1", "--load", "here.json"],
    ):  # fmt: skip
        ran = plan("constant:1", "--cold-start", "1", "--p99", "1", *arguments)
        assert ran.exit_code == 2, ran.output
