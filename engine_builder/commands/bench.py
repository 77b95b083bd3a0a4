"""`preheat bench` and `preheat report`: measure on this machine, store the rows, write docs/benchmarks.md from them."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.table import Table
from typer.core import TyperGroup

from engine_builder.benchmarks.rows import Row, check_rows_file, finish, make_row
from engine_builder.commands.console import (
    DEFAULT_PROMPT,
    DEFAULT_STORE,
    DEMO_CONFIG,
    ROOT,
    CacheOption,
    ConfigOption,
    ReleaseArgument,
    SizeOption,
    StepsOption,
    StoreOption,
    activity,
    console,
    open_cli_store,
    parse_bucket,
    parse_size,
    plain,
)
from engine_builder.stores.store import WritableStore
from model.errors import RequestRefused
from model.pipeline.spec import UNET
from model.validation import BAND_COUNTS


class _LatencyByDefault(TyperGroup):
    """Treats `preheat bench NAME/1` as `preheat bench latency NAME/1`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["latency", *args]
        return super().parse_args(ctx, args)


bench_app = typer.Typer(
    name="bench",
    cls=_LatencyByDefault,
    no_args_is_help=True,
    help="Measure on this machine: latency, multi-gpu, cold-start.",
)

RunsOption = Annotated[int, typer.Option(min=1, help="Number of counted runs.")]
OutOption = Annotated[Path | None, typer.Option(help="Append the rows to this JSON file.")]


@bench_app.command()
def latency(
    release: ReleaseArgument,
    store: StoreOption = DEFAULT_STORE,
    prompt: str = DEFAULT_PROMPT,
    size: SizeOption = None,
    steps: StepsOption = 20,
    guidance_scale: Annotated[
        float | None, typer.Option(help="1: without guidance; default: the release's own.")
    ] = None,
    images: Annotated[int, typer.Option(help="Images per request.")] = 1,
    refiner: Annotated[bool, typer.Option(help="Finish with the refiner.")] = False,
    warm_ups: Annotated[int, typer.Option(min=0, help="Number of warm-up runs, which are not counted.")] = 3,
    runs: RunsOption = 20,
    peer: Annotated[
        str | None,
        typer.Option(
            help="The model's folder or Hub id: measure diffusers' eager pipeline on it, alternating with the release."
        ),
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Also measure the peer under torch.compile, which takes minutes.")
    ] = False,
    out: OutOption = None,
    cache_dir: CacheOption = None,
) -> None:
    """Measure a request in this process, from prompt to image, by stage. The last line is JSON."""
    check_rows_file(out)
    if compiled and peer is None:
        raise typer.BadParameter("needs a peer: name its model folder with --peer", param_hint="--compiled")
    width, height = parse_size(size) if size else (None, None)
    with activity("Loading"):
        from engine_builder.benchmarks.bench import bench_release, load_in_process
        from engine_builder.benchmarks.comparison import bench_against_diffusers
        from engine_builder.benchmarks.peers import PEERS
        from model.api.request import GenerationRequest

        try:
            request = GenerationRequest(
                prompt=prompt, width=width, height=height, num_inference_steps=steps, guidance_scale=guidance_scale,
                num_images=images, seed=0, use_refiner=refiner,
            )  # fmt: skip
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise RequestRefused(str(first["loc"][0]), f"{first['msg']}.") from error
        loaded = load_in_process(open_cli_store(store, cache_dir).url, release)
    with activity(f"Measuring {release}{' and diffusers' if peer else ''}"):
        if peer is None:
            rows = [bench_release(loaded, request, warm_ups, runs)]
        else:
            kinds = PEERS if compiled else PEERS[:1]
            rows = bench_against_diffusers(loaded, request, peer, kinds, warm_ups, runs)
    _print_table(rows, "stages", "ms")
    finish(rows, out)


