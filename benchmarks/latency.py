"""Measure the requests of docs/benchmarks.md on one release, in this process, from the request to the encoded JPEG.

    python -m benchmarks.latency text STORE NAME/1 --peer MODEL_FOLDER --out rows.json
    python -m benchmarks.latency text STORE NAME/1 --precision fp16 --precision fp8 --only sdxl-30-steps
    python -m benchmarks.latency images STORE NAME/1        # or controls, image-prompts, forecasts

`text` measures numbers of steps, batches and few-step models, each case on its own. A case that the release does not
serve is skipped with a message. The peers are diffusers' pipelines on the same weights, and alternate with the release:
eager, and compiled as in PyTorch's "diffusion-fast" (github.com/huggingface/diffusion-fast). Two of its options are
left out. Coordinate descent had not ended after 500 s. The search for matrix products takes minutes more.

With several precisions the release is loaded once in each, and they alternate.

The other kinds compare requests with a plain one, alternating: image to image at half of the steps and inpainting, each
ControlNet, each IP-Adapter with one and with the most reference images, or each level of forecasts. For each they print
the ratio of its p50 to that of the plain request, and the ratio of a step. A step's time is the difference of the
denoising times of two numbers of steps, so it has no part of what happens once for each image.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.measure import (
    generate_offline,
    load_in_process,
    measure_requests,
    precision_of,
    release_parser,
    timed_row,
)
from benchmarks.peers import PEERS, bench_against_diffusers, find_peer
from benchmarks.rows import Row, finish
from model.api.resolve import resolve
from model.denoising.sampler_specs import SPECS
from model.errors import RequestRefused
from model.loading.load import Loaded
from model.pipeline.params import Control, GenerationParams, ImagePrompt, Mask
from model.pipeline.text_to_image import generate
from model.request_fields import GenerationRequest
from model.store.manifest import Fp16Steps
from model.store.precision import PRECISIONS

_FEWER_STEPS = 3  # times fewer, in the requests whose time is subtracted
_PLAIN = "text to image"


@dataclass(frozen=True)
class Case:
    """A text-to-image request that is generated `runs` times.

    `throughput`: the next request always waits, and the row has images/s. `side`: pixels; None: the native size.
    """

    name: str
    runs: int
    steps: int
    scheduler: str = "Euler"
    guidance: float = 7.5
    images: int = 1
    side: int | None = None
    refiner: bool = False
    throughput: bool = False

    def request(self) -> GenerationRequest:
        return GenerationRequest(
            prompt="a photograph of an astronaut riding a horse",
            seed=1,
            width=self.side,
            height=self.side,
            num_inference_steps=self.steps,
            scheduler=self.scheduler,
            guidance_scale=self.guidance,
            num_images=self.images,
            use_refiner=self.refiner,
        )


CASES = (
    Case("sdxl-30-steps", 30, 30),
    Case("sdxl-lcm-4-steps", 50, 4, "LCM", 1.0),
    Case("sdxl-turbo-4-steps-512", 50, 4, "Euler a", 1.0, side=512),
    Case("sdxl-20-steps-throughput", 5, 20, images=8, throughput=True),
    Case("sdxl-20-steps-throughput-batch-2", 15, 20, images=2, throughput=True),
    Case("sdxl-20-steps-throughput-batch-4", 8, 20, images=4, throughput=True),
    Case("sdxl-10-steps", 10, 10),
    Case("sdxl-20-steps", 10, 20),
    Case("sdxl-50-steps", 5, 50),
    Case("sdxl-20-steps-batch-4", 5, 20, images=4),
    Case("sdxl-20-steps-batch-8", 3, 20, images=8),
    Case("sdxl-30-steps-refiner", 10, 30, refiner=True),
)
SD_CASES = (
    Case("sd-1.5-20-steps", 30, 20),
    Case("sd-1.5-50-steps", 10, 50),
    Case("sd-1.5-20-steps-batch-4", 10, 20, images=4),
    Case("sd-1.5-20-steps-throughput", 5, 20, images=8, throughput=True),
)


def measure_cases(
    loaded: Sequence[Loaded], peer: str | None = None, cases: Sequence[Case] | None = None
) -> Iterator[Row]:
    """Yield the rows of each case as soon as it is measured, then the rows of the peers for the first case.

    `loaded`: one release, once or in several precisions, which alternate. `peer`: a model's folder or Hub id. `cases`:
    None selects those of the release's family. Prints a line for each row, how many times as fast a precision is as the
    first, and a line for each case that the release does not serve.
    """
    model = loaded[0]
    if cases is None:
        cases = SD_CASES if model.model.family.name == "sd" else CASES
    first = cases[0]
    if peer is not None:
        find_peer(peer, resolve(first.request(), model.served))  # raises before anything is measured

    def named(name: str, row: Row) -> Row:
        print(f"{name}: p50 {row.p50} {row.unit}, p99 {row.p99}, stages {row.stages}", flush=True)
        return row.model_copy(update={"case": name})

    for case in cases:
        try:
            requests = [(case.name, one, resolve(case.request(), one.served)) for one in loaded]
        except RequestRefused as error:
            print(f"{case.name}: skipped. {error}", flush=True)
            continue
        measured = _offline(requests, case.runs) if case.throughput else measure_requests(requests, 3, case.runs)
        names = [f"{case.name}, {one.precision}" for one in loaded] if len(loaded) > 1 else [case.name]
        rows = list(map(named, names, measured))
        yield from rows
        for one, row in zip(loaded[1:], rows[1:], strict=True):
            ratio = row.value / rows[0].value if case.throughput else rows[0].value / row.value
            print(f"{case.name}: {one.precision} is {ratio:.3f} times as fast as {model.precision}", flush=True)
    if peer is not None:
        names = [f"{first.name}, in turns with diffusers"] + [f"{first.name}, diffusers {kind}" for kind in PEERS]
        yield from map(named, names, bench_against_diffusers(model, first.request(), peer, PEERS, 3, 10))


def _offline(requests: Sequence[tuple[str, Loaded, GenerationParams]], runs: int) -> list[Row]:
    """Measure requests whose next one always waits, in turns of three. The first of a turn is not counted.

    Returns rows in images/s: the slowest turns become the lowest rates.
    """
    totals: list[list[float]] = [[] for _ in requests]
    for _ in range(runs):
        for (_, loaded, params), times in zip(requests, totals, strict=True):
            times.append(statistics.mean(generate_offline(loaded, [params], 0, 3)[1:]))
    rows = []
    for (name, loaded, params), times in zip(requests, totals, strict=True):
        row = timed_row(name, params, precision_of(loaded), times, {})
        rates = {key: round(1000 * row.batch / getattr(row, key), 3) for key in ("value", "p50", "p90", "p99")}
        rows.append(row.model_copy(update={"unit": "images/s", **rates}))
    return rows


# -- requests compared with a plain one ------------------------------------------------------------------------------


def _images(loaded: Loaded, plain: GenerationParams) -> dict[str, GenerationParams]:
    """Image to image and inpainting of an image that the release generated."""
    if loaded.served.image_sizes is None:
        raise RequestRefused("image", f"release {loaded.release} has no VAE encoder.")
    [[image], *_] = generate(loaded.model, [plain])
    levels = np.zeros((plain.height, plain.width), np.uint8)
    levels[plain.height // 4 : -plain.height // 4, plain.width // 4 : -plain.width // 4] = 255
    mask = Mask(levels, plain.prompt, None, strength=1.0)
    return {
        "inpaint": replace(plain, image=image, masks=(mask,)),
        "image to image": replace(plain, image=image, strength=0.5),
    }


def _controls(loaded: Loaded, plain: GenerationParams) -> dict[str, GenerationParams]:
    """Each ControlNet, with a control image of random numbers."""
    if not loaded.served.controlnets:
        raise RequestRefused("controls", f"release {loaded.release} has no ControlNets.")
    levels = _random_levels(plain.height, plain.width, 3)
    return {
        f"with {name}": replace(
            plain, controls=(Control(name, levels, scale=1.0, start=0.0, end=1.0, mode=0 if types else None),)
        )
        for name, types in loaded.served.controlnets.items()
    }


def _image_prompts(loaded: Loaded, plain: GenerationParams) -> dict[str, GenerationParams]:
    """Each IP-Adapter, with one and with the most reference images."""
    if not loaded.served.ip_adapters:
        raise RequestRefused("ip_adapters", f"release {loaded.release} has no IP-Adapters.")
    cases = {}
    for name, adapter in loaded.served.ip_adapters.items():
        for images in sorted({1, adapter.images}):
            prompt = ImagePrompt(name, _random_levels(images, adapter.side, adapter.side, 3), scale=0.6)
            cases[f"with {name}, {images} image{'s' if images > 1 else ''}"] = replace(plain, image_prompts=(prompt,))
    return cases


def _random_levels(*shape: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def _forecasts(loaded: Loaded, plain: GenerationParams) -> dict[str, GenerationParams]:
    """Each level of forecasts."""
    if plain.forecast != "off":
        raise RequestRefused("forecast", f"the release's default is {plain.forecast}: publish it without that default.")
    return {f"forecast {level}": replace(plain, forecast=level) for level in SPECS[plain.scheduler].forecasts}


COMPARISONS = {"images": _images, "controls": _controls, "image-prompts": _image_prompts, "forecasts": _forecasts}
"""Kinds of requests -> a function that returns them by name, from the plain one. Raises RequestRefused."""


def compare(
    loaded: Loaded, kind: str, steps: int, runs: int, warm_ups: int = 3, side: int | None = None, images: int = 1
) -> tuple[list[Row], dict[str, dict[str, float]]]:
    """Measure a plain request and those of `kind` alternately, each also with a third of the steps.

    `kind`: one of COMPARISONS. `side`: pixels; None: the native size. `images`: of each request. Returns the rows, and
    for each request of `kind` the ratios "request" and "step" to the plain one. Raises RequestRefused if the release
    does not serve such requests, and ValueError for fewer than 6 steps.
    """
    if steps < 2 * _FEWER_STEPS:
        raise ValueError(f"{steps} steps are too few to compare; {2 * _FEWER_STEPS} are needed")
    plain = resolve(Case(_PLAIN, runs, steps, side=side, images=images).request(), loaded.served)
    others = COMPARISONS[kind](loaded, plain)
    requests = {}
    for name, params in {_PLAIN: plain, **others}.items():
        requests[name] = params
        requests[f"{name}, fewer steps"] = replace(params, num_inference_steps=steps // _FEWER_STEPS)
    named = [(f"{loaded.release} {name}", loaded, params) for name, params in requests.items()]
    rows = dict(zip(requests, measure_requests(named, warm_ups, runs), strict=True))

    def step(name: str) -> float:
        more, fewer = rows[name], rows[f"{name}, fewer steps"]
        return (more.stages["denoise"] - fewer.stages["denoise"]) / (more.steps - fewer.steps)

    ratios = {
        name: {"request": rows[name].p50 / rows[_PLAIN].p50, "step": step(name) / step(_PLAIN)} for name in others
    }
    return list(rows.values()), ratios


# -- the command -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    parser = release_parser(__doc__, ("text", *COMPARISONS))
    parser.add_argument("--peer", help="text: the model's folder or Hub id, to measure diffusers on it, too")
    parser.add_argument("--precision", action="append", choices=list(PRECISIONS), help="text: repeatable; alternating")
    parser.add_argument("--only", action="append", help="text: a case, repeatable")
    parser.add_argument("--steps", type=int, default=30, help="of requests that are compared")
    parser.add_argument("--runs", type=int, default=20, help="of requests that are compared")
    parser.add_argument("--images", type=int, default=1, help="of requests that are compared")
    parser.add_argument("--side", type=int, help="pixels of requests that are compared; default: the native size")
    options = parser.parse_args(arguments)
    served: list[dict[str, object]]
    served = [{"precision": name, "fp16_steps": Fp16Steps()} for name in options.precision or ()] or [{}]
    loaded = [load_in_process(options.store, options.release, **changes) for changes in served]
    if options.kind == "text":
        cases = [case for case in (*CASES, *SD_CASES) if case.name in options.only] if options.only else None
        rows = list(measure_cases(loaded, options.peer, cases))
    else:
        rows, ratios = compare(
            loaded[0], options.kind, options.steps, options.runs, side=options.side, images=options.images
        )
        for name, numbers in ratios.items():
            print(f"{name}: {', '.join(f'{key} {value:.3f}' for key, value in numbers.items())} of {_PLAIN}")
    finish(rows, options.out)


if __name__ == "__main__":
    main()
