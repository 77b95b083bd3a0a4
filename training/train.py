"""Trains Tiny SDXL from nothing: the autoencoder, the base, the refiner; then writes the model.

`python -m training.train --settings data/tiny-sdxl/training.toml --out DIR` writes DIR/model. Killed or paused
(`--stop-after`), the same command goes on from the last checkpoint in DIR.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from training import diffusion, export, settings, vae
from training.data import Workers
from training.learner import write
from training.run import PausedError, Run


def train(run: Run, start: Path | None = None) -> None:
    """All stages that are not done yet, then the export. Raises PausedError when the run's time is up.

    With `start`, an exported model, its autoencoder is kept and the other networks learn on from its weights."""
    torch.manual_seed(run.settings.seed)
    networks = export.load(start) if start else export.random_networks(run.settings.seed)
    seconds_file = run.out / "seconds.json"
    seconds = json.loads(seconds_file.read_text()) if seconds_file.exists() else {}

    def stage(name: str, modules: dict[str, nn.Module]) -> bool:
        """Loads the stage's result; False where it is still to be made."""
        path = run.out / f"{name}.safetensors"
        if path.exists():
            tensors = load_file(path)
            for key, module in modules.items():
                prefix = f"{key}."
                module.load_state_dict({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})
        return path.exists()

    def finish(name: str, modules: dict[str, nn.Module], took: float) -> None:
        tensors: dict[str, Tensor] = {
            f"{key}.{n}": t for key, module in modules.items() for n, t in module.state_dict().items()
        }
        write(tensors, run.out / f"{name}.safetensors")
        (run.out / f"{name}.state.safetensors").unlink(missing_ok=True)
        seconds[name] = round(took, 1)
        seconds_file.write_text(json.dumps(seconds) + "\n")
        run.log(f"{name} done in {took:.0f} s")

    if start and not (run.out / "vae.safetensors").exists():
        seconds["vae_scaling_factor"] = networks.vae.config.scaling_factor
        finish("vae", {"vae": networks.vae}, 0.0)
    if stage("vae", {"vae": networks.vae}):
        networks.vae.register_to_config(scaling_factor=seconds["vae_scaling_factor"])
    else:
        networks.vae, took = vae.train(run)
        seconds["vae_scaling_factor"] = networks.vae.config.scaling_factor
        finish("vae", {"vae": networks.vae}, took)
    if not stage("decoder", {"vae": networks.vae}):
        finish("decoder", {"vae": networks.vae}, vae.train_decoder(run, networks.vae))
    networks.vae.to(run.device, memory_format=torch.channels_last).eval().requires_grad_(False)
    base = {
        "text_encoder": networks.text_encoder,
        "text_encoder_2": networks.text_encoder_2,
        "unet": networks.unet,
    }
    if not stage("base", base):
        finish("base", base, diffusion.train_base(run, networks))
    refiner = {"refiner_unet": networks.refiner_unet}
    if not stage("refiner", refiner):
        finish("refiner", refiner, diffusion.train_refiner(run, networks))
    export.export(networks, run.out / "model")
    run.log(f"wrote {run.out / 'model'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="checkpoints, and the finished model in model/")
    parser.add_argument("--stop-after", type=float, metavar="SECONDS", help="save and stop after this time")
    parser.add_argument("--start-from", type=Path, metavar="MODEL", help="an exported model to learn on from")
    parser.add_argument("--compile", action="store_true", help="compile the networks: minutes first, faster later")
    arguments = parser.parse_args()
    chosen = settings.load(arguments.settings)
    arguments.out.mkdir(parents=True, exist_ok=True)
    workers = Workers(chosen.workers)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    try:
        train(Run(chosen, arguments.out, workers, arguments.stop_after, arguments.compile), arguments.start_from)
    except PausedError:
        pass
    finally:
        workers.close()


if __name__ == "__main__":
    main()
