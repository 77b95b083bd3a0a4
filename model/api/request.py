"""The public request, its resolution to generation parameters, and the response.

A request is validated before it costs anything. Every refusal names the field, the value and what would be accepted.
Knows nothing of engines: `ServedModel` describes what is served.
"""

import secrets
from typing import Annotated, Any, Literal, Self, TypedDict

from pydantic import AfterValidator, Field, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from model.denoising.sampler_names import SAMPLERS, check_steps, sampler_name
from model.errors import RequestRefused
from model.loading.served import ServedModel
from model.pipeline.params import GenerationParams
from model.validation import (
    MAX_IMAGES,
    MAX_STEPS,
    MAX_STEPS_LCM,
    SEEDS,
    Fraction,
    Guidance,
    ImageFormat,
    SamplerName,
    Seed,
    Side,
    Steps,
    StrictModel,
    explain,
    refusal,
    shown,
)  # fmt: skip


def _no_nul(text: str) -> str:
    if (at := text.find("\0")) >= 0:
        raise refusal(f"character {at + 1} is NUL (U+0000), which no text needs: remove it")
    return text


def _not_blank(text: str) -> str:
    if not text.strip():
        raise refusal(f"got {shown(text)}, nothing but whitespace: describe the image")
    return text


Text = Annotated[str, Field(max_length=4000), AfterValidator(_no_nul)]


class GenerationRequest(StrictModel):
    """The images to generate. Only `prompt` is required; the release has defaults for all other fields."""

    prompt: Annotated[Text, Field(min_length=1), AfterValidator(_not_blank)] = Field(
        description="What the image shows: 1 to 4000 characters, not only whitespace. The text encoders read 77 "
        "tokens, some 60 words; a longer prompt is truncated, and the response warns of it.",
        examples=["an astronaut in a jungle, cold color palette, muted colors, detailed, 8k"],
    )
    negative_prompt: Text | None = Field(
        None, description="What the image should not show: up to 4000 characters. No effect without guidance."
    )
    width: Side | None = Field(
        None,
        description="Width in pixels. Width and height together must be a size this deployment serves; "
        "a refusal lists them. Default: the release's native width, commonly 1024.",
    )
    height: Side | None = Field(
        None, description="Height in pixels; see `width`. Default: the release's native height, commonly 1024."
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
        description="Whether the refiner finishes the image; true is refused where the release has none. "
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
        "Image i of a request, counted from 0, has seed + i. Default: random, and returned.",
    )
    num_images: int = Field(1, ge=1, le=MAX_IMAGES, description=f"How many images of the prompt: 1 to {MAX_IMAGES}.")
    output_format: ImageFormat = Field("jpeg", description="File format of the images.")
    quality: int = Field(
        95, ge=1, le=100, description="Quality of jpeg and webp, 1 to 100; png is lossless and ignores it."
    )
    stream: bool = Field(
        False,
        description="Whether to answer with a line of JSON for each event (application/x-ndjson): accepted, heartbeat, "
        "step, image, and done or error at the end.",
    )
    preview_every: int = Field(
        5, ge=0, le=MAX_STEPS, description="With stream, a small preview after every so many steps; 0: no previews."
    )

    @model_validator(mode="wrap")
    @classmethod
    def _explain_problems(cls, data: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Report every problem with the refused value and what is accepted, which pydantic's own messages omit."""
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


def resolve(request: GenerationRequest, served: ServedModel) -> GenerationParams:
    """Fill in empty fields and check the request against what is served here.

    Raises RequestRefused: an unknown sampler, too many steps for it, a size that is not served, no refiner.
    """
    empty = {"negative_prompt": None, "width": served.native_width, "height": served.native_height}
    defaults = served.defaults.model_dump() | empty | {"seed": secrets.randbelow(SEEDS)}
    chosen = defaults | request.model_dump(exclude_none=True, exclude={"stream", "preview_every"})
    chosen["scheduler"] = sampler_name(chosen["scheduler"])
    check_steps(chosen["num_inference_steps"], chosen["scheduler"])
    served.sizes.check(chosen["width"], chosen["height"])
    if chosen["use_refiner"] and not served.has_refiner:
        raise RequestRefused("use_refiner", "true is not accepted, this release has no refiner; give false.")
    return GenerationParams(**chosen)


class ImageResult(TypedDict):
    """One image of a response."""

    data: str  # base64 of the file
    seed: int  # a request with this seed and num_images 1 returns this image again
    format: ImageFormat  # png, jpeg or webp
    width: int  # pixels
    height: int  # pixels


class EngineInfo(TypedDict):
    """The release and engines that made the images."""

    release: str  # model/version
    target: str  # target key, as cuda-h200-sm90-torch2.13-cu130
    runtime: str  # aot_inductor, tensorrt or eager


class GenerationResponse(TypedDict):
    """The body of a 200. `data` repeats the first image, where callers of the older SDXL Truss expect it."""

    status: Literal["success"]  # always "success"
    data: str  # base64 of the first image's file
    time: float  # seconds from the request's arrival in the model
    images: list[ImageResult]  # in the order of their seeds
    timings: dict[str, float]  # milliseconds by stage
    warnings: list[str]  # what could not be followed: a truncated prompt, an ignored negative prompt
    engine: EngineInfo  # the release and engines that made the images
