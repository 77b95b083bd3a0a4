"""Measure the cases of full-size models in docs/benchmarks.md: numbers of steps, batches, few-step models, diffusers.

    python -m engine_builder.benchmarks.suite STORE NAME/1 --peer MODEL_FOLDER --out docs/benchmarks/h200.json

Measures in this process, from the request to the encoded JPEG. A case that the release does not serve is skipped with a
message. The peers are diffusers' pipelines on the same weights, and alternate with the release: eager, and compiled as
in PyTorch's "diffusion-fast" (github.com/huggingface/diffusion-fast). Two of its options are left out. Coordinate
descent had not ended after 500 s. The search for matrix products takes minutes more.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from engine_builder.benchmarks.bench import bench_offline, bench_release, load_in_process, release_parser
from engine_builder.benchmarks.comparison import bench_against_diffusers
from engine_builder.benchmarks.peers import PEERS, find_peer
from engine_builder.benchmarks.rows import Row, append_rows
from model.api.request import GenerationRequest
from model.api.resolve import resolve
from model.errors import RequestRefused
from model.loading.load import Loaded
from model.pipeline.spec import TEXT_ENCODER_FINAL


@dataclass(frozen=True)
class Case:
    """A request that is generated `runs` times.

    `throughput`: the next request always waits, and the row has images/s. `side`: pixels; None: the native size.
    """

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
        return GenerationRequest(
            prompt="a photograph of an astronaut riding a horse",
            seed=1,
            width=self.side,
            height=self.side,
            num_inference_steps=self.steps,
            scheduler=self.scheduler,
            guidance_scale=self.guidance,
            num_images=self.images,
            use_refiner=self.refiner,
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
SD_CASES = (
    Case("sd-1.5-20-steps", 30, 20),
    Case("sd-1.5-50-steps", 10, 50),
    Case("sd-1.5-20-steps-batch-4", 10, 20, images=4),
    Case("sd-1.5-20-steps-throughput", 5, 20, images=8, throughput=True),
)


def run(
    loaded: Loaded, peer: str | None, report: Callable[[str], None], cases: Sequence[Case] | None = None
) -> Iterator[Row]:
    """Yield the row of each case as soon as it is measured, then the rows of the peers for the first case.

    `cases`: None selects those of the release's family.
    `peer` is a model's folder or Hub id. `report` is called with a line for each row and for each skipped case.
    """
    if cases is None:
        cases = SD_CASES if TEXT_ENCODER_FINAL in loaded.model.engines else CASES
    first = cases[0]
    if peer is not None:
        find_peer(peer, resolve(first.request(), loaded.served))  # raises before anything is measured
    for case in cases:
        bench = bench_offline if case.throughput else bench_release
        try:
            row = bench(loaded, case.request(), 3 if case.images == 1 else 1, case.runs)
        except RequestRefused as error:
            report(f"{case.name}: skipped. {error}")
            continue
        yield _named(case.name, to_images_per_second(row) if case.throughput else row, report)
    if peer is not None:
        names = [f"{first.name}, in turns with diffusers"] + [f"{first.name}, diffusers {kind}" for kind in PEERS]
        rows = bench_against_diffusers(loaded, first.request(), peer, PEERS, 3, 10)
        for name, row in zip(names, rows, strict=True):
            yield _named(name, row, report)


def to_images_per_second(row: Row) -> Row:
    """Convert milliseconds to images/s: the slowest runs become the lowest rates."""
    rates = {name: round(1000 * row.batch / getattr(row, name), 3) for name in ("value", "p50", "p90", "p99")}
    return row.model_copy(update={"unit": "images/s", **rates})


def _named(name: str, row: Row, report: Callable[[str], None]) -> Row:
    report(f"{name}: p50 {row.p50} {row.unit}, p99 {row.p99}, stages {row.stages}")
    return row.model_copy(update={"case": name})


def main() -> None:
    parser = release_parser(__doc__)
    parser.add_argument("--peer", help="the model's folder or Hub id: measure diffusers on it, too")
    arguments = parser.parse_args()
    loaded = load_in_process(arguments.store, arguments.release)
    rows = []
    for row in run(loaded, arguments.peer, lambda line: print(line, flush=True)):
        rows.append(row.to_dict())
        if arguments.out is not None:
            append_rows(arguments.out, [row])
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
