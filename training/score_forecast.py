"""Score the trained model's images with forecasts and without, on held-out captions of the evaluation set.

`python -m training.score_forecast MODEL_DIR [--sampler NAME ...]` generates each image in eager PyTorch: without
forecasts, with each level that the sampler offers, and without forecasts in as many steps as the level evaluates.
`--guided START:END` adds images with guidance from START to END only. It prints a table and one JSON line for each
sampler: the prompt-true images, and the PSNR to the image of all steps.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from engine_builder.backends.aot_inductor.compile import build_target
from engine_builder.building.eager_model import load_eager_model
from engine_builder.checkpoints.find import find_checkpoints
from engine_builder.quantization.validation.compare import validation_requests
from engine_builder.quantization.validation.distances import psnr
from model.denoising.sampler_specs import SPECS
from model.images.pixels import Pixels
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.params import GenerationParams
from model.pipeline.request_plan import plan_request
from model.pipeline.text_to_image import generate
from model.store.precision import FP16, FP32
from training.pictures.evaluation_set import evaluation_set
from training.pictures.score import score_image

BATCH = 16  # requests that are generated together


def parse_shares(text: str) -> dict[str, float]:
    """Return the fields of the request for START:END."""
    return dict(zip(("guidance_start", "guidance_end"), map(float, text.split(":")), strict=True))


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a folder in diffusers' layout")
    parser.add_argument("--sampler", action="append", help="repeatable; default: Euler")
    parser.add_argument("--guided", type=parse_shares, help="guidance_start:guidance_end of further images")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--guidance", type=float, default=3.0, help="guidance scale")
    parser.add_argument("--count", type=int, default=200, help="captions")
    parser.add_argument("--first", type=int, default=0, help="the first caption, whose number is its seed")
    return parser.parse_args(arguments)


def generate_all(model: LoadedModel, requests: Sequence[GenerationParams]) -> list[Pixels]:
    """Return the image of each request."""
    batches = (requests[first : first + BATCH] for first in range(0, len(requests), BATCH))
    return [image for batch in batches for image in generate(model, batch)[0]]


def score_sampler(model: LoadedModel, sampler: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the scores of a sampler by level. `same`: without forecasts, in as many steps as are evaluated."""
    captions = evaluation_set(held_out=True, count=options.first + options.count)[options.first :]
    requests = validation_requests(
        [caption.text for caption in captions], model.settings.native_width, model.settings.native_height,
        steps=options.steps, guidance=options.guidance, negative_prompt=None, use_refiner=False, min_prompts=1,
    )  # fmt: skip
    plain = [replace(one, scheduler=sampler, seed=options.first + one.seed) for one in requests]

    def score(requests: Sequence[GenerationParams], reference: Sequence[Pixels]) -> tuple[list[Pixels], dict[str, Any]]:
        images = generate_all(model, requests)
        true = [score_image(image, one.statement).ok for image, one in zip(images, captions, strict=True)]
        scores: dict[str, Any] = {"evaluations": plan_request(model, requests[0]).evaluations, "true": sum(true)}
        if reference:
            scores["psnr"] = [round(psnr(one, other), 1) for one, other in zip(reference, images, strict=True)]
        return images, scores

    reference, found = score(plain, [])
    scores = {"off": found}
    for level in SPECS[sampler].forecasts:
        _, scores[level] = score([replace(one, forecast=level) for one in plain], reference)
        fewer = scores[level]["evaluations"]
        _, scores[f"{level}, same"] = score([replace(one, num_inference_steps=fewer) for one in plain], reference)
    if options.guided is not None:
        _, scores["guided"] = score([replace(one, **options.guided) for one in plain], reference)
        scores["guided"] |= options.guided
    return {"sampler": sampler, "captions": len(captions), "scores": scores}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command. arguments: those of the command line by default."""
    options = _parse_arguments(arguments)
    device = build_target().device
    base, _ = find_checkpoints(str(options.model), None)
    _, model = load_eager_model(base, None, FP16 if device == "cuda" else FP32, device)
    for sampler in options.sampler or ["Euler"]:
        result = score_sampler(model, sampler, options)
        for name, scores in result["scores"].items():
            decibels = np.percentile(scores["psnr"], [25, 50, 75]).round(1) if "psnr" in scores else ""
            print(f"{sampler:20} {name:14} {scores['evaluations']:3} {scores['true']:5} {decibels}", flush=True)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
