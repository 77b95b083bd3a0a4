"""Compare the cold starts of several server images, which alternate in one run, and of several stores.

An image is a folder as `lay_out` writes it, for example of two commits. So the machine that measures needs the server's
requirements and httpx, but neither Truss's tools nor Git:

    python -m engine_builder.benchmarks.compare_starts image /repo truss/configs/h100.yaml /images/new   # needs truss
    python -m engine_builder.benchmarks.compare_starts run --image old=/images/old --image new=/images/new \\
        --store local=/store --release sdxl/1 --steps 30 --size 1024x1024 --repeats 4 --out starts.json

    ... run ... --store local=/store --network 3e9@0.02    # also from a bucket: bytes/s @ seconds before each answer

`--network` serves the first store's folder (engine_builder/benchmarks/range_server.py). "network alone" is the time
that the fetched bytes take at this rate. Each start is a process with an empty cache folder. The first start of each
case is not counted. The times of phases are the server's own. "first/later" is the time of the first request of a kind
divided by the median of its later ones. The last line is JSON.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from engine_builder.benchmarks.cold_start import (
    MeasuredStart,
    NamedStore,
    Requests,
    StartCase,
    bench_cold_starts,
)
from engine_builder.benchmarks.range_server import BUCKET, run_range_server
from engine_builder.local_server.server import Layout, with_metadata

_BUCKET_VARIABLES = {
    "AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_DEFAULT_REGION": "us-east-1",
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    image = commands.add_parser("image", help="Write the files of a server image to a folder.")
    image.add_argument("root", type=Path, help="Folder of the repository.")
    image.add_argument("config", type=Path)
    image.add_argument("out", type=Path, help="Its content is replaced.")
    image.set_defaults(command=lambda options: write_image(options.root, options.config, options.out))
    run = commands.add_parser("run", help="Measure starts.")
    run.add_argument("--image", action="append", required=True, metavar="NAME=FOLDER")
    run.add_argument("--store", action="append", required=True, metavar="NAME=URL", help="A folder or s3://...")
    run.add_argument("--network", action="append", default=[], metavar="RATE@LATENCY", help="Bytes/s and seconds.")
    run.add_argument("--set", action="append", default=[], metavar="NAME:KEY=VALUE", help="A variable, for one store.")
    run.add_argument("--release", required=True)
    run.add_argument("--runs", type=int, default=5)
    run.add_argument("--steps", type=int, default=30)
    run.add_argument("--size", help="WIDTHxHEIGHT; default: the release's native size")
    run.add_argument("--buckets", help='as in config.yaml: [{"height": 1024, "width": 1024, "rows": 2}]')
    run.add_argument("--request", action="append", default=[], help="JSON: fields of a further kind of request.")
    run.add_argument("--repeats", type=int, default=1, help="How often each kind of request is sent.")
    run.add_argument("--out", type=Path)
    run.set_defaults(command=_run)
    options = parser.parse_args(arguments)
    options.command(options)


def write_image(root: Path, config: Path, out: Path) -> None:
    """Write the files of the image that pushing `root` with `config` makes. Needs truss. Raises ConfigError."""
    from engine_builder.local_server.server import build_context, lay_out

    with tempfile.TemporaryDirectory(prefix="preheat-image-") as folder:
        lay_out(build_context(root, config, Path(folder)), out)


def read_image(folder: Path) -> Layout:
    """Return the layout of an image that `write_image` has written."""
    app = folder / "app"
    return Layout(folder, app, folder / "packages", yaml.safe_load((app / "config.yaml").read_text()))


def _run(options: argparse.Namespace) -> None:
    request: dict[str, Any] = {"prompt": "a red circle", "seed": 1, "num_inference_steps": options.steps}
    if options.size:
        request["width"], request["height"] = map(int, options.size.split("x"))
    kinds = (request, *(request | json.loads(text) for text in options.request))
    variables: dict[str, dict[str, str]] = {}
    for text in options.set:
        store, _, assignment = text.partition(":")
        name, _, value = assignment.partition("=")
        variables.setdefault(store, {})[name] = value
    stores = [NamedStore(name, url, tuple(variables.get(name, {}).items())) for name, url in _pairs(options.store)]
    images = {name: _with_buckets(read_image(Path(folder)), options.buckets) for name, folder in _pairs(options.image)}
    rates: dict[str, float] = {}
    with ExitStack() as stack:
        work = stack.enter_context(tempfile.TemporaryDirectory(prefix="preheat-starts-"))
        for network in options.network:
            rate, latency = map(float, network.split("@"))
            url = stack.enter_context(run_range_server(Path(stores[0].url), rate, latency))
            stores.append(
                NamedStore(network, f"s3://{BUCKET}", tuple((_BUCKET_VARIABLES | {"AWS_ENDPOINT_URL": url}).items()))
            )
            rates[network] = rate
        cases = [
            StartCase(f"{name}, {store.name}", layout, store) for store in stores for name, layout in images.items()
        ]
        requests = Requests(kinds, options.repeats)
        measured = bench_cold_starts(cases, options.release, requests, options.runs, Path(work), _report)
    results = [
        summarize(case.name, starts, rates.get(case.store.name)) for case, starts in zip(cases, measured, strict=True)
    ]
    print(make_table(results))
    line = json.dumps(results)
    if options.out:
        options.out.write_text(line + "\n")
    print(line)


def _with_buckets(layout: Layout, buckets: str | None) -> Layout:
    if buckets is None:
        return layout
    metadata = layout.config["model_metadata"]
    return with_metadata(layout, metadata | {"preheat": metadata["preheat"] | {"buckets": json.loads(buckets)}})


def _pairs(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Split each NAME=VALUE."""
    return [(name, value) for name, _, value in (text.partition("=") for text in texts)]


