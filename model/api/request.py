"""The public request, the settings it resolves to, and the response.

Promises that a request is validated before it costs anything, and that every refusal names the field, the
value and what would be accepted. Knows nothing of engines: what is served comes in as a `ServedModel`.
"""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypedDict, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from model.denoising.noise_schedule import MAX_STEPS
from model.denoising.samplers import (
    MAX_STEPS_LCM,
    SAMPLERS,
    sampler_name,
)
from model.errors import ManifestError, RequestRefused

MAX_IMAGES = 8  # of one request
_SEEDS = 2**32
_REPORTED = 20  # problems in one answer; a body of a thousand unknown fields gets no thousand lines
_SHOWN = 60  # characters of a refused value, or of an unknown field's name, that an answer repeats


def _no_nul(text: str) -> str:
    if (at := text.find("\0")) >= 0:
        raise PydanticCustomError(
            "nul_character", f"character {at + 1} is NUL (U+0000), which no text needs: remove it"
        )
    return text


def _not_blank(text: str) -> str:
    if not text.strip():
        raise PydanticCustomError("blank", f"got {_shown(text)}, nothing but whitespace: say what the picture shows")
    return text


ImageFormat = Literal["png", "jpeg", "webp"]
Text = Annotated[str, Field(max_length=4000), AfterValidator(_no_nul)]
SMALLEST_SIDE, LARGEST_SIDE = 64, 4096  # pixels
Side = Annotated[int, Field(ge=SMALLEST_SIDE, le=LARGEST_SIDE)]
Steps = Annotated[int, Field(ge=1, le=MAX_STEPS)]
Guidance = Annotated[float, Field(ge=0, le=30)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=0, le=_SEEDS - 1)]
SamplerName = Annotated[str, Field(min_length=1, max_length=64)]


class _StrictModel(BaseModel):
    """Types as JSON has them: no "30" for 30, no 1 for true, no NaN; 7 will do for 7.0. No unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="wrap")
    @classmethod
    def _explain(cls, data: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """One form for all problems: the value that came and what is accepted, which pydantic leaves out."""
        try:
            return validate(data)
        except ValidationError as error:
            fields = cls.model_json_schema()["properties"]
            problems = [
                InitErrorDetails(
                    type=PydanticCustomError(problem["type"], _explanation(problem, fields)),
                    loc=(_printable(_shortened(str(problem["loc"][0]))) if problem["loc"] else "request",),
                    input=problem["input"],
                )
                for problem in error.errors(include_url=False)[:_REPORTED]
            ]
            raise ValidationError.from_exception_data(cls.__name__, problems) from None


class GenerationRequest(_StrictModel):
    """What to draw. Only `prompt` is required; what is left out takes the default of the served release."""

    prompt: Annotated[Text, Field(min_length=1), AfterValidator(_not_blank)] = Field(
        description="What the picture shows: 1 to 4000 characters, not only whitespace. The text encoders "
        "read 77 tokens, some 60 words; a longer prompt is cut, and the response warns of it.",
        examples=["an astronaut in a jungle, cold color palette, muted colors, detailed, 8k"],
    )
    negative_prompt: Text | None = Field(
        None,
        description="What the picture should not show: up to 4000 characters. No effect without guidance.",
    )
    width: Side | None = Field(
        None,
        description="Width in pixels. Width and height together must be a size this deployment serves; "
        "a refusal says which those are. Default: the release's native width, commonly 1024.",
    )
    height: Side | None = Field(
        None,
        description="Height in pixels; see `width`. Default: the release's native height, commonly 1024.",
    )
    num_inference_steps: Steps | None = Field(
        None,
        description=f"Denoising steps: 1 to {MAX_STEPS}, and at most {MAX_STEPS_LCM} with LCM. "
        "Default: the release's, commonly 30.",
    )
    guidance_scale: Guidance | None = Field(
        None,
        description="How closely to follow the prompt: 0 to 30. At most 1 means no guidance, "
        "and half the work. Default: the release's, commonly 7.5.",
    )
    end_cfg_frac: Fraction | None = Field(
        None,
        description="Share of the steps, counted from the first, that are guided: 0 to 1. "
        "Default: the release's, commonly 1.",
    )
    scheduler: SamplerName | None = Field(
        None,
        description=f"The sampler: one of {', '.join(SAMPLERS)}, or the name of the diffusers class. "
        "Default: the release's, commonly Euler.",
    )
    use_refiner: bool | None = Field(
        None,
        description="Whether the refiner finishes the picture; true is refused where the release has none. "
        "Default: the release's, commonly false.",
    )
    denoising_frac: Fraction | None = Field(
        None,
        description="With the refiner, the share of the denoising that the base model does: 0 to 1. "
        "Default: the release's, commonly 0.8.",
    )
    seed: Seed | None = Field(
        None,
        description="The same request with the same seed gives the same picture: 0 to 4294967295. "
        "Image i of a request, counted from 0, has seed + i. Default: drawn at random, and returned.",
    )
    num_images: int = Field(1, ge=1, le=MAX_IMAGES, description=f"How many pictures of the prompt: 1 to {MAX_IMAGES}.")
    output_format: ImageFormat = Field("jpeg", description="File format of the pictures.")
    quality: int = Field(
        95, ge=1, le=100, description="Quality of jpeg and webp, 1 to 100; png is lossless and ignores it."
    )
    stream: bool = Field(
        False,
        description="Whether to answer with a line of JSON for each thing that happens (application/x-ndjson): "
        "accepted, heartbeat, step, image, and done or error at the end.",
    )
    preview_every: int = Field(
        5, ge=0, le=MAX_STEPS, description="With stream, a small preview after every so many steps; 0 for none."
    )


class Defaults(_StrictModel):
    """What a release answers with where the request says nothing. A release names the ones it changes."""

    num_inference_steps: Steps = 30
    guidance_scale: Guidance = 7.5
    end_cfg_frac: Fraction = 1.0
    scheduler: SamplerName = "Euler"
    use_refiner: bool = False
    denoising_frac: Fraction = 0.8


def read_defaults(entries: Mapping[str, Any]) -> Defaults:
    """A manifest's `defaults`, held to the limits of requests. Raises ManifestError naming the entry."""
    try:
        defaults = Defaults.model_validate(dict(entries))
        _check_steps(defaults.num_inference_steps, sampler_name(defaults.scheduler))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ManifestError(f"the release's default for {first['loc'][0]}: {first['msg']}.") from error
    except RequestRefused as error:
        raise ManifestError(f"the release's default for {error}") from error
    return defaults


