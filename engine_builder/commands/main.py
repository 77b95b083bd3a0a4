"""The `preheat` command: every job of the offline half, and a client for the online one."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from engine_builder.commands.bench import bench_app, report
from engine_builder.commands.console import (
    DEFAULT_STORE,
    ROOT,
    CacheOption,
    StoreOption,
    bucket_of,
    console,
    opened,
    plain,
)
from engine_builder.commands.load import load
from engine_builder.commands.plan import plan_replicas
from engine_builder.commands.store import copy, gc, keygen, publish, releases, run_publish, verify
from engine_builder.serving import demo as demo_run
from engine_builder.serving.calling import generate as call
from engine_builder.serving.calling import save_images, save_predicted
from model.errors import PreheatError
from model.store import Store, open_store
from model.store.manifest import Manifest, Precision

if TYPE_CHECKING:
    from engine_builder.building.build_plan import BuildPlan  # with PyTorch, which only some commands need

TUNING = ROOT / ".preheat" / "tuning"  # a folder for each target; see engine_builder.building.tuning
DEMO_CONFIG = ROOT / "truss" / "configs" / "cpu-demo.yaml"

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(bench_app)
app.command()(report)
app.command()(load)
app.command()(plan_replicas)
app.command()(keygen)
app.command()(publish)
app.command()(releases)
app.command()(verify)
app.command()(copy)
app.command()(gc)


def main() -> None:
    """Entry point: errors written for people end with status 1 and no traceback."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported; see truss/configs/cpu-demo.yaml
    try:
        app()
    except PreheatError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]preheat:[/] {plain(str(error))}")
        sys.exit(1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


@app.command()
def build(
    model: Annotated[str, typer.Argument(help="Folder in diffusers' layout, or a Hub id.")],
    refiner: Annotated[
        str | None, typer.Option(help="The refiner's; default: MODEL/refiner where there is one.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the model in the store; default: the folder's.")] = None,
    store: StoreOption = DEFAULT_STORE,
    precision: Annotated[
        str | None, typer.Option(help="fp32, fp16 or bf16; default: fp32 on a CPU, else fp16.")
    ] = None,
    vae_precision: Annotated[
        str | None,
        typer.Option(
            help="The VAE's own: fp32, fp16 or bf16; default: --precision, but fp32 for an fp16 model whose VAE has "
            "force_upcast."
        ),
    ] = None,
    size: Annotated[
        list[str] | None,
        typer.Option(help="WIDTHxHEIGHT@ROWS, e.g. 1024x1024@2, repeatable: one tuned engine each (GPU)."),
    ] = None,
    runtime: Annotated[str, typer.Option(help="aot_inductor, or tensorrt (docs/tensorrt.md).")] = "aot_inductor",
    refit: Annotated[
        str, typer.Option(help="TensorRT: identical, a plan for these weights; any, for every model's.")
    ] = "identical",
    compatibility: Annotated[
        str, typer.Option(help="TensorRT: none, this GPU's product; same_compute_capability; ampere_plus.")
    ] = "none",
    workspace: Annotated[float | None, typer.Option(help="TensorRT: GiB of GPU memory that kernels may take.")] = None,
    level: Annotated[int, typer.Option(min=0, max=5, help="TensorRT: how thoroughly kernels are chosen.")] = 3,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Engines compiled side by side, each with a network of its own in memory, the GPU's too; default: as "
            "many as a CPU has cores, four at most; one on a GPU.",
        ),
    ] = None,
    cache_dir: CacheOption = None,
) -> None:
    """Compile the networks of MODEL for this machine, check them, keep them with the weights in the store."""
    options = TensorRTOptions(refit, compatibility, workspace, level) if _is_tensorrt(runtime) else None
    holder = opened(store, cache_dir)
    result = run_build(holder, model, refiner, name, precision, size or [], options, vae_precision, jobs)
    console.print(f"Next: preheat publish {result.model} --store {store}")


