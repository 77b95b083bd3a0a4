"""The parameters of a generation, all set. The public request (model/request_fields.py) resolves to them."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from model.denoising.sampler_specs import sampler_spec
from model.validation import SEED_COUNT, Forecast, ImageFormat, PromptSyntax

if TYPE_CHECKING:  # the request's schema is needed before numpy is imported
    from model.adapters.layers import AdapterSet
    from model.images.metadata import Metadata
    from model.images.pixels import Pixels

REPAINTED_LEVEL = 128  # of 0 to 255; diffusers' `VaeImageProcessor.binarize` has the same threshold, 0.5

Task = Literal["text_to_image", "image_to_image", "inpaint"]


@dataclass(frozen=True)
class Mask:
    """A part of the image to repaint, with its own prompts and strength.

    levels: uint8 [height, width]. Pixels with a level of at least 128 are repainted. `composite` blends by the level.
    """

    levels: "Pixels" = field(compare=False, repr=False)
    prompt: str
    negative_prompt: str | None
    strength: float


@dataclass(frozen=True)
class Control:
    """The use of a ControlNet.

    levels: the control image, uint8 [height, width, 3] (RGB).
    scale: what the network's outputs are multiplied by.
    start, end: the shares of the base's steps after which the network begins and ends.
    mode: the type of the control image, for a Union network; None: another network.
    """

    name: str
    levels: "Pixels" = field(compare=False, repr=False)
    scale: float
    start: float
    end: float
    mode: int | None = None


@dataclass(frozen=True)
class ImagePrompt:
    """The use of an IP-Adapter.

    levels: the reference images as its image encoder takes them, uint8 [images, side, side, 3] (RGB).
    scale: what the attention to the images is multiplied by.
    """

    name: str
    levels: "Pixels" = field(compare=False, repr=False)
    scale: float


@dataclass(frozen=True)
class GenerationParams:
    """`scheduler` is the sampler's public name; `seed` is that of the first image. Sizes in pixels.

    image: the image to start from, uint8 [height, width, 3] (RGB); None: noise.
    strength: the share of the steps that run, if there is an image and no mask.
    masks: the parts of the image to repaint, one after the other, each on the result of the one before.
    loras: the adapters, by name, with their scales.
    controls: the ControlNets that the base's steps use, each with another name.
    image_prompts: the IP-Adapters that the base's steps use, each with another name.
    metadata: what the files of the images state; None: nothing.
    composite, color_match, upscale: see `model.scheduling.output_workers`.
    prompt_syntax: see `model.prompts.weighted_prompt`.
    original_size, target_size: height and width that an SDXL is conditioned on; None: those of the image.
    crop: top and left that an SDXL is conditioned on.
    guidance_start, guidance_end: the shares of the steps after which guidance begins and ends.
    forecast: see `model.denoising.forecast`. A sampler that does not offer it evaluates all steps.
    clip_skip: layers of the text encoders that are skipped before the one that the UNet was trained with.
    timesteps, sigmas: see `model.denoising.samplers.sampler_schedule`.
    """

    prompt: str
    negative_prompt: str | None
    width: int
    height: int
    num_inference_steps: int
    guidance_scale: float
    guidance_end: float
    scheduler: str
    use_refiner: bool
    denoising_frac: float
    seed: int
    num_images: int = 1
    output_format: ImageFormat = "jpeg"
    quality: int = 95

    image: "Pixels | None" = field(default=None, compare=False, repr=False)
    strength: float = 1.0
    masks: tuple[Mask, ...] = ()
    controls: tuple[Control, ...] = ()
    image_prompts: tuple[ImagePrompt, ...] = ()
    composite: bool = False
    color_match: bool = False
    upscale: int = 1
    prompt_syntax: PromptSyntax = "plain"
    original_size: tuple[int, int] | None = None
    crop: tuple[int, int] = (0, 0)
    target_size: tuple[int, int] | None = None
    clip_skip: int = 0
    guidance_start: float = 0.0
    guidance_rescale: float = 0.0
    forecast: Forecast = "off"
    timesteps: tuple[int, ...] | None = None
    sigmas: tuple[float, ...] | None = None

    loras: "AdapterSet" = ()
    metadata: "Metadata | None" = field(default=None, compare=False, repr=False)

    @property
    def used_forecast(self) -> Forecast:
        """The level of the forecasts: off if the sampler does not offer the release's default."""
        return self.forecast if self.forecast in sampler_spec(self.scheduler).forecasts else "off"

    @property
    def task(self) -> Task:
        """The kind of request, as metrics name it."""
        if self.masks:
            return "inpaint"
        return "text_to_image" if self.image is None else "image_to_image"

    def passes(self) -> "tuple[GenerationParams, ...]":
        """Return the parameters of each pass over all stages: one for each mask, which has the mask's prompts."""
        return tuple(
            replace(
                self,
                prompt=mask.prompt,
                negative_prompt=mask.negative_prompt,
                strength=mask.strength,
                masks=(mask,),
            )
            for mask in self.masks
        ) or (self,)

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seed of each image: seed + i, modulo 2^32."""
        return tuple((self.seed + image) % SEED_COUNT for image in range(self.num_images))
