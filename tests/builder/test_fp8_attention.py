"""The table and rows of the benchmark of attention in FP8. `test_kernels.py` tests its kernels and measurement."""

import pytest

from engine_builder.benchmarks.fp8_attention import AttentionShape, AttentionTimes, report, rows_of

SHAPE = AttentionShape(2, 10, 4096)


def times_of(fp16: dict[str, list[float]], fp8: dict[str, list[float]]) -> AttentionTimes:
    return AttentionTimes(SHAPE, fp16, fp8, [7.0], dict.fromkeys(fp16, 0.0002) | dict.fromkeys(fp8, 0.03))


def test_shape_counts_both_products() -> None:
    assert SHAPE.gigaflops == pytest.approx(2 * 2 * 2 * 10 * 4096 * 4096 * 64 / 1e9)


def test_report_has_the_fastest_tiles_first_and_their_gain() -> None:
    fp8 = {f"tiles {number}": [100.0 + number] for number in range(20)} | {"best": [50.0, 70.0, 60.0]}
    lines = report([times_of({"cuDNN fp16": [120.0], "flash fp16": [150.0]}, fp8)]).splitlines()
    labels = ("cuDNN fp16", "flash fp16", "FP8 best", "FP8 tiles 0", "FP8 tiles 1")
    assert all(label in line for label, line in zip(labels, lines[1:], strict=False))
    assert "60.0" in lines[3] and " 2.00 " in lines[3] and "0.03000" in lines[3]
    assert len(lines) < 15 and "rounding to E4M3" in lines[-1] and lines[-1].endswith("7.0")


@pytest.mark.parametrize(("fp16", "fp8"), [({}, {"tiles": [10.0]}), ({"cuDNN fp16": [10.0]}, {}), ({}, {})])
def test_report_and_rows_without_forms_that_failed(fp16: dict[str, list[float]], fp8: dict[str, list[float]]) -> None:
    times = [times_of(fp16, fp8)]
    assert len(report(times).splitlines()) == 2 + len(fp16) + len(fp8) == 1 + len(rows_of(times))


def test_row_of_fp8_has_all_tiles() -> None:
    rows = rows_of([times_of({"flash fp16": [80.0]}, {"slow": [90.0], "fast": [40.0]})])
    assert [(row.precision, row.value, row.batch) for row in rows] == [
        ("float16", 80.0, 2), ("fp8", 40.0, 2), ("fp8", 7.0, 2),
    ]  # fmt: skip
    assert rows[1].extra["tiles"] == "fast" and rows[1].extra["by_tiles"] == {"slow": 90.0, "fast": 40.0}
    assert report([]).count("\n") == 0
