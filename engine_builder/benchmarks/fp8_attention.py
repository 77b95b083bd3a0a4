"""Time self-attention of SDXL's UNet at 1024x1024 in fp16 and in FP8, on the GPU of this machine.

    python -m engine_builder.benchmarks.fp8_attention --batch 2 16 --out rows.json

For each shape, in microseconds of the kernel alone: PyTorch's attention in fp16 by cuDNN and by FlashAttention, and the
FP8 kernel on E4M3 queries, keys and values with each choice of tiles. The rounding of fp16 queries, keys and values to
E4M3 in one pass is timed separately. The error of each is relative by norm, against attention in fp32.

Inputs are random: normal distributions, whose queries are scaled so that few keys have most of the weight. Four sets
of them take turns. A choice or shape that fails is left out, and its error is printed. The table comes last, after the
rows as JSON.
"""

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine_builder.benchmarks.choices import Failures, time_choices
from engine_builder.benchmarks.rows import Row, finish, make_row
from engine_builder.building.graph_timing import Timer, Work, time_on_gpu
from model.weights.fp8 import E4M3_MAX

if TYPE_CHECKING:
    from engine_builder.benchmarks.fp8_attention_kernels import AttentionTiles

WIDTH = 64  # of a head
_LEVELS = ((10, 4096), (20, 1024))  # heads and tokens of the UNet's two levels with attention
_BACKENDS = {"cuDNN fp16": SDPBackend.CUDNN_ATTENTION, "flash fp16": SDPBackend.FLASH_ATTENTION}
_SETS = 4  # of tensors
_QUERY_SCALE = 3.0  # also the standard deviation of the scores
_LISTED_TILES = 8  # in the table; rows have all


@dataclass(frozen=True)
class AttentionShape:
    """The shape of self-attention in heads that are 64 wide. batch: entries of the UNet's batch."""

    batch: int
    heads: int
    tokens: int

    @property
    def gigaflops(self) -> float:
        """Of both products."""
        return 4e-9 * self.batch * self.heads * self.tokens**2 * WIDTH

    def __str__(self) -> str:
        return f"{self.batch} x {self.heads} heads x {self.tokens} tokens"


@dataclass(frozen=True)
class AttentionTimes:
    """The times of one shape in microseconds, of each repetition.

    fp16: by backend. fp8: by the tiles' name. quantization: in one pass. errors: by backend or tiles, relative by norm.
    """

    shape: AttentionShape
    fp16: dict[str, list[float]]
    fp8: dict[str, list[float]]
    quantization: list[float]
    errors: dict[str, float]


def candidate_tiles() -> "list[AttentionTiles]":
    """Return the tiles that are compared. All fit the registers and shared memory of an H100."""
    from engine_builder.benchmarks.fp8_attention_kernels import AttentionTiles

    sizes = (
        (64, 64, 4), (64, 128, 4), (64, 256, 4), (128, 64, 4), (128, 64, 8), (128, 128, 4), (128, 128, 8),
        (128, 256, 8), (256, 64, 8), (256, 128, 8),
    )  # fmt: skip
    loads = ((2, True), (3, True), (4, True), (3, False))  # stages, and whether the tensor memory accelerator loads
    return [AttentionTiles(*size, stages, uses_tma) for size in sizes for stages, uses_tma in loads]


