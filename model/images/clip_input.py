"""Prepare pixels for CLIP's image encoder, as transformers' CLIPImageProcessor does."""

import torch
import torch.nn.functional as F

# transformers' OPENAI_CLIP_MEAN and OPENAI_CLIP_STD
MEAN = (0.48145466, 0.4578275, 0.40821073)
DEVIATION = (0.26862954, 0.26130258, 0.27577711)


def clip_input(levels: torch.Tensor, side: int) -> torch.Tensor:
    """Return float32 [images, 3, side, side] from pixels, uint8 [images, height, width, 3], on their device.

    The shorter side is scaled to `side` by an antialiased bicubic filter, the middle is cut out, and each channel is
    normalized by CLIP's mean and deviation. Rows are scaled before columns, and both results are rounded to pixel
    levels, as in Pillow. Pillow also rounds the filter's weights, so a few pixels differ by one or two levels.
    """
    height, width = levels.shape[1:3]
    shorter = min(height, width)
    scaled = (side * height // shorter, side * width // shorter)
    pixels = levels.permute(0, 3, 1, 2).float()
    for size in ((height, scaled[1]), scaled):
        pixels = F.interpolate(pixels, size, mode="bicubic", antialias=True).round().clamp(0, 255)
    top, left = (scaled[0] - side) // 2, (scaled[1] - side) // 2
    return normalize(pixels[:, :, top : top + side, left : left + side])


def normalize(levels: torch.Tensor) -> torch.Tensor:
    """Normalize float32 [images, 3, side, side] from 0 to 255 by the mean and deviation of CLIP's training images."""
    mean, deviation = (torch.tensor(values, device=levels.device)[:, None, None] for values in (MEAN, DEVIATION))
    return (levels / 255 - mean) / deviation
