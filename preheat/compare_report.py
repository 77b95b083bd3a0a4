"""The report of a comparison: a table for a console, a page, a contact sheet and JSON."""

import textwrap
from collections.abc import Iterator
from html import escape
from typing import Any

from pydantic_core import to_json as to_json_bytes
from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.compare import FIELDS, RELEASE
from benchmarks.comparison import Comparison, Variant
from engine_builder.quantization.validation.contact_sheet import AMPLIFICATION, Cell, draw_cells
from model.denoising.forecast import evaluation_count
from model.images.encode import encode_base64
from model.images.pixels import Pixels
from model.pipeline.params import GenerationParams
from preheat.console import plain

_NOT_MEASURED = "-"
_LINE_CHARACTERS = 30  # below a thumbnail
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem; color: #222; background: #fff; }
table { border-collapse: collapse; }
.numbers td, .numbers th { padding: .3rem .8rem; border-bottom: 1px solid #ddd; text-align: right; }
.numbers td:not(.reason) { white-space: nowrap; }
.numbers td:first-child, .numbers th:first-child, .numbers .reason { text-align: left; }
.pictures td, .pictures th { padding: .3rem .6rem; vertical-align: top; text-align: left; font-weight: normal; }
.pictures thead th { font-weight: 600; }
.pictures .request { padding-top: 1.6rem; }
.wide { overflow-x: auto; }
img { display: block; width: 256px; margin-bottom: .3rem; }
img.difference { width: 128px; }
small { color: #666; }
"""


def describe(comparison: Comparison, per_hour: float | None = None) -> Table:
    """Return a table with a column for each variant. `per_hour`: the price of the machine."""
    columns = [_headers(per_hour), *(_cells(comparison, variant, per_hour) for variant in comparison.variants)]
    table = Table(box=SIMPLE_HEAD)
    for number, (name, *_) in enumerate(columns):
        table.add_column(plain(name), justify="right" if number else "left")
    for cells in zip(*(cells for _, *cells in columns), strict=True):
        table.add_row(*map(plain, cells))
    return table


def facts(comparison: Comparison, per_hour: float | None = None) -> list[str]:
    """Return lines about the machine, the versions and the requests, and what limits the comparison."""
    release = next(variant for variant in comparison.variants if variant.name == RELEASE).row
    versions = [release.gpu, f"driver {release.driver}" if release.driver else "", f"torch {release.torch}"]
    diffusers = comparison.variants[0].row.extra.get("diffusers")
    versions += [f"diffusers {diffusers}" if diffusers else "", f"commit {release.commit}"]
    settings = dict.fromkeys(map(_settings, comparison.requests))
    return [
        ", ".join(filter(None, versions)),
        f"{len(comparison.requests)} requests: {'; '.join(settings)}. Seconds are the median of the first request "
        f"(runs: {release.runs}), one image after the other.",
        *([] if per_hour is None else [f"The cost of 1,000 images is for a machine at {per_hour:g} an hour."]),
        *comparison.notes,
    ]


def to_json(comparison: Comparison, per_hour: float | None = None) -> bytes:
    """Return the report as JSON. An infinite PSNR, of equal pictures, is the text "Infinity"."""
    report = {
        "version": 1,
        "release": comparison.release,
        "reference": comparison.variants[0].name,
        "facts": facts(comparison, per_hour),
        "per_hour": per_hour,
        "requests": [{name: getattr(params, name) for name in FIELDS} for params in comparison.requests],
        "variants": [_entries(variant, per_hour) for variant in comparison.variants],
        "unavailable": comparison.unavailable,
    }
    return to_json_bytes(report, indent=1, inf_nan_mode="strings")


def contact_sheet(comparison: Comparison) -> bytes:
    """Return a PNG with a column for each variant: the pictures of a request, and below their differences."""
    cells = []
    reference = comparison.variants[0]
    for number, (params, pairs) in enumerate(zip(comparison.requests, comparison.pairs, strict=True)):
        differences = []
        for variant, pair in zip(comparison.variants, pairs, strict=True):
            distances = "the reference" if variant is reference else _distances(*variant.distances[number])
            cells.append(Cell([pair.quantized], (variant.name, distances)))
            lines = _in_two_lines(params.prompt) if variant is reference else (f"{AMPLIFICATION} x difference", "")
            differences.append(Cell([pair.difference], lines))
        cells += differences
    return draw_cells(cells, len(comparison.variants))


def to_html(comparison: Comparison, per_hour: float | None = None) -> str:
    """Return a page that loads nothing: all pictures are inside."""
    title = escape(f"{comparison.release} and {comparison.variants[0].name}")
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1>",
            *(f"<p>{escape(line)}</p>" for line in facts(comparison, per_hour)),
            '<div class="wide"><table class="numbers"><thead>',
            _row("th", map(escape, _headers(per_hour))),
            "</thead><tbody>",
            *(_row("td", map(escape, _cells(comparison, variant, per_hour))) for variant in comparison.variants),
            *(_unavailable_row(name, reason, per_hour) for name, reason in comparison.unavailable.items()),
            "</tbody></table></div>",
            f"<p><small>PSNR and 1 - MS-SSIM are against {escape(comparison.variants[0].name)}. The load is without "
            "imports. The first image includes captured graphs and compilation. "
            "Memory is the growth of the process at its peak; on a GPU, the growth of torch's GPU memory.</small></p>",
            '<div class="wide"><table class="pictures"><thead>',
            _row("th", (escape(variant.name) for variant in comparison.variants)),
            "</thead><tbody>",
            *_picture_rows(comparison),
            "</tbody></table></div></body></html>",
        ]
    )


# -- numbers ---------------------------------------------------------------------------------------------------------


def _headers(per_hour: float | None) -> list[str]:
    headers = ["variant", "precision", "steps", "PSNR dB, median", "PSNR dB, worst", "1 - MS-SSIM, median",
               "1 - MS-SSIM, worst", "s/image", "images/s", "load s", "first image s", "memory MiB"]  # fmt: skip
    return headers if per_hour is None else [*headers, "cost of 1,000"]


def _cells(comparison: Comparison, variant: Variant, per_hour: float | None) -> list[str]:
    steps = variant.params.num_inference_steps
    evaluated = evaluation_count(variant.params.forecast, steps)
    psnr, distance = variant.psnr_decibels, variant.perceptual_distance
    distances = [f"{psnr.median:.1f}", f"{psnr.worst:.1f}", f"{distance.median:.4f}", f"{distance.worst:.4f}"]
    memory = None if variant.memory_bytes is None else variant.memory_bytes / 2**20
    cells = [
        variant.name,
        variant.row.precision,
        f"{steps}" if evaluated == steps else f"{evaluated} of {steps}",
        *(["reference", "", "", ""] if variant is comparison.variants[0] else distances),
        f"{variant.seconds:.3f}",
        f"{1 / variant.seconds:.2f}",
        _number(variant.load_seconds, ".2f"),
        _number(variant.first_seconds, ".2f"),
        _number(memory, ".0f"),
    ]
    return cells if per_hour is None else [*cells, f"{variant.cost_of_1000(per_hour):#.3g}"]


def _number(value: float | None, form: str) -> str:
    return _NOT_MEASURED if value is None else format(value, form)


def _entries(variant: Variant, per_hour: float | None) -> dict[str, Any]:
    return {
        "name": variant.name,
        "psnr_decibels": variant.psnr_decibels,
        "perceptual_distance": variant.perceptual_distance,
        "pictures": [
            {"psnr_decibels": decibels, "perceptual_distance": distance} for decibels, distance in variant.distances
        ],
        "seconds": variant.seconds,
        "images_per_second": 1 / variant.seconds,
        "load_seconds": variant.load_seconds,
        "first_image_seconds": variant.first_seconds,
        "memory_bytes": variant.memory_bytes,
        "cost_of_1000": None if per_hour is None else variant.cost_of_1000(per_hour),
        "row": variant.row.to_dict(),
    }


def _settings(params: GenerationParams) -> str:
    size = f"{params.width}x{params.height}"
    return f"{params.num_inference_steps} steps of {params.scheduler}, guidance {params.guidance_scale:g}, {size}"


def _distances(decibels: float, distance: float) -> str:
    return f"{decibels:.1f} dB, 1 - MS-SSIM {distance:.4f}"


# -- pictures --------------------------------------------------------------------------------------------------------


def _in_two_lines(text: str) -> tuple[str, str]:
    first, *others = textwrap.wrap(text, _LINE_CHARACTERS)
    return first, " ".join(others)


def _row(tag: str, cells: Any) -> str:
    return f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for cell in cells)}</tr>"


def _unavailable_row(name: str, reason: str, per_hour: float | None) -> str:
    columns = len(_headers(per_hour)) - 1
    return f'<tr><td>{escape(name)}</td><td class="reason" colspan="{columns}">{escape(reason)}</td></tr>'


def _picture_rows(comparison: Comparison) -> Iterator[str]:
    """Yield two rows for each request: its prompt, and a picture of each variant above the difference."""
    reference = comparison.variants[0]
    for number, (params, pairs) in enumerate(zip(comparison.requests, comparison.pairs, strict=True)):
        prompt = f"{escape(params.prompt)} <small>{escape(_settings(params))}, seed {params.seed}</small>"
        yield f'<tr><th class="request" colspan="{len(comparison.variants)}">{prompt}</th></tr>'
        cells = []
        for variant, pair in zip(comparison.variants, pairs, strict=True):
            cell = _image(variant.pictures[number], "jpeg", variant.name)
            if variant is not reference:
                cell += f"{_distances(*variant.distances[number])}"
                cell += _image(pair.difference, "png", "difference", 'class="difference"')
                cell += f"<small>{AMPLIFICATION} times the difference</small>"
            cells.append(cell)
        yield _row("td", cells)


def _image(pixels: Pixels, form: Any, name: str, attributes: str = "") -> str:
    data = encode_base64(pixels, form, 95)
    return f'<img {attributes} alt="{escape(name)}" src="data:image/{form};base64,{data}">'