def _attend(backend: SDPBackend, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return attention [batch, tokens, heads, 64] of [batch, heads, tokens, 64]."""
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(queries, keys, values).transpose(1, 2)


@torch.inference_mode()
def measure(
    shape: AttentionShape, device: str, timer: Timer, backends: Mapping[str, SDPBackend],
    tiles: "Sequence[AttentionTiles]", failures: Failures,
) -> AttentionTimes:  # fmt: skip
    """Time all forms of one shape. Those that fail are left out."""
    from engine_builder.benchmarks.fp8_attention_kernels import fp8_attention, quantize_for_attention

    dtype = torch.float16 if device == "cuda" else torch.float32
    channels = shape.heads * WIDTH
    forms: dict[str, list[Callable[[], Tensor]]] = {name: [] for name in (*backends, *map(str, tiles))}
    quantizations: list[Work] = []
    expected = torch.empty(0)
    for number in range(_SETS):
        fused = torch.randn(shape.batch, shape.tokens, 3 * channels, device=device)
        fused[..., :channels] *= _QUERY_SCALE
        fused = fused.to(dtype)
        parts = fused.view(shape.batch, shape.tokens, 3, shape.heads, WIDTH).permute(2, 0, 3, 1, 4)
        # [3, batch, heads, tokens, 64]
        if number == 0:  # one entry after the other, because the scores in fp32 take memory
            entries = [_attend(SDPBackend.MATH, *parts[:, [entry]].float()) for entry in range(shape.batch)]
            expected = torch.cat(entries).flatten(2)
        scales = parts.abs().amax((1, 2, 3, 4)).float() / E4M3_MAX
        numbers = quantize_for_attention(fused, scales, shape.heads)
        quantizations.append(partial(quantize_for_attention, fused, scales, shape.heads))
        for name, backend in backends.items():
            forms[name].append(partial(_attend, backend, *parts))
        for one in tiles:
            forms[str(one)].append(partial(fp8_attention, *numbers, scales, dtype, one))
    times = time_choices(forms, timer, failures)
    errors = {name: float((forms[name][0]().flatten(2).float() - expected).norm() / expected.norm()) for name in times}
    return AttentionTimes(
        shape, {name: times[name] for name in backends if name in times},
        {str(one): times[str(one)] for one in tiles if str(one) in times}, timer(quantizations), errors,
    )  # fmt: skip


def report(times: Sequence[AttentionTimes]) -> str:
    """Return the table: for each shape the times in fp16, of the fastest tiles and of the rounding to E4M3.

    The gain is against the fastest form in fp16.
    """
    lines = [f"{'attention':34} {'form':20} {'us':>8} {'TFLOP/s':>7} {'gain':>5} {'error':>8}"]
    for one in times:
        medians = {name: statistics.median(values) for name, values in (one.fp16 | one.fp8).items()}
        fp16 = min((medians[name] for name in one.fp16), default=float("nan"))
        for name in [*one.fp16, *sorted(one.fp8, key=medians.__getitem__)[:_LISTED_TILES]]:
            us = medians[name]
            speed = one.shape.gigaflops / us * 1e3
            label = name if name in one.fp16 else f"FP8 {name}"
            lines.append(f"{one.shape!s:34} {label:20} {us:8.1f} {speed:7.0f} {fp16 / us:5.2f} {one.errors[name]:8.5f}")
        lines.append(f"{one.shape!s:34} {'rounding to E4M3':20} {statistics.median(one.quantization):8.1f}")
    return "\n".join(lines)


def rows_of(times: Sequence[AttentionTimes]) -> list[Row]:
    """Return a row for each form in fp16, the fastest tiles and the rounding. That of tiles has all tiles' medians."""
    rows = []
    for one in times:
        cases: list[tuple[str, list[float], str, dict[str, Any]]] = [
            (name, values, "float16", {"error": round(one.errors[name], 6)}) for name, values in one.fp16.items()
        ]
        medians = {name: round(statistics.median(values), 2) for name, values in one.fp8.items()}
        if medians:
            best = min(medians, key=medians.__getitem__)
            about = {"error": round(one.errors[best], 6), "tiles": best, "by_tiles": medians}
            cases.append(("FP8", one.fp8[best], "fp8", about))
        cases.append(("rounding to E4M3", one.quantization, "fp8", {}))
        for name, values, precision, extra in cases:
            case = f"{name}, {one.shape}"
            rows.append(make_row(case, values, "us", precision, 1, one.shape.batch, digits=2, **extra))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[2], help="entries of the UNet's batch, two an image")
    parser.add_argument("--out", type=Path, help="file of rows to append to")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        parser.error("this benchmark needs a GPU of compute capability 9.0 or newer")
    failures, times = Failures(), []
    for shape in [AttentionShape(batch, *level) for batch in arguments.batch for level in _LEVELS]:
        try:
            times.append(measure(shape, "cuda", time_on_gpu, _BACKENDS, candidate_tiles(), failures))
            print(report(times[-1:]), flush=True)
        except Exception as error:  # the other shapes are measured all the same
            failures.print(str(shape), error)
    finish(rows_of(times), arguments.out)
    print(report(times), flush=True)


if __name__ == "__main__":
    main()
