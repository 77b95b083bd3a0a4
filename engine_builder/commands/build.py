"""The commands that compile: `preheat build` and `preheat export-onnx`."""

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from engine_builder.backends.onnx.opsets import OLD_OPSET, OPSET, OPSETS
from engine_builder.commands.console import (
    DEFAULT_STORE,
    ROOT,
    CacheOption,
    StoreOption,
    console,
    open_cli_store,
    parse_bucket,
    plain,
    steps_bar,
)
from engine_builder.stores.store import WritableStore
from model.engines.signatures import TEXT_CHUNK_COUNTS
from model.engines.tensorrt.libraries import LIBRARIES
from model.loading.target import Target
from model.pipeline.spec import UNET, UNET_CONTROLLED, UNET_IP, VAE_DECODER, VAE_ENCODER
from model.store.manifest import Bucket, Manifest
from model.store.precision import BF16, FP8, FP16, FP32, INT8, Precision
from model.validation import BAND_COUNTS, MAX_EMBEDDING_ROWS, MAX_IP_IMAGES

if TYPE_CHECKING:
    from engine_builder.backends.built import ReportProgress
    from engine_builder.building.build_plan import BuildPlan  # imports PyTorch, which not every command needs
    from engine_builder.checkpoints.folder import Checkpoint
    from engine_builder.quantization.plan import Quantization

TUNING = ROOT / ".preheat" / "tuning"  # a folder for each target, see engine_builder.backends.aot_inductor.tuning
_RUNTIMES = ("aot_inductor", *LIBRARIES)
_PRECISIONS = {"aot_inductor": (FP32, FP16, BF16, FP8, INT8), "onnx": (FP32, FP16, FP8)} | dict.fromkeys(
    LIBRARIES, (FP32, FP16)
)


def build(
    model: Annotated[str, typer.Argument(help="Folder in diffusers' layout, or a Hub id.")],
    refiner: Annotated[str | None, typer.Option(help="The refiner; default: MODEL/refiner if it exists.")] = None,
    no_refiner: Annotated[bool, typer.Option("--no-refiner", help="Leave out MODEL/refiner.")] = False,
    vae: Annotated[
        str | None, typer.Option(help="A VAE in place of the model's own: its folder, a model's folder, or a Hub id.")
    ] = None,
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
            help="fp32, fp16, bf16, fp8 or int8; in the last two only the UNet's linears, all else in fp16, after "
            "`preheat calibrate`; default: fp32 on a CPU, else fp16."
        ),
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option(help="fp8, int8: TOML file of the layers that stay in fp16; default: proj_in and proj_out."),
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
    if refiner and no_refiner:
        raise typer.BadParameter("contradicts --refiner", param_hint="--no-refiner")
    plan = parse_plan(
        model, refiner, name, precision, vae_precision, size or (), runtime, gpu or (), refit, compatibility,
        workspace, level, with_refiner=not no_refiner, policy=policy, calibrations=destination, vae=vae, preset=preset,
        lora_rank=lora_rank, loras=lora or (), controlnets=controlnet or (), ip_adapters=ip_adapter or (),
        image_encoders=image_encoder or (), ip_images=ip_images, embedding_rows=embedding_rows,
        text_chunks=text_chunks, safety_checker=safety_checker, bands=bands or (),
    )  # fmt: skip
    if report and plan.quantization is None:
        raise typer.BadParameter("is an option of --precision fp8 or int8", param_hint="--report")
    draft = run_build(destination, plan, jobs)
    if report:
        _print_gains(plan)
    console.print(f"Next: preheat publish {plain(draft.model)} --store {plain(store)}")


