"""A row's facts: the GPU as a fake nvidia-smi reports it, the commit and the command."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine_builder.benchmarks.rows import make_row

SMI = """#!/bin/sh
[ "$1" = --id=GPU-1234 ] || exit 6
case "$2" in
  --query-gpu=driver_version) echo 580.1 ;;
  --query-gpu=clocks.sm,clocks.mem) echo 1755, 2619 ;;
  *) exit 2 ;;
esac
"""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """The properties of a fake GPU, which the fake nvidia-smi knows."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(SMI)
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    properties = SimpleNamespace(uuid="1234")
    cuda = SimpleNamespace(
        is_available=lambda: True, get_device_name=lambda _: "a GPU", get_device_properties=lambda _: properties
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    return properties


def test_row_has_driver_and_clocks(gpu: SimpleNamespace) -> None:
    row = make_row("case", [1.0, 2.0, 4.0], "ms", "fp16", 30, 1, note="x").to_dict()
    assert (row["gpu"], row["driver"]) == ("a GPU", "580.1")
    assert row["clocks"] == {"sm_mhz": 1755.0, "memory_mhz": 2619.0}
    assert row["note"] == "x"


def test_row_of_a_gpu_that_the_driver_does_not_know(gpu: SimpleNamespace) -> None:
    gpu.uuid = "another"
    row = make_row("case", [1.0], "ms", "fp16", 30, 1).to_dict()
    assert row["value"] == 1.0 and row["driver"] == "" and "clocks" not in row


def test_row_has_this_codes_commit_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = make_row("case", [1.0], "ms", "fp16", 30, 1).commit
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    author = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
    subprocess.run(["git", *author, "commit", "--quiet", "--allow-empty", "-m", "x"], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    assert make_row("case", [1.0], "ms", "fp16", 30, 1).commit == commit


def test_command_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/x/preheat", "bench", "a/1", "--prompt", "a red circle"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert make_row("case", [1.0], "ms", "fp16", 30, 1).command == "preheat bench a/1 --prompt 'a red circle'"
