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
import numpy as np
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLPipeline,
)
from PIL import Image

from training.captions import parse_caption
from training.evaluation_set import evaluation_set
from training.score import Verdict, score_image

GRID_PROMPTS = (
    "a large red circle on a blue background",
    "two green squares on a white background",
    "a yellow triangle to the left of a purple square on a black background",
    "a small orange star at the top on a purple background",
    "three white stars on a green background",
    "a large black star on a yellow background",
    "a blue circle above a red triangle on a white background",
    "a small green triangle on the right on an orange background",
    "three small purple circles on a yellow background",
    "a white square below an orange star on a black background",
    "a large purple triangle in the centre on a white background",
    "a black circle and a yellow square on a red background",
)
COLUMNS = ("all", "single", "count", "pair")

# Sampler names of requests (model/denoising/samplers.py) -> diffusers' class and its settings.
SAMPLERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Euler": (EulerDiscreteScheduler, {}),
    "Euler a": (EulerAncestralDiscreteScheduler, {}),
    "DPM++ 2M SDE Karras": (
        DPMSolverMultistepScheduler,
        {"algorithm_type": "sde-dpmsolver++", "use_karras_sigmas": True},
    ),
}


class ImageGenerator:
    """The pipelines of a model folder on one device.

    batch: images per call of a pipeline.
    denoising_frac: share of the steps that the base does before the refiner.
    """

    def __init__(
        self,
        folder: Path,
        device: str,
        *,
        refiner: bool,
        steps: int,
        guidance: float,
        batch: int,
        scheduler: str,
        denoising_frac: float,
    ) -> None:
        dtype = torch.float16 if device == "cuda" else torch.float32
        self.steps, self.guidance, self.denoising_frac, self.batch = steps, guidance, denoising_frac, batch
        self.base = StableDiffusionXLPipeline.from_pretrained(folder, dtype=dtype).to(device)
        self.base.set_progress_bar_config(disable=True)
        scheduler_class, settings = SAMPLERS[scheduler]
        self.base.scheduler = scheduler_class.from_config(self.base.scheduler.config, **settings)
        self.refiner = None
        if refiner:
            self.refiner = StableDiffusionXLImg2ImgPipeline.from_pretrained(folder / "refiner", dtype=dtype)
            self.refiner.to(device).set_progress_bar_config(disable=True)
            self.refiner.scheduler = scheduler_class.from_config(self.refiner.scheduler.config, **settings)

    def generate(self, prompts: list[str], seed: int, refined: bool, size: tuple[int, int]) -> list[Image.Image]:
        """Generate an image of each prompt. Image i starts from noise of seed + i. size: height, width."""
        images: list[Image.Image] = []
        settings: dict[str, Any] = {"num_inference_steps": self.steps, "guidance_scale": self.guidance}
        for first in range(0, len(prompts), self.batch):
            batch = prompts[first : first + self.batch]
            generators = [torch.Generator().manual_seed(seed + first + i) for i in range(len(batch))]
            settings |= {"prompt": batch, "generator": generators}
            shape = {"height": size[0], "width": size[1]}
            if refined and self.refiner is not None:
                latents = self.base(**settings, **shape, denoising_end=self.denoising_frac, output_type="latent").images
                images += self.refiner(**settings, image=latents, denoising_start=self.denoising_frac).images
            else:
                images += self.base(**settings, **shape).images
        return images


def image_grid(images: list[Image.Image], columns: int = 4) -> Image.Image:
    rows = [np.hstack([np.asarray(p) for p in images[i : i + columns]]) for i in range(0, len(images), columns)]
    return Image.fromarray(np.vstack(rows))


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
    parser.add_argument("--scheduler", choices=SAMPLERS, default="Euler")
    parser.add_argument("--guidance", type=float, help="guidance scale; default: guidance_scale of defaults.json")
    parser.add_argument(
        "--denoising-frac",
        type=float,
        help="share of the steps before the refiner; default: denoising_frac of defaults.json",
    )
    parser.add_argument("--count", type=int, default=200, help="captions of each set (seen, held-out)")
    parser.add_argument("--batch", type=int, default=50, help="images generated at once")
    parser.add_argument("--seed", type=int, default=0, help="noise seed of the first image")
    parser.add_argument("--size", type=int, nargs=2, default=(256, 256), metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--pictures", type=Path, metavar="FILE", help="also write a PNG with images of twelve prompts")
    parser.add_argument("--failures", type=int, default=10, help="number of failed captions to print")
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
    size = (options.size[0], options.size[1])
    generator = make_generator(
        options.model,
        options.device,
        refiner=options.refiner,
        steps=options.steps,
        guidance=guidance,
        batch=options.batch,
        scheduler=options.scheduler,
        denoising_frac=denoising_frac,
    )
    started = time.monotonic()
    results: dict[str, dict[str, float]] = {}
    failures: list[str] = []
    for refined in (False, True) if options.refiner else (False,):
        for held_out in (False, True):
            captions = evaluation_set(held_out, options.count)
            images = generator.generate([caption.text for caption in captions], options.seed, refined, size)
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
    for failure in failures[: options.failures]:
        print(failure)
    if options.pictures:
        images = generator.generate(list(GRID_PROMPTS), options.seed, options.refiner, size)
        correct = sum(
            score_image(image, parse_caption(text)).ok for image, text in zip(images, GRID_PROMPTS, strict=True)
        )
        print(f"grid: {correct} of {len(GRID_PROMPTS)} correct")
        options.pictures.parent.mkdir(parents=True, exist_ok=True)
        image_grid(images).quantize(128).save(options.pictures, optimize=True)
    summary = {
        "model": str(options.model),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "CPU",
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "scheduler": options.scheduler,
        "steps": options.steps,
        "guidance": guidance,
        "denoising_frac": denoising_frac,
        "seed": options.seed,
        "size": list(size),
        "captions": options.count,
        "percent": {name: {key: round(value, 1) for key, value in row.items()} for name, row in results.items()},
        "seconds": round(time.monotonic() - started, 1),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
