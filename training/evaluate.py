"""Generate images of the evaluation set with diffusers' pipelines, and score them.

`python -m training.evaluate MODEL_DIR [--refiner]` prints a table, the first failures, and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import StableDiffusionXLImg2ImgPipeline, StableDiffusionXLPipeline
from PIL import Image

from training.pictures.evaluation_set import evaluation_set
from training.pictures.score import Verdict, score_image

COLUMNS = ("all", "single", "count", "pair")
BATCH = 50  # images of a call of a pipeline
MAX_SHOWN_FAILURES = 10


class ImageGenerator:
    """The pipelines of a model folder on one device.

    denoising_frac: share of the steps that the base does before the refiner.
    """

    def __init__(
        self, folder: Path, device: str, *, refiner: bool, steps: int, guidance: float, denoising_frac: float
    ) -> None:
        dtype = torch.float16 if device == "cuda" else torch.float32
        self.steps, self.guidance, self.denoising_frac = steps, guidance, denoising_frac
        self.base = StableDiffusionXLPipeline.from_pretrained(folder, dtype=dtype).to(device)
        self.base.set_progress_bar_config(disable=True)
        self.refiner = None
        if refiner:
            self.refiner = StableDiffusionXLImg2ImgPipeline.from_pretrained(folder / "refiner", dtype=dtype)
            self.refiner.to(device).set_progress_bar_config(disable=True)

    def generate(self, prompts: list[str], seed: int, refined: bool) -> list[Image.Image]:
        """Generate an image of each prompt. Image i starts from noise of seed + i."""
        images: list[Image.Image] = []
        settings: dict[str, Any] = {"num_inference_steps": self.steps, "guidance_scale": self.guidance}
        for first in range(0, len(prompts), BATCH):
            batch = prompts[first : first + BATCH]
            generators = [torch.Generator().manual_seed(seed + first + i) for i in range(len(batch))]
            settings |= {"prompt": batch, "generator": generators}
            if refined and self.refiner is not None:
                latents = self.base(**settings, denoising_end=self.denoising_frac, output_type="latent").images
                images += self.refiner(**settings, image=latents, denoising_start=self.denoising_frac).images
            else:
                images += self.base(**settings).images
        return images


def percent_correct(kinds: list[str], verdicts: list[Verdict]) -> dict[str, float]:
    """Return the percentage of correct images, of all and of each kind."""
    correct: Counter[str] = Counter()
    for kind, verdict in zip(kinds, verdicts, strict=True):
        correct[kind] += verdict.ok
    percent = {"all": 100 * sum(correct.values()) / len(kinds)}
    return percent | {kind: 100 * correct[kind] / kinds.count(kind) for kind in sorted(set(kinds))}


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a folder in diffusers' layout that contains refiner/")
    parser.add_argument("--refiner", action="store_true", help="also score images with the refiner")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, help="guidance scale; default: guidance_scale of defaults.json")
    parser.add_argument(
        "--denoising-frac",
        type=float,
        help="share of the steps before the refiner; default: denoising_frac of defaults.json",
    )
    parser.add_argument("--count", type=int, default=200, help="captions of each set (seen, held-out)")
    parser.add_argument("--seed", type=int, default=0, help="noise seed of the first image")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


def main(
    arguments: Sequence[str] | None = None, make_generator: Callable[..., ImageGenerator] = ImageGenerator
) -> None:
    """Run the command.

    arguments: those of the command line by default.
    make_generator: called like ImageGenerator.
    """
    options = _parse_arguments(arguments)
    defaults = json.loads((options.model / "defaults.json").read_text())
    guidance = defaults["guidance_scale"] if options.guidance is None else options.guidance
    denoising_frac = defaults["denoising_frac"] if options.denoising_frac is None else options.denoising_frac
    generator = make_generator(
        options.model, options.device, refiner=options.refiner, steps=options.steps, guidance=guidance,
        denoising_frac=denoising_frac,
    )  # fmt: skip
    started = time.monotonic()
    results: dict[str, dict[str, float]] = {}
    failures: list[str] = []
    for refined in (False, True) if options.refiner else (False,):
        for held_out in (False, True):
            captions = evaluation_set(held_out, options.count)
            images = generator.generate([caption.text for caption in captions], options.seed, refined)
            verdicts = [score_image(image, caption.statement) for image, caption in zip(images, captions, strict=True)]
            name = ("held-out" if held_out else "seen") + (" + refiner" if refined else "")
            results[name] = percent_correct([caption.kind for caption in captions], verdicts)
            failures += [
                f"{name}: {caption.text!r}: {verdict.reason}"
                for caption, verdict in zip(captions, verdicts, strict=True)
                if not verdict.ok
            ]
    print(f"{'percent correct':22}" + "".join(f"{column:>8}" for column in COLUMNS))
    for name, percent in results.items():
        print(f"{name:22}" + "".join(f"{percent.get(column, float('nan')):8.1f}" for column in COLUMNS))
    for failure in failures[:MAX_SHOWN_FAILURES]:
        print(failure)
    summary = {
        "model": str(options.model),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "CPU",
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "steps": options.steps,
        "guidance": guidance,
        "denoising_frac": denoising_frac,
        "seed": options.seed,
        "captions": options.count,
        "percent": {name: {key: round(value, 1) for key, value in row.items()} for name, row in results.items()},
        "seconds": round(time.monotonic() - started, 1),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
