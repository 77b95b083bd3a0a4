"""The rows of a benchmark. Each is one measured case, with everything that is needed to repeat it.

Rows are stored in docs/benchmarks/*.json. A file is a list of rows in the order of their measurement.
"""

import json
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from benchmarks.gpu_use import gpu_ids
from engine_builder.files import check_writable, read_file, write_file
from model.errors import PreheatError

_HIGHER_IS_BETTER = {"images/s", "dB"}


class BadRows(PreheatError):
    """A file of rows cannot be read, or is invalid."""

    remedy = "Fix the file, or delete it and measure again."


class Row(BaseModel):
    """One measured case. `value` is the median of the runs; `stages` (ms) and `phases` (s) are medians.

    90 % of the runs are at least as good as `p90`: at most as high, or for images/s and dB at least as high. `gpu`: the
    GPU's name, or the CPU's name and number of threads. A benchmark may add its own entries, see `extra`.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

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
    stages: dict[str, float] = {}
    phases: dict[str, float] = {}

    @property
    def extra(self) -> dict[str, Any]:
        """The entries that only some benchmarks have."""
        return self.model_extra or {}

    def to_dict(self) -> dict[str, Any]:
        """Return the row as it is stored: without empty stages and phases."""
        return self.model_dump(exclude_defaults=True)


_ROWS = TypeAdapter(list[Row])


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
    **extra: Any,
) -> Row:
    """Return a row of values that this process measured. Device, versions and command are added.

    `digits`: decimal places of the values. `extra`: entries of this benchmark only.
    """
    import torch

    driver, *clocks = _query_gpu("driver_version", "clocks.sm", "clocks.mem") or [""]
    sign = -1 if unit in _HIGHER_IS_BETTER else 1
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
        gpu=_device_name(),
        driver=driver,
        torch=str(torch.__version__),
        precision=precision,
        steps=steps,
        batch=batch,
        commit=_commit(),
        command=_command_line(),
        stages=dict(stages or {}),
        phases=dict(phases or {}),
        **({"clocks": {"sm_mhz": float(clocks[0]), "memory_mhz": float(clocks[1])}} if clocks else {}),
        **extra,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    rank = max(1, -(-len(ordered) * share // 1))
    return ordered[int(rank) - 1]


def medians(runs: Sequence[Mapping[str, float]], digits: int = 2) -> dict[str, float]:
    """Return the median of each name over the runs that have it. The last run has all names, and gives their order."""
    names = dict.fromkeys(name for run in reversed(runs) for name in run)
    return {name: round(statistics.median([run[name] for run in runs if name in run]), digits) for name in names}


def read_rows(path: Path) -> list[Row]:
    """Read a file of rows. Raises BadRows."""
    try:
        return _ROWS.validate_json(read_file(path))
    except OSError as error:
        raise BadRows(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        number, *keys = problem["loc"] or ("",)
        where = f"row {number + 1}: " if isinstance(number, int) else ""
        raise BadRows(f"{path}: {where}{''.join(f'{key}: ' for key in keys)}{problem['msg']}.") from error


def check_rows_file(path: Path | None) -> None:
    """Raise BadRows or NotWritable if rows could not be appended to `path`. Call it before they are measured."""
    if path is not None:
        check_writable(path)
        if path.exists():
            read_rows(path)


def append_rows(path: Path, rows: Sequence[Row]) -> None:
    """Append to a file of rows, which is created if it does not exist. Raises BadRows and NotWritable."""
    rows = [*(read_rows(path) if path.exists() else []), *rows]
    write_file(path, (json.dumps([row.to_dict() for row in rows], indent=1) + "\n").encode())


def finish(rows: Sequence[Row], out: Path | None) -> None:
    """Print the rows as one line of JSON, and append them to the file `out` unless it is None."""
    print(json.dumps([row.to_dict() for row in rows]))  # first, so that they are not lost if the file is refused
    if out is not None:
        append_rows(out, rows)


def _device_name() -> str:
    """Return the GPU's name, or the CPU's model and the number of torch's threads."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    return f"{cpu}, {torch.get_num_threads()} threads"


def _command_line() -> str:
    """Return the command that started this process, as typed in a shell."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    name = f"python -m {module.name.removesuffix('.__main__')}" if module else Path(sys.argv[0]).name
    return " ".join([name, *map(shlex.quote, sys.argv[1:])])


def _query_gpu(*fields: str) -> list[str]:
    """Return the values of nvidia-smi's `fields` for torch's first GPU. Empty without a GPU."""
    ids = gpu_ids(1)
    if not ids:
        return []
    query = ["nvidia-smi", f"--id={ids[0]}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True)
    return [value.strip() for value in answer.stdout.split(",")] if answer.returncode == 0 else []


def _commit() -> str:
    """Return the repository's commit, marked if files differ from it; "unknown" outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        answer = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except FileNotFoundError:
        return "unknown"
    return answer.stdout.strip() or "unknown"
