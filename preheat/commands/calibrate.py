"""The command `preheat calibrate`: collect the ranges that an 8-bit build needs."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from engine_builder.error_text import cause_of
from engine_builder.files import read_file
from model.errors import PreheatError
from model.store.precision import BF16, FP16, FP32, Precision
from model.validation import LARGEST_SIDE, MAX_GUIDANCE, MAX_PROMPT_CHARACTERS, MAX_STEPS, SMALLEST_SIDE
from preheat.commands.model_options import (
    ConfigOption,
    ModelArgument,
    NoRefinerOption,
    RefinerOption,
    VaeOption,
    check_no_refiner,
    find_parts,
)
from preheat.console import (
    DEFAULT_STORE,
    ROOT,
    CacheOption,
    StoreOption,
    activity,
    console,
    open_cli_store,
    parse_size,
    plain,
    progress_console,
    steps_bar,
)

if TYPE_CHECKING:
    from engine_builder.checkpoints.folder import Checkpoint
    from engine_builder.quantization.calibrate import CalibratedNetwork, ReportPrompt

PROMPTS = ROOT / "data" / "prompts" / "general.txt"
PARTIAL = ROOT / ".preheat" / "calibration"  # the ranges of unfinished calibrations
_LISTED_LAYERS = 10
_PROMPT_LIMIT = f"at most {MAX_PROMPT_CHARACTERS} characters, without NUL"
_PRECISIONS = {precision.name: precision for precision in (FP32, FP16, BF16)}


class BadPrompts(PreheatError):
    """A file of prompts cannot be read, or holds none."""

    remedy = "Give a text file with one prompt in each line."


def calibrate(
    model: ModelArgument,
    prompts: Annotated[Path, typer.Option(help="Text file with one prompt in each line.")] = PROMPTS,
    negative_prompt: Annotated[str, typer.Option(help="The negative prompt of all prompts.")] = "",
    steps: Annotated[int, typer.Option(min=1, max=MAX_STEPS, help="Steps of each image.")] = 20,
    guidance_scale: Annotated[float, typer.Option(min=0, max=MAX_GUIDANCE, help="Guidance scale of each image.")] = 8.0,
    size: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT of the images; default: the model's native.")] = None,
    count: Annotated[int | None, typer.Option(min=1, help="Use only the first prompts; default: all.")] = None,
    precision: Annotated[
        str | None, typer.Option(help="fp32, fp16 or bf16; default: fp32 on a CPU, else fp16.")
    ] = None,
    refiner: RefinerOption = None,
    no_refiner: NoRefinerOption = False,
    vae: VaeOption = None,
    config: ConfigOption = None,
    store: StoreOption = DEFAULT_STORE,
    cache_dir: CacheOption = None,
) -> None:
    """Generate an image of each prompt in eager PyTorch, and store the ranges of the inputs of the networks' layers.

    A calibration that was interrupted continues. One that is stored is not run again.
    """
    with activity("Loading PyTorch and the model libraries"):
        from engine_builder.backends.aot_inductor.compile import build_target
        from engine_builder.quantization.calibrate import CalibrationPlan
        from engine_builder.quantization.calibrate import calibrate as calibrate_model

    check_no_refiner(refiner, no_refiner)
    if not _is_prompt(negative_prompt):
        raise typer.BadParameter(f"it is no prompt: {_PROMPT_LIMIT}", param_hint="--negative-prompt")
    device = build_target().device
    chosen = choose_precision(precision, device)
    listed = read_prompt_file(prompts)[:count]
    base, refiner_checkpoint = find_parts(model, refiner, no_refiner, vae, config)
    width, height = choose_size(size, base)
    plan = CalibrationPlan(
        base=base,
        refiner=refiner_checkpoint,
        precision=chosen,
        device=device,
        prompts=listed,
        negative_prompt=negative_prompt,
        steps=steps,
        guidance=guidance_scale,
        width=width,
        height=height,
    )
    opened = open_cli_store(store, cache_dir)
    started = time.perf_counter()
    with prompt_progress("Generating images") as report:
        calibrated = calibrate_model(plan, opened, PARTIAL, report)
    for network in calibrated:
        _print_network(network)
    console.print(f"Calibrated in {time.perf_counter() - started:.0f} s: {plain(opened.url)}")


def read_prompt_file(path: Path) -> tuple[str, ...]:
    """Return the prompts of a file. Raises BadPrompts."""
    from engine_builder.quantization.calibrate import read_prompts

    try:
        listed = read_prompts(read_file(path).decode("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadPrompts(f"{path} cannot be read ({cause_of(error)}).") from error
    if not listed:
        raise BadPrompts(f"{path} holds no prompt.")
    if unfit := [prompt for prompt in listed if not _is_prompt(prompt)]:
        raise BadPrompts(f"{path}: {unfit[0][:40]!r} is no prompt: {_PROMPT_LIMIT}.")
    return listed


def _is_prompt(text: str) -> bool:
    """True if a request accepts the text."""
    return len(text) <= MAX_PROMPT_CHARACTERS and "\0" not in text


def choose_precision(name: str | None, device: str) -> Precision:
    """Return the precision of that name, or a device's default. Raises typer.BadParameter."""
    if name is None:
        return FP16 if device == "cuda" else FP32
    if name not in _PRECISIONS:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(_PRECISIONS)}", param_hint="--precision")
    return _PRECISIONS[name]