@bench_app.command(name="multi-gpu")
def multi_gpu(
    release: ReleaseArgument,
    store: StoreOption = DEFAULT_STORE,
    gpus: Annotated[int, typer.Option(min=2, max=8, help="GPUs that share an image; on a CPU, processes.")] = 2,
    bands: Annotated[int, typer.Option(help="Bands that each image is divided into: 1, 2, 4 or 8.")] = 1,
    prompt: str = DEFAULT_PROMPT,
    size: SizeOption = None,
    steps: StepsOption = 30,
    warm_ups: Annotated[int, typer.Option(min=0, help="Number of warm-up runs, which are not counted.")] = 3,
    runs: RunsOption = 10,
    out: OutOption = None,
) -> None:
    """Measure one image on several GPUs and on one, alternating, and predict the speed-up. The last line is JSON."""
    width, height = parse_size(size) if size else (None, None)
    check_rows_file(out)
    if bands not in (1, *BAND_COUNTS) or gpus % bands:
        raise typer.BadParameter(f"{bands} is not 1, 2, 4 or 8 and a divisor of --gpus {gpus}", param_hint="--bands")
    with activity("Loading"):
        from engine_builder.benchmarks.multi_gpu import compare, load_ranked
        from model.api.request import GenerationRequest

        request = GenerationRequest(prompt=prompt, width=width, height=height, num_inference_steps=steps, seed=0)
        url = open_cli_store(store, None).url
    with load_ranked(url, release, gpus, bands) as ranked, activity(f"Measuring {release} on {gpus} GPUs"):
        result = compare(ranked, request, warm_ups, runs)
    _print_table(result.rows, "stages", "ms")
    exchanged = result.communication
    console.print(
        f"Denoising is {result.measured:.2f} times as fast; predicted: {'at most ' if bands > 1 else ''}"
        f"{result.predicted:.2f}."
    )
    if exchanged.calls:
        console.print(
            f"A step has {exchanged.calls} all-gather of {exchanged.bytes} bytes of each GPU, "
            f"{1e6 * exchanged.seconds:.0f} us alone."
        )
    finish(result.rows, out)


