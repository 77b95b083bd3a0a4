"""The command `preheat check-fp8`: compare pictures in FP8 or INT8 with the model's own, before anything is built."""

import time
from pathlib import Path
from typing import Annotated

import typer

from engine_builder.files import check_folder
from model.store.precision import FP8, FP32, INT8, Precision
from model.validation import MAX_GUIDANCE, MAX_STEPS
from preheat.commands.calibrate import (
    PROMPTS,
    choose_precision,
    choose_size,
    prompt_progress,
    read_prompt_file,
)
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
    CacheOption,
    StoreOption,
    activity,
    console,
    open_cli_store,
    plain,
    save_report,
)


def check_fp8(
    model: ModelArgument,
    policy: Annotated[
        Path | None, typer.Option(help="TOML file of the quantized layers; default: those of `preheat build`.")
    ] = None,
    thresholds: Annotated[Path | None, typer.Option(help="TOML file: limits of the comparison.")] = None,
    prompts: Annotated[Path, typer.Option(help="Text file with one prompt in each line.")] = PROMPTS,
    count: Annotated[int, typer.Option(min=1, help="Use the first prompts of the file.")] = 32,
    steps: Annotated[int, typer.Option(min=1, max=MAX_STEPS, help="Steps of each image.")] = 20,
    guidance_scale: Annotated[float, typer.Option(min=0, max=MAX_GUIDANCE, help="Guidance scale of each image.")] = 8.0,
    size: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT of the images; default: the model's native.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for report.json and pairs.png, the pictures side by side.")
    ] = None,
    quantized: Annotated[str, typer.Option(help="fp8 or int8: the numbers of the quantized layers.")] = "fp8",
    precision: Annotated[
        str | None,
        typer.Option(help="What 8 bits are compared with: fp16 or bf16 on a GPU; default: fp32 on a CPU, else fp16."),
    ] = None,
    refiner: RefinerOption = None,
    no_refiner: NoRefinerOption = False,
    vae: VaeOption = None,
    config: ConfigOption = None,
    store: StoreOption = DEFAULT_STORE,
    cache_dir: CacheOption = None,
) -> None:
    """Compute a model's layers in FP8 or INT8 in eager PyTorch, and measure the distance to the model's own pictures.

    Needs a calibration (`preheat calibrate`). The report and the pictures are stored for `preheat publish`, in place of
    an earlier check of the same policy and calibration. Exit status 1 if a threshold is not kept. Without --thresholds
    fewer prompts and steps are accepted than `preheat publish` requires, which is then printed.
    """
    if out is not None:
        check_folder(out, "report.json", "pairs.png")
    with activity("Loading PyTorch and the model libraries"):
        from engine_builder.backends.aot_inductor.compile import build_target
        from engine_builder.quantization.picture_check import check_quantization, check_target
        from engine_builder.quantization.policy import DEFAULTS, Policy
        from engine_builder.quantization.validation.compare import validation_requests
        from engine_builder.quantization.validation.contact_sheet import contact_sheet
        from engine_builder.quantization.validation.report import describe
        from engine_builder.quantization.validation.stored import write_validation
        from engine_builder.quantization.validation.thresholds import Thresholds, violations

    check_no_refiner(refiner, no_refiner)
    if quantized not in (FP8.name, INT8.name):
        raise typer.BadParameter(f"{quantized!r} is not fp8 or int8", param_hint="--quantized")
    number_type = Precision.named(quantized)
    target = build_target()
    compared = choose_precision(precision, target.device)
    if target.device == "cuda" and compared == FP32:
        raise typer.BadParameter(
            "a GPU's 8-bit products are fp16 or bf16; choose one of them", param_hint="--precision"
        )
    check_target(target, number_type)
    chosen_policy = Policy.read(policy) if policy else DEFAULTS[number_type]
    chosen_policy.check_precision(number_type)
    listed = read_prompt_file(prompts)[:count]
    limits = Thresholds.read(thresholds) if thresholds else Thresholds.for_check(len(listed), steps)
    base, refiner_checkpoint = find_parts(model, refiner, no_refiner, vae, config)
    width, height = choose_size(size, base)
    requests = validation_requests(
        listed,
        width,
        height,
        steps=steps,
        guidance=guidance_scale,
        use_refiner=refiner_checkpoint is not None,
        min_prompts=1,
    )
    if thresholds is None:
        required = Thresholds()
        for unit, least, given in (
            ("prompts", required.min_prompts, len(listed)),
            ("steps", required.min_steps, steps),
        ):
            if given < least:
                sentence = f"`preheat publish` requires at least {least} {unit}; this check has {given}."
                console.print(f"[yellow]warning[/] {sentence}", soft_wrap=True)
    opened = open_cli_store(store, cache_dir)
    started = time.perf_counter()
    with prompt_progress("Comparing") as progress:
        check = check_quantization(
            base, refiner_checkpoint, compared, target.device, chosen_policy, requests, opened, report=progress,
            quantized_precision=number_type,
        )  # fmt: skip
    report = check.comparison.report
    pictures = contact_sheet(report, check.comparison.pairs)
    write_validation(opened, report, pictures)
    console.print(describe(report))
    for component, layers in check.layers.items():
        console.print(f"{component}: {len(layers)} layers in {quantized.upper()}")
    if out is not None:
        save_report(out, {"report.json": report.model_dump_json(indent=1).encode(), "pairs.png": pictures})
    console.print(
        f"Compared in {time.perf_counter() - started:.0f} s, stored as validation "
        f"{report.identity['quantization'][:12]}: {plain(opened.url)}"
    )
    found = violations(report, limits)
    for sentence in found:
        console.print(f"[red]refused[/] {sentence}")
    if found:
        raise typer.Exit(1)
