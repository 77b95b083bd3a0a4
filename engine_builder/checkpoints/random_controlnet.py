"""Write ControlNets of SDXL's real architectures with seeded random weights, for benchmarks without public weights.

`python -m engine_builder.checkpoints.random_controlnet OUT [--kind full|mid|small] [--seed N]`

"full" has the blocks of SDXL's UNet, like diffusers/controlnet-canny-sdxl-1.0. "mid" has one transformer layer in the
last level, and "small" has no attention, like the -mid and -small models of the same authors.
"""

import argparse
from pathlib import Path
from typing import Any, Literal

import torch

from engine_builder.checkpoints.random_sdxl import UNET

Kind = Literal["full", "mid", "small"]
KINDS: tuple[Kind, ...] = ("full", "mid", "small")
_NOT_OF_CONTROLNETS = ("sample_size", "up_block_types")


def config(kind: Kind) -> dict[str, Any]:
    """Return the config of a ControlNet for SDXL."""
    entries = {key: value for key, value in UNET.items() if key not in _NOT_OF_CONTROLNETS}
    if kind == "mid":
        entries["transformer_layers_per_block"] = (0, 0, 1)
    if kind == "small":
        entries |= {"down_block_types": ("DownBlock2D",) * 3, "mid_block_type": "UNetMidBlock2D"}
    return entries


def write(folder: Path, kind: Kind = "full", seed: int = 0) -> None:
    """Write a ControlNet in fp16. Its outputs are small, so that images with it are not broken."""
    import diffusers

    network_class: Any = diffusers.ControlNetModel
    torch.manual_seed(seed)
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            network = network_class(**config(kind))
            with torch.no_grad():
                for name, parameter in network.named_parameters():
                    if name.startswith("controlnet_"):  # zeros, which training changes
                        parameter.normal_(std=0.01)
            network.save_pretrained(folder, max_shard_size="20GB")
    finally:
        torch.set_default_dtype(default_dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kind", choices=KINDS, default="full")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write(arguments.out, arguments.kind, arguments.seed)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