@dataclass(frozen=True)
class SizeList:
    """The sizes that static engines serve, as (width, height) in pixels."""

    sizes: tuple[tuple[int, int], ...]

    def check(self, width: int, height: int) -> None:
        """Raises RequestRefused with the list, unless it has this size."""
        if (width, height) not in self.sizes:
            field = "height" if any(width == served for served, _ in self.sizes) else "width"
            served_sizes = ", ".join(f"{w}x{h}" for w, h in sorted(self.sizes))
            raise RequestRefused(
                field,
                f"{width}x{height} is not a size served here; the sizes (width x height) are {served_sizes}.",
            )


@dataclass(frozen=True)
class SizeRange:
    """The sizes that dynamic engines serve: each side, in pixels, a multiple within the bounds."""

    min_side: int
    max_side: int
    multiple: int

    def check(self, width: int, height: int) -> None:
        """Raises RequestRefused with the rule, unless both sides keep it."""
        for field, side in (("width", width), ("height", height)):
            if not self.min_side <= side <= self.max_side or side % self.multiple:
                raise RequestRefused(
                    field,
                    f"{side} is not served here; give a multiple of {self.multiple} "
                    f"from {self.min_side} to {self.max_side}.",
                )


@dataclass(frozen=True)
class ServedModel:
    """What a deployment serves, as far as a request can ask for it. Sizes in pixels."""

    native_width: int
    native_height: int
    sizes: SizeList | SizeRange
    has_refiner: bool
    defaults: Defaults


@dataclass(frozen=True)
class GenerationSettings:
    """A request with every choice made. `scheduler` is the public name; `seed` is that of the first image."""

    prompt: str
    negative_prompt: str | None
    width: int
    height: int
    num_inference_steps: int
    guidance_scale: float
    end_cfg_frac: float
    scheduler: str
    use_refiner: bool
    denoising_frac: float
    seed: int
    num_images: int
    output_format: ImageFormat
    quality: int

    @property
    def seeds(self) -> tuple[int, ...]:
        """One seed an image: seed + i, modulo 2^32."""
        return tuple((self.seed + image) % _SEEDS for image in range(self.num_images))


