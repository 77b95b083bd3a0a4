"""A Triton kernel of INT8 linears. Imported only once a network is on a GPU; see `attention_kernels`."""

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor, library

_TILE_ROWS, _TILE_WIDTH, _GROUP, _WARPS = 128, 128, 8, 8
# Inputs that are read at once, and stages. On an H100 the deep tiles were the fastest for all six shapes of SDXL's
# linears that were measured, with 640 to 5,120 inputs: for three with 8 warps, for three with 4. GPUs of capability 8.x
# were not measured. Both take at most 96 KiB of shared memory, and capability 8.6 has 99 KiB for a program.
_DEEP, _SHALLOW = (128, 3), (64, 4)  # the latter if 128 does not divide the inputs


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _int8_linear_kernel(  # type: ignore[no-untyped-def]
    x, weight, weight_scale, bias, out, rows, WIDTH: tl.constexpr, DEPTH: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_WIDTH: tl.constexpr, TILE_DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    # Tiles of a group of rows run one after the other, so that they find the same columns of the weight in the cache.
    row_tiles = tl.cdiv(rows, TILE_ROWS)
    tiles_in_group = GROUP * tl.cdiv(WIDTH, TILE_WIDTH)
    first = tl.program_id(0) // tiles_in_group * GROUP
    group_rows = tl.minimum(row_tiles - first, GROUP)
    row_tile = first + tl.program_id(0) % tiles_in_group % group_rows
    column_tile = tl.program_id(0) % tiles_in_group // group_rows
    row = row_tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = column_tile * TILE_WIDTH + tl.arange(0, TILE_WIDTH)
    depth = tl.arange(0, TILE_DEPTH)
    x_tile = x + row[:, None] * DEPTH + depth[None, :]
    weight_tile = weight + column[None, :] * DEPTH + depth[:, None]
    total = tl.zeros((TILE_ROWS, TILE_WIDTH), tl.int32)
    for _ in range(0, DEPTH, TILE_DEPTH):
        a = tl.load(x_tile, mask=(row < rows)[:, None], other=0)
        b = tl.load(weight_tile, mask=(column < WIDTH)[None, :], other=0)
        total = tl.dot(a, b, total, out_dtype=tl.int32)
        x_tile += TILE_DEPTH
        weight_tile += TILE_DEPTH
    result = total.to(tl.float32) * tl.load(weight_scale + column, mask=column < WIDTH, other=0.0)[None, :]
    if bias is not None:
        result += tl.load(bias + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    tl.store(out + row[:, None] * WIDTH + column[None, :], result.to(out.dtype.element_ty), mask=inside)


@library.triton_op("preheat::int8_linear", mutates_args={})
def int8_linear(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return x weight^T * weight_scale + bias, [rows, out] in `dtype`. Products are summed in int32.

    x: int8 [rows, in], contiguous. weight: int8 [out, in], contiguous; `in` is a multiple of 64.
    weight_scale: float32 [out]. bias: [out], or None.
    """
    rows, (width, depth) = x.shape[0], weight.shape
    tile_depth, stages = _DEEP if depth % _DEEP[0] == 0 else _SHALLOW
    assert depth % tile_depth == 0
    out = torch.empty(rows, width, dtype=dtype, device=x.device)
    tiles = -(-rows // _TILE_ROWS) * -(-width // _TILE_WIDTH)
    library.wrap_triton(_int8_linear_kernel)[(tiles,)](
        x, weight, weight_scale, bias, out, rows, WIDTH=width, DEPTH=depth, TILE_ROWS=_TILE_ROWS,
        TILE_WIDTH=_TILE_WIDTH, TILE_DEPTH=tile_depth, GROUP=_GROUP, num_warps=_WARPS, num_stages=stages,
    )  # fmt: skip
    return out