@bench_app.command(name="cold-start")
def cold_start(
    release: ReleaseArgument,
    store: StoreOption = DEFAULT_STORE,
    s3: Annotated[
        str | None,
        typer.Option(
            help="Also start from s3://bucket/prefix, which must have the release; or `own`: the tests' object store."
        ),
    ] = None,
    config: ConfigOption = DEMO_CONFIG,
    prompt: str = DEFAULT_PROMPT,
    size: SizeOption = None,
    steps: Annotated[int, typer.Option(help="Denoising steps of the first image.")] = 30,
    bucket: Annotated[
        list[str] | None,
        typer.Option(help="WIDTHxHEIGHT@BATCH, e.g. 1024x1024@2, repeatable: replaces the config's buckets."),
    ] = None,
    runs: RunsOption = 5,
    out: OutOption = None,
) -> None:
    """Measure cold starts of the real server, from its process to its first image, by phase. The last line is JSON."""
    from engine_builder.benchmarks.cold_start import (
        MeasuredStart,
        NamedStore,
        Requests,
        StartCase,
        bench_cold_starts,
        cold_start_row,
        measure_read_seconds,
    )
    from engine_builder.local_server.server import build_context, lay_out, with_metadata
    from model.loading.runtimes import find_targets
    from model.loading.select import select
    from model.settings import read_settings

    check_rows_file(out)
    request: dict[str, Any] = {"prompt": prompt, "seed": 1, "num_inference_steps": steps}
    if size is not None:
        request["width"], request["height"] = parse_size(size)
    buckets = [parse_bucket(text, "--bucket") for text in bucket or []]
    local = open_cli_store(store)
    manifest = local.read_release(release)
    # The dtype of the UNet's outputs, as in the rows of `latency`.
    precision = next(engine.precision.io for engine in manifest.engines if engine.component == UNET)
    with tempfile.TemporaryDirectory(prefix="preheat-bench-") as folder:
        work = Path(folder)
        with activity("Laying out the server image"):
            layout = lay_out(build_context(ROOT, config, work / "build"), work / "image")
        metadata = layout.config["model_metadata"]
        if buckets:
            entries = [{"height": height, "width": width, "rows": batch} for batch, height, width in buckets]
            metadata = {**metadata, "preheat": {**metadata["preheat"], "buckets": entries}}
            layout = with_metadata(layout, metadata)

        def report(case: StartCase, number: int, start: MeasuredStart) -> None:
            counted = f"run {number} of {runs}" if number else "not counted"
            console.print(
                f"{case.name}: ready {start.ready_seconds:.2f} s, first image {start.first_image_seconds:.2f} s "
                f"({counted})"
            )

        def measure(*origins: NamedStore) -> list[Row]:
            cases = [StartCase(origin.name, layout, origin) for origin in origins]
            measured = bench_cold_starts(cases, release, Requests((request,)), runs, work, report)
            return [
                cold_start_row(origin, release, starts, precision, steps)
                for origin, starts in zip(origins, measured, strict=True)
            ]

        local_origin = NamedStore("local store", local.url)
        if s3 is None:
            rows = measure(local_origin)
        else:
            with _bucket_with_release(s3, local, release, work) as url:
                settings = read_settings(metadata["preheat"])
                targets, served = find_targets(settings.runtime), settings.served_precision
                blobs = select(manifest, targets, settings.buckets, precision=served).blobs()
                seconds = [measure_read_seconds(url, settings.store_options(), blobs) for _ in range(runs + 1)][1:]
                rows = measure(local_origin, NamedStore("S3 on this machine" if s3 == "own" else "S3", url))
            read_row = make_row(
                f"reading alone, {release}, S3", seconds, "s", precision, steps, 1, digits=3,
                best=round(min(seconds), 3), bytes_fetched=sum(blob.bytes for blob in blobs),
            )  # fmt: skip
            rows.insert(1, read_row)
    _print_table(rows, "phases", "s")
    finish(rows, out)


@contextmanager
def _bucket_with_release(s3: str, source: WritableStore, release: str, work: Path) -> Iterator[str]:
    """Yield the URL of a bucket with the release: `s3`, or for "own" the tests' object store, with a copy."""
    from engine_builder.benchmarks.cold_start import run_test_object_store
    from engine_builder.releases.mirror import copy_release

    if s3 != "own":
        yield s3
        return
    console.print("Starting an object store")
    with run_test_object_store(ROOT, work):
        url = "s3://preheat"
        with activity(f"Copying {release} to {url}"):
            copy_release(source, open_cli_store(url), release)
        yield url


def _print_table(rows: list[Row], parts: str, unit: str) -> None:
    """Print a table of the rows, and the device, versions and request that they share."""
    table = Table("case", f"p50 {unit}", f"p90 {unit}", f"p99 {unit}", "runs", f"{parts} (median {unit})")
    for row in rows:
        medians: Mapping[str, float] = getattr(row, parts)
        shown = ", ".join(f"{name} {value:g}" for name, value in medians.items())
        table.add_row(row.case, f"{row.p50:g}", f"{row.p90:g}", f"{row.p99:g}", str(row.runs), shown)
    console.print(table)
    first = rows[0]
    console.print(f"{first.gpu}, torch {first.torch}, {first.precision}, {first.steps} steps, batch {first.batch}")


def report(
    folder: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="The folder of JSON files with rows.")
    ] = ROOT / "docs" / "benchmarks",
    out: Annotated[Path | None, typer.Option(help="The page; default: FOLDER.md.")] = None,
) -> None:
    """Write docs/benchmarks.md and its plots from the rows in docs/benchmarks/*.json, and delete other SVG files
    there."""
    from engine_builder.benchmarks.report import write_report

    page = out or folder.absolute().parent / f"{folder.resolve().name}.md"
    plots = write_report(folder, page)
    console.print(f"{plain(page)}: {len(plots)} plots")
