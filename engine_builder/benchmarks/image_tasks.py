"""Compare image to image and inpainting with text to image on one release, alternating in one run.

    python -m engine_builder.benchmarks.image_tasks STORE NAME/1 --steps 30 --out docs/benchmarks/h200.json

Measures in this process, from the request to the encoded JPEG, at the native size. Image to image has strength 0.5, so
half of the steps run. The image is one that the release generated. Prints two comparisons:

- image to image: its p50, and 0.55 times that of text to image plus 30 ms, for encoding the image.
- a step of inpainting: its milliseconds, as a multiple of those of a plain step. A step's time is the difference of the
  denoising times of two numbers of steps, so it has no part of what happens once for each image.

The last line is JSON: the rows and both comparisons.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from engine_builder.benchmarks.bench import (
    load_in_process,
    measure,
    precision_of,
    release_parser,
    release_work,
    timed_row,
)
from engine_builder.benchmarks.rows import Row, append_rows
from model.api.request import GenerationRequest
from model.api.resolve import resolve
from model.errors import RequestRefused
from model.loading.load import Loaded
from model.pipeline.params import GenerationParams, Mask
from model.pipeline.text_to_image import generate

STRENGTH = 0.5
_MAX_TIME_RATIO, _ENCODING_MILLISECONDS = 0.55, 30.0  # of image to image at half the steps
_FEWER_STEPS = 3  # times fewer, in the requests whose time is subtracted


@dataclass(frozen=True)
class Comparison:
    """Milliseconds of image to image and the most that it should take; of a plain step and of one that inpaints."""

    image_to_image: float
    bound: float
    plain_step: float
    inpaint_step: float

    @property
    def step_ratio(self) -> float:
        return self.inpaint_step / self.plain_step

    def to_dict(self) -> dict[str, float]:
        entries = {name: round(value, 4) for name, value in vars(self).items()}
        return entries | {"step_ratio": round(self.step_ratio, 4)}


def compare(
    loaded: Loaded, steps: int, runs: int, warm_ups: int = 3, side: int | None = None
) -> tuple[list[Row], Comparison]:
    """Measure all requests alternately. `side`: pixels; None: the native size.

    Raises RequestRefused if the release has no VAE encoder, and ValueError for fewer than 6 steps.
    """
    if steps < 2 * _FEWER_STEPS:
        raise ValueError(f"{steps} steps are too few to compare; {2 * _FEWER_STEPS} are needed")
    if loaded.served.image_sizes is None:
        raise RequestRefused("image", f"release {loaded.release} has no VAE encoder.")
    cases = dict(_cases(loaded, steps, side))
    measured = measure([release_work(loaded, params) for params in cases.values()], warm_ups, runs)
    rows = {
        name: timed_row(f"{loaded.release} {name}", params, precision_of(loaded), *results)
        for (name, params), results in zip(cases.items(), measured, strict=True)
    }

    def step(task: str) -> float:
        more, fewer = rows[task], rows[f"{task}, fewer steps"]
        assert more.stages is not None and fewer.stages is not None
        return (more.stages["denoise"] - fewer.stages["denoise"]) / (more.steps - fewer.steps)

    bound = _MAX_TIME_RATIO * rows["text to image"].p50 + _ENCODING_MILLISECONDS
    comparison = Comparison(rows["image to image"].p50, bound, step("text to image"), step("inpaint"))
    return list(rows.values()), comparison


def _cases(loaded: Loaded, steps: int, side: int | None) -> Iterator[tuple[str, GenerationParams]]:
    request = GenerationRequest(
        prompt="a photograph of an astronaut riding a horse",
        seed=1,
        width=side,
        height=side,
        num_inference_steps=steps,
        scheduler="Euler",
        guidance_scale=7.5,
    )
    plain = resolve(request, loaded.served)
    [[image], *_] = generate(loaded.model, [plain])
    levels = np.zeros((plain.height, plain.width), np.uint8)
    levels[plain.height // 4 : -plain.height // 4, plain.width // 4 : -plain.width // 4] = 255
    inpaint = replace(plain, image=image, masks=(Mask(levels, plain.prompt, None, strength=1.0),))
    for name, params in (("text to image", plain), ("inpaint", inpaint)):
        yield name, params
        yield f"{name}, fewer steps", replace(params, num_inference_steps=steps // _FEWER_STEPS)
    yield "image to image", replace(plain, image=image, strength=STRENGTH)


def report(comparison: Comparison, write: Callable[[str], None]) -> None:
    """Write both comparisons, a line each."""
    write(f"image to image at strength {STRENGTH}: {comparison.image_to_image:.1f} ms, bound {comparison.bound:.1f} ms")
    write(
        f"step: {comparison.plain_step:.3f} ms, with a mask {comparison.inpaint_step:.3f} ms, ratio "
        f"{comparison.step_ratio:.3f}"
    )


def main() -> None:
    parser = release_parser(__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--side", type=int, help="pixels; default: the native size")
    arguments = parser.parse_args()
    loaded = load_in_process(arguments.store, arguments.release)
    rows, comparison = compare(loaded, arguments.steps, arguments.runs, side=arguments.side)
    for row in rows:
        print(f"{row.case}: p50 {row.p50} {row.unit}, p99 {row.p99}, stages {row.stages}", flush=True)
    report(comparison, print)
    if arguments.out is not None:
        append_rows(arguments.out, rows)
    print(json.dumps({"rows": [row.to_dict() for row in rows]} | comparison.to_dict()))


if __name__ == "__main__":
    main()
