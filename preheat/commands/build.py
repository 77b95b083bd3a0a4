"""The command `preheat build`."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from engine_builder.stores.store import WritableStore
from model.store.manifest import Manifest
from model.store.precision import FP8, INT8
from model.validation import MAX_EMBEDDING_ROWS, MAX_IP_IMAGES
from preheat.commands.build_arguments import parse_plan
from preheat.commands.build_report import print_comparison, print_engines, print_gains, print_plan, progress
from preheat.commands.model_options import (
    ConfigOption,
    ModelArgument,
    NoRefinerOption,
    RefinerOption,
    VaeOption,
    check_no_refiner,
)
from preheat.console import (
    DEFAULT_STORE,
    ROOT,
    CacheOption,
    StoreOption,
    console,
    open_cli_store,
    plain,
)

if TYPE_CHECKING:
    from engine_builder.building.build_plan import BuildPlan  # imports PyTorch, which not every command needs

TUNING = ROOT / ".preheat" / "tuning"  # a folder for each target, see engine_builder.backends.aot_inductor.tuning

SIZES = {
    "sdxl": (
        "1024x1024", "1152x896", "896x1152", "1216x832", "832x1216", "1344x768", "768x1344", "1536x640", "640x1536",
    )
}  # fmt: skip
"""Names of --sizes -> WIDTHxHEIGHT. SDXL's: of about a million pixels in Podell et al. 2023 (arXiv 2307.01952)."""


