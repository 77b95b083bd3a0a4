"""What compiles: `preheat build` and `preheat export-onnx`."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from engine_builder.commands.console import (
    DEFAULT_STORE,
    ROOT,
    CacheOption,
    StoreOption,
    bucket_of,
    console,
    opened,
    steps_bar,
)
from model.store.manifest import Bucket, Manifest, Precision
from model.store.store import Store

if TYPE_CHECKING:
    from engine_builder.building.build_plan import BuildPlan  # with PyTorch, which only some commands need

TUNING = ROOT / ".preheat" / "tuning"  # a folder for each target; see engine_builder.backends.aot_inductor.tuning


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
        typer.Option(
            help="WIDTHxHEIGHT@ROWS, e.g. 1024x1024@2, repeatable: one tuned engine each; default: the model's own "
            "size with 1 and 2 rows on a GPU, and one engine for any size on a CPU."
        ),
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
            "many as a CPU has cores, four at most; one on a GPU, where more disturb each other's timings.",
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
        from engine_builder.backends.aot_inductor.compile import build_target
        from engine_builder.backends.aot_inductor.compile_jobs import default_processes
        from engine_builder.backends.tensorrt.options import (
            read_choices,
            target_of,
        )
        from engine_builder.building.build import build as build_model
        from engine_builder.building.build_plan import BuildPlan, default_sizes
        from engine_builder.checkpoints.find import find_folders

    choices = None if tensorrt is None else read_choices(**asdict(tensorrt))
    base, refiner_folder = find_folders(model, refiner)
    target = build_target() if choices is None else target_of(build_target(), choices)
    chosen = precision or ("fp16" if target.device == "cuda" else "fp32")
    for option, given in (("--precision", chosen), ("--vae-precision", vae_precision or chosen)):
        if given not in ("fp32", "fp16", "bf16"):
            raise typer.BadParameter(f"{given!r} is not fp32, fp16 or bf16", param_hint=option)
        if choices is not None and given == "bf16":
            raise typer.BadParameter("TensorRT's engines are built in fp32 or fp16", param_hint=option)
    asked = tuple(dict.fromkeys(bucket_of(text) for text in sizes))
    plan = BuildPlan(
        model=name or (base.root.resolve().name if Path(model).is_dir() else model.rpartition("/")[2]),
        base=base,
        refiner=refiner_folder,
        target=target,
        precision=cast(Precision, chosen),
        sizes=asked or default_sizes(base, target),
        tensorrt=choices,
        vae_precision=cast(Precision | None, vae_precision),
    )
    console.print(
        f"Building [bold]{plan.model}[/] for {target.key} in {chosen}{_vae_remark(plan)}{_sizes_remark(plan)}"
    )
    began = time.perf_counter()
    with _progress() as report:
        result = build_model(plan, store, report, TUNING / target.key, jobs or default_processes(target))
    table = Table("component", "bucket", "precision", "KiB", "compiled", "relative\nerror", box=SIMPLE_HEAD)
    for engine in result.draft.engines:
        compiled = f"{engine.build_seconds:.0f} s" if engine.component in result.compiled else "reused"
        table.add_row(
            engine.component, _bucket_remark(engine.bucket), engine.precision, f"{engine.blob.bytes // 1024:,}",
            compiled, f"{engine.accuracy.relative:.1e}",
        )  # fmt: skip
    console.print(table)
    console.print(f"Built in {time.perf_counter() - began:.0f} s: {store.url}")
    return result.draft


def _bucket_remark(bucket: Bucket) -> str:
    """ "1024x1024@2", "any@1-16" of an engine for any size, "@2" of one that has none."""
    rows, height, width = bucket.rows, bucket.height, bucket.width
    size = ""
    if height and width:
        size = f"{width.max}x{height.max}" if height.min == height.max and width.min == width.max else "any"
    return f"{size}@{rows.max}" if rows.min == rows.max else f"{size}@{rows.min}-{rows.max}"


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


def _sizes_remark(plan: "BuildPlan") -> str:
    sizes = ", ".join(f"{width}x{height}@{rows}" for rows, height, width in plan.sizes)
    return f"; sizes @ rows: {sizes}" if sizes else ""


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
        from engine_builder.backends.onnx.graph_store import (
            export_model,
            write_folder,
        )
        from engine_builder.checkpoints.find import find_folders

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
    with steps_bar() as progress:
        task = progress.add_task("Starting", total=None)

        def show(component: str, doing: str, done: int, steps: int) -> None:
            progress.update(task, description=f"{component}: {doing}", completed=done, total=steps)

        yield show
