"""The options that are fields of a request. Those of `preheat generate` alone are one table.

`generate` itself has a parameter for each field that is read from files or that is part of a list: see `OTHER_OPTIONS`.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import typer

from preheat.console import parse_size

Command = TypeVar("Command", bound=Callable[..., Any])

ControlImages = Annotated[
    list[str] | None, typer.Option(help="A ControlNet and its control image, NAME=FILE; repeatable.")
]
ControlScales = Annotated[list[str] | None, typer.Option(help="Strength of a ControlNet, NAME=NUMBER; repeatable.")]
ControlModes = Annotated[
    list[str] | None, typer.Option(help="Type of a Union network's control image, NAME=NUMBER; repeatable.")
]


def _height_width(text: str, option: str) -> list[int]:
    return [*reversed(parse_size(text, option))]


def _numbers(kind: type[int] | type[float]) -> Callable[[str, str], list[Any]]:
    def parse(text: str, option: str) -> list[Any]:
        try:
            return [kind(number) for number in text.split(",")]
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not a list of numbers with commas", param_hint=option) from None

    return parse


@dataclass(frozen=True)
class FieldOption:
    """A field of the request that an option sets. `parse`: from the option's value and name; None: sent as given."""

    field: str
    flag: str
    kind: type
    help: str
    parse: Callable[[str, str], Any] | None = None

    @property
    def parameter(self) -> inspect.Parameter:
        """The parameter of the command, which typer turns into the option."""
        option = typer.Option(self.flag, help=self.help, rich_help_panel="Request")
        annotation = Annotated[self.kind | None, option]  # type: ignore[name-defined]
        return inspect.Parameter(self.field, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


FIELD_OPTIONS = (
    FieldOption("negative_prompt", "--negative-prompt", str, "What to avoid."),
    FieldOption("prompt_syntax", "--prompt-syntax", str, "plain, or weighted: (word:1.3) and long prompts."),
    FieldOption("width", "--width", int, "Pixels."),
    FieldOption("height", "--height", int, "Pixels."),
    FieldOption("seed", "--seed", int, "The same seed gives the same image; -1: random."),
    FieldOption("num_inference_steps", "--steps", int, "Denoising steps."),
    FieldOption("scheduler", "--scheduler", str, "The sampler, such as 'Euler a'; a refusal lists all."),
    FieldOption("guidance_scale", "--guidance-scale", float, "Strength of the guidance; 1: without guidance."),
    FieldOption("guidance_rescale", "--guidance-rescale", float, "Share of the added contrast taken back, 0 to 1."),
    FieldOption("end_cfg_frac", "--end-cfg-frac", float, "Share of the steps that are guided, from 0 to 1."),
    FieldOption("clip_skip", "--clip-skip", int, "Layers of the text encoders to skip."),
    FieldOption("use_refiner", "--refiner/--no-refiner", bool, "Finish with the refiner."),
    FieldOption("denoising_frac", "--denoising-frac", float, "Share of the denoising before the refiner, 0 to 1."),
    FieldOption("strength", "--strength", float, "With --image: share of the steps that run, from 0 to 1."),
    FieldOption("resize", "--resize", str, "Fit the image: refuse, stretch, crop or pad."),
    FieldOption("composite", "--composite", bool, "Keep the pixels outside of the masks."),
    FieldOption("color_match", "--color-match", bool, "Match the colours around the masks."),
    FieldOption("upscale", "--upscale", int, "2: twice the width and height."),
    FieldOption("original_size", "--original-size", str, "SDXL: WIDTHxHEIGHT before scaling.", _height_width),
    FieldOption("crop", "--crop", str, "SDXL: TOP,LEFT of the part of a larger image.", _numbers(int)),
    FieldOption("target_size", "--target-size", str, "SDXL: WIDTHxHEIGHT of the image.", _height_width),
    FieldOption("timesteps", "--timesteps", str, "Descending timesteps, with commas.", _numbers(int)),
    FieldOption("sigmas", "--sigmas", str, "Descending sigmas, with commas.", _numbers(float)),
    FieldOption("quality", "--quality", int, "Quality of JPEG and WebP, 1 to 100."),
    FieldOption("metadata", "--metadata", bool, "Write into the file how the image was made."),
    FieldOption("preview_every", "--preview-every", int, "With --previews: steps between two previews."),
)

# Field of a request -> what sets it in `generate` itself. A dot leads to a field of each entry of a list.
OTHER_OPTIONS = {
    "prompt": "PROMPT",
    "num_images": "--images",
    "output_format": "--out",
    "stream": "--stream",
    "describe": "--describe",
    "image": "--image",
    "masks.image": "--mask",
    "masks.prompt": "--mask-prompt",
    "masks.negative_prompt": "--mask-negative-prompt",
    "masks.strength": "--mask-strength",
    "masks.feather": "--feather",
    "loras.name": "--lora",
    "loras.scale": "--lora",
    "controls.name": "--control",
    "controls.image": "--control",
    "controls.preprocess": "--canny",
    "controls.scale": "--control-scale",
    "controls.start": "--control-start",
    "controls.end": "--control-end",
    "controls.mode": "--control-mode",
    "ip_adapters.name": "--ip-adapter",
    "ip_adapters.images": "--ip-adapter",
    "ip_adapters.scale": "--ip-adapter-scale",
}


def with_field_options(command: Command) -> Command:
    """Give a command the options of FIELD_OPTIONS, in place of its `**fields`."""
    signature = inspect.signature(command)
    own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [option.parameter for option in FIELD_OPTIONS]
    command.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    return command


def parse_fields(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the request that were given as options. Raises typer.BadParameter."""
    fields = {}
    for option in FIELD_OPTIONS:
        if (value := values[option.field]) is not None:
            fields[option.field] = value if option.parse is None else option.parse(value, option.flag)
    return fields
