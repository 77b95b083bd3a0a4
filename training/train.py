"""Trains Tiny SDXL from nothing: the autoencoder, its decoder, the base, the refiner; then writes the model.

`python -m training.train --settings data/tiny-sdxl/training.toml --out DIR` writes DIR/model. Killed or paused
(`--stop-after`), the same command goes on from the last checkpoint in DIR. `--stages` trains some of the stages only:
the decoder and the base need the autoencoder and nothing else, so two processes may train them on two GPUs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from training import diffusion, export, settings, vae
from training.data import Workers
from training.learner import write
from training.run import PausedError, Run

STAGES = ("vae", "decoder", "base", "refiner")  # and what each is trained on:
NEEDS: dict[str, tuple[str, ...]] = {"vae": (), "decoder": ("vae",), "base": ("vae",), "refiner": ("vae", "base")}


def train(run: Run, start: Path | None = None, stages: Sequence[str] = STAGES) -> None:
    """Those of `stages` that are not done yet; then the export, if none is missing. Raises PausedError when the run's
    time is up, SystemExit where a stage comes before what it needs.

    With `start`, an exported model, its autoencoder is kept and the other networks learn on from its weights."""
    networks = export.load(start) if start else export.random_networks(run.settings.seed)
    seconds_file = run.out / "seconds.json"

    def seconds() -> dict[str, float]:
        found: dict[str, float] = json.loads(seconds_file.read_text()) if seconds_file.exists() else {}
        return found

    def done(name: str) -> bool:
        return (run.out / f"{name}.safetensors").exists()

    def wanted(name: str, modules: dict[str, nn.Module]) -> bool:
        """Loads the stage's result where there is one; else says whether to make it now."""
        path = run.out / f"{name}.safetensors"
        if path.exists():
            tensors = load_file(path)
            for key, module in modules.items():
                prefix = f"{key}."
                module.load_state_dict({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})
            return False
        missing = [need for need in NEEDS[name] if not done(need)]
        if name in stages and missing:
            raise SystemExit(f"The stage {name} needs what {missing[0]} makes: train that first.")
        torch.manual_seed(run.settings.seed + STAGES.index(name))
        return name in stages

    def finish(name: str, modules: dict[str, nn.Module], took: float, **more: float) -> None:
        tensors: dict[str, Tensor] = {
            f"{key}.{n}": t for key, module in modules.items() for n, t in module.state_dict().items()
        }
        write(tensors, run.out / f"{name}.safetensors")
        (run.out / f"{name}.state.safetensors").unlink(missing_ok=True)
        seconds_file.write_text(json.dumps(seconds() | {name: round(took, 1)} | more) + "\n")
        run.log(f"{name} done in {took:.0f} s")

    if start and not done("vae"):
        finish("vae", {"vae": networks.vae}, 0.0, vae_scaling_factor=networks.vae.config.scaling_factor)
    if wanted("vae", {"vae": networks.vae}):
        networks.vae, took = vae.train(run)
        finish("vae", {"vae": networks.vae}, took, vae_scaling_factor=networks.vae.config.scaling_factor)
    if done("vae"):
        networks.vae.register_to_config(scaling_factor=seconds()["vae_scaling_factor"])
    if wanted("decoder", {"vae": networks.vae}):
        finish("decoder", {"vae": networks.vae}, vae.train_decoder(run, networks.vae))
    networks.vae.to(run.device, memory_format=torch.channels_last).eval().requires_grad_(False)
    base = {
        "text_encoder": networks.text_encoder,
        "text_encoder_2": networks.text_encoder_2,
        "unet": networks.unet,
    }
    if wanted("base", base):
        finish("base", base, diffusion.train_base(run, networks))
    refiner = {"refiner_unet": networks.refiner_unet}
    if wanted("refiner", refiner):
        finish("refiner", refiner, diffusion.train_refiner(run, networks))
    if missing := [name for name in STAGES if not done(name)]:
        run.log(f"no model yet: {', '.join(missing)} not trained")
        return
    export.export(networks, run.out / "model")
    run.log(f"wrote {run.out / 'model'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="checkpoints, and the finished model in model/")
    parser.add_argument("--stop-after", type=float, metavar="SECONDS", help="save and stop after this time")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--start-from", type=Path, metavar="MODEL", help="an exported model to learn on from")
    parser.add_argument("--eager", action="store_true", help="do not compile the decoder and the refiner")
    arguments = parser.parse_args()
    chosen = settings.load(arguments.settings)
    arguments.out.mkdir(parents=True, exist_ok=True)
    workers = Workers(chosen.workers)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    try:
        run = Run(chosen, arguments.out, workers, arguments.stop_after, fast=not arguments.eager)
        train(run, arguments.start_from, arguments.stages)
    except PausedError:
        pass
    finally:
        workers.close()


if __name__ == "__main__":
    main()
