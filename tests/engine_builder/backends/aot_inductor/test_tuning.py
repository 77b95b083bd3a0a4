"""The compiler's measurements: the next build for the same target reuses them."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch._inductor.codecache import PersistentCache
from torch._inductor.runtime.cache_dir_utils import cache_dir

from engine_builder.backends.aot_inductor.tuning import use_tuning_cache


class Candidate:
    """A candidate kernel for a matrix product."""

    def __init__(self, name: str) -> None:
        self.name = name

    def hash_key(self) -> str:
        return self.name


CANDIDATES = [Candidate("triton"), Candidate("cublas")]


def time_candidates(folder: Path) -> tuple[dict[str, float], int]:
    """Look up the candidates in Inductor's cache, as its autotuner does.

    Returns the time of each candidate, and the number of measurements.
    """
    measurements = 0

    def benchmark(candidates: Sequence[Candidate]) -> dict[Candidate, float]:
        nonlocal measurements
        measurements += 1
        return {candidate: 0.5 + index for index, candidate in enumerate(candidates)}

    with use_tuning_cache(folder):
        times = PersistentCache().lookup(CANDIDATES, "mm", "2048x1280x1280 float16", benchmark)
    return {candidate.name: time for candidate, time in times.items()}, measurements


def test_measures_once_per_target(tmp_path: Path) -> None:
    times = {"triton": 0.5, "cublas": 1.5}
    assert time_candidates(tmp_path / "h200") == (times, 1)
    assert time_candidates(tmp_path / "h200") == (times, 0)
    assert time_candidates(tmp_path / "a10g") == (times, 1)


def test_restores_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere")
    with pytest.raises(KeyError), use_tuning_cache(tmp_path / "h200") as folder:
        assert cache_dir() == str(folder) == str(tmp_path / "h200")
        os.environ["TRITON_CACHE_DIR"] = "/elsewhere"  # Inductor sets this variable too, if it is unset
        raise KeyError
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ and os.environ["TRITON_CACHE_DIR"] == "/somewhere"
    default = cache_dir()  # now Inductor itself has set the variable
    with use_tuning_cache(tmp_path / "h200") as folder:
        assert cache_dir() == str(folder) != default


def test_uses_an_explicit_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "chosen"))
    assert time_candidates(tmp_path / "h200")[1] == 1
    assert not (tmp_path / "h200").exists() and any((tmp_path / "chosen" / "cache").iterdir())