@dataclass(frozen=True)
class TensorRTOptions:
    """What `preheat build` was asked of TensorRT, as it was typed; `workspace` in GiB."""

    refit: str
    compatibility: str
    workspace: float | None
    level: int


def _is_tensorrt(runtime: str) -> bool:
    if runtime not in ("aot_inductor", "tensorrt"):
        raise typer.BadParameter(f"{runtime!r} is not aot_inductor or tensorrt", param_hint="--runtime")
    return runtime == "tensorrt"


def run_build(
    store: Store,
    model: str,
    refiner: str | None,
    name: str | None,
    precision: str | None,
    sizes: list[str],
    tensorrt: TensorRTOptions | None = None,
    vae_precision: str | None = None,
    jobs: int | None = None,
) -> Manifest:
    """Build with progress on the console; prints a table of the engines; returns the draft."""
    with console.status("Loading PyTorch and the model libraries"):
        from engine_builder.building.build import build as build_model
        from engine_builder.building.build_plan import BuildPlan
        from engine_builder.building.compile import build_target
        from engine_builder.building.compile_jobs import default_processes
        from engine_builder.model_folder.checkout import find_folders
        from engine_builder.tensorrt_plans.choices import read_choices, target_of

    choices = None if tensorrt is None else read_choices(**asdict(tensorrt))
    base, refiner_folder = find_folders(model, refiner)
    target = build_target() if choices is None else target_of(build_target(), choices)
    chosen = precision or ("fp16" if target.device == "cuda" else "fp32")
    for option, given in (("--precision", chosen), ("--vae-precision", vae_precision or chosen)):
        if given not in ("fp32", "fp16", "bf16"):
            raise typer.BadParameter(f"{given!r} is not fp32, fp16 or bf16", param_hint=option)
        if choices is not None and given == "bf16":
            raise typer.BadParameter("TensorRT's engines are built in fp32 or fp16", param_hint=option)
    plan = BuildPlan(
        model=name or base.root.resolve().name,
        base=base,
        refiner=refiner_folder,
        target=target,
        precision=cast(Precision, chosen),
        sizes=tuple(bucket_of(text) for text in sizes),
        tensorrt=choices,
        vae_precision=cast(Precision | None, vae_precision),
    )
    console.print(f"Building [bold]{plan.model}[/] for {target.key} in {chosen}{_vae_remark(plan)}")
    began = time.perf_counter()
    with _progress() as report:
        result = build_model(plan, store, report, TUNING / target.key, jobs or default_processes(target))
    table = Table("component", "engine", "precision", "KiB", "compiled in", "worst error", "relative error")
    for engine in result.draft.engines:
        state = "compiled" if engine.component in result.compiled else "reused"
        table.add_row(
            engine.component, state, engine.precision, f"{engine.blob.bytes // 1024:,}",
            f"{engine.build_seconds:.0f} s", f"{engine.accuracy.worst:.1e}", f"{engine.accuracy.relative:.1e}",
        )  # fmt: skip
    console.print(table)
    console.print(f"Built in {time.perf_counter() - began:.0f} s: {store.url}")
    return result.draft


def _vae_remark(plan: "BuildPlan") -> str:
    """What there is to say of the VAE's precision, where it is not the model's or not its config's advice."""
    own = plan.precision_of("vae_decoder")
    if own == "fp16" and plan.upcasts_vae:
        return (
            ", its VAE too, though its config says that it overflows there (force_upcast): pictures may hold NaN, and "
            "requests for them fail"
        )
    if own == plan.precision:
        return ""
    return f", its VAE in {own}" + ("" if plan.vae_precision else " (force_upcast: it would overflow in fp16)")


