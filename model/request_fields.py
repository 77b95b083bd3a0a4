"""What may be asked: the public request, which is the table of its fields, and a release's defaults for them.

What a release serves (`model.loading.served`), the command line, the gateway's OpenAI API and docs/requests.md read the
table. A request is validated before it costs anything. Every refusal names the field, the value and what would be
accepted. `model.api.resolve` has the rules that a release adds.
"""

from itertools import pairwise
from types import UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

from annotated_types import Interval, Len  # which build faster than Field
from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import InitErrorDetails

from model.adapters.block_scales import check_scale
from model.denoising.sampler_specs import SAMPLERS, SPECS, takers
from model.store.manifest_json import MAX_RELEASE_NAME
from model.validation import (
    LARGEST_SIDE,
    MAX_CLIP_SKIP,
    MAX_CONTROL_SCALE,
    MAX_CONTROL_TYPES,
    MAX_CONTROLS,
    MAX_FEATHER,
    MAX_GUIDANCE,
    MAX_IMAGES,
    MAX_IP_ADAPTERS,
    MAX_IP_IMAGES,
    MAX_IP_SCALE,
    MAX_LORA_SCALE,
    MAX_LORAS,
    MAX_MASKS,
    MAX_PROMPT_CHARACTERS,
    MAX_SIGMA,
    MAX_SIZE_CONDITION,
    MAX_STEPS,
    MAX_TRAIN_TIMESTEPS,
    MAX_UPSCALE,
    RANDOM_SEED,
    SEED_COUNT,
    SMALLEST_SIDE,
    Forecast,
    ImageFormat,
    PromptSyntax,
    Resize,
    StrictModel,
    explain,
    format_value,
    refusal,
)

Side = Annotated[int, Interval(ge=SMALLEST_SIDE, le=LARGEST_SIDE)]
Steps = Annotated[int, Interval(ge=1, le=MAX_STEPS)]
Guidance = Annotated[float, Interval(ge=0, le=MAX_GUIDANCE)]
Fraction = Annotated[float, Interval(ge=0, le=1)]
SamplerName = Annotated[str, Len(1, 64)]
ClipSkip = Annotated[int, Interval(ge=0, le=MAX_CLIP_SKIP)]

# Marks of a field:
OPENAI = "openai"  # the gateway's OpenAI API accepts it under the same name
ANSWER = "answer"  # not about the images: files do not state it among the request, and `GenerationParams` lacks it


class Defaults(StrictModel, defer_build=True):
    """The values of a request's empty fields. A release lists the defaults that it changes."""

    num_inference_steps: Steps = 30
    guidance_scale: Guidance = 7.5
    guidance_start: Fraction = 0.0
    guidance_end: Fraction = Field(1.0, validation_alias=AliasChoices("guidance_end", "end_cfg_frac"))
    guidance_rescale: Fraction = 0.0
    clip_skip: ClipSkip = 0
    prompt_syntax: PromptSyntax = "plain"
    scheduler: SamplerName = "Euler"
    forecast: Forecast = "off"
    use_refiner: bool = False
    denoising_frac: Fraction = 0.8


def _field(description: str, *marks: str, default: Any = None) -> Any:
    """Return a field that may be empty."""
    field = Field(default, description=description)
    field.metadata.extend(marks)
    return field


def _released(name: str, description: str, *marks: str) -> Any:
    """Return a field of the request that takes the release's default if it is empty."""
    value = Defaults.model_fields[name].default
    common = str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else value
    return _field(f"{description} Default: the release's, commonly {common}.", *marks)


def _refuse_nul(text: str) -> str:
    if (position := text.find("\0")) >= 0:
        raise refusal(f"character {position + 1} is NUL (U+0000), which no text needs: remove it")
    return text


def _refuse_blank(text: str) -> str:
    if not text.strip():
        raise refusal(f"got {format_value(text)}, nothing but whitespace: describe the image")
    return text


Text = Annotated[str, Field(max_length=MAX_PROMPT_CHARACTERS), AfterValidator(_refuse_nul)]
Prompt = Annotated[Text, Field(min_length=1), AfterValidator(_refuse_blank)]