def build(
    model: ModelArgument,
    refiner: RefinerOption = None,
    no_refiner: NoRefinerOption = False,
    vae: VaeOption = None,
    config: ConfigOption = None,
    preset: Annotated[
        str | None, typer.Option(help="Scheduler and defaults of a few-step model, such as lightning-4 or hyper-sd-8.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the model in the store; default: the folder's.")] = None,
    controlnet: Annotated[
        list[str] | None,
        typer.Option(help="NAME=PATH, repeatable: a ControlNet's folder, and the name that requests use for it."),
    ] = None,
    ip_adapter: Annotated[
        list[str] | None,
        typer.Option(help="NAME=PATH, repeatable: an IP-Adapter's .safetensors file, and the name for requests."),
    ] = None,
    image_encoder: Annotated[
        list[str] | None,
        typer.Option(
            help="The folder of the IP-Adapters' CLIP image encoder, or one for each in the same order; default: "
            "image_encoder next to the file, or in MODEL."
        ),
    ] = None,
    ip_images: Annotated[
        int, typer.Option(min=1, max=MAX_IP_IMAGES, help="The most reference images of an IP-Adapter in a request.")
    ] = 4,
    embedding_rows: Annotated[
        int,
        typer.Option(
            min=0,
            max=MAX_EMBEDDING_ROWS,
            help="Vectors of textual inversion that `preheat add-embedding` may add to the release.",
        ),
    ] = 0,
    store: StoreOption = DEFAULT_STORE,
    precision: Annotated[
        str | None,
        typer.Option(
            help="fp32, fp16, bf16, fp8 or int8; in the last two the layers of the policy, all else in fp16, after "
            "`preheat calibrate`; default: fp32 on a CPU, else fp16."
        ),
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option(
            help="fp8, int8: TOML file of the quantized layers; default: the UNet's linears but proj_in and proj_out."
        ),
    ] = None,
    report: Annotated[
        bool, typer.Option("--report", help="fp8, int8: print the error and the gain of each layer.")
    ] = False,
    vae_precision: Annotated[
        str | None,
        typer.Option(
            help="Precision of the VAE: fp32, fp16 or bf16; default: --precision, but fp32 for an fp16 model whose VAE "
            "has force_upcast."
        ),
    ] = None,
    size: Annotated[
        list[str] | None,
        typer.Option(
            help="WIDTHxHEIGHT@BATCH, e.g. 1024x1024@2, repeatable: one tuned engine each; default: the model's native "
            "size with batches 1 and 2 on a GPU, one engine for any size on a CPU."
        ),
    ] = None,
    sizes: Annotated[
        Literal["sdxl"] | None,
        typer.Option(
            help="sdxl: the nine common sizes of SDXL, 1024x1024 to 1536x640 and 640x1536, with batches 1 "
            "and 2 each, in addition to --size."
        ),
    ] = None,
    runtime: Annotated[
        str, typer.Option(help="aot_inductor, tensorrt or tensorrt-rtx (docs/tensorrt.md).")
    ] = "aot_inductor",
    gpu: Annotated[
        list[str] | None,
        typer.Option(help="TensorRT-RTX: a GPU to build for, such as a10g, repeatable; this machine needs none."),
    ] = None,
    refit: Annotated[
        str | None,
        typer.Option(
            help="Plans: for these weights (identical), for those of every model (any), or with these weights inside "
            "(none); default: identical, but none for tensorrt-rtx."
        ),
    ] = None,
    compatibility: Annotated[
        str, typer.Option(help="TensorRT: a plan for this GPU's product (none); same_compute_capability; ampere_plus.")
    ] = "none",
    workspace: Annotated[float | None, typer.Option(help="TensorRT: GiB of GPU memory that kernels may use.")] = None,
    level: Annotated[
        int, typer.Option(min=0, max=5, help="TensorRT: optimization level; higher builds take longer.")
    ] = 3,
    lora_rank: Annotated[
        int,
        typer.Option(
            min=0,
            max=128,
            help="Build a further UNet that takes LoRA adapters of up to this rank as inputs, so that images with "
            "different adapters share a batch; 0: only merging.",
        ),
    ] = 0,
    lora: Annotated[
        list[str] | None,
        typer.Option(help="Merge an adapter into the weights for good: PATH or PATH:SCALE, repeatable; needs --name."),
    ] = None,
    text_chunks: Annotated[
        int,
        typer.Option(
            help="Chunks of 75 tokens that weighted prompts may have: 1, 2 or 4. All images then attend to so many "
            "chunks. Engines without sizes (CPU) take any number."
        ),
    ] = 1,
    bands: Annotated[
        list[int] | None,
        typer.Option(
            help="Also build UNet engines that compute one of 2, 4 or 8 bands of an image, each on a GPU of its own, "
            "for deployments with the setting `bands_per_image`; repeatable."
        ),
    ] = None,
    combine: Annotated[
        str,
        typer.Option(
            help="UNets that take several features, so that images with any of them share a batch: all (one UNet with "
            "all features, if --lora-rank is one of at least two), none, or sets such as control+lora, separated by "
            "commas. Features: lora, control, image_prompt."
        ),
    ] = "all",
    safety_checker: Annotated[
        str | None,
        typer.Option(
            help="Build a safety checker, for deployments with the setting `safety`: a model folder that has one, such "
            "as Stable Diffusion 1.5's, or its folder safety_checker/."
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Engines compiled at once, each with its own copy of a network in memory, also on the GPU; default: "
            "the number of a CPU's cores, at most four; one on a GPU, where concurrent jobs disturb the timings.",
        ),
    ] = None,
    cache_dir: CacheOption = None,
) -> None:
    """Compile the networks of MODEL for this machine, check them, and store them with the weights."""
    destination = open_cli_store(store, cache_dir)
    check_no_refiner(refiner, no_refiner)
    if report and precision not in (FP8.name, INT8.name):
        raise typer.BadParameter("is an option of --precision fp8 or int8", param_hint="--report")
    all_sizes = [*(size or ()), *(f"{one}@{batch}" for one in SIZES[sizes] for batch in (1, 2))] if sizes else size
    plan = parse_plan(
        model, refiner, name, precision, vae_precision, all_sizes or (), runtime, gpu or (), refit, compatibility,
        workspace, level, with_refiner=not no_refiner, policy=policy, calibrations=destination, vae=vae, preset=preset,
        lora_rank=lora_rank, loras=lora or (), controlnets=controlnet or (), ip_adapters=ip_adapter or (),
        image_encoders=image_encoder or (), ip_images=ip_images, embedding_rows=embedding_rows,
        text_chunks=text_chunks, safety_checker=safety_checker, bands=bands or (), combine=combine, config=config,
    )  # fmt: skip
    draft = run_build(destination, plan, jobs)
    if report:
        print_gains(plan)
    console.print(f"Next: preheat publish {plain(draft.model)} --store {plain(store)}")


def run_build(store: WritableStore, plan: "BuildPlan", jobs: int | None = None) -> Manifest:
    """Build with progress on the console, print a table of the engines, and return the draft.

    Raises as `engine_builder.building.build.build` does.
    """
    from engine_builder.backends.aot_inductor.compile_jobs import default_processes
    from engine_builder.backends.aot_inductor.remaining_time import RemainingTime
    from engine_builder.building.build import build as build_model

    target = plan.target
    print_plan(plan)
    started = time.perf_counter()
    remaining = RemainingTime()
    try:
        with progress(remaining.seconds) as report:
            processes = jobs or default_processes(target)
            result = build_model(plan, store, report, TUNING / target.key, processes, remaining)
    except KeyboardInterrupt:
        console.print(
            f"The build is stopped, and nothing is published. {plain(store.url)} keeps the finished engines. The same "
            "command continues.",
            soft_wrap=True,
        )
        raise
    print_comparison(result)
    print_engines(result, target.key)
    console.print(f"Built in {time.perf_counter() - started:.0f} s: {plain(store.url)}")
    return result.draft
