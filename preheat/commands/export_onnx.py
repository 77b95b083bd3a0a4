"""The command `preheat export-onnx`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from engine_builder.backends.onnx.opsets import OLD_OPSET, OPSET, OPSETS
from engine_builder.files import check_folder
from model.store.precision import FP8, FP32
from preheat.commands.build_arguments import parse_precision, plan_quantization
from preheat.commands.build_report import progress
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
)


def export_onnx(
    model: ModelArgument,
    refiner: RefinerOption = None,
    no_refiner: NoRefinerOption = False,
    vae: VaeOption = None,
    config: ConfigOption = None,
    store: StoreOption = DEFAULT_STORE,
    precision: Annotated[
        str,
        typer.Option(
            help="fp32, fp16, or fp8: the layers of the policy between nodes that quantize, all else in fp16, after "
            "`preheat calibrate`."
        ),
    ] = "fp16",
    policy: Annotated[
        Path | None, typer.Option(help="fp8: TOML file of the quantized layers; default: those of `preheat build`.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Also write each COMPONENT.onnx and the weights to this folder.")
    ] = None,
    opset: Annotated[int, typer.Option(help=f"ONNX opset: {OPSET}, or {OLD_OPSET} for TensorRT 8.6.")] = OPSET,
    cache_dir: CacheOption = None,
) -> None:
    """Export the networks of MODEL to ONNX, check them in ONNX Runtime, and store graphs and weights."""
    check_no_refiner(refiner, no_refiner)
    chosen = parse_precision(precision, "onnx", "--precision")
    if opset not in OPSETS:
        raise typer.BadParameter(f"{opset} is not supported; choose {OPSET} or {OLD_OPSET}", param_hint="--opset")
    if chosen == FP8 and opset != OPSET:
        raise typer.BadParameter(f"{opset} has no FP8; choose {OPSET}", param_hint="--opset")
    if out is not None:
        check_folder(out)
    if policy is not None and chosen != FP8:
        raise typer.BadParameter("is an option of --precision fp8", param_hint="--policy")
    with activity("Loading PyTorch and the model libraries"):
        from engine_builder.backends.onnx.graph_store import export_model, write_folder

    opened_store = open_cli_store(store, cache_dir)
    checkpoints = find_parts(model, refiner, no_refiner, vae, config)
    quantization = plan_quantization(*checkpoints, policy, opened_store, chosen) if chosen == FP8 else None
    with progress() as report:
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