@app.command("export-onnx")
def export_onnx(
    model: Annotated[str, typer.Argument(help="Folder in diffusers' layout, or a Hub id.")],
    refiner: Annotated[
        str | None, typer.Option(help="The refiner's; default: MODEL/refiner where there is one.")
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    precision: Annotated[str, typer.Option(help="fp32 or fp16: the types that the graphs are written in.")] = "fp16",
    out: Annotated[
        Path | None, typer.Option(help="Also write COMPONENT.onnx and their weights to this folder.")
    ] = None,
    cache_dir: CacheOption = None,
) -> None:
    """Export the networks of MODEL to ONNX, check them in ONNX Runtime, keep graphs and weights in the store."""
    with console.status("Loading PyTorch and the model libraries"):
        from engine_builder.model_folder.checkout import find_folders
        from engine_builder.onnx_graphs.store import export_model, write_folder

    if precision not in ("fp32", "fp16"):
        raise typer.BadParameter(f"{precision!r} is not fp32 or fp16", param_hint="--precision")
    holder = opened(store, cache_dir)
    with _progress() as report:
        exported = export_model(*find_folders(model, refiner), cast(Precision, precision), holder, report)
    table = Table("component", "graph", "KiB", "exported in", "weights MiB", "error against eager PyTorch")
    for one in exported:
        kind = "absolute" if precision == "fp32" else "relative"
        table.add_row(
            one.component, "exported" if one.new else "reused", f"{one.kept.graph.bytes / 1024:,.0f}",
            f"{one.kept.export_seconds:.0f} s", f"{sum(blob.bytes for blob in one.weights.blobs) / 2**20:,.1f}",
            f"{one.error:.1e} ({kind})",
        )  # fmt: skip
    console.print(table)
    if out is not None:
        for path in write_folder(holder, exported, out):
            console.print(str(path))


@app.command()
def serve(
    release: Annotated[str, typer.Argument(envvar="PREHEAT_RELEASE", help="MODEL/VERSION.")],
    store: StoreOption = DEFAULT_STORE,
    config: Annotated[Path, typer.Option(help="The deployment's config.yaml.")] = DEMO_CONFIG,
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1.")] = 8080,
    cache_dir: CacheOption = None,
) -> None:
    """Run the real Truss server on this machine until it is interrupted."""
    url = opened(store, cache_dir).url
    with demo_run.serving(ROOT, config, ROOT / ".preheat" / "serve", url, release, port) as server:
        with console.status(f"Starting {release}"):
            server.wait_ready(600)
        console.print(f"Serving [bold]{release}[/] at {server.url}/v1/models/model:predict (Ctrl-C ends it)")
        _print_cold_start(demo_run.cold_start_phases(server.url))
        try:
            code = server.wait()
        except KeyboardInterrupt:
            console.print("Stopping")
            return
    raise PreheatError(f"The server ended by itself (exit code {code}).")


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What the picture shows.")],
    url: Annotated[str, typer.Option(help="The server, without a path.")] = "http://127.0.0.1:8080",
    out: Annotated[Path, typer.Option(help="Where to write; several images get numbers.")] = Path("image.png"),
    negative_prompt: str | None = None,
    width: int | None = None,
    height: int | None = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps.")] = None,
    guidance_scale: float | None = None,
    scheduler: str | None = None,
    refiner: Annotated[bool | None, typer.Option(help="Finish with the refiner.")] = None,
    seed: int | None = None,
    images: Annotated[int, typer.Option(help="How many.")] = 1,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the answer.")] = 300,
) -> None:
    """Ask a running server for a picture and save it."""
    given = {
        "negative_prompt": negative_prompt,
        "width": width,
        "height": height,
        "num_inference_steps": steps,
        "guidance_scale": guidance_scale,
        "scheduler": scheduler,
        "use_refiner": refiner,
        "seed": seed,
    }
    request = {"prompt": prompt, "num_images": images, "output_format": _format_of(out)}
    request |= {key: value for key, value in given.items() if value is not None}
    with _drawing() as progress:
        response = call(url, request, timeout, progress)
    _print_response(response, save_images(response, out))