def choose_size(size: str | None, base: "Checkpoint") -> tuple[int, int]:
    """Return the width and height of "1024x768", or the model's native size. Raises typer.BadParameter."""
    from engine_builder.checkpoints.release_settings import read_model_facts

    facts = read_model_facts(base, None)
    width, height = parse_size(size) if size else (facts.native_width, facts.native_height)
    step = base.size_step()
    if not all(SMALLEST_SIDE <= side <= LARGEST_SIDE and side % step == 0 for side in (width, height)):
        raise typer.BadParameter(
            f"the sides of {size} must be multiples of {step} from {SMALLEST_SIDE} to {LARGEST_SIDE}",
            param_hint="--size",
        )
    return width, height


def _print_network(network: "CalibratedNetwork") -> None:
    """Print the layers whose largest input exceeds their 99.99th percentile the most."""
    conditions, ranges = network.conditions, network.ranges
    source = "calibrated" if network.is_new else "reused"
    console.print(
        f"[bold]{conditions.component}[/] {source}: {len(ranges)} layers, {conditions.prompt_count} prompts, "
        f"{conditions.steps} steps, record {conditions.key[:12]}"
    )
    table = Table(box=SIMPLE_HEAD, title="largest outliers")
    table.add_column("layer", overflow="fold")
    for column in ("maximum", "99.99 %", "least error"):
        table.add_column(column, no_wrap=True)
    by_outlier = sorted(ranges.items(), key=lambda item: item[1].percentile(0.9999) / item[1].absolute_maximum)
    for name, observed in by_outlier[:_LISTED_LAYERS]:
        clips = (observed.clip(rule) for rule in ("absolute_maximum", "percentile", "squared_error"))
        table.add_row(plain(name), *(f"{clip:.4g}" for clip in clips))
    console.print(table)


@contextmanager
def prompt_progress(description: str) -> Iterator["ReportPrompt"]:
    """Show a progress bar of prompts on a terminal, and a line for every tenth prompt elsewhere."""
    if not progress_console.is_terminal:

        def print_line(done: int, prompts: int) -> None:
            if done % 10 == 0 or done == prompts:
                console.print(f"{done}/{prompts} prompts", soft_wrap=True)
                sys.stdout.flush()

        yield print_line
        return
    with steps_bar() as progress:
        task = progress.add_task(description, total=None)
        yield lambda done, prompts: progress.update(task, completed=done, total=prompts)
