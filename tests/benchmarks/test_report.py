"""The page of benchmarks: generated from the rows, of which invalid ones are refused."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.report import BEGIN, END, plots_of, render, write_report
from benchmarks.rows import BadRows, Row, append_rows, make_row, medians, percentile, read_rows
from benchmarks.speed_chart import SPEED_SECTION, speed_bars
from preheat import main as cli
from tests.support.repository import REPOSITORY

DOCS = REPOSITORY / "docs"
Entries = dict[str, Any]


def row(**changes: Any) -> Entries:
    entries: Entries = {
        "case": "sdxl/1 1024x1024", "value": 10.0, "unit": "ms", "p50": 10.0, "p90": 11.0, "p99": 12.0, "runs": 5,
        "gpu": "a GPU", "driver": "580.1", "torch": "2.13.0", "precision": "fp16", "steps": 30, "batch": 1,
        "commit": "abc1234", "command": "preheat bench sdxl/1",
    }  # fmt: skip
    return entries | changes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "benchmarks").mkdir()
    return tmp_path / "benchmarks"


def write(folder: Path, rows: list[Entries], name: str = "full-size-sdxl") -> None:
    (folder / f"{name}.json").write_text(json.dumps(rows))


# -- committed files ----------------------------------------------------------------------------------------------


def test_committed_pages_match_the_committed_rows() -> None:
    paths = [*DOCS.glob("benchmarks*.md"), DOCS / "scaling.md", REPOSITORY / "README.md"]
    committed = {path: path.read_text() for path in paths}
    assert committed == render(DOCS / "benchmarks", DOCS / "benchmarks.md"), "run `preheat report`"


def test_pages_link_to_exactly_the_existing_plots() -> None:
    text = "".join(path.read_text() for path in DOCS.glob("benchmarks*.md"))
    linked = re.findall(r"\]\((benchmarks/[^)]+\.svg)\)", text)
    assert sorted(linked) == sorted(f"benchmarks/{path.name}" for path in (DOCS / "benchmarks").glob("*.svg"))


# -- the page -----------------------------------------------------------------------------------------------------


def test_headlines_are_on_three_pages(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    folder = folder.rename(tmp_path / "docs" / "benchmarks")
    readme, scaling = tmp_path / "README.md", tmp_path / "docs" / "scaling.md"
    readme.write_text(f"before\n{BEGIN}old\n{END}after\n")
    scaling.write_text("no table\n")
    loaded = row(
        case="8 clients", unit="s", p50=3.0, images_per_second=2.5, memory_gib=20.04, headline="eight | clients"
    )
    shared = row(gpu="NVIDIA H200", p50=500.0, steps=20, gpus=2, headline="two GPUs")
    write(folder, [row(), loaded | {"gpu": "NVIDIA H200", "steps": 20}, shared], "h200")
    texts = render(folder, tmp_path / "docs" / "benchmarks.md")
    assert scaling not in texts and texts[readme].startswith("before\n") and texts[readme].endswith(END + "after\n")
    head, rule, *lines = texts[readme].partition(BEGIN)[2].partition(END)[0].splitlines()
    assert lines == [
        "| [eight \\| clients](docs/benchmarks-h200.md#h200) | H200 | 3 s | 2.5 | 9,000 | 20.0 GiB | abc1234 |",
        "| [two GPUs](docs/benchmarks-h200.md#h200) | 2 H200 | 0.5 s | 2 | 3,600 |  | abc1234 |",
    ]
    first = texts[tmp_path / "docs" / "benchmarks.md"]
    assert "\n".join([head, rule, *lines]).replace("(docs/", "(") in first, "with links from its own folder"


def test_page_has_notes_rows_and_their_provenance(folder: Path) -> None:
    write(folder, [row(), row(case="a | b\nc", steps=20), row(command="echo `id`")], "h200-sdxl")
    write(folder, [], "empty")
    (folder / "h200-sdxl.md").write_text("Measured at night.\n")
    write(folder, [row()], "any-sdxl")
    page = folder.with_suffix(".md")
    pages = render(folder, page)
    first, text = pages[page], pages[page.with_stem("benchmarks-h200")]
    assert re.findall("^## (.*)$", first, re.MULTILINE) == ["Any SDXL"]
    assert "- [Any SDXL](#any-sdxl)\n- [H200 SDXL](benchmarks-h200.md#h200-sdxl)\n" in first
    assert re.findall("^## (.*)$", text, re.MULTILINE) == ["H200 SDXL"]
    assert text.index("## H200") < text.index("Measured at night.") < text.index("| case |")
    assert "| sdxl/1 1024x1024 | fp16 | 30 | 1 | 10 ms | 11 ms | 12 ms | 5 | abc1234 |" in text
    assert "| a \\| b c |" in text and "`echo 'id'`" in text
    assert "- a GPU, driver 580.1, torch 2.13.0, commit abc1234: `preheat bench sdxl/1`" in text
    assert text.count("commit abc1234") == 2, "what rows share is listed once"
    assert "![" not in text


def test_loads_have_further_columns(folder: Path) -> None:
    load = row(case="a load", unit="s", images_per_second=2.345, refused=3, gpu_idle_percent=1.25)
    write(folder, [load, row(case="another")], "h200-load")
    text = render(folder, folder.with_suffix(".md"))[folder.with_name(f"{folder.name}-h200.md")]
    assert "| p99 | runs | images/s | refused | GPU idle | commit |" in text, "no row has memory"
    [measured, other] = [line.split(" | ")[7:] for line in text.splitlines() if line.startswith("| a")]
    assert measured == ["5", "2.35", "3", "1.2 %", "abc1234 |"] and other == ["5", "", "", "", "abc1234 |"]


# -- the plots ----------------------------------------------------------------------------------------------------

SWEEPS: dict[str, tuple[list[Entries], list[str]]] = {
    "one row": ([row()], []),
    "steps": ([row(steps=10, p50=5.0), row(steps=20, p50=9.0)], ["steps"]),
    "steps in the name": ([row(case=f"sdxl-{n}-steps", steps=n, p50=n) for n in (10, 20)], ["steps"]),
    "batch in the name": (
        [row(case="sdxl-20-steps", steps=20), row(case="sdxl-20-steps-batch-4", steps=20, batch=4, p50=30.0)],
        ["batch"],
    ),
    "other names": ([row(case=f"sdxl-{n}", steps=n) for n in (10, 20)], []),
    "batch": ([row(batch=1), row(batch=4, p50=30.0)], ["batch"]),
    "throughput": ([row(batch=n, unit="images/s") for n in (1, 2)], ["batch"]),
    "other cases": ([row(case="a", steps=10), row(case="b", steps=20)], []),
    "other devices": ([row(gpu="a", steps=10), row(gpu="b", steps=20)], []),
    "the same point again": ([row(), row(p50=9.0)], []),
    "stages": ([row(stages={"text": 1, "denoise": 8.5})], ["stages"]),
    "phases": ([row(unit="s", phases={"import": 1.5, "weights": 0.2})], ["cold-start"]),
    "cold starts of other steps": ([row(unit="s", steps=n, phases={"import": 1.5}) for n in (1, 2)], ["cold-start"]),
    "loads": ([row(unit="s", images_per_second=2.0), row(unit="images/s", images_per_second=2.0)], ["latencies"]),
    "bytes": ([row(unit="GiB", steps=10), row(unit="GiB", steps=20)], []),
    "no steps": ([row(steps=0), row(steps=20)], []),
}


def test_plots_depend_on_the_rows() -> None:
    for case, (rows, expected) in SWEEPS.items():
        plots = plots_of("x", [Row(**entries) for entries in rows])
        assert [plot.name.removeprefix("x-") for plot in plots] == expected, case


def test_plots_show_the_rows_values(folder: Path) -> None:
    write(folder, [row(case=f"case {n}", unit="s", phases={"import": 1.25, "warm_up": n}) for n in (1.5, 2.5)], "x")
    [path] = write_report(folder, folder.with_suffix(".md"))
    text = path.read_text()
    assert all(f">{word}<" in text for word in ("case 1.5", "case 2.5", "import", "warm up", "2.75", "3.75"))


def test_plot_of_loads_has_the_percentiles_and_the_rates(folder: Path) -> None:
    write(folder, [row(case="eight clients", unit="s", images_per_second=2.345)], "x")
    [path] = write_report(folder, folder.with_suffix(".md"))
    assert all(f">{word}<" in path.read_text() for word in ("eight clients", "2.35 images/s", "p50", "p90", "p99"))


def test_same_rows_give_same_files_and_old_plots_are_deleted(folder: Path) -> None:
    write(folder, [row(steps=10), row(steps=20)], "x")
    page = folder.parent / "other" / "page.md"
    page.parent.mkdir()
    [path] = write_report(folder, page)
    before = path.read_bytes()
    (folder / "old.svg").write_text("old")
    assert write_report(folder, page) == [path]
    assert path.read_bytes() == before and not (folder / "old.svg").exists()
    assert "](../benchmarks/x-steps.svg)" in page.read_text()


def test_folder_without_rows_is_not_changed(folder: Path) -> None:
    (folder / "mine.svg").write_text("mine")
    with pytest.raises(BadRows, match="no JSON file of rows"):
        write_report(folder, folder.with_suffix(".md"))
    assert (folder / "mine.svg").exists() and not folder.with_suffix(".md").exists()


def test_bars_of_one_case_have_different_labels(folder: Path) -> None:
    write(folder, [row(stages={"text": 1.0}), row(stages={"text": 2.0}), row(stages={"text": 3.0}, batch=2)], "x")
    write_report(folder, folder.with_suffix(".md"))
    labels = re.findall(">30 steps, (.*)</text>", (folder / "x-stages.svg").read_text())
    assert labels == ["batch 1, fp16, abc1234", "batch 1, fp16, abc1234'", "batch 2, fp16, abc1234"]


# -- the chart of the README -----------------------------------------------------------------------------------------


def test_speed_bars_are_of_one_run_and_name_their_source() -> None:
    rows = read_rows(DOCS / "benchmarks" / f"{SPEED_SECTION}.json")
    ordered = speed_bars(rows)
    assert {bar.name.partition(" ")[0] for bar in ordered} == {"Preheat", "diffusers", "TensorRT"}
    assert len(ordered) == 4 and all("H100" in bar.source for bar in ordered)
    assert len({bar.source for bar in ordered if bar.is_measured}) == 1
    assert all("published by" in bar.source for bar in ordered if not bar.is_measured)
    assert [bar.seconds for bar in ordered] == sorted(bar.seconds for bar in ordered)
    [preheat] = [bar for bar in ordered if bar.name == "Preheat"]
    [measured] = [row for row in rows if row.case == "sdxl-30-steps, in turns with diffusers"]
    assert preheat.seconds == measured.p50 / 1000
    assert measured.commit in preheat.source and measured.torch in preheat.source
    [eager] = [row for row in rows if row.case == "sdxl-30-steps, diffusers eager"]
    renamed = speed_bars([eager.model_copy(update={"diffusers": "9.8"})])
    assert "diffusers 9.8, eager" in [bar.name for bar in renamed]
    for entry in ("commit", "gpu", "torch"):
        with pytest.raises(BadRows, match="would compare different runs: .*another"):
            speed_bars([*rows, eager.model_copy(update={entry: "another"})])


# -- rows ---------------------------------------------------------------------------------------------------------


def test_percentiles_are_measured_values() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, share) for share in (0.5, 0.9, 0.99, 1.0)] == [50, 90, 99, 100]
    assert percentile([7.0], 0.99) == 7.0 and percentile([3.0, 1.0, 2.0], 0.5) == 2.0


def test_nine_of_ten_runs_are_as_good_as_p90() -> None:
    for unit, p50, p90 in (("ms", 5.0, 9.0), ("images/s", 6.0, 2.0), ("dB", 6.0, 2.0)):
        measured = make_row("case", [float(value) for value in range(1, 11)], unit, "fp32", 20, 1)
        assert (measured.p50, measured.p90) == (p50, p90), unit


def test_medians_keep_the_order_of_the_phases() -> None:
    runs = [{"a": 1.0, "c": 5.0}, {"a": 3.0, "b": 7.0, "c": 6.0}, {"a": 2.0, "b": 8.0, "c": 7.0}]
    assert list(medians(runs).items()) == [("a", 2.0), ("b", 7.5), ("c", 6.0)]


def test_row_has_all_required_keys(tmp_path: Path) -> None:
    measured = make_row("case", [3.0, 1.0, 2.0, 10.0], "s", "fp32", 20, 2, phases={"import": 1.0}, best=1.0)
    entries = measured.to_dict()
    assert row().keys() | {"phases", "best"} == entries.keys()
    assert (entries["value"], entries["p50"], entries["p99"], entries["runs"]) == (2.5, 2.0, 10.0, 4)
    path = tmp_path / "rows.json"
    append_rows(path, [measured])
    append_rows(path, [measured])
    assert read_rows(path) == [measured, measured]
    assert json.loads(path.read_text()) == [entries, entries]


BAD: dict[str, tuple[Any, str]] = {
    "object for the list": ({}, "valid array"),
    "number for a row": ([7], "row 1: .*object"),
    "a key missing": (
        [row(), {key: value for key, value in row().items() if key != "driver"}],
        "row 2: driver: Field required",
    ),
    "text for a number": ([row(p90="11")], "row 1: p90: .*valid number"),
    "boolean for a number": ([row(runs=True)], "row 1: runs: .*valid integer"),
    "number for text": ([row(gpu=7)], "row 1: gpu: .*valid string"),
    "stages in a list": ([row(stages=[1])], "row 1: stages: "),
    "text for a phase": ([row(phases={"import": "1"})], "row 1: phases: import: .*valid number"),
}


def test_refuses_invalid_rows(folder: Path) -> None:
    for rows, message in BAD.values():
        (folder / "x.json").write_text(json.dumps(rows))
        with pytest.raises(BadRows, match=message):
            render(folder, folder.with_suffix(".md"))
        with pytest.raises(BadRows, match=message):
            append_rows(folder / "x.json", [])


def test_row_has_the_gpus_driver_and_clocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A fake nvidia-smi knows one GPU."""
    smi = tmp_path / "nvidia-smi"
    query = "--query-gpu=driver_version,clocks.sm,clocks.mem"
    smi.write_text(f'#!/bin/sh\n[ "$1" = --id=GPU-1234 ] && [ "$2" = {query} ] && echo 580.1, 1755, 2619\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    gpu = SimpleNamespace(uuid="1234")
    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 2,
        get_device_name=lambda _: "a GPU",
        get_device_properties=lambda _: gpu,
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    known = make_row("case", [1.0, 2.0, 4.0], "ms", "fp16", 30, 1).to_dict()
    assert (known["gpu"], known["driver"]) == ("a GPU", "580.1")
    assert known["clocks"] == {"sm_mhz": 1755.0, "memory_mhz": 2619.0}
    gpu.uuid = "another"
    unknown = make_row("case", [1.0], "ms", "fp16", 30, 1).to_dict()
    assert unknown["value"] == 1.0 and unknown["driver"] == "" and "clocks" not in unknown


def test_row_has_this_codes_commit_and_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = make_row("case", [1.0], "ms", "fp16", 30, 1).commit
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    author = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
    subprocess.run(["git", *author, "commit", "--quiet", "--allow-empty", "-m", "x"], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["/x/preheat", "bench", "a/1", "--prompt", "a red circle"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    measured = make_row("case", [1.0], "ms", "fp16", 30, 1)
    assert measured.commit == commit and measured.command == "preheat bench a/1 --prompt 'a red circle'"


def test_the_command_writes_the_page(folder: Path) -> None:
    write(folder, [row(steps=10), row(steps=20)])
    result = CliRunner().invoke(cli.app, ["report", str(folder)])
    assert result.exit_code == 0, result.output
    assert "## Full size SDXL" in folder.with_suffix(".md").read_text()
    assert (folder / "full-size-sdxl-steps.svg").exists()


def test_bench_defaults_to_latency() -> None:
    for arguments, text in (
        (["latency"], "Measure a request in this process"),
        (["toy/1"], "Measure a request in this process"),
        (["cold-start"], "Measure cold starts of the real server"),
    ):
        assert text in CliRunner().invoke(cli.app, ["bench", *arguments, "--help"]).output
