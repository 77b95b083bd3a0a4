"""The command that prepares and measures full-size models: order, failures, and a repeated call. On commands that write
files in place of builds; the real plan is only checked for what it names."""

from pathlib import Path

import pytest

from engine_builder.benchmarks.full_size import Models, Work, needed_work, plan, run_all


def appends(folder: Path, word: str, status: int = 0) -> tuple[str, ...]:
    """Return a command that appends a word to a file and ends with this status."""
    code = f"open({str(folder / 'order.txt')!r}, 'a').write('{word} '); print('of {word}'); 1 / {int(not status)}"
    return ("timeit", "-n1", "-r1", code)


def order(folder: Path) -> list[str]:
    return (folder / "order.txt").read_text().split()


def test_work_waits_for_what_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepared = [
        Work("model", (appends(tmp_path, "model"),)),
        Work("release", (appends(tmp_path, "build"), appends(tmp_path, "publish")), ("model",)),
    ]
    measured = [Work(name, (appends(tmp_path, name),), ("release",)) for name in ("text", "images")]
    assert run_all(tmp_path, prepared, measured)
    assert order(tmp_path) == ["model", "build", "publish", "text", "images"]
    assert "publish" in (tmp_path / "logs" / "release-1.txt").read_text()
    assert run_all(tmp_path, prepared, measured)
    assert len(order(tmp_path)) == 5, "what has succeeded is not run again"
    more = [*measured, Work("controls", (appends(tmp_path, "controls"),), ("release",))]
    assert run_all(tmp_path, prepared, more)
    assert order(tmp_path)[5:] == ["controls"]


def test_failure_stops_only_what_needs_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepared = [
        Work("model", ()),
        Work("broken", (appends(tmp_path, "broken", status=3), appends(tmp_path, "never")), ("model",)),
        Work("intact", (appends(tmp_path, "intact"),), ("model",)),
    ]
    measured = [Work("first", (appends(tmp_path, "first"),), ("broken",))]
    measured += [Work("second", (appends(tmp_path, "second"),), ("intact",))]
    assert not run_all(tmp_path, prepared, measured)
    assert sorted(order(tmp_path)) == ["broken", "intact", "second"]
    printed = capsys.readouterr().out
    assert "broken: failed after" in printed and "\n  of broken" in printed
    assert "first: skipped, because broken failed" in printed
    (tmp_path / "order.txt").write_text("")
    prepared[1] = Work("broken", (appends(tmp_path, "repaired"),), ("model",))
    assert run_all(tmp_path, prepared, measured)
    assert order(tmp_path) == ["repaired", "first"]


def test_plan_prepares_only_what_is_measured(tmp_path: Path) -> None:
    prepared, measured = plan(tmp_path, Models(), "1024x1024", "512x512", 30, 10, 5)
    assert [work.name for work in needed_work(prepared, measured)] == [work.name for work in prepared]
    of = {work.name: work for work in measured}
    assert [work.name for work in needed_work(prepared, [of["sd-text"]])] == ["sd"]
    assert [work.name for work in needed_work(prepared, [of["adapters"]])] == ["sdxl-model", "sdxl-lora"]
    for work in (*prepared, *measured):
        assert set(work.needs) <= {other.name for other in prepared}
    own = Models(Path("a"), Path("b"), (("edges", Path("c")),))
    prepared, measured = plan(tmp_path, own, "256x256", "64x64", 2, 1, 1)
    commands = [" ".join(command) for work in (*prepared, *measured) for command in work.commands]
    assert [command for command in commands if "random" in command and "random_ip_adapter" not in command] == []
    assert any("build a " in command and "--controlnet edges=c" in command for command in commands)


def test_builds_at_the_same_time_have_a_gpu_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    visible = "import os, pathlib, time\n"
    visible += f"gpu = pathlib.Path({str(tmp_path)!r}, 'gpu-' + os.environ['CUDA_VISIBLE_DEVICES'])\n"
    visible += "gpu.touch()\n"
    visible += "end = time.monotonic() + 60\n"
    visible += "while len(list(gpu.parent.glob('gpu-*'))) < 2 and time.monotonic() < end: time.sleep(0.01)"
    both = [Work(name, (("timeit", "-n1", "-r1", visible),)) for name in ("one", "other")]
    assert run_all(tmp_path, both, [], at_once=2, gpus=2)
    assert {path.name for path in tmp_path.glob("gpu-*")} == {"gpu-2", "gpu-3"}


def test_several_gpus_also_share_an_image(tmp_path: Path) -> None:
    prepared, measured = plan(tmp_path, Models(), "1024x1024", "512x512", 30, 10, 5, gpus=2)
    [shared] = [work for work in measured if work.name == "multi-gpu"]
    assert [work.name for work in needed_work(prepared, [shared])] == ["sdxl-model", "sdxl-bands"]
    commands = [" ".join(command) for command in shared.commands]
    assert len(commands) == 4 and sum("--bands 2" in command for command in commands) == 2
    assert sum("--size 2048x2048" in command for command in commands) == 2
