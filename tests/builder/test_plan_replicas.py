"""`preheat plan-replicas`: from measured rows to a recommendation."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from engine_builder.benchmarks.rows import append_rows, make_row
from engine_builder.commands.main import app
from engine_builder.commands.plan import _measured_points


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan-replicas", *arguments])


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """Closed loops of a server that takes four images at once."""
    rows = [
        make_row(f"closed loop, {clients} clients 64x64", [1.0], "s", "fp32", 10, 1, extra={"images_per_second": rate})
        for clients, rate in ((1, 2.0), (2, 3.0), (4, 4.0), (8, 4.1), (16, 4.0))
    ]
    rows.append(make_row("open loop, 2.00 requests/s 64x64", [1.0], "s", "fp32", 10, 1))
    append_rows(tmp_path / "load.json", rows)
    return tmp_path / "load.json"


def test_the_curve_is_what_was_measured_up_to_where_more_clients_only_wait(measured: Path) -> None:
    assert _measured_points(measured) == pytest.approx({1: 0.05, 2: 2 / 30, 4: 0.1})


def test_a_plan_names_a_setting_that_the_platform_takes(measured: Path, tmp_path: Path) -> None:
    out, picture = tmp_path / "production.json", tmp_path / "plan.png"
    ran = plan(
        "constant:3", "--load", str(measured), "--steps", "10", "--cold-start", "20", "--p99", "3", "--hours", "0.3",
        "--max-replica", "3", "--out", str(out), "--plot", str(picture),
    )  # fmt: skip
    assert ran.exit_code == 0, ran.output
    settings = json.loads(out.read_text())
    assert settings.keys() == json.loads(Path("truss/autoscaling/production.json").read_text()).keys()
    assert settings["concurrency_target"] == 4 and 1 <= settings["min_replica"] <= settings["max_replica"] == 3
    assert json.loads(ran.output.splitlines()[-1]) == settings
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_target_out_of_reach_is_said(measured: Path) -> None:
    ran = plan(
        "constant:3", "--load", str(measured), "--steps", "10", "--cold-start", "20", "--p99", "0.2", "--hours", "0.2"
    )
    assert ran.exit_code == 1
    assert "No setting keeps p99 within 0.2 s" in ran.output


@pytest.mark.parametrize(
    "wrong",
    [["--curve", "1:x"], ["--curve", "0:1"], ["--curve", ""], [], ["--curve", "1:1", "--load", "here.json"]],
)
def test_a_curve_that_is_none_is_refused(wrong: list[str]) -> None:
    ran = plan("constant:1", "--cold-start", "1", "--p99", "1", *wrong)
    assert ran.exit_code == 2, ran.output
