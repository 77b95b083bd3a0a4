"""`preheat bench` and `preheat report`: measure on this machine, store the rows, write docs/benchmarks.md from them."""

import io
import shutil
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError
from typer.core import TyperGroup

from benchmarks.gpu_use import GpuUse, gpu_ids
from benchmarks.rows import Row, check_rows_file, finish
from model.errors import RequestRefused
from model.validation import BAND_COUNTS
from preheat.console import (
    DEFAULT_PROMPT,
    DEFAULT_STORE,
    DEMO_CONFIG,
    ROOT,
    CacheOption,
    ConfigOption,
    ReleaseArgument,
    ServedStoreOption,
    SizeOption,
    StepsOption,
    StoreOption,
    activity,
    console,
    open_cli_store,
    open_served_store,
    parse_bucket,
    parse_size,
    plain,
    print_numbers,
    read_served_settings,
    unet_precision,
)

if TYPE_CHECKING:
    from preheat.local_server.server import Layout


class _LatencyByDefault(TyperGroup):
    """Treats `preheat bench NAME/1` as `preheat bench latency NAME/1`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["latency", *args]
        return super().parse_args(ctx, args)


bench = typer.Typer(
    name="bench",
    cls=_LatencyByDefault,
    no_args_is_help=True,
    help="Measure on this machine: latency, multi-gpu, cold-start, releases.",
)

_TIMEOUT_SECONDS = 600.0  # of a start
_IDLE_SECONDS = 10.0

RunsOption = Annotated[int, typer.Option(min=1, help="Number of counted runs.")]
OutOption = Annotated[Path | None, typer.Option(help="Append the rows to this JSON file.")]


@bench.command()
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
        from benchmarks.measure import load_in_process, measure_requests
        from benchmarks.peers import PEERS, bench_against_diffusers
        from model.api.resolve import resolve
        from model.request_fields import GenerationRequest

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
            rows = measure_requests([(release, loaded, resolve(request, loaded.served))], warm_ups, runs)
        else:
            kinds = PEERS if compiled else PEERS[:1]
            rows = bench_against_diffusers(loaded, request, peer, kinds, warm_ups, runs)
    _print_table(rows, "stages", "ms")
    finish(rows, out)


@bench.command(name="multi-gpu")
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
    """Measure one image on several GPUs and on one, alternating. The last line is JSON."""
    width, height = parse_size(size) if size else (None, None)
    check_rows_file(out)
    if bands not in (1, *BAND_COUNTS) or gpus % bands:
        raise typer.BadParameter(f"{bands} is not 1, 2, 4 or 8 and a divisor of --gpus {gpus}", param_hint="--bands")
    with activity("Loading"):
        from benchmarks.multi_gpu import compare, load_ranked
        from model.request_fields import GenerationRequest

        request = GenerationRequest(prompt=prompt, width=width, height=height, num_inference_steps=steps, seed=0)
        url = open_cli_store(store, None).url
    with load_ranked(url, release, gpus, bands) as (alone, divided), activity(f"Measuring {release} on {gpus} GPUs"):
        rows, speed_up = compare(alone, divided, gpus, request, warm_ups, runs)
    _print_table(rows, "stages", "ms")
    console.print(f"Denoising is {speed_up:.2f} times as fast.")
    finish(rows, out)


@bench.command(name="cold-start")
def cold_start(
    release: ReleaseArgument,
    store: StoreOption = DEFAULT_STORE,
    s3: Annotated[
        str | None,
        typer.Option(
            help="Also start from s3://bucket/prefix, which must have the release; or `own`: the tests' object store."
        ),
    ] = None,
    config: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True, dir_okay=False,
            help="The deployment's config.yaml, repeatable: starts alternate. One in another clone measures that code.",
        ),
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="A commit of this repository: starts alternate with starts of its code.")
    ] = None,
    further: Annotated[
        list[str] | None,
        typer.Option("--with", help="A further release, repeatable: starts of a server of all of them alternate, too."),
    ] = None,
    prompt: str = DEFAULT_PROMPT,
    size: SizeOption = None,
    steps: Annotated[int, typer.Option(help="Denoising steps of the first image.")] = 30,
    bucket: Annotated[
        list[str] | None,
        typer.Option(help="WIDTHxHEIGHT@BATCH, e.g. 1024x1024@2, repeatable: replaces the config's buckets."),
    ] = None,
    runs: RunsOption = 5,
    out: OutOption = None,
) -> None:  # fmt: skip
    """Measure cold starts of the real server, from its process to its first image, by phase. The last line is JSON."""
    from benchmarks import cold_start as starts
    from engine_builder.releases.mirror import copy_release
    from model.deployment import Deployment
    from model.loading.runtimes import find_targets
    from model.loading.select import select
    from model.settings import read_settings

    check_rows_file(out)
    if s3 not in (None, "own") and not str(s3).startswith("s3://"):
        raise typer.BadParameter(f"{s3!r} is not the URL of a bucket, s3://..., or own", param_hint="--s3")
    request: dict[str, Any] = {"prompt": prompt, "seed": 1, "num_inference_steps": steps}
    if size is not None:
        request["width"], request["height"] = parse_size(size)
    buckets = [parse_bucket(text, "--bucket") for text in bucket or []]
    local = open_cli_store(store)
    manifest, *_ = [local.read_release(name) for name in (release, *(further or ()))]
    # The dtype of the UNet's outputs, as in the rows of `latency`.
    precision = unet_precision(manifest).io

    def report(case: starts.StartCase, number: int, start: starts.MeasuredStart) -> None:
        counted = f"run {number} of {runs}" if number else "not counted"
        console.print(
            f"{case.name}: ready {start.ready_seconds:.2f} s, first image {start.first_image_seconds:.2f} s ({counted})"
        )

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="preheat-bench-"))
        work, paths = Path(folder), [path.resolve() for path in config or [DEMO_CONFIG]]
        with activity("Laying out the server image"):
            earlier = [] if against is None else _configs_of_commit(against, paths, work / "against")
            paths += earlier
            layouts = [_lay_out(path, buckets, work / str(number)) for number, path in enumerate(paths)]
        origins, reading = {"local store": local.url}, []
        if s3 is not None:
            url, name = ("s3://preheat", "S3 on this machine") if s3 == "own" else (s3, "S3")
            origins[name] = url
            if s3 == "own":
                console.print("Starting an object store")
                stack.enter_context(starts.run_test_object_store(ROOT, work))
                for name in (release, *(further or ())):
                    with activity(f"Copying {name} to {url}"):
                        copy_release(local, open_cli_store(url), name)
            settings = read_settings(layouts[0].config["model_metadata"]["preheat"])
            deployment = Deployment.of(settings.of_release(release))
            blobs = select(manifest, find_targets(deployment.runtime), deployment).blobs()
            reading = [starts.read_row(url, settings.store_options(), blobs, runs, release, precision, steps)]
        served = {"": (release,)} | ({f", {len(further) + 1} releases": (release, *further)} if further else {})
        names = [f", {against if path in earlier else path}" if len(paths) > 1 else "" for path in paths]
        cases = [
            starts.StartCase(f"{origin}{several}{name}", layout, url, releases)
            for origin, url in origins.items()
            for several, releases in served.items()
            for name, layout in zip(names, layouts, strict=True)
        ]
        measured = starts.bench_cold_starts(cases, request, runs, work, report)
        rows = [
            starts.cold_start_row(case.name, release, times, precision, steps)
            for case, times in zip(cases, measured, strict=True)
        ]
    of_one_store = len(served) * len(paths)
    rows = [*rows[:of_one_store], *reading, *rows[of_one_store:]]
    _print_table(rows, "phases", "s")
    for number, case in enumerate(cases):
        if number % len(paths) < len(earlier):
            ratio = starts.describe_ratio(measured[number], measured[number + len(earlier)])
            console.print(plain(f"{case.name}: {ratio} of {against}"))
        if len(case.releases) > 1:
            ratio = starts.describe_ratio(measured[number], measured[number - len(paths)])
            console.print(plain(f"{case.name}: {ratio} of {release} alone"))
    finish(rows, out)


@bench.command()
def releases(
    release: Annotated[
        list[str], typer.Argument(help="Three releases, MODEL/VERSION, for two slots.", metavar="RELEASE...")
    ],
    store: ServedStoreOption = None,
    config: ConfigOption = DEMO_CONFIG,
    prompt: str = DEFAULT_PROMPT,
    size: SizeOption = None,
    steps: StepsOption = 20,
    warm_ups: Annotated[int, typer.Option(min=0, help="Number of warm-up runs, which are not counted.")] = 2,
    runs: RunsOption = 12,
    out: OutOption = None,
) -> None:
    """Measure turns of two releases, and swaps of a third one, on the real server. The last line is JSON."""
    from benchmarks.releases import make_rows, measure_swaps, measure_turns, wait_resident
    from preheat.local_server.demo import release_variables
    from preheat.local_server.server import Server, with_settings

    check_rows_file(out)
    if len(set(release)) != 3:
        raise typer.BadParameter("give three different releases", param_hint="RELEASE...")
    opened = open_served_store(store, read_served_settings(config))
    manifest = opened.read_release(release[0])
    precision = unet_precision(manifest).io
    width, height = parse_size(size) if size else (manifest.settings.native_width, manifest.settings.native_height)
    request = {"prompt": prompt, "seed": 1, "num_inference_steps": steps, "width": width, "height": height}
    with tempfile.TemporaryDirectory(prefix="preheat-bench-") as folder:
        layout = with_settings(_lay_out(config, [], Path(folder)), weight_slots=2, workers=1)  # a worker has own slots
        with Server(layout, environment=release_variables(opened.url, release)) as server:
            with activity(f"Starting {', '.join(release)}"):
                server.wait_ready(_TIMEOUT_SECONDS)
                wait_resident(server.url, release[:2], _TIMEOUT_SECONDS)
                time.sleep(_IDLE_SECONDS)  # an idle server measures its engines once, which would delay requests later
            with activity("Requests for two releases in turns"):
                turns = measure_turns(server.url, release[:2], request, warm_ups, runs)
            with activity("Swaps"), GpuUse(gpu_ids(1)) as gpu:
                swaps = measure_swaps(server.url, release, request, runs)
    memory = {name: value for name, value in gpu.entries.items() if name == "memory_gib"}
    rows = make_rows(turns, swaps, f"{width}x{height}", precision, steps, **memory)
    _print_table(rows, "stages", "ms")
    alone, alternating, _, without_swaps, with_swaps = rows
    console.print(f"Two releases in turns take {alternating.p50 / alone.p50:.3f} of the time of one.")
    for other, name in ((alone, "alone"), (without_swaps, "with requests for another release in place of swaps")):
        console.print(f"While others are swapped, requests take {with_swaps.p50 / other.p50:.3f} of the time {name}.")
    finish(rows, out)


def _configs_of_commit(commit: str, configs: list[Path], folder: Path) -> list[Path]:
    """Write the files of a commit to a folder. Returns these configs there: the commit's own, or copies of others.

    Raises typer.BadParameter if the commit is not one of this repository.
    """
    archive = subprocess.run(
        ["git", "-C", ROOT, "archive", "--format=zip", "--end-of-options", commit], capture_output=True
    )
    if archive.returncode:
        reason = archive.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise typer.BadParameter(f"{commit!r} is not a commit of {ROOT}: {' '.join(reason)}", param_hint="--against")
    with zipfile.ZipFile(io.BytesIO(archive.stdout)) as files:
        files.extractall(folder)
    found = []
    for number, config in enumerate(configs):
        path = folder / (config.relative_to(ROOT) if config.is_relative_to(ROOT) else f"config-{number}.yaml")
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(config, path)
        found.append(path)
    return found


def _lay_out(config: Path, buckets: list[tuple[int, int, int]], work: Path) -> "Layout":
    """Write the files of the server image of a config. `buckets`: replace the config's, unless empty."""
    from preheat.local_server.server import build_context, lay_out, with_settings

    root = next((folder for folder in config.resolve().parents if (folder / "model" / "model.py").is_file()), ROOT)
    layout = lay_out(build_context(root, config, work / "build"), work / "image")
    if not buckets:
        return layout
    entries = [{"height": height, "width": width, "rows": batch} for batch, height, width in buckets]
    return with_settings(layout, buckets=entries)


