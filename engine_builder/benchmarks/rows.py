"""A benchmark's rows: one measured case each, with all that is needed to doubt it. Kept in docs/benchmarks/*.json.

A file is a list of rows, in the order they were measured. A row has at least the keys of `REQUIRED`; which others it
has (`stages` in ms, `phases` in s, a bucket, a note) is the benchmark's business, and the report shows what it knows of
them.
"""

import json
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from model.errors import PreheatError

REQUIRED = (
    "case", "value", "unit", "p50", "p90", "p99", "runs", "gpu", "driver", "torch", "precision", "steps", "batch",
    "commit", "command",
)  # fmt: skip
_NUMBERS = ("value", "p50", "p90", "p99")
_MORE_IS_BETTER = {"images/s", "dB"}
_COUNTS = ("runs", "steps", "batch")


class BadRows(PreheatError):
    """A file of rows that cannot be read."""


@dataclass(frozen=True)
class Row:
    """One measured case. `value` is the median of the runs; `stages` (ms) and `phases` (s) are medians. 90 % of the
    runs are as good as `p90` or better: as low, or of images/s and dB as high.

    `gpu` is the device: a GPU's name, or a CPU's with the number of threads.
    """

    case: str
    value: float
    unit: str
    p50: float
    p90: float
    p99: float
    runs: int
    gpu: str
    driver: str
    torch: str
    precision: str
    steps: int
    batch: int
    commit: str
    command: str
    stages: Mapping[str, float] = field(default_factory=dict)
    phases: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As it is kept: without what is empty, and with what `extra` holds beside the rest."""
        entries = {name: getattr(self, name) for name in REQUIRED}
        entries |= {name: dict(found) for name in ("stages", "phases") if (found := getattr(self, name))}
        return entries | dict(self.extra)


def make_row(
    case: str,
    values: Sequence[float],
    unit: str,
    precision: str,
    steps: int,
    batch: int,
    *,
    digits: int = 1,
    stages: Mapping[str, float] | None = None,
    phases: Mapping[str, float] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Row:
    """A row of these values, measured in this process's environment by the command it was started with."""
    sign = -1 if unit in _MORE_IS_BETTER else 1
    signed = [sign * value for value in values]
    p50, p90, p99 = (sign * round(percentile(signed, share), digits) for share in (0.5, 0.9, 0.99))
    return Row(
        case=case,
        value=round(statistics.median(values), digits),
        unit=unit,
        p50=p50,
        p90=p90,
        p99=p99,
        runs=len(values),
        gpu=device_name(),
        driver=_driver(),
        torch=version("torch"),
        precision=precision,
        steps=steps,
        batch=batch,
        commit=_commit(),
        command=command_line(),
        stages=stages or {},
        phases=phases or {},
        extra=_clocks() | dict(extra or {}),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    rank = max(1, -(-len(ordered) * share // 1))
    return ordered[int(rank) - 1]


def medians(runs: Sequence[Mapping[str, float]], digits: int = 2) -> dict[str, float]:
    """Of what each run gives by name; the names in the order of the last run, which has them all."""
    names = dict.fromkeys(name for run in reversed(runs) for name in run)
    return {name: round(statistics.median([run[name] for run in runs if name in run]), digits) for name in names}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, checked. Raises BadRows."""
    try:
        rows = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadRows(f"{path} holds no rows of a benchmark ({error}): mend it or delete it.") from error
    if not isinstance(rows, list):
        raise BadRows(f"{path} holds no list of rows: mend it or delete it.")
    for number, row in enumerate(rows, start=1):
        if problem := _problem(row):
            raise BadRows(f"{path}: row {number} {problem}: mend it, or measure it again.")
    return rows


def append_rows(path: Path, rows: Sequence[Row]) -> None:
    """Add to a file of rows; it is made where there is none."""
    kept = read_rows(path) if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(kept + [row.to_dict() for row in rows], indent=1) + "\n")


def _problem(row: Any) -> str:
    """What is wrong with a row, "" if nothing is."""
    if not isinstance(row, dict):
        return "is no object"
    if missing := [name for name in REQUIRED if name not in row]:
        return f"lacks {', '.join(missing)}"
    for name in REQUIRED:
        kinds = (int, float) if name in _NUMBERS else (int,) if name in _COUNTS else (str,)
        if type(row[name]) not in kinds:
            return f"has {row[name]!r:.40} for its {name}"
    for name in ("stages", "phases"):
        parts = row.get(name, {})
        if not isinstance(parts, dict) or not all(type(value) in (int, float) for value in parts.values()):
            return f"has {name} that are no numbers by name"
    return ""


def device_name() -> str:
    """The GPU's name, or the CPU's model and how many threads torch uses."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    return f"{cpu}, {torch.get_num_threads()} threads"


def command_line() -> str:
    """What this process was started with, as a person would type it."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    name = f"python -m {module.name}" if module else Path(sys.argv[0]).name
    return " ".join([name, *map(shlex.quote, sys.argv[1:])])


def _driver() -> str:
    found = _ask_gpu("driver_version")
    return found[0] if found else ""


def _clocks() -> dict[str, dict[str, float]]:
    """A GPU's clocks in MHz, as found right after the last run."""
    found = _ask_gpu("clocks.sm", "clocks.mem")
    return {"clocks": {"sm_mhz": float(found[0]), "memory_mhz": float(found[1])}} if found else {}


def _ask_gpu(*fields: str) -> list[str]:
    """What the driver says of the GPU that torch uses first; nothing where it uses none."""
    import torch

    if not torch.cuda.is_available():
        return []
    identity = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    query = ["nvidia-smi", f"--id={identity}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True)
    return [value.strip() for value in answer.stdout.split(",")] if answer.returncode == 0 else []


def _commit() -> str:
    """This code's, marked where files differ from it; unknown where it lies in no repository."""
    here = Path(__file__).parent
    try:
        asked = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"], cwd=here, capture_output=True, text=True
        )
    except FileNotFoundError:
        return "unknown"
    return asked.stdout.strip() or "unknown"