@app.command()
def save(out: Annotated[Path, typer.Option(help="Where to write.")] = Path("image.png")) -> None:
    """Write the pictures in what `truss predict` prints, read from standard input."""
    for path in save_predicted(sys.stdin, out):
        console.print(str(path))


@app.command()
def demo(
    prompt: Annotated[str, typer.Option(envvar="PROMPT")] = "a large red circle on a blue background",
    seed: Annotated[int, typer.Option(envvar="SEED")] = 7,
    out: Annotated[Path, typer.Option(envvar="OUT")] = Path("demo.png"),
    refiner: Annotated[bool, typer.Option(help="Finish with the refiner.")] = False,
    model: Annotated[Path, typer.Option(help="Folder of the model.")] = ROOT / "data" / "tiny-sdxl",
) -> None:
    """Build, publish, start the real server, draw one picture over HTTP, and say what took how long."""
    store = open_store(DEFAULT_STORE)
    draft = run_build(store, str(model), None, None, None, [])
    manifest = run_publish(store, draft.model)
    work = ROOT / ".preheat" / "demo"
    request = {"prompt": prompt, "seed": seed, "output_format": _format_of(out), "use_refiner": refiner}
    with demo_run.serving(ROOT, DEMO_CONFIG, work, store.url, manifest.name, log=work / "server.log") as server:
        with console.status("Starting the Truss server"):
            server.wait_ready(300)
        with _drawing() as progress:
            picture = demo_run.draw_once(server, request, out, timeout=300, progress=progress)
    _print_cold_start(picture.cold_start)
    _print_response(picture.response, picture.paths)


def _print_cold_start(phases: dict[str, float]) -> None:
    names = {"first_image": "process start to first image"}
    table = Table("cold start", "seconds", title_justify="left")
    for phase, seconds in phases.items():
        table.add_row(names.get(phase, phase), f"{seconds:.2f}")
    console.print(table)


def _print_response(response: dict[str, Any], paths: list[Path]) -> None:
    table = Table("stage", "ms")
    for stage, milliseconds in response["timings"].items():
        table.add_row(stage, f"{milliseconds:.0f}")
    table.add_row("request", f"{response['time'] * 1000:.0f}")
    console.print(table)
    for warning in response["warnings"]:
        console.print(f"[yellow]warning[/] {plain(warning)}")
    for path, image in zip(paths, response["images"], strict=True):
        console.print(f"[bold]{path.resolve()}[/]  seed {image['seed']}, {image['width']}x{image['height']}")


@contextmanager
def _drawing() -> Iterator[Callable[[dict[str, Any]], None]]:
    """A bar of the steps of one request, from the lines that the server streams."""
    columns = (
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("Asking", total=None)

        def show(line: dict[str, Any]) -> None:
            if line["event"] in ("accepted", "heartbeat"):
                ahead = f" behind {line['ahead']} images" if line["ahead"] else ""
                progress.update(task, description=f"Waiting{ahead}", total=line.get("steps"))
            elif line["event"] == "step":
                done = max(line["step"], int(progress.tasks[0].completed))
                progress.update(task, description="Drawing", completed=done, total=line["steps"])

        yield show


@contextmanager
def _progress() -> Iterator[Any]:
    """A bar on a terminal; elsewhere a line for each thing begun, so that a log shows life."""
    if not console.is_terminal:
        began = time.perf_counter()

        def say(component: str, doing: str, done: int, steps: int) -> None:
            console.print(f"{time.perf_counter() - began:6.1f} s  {done:2}/{steps}  {component}: {doing}")
            sys.stdout.flush()

        yield say
        return
    columns = (
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("Starting", total=None)

        def show(component: str, doing: str, done: int, steps: int) -> None:
            progress.update(task, description=f"{component}: {doing}", completed=done, total=steps)

        yield show


def _format_of(out: Path) -> str:
    return {".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}.get(out.suffix.lower(), "png")


if __name__ == "__main__":
    main()
