"""`preheat bench` and `preheat report`: measure on this machine, keep the rows, write docs/benchmarks.md from them."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.table import Table
from typer.core import TyperGroup

from engine_builder.benchmarks.rows import Row, append_rows
from engine_builder.commands.console import (
    DEFAULT_STORE,
    DEMO_CONFIG,
    ROOT,
    CacheOption,
    ConfigOption,
    StoreOption,
    bucket_of,
    console,
    opened,
    sides,
)
from model.errors import RequestRefused


class _LatencyUnlessNamed(TyperGroup):
    """`preheat bench NAME/1` is `preheat bench latency NAME/1`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["latency", *args]
        return super().parse_args(ctx, args)


bench_app = typer.Typer(
    name="bench", cls=_LatencyUnlessNamed, no_args_is_help=True, help="Measure on this machine: latency, cold-start."
)

ReleaseArgument = Annotated[str, typer.Argument(help="MODEL/VERSION.")]
RunsOption = Annotated[int, typer.Option(min=1, help="Counted ones.")]
OutOption = Annotated[Path | None, typer.Option(help="Append the rows to this JSON file.")]


@bench_app.command()
def latency(
    release: ReleaseArgument,
    store: StoreOption = DEFAULT_STORE,
    prompt: str = "a large red circle on a blue background",
    size: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT; default: the release's own.")] = None,
    steps: Annotated[int, typer.Option(help="Denoising steps.")] = 20,
    guidance_scale: Annotated[float | None, typer.Option(help="1: none; default: the release's own.")] = None,
    images: Annotated[int, typer.Option(help="Images a request.")] = 1,
    refiner: Annotated[bool, typer.Option(help="Finish with the refiner.")] = False,
    warm_ups: Annotated[int, typer.Option(min=0)] = 3,
    runs: RunsOption = 20,
    peer: Annotated[
        str | None,
        typer.Option(
            help="The model's folder or Hub id: measure diffusers' eager pipeline on it, in turns with the release."
        ),
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="And the peer under torch.compile, which takes minutes to compile.")
    ] = False,
    out: OutOption = None,
    cache_dir: CacheOption = None,
) -> None:
    """Request to picture in this process, by stage. The last line is JSON."""
    if compiled and peer is None:
        raise typer.BadParameter("is of the peer: name its model folder with --peer", param_hint="--compiled")
    width, height = sides(size) if size else (None, None)
    with console.status("Loading"):
        from engine_builder.benchmarks import bench as measuring
        from engine_builder.benchmarks import peers
        from model.api.request import GenerationRequest

        try:
            request = GenerationRequest(
                prompt=prompt, width=width, height=height, num_inference_steps=steps, guidance_scale=guidance_scale,
                num_images=images, seed=0, use_refiner=refiner,
            )  # fmt: skip
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise RequestRefused(str(first["loc"][0]), f"{first['msg']}.") from error
        holder = opened(store, cache_dir)
        loaded = measuring.load_here(holder, release)
    with console.status(f"Measuring {release}{' in turns with diffusers' if peer else ''}"):
        if peer is None:
            rows = [measuring.bench_release(loaded, request, warm_ups, runs)]
        else:
            kinds = peers.PEERS if compiled else peers.PEERS[:1]
            rows = peers.bench_beside_diffusers(loaded, request, peer, kinds, warm_ups, runs)
    _finish(rows, "stages", "ms", out)


