"""The parameters of a generation, all set. The public request (model/api/request.py) resolves to them."""

from dataclasses import dataclass

from model.validation import SEED_COUNT, ImageFormat


@dataclass(frozen=True)
class GenerationParams:
    """`scheduler` is the sampler's public name; `seed` is that of the first image. Sizes in pixels."""

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
    num_images: int = 1
    output_format: ImageFormat = "jpeg"
    quality: int = 95

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seed of each image: seed + i, modulo 2^32."""
        return tuple((self.seed + image) % SEED_COUNT for image in range(self.num_images))
