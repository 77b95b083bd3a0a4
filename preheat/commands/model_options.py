"""The options that name a model to build, calibrate, check or export."""

from typing import TYPE_CHECKING, Annotated

import typer

from preheat.console import notify

if TYPE_CHECKING:
    from engine_builder.checkpoints.folder import Checkpoint  # imports PyTorch, which not every command needs

ModelArgument = Annotated[
    str, typer.Argument(help="Folder in diffusers' layout, single .safetensors file, or a Hub id.", show_default=False)
]
RefinerOption = Annotated[str | None, typer.Option(help="The refiner; default: MODEL/refiner if it exists.")]
NoRefinerOption = Annotated[bool, typer.Option("--no-refiner", help="Leave out MODEL/refiner.")]
VaeOption = Annotated[
    str | None,
    typer.Option(help="A VAE in place of the model's own: its folder or file, a model's folder, or a Hub id."),
]
ConfigOption = Annotated[
    str | None,
    typer.Option(
        help="Single file: a model folder whose configs describe it, and whose networks replace missing ones; "
        "default: the configs of the file's family."
    ),
]


def check_no_refiner(refiner: str | None, no_refiner: bool) -> None:
    """Raise typer.BadParameter if --no-refiner contradicts --refiner."""
    if refiner and no_refiner:
        raise typer.BadParameter("contradicts --refiner", param_hint="--no-refiner")


def find_parts(
    model: str, refiner: str | None, no_refiner: bool, vae: str | None, config: str | None
) -> tuple["Checkpoint", "Checkpoint | None"]:
    """Return the checkpoints of the base and the refiner. Raises CheckpointError."""
    from engine_builder.checkpoints.find import find_checkpoints

    base, found = find_checkpoints(model, refiner, vae, config=config, report=notify)
    return base, None if no_refiner else found
