"""The result of a comparison of a release with diffusers or with a server (see `benchmarks.compare`)."""

from dataclasses import dataclass
from functools import cached_property

from benchmarks.rows import Row
from engine_builder.quantization.validation.contact_sheet import PicturePair
from engine_builder.quantization.validation.report import Spread, spread
from model.images.pixels import Pixels
from model.pipeline.params import GenerationParams


@dataclass(frozen=True)
class Variant:
    """What a candidate made.

    params: of the first request. pictures: one for each request, uint8 [height, width, 3]. distances: the PSNR in dB
    and 1 - MS-SSIM of each picture. load_seconds: without imports. first_seconds: of the first image after the load,
    with captured graphs and compilation. Both and the memory are None without a load. row: times of the first request.
    """

    name: str
    params: GenerationParams
    pictures: tuple[Pixels, ...]
    distances: tuple[tuple[float, float], ...]
    load_seconds: float | None
    first_seconds: float | None
    memory_bytes: int | None
    row: Row

    @property
    def seconds(self) -> float:
        """The median seconds of an image."""
        return self.row.p50 / 1000

    @property
    def psnr_decibels(self) -> Spread:
        """The PSNR of the pictures in dB."""
        return spread([decibels for decibels, _ in self.distances], min)

    @property
    def perceptual_distance(self) -> Spread:
        """1 - MS-SSIM of the pictures."""
        return spread([distance for _, distance in self.distances], max)

    def cost_of_1000(self, per_hour: float) -> float:
        """Return the cost of 1,000 images, one after the other, on a machine of this price per hour."""
        return 1000 * self.seconds * per_hour / 3600


@dataclass(frozen=True)
class Comparison:
    """All variants, the reference first. unavailable: name -> why this variant was not measured."""

    release: str
    requests: tuple[GenerationParams, ...]
    variants: tuple[Variant, ...]
    unavailable: dict[str, str]
    notes: tuple[str, ...]

    @cached_property
    def pairs(self) -> list[list[PicturePair]]:
        """By request, then by variant: thumbnails of the reference, the variant's picture and their difference."""
        reference = self.variants[0].pictures
        return [
            [PicturePair.of(number, reference[number], variant.pictures[number]) for variant in self.variants]
            for number in range(len(self.requests))
        ]