def run_build(store: WritableStore, plan: "BuildPlan", jobs: int | None = None) -> Manifest:
    """Build with progress on the console, print a table of the engines, and return the draft.

    Raises as `engine_builder.building.build.build` does.
    """
    from engine_builder.backends.aot_inductor.compile_jobs import default_processes
    from engine_builder.backends.aot_inductor.remaining_time import RemainingTime
    from engine_builder.building.build import build as build_model

    target = plan.target
    console.print(
        f"Building [bold]{plain(plan.model)}[/] for {', '.join(target.key for target in plan.targets)} in "
        f"{plan.precision}{_vae_remark(plan)}{_sizes_remark(plan)}{_source_remark(plan)}"
    )
    if replaced := plan.replaced_sampler:
        console.print(
            f"Its scheduler, {replaced[0]}, is not served, because it reads several previous steps. Requests without "
            f"`scheduler` use {replaced[1]}; set another one in defaults.json."
        )
    console.print(_image_remark(plan))
    if plan.base.controlnets:
        console.print(_control_remark(plan))
    if plan.base.ip_adapters:
        console.print(_ip_adapter_remark(plan))
    started = time.perf_counter()
    remaining = RemainingTime()
    with _progress(remaining.seconds) as report:
        processes = jobs or default_processes(target)
        result = build_model(plan, store, report, TUNING / target.key, processes, remaining)
    table = Table("component", "bucket", "precision", "KiB", "compiled", "relative\nerror", box=SIMPLE_HEAD)
    for engine in result.draft.engines:
        if engine.target != target.key:  # the same plans serve it
            continue
        compiled = f"{engine.build_seconds:.0f} s" if engine.component in result.compiled else "reused"
        table.add_row(
            engine.component, bucket_label(engine.bucket), engine.precision.name, f"{engine.blob.bytes // 1024:,}",
            compiled, f"{engine.accuracy.relative:.1e}" if engine.accuracy else "not run",
        )  # fmt: skip
    console.print(table)
    console.print(f"Built in {time.perf_counter() - started:.0f} s: {plain(store.url)}")
    return result.draft


