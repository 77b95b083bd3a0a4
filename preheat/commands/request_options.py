"""The options that are fields of a request. Those of `preheat generate` alone follow from its fields.

`generate` itself has a parameter for each field that is read from files or that is part of a list: see `OTHER_OPTIONS`.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_args, get_origin

import typer

from model.request_fields import GenerationRequest, value_type
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

_FLAGS = {"num_inference_steps": "--steps", "use_refiner": "--refiner/--no-refiner"}
_PARSERS = {"original_size": _height_width, "target_size": _height_width}
# Field of a request -> the help of its option, in the order of the options. Other fields follow with the first sentence
# of their description.
_HELP = {
    "negative_prompt": "What to avoid.",
    "prompt_syntax": "plain, or weighted: (word:1.3) and long prompts.",
    "width": "Pixels.",
    "height": "Pixels.",
    "seed": "The same seed gives the same image; -1: random.",
    "num_inference_steps": "Denoising steps.",
    "scheduler": "The sampler, such as 'Euler a'; a refusal lists all.",
    "guidance_scale": "Strength of the guidance; 1: without guidance.",
    "guidance_rescale": "Share of the added contrast taken back, 0 to 1.",
    "guidance_start": "Share of the steps before the first guided one.",
    "guidance_end": "Share of the steps after which none is guided.",
    "forecast": "off, quality or fast: forecast some of the steps.",
    "clip_skip": "Layers of the text encoders to skip.",
    "use_refiner": "Finish with the refiner.",
    "denoising_frac": "Share of the denoising before the refiner, 0 to 1.",
    "strength": "With --image: share of the steps that run, from 0 to 1.",
    "resize": "Fit the image: refuse, stretch, crop or pad.",
    "composite": "Keep the pixels outside of the masks.",
    "color_match": "Match the colours around the masks.",
    "upscale": "2: twice the width and height.",
    "original_size": "SDXL: WIDTHxHEIGHT before scaling.",
    "crop": "SDXL: TOP,LEFT of the part of a larger image.",
    "target_size": "SDXL: WIDTHxHEIGHT of the image.",
    "timesteps": "Descending timesteps, with commas.",
    "sigmas": "Descending sigmas, with commas.",
    "quality": "Quality of JPEG and WebP, 1 to 100.",
    "metadata": "Write into the file how the image was made.",
    "preview_every": "With --previews: steps between two previews.",
}


def _field_option(name: str) -> FieldOption:
    field = GenerationRequest.model_fields[name]
    flag, summary = _FLAGS.get(name, f"--{name.replace('_', '-')}"), str(field.description).partition(". ")[0]
    kind, parse = value_type(field.annotation), None
    if get_origin(kind) is list:
        kind, parse = str, _PARSERS.get(name, _numbers(value_type(*get_args(kind))))
    return FieldOption(name, flag, kind, _HELP.get(name, f"{summary.rstrip('.')}."), parse)


_OTHERS = {name.partition(".")[0] for name in OTHER_OPTIONS}
_NAMES = [*_HELP, *(name for name in GenerationRequest.model_fields if name not in _HELP.keys() | _OTHERS)]
FIELD_OPTIONS = tuple(_field_option(name) for name in _NAMES)


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