def _print_table(rows: list[Row], parts: str, unit: str) -> None:
    """Print a table of the rows, and the device, versions and request that they share."""
    cells = []
    for row in rows:
        medians: Mapping[str, float] = getattr(row, parts)
        shown = ", ".join(f"{name} {value:g}" for name, value in medians.items())
        cells.append((row.case, f"{row.p50:g}", f"{row.p90:g}", f"{row.p99:g}", str(row.runs), shown))
    headers = (f"p50 {unit}", f"p90 {unit}", f"p99 {unit}", "runs")
    print_numbers("case", headers, cells, f"{parts} (median {unit})")
    first = rows[0]
    console.print(f"{first.gpu}, torch {first.torch}, {first.precision}, {first.steps} steps, batch {first.batch}")


def report(
    folder: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="The folder of JSON files with rows.")
    ] = ROOT / "docs" / "benchmarks",
    out: Annotated[Path | None, typer.Option(help="The first page; default: FOLDER.md.")] = None,
) -> None:
    """Write docs/benchmarks*.md, their plots and the tables of headlines from the rows in docs/benchmarks/*.json.

    Other SVG files in that folder are deleted. The table is also written into README.md and docs/scaling.md.
    """
    from benchmarks.report import write_report

    page = out or folder.absolute().parent / f"{folder.resolve().name}.md"
    plots = write_report(folder, page)
    console.print(f"{plain(page)}: {len(plots)} plots")
