"""Compare a release's precisions in one process: 30 steps and 4 steps of one image, and 20 steps of eight images.

    python -m engine_builder.benchmarks.precisions STORE NAME/1 --precision fp16 --precision fp8 --out rows.json

The release is loaded once in each precision, for all steps. The precisions alternate, so that changing clocks affect
all equally. The last line of each case has the first precision's time divided by each other's.
"""

import statistics
from collections.abc import Sequence

from engine_builder.benchmarks.bench import (
    generate_offline,
    load_in_process,
    measure,
    precision_of,
    release_parser,
    release_work,
    timed_row,
)
from engine_builder.benchmarks.rows import Row, finish
from engine_builder.benchmarks.suite import Case, to_images_per_second
from model.api.resolve import resolve
from model.loading.load import Loaded
from model.settings import ServedPrecision
from model.store.manifest import Fp16Steps
from model.store.precision import PRECISIONS

CASES = (
    Case("30-steps", 30, 30),
    Case("lcm-4-steps", 50, 4, "LCM", 1.0),
    Case("20-steps-throughput", 3, 20, images=8, throughput=True),
)


def compare(loaded: Sequence[Loaded], cases: Sequence[Case] = CASES) -> list[Row]:
    """Return a row for each case and precision, and print them with the ratios. `loaded`: one release each time."""
    rows = []
    for case in cases:
        of_case = (_offline if case.throughput else _latency)(loaded, case)
        for model, row in zip(loaded, of_case, strict=True):
            named = row.model_copy(update={"case": f"{case.name}, {model.precision}"})
            print(f"{named.case:32} p50 {named.p50} {named.unit}, stages {named.stages}", flush=True)
            rows.append(named)
        first, *others = of_case
        for model, row in zip(loaded[1:], others, strict=True):
            ratio = row.value / first.value if case.throughput else first.value / row.value
            print(f"{case.name}: {model.precision} is {ratio:.3f} times as fast as {loaded[0].precision}", flush=True)
    return rows


def _latency(loaded: Sequence[Loaded], case: Case) -> list[Row]:
    params = [resolve(case.request(), model.served) for model in loaded]
    works = [release_work(model, wanted) for model, wanted in zip(loaded, params, strict=True)]
    measured = measure(works, 3, case.runs)
    return [
        timed_row(model.release, wanted, precision_of(model), totals, stages)
        for model, wanted, (totals, stages) in zip(loaded, params, measured, strict=True)
    ]


def _offline(loaded: Sequence[Loaded], case: Case) -> list[Row]:
    """Run each precision for one request after the other, in turns. The first requests of a turn are not counted."""
    params = [resolve(case.request(), model.served) for model in loaded]
    totals: list[list[float]] = [[] for _ in loaded]
    for _ in range(case.runs):
        for model, wanted, times in zip(loaded, params, totals, strict=True):
            times.append(statistics.mean(generate_offline(model, [wanted], 0, 3)[1:]))
    return [
        to_images_per_second(timed_row(model.release, wanted, precision_of(model), times, {}))
        for model, wanted, times in zip(loaded, params, totals, strict=True)
    ]


def main() -> None:
    parser = release_parser(__doc__)
    parser.add_argument("--precision", action="append", choices=list(PRECISIONS), help="repeatable; the first is 1.0")
    parser.add_argument("--only", action="append", choices=[case.name for case in CASES], help="repeatable; a case")
    arguments = parser.parse_args()
    names = arguments.precision or ["fp16", "fp8"]
    served = [ServedPrecision(PRECISIONS[name], Fp16Steps()) for name in names]
    loaded = [load_in_process(arguments.store, arguments.release, precision=precision) for precision in served]
    cases = [case for case in CASES if not arguments.only or case.name in arguments.only]
    finish(compare(loaded, cases), arguments.out)


if __name__ == "__main__":
    main()