def parse_plan(
    model: str, refiner: str | None = None, name: str | None = None, precision: str | None = None,
    vae_precision: str | None = None, sizes: Sequence[str] = (), runtime: str = "aot_inductor",
    gpus: Sequence[str] = (), refit: str | None = None, compatibility: str = "none", workspace: float | None = None,
    level: int = 3, with_refiner: bool = True, policy: Path | None = None, calibrations: WritableStore | None = None,
    vae: str | None = None, preset: str | None = None, lora_rank: int = 0,
    loras: Sequence[str] = (), controlnets: Sequence[str] = (), ip_adapters: Sequence[str] = (),
    image_encoders: Sequence[str] = (), ip_images: int = 4, embedding_rows: int = 0, text_chunks: int = 1,
    safety_checker: str | None = None, bands: Sequence[int] = (),
) -> "BuildPlan":  # fmt: skip
    """Parse the arguments of `preheat build`; None and empty select the defaults.

    `controlnets`, `ip_adapters`: NAME=PATH of each. `image_encoders`: folders, see `parse_ip_adapters`.
    `with_refiner` False leaves out the model's own refiner. `calibrations`: the store that has them, for 8 bits.
    Downloads the model if it is a Hub id. Raises typer.BadParameter for an invalid argument, CheckpointError, and for 8
    bits Fp8Unsupported, Int8Unsupported, CalibrationError and BadPolicy.
    """
    if runtime not in _RUNTIMES:
        raise typer.BadParameter(f"{runtime!r} is not one of {', '.join(_RUNTIMES)}", param_hint="--runtime")
    with console.status("Loading PyTorch and the model libraries"):
        from engine_builder.adapters.offline import parse_adapters, read_merge
        from engine_builder.backends.aot_inductor.compile import build_target
        from engine_builder.backends.tensorrt.options import parse_options, plan_targets
        from engine_builder.building.build_plan import BuildPlan, Size, default_sizes
        from engine_builder.checkpoints.controlnet import parse_controlnet
        from engine_builder.checkpoints.find import find_checkpoints
        from engine_builder.checkpoints.ip_adapter import parse_ip_adapters
        from engine_builder.checkpoints.safety_checker import find_safety_checker

    for option, values in (("--controlnet", controlnets), ("--ip-adapter", ip_adapters)):
        if values and runtime in LIBRARIES:
            raise typer.BadParameter("is not supported for plans; build for aot_inductor", param_hint=option)
    if embedding_rows and runtime in LIBRARIES:
        raise typer.BadParameter("is not supported for plans; build for aot_inductor", param_hint="--embedding-rows")
    if bands and runtime in LIBRARIES:
        raise typer.BadParameter("is not supported for plans; build for aot_inductor", param_hint="--bands")
    if image_encoders and not ip_adapters:
        raise typer.BadParameter("needs --ip-adapter", param_hint="--image-encoder")
    options = None
    targets: tuple[Target, ...] = (build_target(),)
    if runtime in LIBRARIES:
        options = parse_options(LIBRARIES[runtime], refit, compatibility, workspace, level)
        targets = plan_targets(targets[0], gpus, options)
    elif gpus:
        raise typer.BadParameter("is an option of --runtime tensorrt-rtx", param_hint="--gpu")
    if loras and name is None:
        raise typer.BadParameter("needs --name, because the merged model is another one", param_hint="--lora")
    if loras and precision in (FP8.name, INT8.name):
        raise typer.BadParameter(
            f"is not supported with --precision {precision}: calibrations are of other weights", param_hint="--lora"
        )
    try:
        adapters = parse_adapters(loras)
    except ValueError as error:
        raise typer.BadParameter(f"is not PATH:SCALE ({error})", param_hint="--lora") from error
    if lora_rank and runtime != "aot_inductor":
        raise typer.BadParameter("is an option of --runtime aot_inductor", param_hint="--lora-rank")
    if text_chunks not in TEXT_CHUNK_COUNTS:
        raise typer.BadParameter(
            f"{text_chunks} is not one of {', '.join(map(str, TEXT_CHUNK_COUNTS))}", param_hint="--text-chunks"
        )
    if unknown := sorted(set(bands) - set(BAND_COUNTS)):
        raise typer.BadParameter(f"{unknown[0]} is not one of {', '.join(map(str, BAND_COUNTS))}", param_hint="--bands")
    if safety_checker is not None and runtime != "aot_inductor":
        raise typer.BadParameter("is an option of --runtime aot_inductor", param_hint="--safety-checker")
    target = targets[0]
    default_precision = FP16 if target.device == "cuda" else FP32
    unet_precision = _parse_precision(precision, runtime, "--precision") if precision is not None else default_precision
    decoder = _parse_precision(vae_precision, runtime, "--vae-precision") if vae_precision is not None else None
    if decoder is not None and decoder.is_quantized:
        raise typer.BadParameter(f"{decoder} is not supported for the VAE", param_hint="--vae-precision")
    if unet_precision.is_quantized and target.device == "cpu":
        raise typer.BadParameter(
            f"{unet_precision} needs an NVIDIA GPU, and this machine has none", param_hint="--precision"
        )
    if policy is not None and not unet_precision.is_quantized:
        raise typer.BadParameter("is an option of --precision fp8 or int8", param_hint="--policy")
    explicit_sizes = tuple(dict.fromkeys(Size(*parse_bucket(text)) for text in sizes))
    if text_chunks != 1 and not explicit_sizes and target.device != "cuda":
        raise typer.BadParameter(
            "needs --size; engines for any size take any number of chunks", param_hint="--text-chunks"
        )
    base, found_refiner = find_checkpoints(model, refiner, vae, preset)
    base = replace(
        base,
        controlnets=tuple(map(parse_controlnet, controlnets)),
        ip_adapters=parse_ip_adapters(ip_adapters, image_encoders, base),
        ip_images=ip_images,
        embedding_rows=embedding_rows,
        safety_checker=find_safety_checker(safety_checker) if safety_checker is not None else None,
    )
    refiner_checkpoint = replace(found_refiner, embedding_rows=embedding_rows) if found_refiner else None
    refiner_checkpoint = refiner_checkpoint if with_refiner else None
    quantization = None
    if unet_precision.is_quantized:
        from engine_builder.quantization.check import check_target

        assert calibrations is not None
        check_target(target, unet_precision)
        quantization = _plan_quantization(base, refiner_checkpoint, policy, calibrations, unet_precision)
        if bands and quantization.policy.convolutions:
            raise typer.BadParameter("is not supported with convolutions in FP8", param_hint="--bands")
    return BuildPlan(
        model=name or (base.root.resolve().name if Path(model).is_dir() else model.rpartition("/")[2]),
        base=base,
        refiner=refiner_checkpoint,
        target=target,
        precision=unet_precision,
        sizes=explicit_sizes or default_sizes(base, target),
        tensorrt=options,
        vae_precision=decoder,
        more_targets=targets[1:],
        quantization=quantization,
        lora_rank=lora_rank,
        text_chunks=text_chunks,
        bands=tuple(sorted(set(bands))),
        merge=read_merge(base, adapters) if adapters else None,
    )


