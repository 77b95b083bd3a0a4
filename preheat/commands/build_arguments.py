"""The arguments of commands that build a model, parsed into a plan. Errors name the option."""

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from engine_builder.stores.store import WritableStore
from model.engines.signatures import TEXT_CHUNK_COUNTS
from model.engines.tensorrt.libraries import LIBRARIES
from model.store.precision import BF16, FP8, FP16, FP32, INT8, Precision
from model.validation import BAND_COUNTS
from preheat.console import activity, notify, parse_bucket, print_warning

if TYPE_CHECKING:
    from engine_builder.building.build_plan import BuildPlan  # imports PyTorch, which not every command needs
    from engine_builder.checkpoints.folder import Checkpoint
    from engine_builder.quantization.quantization_plan import Quantization

_RUNTIMES = ("aot_inductor", *LIBRARIES)
_PRECISIONS = {"aot_inductor": (FP32, FP16, BF16, FP8, INT8), "onnx": (FP32, FP16, FP8)} | dict.fromkeys(
    LIBRARIES, (FP32, FP16)
)


def parse_plan(
    model: str, refiner: str | None = None, name: str | None = None, precision: str | None = None,
    vae_precision: str | None = None, sizes: Sequence[str] = (), runtime: str = "aot_inductor",
    gpus: Sequence[str] = (), refit: str | None = None, compatibility: str = "none", workspace: float | None = None,
    level: int = 3, with_refiner: bool = True, policy: Path | None = None, calibrations: WritableStore | None = None,
    vae: str | None = None, preset: str | None = None, lora_rank: int = 0,
    loras: Sequence[str] = (), controlnets: Sequence[str] = (), ip_adapters: Sequence[str] = (),
    image_encoders: Sequence[str] = (), ip_images: int = 4, embedding_rows: int = 0, text_chunks: int = 1,
    safety_checker: str | None = None, bands: Sequence[int] = (), combine: str = "all", config: str | None = None,
) -> "BuildPlan":  # fmt: skip
    """Parse the arguments of `preheat build`; None and empty select the defaults.

    `controlnets`, `ip_adapters`: NAME=PATH of each. `image_encoders`: folders, see `parse_ip_adapters`. `combine`: all,
    none, or sets of features such as "control+lora,image_prompt+lora".
    `config`: a folder with the configs of a single file. `with_refiner` False leaves out the model's own refiner.
    `calibrations`: the store that has them, for 8 bits.
    Downloads the model if it is a Hub id, and converts it if it is a single file. Raises typer.BadParameter for an
    invalid argument, CheckpointError, and for 8 bits Fp8Unsupported, Int8Unsupported, CalibrationError and BadPolicy.
    Raises CombinationRefused for `combine`.
    """
    if runtime not in _RUNTIMES:
        raise typer.BadParameter(f"{runtime!r} is not one of {', '.join(_RUNTIMES)}", param_hint="--runtime")
    with activity("Loading PyTorch and the model libraries"):
        from engine_builder.adapters.offline import parse_adapters, read_merge
        from engine_builder.backends.aot_inductor.compile import build_target
        from engine_builder.backends.tensorrt.plan_options import parse_options, plan_targets
        from engine_builder.building.build_plan import BuildPlan, Size, default_sizes
        from engine_builder.checkpoints.controlnet import parse_controlnet
        from engine_builder.checkpoints.find import find_checkpoints
        from engine_builder.checkpoints.ip_adapter import parse_ip_adapters
        from engine_builder.checkpoints.safety_checker import find_safety_checker
        from engine_builder.checkpoints.single_file import CACHE
        from engine_builder.networks.network_check import check_configs

    without_plans = {
        "--controlnet": controlnets,
        "--ip-adapter": ip_adapters,
        "--embedding-rows": embedding_rows,
        "--bands": bands,
    }
    for option, values in without_plans.items():
        if values and runtime in LIBRARIES:
            raise typer.BadParameter("is not supported for plans; build for aot_inductor", param_hint=option)
    if image_encoders and not ip_adapters:
        raise typer.BadParameter("needs --ip-adapter", param_hint="--image-encoder")
    machine = build_target()
    device = "cuda" if runtime in LIBRARIES else machine.device
    options = None
    if runtime in LIBRARIES:
        options = parse_options(LIBRARIES[runtime], refit, compatibility, workspace, level)
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
    default_precision = FP16 if device == "cuda" else FP32
    unet_precision = parse_precision(precision, runtime, "--precision") if precision is not None else default_precision
    decoder = parse_precision(vae_precision, runtime, "--vae-precision") if vae_precision is not None else None
    if decoder is not None and decoder.is_quantized:
        raise typer.BadParameter(f"{decoder} is not supported for the VAE", param_hint="--vae-precision")
    if unet_precision.is_quantized and device == "cpu":
        raise typer.BadParameter(
            f"{unet_precision} needs an NVIDIA GPU, and this machine has none", param_hint="--precision"
        )
    if policy is not None and not unet_precision.is_quantized:
        raise typer.BadParameter("is an option of --precision fp8 or int8", param_hint="--policy")
    explicit_sizes = tuple(dict.fromkeys(Size(*parse_bucket(text)) for text in sizes))
    if text_chunks != 1 and not explicit_sizes and device != "cuda":
        raise typer.BadParameter(
            "needs --size; engines for any size take any number of chunks", param_hint="--text-chunks"
        )
    # All arguments are checked. Only now are a library and the model needed.
    target, *more_targets = plan_targets(machine, gpus, options) if options is not None else (machine,)
    base, found_refiner = find_checkpoints(model, refiner, vae, preset, config, CACHE, notify)
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
    check_configs(base, refiner_checkpoint)
    quantization = None
    if unet_precision.is_quantized:
        from engine_builder.quantization.picture_check import check_target

        assert calibrations is not None
        check_target(target, unet_precision)
        quantization = plan_quantization(base, refiner_checkpoint, policy, calibrations, unet_precision)
        if bands and quantization.policy.convolutions:
            raise typer.BadParameter("is not supported with convolutions in FP8", param_hint="--bands")
    merge = read_merge(base, adapters) if adapters else None
    for warning in merge.warnings if merge else ():
        print_warning(warning)
    plan = BuildPlan(
        model=name or default_name(model),
        base=base,
        refiner=refiner_checkpoint,
        target=target,
        precision=unet_precision,
        sizes=explicit_sizes or default_sizes(base, target),
        tensorrt=options,
        vae_precision=decoder,
        more_targets=tuple(more_targets),
        quantization=quantization,
        lora_rank=lora_rank,
        text_chunks=text_chunks,
        bands=tuple(sorted(set(bands))),
        merge=merge,
        combine=_parse_combine(combine),
    )
    plan.check_combinations()
    if plan.quantizes_vae and plan.unquantized_vae_precision != FP16:
        raise typer.BadParameter(
            f"has vae_convolutions, which need a VAE in fp16; this one would be {plan.unquantized_vae_precision} "
            "(give a VAE made for fp16 with --vae)",
            param_hint="--policy",
        )
    return plan


