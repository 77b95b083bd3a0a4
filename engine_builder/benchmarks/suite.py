"""The cases that docs/benchmarks.md shows of full-size SDXL on a GPU: steps, batches, few-step models, and the peers.

    python -m engine_builder.benchmarks.suite STORE NAME/1 --peer MODEL_FOLDER --out docs/benchmarks/h200.json

Request in to encoded JPEG out, in this process. A case whose size or refiner the release does not serve is left out
and said. The peers are diffusers' pipelines on the same weights, in turns with the release: eager, and compiled as
PyTorch's "diffusion-fast" does it (github.com/huggingface/diffusion-fast), without coordinate descent, which had not
ended after 500 s, and with the compiler's defaults for matrix products, whose search takes minutes more.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from engine_builder.benchmarks.bench import bench_offline, bench_release, load_here
from engine_builder.benchmarks.peers import PEERS, bench_beside_diffusers, find_peer
from engine_builder.benchmarks.rows import Row, append_rows
from model.api.request import (
    GenerationRequest,
    resolve,
)
from model.errors import RequestRefused
from model.loading.load import Loaded
from model.store.store import open_store

_PROMPT = "a photograph of an astronaut riding a horse"


@dataclass(frozen=True)
class Case:
    """A request drawn again and again; `throughput`: in images/s, where there is always a next one."""

    name: str
    runs: int
    steps: int
    scheduler: str = "Euler"
    guidance: float = 7.5
    images: int = 1
    side: int | None = None
    refiner: bool = False
    throughput: bool = False

    def request(self) -> GenerationRequest:
        side = {"width": self.side, "height": self.side} if self.side else {}
        return GenerationRequest.model_validate(
            {
                "prompt": _PROMPT,
                "seed": 1,
                "num_inference_steps": self.steps,
                "scheduler": self.scheduler,
                "guidance_scale": self.guidance,
                "num_images": self.images,
                "use_refiner": self.refiner,
            }
            | side
        )


CASES = (
    Case("sdxl-30-steps", 30, 30),
    Case("sdxl-lcm-4-steps", 50, 4, "LCM", 1.0),
    Case("sdxl-turbo-4-steps-512", 50, 4, "Euler a", 1.0, side=512),
    Case("sdxl-20-steps-throughput", 5, 20, images=8, throughput=True),
    Case("sdxl-20-steps-throughput-batch-2", 15, 20, images=2, throughput=True),
    Case("sdxl-20-steps-throughput-batch-4", 8, 20, images=4, throughput=True),
    Case("sdxl-10-steps", 10, 10),
    Case("sdxl-20-steps", 10, 20),
    Case("sdxl-50-steps", 5, 50),
    Case("sdxl-20-steps-batch-4", 5, 20, images=4),
    Case("sdxl-20-steps-batch-8", 3, 20, images=8),
    Case("sdxl-30-steps-refiner", 10, 30, refiner=True),
)


def run(loaded: Loaded, peer: str | None, tell: Callable[[str], None]) -> Iterator[Row]:
    """Each case's row as soon as it is measured, then the peers'; `tell` is given a line for each, and for what is
    left out. `peer`: a model's folder or Hub id."""
    if peer is not None:
        find_peer(peer, resolve(CASES[0].request(), loaded.served))  # before anything is measured
    for case in CASES:
        try:
            bench = bench_offline if case.throughput else bench_release
            row = bench(loaded, case.request(), 3 if case.images == 1 else 1, case.runs)
        except RequestRefused as error:
            tell(f"{case.name}: left out. {error}")
            continue
        row = replace(row, case=case.name)
        yield _told(_per_second(row) if case.throughput else row, tell)
    if peer is not None:
        case = CASES[0]
        names = [f"{case.name}, in turns with diffusers"] + [f"{case.name}, diffusers {kind}" for kind in PEERS]
        rows = bench_beside_diffusers(loaded, case.request(), peer, PEERS, 3, 10)
        for name, row in zip(names, rows, strict=True):
            yield _told(replace(row, case=name), tell)


def _per_second(row: Row) -> Row:
    """A row in ms as images a second: its slowest runs become its lowest rates."""
    rates = {name: round(1000 * row.batch / getattr(row, name), 3) for name in ("value", "p50", "p90", "p99")}
    return replace(row, unit="images/s", **rates)


def _told(row: Row, tell: Callable[[str], None]) -> Row:
    tell(f"{row.case}: p50 {row.p50} {row.unit}, p99 {row.p99}, stages {dict(row.stages)}")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", help="folder, file:// or s3:// URL")
    parser.add_argument("release", help="MODEL/VERSION")
    parser.add_argument("--peer", help="the model's folder or Hub id: measure diffusers on it, too")
    parser.add_argument("--out", type=Path, help="append the rows to this JSON file")
    given = parser.parse_args()
    loaded = load_here(open_store(given.store), given.release)
    rows = []
    for row in run(loaded, given.peer, lambda line: print(line, flush=True)):
        rows.append(row.to_dict())
        if given.out is not None:
            append_rows(given.out, [row])
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