def _plan_quantization(
    base: "Checkpoint", refiner: "Checkpoint | None", policy: Path | None, store: WritableStore, precision: Precision
) -> "Quantization":
    """Return how the UNets are quantized. Raises CalibrationError and BadPolicy."""
    from engine_builder.quantization.plan import plan_quantization
    from engine_builder.quantization.policy import DEFAULTS, Policy

    chosen = Policy.read(policy) if policy else DEFAULTS[precision]
    return plan_quantization(base, refiner, chosen, store, precision=precision)


def _print_gains(plan: "BuildPlan") -> None:
    """Print the error and the gain of each layer of the base's UNet, at the plan's first size."""
    from engine_builder.backends.aot_inductor.compile import example_inputs
    from engine_builder.networks.network import load_network
    from engine_builder.quantization.layer_report import gains_table, measure_gains

    assert plan.quantization is not None
    network = load_network(plan.base, UNET, FP16, plan.network_device)
    inputs = example_inputs(network.signature, *plan.sizes[0], plan.network_device)
    console.print(gains_table(UNET, measure_gains(network, plan.quantization, inputs)))


def _parse_precision(text: str, backend: str, option: str) -> Precision:
    allowed = _PRECISIONS[backend]
    for precision in allowed:
        if precision.name == text:
            return precision
    names = ", ".join(precision.name for precision in allowed)
    raise typer.BadParameter(f"{text!r} is not supported for {backend}; choose one of {names}", param_hint=option)


def bucket_label(bucket: Bucket) -> str:
    """Return "1024x1024@2"; "any@1-16" for an engine of any size; "@2" for an engine without a size."""
    batch, height, width = bucket.batch, bucket.height, bucket.width
    size = ""
    if height and width:
        size = f"{width.max}x{height.max}" if height.min == height.max and width.min == width.max else "any"
    return f"{size}@{batch.max}" if batch.min == batch.max else f"{size}@{batch.min}-{batch.max}"


def _vae_remark(plan: "BuildPlan") -> str:
    """Describe the VAE's precision if it differs from the model's or contradicts the VAE's config."""
    precision = plan.precision_of(VAE_DECODER)
    if precision == FP16 and plan.upcasts_vae:
        return (
            ", also its VAE, although its config says that it overflows in fp16 (force_upcast): images may hold NaN, "
            "and their requests fail"
        )
    if precision == plan.precision.unquantized:
        return ""
    return f", its VAE in {precision}" + ("" if plan.vae_precision else " (force_upcast: it would overflow in fp16)")


def _source_remark(plan: "BuildPlan") -> str:
    """Name what replaces files of the model's folder."""
    base = plan.base
    return (f"; VAE: {plain(str(base.vae))}" if base.vae else "") + (
        f"; preset {base.preset.name}" if base.preset else ""
    )


def _image_remark(plan: "BuildPlan") -> str:
    """Describe what the build adds for requests with an image."""
    sizes = len({(size.height, size.width) for size in plan.sizes}) or 1
    engines = f"{sizes} engine{'s' if sizes > 1 else ''} of {VAE_ENCODER}, for requests with an image"
    if plan.base.widths().extra_channels:
        return f"Includes {engines}. The UNet is for inpainting: every request needs an image and masks"
    return f"Includes {engines}"


