"""Draws the exam's captions with diffusers' pipelines and scores the pictures.

`python -m training.evaluate MODEL_DIR [--refiner]` prints a table, the first failures, and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
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

from training.captions import Demand, parse
from training.exam import exam
from training.score import Verdict, score

SHOWN = (
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


# Names of requests (model/denoising/samplers.py) -> diffusers' class and what is set of it.
SAMPLERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Euler": (EulerDiscreteScheduler, {}),
    "Euler a": (EulerAncestralDiscreteScheduler, {}),
    "DPM++ 2M SDE Karras": (
        DPMSolverMultistepScheduler,
        {"algorithm_type": "sde-dpmsolver++", "use_karras_sigmas": True},
    ),
}


class Painter:
    """A model folder's pipelines on one device."""

    def __init__(
        self,
        folder: Path,
        device: str,
        refiner: bool,
        steps: int,
        guidance: float,
        batch: int,
        scheduler: str,
        frac: float,
    ) -> None:
        """`frac`: of the steps, after which the refiner takes over."""
        dtype = torch.float16 if device == "cuda" else torch.float32
        self.steps, self.guidance, self.frac, self.batch = steps, guidance, frac, batch
        self.base = StableDiffusionXLPipeline.from_pretrained(folder, dtype=dtype).to(device)
        self.base.set_progress_bar_config(disable=True)
        kind, settings = SAMPLERS[scheduler]
        self.base.scheduler = kind.from_config(self.base.scheduler.config, **settings)
        self.refiner = None
        if refiner:
            self.refiner = StableDiffusionXLImg2ImgPipeline.from_pretrained(folder / "refiner", dtype=dtype)
            self.refiner.to(device).set_progress_bar_config(disable=True)
            self.refiner.scheduler = kind.from_config(self.refiner.scheduler.config, **settings)

    def paint(self, prompts: list[str], seed: int, refined: bool, size: tuple[int, int]) -> list[Image.Image]:
        """Picture i starts from noise of seed + i."""
        pictures: list[Image.Image] = []
        common: dict[str, Any] = {"num_inference_steps": self.steps, "guidance_scale": self.guidance}
        for first in range(0, len(prompts), self.batch):
            some = prompts[first : first + self.batch]
            noise = [torch.Generator().manual_seed(seed + first + i) for i in range(len(some))]
            common |= {"prompt": some, "generator": noise}
            shape = {"height": size[0], "width": size[1]}
            if refined and self.refiner is not None:
                latents = self.base(**common, **shape, denoising_end=self.frac, output_type="latent").images
                pictures += self.refiner(**common, image=latents, denoising_start=self.frac).images
            else:
                pictures += self.base(**common, **shape).images
        return pictures


def grid(pictures: list[Image.Image], columns: int = 4) -> Image.Image:
    rows = [np.hstack([np.asarray(p) for p in pictures[i : i + columns]]) for i in range(0, len(pictures), columns)]
    return Image.fromarray(np.vstack(rows))


def tally(kinds: list[str], verdicts: list[Verdict]) -> dict[str, float]:
    """Percent right, in all and by kind."""
    right: Counter[str] = Counter()
    for kind, verdict in zip(kinds, verdicts, strict=True):
        right[kind] += verdict.ok
    out = {"all": 100 * sum(right.values()) / len(kinds)}
    return out | {kind: 100 * right[kind] / kinds.count(kind) for kind in sorted(set(kinds))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a folder in diffusers' layout, with refiner/ in it")
    parser.add_argument("--refiner", action="store_true", help="score the refined pictures too")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--scheduler", choices=SAMPLERS, default="Euler")
    parser.add_argument("--guidance", type=float, help="default: what the model's defaults.json says")
    parser.add_argument("--denoising-frac", type=float, help="share of steps before the refiner; default likewise")
    parser.add_argument("--count", type=int, default=200, help="captions in each half of the exam")
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, nargs=2, default=(256, 256), metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--pictures", type=Path, help="write a grid of twelve prompts here (PNG)")
    parser.add_argument("--failures", type=int, default=10, help="how many failed captions to print")
    arguments = parser.parse_args()
    own = json.loads((arguments.model / "defaults.json").read_text())
    guidance = own["guidance_scale"] if arguments.guidance is None else arguments.guidance
    frac = own["denoising_frac"] if arguments.denoising_frac is None else arguments.denoising_frac
    size = (arguments.size[0], arguments.size[1])
    painter = Painter(
        arguments.model,
        arguments.device,
        arguments.refiner,
        arguments.steps,
        guidance,
        arguments.batch,
        arguments.scheduler,
        frac,
    )
    began = time.monotonic()
    results: dict[str, dict[str, float]] = {}
    failed: list[str] = []
    for refined in (False, True) if arguments.refiner else (False,):
        for held in (False, True):
            questions = exam(held, arguments.count)
            demands: list[Demand] = [demand for *_, demand in questions]
            pictures = painter.paint([text for _, text, _ in questions], arguments.seed, refined, size)
            verdicts = [score(picture, demand) for picture, demand in zip(pictures, demands, strict=True)]
            name = ("held-out" if held else "seen") + (" + refiner" if refined else "")
            results[name] = tally([kind for kind, *_ in questions], verdicts)
            failed += [
                f"{name}: {text!r}: {verdict.reason}"
                for (_, text, _), verdict in zip(questions, verdicts, strict=True)
                if not verdict.ok
            ]
    columns = ("all", "single", "count", "pair")
    print(f"{'percent right':22}" + "".join(f"{column:>8}" for column in columns))
    for name, row in results.items():
        print(f"{name:22}" + "".join(f"{row.get(column, float('nan')):8.1f}" for column in columns))
    for line in failed[: arguments.failures]:
        print(line)
    if arguments.pictures:
        shown = painter.paint(list(SHOWN), arguments.seed, arguments.refiner, size)
        right = sum(score(picture, parse(text)).ok for picture, text in zip(shown, SHOWN, strict=True))
        print(f"grid: {right} of {len(SHOWN)} right")
        arguments.pictures.parent.mkdir(parents=True, exist_ok=True)
        grid(shown).quantize(128).save(arguments.pictures, optimize=True)
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    summary = {
        "model": str(arguments.model),
        "device": name,
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "scheduler": arguments.scheduler,
        "steps": arguments.steps,
        "guidance": guidance,
        "denoising_frac": frac,
        "seed": arguments.seed,
        "size": list(size),
        "captions": arguments.count,
        "percent": {name: {key: round(value, 1) for key, value in row.items()} for name, row in results.items()},
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