def default_name(model: str) -> str:
    """Return the name in the store of a model folder, a single file or a Hub id."""
    name = Path(model).resolve().name if os.path.isdir(model) else model.rpartition("/")[2]
    if not name.endswith(".safetensors"):
        return name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name.removesuffix(".safetensors")).strip("-._")[:128] or "model"


def plan_quantization(
    base: "Checkpoint", refiner: "Checkpoint | None", policy: Path | None, store: WritableStore, precision: Precision
) -> "Quantization":
    """Return how the networks are quantized. Raises CalibrationError and BadPolicy."""
    from engine_builder.quantization.policy import DEFAULTS, Policy
    from engine_builder.quantization.quantization_plan import plan_quantization

    chosen = Policy.read(policy) if policy else DEFAULTS[precision]
    return plan_quantization(base, refiner, chosen, store, precision=precision)


def _parse_combine(text: str) -> tuple[frozenset[str], ...] | None:
    """Return `BuildPlan.combine`."""
    if text in ("all", "none"):
        return None if text == "all" else ()
    return tuple(frozenset(names.split("+")) for names in text.split(","))


def parse_precision(text: str, backend: str, option: str) -> Precision:
    allowed = _PRECISIONS[backend]
    for precision in allowed:
        if precision.name == text:
            return precision
    names = ", ".join(precision.name for precision in allowed)
    raise typer.BadParameter(f"{text!r} is not supported for {backend}; choose one of {names}", param_hint=option)
