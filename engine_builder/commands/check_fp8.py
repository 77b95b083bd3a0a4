"""The command `preheat check-fp8`: compare pictures in FP8 with the model's own, before anything is built."""

import time
from pathlib import Path
from typing import Annotated

import typer

from engine_builder.commands.calibrate import PROMPTS, choose_precision, choose_size, prompt_progress, read_prompt_file
from engine_builder.commands.console import (
    DEFAULT_STORE,
    CacheOption,
    StoreOption,
    console,
    open_cli_store,
    plain,
)
from engine_builder.files import check_writable, write_file
from model.validation import MAX_GUIDANCE, MAX_STEPS


def check_fp8(
    model: Annotated[str, typer.Argument(help="Folder in diffusers' layout, or a Hub id.")],
    policy: Annotated[
        Path | None, typer.Option(help="TOML file: which layers stay in fp16; default: proj_in and proj_out.")
    ] = None,
    thresholds: Annotated[Path | None, typer.Option(help="TOML file: limits of the comparison.")] = None,
    prompts: Annotated[Path, typer.Option(help="Text file with one prompt in each line.")] = PROMPTS,
    count: Annotated[int, typer.Option(min=1, help="Use the first prompts of the file.")] = 32,
    steps: Annotated[int, typer.Option(min=1, max=MAX_STEPS, help="Steps of each image.")] = 20,
    guidance: Annotated[float, typer.Option(min=0, max=MAX_GUIDANCE, help="Guidance scale of each image.")] = 8.0,
    size: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT of the images; default: the model's native.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for report.json and pairs.png, the pictures side by side.")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(help="What FP8 is compared with: fp32, fp16 or bf16; default: fp32 on a CPU."),
    ] = None,
    refiner: Annotated[str | None, typer.Option(help="The refiner; default: MODEL/refiner if it exists.")] = None,
    store: StoreOption = DEFAULT_STORE,
    cache_dir: CacheOption = None,
) -> None:
    """Compute the UNet's linears in FP8 in eager PyTorch, and measure how far the pictures are from the model's own.

    Needs a calibration (`preheat calibrate`). Exit status 1 if a threshold is not kept.
    """
    with console.status("Loading PyTorch and the model libraries"):
        from engine_builder.backends.aot_inductor.compile import build_target
        from engine_builder.checkpoints.find import find_checkpoints
        from engine_builder.quantization.check import check_quantization
        from engine_builder.quantization.policy import DEFAULT, Policy
        from engine_builder.quantization.validation.compare import validation_requests
        from engine_builder.quantization.validation.contact_sheet import contact_sheet
        from engine_builder.quantization.validation.report import describe
        from engine_builder.quantization.validation.thresholds import Thresholds, violations

    chosen_policy = Policy.read(policy) if policy else DEFAULT
    listed = read_prompt_file(prompts)[:count]
    limits = Thresholds.read(thresholds) if thresholds else Thresholds(min_prompts=min(len(listed), 32))
    if out is not None:
        check_writable(out / "report.json")
    device = build_target().device
    compared = choose_precision(precision, device)
    base, refiner_checkpoint = find_checkpoints(model, refiner)
    width, height = choose_size(size, base)
    requests = validation_requests(
        listed, width, height, steps=steps, guidance=guidance, use_refiner=refiner_checkpoint is not None, min_prompts=1
    )
    started = time.perf_counter()
    with prompt_progress("Comparing") as report:
        check = check_quantization(
            base, refiner_checkpoint, compared, device, chosen_policy, requests, open_cli_store(store, cache_dir),
            report=report,
        )  # fmt: skip
    console.print(describe(check.comparison.report))
    for component, layers in check.layers.items():
        console.print(f"{component}: {len(layers)} layers in FP8")
    if out is not None:
        write_file(out / "report.json", check.comparison.report.model_dump_json(indent=1).encode())
        write_file(out / "pairs.png", contact_sheet(check.comparison.report, check.comparison.pairs))
        console.print(f"[bold]{plain(out.resolve())}[/]  report.json, pairs.png")
    console.print(f"Compared in {time.perf_counter() - started:.0f} s")
    found = violations(check.comparison.report, limits)
    for sentence in found:
        console.print(f"[red]refused[/] {sentence}")
    if found:
        raise typer.Exit(1)