def _refuse_ascending(values: list[Any]) -> list[Any]:
    for number, (value, after) in enumerate(pairwise(values)):
        if after >= value:
            raise refusal(
                f"entry {number + 2} is {format_value(after)} after {format_value(value)}: each must be less than the "
                "one before"
            )
    return values


SizeCondition = Annotated[list[Annotated[int, Interval(ge=1, le=MAX_SIZE_CONDITION)]], Len(2, 2)]
CropCondition = Annotated[list[Annotated[int, Interval(ge=0, le=MAX_SIZE_CONDITION)]], Len(2, 2)]
Timesteps = Annotated[
    list[Annotated[int, Interval(ge=0, le=MAX_TRAIN_TIMESTEPS - 1)]],
    Len(1, MAX_STEPS),
    AfterValidator(_refuse_ascending),
]
Sigmas = Annotated[
    list[Annotated[float, Interval(ge=0, le=MAX_SIGMA)]], Len(2, MAX_STEPS + 1), AfterValidator(_refuse_ascending)
]


_LIMITED = {name: SPECS[name].max_steps for name in SAMPLERS if SPECS[name].max_steps < MAX_STEPS}


def _state_null(schema: dict[str, Any]) -> None:
    """Add null to the JSON schema of each field with a default."""
    for name, field in schema["properties"].items():
        if name not in schema["required"] and "anyOf" not in field:
            value = {key: field.pop(key) for key in [*field] if key not in ("title", "description", "default")}
            field["anyOf"] = [value, {"type": "null"}]