def _control_remark(plan: "BuildPlan") -> str:
    """Describe what the build adds for ControlNets."""
    names, count = ", ".join(name for name, _ in plan.base.controlnets), len(plan.sizes) or 1
    return (
        f"Includes {count} engine{'s' if count > 1 else ''} of {UNET_CONTROLLED}, and as many of each ControlNet "
        f"({names}). ControlNets of one architecture share theirs"
    )


def _ip_adapter_remark(plan: "BuildPlan") -> str:
    """Describe what the build adds for IP-Adapters."""
    names, count = ", ".join(files.name for files in plan.base.ip_adapters), len(plan.sizes) or 1
    images = plan.base.ip_images
    return (
        f"Includes {count} engine{'s' if count > 1 else ''} of {UNET_IP}, and two of each IP-Adapter ({names}), for up "
        f"to {images} reference image{'s' if images > 1 else ''} of each in a request"
    )


def _sizes_remark(plan: "BuildPlan") -> str:
    sizes = ", ".join(f"{width}x{height}@{batch}" for batch, height, width in plan.sizes)
    return f"; sizes @ batch: {sizes}" if sizes else ""


def export_onnx(
    model: Annotated[str, typer.Argument(help="Folder in diffusers' layout, or a Hub id.")],
    refiner: Annotated[str | None, typer.Option(help="The refiner; default: MODEL/refiner if it exists.")] = None,
    store: StoreOption = DEFAULT_STORE,
    precision: Annotated[
        str,
        typer.Option(
            help="fp32, fp16, or fp8: the UNet's linears between nodes that quantize, all else in fp16, after "
            "`preheat calibrate`."
        ),
    ] = "fp16",
    policy: Annotated[
        Path | None, typer.Option(help="fp8: TOML file of the layers that stay in fp16; default: proj_in and proj_out.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Also write each COMPONENT.onnx and the weights to this folder.")
    ] = None,
    opset: Annotated[int, typer.Option(help=f"ONNX opset: {OPSET}, or {OLD_OPSET} for TensorRT 8.6.")] = OPSET,
    cache_dir: CacheOption = None,
) -> None:
    """Export the networks of MODEL to ONNX, check them in ONNX Runtime, and store graphs and weights."""
    with console.status("Loading PyTorch and the model libraries"):
        from engine_builder.backends.onnx.graph_store import export_model, write_folder
        from engine_builder.checkpoints.find import find_checkpoints

    chosen = _parse_precision(precision, "onnx", "--precision")
    if opset not in OPSETS:
        raise typer.BadParameter(f"{opset} is not supported; choose {OPSET} or {OLD_OPSET}", param_hint="--opset")
    if chosen == FP8 and opset != OPSET:
        raise typer.BadParameter(f"{opset} has no FP8; choose {OPSET}", param_hint="--opset")
    if policy is not None and chosen != FP8:
        raise typer.BadParameter("is an option of --precision fp8", param_hint="--policy")
    opened_store = open_cli_store(store, cache_dir)
    checkpoints = find_checkpoints(model, refiner)
    quantization = _plan_quantization(*checkpoints, policy, opened_store, chosen) if chosen == FP8 else None
    with _progress() as report:
        exported = export_model(*checkpoints, chosen, opened_store, report, opset, quantization)
    table = Table("component", "graph", "KiB", "exported in", "weights MiB", "error against eager PyTorch")
    kind = "absolute" if chosen == FP32 else "relative"
    for graph in exported:
        table.add_row(
            graph.component, "exported" if graph.is_new else "reused", f"{graph.built.graph.bytes / 1024:,.0f}",
            f"{graph.built.export_seconds:.0f} s", f"{sum(blob.bytes for blob in graph.weights.blobs) / 2**20:,.1f}",
            f"{graph.error:.1e} ({kind})",
        )  # fmt: skip
    console.print(table)
    if out is not None:
        for path in write_folder(opened_store, exported, out):
            console.print(plain(path))


@contextmanager
def _progress(remaining: Callable[[], float] = lambda: 0.0) -> Iterator["ReportProgress"]:
    """Show a progress bar on a terminal, and one line per activity elsewhere.

    `remaining` returns the estimated seconds until all engines are compiled; zero if unknown.
    """
    if not console.is_terminal:
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