@bench_app.command(name="cold-start")
def cold_start(
    release: ReleaseArgument,
    store: StoreOption = DEFAULT_STORE,
    s3: Annotated[
        str | None,
        typer.Option(
            help="Also start from s3://bucket/prefix, which has the release; or `own`: the tests' object store."
        ),
    ] = None,
    config: ConfigOption = DEMO_CONFIG,
    prompt: str = "a large red circle on a blue background",
    size: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT of it; default: the release's own.")] = None,
    steps: Annotated[int, typer.Option(help="Denoising steps of the first picture.")] = 30,
    bucket: Annotated[
        list[str] | None,
        typer.Option(help="WIDTHxHEIGHT@ROWS, e.g. 1024x1024@2, repeatable: served in place of the config's buckets."),
    ] = None,
    runs: RunsOption = 5,
    out: OutOption = None,
) -> None:
    """Start of the real server's process to its first picture, by phase. The last line is JSON."""
    from engine_builder.benchmarks import cold_start as cold
    from engine_builder.local_server.server import (
        build_context,
        lay_out,
        with_metadata,
    )
    from model.engines.components import PRECISIONS
    from model.loading.prefetch import guess
    from model.loading.target import detect_targets
    from model.store.store import StoreOptions

    holder = opened(store)
    manifest = holder.read_release(release)
    served = next(engine.precision for engine in manifest.engines if engine.component == "unet")
    precision = PRECISIONS.get(served, served)  # as the latency's rows have it
    request: dict[str, Any] = {"prompt": prompt, "seed": 1, "num_inference_steps": steps}
    if size is not None:
        request["width"], request["height"] = sides(size)
    served_buckets = [_bucket_entry(text) for text in bucket or []]
    with tempfile.TemporaryDirectory(prefix="preheat-bench-") as folder:
        work = Path(folder)
        with console.status("Laying out the server image"):
            layout = lay_out(build_context(ROOT, config, work / "build"), work / "image")
        settings = dict(layout.config["model_metadata"]["preheat"])
        if served_buckets:
            settings["buckets"] = served_buckets
            layout = with_metadata(layout, {**layout.config["model_metadata"], "preheat": settings})
        buckets = settings.get("buckets") or []

        def say(place: cold.Place, number: int, start: cold.Start) -> None:
            counted = f"run {number} of {runs}" if number else "not counted"
            console.print(f"{place.name}: ready {start.ready:.2f} s, first image {start.first_image:.2f} s ({counted})")

        def measure(*places: cold.Place) -> list[Row]:
            measured = cold.bench_places(layout, places, release, request, runs, work, say)
            each = zip(places, measured, strict=True)
            return [cold.starts_row(place, release, starts, precision, steps) for place, starts in each]

        here = cold.Place("local store", holder.url, {}, fetched=False)
        if s3 is None:
            rows = measure(here)
        else:
            with _bucket(s3, work) as (url, environment):
                _copy(holder, url, release, s3)
                blobs = guess(manifest, [target.key for target in detect_targets()], buckets)
                alone = [cold.read_alone(url, StoreOptions.from_deployment(), blobs) for _ in range(runs + 1)][1:]
                there = cold.Place("S3 on this machine" if s3 == "own" else "S3", url, environment, fetched=True)
                rows = measure(here, there)
                rows.insert(1, _alone(release, alone, sum(blob.bytes for blob in blobs), precision, steps))
    _finish(rows, "phases", "s", out)


def _bucket_entry(text: str) -> dict[str, int]:
    """ "1024x768@2" as the config has it."""
    rows, height, width = bucket_of(text, "--bucket")
    return {"height": height, "width": width, "rows": rows}


@contextmanager
def _bucket(s3: str, work: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """URL of the bucket and the environment that leads to it."""
    from engine_builder.benchmarks.cold_start import own_object_store

    if s3 != "own":
        yield s3, {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        return
    with console.status("Starting an object store"):
        store = own_object_store(ROOT, work)
        environment = store.__enter__()
    try:
        yield "s3://preheat", environment
    finally:
        store.__exit__(None, None, None)


def _copy(holder: Any, url: str, release: str, s3: str) -> None:
    """Bring the release into an object store of our own; a bucket that was named is expected to have it."""
    from engine_builder.releases.mirror import copy_release

    if s3 == "own":
        with console.status(f"Copying {release} to {url}"):
            copy_release(holder, opened(url), release)


def _alone(release: str, seconds: list[float], size: int, precision: str, steps: int) -> Row:
    from engine_builder.benchmarks.rows import make_row

    extra = {"best": round(min(seconds), 3), "bytes_fetched": size}
    return make_row(f"reading alone, {release}, S3", seconds, "s", precision, steps, 1, digits=3, extra=extra)


def _finish(rows: list[Row], parts: str, unit: str, out: Path | None) -> None:
    """A table for people, the file, and one line of JSON for programs."""
    table = Table("case", f"p50 {unit}", f"p90 {unit}", f"p99 {unit}", "runs", f"{parts} (median {unit})")
    for row in rows:
        entries = row.to_dict()
        told = ", ".join(f"{name} {value:g}" for name, value in entries.get(parts, {}).items())
        table.add_row(row.case, f"{row.p50:g}", f"{row.p90:g}", f"{row.p99:g}", str(row.runs), told)
    console.print(table)
    first = rows[0]
    console.print(f"{first.gpu}, torch {first.torch}, {first.precision}, {first.steps} steps, batch {first.batch}")
    if out is not None:
        append_rows(out, rows)
    print(json.dumps([row.to_dict() for row in rows]))


def report(
    folder: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="Where the JSON files with rows are.")
    ] = ROOT / "docs" / "benchmarks",
    out: Annotated[Path | None, typer.Option(help="The page; default: FOLDER with .md in place.")] = None,
) -> None:
    """Write docs/benchmarks.md and its plots from the rows in docs/benchmarks/*.json. Other SVG files there are
    deleted."""
    from engine_builder.benchmarks.report import write_report

    page = out or folder.with_suffix(".md")
    plots = write_report(folder, page)
    console.print(f"{page}: {len(plots)} plots")