class RequestModel(StrictModel):
    """A JSON object of a request. Null stands for a missing value, so a field that has a default takes it."""

    model_config = ConfigDict(json_schema_extra=_state_null, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        optional = {name for name, field in cls.model_fields.items() if not field.is_required()}
        return {name: value for name, value in data.items() if value is not None or name not in optional}


class MaskRequest(RequestModel):
    """A part of the image to repaint."""

    image: str = Field(
        description="The mask, like the request's `image` and of the same size. White is repainted, black is kept. "
        "Levels from 128 on count as white. If it marks no latent to repaint, the response warns of it; see "
        "[input images](#input-images)."
    )
    prompt: Prompt | None = Field(None, description="What to paint there. Default: the request's prompt.")
    negative_prompt: Text | None = Field(None, description="What to avoid there. Default: the request's.")
    strength: Fraction | None = _field(
        "Like the request's `strength`, for this mask. Default: the request's, else 0.9999, or 1 with a single step."
    )
    feather: Annotated[float, Interval(ge=0, le=MAX_FEATHER)] = Field(
        0,
        description="Standard deviation of a Gaussian that blurs the mask, in pixels of the result: 0 to "
        f"{MAX_FEATHER}. Where the blurred mask has a level of at least 128, the image is repainted. With `composite` "
        "the result is blended with `image` by these levels. Without it no pixels are blended.",
    )


def _refuse_unknown_blocks(value: Any) -> Any:
    try:
        check_scale(value)
    except ValueError as error:
        raise refusal(str(error)) from error
    return value


_NUMBER = {"type": "number", "minimum": -MAX_LORA_SCALE, "maximum": MAX_LORA_SCALE}
LoraScale = Annotated[
    Any,
    BeforeValidator(_refuse_unknown_blocks),
    WithJsonSchema({"anyOf": [_NUMBER, {"type": "object"}, {"type": "null"}]}),
]


class LoraRequest(RequestModel):
    """An adapter, and how strongly it changes the model."""

    name: str = Field(min_length=1, max_length=128, description="One of the adapters that this deployment offers.")
    scale: LoraScale = Field(
        1.0,
        description="Its weight, as `adapter_weights` in diffusers: -10 to 10. 0 leaves it out. Or "
        "[weights by block](loras.md#scales-by-block).",
    )


class ControlRequest(RequestModel):
    """The use of a ControlNet: a network that makes the result follow another image's edges, depth or poses."""

    name: Annotated[str, Len(1, 64)] = Field(
        description="The ControlNet, by the name that the release has for it. Each may be named once."
    )
    image: str = Field(
        description="The control image: base64 or a `data:` URL of a PNG, JPEG or WebP file, as the ControlNet expects "
        "it, for example white edges on black. Another size than the result's is resized as `resize` states."
    )
    preprocess: Literal["none", "canny"] = Field(
        "none",
        description="canny: `image` is a picture, and its edges by the Canny filter (thresholds 100 and 200) are the "
        "control image.",
    )
    scale: Annotated[float, Interval(ge=0, le=MAX_CONTROL_SCALE)] = Field(
        1.0, description=f"Strength of the control: 0 to {MAX_CONTROL_SCALE}."
    )
    start: Fraction = Field(0.0, description="Share of the steps before the first one that the network controls.")
    end: Fraction = Field(
        1.0, description="Share of the steps after the last one that the network controls, larger than `start`."
    )
    mode: Annotated[int, Interval(ge=0, le=MAX_CONTROL_TYPES - 1)] | None = _field(
        "The type of the control image, a number. Required for a Union network, refused for others."
    )


class IpAdapterRequest(RequestModel):
    """The use of an IP-Adapter: a network that makes the result follow what reference images show, like a prompt."""

    name: Annotated[str, Len(1, 64)] = Field(
        description="The IP-Adapter, by the name that the release has for it. Each may be named once."
    )
    images: Annotated[list[str], Len(1, MAX_IP_IMAGES)] = Field(
        description=f"The reference images: 1 to {MAX_IP_IMAGES}, and at most as many as the release takes; a refusal "
        "states it. Each is base64 or a `data:` URL of a PNG, JPEG or WebP file of any size. The network reads the "
        "square around its centre, commonly in 224 x 224 pixels."
    )
    scale: Annotated[float, Interval(ge=0, le=MAX_IP_SCALE)] = Field(
        1.0,
        description=f"Strength of the reference images, as `set_ip_adapter_scale` in diffusers: 0 to {MAX_IP_SCALE}. "
        "0 leaves the adapter out.",
    )


class GenerationRequest(RequestModel, defer_build=False):
    """The images to generate. Only `prompt` is required; the release has defaults for all other fields."""

    prompt: Prompt = Field(
        description="Description of the image: 1 to 4000 characters, not only whitespace. With "
        "`prompt_syntax` plain the text encoders read 77 tokens, about 60 words; a longer prompt is truncated, and the "
        "response warns of it.",
        examples=["an astronaut in a jungle, cold color palette, muted colors, detailed, 8k"],
    )
    negative_prompt: Text | None = _field(
        "Description of what to avoid: up to 4000 characters. No effect without guidance.", OPENAI
    )
    prompt_syntax: PromptSyntax | None = _released(
        "prompt_syntax",
        "How prompts are read. `plain`: as they are, up to 77 tokens. `weighted`: with weights, as in "
        "`(word:1.3)`, and up to 4 chunks of 75 tokens; see [weighted prompts](#weighted-prompts).",
        OPENAI,
    )
    image: str | None = _field(
        "The image to start from: base64 or a `data:` URL of a PNG, JPEG or WebP file, at most 32 MiB and "
        "32 megapixels. It is encoded to latents, and noise is added to them."
    )
    strength: Fraction | None = _field(
        "With `image`, the share of the steps that run: 0 to 1. The larger, the less of the image remains. "
        "A value that leaves no step is refused. Default: 0.3, and 0.9999 with `masks`; with few steps the smallest "
        "value that leaves one, for example 0.5 of 2.",
        OPENAI,
    )
    masks: Annotated[list[MaskRequest], Len(1, MAX_MASKS)] | None = _field(
        f"With `image`, the parts of it to repaint: 1 to {MAX_MASKS}. They are repainted in this order, "
        "each on the result of the one before, like as many requests with one mask each."
    )
    resize: Resize = _field(
        "How an `image` of another size than `width` x `height` is resized, with its masks: not at all, "
        "stretched, cropped around its centre, or padded with its outermost pixels.",
        OPENAI,
        default="refuse",
    )
    composite: bool = Field(
        False,
        description="With `masks`, true: pixels where all masks are black are those of `image`, exactly if the format "
        "is png. At a feathered edge (`feather`) the result is blended with `image`.",
    )
    color_match: bool = Field(
        False,
        description="With `masks`, true: the colours of the result are shifted so that the surroundings of the masks "
        "have the mean and contrast that they have in `image`.",
    )
    loras: Annotated[list[LoraRequest], Field(max_length=MAX_LORAS)] | None = _field(
        f"The LoRA adapters to use: 0 to {MAX_LORAS}, each once. They change the base model and its text "
        "encoders. A refusal lists those that this deployment offers.",
        OPENAI,
    )
    controls: Annotated[list[ControlRequest], Len(1, MAX_CONTROLS)] | None = _field(
        f"ControlNets that control the steps of the base model: 1 to {MAX_CONTROLS}, each with an image."
    )
    ip_adapters: Annotated[list[IpAdapterRequest], Len(1, MAX_IP_ADAPTERS)] | None = _field(
        f"IP-Adapters that make the base model follow reference images: 1 to {MAX_IP_ADAPTERS}, each with its images."
    )
    width: Side | None = _field(
        "Width in pixels. Width and height together must be a size this deployment serves; "
        "a refusal lists them. Default: the width of `image`, else the release's native width, commonly 1024."
    )
    height: Side | None = _field(
        "Height in pixels; see `width`. Default: the height of `image`, else the release's native height, "
        "commonly 1024."
    )
    num_inference_steps: Steps | None = _released(
        "num_inference_steps",
        f"Denoising steps: 1 to {MAX_STEPS}, and at most {min(_LIMITED.values())} with {' or '.join(_LIMITED)}.",
        OPENAI,
    )
    guidance_scale: Guidance | None = _released(
        "guidance_scale",
        "Strength of the guidance by the prompt: 0 to 30. A value of at most 1 turns guidance off, "
        "which halves the work.",
        OPENAI,
    )
    guidance_start: Fraction | None = _released(
        "guidance_start",
        "Share of the steps before the first guided one: 0 to 1, and less than `guidance_end`. A step without guidance "
        "takes half of the work.",
        OPENAI,
    )
    guidance_end: Fraction | None = _released(
        "guidance_end", "Share of the steps, counted from the first, after which none is guided: 0 to 1.", OPENAI
    )
    end_cfg_frac: Fraction | None = _field("The older name of `guidance_end`.", OPENAI)
    scheduler: SamplerName | None = _released(
        "scheduler", f"The sampler: one of {', '.join(SAMPLERS)}, or the name of the diffusers class.", OPENAI
    )
    forecast: Forecast | None = _released(
        "forecast",
        "Runs the UNet in some of the steps only, and forecasts what it would predict in the others; see "
        "[forecasts](forecast.md). `quality`: it runs in 21 of 30 steps; `fast`: in 16 of 30. The samplers that offer "
        f"it: {', '.join(name for name in SAMPLERS if SPECS[name].forecasts)}.",
        OPENAI,
    )
    use_refiner: bool | None = _released(
        "use_refiner", "True: the refiner finishes the images. Refused if the release has no refiner.", OPENAI
    )
    denoising_frac: Fraction | None = _released(
        "denoising_frac", "With the refiner, the share of the denoising that the base model does: 0 to 1."
    )
    seed: Annotated[int, Interval(ge=RANDOM_SEED, le=SEED_COUNT - 1)] | None = _field(
        "The same request with the same seed gives the same image: 0 to 4294967295. "
        "Image i of a request, counted from 0, has seed + i. -1: random, and returned. Default: random, and returned.",
        OPENAI,
    )
    guidance_rescale: Fraction | None = _released(
        "guidance_rescale",
        "How much of the contrast that guidance adds is taken back: 0 to 1. No effect without guidance.",
        OPENAI,
    )
    clip_skip: ClipSkip | None = _released(
        "clip_skip",
        "Layers of the text encoders to skip before the one that the UNet was trained with, for the prompt "
        "only: 0, or more if the release's text encoders have as many layers.",
        OPENAI,
    )
    original_size: SizeCondition | None = _field(
        "SDXL: [height, width] in pixels that the image seems to have had before it was scaled. Small "
        f"numbers give blurred images. 1 to {MAX_SIZE_CONDITION}. Default: the image's size."
    )
    crop: CropCondition | None = _field(
        "SDXL: [top, left] in pixels of the part of a larger image that the image seems to be. 0 to "
        f"{MAX_SIZE_CONDITION}. Default: [0, 0], a whole image."
    )
    target_size: SizeCondition | None = _field(
        "SDXL: [height, width] in pixels that the image seems to have. Refiners with an aesthetic score "
        "ignore it. Default: the image's size."
    )
    timesteps: Timesteps | None = _field(
        "The UNet's timestep of each step, descending integers from 0 on, in place of the scheduler's. "
        f"For {takers('timesteps')}. Their number replaces `num_inference_steps`."
    )
    sigmas: Sigmas | None = _field(
        "The ratio of noise to signal before each step and after the last, descending, in place of the "
        f"scheduler's. The last one is commonly 0. For {takers('sigmas')}. Their number less one replaces "
        "`num_inference_steps`."
    )
    num_images: int = Field(1, ge=1, le=MAX_IMAGES, description=f"Number of images of the prompt: 1 to {MAX_IMAGES}.")
    upscale: Annotated[int, Interval(ge=1, le=MAX_UPSCALE)] = Field(
        1, description="2: the finished images are enlarged to twice their width and height by a Lanczos filter."
    )
    output_format: ImageFormat = Field("jpeg", description="File format of the images.")
    quality: int = Field(
        95, ge=1, le=100, description="Quality of jpeg and webp, 1 to 100; png is lossless and ignores it."
    )
    stream: bool = _field(
        "True: answer with one line of JSON for each event (application/x-ndjson): accepted, heartbeat, "
        "step, image, and done or error at the end.",
        ANSWER,
        default=False,
    )
    preview_every: Annotated[int, Interval(ge=0, le=MAX_STEPS)] = _field(
        "With stream, the steps from one small preview to the next; 0: no previews.", ANSWER, default=5
    )
    metadata: bool = _field(
        "True: the files state how they were made: the release, and the request with the image's seed. "
        "Input images are SHA-256 digests there, never data.",
        ANSWER,
        default=False,
    )
    model: Annotated[str, Len(1, MAX_RELEASE_NAME)] | None = _field(
        "The release to use, by its name (`style/3`) or by its model's (`style`), if no other version of it is served. "
        "Default: the deployment's first.",
        ANSWER,
    )
    describe: bool = _field(
        "True: generate nothing, and answer with what this deployment serves. The other fields but `model` must be "
        "valid and are ignored.",
        ANSWER,
        default=False,
    )

    def release_images(self) -> None:
        """Drop the texts of all images, once they are read. Truss keeps this object until the answer."""
        # The models are frozen for everyone else.
        for part in (self, *(self.masks or ()), *(self.controls or ())):
            part.__dict__.update(image=None)
        for adapter in self.ip_adapters or ():
            adapter.images.clear()

    @model_validator(mode="wrap")
    @classmethod
    def _explain_problems(cls, data: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Report each refused value and what is accepted in its place. pydantic's own messages omit both."""
        try:
            return validate(data)
        except ValidationError as error:
            problems = [
                InitErrorDetails(
                    type=refusal(problem.message),
                    loc=("request" if problem.field is None else problem.field,),
                    input=problem.value,
                )
                for problem in explain(error, cls)
            ]
            raise ValidationError.from_exception_data(cls.__name__, problems) from None


def marked(mark: str) -> tuple[str, ...]:
    """Return the names of the request's fields with a mark: OPENAI or ANSWER."""
    return tuple(name for name, field in GenerationRequest.model_fields.items() if mark in field.metadata)


def value_type(annotation: Any) -> Any:
    """Return a field's or entry's type without null, bounds and choices: a class, or a list with its entries' type."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return type(args[0])
    return value_type(args[0]) if origin in (Annotated, Union, UnionType) else annotation
