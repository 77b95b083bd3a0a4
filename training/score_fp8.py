"""Score the trained model's images in FP8 or INT8 and without it, on the captions of the evaluation set.

`python -m training.score_fp8 MODEL_DIR --store STORE` needs a calibration (`preheat calibrate`). It prints the report
of `preheat check-fp8` with the share of prompt-true pictures, and one JSON line. Like that command it stores the
validation for `preheat publish`, which then also limits the loss of prompt-true pictures. Exit status 1 if a limit is
violated.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from engine_builder.backends.aot_inductor.compile import build_target
from engine_builder.checkpoints.find import find_checkpoints
from engine_builder.checkpoints.release_settings import read_model_facts
from engine_builder.quantization.picture_check import check_quantization, check_target
from engine_builder.quantization.policy import DEFAULTS, Policy
from engine_builder.quantization.validation.compare import validation_requests
from engine_builder.quantization.validation.contact_sheet import contact_sheet
from engine_builder.quantization.validation.report import describe
from engine_builder.quantization.validation.stored import write_validation
from engine_builder.quantization.validation.thresholds import Thresholds, violations
from engine_builder.stores.store import open_writable_store
from model.images.pixels import Pixels
from model.pipeline.params import GenerationParams
from model.store.precision import FP8, FP16, FP32, INT8, Precision
from training.pictures.evaluation_set import EvaluationCaption, evaluation_set
from training.pictures.score import score_image

SETS = (False, True)  # values of `held_out`


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a folder in diffusers' layout")
    parser.add_argument("--store", required=True, help="the store that has the calibration")
    parser.add_argument("--policy", type=Path, help="a policy file; default: the default policy")
    parser.add_argument("--quantized", choices=(FP8.name, INT8.name), default=FP8.name, help="the quantized numbers")
    parser.add_argument("--refiner", action="store_true", help="finish each image with the model's refiner")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, help="guidance scale; default: guidance_scale of defaults.json")
    parser.add_argument("--count", type=int, default=200, help="captions of each set (seen, held-out)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status. arguments: those of the command line by default."""
    options = _parse_arguments(arguments)
    target = build_target()
    quantized = Precision.named(options.quantized)
    check_target(target, quantized)
    base, refiner = find_checkpoints(str(options.model), None)
    if not options.refiner:
        refiner = None
    guidance = options.guidance
    if guidance is None:
        guidance = json.loads((options.model / "defaults.json").read_text())["guidance_scale"]
    facts = read_model_facts(base, None)
    captions: list[EvaluationCaption] = []
    requests: list[GenerationParams] = []
    for held_out in SETS:
        found = evaluation_set(held_out, options.count)
        captions += found
        # As `training.evaluate` does: seeds from 0 in each set, and no negative prompt.
        requests += validation_requests(
            [caption.text for caption in found], facts.native_width, facts.native_height, steps=options.steps,
            guidance=guidance, negative_prompt=None, use_refiner=refiner is not None, min_prompts=1,
        )  # fmt: skip
    statements = {caption.text: caption.statement for caption in captions}

    def score(pixels: Pixels, prompt: str) -> bool:
        return score_image(pixels, statements[prompt]).ok

    def print_progress(done: int, prompts: int) -> None:
        if done % 10 == 0 or done == prompts:
            print(f"{done}/{prompts} captions", flush=True)

    started = time.monotonic()
    store = open_writable_store(options.store)
    precision = FP16 if target.device == "cuda" else FP32
    policy = Policy.read(options.policy) if options.policy else DEFAULTS[quantized]
    check = check_quantization(
        base, refiner, precision, target.device, policy, requests, store, report=print_progress, score=score,
        quantized_precision=quantized,
    )  # fmt: skip
    report = check.comparison.report
    write_validation(store, report, contact_sheet(report, check.comparison.pairs))
    Console(highlight=False).print(describe(report))
    found_violations = violations(report, Thresholds.for_check(len(requests), options.steps))
    for sentence in found_violations:
        print(f"refused: {sentence}")
    print(
        json.dumps(
            {
                "model": str(options.model),
                "device": report.device,
                "torch": report.torch,
                "reference": report.reference,
                "quantized": report.quantized,
                "steps": options.steps,
                "guidance": guidance,
                "refiner": refiner is not None,
                "captions": len(requests),
                "layers": {component: len(layers) for component, layers in check.layers.items()},
                "reference_true": sum(bool(prompt.reference_true) for prompt in report.prompts),
                "quantized_true": sum(bool(prompt.quantized_true) for prompt in report.prompts),
                "lost": sum(bool(p.reference_true and not p.quantized_true) for p in report.prompts),
                "won": sum(bool(p.quantized_true and not p.reference_true) for p in report.prompts),
                "latents_decibels": report.summary.latents_decibels.model_dump(mode="json"),
                "seconds": round(time.monotonic() - started, 1),
            }
        )
    )
    return 1 if found_violations else 0


if __name__ == "__main__":
    sys.exit(main())
