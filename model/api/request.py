"""The public request and response: their fields and types. `model.api.resolve` has the rules that a release adds.

A request is validated before it costs anything. Every refusal names the field, the value and what would be accepted.
"""

import base64
import hashlib
from itertools import pairwise
from typing import Annotated, Any, Literal, NotRequired, Self, TypedDict

from pydantic import AfterValidator, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from model.denoising.sampler_specs import SAMPLERS, SPECS, takers
from model.validation import (
    MAX_CLIP_SKIP,
    MAX_CONTROL_SCALE,
    MAX_CONTROL_TYPES,
    MAX_CONTROLS,
    MAX_FEATHER,
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
    Fraction,
    Guidance,
    ImageFormat,
    Preprocess,
    PromptSyntax,
    Resize,
    SamplerName,
    Seed,
    Side,
    Steps,
    StrictModel,
    explain,
    format_value,
    refusal,
)


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


SizeCondition = Annotated[list[Annotated[int, Field(ge=1, le=MAX_SIZE_CONDITION)]], Field(min_length=2, max_length=2)]
CropCondition = Annotated[list[Annotated[int, Field(ge=0, le=MAX_SIZE_CONDITION)]], Field(min_length=2, max_length=2)]
Timesteps = Annotated[
    list[Annotated[int, Field(ge=0, le=MAX_TRAIN_TIMESTEPS - 1)]],
    Field(min_length=1, max_length=MAX_STEPS),
    AfterValidator(_refuse_ascending),
]
Sigmas = Annotated[
    list[Annotated[float, Field(ge=0, le=MAX_SIGMA)]],
    Field(min_length=2, max_length=MAX_STEPS + 1),
    AfterValidator(_refuse_ascending),
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

    model_config = ConfigDict(json_schema_extra=_state_null)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        dropped = {
            name
            for name, field in cls.model_fields.items()
            if not field.is_required() and name in data and data[name] is None
        }
        return {name: value for name, value in data.items() if name not in dropped} if dropped else data


class MaskRequest(RequestModel):
    """A part of the image to repaint."""

    image: str = Field(
        description="The mask, like the request's `image` and of the same size. White is repainted, black is kept. "
        "Levels from 128 on count as white. If it marks no latent to repaint, the response warns of it; see "
        "[input images](#input-images)."
    )
    prompt: Prompt | None = Field(None, description="What to paint there. Default: the request's prompt.")
    negative_prompt: Text | None = Field(None, description="What to avoid there. Default: the request's.")
    strength: Fraction | None = Field(
        None,
        description="Like the request's `strength`, for this mask. Default: the request's, else 0.9999, or 1 with a "
        "single step.",
    )
    feather: Annotated[float, Field(ge=0, le=MAX_FEATHER)] = Field(
        0,
        description="Standard deviation of a Gaussian that blurs the mask, in pixels of the result: 0 to "
        f"{MAX_FEATHER}. Where the blurred mask has a level of at least 128, the image is repainted. With `composite` "
        "the result is blended with `image` by these levels. Without it no pixels are blended.",
    )


class LoraRequest(RequestModel):
    """A LoRA adapter, and how strongly it changes the model."""

    name: str = Field(min_length=1, max_length=128, description="One of the adapters that this deployment offers.")
    scale: float = Field(
        1.0,
        ge=-MAX_LORA_SCALE,
        le=MAX_LORA_SCALE,
        description="Its weight, as `adapter_weights` in diffusers: -10 to 10. 0 leaves it out.",
    )


class ControlRequest(RequestModel):
    """The use of a ControlNet: a network that makes the result follow another image's edges, depth or poses."""

    name: Annotated[str, Field(min_length=1, max_length=64)] = Field(
        description="The ControlNet, by the name that the release has for it. Each may be named once."
    )
    image: str = Field(
        description="The control image: base64 or a `data:` URL of a PNG, JPEG or WebP file, as the ControlNet expects "
        "it, for example white edges on black. Another size than the result's is resized as `resize` states."
    )
    preprocess: Preprocess = Field(
        "none",
        description="canny: `image` is a picture, and its edges by the Canny filter (thresholds 100 and 200) are the "
        "control image.",
    )
    scale: Annotated[float, Field(ge=0, le=MAX_CONTROL_SCALE)] = Field(
        1.0, description=f"Strength of the control: 0 to {MAX_CONTROL_SCALE}."
    )
    start: Fraction = Field(0.0, description="Share of the steps before the first one that the network controls.")
    end: Fraction = Field(
        1.0, description="Share of the steps after the last one that the network controls, larger than `start`."
    )
    mode: Annotated[int, Field(ge=0, le=MAX_CONTROL_TYPES - 1)] | None = Field(
        None, description="The type of the control image, a number. Required for a Union network, refused for others."
    )


class IpAdapterRequest(RequestModel):
    """The use of an IP-Adapter: a network that makes the result follow what reference images show, like a prompt."""

    name: Annotated[str, Field(min_length=1, max_length=64)] = Field(
        description="The IP-Adapter, by the name that the release has for it. Each may be named once."
    )
    images: Annotated[list[str], Field(min_length=1, max_length=MAX_IP_IMAGES)] = Field(
        description=f"The reference images: 1 to {MAX_IP_IMAGES}, and at most as many as the release takes; a refusal "
        "states it. Each is base64 or a `data:` URL of a PNG, JPEG or WebP file of any size. The network reads the "
        "square around its centre, commonly in 224 x 224 pixels."
    )
    scale: Annotated[float, Field(ge=0, le=MAX_IP_SCALE)] = Field(
        1.0,
        description=f"Strength of the reference images, as `set_ip_adapter_scale` in diffusers: 0 to {MAX_IP_SCALE}. "
        "0 leaves the adapter out.",
    )


class GenerationRequest(RequestModel):
    """The images to generate. Only `prompt` is required; the release has defaults for all other fields."""

    prompt: Prompt = Field(
        description="Description of the image: 1 to 4000 characters, not only whitespace. With "
        "`prompt_syntax` plain the text encoders read 77 tokens, about 60 words; a longer prompt is truncated, and the "
        "response warns of it.",
        examples=["an astronaut in a jungle, cold color palette, muted colors, detailed, 8k"],
    )
    negative_prompt: Text | None = Field(
        None, description="Description of what to avoid: up to 4000 characters. No effect without guidance."
    )
    prompt_syntax: PromptSyntax | None = Field(
        None,
        description="How prompts are read. `plain`: as they are, up to 77 tokens. `weighted`: with weights, as in "
        "`(word:1.3)`, and up to 4 chunks of 75 tokens; see [weighted prompts](#weighted-prompts). "
        "Default: the release's, commonly plain.",
    )
    image: str | None = Field(
        None,
        description="The image to start from: base64 or a `data:` URL of a PNG, JPEG or WebP file, at most 32 MiB and "
        "32 megapixels. It is encoded to latents, and noise is added to them.",
    )
    strength: Fraction | None = Field(
        None,
        description="With `image`, the share of the steps that run: 0 to 1. The larger, the less of the image remains. "
        "A value that leaves no step is refused. Default: 0.3, and 0.9999 with `masks`; with few steps the smallest "
        "value that leaves one, for example 0.5 of 2.",
    )
    masks: Annotated[list[MaskRequest], Field(min_length=1, max_length=MAX_MASKS)] | None = Field(
        None,
        description=f"With `image`, the parts of it to repaint: 1 to {MAX_MASKS}. They are repainted in this order, "
        "each on the result of the one before, like as many requests with one mask each.",
    )
    resize: Resize = Field(
        "refuse",
        description="How an `image` of another size than `width` x `height` is resized, with its masks: not at all, "
        "stretched, cropped around its centre, or padded with its outermost pixels.",
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
    loras: Annotated[list[LoraRequest], Field(max_length=MAX_LORAS)] | None = Field(
        None,
        description=f"The LoRA adapters to use: 0 to {MAX_LORAS}, each once. They change the base model and its text "
        "encoders. A refusal lists those that this deployment offers.",
    )
    controls: Annotated[list[ControlRequest], Field(min_length=1, max_length=MAX_CONTROLS)] | None = Field(
        None,
        description=f"ControlNets that control the steps of the base model: 1 to {MAX_CONTROLS}, each with an image.",
    )
    ip_adapters: Annotated[list[IpAdapterRequest], Field(min_length=1, max_length=MAX_IP_ADAPTERS)] | None = Field(
        None,
        description=f"IP-Adapters that make the base model follow reference images: 1 to {MAX_IP_ADAPTERS}, each with "
        "its images.",
    )
    width: Side | None = Field(
        None,
        description="Width in pixels. Width and height together must be a size this deployment serves; "
        "a refusal lists them. Default: the width of `image`, else the release's native width, commonly 1024.",
    )
    height: Side | None = Field(
        None,
        description="Height in pixels; see `width`. Default: the height of `image`, else the release's native height, "
        "commonly 1024.",
    )
    num_inference_steps: Steps | None = Field(
        None,
        description=f"Denoising steps: 1 to {MAX_STEPS}, and at most {min(_LIMITED.values())} with "
        f"{' or '.join(_LIMITED)}. Default: the release's, commonly 30.",
    )
    guidance_scale: Guidance | None = Field(
        None,
        description="Strength of the guidance by the prompt: 0 to 30. A value of at most 1 turns guidance off, "
        "which halves the work. Default: the release's, commonly 7.5.",
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
        description="True: the refiner finishes the images. Refused if the release has no refiner. "
        "Default: the release's, commonly false.",
    )
    denoising_frac: Fraction | None = Field(
        None,
        description="With the refiner, the share of the denoising that the base model does: 0 to 1. "
        "Default: the release's, commonly 0.8.",
    )
    seed: Seed | None = Field(
        None,
        description="The same request with the same seed gives the same image: 0 to 4294967295. "
        "Image i of a request, counted from 0, has seed + i. -1: random, and returned. Default: random, and returned.",
    )
    guidance_rescale: Fraction | None = Field(
        None,
        description="How much of the contrast that guidance adds is taken back: 0 to 1. No effect without guidance. "
        "Default: the release's, commonly 0.",
    )
    clip_skip: Annotated[int, Field(ge=0, le=MAX_CLIP_SKIP)] | None = Field(
        None,
        description="Layers of the text encoders to skip before the one that the UNet was trained with, for the prompt "
        "only: 0, or more if the release's text encoders have as many layers. Default: 0.",
    )
    original_size: SizeCondition | None = Field(
        None,
        description="SDXL: [height, width] in pixels that the image seems to have had before it was scaled. Small "
        f"numbers give blurred images. 1 to {MAX_SIZE_CONDITION}. Default: the image's size.",
    )
    crop: CropCondition | None = Field(
        None,
        description="SDXL: [top, left] in pixels of the part of a larger image that the image seems to be. 0 to "
        f"{MAX_SIZE_CONDITION}. Default: [0, 0], a whole image.",
    )
    target_size: SizeCondition | None = Field(
        None,
        description="SDXL: [height, width] in pixels that the image seems to have. Refiners with an aesthetic score "
        "ignore it. Default: the image's size.",
    )
    timesteps: Timesteps | None = Field(
        None,
        description="The UNet's timestep of each step, descending integers from 0 on, in place of the scheduler's. "
        f"For {takers('timesteps')}. Their number replaces `num_inference_steps`.",
    )
    sigmas: Sigmas | None = Field(
        None,
        description="The ratio of noise to signal before each step and after the last, descending, in place of the "
        f"scheduler's. The last one is commonly 0. For {takers('sigmas')}. Their number less one replaces "
        "`num_inference_steps`.",
    )
    num_images: int = Field(1, ge=1, le=MAX_IMAGES, description=f"Number of images of the prompt: 1 to {MAX_IMAGES}.")
    upscale: int = Field(
        1,
        ge=1,
        le=MAX_UPSCALE,
        description="2: the finished images are enlarged to twice their width and height by a Lanczos filter.",
    )
    output_format: ImageFormat = Field("jpeg", description="File format of the images.")
    quality: int = Field(
        95, ge=1, le=100, description="Quality of jpeg and webp, 1 to 100; png is lossless and ignores it."
    )
    stream: bool = Field(
        False,
        description="True: answer with one line of JSON for each event (application/x-ndjson): accepted, heartbeat, "
        "step, image, and done or error at the end.",
    )
    preview_every: int = Field(
        5, ge=0, le=MAX_STEPS, description="With stream, the steps from one small preview to the next; 0: no previews."
    )
    metadata: bool = Field(
        False,
        description="True: the files state how they were made: the release, and the request with the image's seed. "
        "Input images are SHA-256 digests there, never data.",
    )
    describe: bool = Field(
        False,
        description="True: generate nothing, and answer with what this deployment serves. The other fields must be "
        "valid and are ignored.",
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
                    type=PydanticCustomError("refused", "{message}", {"message": problem.message}),
                    loc=("request" if problem.field is None else problem.field,),
                    input=problem.value,
                )
                for problem in explain(error, cls)
            ]
            raise ValidationError.from_exception_data(cls.__name__, problems) from None


def without_images(value: Any, key: str = "") -> Any:
    """Return `value` with the SHA-256 of each file in place of its base64, in all fields `image` and `images`."""
    if isinstance(value, dict):
        return {name: without_images(entry, name) for name, entry in value.items()}
    if isinstance(value, list):
        return [without_images(entry, key) for entry in value]
    if key in ("image", "images"):
        return f"sha256:{hashlib.sha256(base64.b64decode(value.rpartition(',')[2])).hexdigest()}"
    return value


class ImageResult(TypedDict):
    """One image of a response."""

    data: str  # base64 of the file
    seed: int  # a request with this seed and num_images 1 returns this image again
    format: ImageFormat  # png, jpeg or webp
    width: int  # pixels
    height: int  # pixels
    flagged: NotRequired[bool]  # true if the safety checker flagged it; missing without a safety checker


class EngineInfo(TypedDict):
    """The release and engines that made the images."""

    release: str  # model/version
    target: str  # target key, for example cuda-h200-sm90-torch2.13-cu130
    runtime: str  # aot_inductor, tensorrt, tensorrt-rtx or eager


class GenerationResponse(TypedDict):
    """The body of a response with status 200. `data` repeats the first image for callers of the older SDXL Truss."""

    status: Literal["success"]  # always "success"
    data: str  # base64 of the first image's file
    time: float  # seconds from the request's arrival in the model
    images: list[ImageResult]  # in the order of their seeds
    timings: dict[str, float]  # milliseconds by stage, summed over masks
    warnings: list[str]  # what was not followed: a truncated prompt, an ignored negative prompt, an unused mask
    engine: EngineInfo  # the release and engines that made the images
