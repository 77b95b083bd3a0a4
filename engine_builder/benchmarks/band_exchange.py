"""Count what the bands of an image exchange in a denoising step, and predict a step's time from it.

    python -m engine_builder.benchmarks.band_exchange MODEL --size 2048x2048 --bands 2 --step-ms 75 --call-us 40

The UNet runs on tensors without data, so no GPU and no weights are needed. The prediction is

    whole step / bands + calls * time of a call + received bytes / bandwidth

`--step-ms`: a step of the same batch on one GPU. `--call-us`: an exchange of few bytes; `preheat bench multi-gpu`
without bands measures that of the predicted noise. `--gb-s`: bandwidth of an all-gather. Winograd convolutions, which
bands lack, are not accounted for.
"""

import argparse
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine_builder.backends.aot_inductor.compile import example_inputs
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.networks.network import load_network
from model.pipeline.spec import UNET
from model.store.precision import FP16
from model.validation import BAND_COUNTS


@dataclass
class Exchanges(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The exchanges of a UNet's step. calls: by operator. received: bytes that a rank gets of the others."""

    bands: int
    calls: Counter[str] = field(default_factory=Counter)
    received: int = 0

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name in ("preheat::gather", "preheat::neighbour_rows"):
            self.calls[name.removeprefix("preheat::")] += 1
            self.received += (self.bands - 1) * args[0].numel() * args[0].element_size()
        return func(*args, **(kwargs or {}))

    @property
    def count(self) -> int:
        """The number of exchanges."""
        return sum(self.calls.values())

    def step_ms(self, whole_ms: float, call_us: float, gb_s: float) -> float:
        """Return the predicted milliseconds of a step. whole_ms: of one on a single GPU."""
        return whole_ms / self.bands + self.count * call_us / 1e3 + self.received / gb_s / 1e6


def count_exchanges(checkpoint: Checkpoint, bands: int, batch: int, height: int, width: int) -> Exchanges:
    """Count the exchanges of a step in fp16 at a size in pixels. Raises CheckpointError."""
    network = load_network(checkpoint, f"{UNET}_{bands}_bands", FP16, "meta")
    inputs = example_inputs(network.signature, batch, height, width, "meta")
    exchanges = Exchanges(bands)
    with torch.no_grad(), exchanges:
        network.module(*inputs.values())
    return exchanges


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--size", default="1024x1024", help="WIDTHxHEIGHT in pixels")
    parser.add_argument("--batch", type=int, default=1, help="entries of the UNet's batch")
    parser.add_argument("--bands", type=int, choices=BAND_COUNTS, default=2)
    parser.add_argument("--step-ms", type=float)
    parser.add_argument("--call-us", type=float, default=40.0)
    parser.add_argument("--gb-s", type=float, default=150.0)
    arguments = parser.parse_args()
    width, height = map(int, arguments.size.split("x"))
    exchanges = count_exchanges(Checkpoint(arguments.model), arguments.bands, arguments.batch, height, width)
    calls = ", ".join(f"{count} {name}" for name, count in exchanges.calls.items())
    print(f"{arguments.bands} bands of {arguments.size}@{arguments.batch}: {exchanges.count} exchanges ({calls})")
    print(f"received in a step: {exchanges.received / 1e6:.1f} MB")
    if arguments.step_ms:
        step = exchanges.step_ms(arguments.step_ms, arguments.call_us, arguments.gb_s)
        print(
            f"step: {arguments.step_ms:g} ms on one GPU, {step:.1f} ms predicted, {arguments.step_ms / step:.2f} times"
        )


if __name__ == "__main__":
    main()
