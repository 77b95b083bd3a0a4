"""The chart of the README: bars of one GPU and one run, each with its source."""

from pathlib import Path

from engine_builder.benchmarks.rows import read_rows
from engine_builder.benchmarks.speed_chart import SECTION, bars

ROWS = read_rows(Path(__file__).parents[2] / "docs" / "benchmarks" / f"{SECTION}.json")


def test_bars_are_of_one_gpu_and_name_their_source() -> None:
    found = bars(ROWS)
    assert {bar.name.partition(" ")[0] for bar in found} == {"Preheat", "diffusers", "TensorRT"}
    assert len(found) == 4 and all("H100" in bar.source for bar in found)
    assert len({bar.source for bar in found if bar.measured}) == 1
    assert all("published by" in bar.source for bar in found if not bar.measured)
    assert [bar.seconds for bar in found] == sorted(bar.seconds for bar in found)


def test_measured_bars_are_the_rows() -> None:
    [own] = [bar for bar in bars(ROWS) if bar.name == "Preheat"]
    [row] = [row for row in ROWS if row.case == "sdxl-30-steps, in turns with diffusers"]
    assert own.seconds == row.p50 / 1000 and row.commit in own.source and row.torch in own.source
