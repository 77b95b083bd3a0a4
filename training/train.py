"""Train Tiny SDXL from random weights: the autoencoder, its decoder, the base, the refiner. Then export the model.

`python -m training.train --settings data/tiny-sdxl/training.toml --out DIR` writes DIR/model. After a kill or a pause
(`--stop-after`), the same command continues from the last checkpoint in DIR. `--stages` trains only some of the
stages. The decoder and the base need only the autoencoder, so two processes may train them on two GPUs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from training import architecture
from training.autoencoder import train_autoencoder, train_decoder
from training.diffusion import start_from_base, train_base, train_refiner
from training.optimizer import save_tensors
from training.pictures.dataset import ChunkWorkers
from training.run import PausedError, TrainingRun
from training.settings import load_settings
from training.write_model import export_model, random_networks

STAGES = ("vae", "decoder", "base", "refiner")
REQUIRED_STAGES: dict[str, tuple[str, ...]] = {
    "vae": (),
    "decoder": ("vae",),
    "base": ("vae",),
    "refiner": ("vae", "base"),
}


class StageError(Exception):
    """A stage cannot be trained before the stages that it needs."""


def train(run: TrainingRun, stages: Sequence[str] = STAGES) -> None:
    """Train those of `stages` that are not trained yet. Export the model if all stages are trained.

    Raises PausedError when the run's time is over, StageError for a stage before one that it needs.
    """
    networks = random_networks(run.settings.seed)
    seconds_file = run.out / "seconds.json"

    def result_file(stage: str) -> Path:
        return run.out / f"{stage}.safetensors"

    def read_seconds() -> dict[str, float]:
        """Return the seconds of each trained stage, and the scaling factor of the autoencoder."""
        seconds: dict[str, float] = json.loads(seconds_file.read_text()) if seconds_file.exists() else {}
        return seconds

    def save_result(stage: str, modules: dict[str, nn.Module], seconds: float) -> None:
        weights = {f"{key}.{name}": w for key, module in modules.items() for name, w in module.state_dict().items()}
        save_tensors(weights, result_file(stage))
        run.remove_checkpoint(stage)
        recorded = read_seconds() | {stage: round(seconds, 1)}
        if stage == "vae":
            recorded["vae_scaling_factor"] = networks.vae.config.scaling_factor
        seconds_file.write_text(json.dumps(recorded) + "\n")
        run.log(f"{stage} done in {seconds:.0f} s")

    def run_stage(stage: str, modules: dict[str, nn.Module], train_stage: Callable[[], float]) -> None:
        """Load the stage's result into `modules`, or train it if it is one of `stages`."""
        if result_file(stage).exists():
            weights = load_file(result_file(stage))
            for key, module in modules.items():
                prefix = f"{key}."
                own = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
                module.load_state_dict(own)
        elif stage in stages:
            missing = [required for required in REQUIRED_STAGES[stage] if not result_file(required).exists()]
            if missing:
                raise StageError(f"Stage {stage} needs stage {missing[0]}, which is not trained. Train it first.")
            torch.manual_seed(run.settings.seed + STAGES.index(stage))
            save_result(stage, modules, train_stage())

    def train_new_autoencoder() -> float:
        networks.vae.load_state_dict(architecture.vae().state_dict())  # random weights that depend on the seed alone
        return train_autoencoder(run, networks.vae)

    def train_new_refiner() -> float:
        start_from_base(networks.refiner_unet, networks.unet)
        return train_refiner(run, networks)

    vae: dict[str, nn.Module] = {"vae": networks.vae}
    run_stage("vae", vae, train_new_autoencoder)
    if result_file("vae").exists():
        networks.vae.register_to_config(scaling_factor=read_seconds()["vae_scaling_factor"])
    run_stage("decoder", vae, lambda: train_decoder(run, networks.vae))
    networks.vae.to(run.device, memory_format=torch.channels_last).eval().requires_grad_(False)
    base: dict[str, nn.Module] = {
        "text_encoder": networks.text_encoder,
        "text_encoder_2": networks.text_encoder_2,
        "unet": networks.unet,
    }
    run_stage("base", base, lambda: train_base(run, networks))
    run_stage("refiner", {"refiner_unet": networks.refiner_unet}, train_new_refiner)

    if missing := [stage for stage in STAGES if not result_file(stage).exists()]:
        run.log(f"No model is exported yet: {', '.join(missing)} not trained.")
        return
    export_model(networks, run.out / "model")
    run.log(f"exported {run.out / 'model'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=Path, required=True, help="a TOML file such as data/tiny-sdxl/training.toml")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoints and of the finished model/")
    parser.add_argument(
        "--stop-after", type=float, metavar="SECONDS", help="save a checkpoint and stop after this time"
    )
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES, help="train only these; default: all")
    arguments = parser.parse_args()
    settings = load_settings(arguments.settings)
    arguments.out.mkdir(parents=True, exist_ok=True)
    workers = ChunkWorkers(settings.workers)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    try:
        train(TrainingRun(settings, arguments.out, workers, arguments.stop_after), arguments.stages)
    except PausedError:
        pass  # its log states how to continue
    except StageError as error:
        raise SystemExit(str(error)) from None
    finally:
        workers.close()


if __name__ == "__main__":
    main()
