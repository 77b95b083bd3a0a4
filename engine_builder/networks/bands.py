"""Networks that compute one band of an image: some of its rows, on a GPU of its own.

The blocks of `engine_builder.networks.blocks` run on a band as they run on an image, but for what crosses its edges:
a convolution reads a row of each neighbour, group norm takes the statistics of the image, and self-attention reads the
keys and values of all tokens. These functions exchange that. Without bands they change nothing.

The results are those of the whole image. No row is an approximation, and none is of an earlier step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import model.engines.row_exchange  # noqa: F401  # defines the operators

# Part of the key of engines with bands. Raise it when this module's arithmetic or operators change.
BANDS_VERSION = 2
_COUNT = ContextVar("_COUNT", default=1)


@contextmanager
def divided(bands: int) -> Iterator[None]:
    """Run blocks on one band of so many."""
    before = _COUNT.set(bands)
    try:
        yield
    finally:
        _COUNT.reset(before)


def band_count() -> int:
    """Return the bands that blocks run in now; 1: on whole images."""
    return _COUNT.get()


def own_rows(whole: Tensor, bands: int) -> Tensor:
    """Return this rank's band of an image [batch, channels, height, width]."""
    return cast(Tensor, torch.ops.preheat.own_rows(_rows_first(whole), bands)).permute(0, 3, 1, 2)


def whole_image(own: Tensor) -> Tensor:
    """Return the image [batch, channels, height, width] from the band of each rank."""
    bands = torch.ops.preheat.gather(_rows_first(own), band_count())  # [bands, batch, rows, width, channels]
    return cast(Tensor, bands.transpose(0, 1).flatten(1, 2).permute(0, 3, 1, 2))


def convolve(conv: Any, hidden: Tensor) -> Tensor:
    """Return conv(hidden), [batch, channels, height, width], for a kernel of 1, 2 or 3 rows."""
    if band_count() == 1:
        return cast(Tensor, conv(hidden))
    if not isinstance(conv, nn.Conv2d):
        raise TypeError(f"{type(conv).__name__} cannot convolve one band of an image")
    if not cast(int, conv.padding[0]):
        return cast(Tensor, conv(hidden))
    above, below = neighbour_rows(edge_rows(hidden)).unbind(0)
    band = _rows_first(hidden)
    # With a stride of 2, the last window of an even number of rows ends within the band.
    read = [above[:, None], band] if conv.stride[0] == 2 else [above[:, None], band, below[:, None]]
    extended = torch.cat(read, 1).permute(0, 3, 1, 2)
    columns = cast(int, conv.padding[1])
    return F.conv2d(extended, conv.weight, conv.bias, conv.stride, (0, columns))


def edge_rows(hidden: Tensor) -> Tensor:
    """Return the first and the last row of [batch, channels, height, width]: [2, batch, width, channels]."""
    band = _rows_first(hidden)
    return torch.stack([band[:, 0], band[:, -1]])


def neighbour_rows(edges: Tensor) -> Tensor:
    """Return the rows above and below this band, [2, batch, width, channels], zeros beyond the image. `edges`: the
    `edge_rows` of this band. Only for bands.
    """
    return cast(Tensor, torch.ops.preheat.neighbour_rows(edges))


def image_statistics(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance of each group over the image, from those of the band, [batch, groups], fp32.

    All bands have equally many pixels. Source: Chan, Golub and LeVeque, "Algorithms for computing the sample variance",
    1983.
    """
    if band_count() == 1:
        return mean, variance
    means, variances = torch.ops.preheat.gather(torch.stack([mean, variance]), band_count()).unbind(1)
    of_image = means.mean(0)
    return of_image, (variances + (means - of_image).square()).mean(0)


def group_norm_of_band(norm: Any, hidden: Tensor) -> Tensor:
    """Return `norm` of the image, for this band of it, [batch, channels, height, width]."""
    groups = torch.unflatten(hidden, 1, (norm.num_groups, -1)).float()
    variance, mean = torch.var_mean(groups, (2, 3, 4), correction=0)
    mean, variance = image_statistics(mean, variance)
    normed = (groups - mean[:, :, None, None, None]) * (variance + norm.eps).rsqrt()[:, :, None, None, None]
    scaled = normed.flatten(1, 2) * norm.weight.float()[:, None, None] + norm.bias.float()[:, None, None]
    return cast(Tensor, scaled.to(hidden.dtype))


def tokens_of_image(own: Tensor) -> Tensor:
    """Return the tokens of all bands, [batch, bands * n, width], from those of this band, [batch, n, width]."""
    if band_count() == 1:
        return own
    gathered: Tensor = torch.ops.preheat.gather(own, band_count())
    return gathered.transpose(0, 1).flatten(1, 2)


def _rows_first(image: Tensor) -> Tensor:
    return image.permute(0, 2, 3, 1)


def _own_rows_shape(whole: Tensor, bands: int) -> Tensor:
    batch, rows, *rest = whole.shape
    return whole.new_empty((batch, rows // bands, *rest))


def _gather_shape(own: Tensor, bands: int) -> Tensor:
    return own.new_empty((bands, *own.shape))


def _neighbour_rows_shape(edges: Tensor) -> Tensor:
    return edges.new_empty(edges.shape)


for _name, _shape in (
    ("own_rows", _own_rows_shape),
    ("gather", _gather_shape),
    ("neighbour_rows", _neighbour_rows_shape),
):
    torch.library.register_fake(f"preheat::{_name}", _shape)
