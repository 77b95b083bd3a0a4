"""One picture of many pairs: the reference, the quantized model's picture, and their amplified difference."""

import io
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Self

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from engine_builder.quantization.validation.report import ValidationReport
from model.images.pixels import Pixels

MAX_PAIRS = 32
AMPLIFICATION = 8  # of the absolute difference
SIDE = 192  # pixels, of a thumbnail's longer side
_COLUMNS, _MARGIN, _GAP, _FONT_SIZE = 2, 8, 4, 12  # pixels, except the columns
_TEXT_HEIGHT = 2 * (_FONT_SIZE + 4)


@dataclass(frozen=True)
class PicturePair:
    """Thumbnails of the request `number` of a report, uint8 [height, width, 3], the longer side `SIDE`."""

    number: int
    reference: Pixels
    quantized: Pixels
    difference: Pixels

    @classmethod
    def of(cls, number: int, reference: Pixels, quantized: Pixels) -> Self:
        """Make thumbnails of two pictures of one size, uint8 [height, width, 3]."""
        difference = np.abs(quantized.astype(np.int32) - reference) * AMPLIFICATION
        amplified = difference.clip(0, 255).astype(np.uint8)
        return cls(number, _thumbnail(reference), _thumbnail(quantized), _thumbnail(amplified))


@dataclass(frozen=True)
class Cell:
    """Thumbnails next to each other, uint8 [height, width, 3] with sides of at most `SIDE`, above two lines of text."""

    pictures: Sequence[Pixels]
    lines: tuple[str, str]


def contact_sheet(report: ValidationReport, pairs: Sequence[PicturePair]) -> bytes:
    """Return a PNG of at most 32 pairs in the order of the report, the worst first.

    Each is `reference | quantized | 8 times their difference`, above the prompt and the distances. `pairs`: of some of
    the report's prompts, in any order.
    """
    by_number = {pair.number: pair for pair in pairs}
    cells = []
    for prompt in [prompt for prompt in report.prompts if prompt.number in by_number][:MAX_PAIRS]:
        pair = by_number[prompt.number]
        numbers = (
            f"latents {prompt.latents_decibels:.1f} dB, PSNR {prompt.psnr_decibels:.1f} dB, "
            f"1 - MS-SSIM {prompt.perceptual_distance:.4f}, seed {prompt.seed}"
        )
        cells.append(Cell((pair.reference, pair.quantized, pair.difference), (prompt.prompt, numbers)))
    return draw_cells(cells, _COLUMNS)


def draw_cells(cells: Sequence[Cell], columns: int) -> bytes:
    """Return a PNG of the cells, row by row. All have the same number of pictures."""
    count = len(cells[0].pictures) if cells else 1
    width = count * SIDE + (count - 1) * _GAP
    cell_width, cell_height = width + _MARGIN, SIDE + _TEXT_HEIGHT + _MARGIN
    columns = min(columns, max(1, len(cells)))
    rows = max(1, -(-len(cells) // columns))
    sheet = Image.new("RGB", (columns * cell_width + _MARGIN, rows * cell_height + _MARGIN), "lightgray")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(_FONT_SIZE)
    for index, cell in enumerate(cells):
        left = _MARGIN + index % columns * cell_width
        top = _MARGIN + index // columns * cell_height
        for position, pixels in enumerate(cell.pictures):
            sheet.paste(Image.fromarray(pixels), (left + position * (SIDE + _GAP), top))
        for line, text in enumerate(cell.lines):
            draw.text((left, top + SIDE + line * (_FONT_SIZE + 4)), _fit(text, font, width), fill="black", font=font)
    file = io.BytesIO()
    sheet.save(file, "PNG", optimize=True)
    return file.getvalue()


def _thumbnail(pixels: Pixels) -> Pixels:
    height, width = pixels.shape[:2]
    share = SIDE / max(height, width)
    size = (max(1, round(width * share)), max(1, round(height * share)))
    method = Image.Resampling.BOX if share < 1 else Image.Resampling.NEAREST
    return np.asarray(Image.fromarray(pixels).resize(size, method))


def _fit(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    """Return the text in one line of at most `width` pixels. The default font draws boxes for other alphabets."""
    line = " ".join(text.split())
    if font.getlength(line) <= width:
        return line
    kept = bisect_right(range(len(line)), width, key=lambda count: ceil(font.getlength(f"{line[:count]}...")))
    return f"{line[: max(0, kept - 1)]}..."