def _report(case: StartCase, number: int, start: MeasuredStart) -> None:
    counted = f"run {number}" if number else "not counted"
    print(f"{case.name}: first image {start.first_image_seconds:.2f} s ({counted})", flush=True)


def summarize(name: str, starts: Sequence[MeasuredStart], rate: float | None) -> dict[str, Any]:
    """Return medians of a case's starts. Phases and parts are in seconds, requests in milliseconds.

    `rate`: bytes per second of the network, None for a local store.
    `first_over_later`: for each kind of request that was repeated, its first time divided by the median of the later.
    """

    def median_of(tables: Sequence[dict[str, float]]) -> dict[str, float]:
        return {key: round(statistics.median(table[key] for table in tables if key in table), 4) for key in tables[0]}

    first_images = [start.first_image_seconds for start in starts]
    fetched = max(start.fetched_bytes for start in starts)
    kinds = list(zip(*(start.repeated_milliseconds for start in starts), strict=True))
    return {
        "case": name,
        "first_image": round(statistics.median(first_images), 3),
        "all": [round(seconds, 3) for seconds in first_images],
        "ready": round(statistics.median(start.ready_seconds for start in starts), 3),
        "phases": median_of([start.phase_seconds for start in starts]),
        "parts": median_of([start.part_seconds for start in starts]),
        "stages": median_of([start.stage_milliseconds for start in starts]),
        "first_over_later": [
            round(statistics.median(times[0] / statistics.median(times[1:]) for times in kind), 3)
            for kind in kinds
            if len(kind[0]) > 1
        ],
        "requests": [[list(times) for times in kind] for kind in kinds],
        "bytes_fetched": fetched,
        "network_alone": round(fetched / rate, 3) if rate else 0.0,
    }


def make_table(results: Sequence[dict[str, Any]]) -> str:
    """Return a text table: a column for each case; rows for the first image, its phases, and the parts."""
    lines: list[list[str]] = [["seconds, median", *(result["case"] for result in results)]]
    best = results[0]["first_image"]
    lines.append(["first image", *(f"{result['first_image']:.2f}" for result in results)])
    lines.append(["of the first case", *(f"{result['first_image'] / best:.3f}" for result in results)])
    for group in ("phases", "parts"):
        names = list(dict.fromkeys(name for result in results for name in result[group]))
        for name in names:
            values = [result[group].get(name) for result in results]
            lines.append([f"  {name}", *("-" if value is None else f"{value:.3f}" for value in values)])
    lines.append(["network alone", *(f"{result['network_alone']:.2f}" for result in results)])
    lines.append(["ready (client)", *(f"{result['ready']:.2f}" for result in results)])
    lines.append(["first/later", *(" ".join(map(str, result["first_over_later"])) or "-" for result in results)])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in lines)


if __name__ == "__main__":
    main()
