"""The ranges of a layer's inputs, collected over many calls, and the scales that follow from them.

Absolute values are counted in bins of a sixteenth of an octave. Counts of several runs can be added, and a percentile
or the error of a scale follows from them without another run.
"""

import math
from dataclasses import dataclass
from typing import Literal, Self

import torch

from model.weights.fp8 import E4M3_MAX

BINS_PER_OCTAVE = 16
_LOWEST_OCTAVE, _HIGHEST_OCTAVE = -24, 20  # 2**-24 is the smallest fp16 number; values outside count in the end bins
BINS = BINS_PER_OCTAVE * (_HIGHEST_OCTAVE - _LOWEST_OCTAVE)
_COUNTED_VALUES = 2**18  # of one call; the maxima are of all values
_CANDIDATE_SCALES = 4 * BINS_PER_OCTAVE  # below the absolute maximum, one for each bin

ScaleRule = Literal["absolute_maximum", "percentile", "squared_error"]


@dataclass
class InputRange:
    """What was observed of one layer's input.

    counts: int64 [BINS], the values in each bin, lowest first. Of a large input, evenly spaced values count.
    channel_maxima: float32 [channels], the largest absolute value of each input channel.
    calls: the number of inputs.
    """

    counts: torch.Tensor
    channel_maxima: torch.Tensor
    calls: int = 0

    @classmethod
    def empty(cls, channels: int, device: torch.device) -> Self:
        """Return the range of no input."""
        return cls(
            torch.zeros(BINS, dtype=torch.int64, device=device),
            torch.zeros(channels, dtype=torch.float32, device=device),
        )

    def observe(self, values: torch.Tensor, channel_axis: int) -> None:
        """Add one input. Waits for no device. NaN becomes a maximum of NaN."""
        magnitudes = values.detach().abs().float()
        axes = [axis for axis in range(values.ndim) if axis != channel_axis % values.ndim]
        self.channel_maxima = torch.maximum(self.channel_maxima, magnitudes.amax(dim=axes))
        flat = magnitudes.flatten()
        counted = flat[:: _stride(flat.numel(), values.shape[channel_axis])]
        self.counts.scatter_add_(0, bins_of(counted), torch.ones_like(counted, dtype=torch.int64))
        self.calls += 1

    @property
    def absolute_maximum(self) -> float:
        """The largest absolute value, or NaN if an input held NaN."""
        return float(self.channel_maxima.max())

    def percentile(self, share: float) -> float:
        """Return an upper bound of the smallest value that at least `share` of the counted values do not exceed."""
        cumulative = self.counts.cumsum(0)
        rank = torch.searchsorted(cumulative, cumulative[-1:].double() * share)
        return min(float(bin_edges()[int(rank) + 1]), self.absolute_maximum)

    def clip(self, rule: ScaleRule, share: float = 0.9999) -> float:
        """Return the absolute value that a rule maps to the largest number of E4M3. Larger values are clipped.

        `share`: of the rule "percentile".
        """
        match rule:
            case "absolute_maximum":
                return self.absolute_maximum
            case "percentile":
                return self.percentile(share)
            case "squared_error":
                return self._clip_of_least_error()

    def _clip_of_least_error(self) -> float:
        """Return the clip whose quantization has the least squared error of the counted values."""
        centers, counts = bin_centers(), self.counts.cpu().double()
        clips = self.absolute_maximum * 2.0 ** (-torch.arange(_CANDIDATE_SCALES) / BINS_PER_OCTAVE)
        errors = [float((counts * (to_e4m3(centers, clip) - centers).square()).sum()) for clip in clips.tolist()]
        return float(clips[errors.index(min(errors))])


def _stride(elements: int, channels: int) -> int:
    """Return the distance of counted values. It has no factor in common with the channels, so all channels count."""
    stride = max(1, elements // _COUNTED_VALUES)
    while math.gcd(stride, channels) > 1:
        stride += 1
    return stride


def to_e4m3(values: torch.Tensor, clip: float) -> torch.Tensor:
    """Return the values that E4M3 represents if `clip` is mapped to its largest number, as float64."""
    scale = clip / E4M3_MAX
    scaled = (values.float() / scale).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).double() * scale


def bins_of(magnitudes: torch.Tensor) -> torch.Tensor:
    """Return the bin of each absolute value, int64. Zero is in the lowest bin, NaN and infinity in the highest."""
    octaves = torch.nan_to_num(magnitudes, nan=torch.inf, posinf=torch.inf).log2() - _LOWEST_OCTAVE
    return (octaves * BINS_PER_OCTAVE).clamp(0, BINS - 1).floor().long()


def bin_edges() -> torch.Tensor:
    """Return the BINS + 1 edges of the bins, float64."""
    return 2.0 ** (torch.arange(BINS + 1, dtype=torch.float64) / BINS_PER_OCTAVE + _LOWEST_OCTAVE)


def bin_centers() -> torch.Tensor:
    """Return the geometric mean of each bin's edges, float64 [BINS]."""
    edges = bin_edges()
    return (edges[:-1] * edges[1:]).sqrt()