def resolve(request: GenerationRequest, served: ServedModel) -> GenerationSettings:
    """Fill in what the request leaves open and check it against what is served here.

    Raises RequestRefused: no such sampler, too many steps for it, a size that is not served, no refiner.
    """
    defaults = served.defaults
    scheduler = sampler_name(_given(request.scheduler, defaults.scheduler))
    steps = _given(request.num_inference_steps, defaults.num_inference_steps)
    _check_steps(steps, scheduler)
    width = _given(request.width, served.native_width)
    height = _given(request.height, served.native_height)
    served.sizes.check(width, height)
    use_refiner = _given(request.use_refiner, defaults.use_refiner)
    if use_refiner and not served.has_refiner:
        raise RequestRefused("use_refiner", "true is not accepted, this release has no refiner; give false.")
    return GenerationSettings(
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        width=width,
        height=height,
        num_inference_steps=steps,
        guidance_scale=_given(request.guidance_scale, defaults.guidance_scale),
        end_cfg_frac=_given(request.end_cfg_frac, defaults.end_cfg_frac),
        scheduler=scheduler,
        use_refiner=use_refiner,
        denoising_frac=_given(request.denoising_frac, defaults.denoising_frac),
        seed=secrets.randbelow(_SEEDS) if request.seed is None else request.seed,
        num_images=request.num_images,
        output_format=request.output_format,
        quality=request.quality,
    )


class ImageResult(TypedDict):
    """One picture of a response."""

    data: str  # base64 of the file
    seed: int  # asking for this seed with num_images 1 gives this picture again
    format: ImageFormat
    width: int  # pixels
    height: int  # pixels


class EngineInfo(TypedDict):
    """What made the pictures."""

    release: str  # model/version
    target: str  # target key, as cuda-h200-sm90-torch2.13-cu130
    runtime: str  # aot_inductor, tensorrt or eager


class GenerationResponse(TypedDict):
    """The body of a 200. `data` is the first image again, where callers of the older SDXL Truss look."""

    status: Literal["success"]
    data: str  # base64 of the first image's file
    time: float  # seconds from the request's arrival in the model
    images: list[ImageResult]
    timings: dict[str, float]  # milliseconds by stage
    warnings: list[str]  # whatever was not done to the letter: a prompt cut, a fallback in use
    engine: EngineInfo


_Value = TypeVar("_Value")


def _given(value: _Value | None, default: _Value) -> _Value:
    return default if value is None else value


def _check_steps(steps: int, scheduler: str) -> None:
    if scheduler == "LCM" and steps > MAX_STEPS_LCM:
        raise RequestRefused(
            "num_inference_steps",
            f"{steps} is too many for LCM; give 1 to {MAX_STEPS_LCM}, or another scheduler.",
        )


def _explanation(problem: Mapping[str, Any], fields: Mapping[str, Any]) -> str:
    """One of pydantic's problems in our words; without a full stop, which Truss adds."""
    kind, value = problem["type"], problem["input"]
    if kind in ("nul_character", "blank"):
        return str(problem["msg"])
    if kind == "extra_forbidden":
        return f"is not a field; the fields are {', '.join(fields)}"
    if not problem["loc"]:
        if kind == "string_unicode":
            return "the name of a field is not Unicode text (it holds half of a surrogate pair)"
        return f"got {_shown(value)}, expected a JSON object with the fields {', '.join(fields)}"
    if (field := fields.get(problem["loc"][0])) is None:
        return "the name of a field is not text"
    accepted = _accepted(field)
    if kind == "missing":
        return f"is required: {accepted}"
    if kind == "string_unicode":
        at = next(i for i, character in enumerate(value) if "\ud800" <= character <= "\udfff")
        return f"character {at + 1} is half of a surrogate pair, which is not Unicode text: send the whole of it"
    return f"got {_shown(value)}, expected {accepted}"


def _accepted(schema: Mapping[str, Any]) -> str:
    """A field's JSON schema in words, so that what is said is what is published and checked."""
    if "anyOf" in schema:
        return ", or ".join(_accepted(choice) for choice in schema["anyOf"])
    if "enum" in schema:
        return "one of " + ", ".join(json.dumps(choice) for choice in schema["enum"])
    match schema["type"]:
        case "string":
            return f"a string of {schema.get('minLength', 0)} to {schema['maxLength']} characters"
        case "integer":
            return f"an integer from {schema['minimum']} to {schema['maximum']}"
        case "number":
            return f"a number from {schema['minimum']} to {schema['maximum']}"
        case "boolean":
            return "true or false"
        case kind:
            return str(kind)


def _shown(value: object) -> str:
    """A refused value as JSON writes it, cut short; of a list or an object only what it is."""
    if isinstance(value, str):
        return _printable(json.dumps(_shortened(value), ensure_ascii=False))
    if value is None or isinstance(value, bool | int | float):
        return _shortened(json.dumps(value))
    if isinstance(value, list):
        return "a list"
    return "an object" if isinstance(value, Mapping) else f"a value of type {type(value).__name__}"


def _printable(text: str) -> str:
    """Line breaks, marks that turn the reading direction and their like become JSON's escapes."""
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text)} characters)"
