"""Compare requests with a ControlNet to plain text to image on one release, alternating in one run.

    python -m engine_builder.benchmarks.control STORE NAME/1 --model MODEL --controlnet canny=PATH --out docs/...json

Measures in this process, from the request to the encoded JPEG, at the native size, one guided image. For each
ControlNet of the release, prints the ratio of the p50 of a request with it to that of a plain request, and the same
ratio of a step. A step's time is the difference of the denoising times of two numbers of steps.

With `--model` and `--controlnet` (the folders of the build) the network's share of the UNet's arithmetic is printed:
the floating-point operations of a step, counted on the networks of the folders. The last line is JSON.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from engine_builder.backends.aot_inductor.compile import example_inputs
from engine_builder.benchmarks.bench import (
    load_in_process,
    measure,
    precision_of,
    release_parser,
    release_work,
    timed_row,
)
from engine_builder.benchmarks.rows import Row, append_rows
from engine_builder.checkpoints.controlnet import parse_controlnet
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.networks.network import load_network
from model.api.request import GenerationRequest
from model.api.resolve import resolve
from model.errors import RequestRefused
from model.loading.load import Loaded
from model.pipeline.params import Control, GenerationParams
from model.pipeline.spec import CONTROLNET, UNET
from model.store.precision import FP16

_FEWER_STEPS = 3  # times fewer, in the requests whose time is subtracted
_PLAIN = "text to image"


def compare(
    loaded: Loaded, steps: int, runs: int, warm_ups: int = 3, side: int | None = None
) -> tuple[list[Row], dict[str, dict[str, float]]]:
    """Measure all requests alternately. `side`: pixels; None: the native size.

    Returns the rows, and for each ControlNet the ratios "request" and "step". Raises RequestRefused if the release has
    no ControlNets, and ValueError for fewer than 6 steps.
    """
    if not loaded.served.controlnets:
        raise RequestRefused("controls", f"release {loaded.release} has no ControlNets.")
    plain = plain_request(loaded, steps, side)
    return compare_to_plain(loaded, plain, dict(_cases(loaded, plain)), runs, warm_ups)


def compare_to_plain(
    loaded: Loaded, plain: GenerationParams, others: Mapping[str, GenerationParams], runs: int, warm_ups: int
) -> tuple[list[Row], dict[str, dict[str, float]]]:
    """Measure a plain request and `others` alternately, each also with a third of the steps.

    Returns the rows, and for each of `others` the ratios "request" and "step" to the plain one.
    """
    cases = {}
    for name, params in ({_PLAIN: plain} | {f"with {name}": params for name, params in others.items()}).items():
        cases[name] = params
        cases[f"{name}, fewer steps"] = replace(params, num_inference_steps=params.num_inference_steps // _FEWER_STEPS)
    measured = measure([release_work(loaded, params) for params in cases.values()], warm_ups, runs)
    rows = {
        name: timed_row(f"{loaded.release} {name}", params, precision_of(loaded), *results)
        for (name, params), results in zip(cases.items(), measured, strict=True)
    }

    def step(case: str) -> float:
        more, fewer = rows[case], rows[f"{case}, fewer steps"]
        assert more.stages is not None and fewer.stages is not None
        return (more.stages["denoise"] - fewer.stages["denoise"]) / (more.steps - fewer.steps)

    ratios = {
        name: {
            "request": rows[f"with {name}"].p50 / rows[_PLAIN].p50,
            "step": step(f"with {name}") / step(_PLAIN),
        }
        for name in others
    }
    return list(rows.values()), ratios


def plain_request(loaded: Loaded, steps: int, side: int | None) -> GenerationParams:
    """Return one guided text-to-image request. Raises ValueError for too few steps to compare."""
    if steps < 2 * _FEWER_STEPS:
        raise ValueError(f"{steps} steps are too few to compare; {2 * _FEWER_STEPS} are needed")
    request = GenerationRequest(
        prompt="a photograph of an astronaut riding a horse",
        seed=1,
        width=side,
        height=side,
        num_inference_steps=steps,
        scheduler="Euler",
        guidance_scale=7.5,
    )
    return resolve(request, loaded.served)


def _cases(loaded: Loaded, plain: GenerationParams) -> Iterator[tuple[str, GenerationParams]]:
    levels = np.random.default_rng(0).integers(0, 256, (plain.height, plain.width, 3), dtype=np.uint8)
    for name, types in loaded.served.controlnets.items():
        control = Control(name, levels, scale=1.0, start=0.0, end=1.0, mode=0 if types else None)
        yield name, replace(plain, controls=(control,))


def arithmetic_share(checkpoint: Checkpoint, controlnet: str, side: int = 1024) -> float:
    """Return a ControlNet's floating-point operations of a step, as a share of the UNet's. Loads no weights."""

    def count(component: str) -> int:
        network = load_network(checkpoint, component, FP16, device="meta")
        inputs: dict[str, Any] = example_inputs(network.signature, 1, side, side, "meta")
        with torch.inference_mode(), FlopCounterMode(display=False) as counter:
            network.module(*inputs.values())
        return int(counter.get_total_flops())

    return count(f"{CONTROLNET}.{controlnet}") / count(UNET)


def main() -> None:
    parser = release_parser(__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--side", type=int, help="pixels; default: the native size")
    parser.add_argument("--model", type=Path, help="the folder of the model")
    parser.add_argument("--controlnet", action="append", default=[], help="NAME=PATH, as in the build")
    arguments = parser.parse_args()
    loaded = load_in_process(arguments.store, arguments.release)
    rows, ratios = compare(loaded, arguments.steps, arguments.runs, side=arguments.side)
    for row in rows:
        print(f"{row.case}: p50 {row.p50} {row.unit}, p99 {row.p99}, stages {row.stages}", flush=True)
    if arguments.model:
        checkpoint = Checkpoint(arguments.model, controlnets=tuple(map(parse_controlnet, arguments.controlnet)))
        for name, _ in checkpoint.controlnets:
            ratios[name]["share"] = arithmetic_share(checkpoint, name)
    for name, numbers in ratios.items():
        print(name, ", ".join(f"{key} {value:.3f}" for key, value in numbers.items()))
    if arguments.out is not None:
        append_rows(arguments.out, rows)
    print(json.dumps({"rows": [row.to_dict() for row in rows], "ratios": ratios}))


if __name__ == "__main__":
    main()
