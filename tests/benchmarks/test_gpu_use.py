"""Samples of GPUs, from a program in place of nvidia-smi."""

from pathlib import Path

import pytest

from benchmarks.gpu_use import GpuUse
from tests.support.waiting import eventually

SAMPLES = "90, 2048\n70, 1024\n100, 20"  # the last line is not complete


@pytest.mark.parametrize(
    "printed, entries",
    [
        (SAMPLES, {"gpus": 2, "gpu_idle_percent": 20, "memory_gib": 2}),
        ("[N/A], 2048\n80, 1024\n", {"gpus": 2, "gpu_idle_percent": 20, "memory_gib": 1}),
        ("No devices were found\n", {}),
        ("", {}),
    ],
)
def test_reads_samples_of_the_named_gpus(
    printed: str, entries: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, begun = tmp_path / "nvidia-smi", tmp_path / "begun"
    (tmp_path / "printed").write_text(printed)
    program.write_text(
        f'#!/bin/sh\n[ "$1" = --id=GPU-1,GPU-2 ] && cat {tmp_path}/printed\ntouch {begun}\nexec sleep 60\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with GpuUse(["GPU-1", "GPU-2"]) as use:
        eventually(begun.exists, "all samples")
    assert use.entries == entries


def test_samples_nothing_without_gpus_or_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    for ids in ([], ["GPU-1"]):
        with GpuUse(ids) as use:
            pass
        assert use.entries == {}
