"""Print a build: what it includes, its progress, and its engines."""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from model.pipeline.spec import UNET
from model.store.precision import FP16
from preheat.console import console, plain, progress_console, steps_bar

if TYPE_CHECKING:
    from engine_builder.backends.built import ReportProgress
    from engine_builder.building.build import BuildResult
    from engine_builder.building.build_plan import BuildPlan  # imports PyTorch, which not every command needs


def print_plan(plan: "BuildPlan") -> None:
    """Print what is built, and what it includes."""
    from engine_builder.checkpoints.release_settings import read_release_defaults
    from engine_builder.checkpoints.scheduler_config import read_scheduler

    console.print(
        f"Building [bold]{plain(plan.model)}[/] for {', '.join(target.key for target in plan.targets)} in "
        f"{plan.precision}{_vae_remark(plan)}{_sizes_remark(plan)}{_source_remark(plan)}"
    )
    scheduler = read_scheduler(plan.base)
    if read_release_defaults(plan.base, plan.refiner)["scheduler"] == scheduler.sampler:  # not that of defaults.json
        for warning in scheduler.warnings:
            console.print(f"[yellow]warning[/] Its scheduler: {plain(warning)}")
    if plan.base.unet_widths().extra_channels:
        console.print("The UNet is for inpainting: every request needs an image and masks")
    console.print(_planned_engines(plan))
    console.print("Engines that the store has, or that components share, are not compiled again", soft_wrap=True)


def print_comparison(result: "BuildResult") -> None:
    """Print how far the model is from diffusers, if this build compared it."""
    if (report := result.comparison) is None:
        return
    versions = " and ".join(f"{name} {result.draft.builder[name]}" for name in ("diffusers", "transformers"))
    worst = max(report.networks, key=lambda one: one.error / one.limit)
    console.print(
        f"Compared with {versions} in {report.seconds:.0f} s and {report.added_bytes / 2**30:.1f} GiB more memory: "
        f"{len(report.networks)} networks, the largest relative error {worst.error:.1e} ({worst.name}; limit "
        f"{worst.limit:.0e}); the steps of {report.sampler.name}, {report.sampler.error:.1e} (limit "
        f"{report.sampler.limit:.0e}); an image of two steps, {report.image.error:.0f} of 255 levels (limit "
        f"{report.image.limit:.0f})"
    )


def print_engines(result: "BuildResult", target: str) -> None:
    """Print a table of the engines of a target, by its key, and the error of previews."""
    component = Column("component", overflow="fold")
    table = Table(component, "bucket", "precision", "KiB", "compiled", "relative\nerror", box=SIMPLE_HEAD)
    for engine in result.draft.engines:
        if engine.target != target:  # the same plans serve it
            continue
        compiled = f"{engine.build_seconds:.0f} s" if engine.component in result.compiled else "reused"
        table.add_row(
            engine.component, engine.bucket.label, engine.precision.name, f"{engine.blob.bytes // 1024:,}",
            compiled, f"{engine.accuracy.relative:.1e}" if engine.accuracy else "not run",
        )  # fmt: skip
    console.print(table)
    if preview := result.draft.settings.preview:
        measured = "generated and synthetic pictures outside of the fit"
        console.print(f"Previews: mean error {preview.error:.1%} of the range, on {measured}")


def print_gains(plan: "BuildPlan") -> None:
    """Print the error and the gain of each layer of the base's UNet, at the plan's first size."""
    from engine_builder.backends.aot_inductor.compile import example_inputs
    from engine_builder.networks.network import load_network
    from engine_builder.quantization.layer_report import gains_table, measure_gains

    assert plan.quantization is not None
    network = load_network(plan.base, UNET, FP16, plan.network_device)
    inputs = example_inputs(network.signature, *plan.sizes[0], plan.network_device)
    console.print(gains_table(UNET, measure_gains(network, plan.quantization, inputs)))


def _vae_remark(plan: "BuildPlan") -> str:
    """Describe the VAE's precision if it differs from the model's or contradicts the VAE's config."""
    precision = plan.unquantized_vae_precision
    decoder = f", its VAE decoder in {plan.precision}" if plan.quantizes_vae else ""
    if precision == FP16 and plan.upcasts_vae:
        return (
            f"{decoder}, also its VAE, although its config says that it overflows in fp16 (force_upcast): images may "
            "hold NaN, and their requests fail"
        )
    if precision == plan.precision.unquantized:
        return decoder
    return f", its VAE in {precision}" + ("" if plan.vae_precision else " (force_upcast: it would overflow in fp16)")


def _source_remark(plan: "BuildPlan") -> str:
    """Name what replaces files of the model's folder."""
    base = plan.base
    return (f"; VAE: {plain(str(base.vae))}" if base.vae else "") + (
        f"; preset {base.preset.name}" if base.preset else ""
    )


def _planned_engines(plan: "BuildPlan") -> Table:
    """Return a table of the engines of each component, and the minutes to compile them one after the other.

    The minutes are estimates for AOTInductor. Plans have no estimates.
    """
    from engine_builder.backends.aot_inductor.remaining_time import expected_seconds

    table = Table("component", box=SIMPLE_HEAD, show_footer=True)
    counts = {name: plan.engine_count(name) for name in plan.components}
    minutes = {name: count * expected_seconds(name, plan.target.device) / 60 for name, count in counts.items()}
    table.columns[0].footer = "all"
    table.add_column("engines", str(sum(counts.values())), justify="right")
    if plan.tensorrt is None:
        table.add_column("estimated minutes,\none after the other", f"{sum(minutes.values()):.0f}", justify="right")
    for name, count in counts.items():
        table.add_row(name, str(count), *([] if plan.tensorrt else [f"{minutes[name]:.1f}"]))
    return table


def _sizes_remark(plan: "BuildPlan") -> str:
    sizes = ", ".join(f"{width}x{height}@{batch}" for batch, height, width in plan.sizes)
    return f"; sizes @ batch: {sizes}" if sizes else ""


@contextmanager
def progress(remaining: Callable[[], float] = lambda: 0.0) -> Iterator["ReportProgress"]:
    """Show a progress bar on a terminal, and one line per activity elsewhere.

    `remaining` returns the estimated seconds until all engines are compiled; zero if unknown.
    """
    if not progress_console.is_terminal:
        started = time.perf_counter()

        def print_line(component: str, activity: str, done: int, steps: int) -> None:
            line = f"{time.perf_counter() - started:6.1f} s  {done:2}/{steps}  {component}: {activity}"
            console.print(", ".join(filter(None, [line, _time_left(remaining())])), soft_wrap=True)
            sys.stdout.flush()

        yield print_line
        return
    with steps_bar(lambda: _time_left(remaining())) as progress:
        task = progress.add_task("Starting", total=None)

        def update_bar(component: str, activity: str, done: int, steps: int) -> None:
            progress.update(task, description=f"{component}: {activity}", completed=done, total=steps)

        yield update_bar


def _time_left(seconds: float) -> str:
    """Return "about 50 s left", rounded up to 5 s. Empty for zero."""
    return f"about {math.ceil(seconds / 5) * 5} s left" if seconds else ""
