"""The chart of the README: bars of one GPU and one run, each with its source."""

import pytest

from engine_builder.benchmarks.rows import BadRows, read_rows
from engine_builder.benchmarks.speed_chart import SECTION, bars
from tests.support.repository import REPOSITORY

ROWS = read_rows(REPOSITORY / "docs" / "benchmarks" / f"{SECTION}.json")
EAGER = "sdxl-30-steps, diffusers eager"


def test_bars_are_of_one_gpu_and_name_their_source() -> None:
    ordered = bars(ROWS)
    assert {bar.name.partition(" ")[0] for bar in ordered} == {"Preheat", "diffusers", "TensorRT"}
    assert len(ordered) == 4 and all("H100" in bar.source for bar in ordered)
    assert len({bar.source for bar in ordered if bar.is_measured}) == 1
    assert all("published by" in bar.source for bar in ordered if not bar.is_measured)
    assert [bar.seconds for bar in ordered] == sorted(bar.seconds for bar in ordered)


def test_measured_bars_are_the_rows() -> None:
    [preheat] = [bar for bar in bars(ROWS) if bar.name == "Preheat"]
    [row] = [row for row in ROWS if row.case == "sdxl-30-steps, in turns with diffusers"]
    assert preheat.seconds == row.p50 / 1000 and row.commit in preheat.source and row.torch in preheat.source


@pytest.mark.parametrize("entry", ["commit", "gpu", "torch"])
def test_refuses_rows_of_different_runs(entry: str) -> None:
    [row] = [row for row in ROWS if row.case == EAGER]
    other = row.model_copy(update={entry: "another"})
    with pytest.raises(BadRows, match="would compare different runs: .*another"):
        bars([*ROWS, other])


def test_bar_names_the_diffusers_version_of_its_row() -> None:
    rows = [row.model_copy(update={"diffusers": "9.8"}) for row in ROWS if row.case == EAGER]
    assert "diffusers 9.8, eager" in [bar.name for bar in bars(rows)]
