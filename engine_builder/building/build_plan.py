"""What a build is asked for: a model, a device, precisions and buckets."""

import math
from dataclasses import dataclass

from engine_builder.backends.aot_inductor import compile as compiler
from engine_builder.backends.tensorrt.options import Choices
from engine_builder.checkpoints.release_settings import read_settings
from engine_builder.networks.network import (
    ModelFolder,
    Network,
)
from model.api.request import (
    LARGEST_SIDE,
    SMALLEST_SIDE,
)
from model.denoising.noise_schedule import MAX_STEPS
from model.engines import components
from model.engines.components import (
    BASE_COMPONENTS,
    REFINER_COMPONENTS,
)
from model.errors import PreheatError
from model.loading.target import Target
from model.store.manifest import Bucket, Precision

_STEPS = 32  # that a GPU embeds the times of at once; more take several calls


class SizesRefused(PreheatError):
    """Sizes that the model cannot draw, or without the one that its release draws unless asked otherwise."""


def default_sizes(base: ModelFolder, target: Target) -> tuple[tuple[int, int, int], ...]:
    """The sizes of a build that names none: on a GPU one image of the model's own size, without guidance and with it;
    on a CPU none, for its engines take any."""
    if target.device != "cuda":
        return ()
    settings = read_settings(base, None)
    return tuple((rows, settings.native_height, settings.native_width) for rows in (1, 2))


@dataclass(frozen=True)
class BuildPlan:
    """What to build: a model folder (and its refiner's), for which device, in which precision and buckets.

    The VAE has a precision of its own, `vae_precision`; None: see `precision_of`.
    No `sizes` means dynamic engines (CPU); else one engine per (rows, height, width) and component. With `tensorrt` its
    runtime's engines are built, for a target of its own; else AOTInductor's.
    """

    model: str
    base: ModelFolder
    refiner: ModelFolder | None
    target: Target
    precision: Precision
    sizes: tuple[tuple[int, int, int], ...] = ()
    tensorrt: Choices | None = None
    vae_precision: Precision | None = None

    @property
    def components(self) -> tuple[str, ...]:
        guided = tuple(name for name, sizes in self.guided_sizes.items() if sizes)
        return BASE_COMPONENTS + guided + (REFINER_COMPONENTS if self.refiner else ())

    @property
    def guided_sizes(self) -> dict[str, tuple[tuple[int, int, int], ...]]:
        """The sizes of the base's engines for guidance against zeros: one row that is told no text, where there is an
        engine for one that is told one and a bucket for both; else an even number of rows in one call. For the loops of
        CUDA graphs; plans of TensorRT hold weights of their own."""
        if (
            self.target.device != "cuda"
            or self.tensorrt
            or not read_settings(self.base, None).force_zeros_for_empty_prompt
        ):
            return {}
        alone = tuple(size for size in self.sizes if size[0] == 1 and (2, *size[1:]) in self.sizes)
        together = (size for size in self.sizes if size[0] % 2 == 0)
        return {
            components.UNET_UNCONDITIONAL: alone,
            components.UNET_GUIDED: tuple(size for size in together if size[0] > 2 or (1, *size[1:]) not in alone),
        }

    def folder_of(self, component: str) -> ModelFolder:
        if component not in REFINER_COMPONENTS:
            return self.base
        assert self.refiner is not None
        return self.refiner

    def precision_of(self, component: str) -> Precision:
        """The plan's precision; unless it was chosen, fp32 for the VAE of an fp16 model whose config has force_upcast,
        which overflows in fp16 (as diffusers has it, whose default is true)."""
        if component != components.VAE_DECODER:
            return self.precision
        if self.vae_precision is not None:
            return self.vae_precision
        return "fp32" if self.precision == "fp16" and self.upcasts_vae else self.precision

    @property
    def upcasts_vae(self) -> bool:
        """Whether the VAE's config says that it does not bear fp16."""
        return bool(self.base.config("vae").get("force_upcast", True))

    def buckets_of(self, network: Network) -> list[Bucket]:
        """The buckets one component is compiled for. What reads text takes one row a text, what embeds the time one a
        step, decoders one an image."""
        if network.component in (components.UNET_TIME, components.REFINER_UNET_TIME):
            return [
                compiler.static_bucket(_STEPS, None, None) if self.sizes else compiler.dynamic_bucket(None, MAX_STEPS)
            ]
        if not self.sizes:
            return [compiler.dynamic_bucket(network.multiple)]
        if network.multiple is None:
            return [compiler.static_bucket(rows, None, None) for rows in (1, 2)]
        if network.component == components.VAE_DECODER:
            return [compiler.static_bucket(1, h, w) for h, w in dict.fromkeys((h, w) for _, h, w in self.sizes)]
        sizes = self.guided_sizes.get(network.component, self.sizes)
        return [compiler.static_bucket(*size) for size in sizes]

    @property
    def draft_name(self) -> str:
        return f"{self.model}.{self.target.key}.{self.precision}"

    def check_sizes(self) -> None:
        """Raises SizesRefused for what would fail after everything was compiled, or when the release is loaded."""
        folders = [self.base] + ([self.refiner] if self.refiner else [])
        step = math.lcm(*(folder.size_step() for folder in folders))
        for rows, height, width in self.sizes:
            sides = all(SMALLEST_SIDE <= side <= LARGEST_SIDE and side % step == 0 for side in (height, width))
            if rows < 1 or not sides:
                raise SizesRefused(
                    f"There can be no engine for {width}x{height}@{rows}: give sides that are multiples of {step} from "
                    f"{SMALLEST_SIDE} to {LARGEST_SIDE}, and one row or more."
                )
        settings = read_settings(self.base, None)
        height, width = settings.native_height, settings.native_width
        if not self.sizes and max(height, width) > compiler.LARGEST_DYNAMIC_SIDE:
            raise SizesRefused(
                f"{self.model} draws {width}x{height} unless a request asks otherwise, and a CPU's engines take sides "
                f"of up to {compiler.LARGEST_DYNAMIC_SIDE}: give it a smaller size of its own, for example "
                f'{{"width": 1024, "height": 1024}} in {self.base.root}/defaults.json.'
            )
        if self.sizes and (height, width) not in [size[1:] for size in self.sizes]:
            _, other_height, other_width = self.sizes[0]
            raise SizesRefused(
                f"{self.model} draws {width}x{height} unless a request asks otherwise, and no size here is that: add "
                f"{width}x{height}, or make another the model's own, for example "
                f'{{"width": {other_width}, "height": {other_height}}} in {self.base.root}/defaults.json.'
            )
