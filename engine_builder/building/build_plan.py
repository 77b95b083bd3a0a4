"""The plan of a build: the model, the target, precisions and buckets."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from engine_builder.backends.aot_inductor import compile as compiler
from engine_builder.backends.tensorrt.options import PlanOptions
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.checkpoints.release_settings import read_model_facts
from engine_builder.networks.network import Network
from model.engines.signatures import CfgLayout
from model.errors import PreheatError
from model.loading.target import Target
from model.pipeline.spec import components_of, find_component, model_parts
from model.store.manifest import Bucket
from model.store.precision import FP16, FP32, Precision
from model.validation import LARGEST_SIDE, MAX_STEPS, SMALLEST_SIDE

_TIMESTEPS_PER_CALL = 32  # batch of a GPU's time network; a request with more steps takes several calls

Size = tuple[int, int, int]
"""Batch, height and width in pixels."""


class SizesRefused(PreheatError):
    """The model cannot generate a requested size, or the release's default size is not among them."""


def default_sizes(base: Checkpoint, target: Target) -> tuple[Size, ...]:
    """Return the sizes of a build without explicit sizes.

    On a GPU: one image of the model's native size, without and with guidance. On a CPU: empty, because its engines are
    dynamic.
    """
    if target.device != "cuda":
        return ()
    facts = read_model_facts(base, None)
    return tuple((batch, facts.native_height, facts.native_width) for batch in (1, 2))


@dataclass(frozen=True)
class BuildPlan:
    """The model and its refiner, and the target, precisions and buckets to build them for.

    `sizes`: one engine is compiled for each size and component; without sizes engines are dynamic (CPU). `tensorrt`:
    options of TensorRT engines, whose target differs from AOTInductor's; None: AOTInductor engines. `vae_precision`
    None: see `precision_of`.
    """

    model: str
    base: Checkpoint
    refiner: Checkpoint | None
    target: Target
    precision: Precision
    sizes: tuple[Size, ...] = ()
    tensorrt: PlanOptions | None = None
    vae_precision: Precision | None = None

    @property
    def components(self) -> tuple[str, ...]:
        """The components to build, each followed by its variants that have sizes."""
        sizes = self.variant_sizes
        return tuple(
            name
            for spec in components_of(model_parts(self.refiner is not None))
            for name in (spec.name, *(variant.name for variant in spec.variants if sizes.get(variant.cfg)))
        )

    @property
    def variant_sizes(self) -> dict[CfgLayout, tuple[Size, ...]]:
        """The sizes of the UNet's variants for guidance against zeros; empty if none are built.

        If batches of one and two are built, one image runs its halves concurrently: UNet and unconditional UNet. Other
        even batches run both halves in one call. Only CUDA graphs use variants, so CPU builds leave them out. TensorRT
        builds leave them out because each plan holds a copy of the weights.
        """
        if self.target.device != "cuda" or self.tensorrt:
            return {}
        if not read_model_facts(self.base, None).force_zeros_for_empty_prompt:
            return {}
        single = tuple(size for size in self.sizes if size[0] == 1 and (2, *size[1:]) in self.sizes)
        even = (size for size in self.sizes if size[0] % 2 == 0)
        return {
            "uncond": single,
            "both": tuple(size for size in even if size[0] > 2 or (1, *size[1:]) not in single),
        }

    def checkpoint_of(self, component: str) -> Checkpoint:
        """Return the checkpoint that a component is read from."""
        if find_component(component)[0].part == "base":
            return self.base
        assert self.refiner is not None
        return self.refiner

    def precision_of(self, component: str) -> Precision:
        """Return a component's precision.

        The VAE of an fp16 model is fp32 if its config has force_upcast, because it overflows in fp16. An explicit
        `vae_precision` replaces that.
        """
        if find_component(component)[0].precision_rule == "model":
            return self.precision
        if self.vae_precision is not None:
            return self.vae_precision
        return FP32 if self.precision == FP16 and self.upcasts_vae else self.precision

    @property
    def upcasts_vae(self) -> bool:
        """True if the VAE's config has force_upcast, as diffusers defaults to."""
        return bool(self.base.config("vae").get("force_upcast", True))

    def buckets_of(self, network: Network) -> list[Bucket]:
        """Return the buckets that one component is compiled for.

        The batch is one or two texts, up to 32 timesteps, the planned batches of a UNet, or one image.
        """
        spec, variant = find_component(network.component)
        if not self.sizes:
            if spec.batch_unit == "timestep":
                return [compiler.dynamic_bucket(None, MAX_STEPS)]
            return [compiler.dynamic_bucket(network.multiple)]
        sizes: Iterable[tuple[int, int | None, int | None]]
        match spec.batch_unit:
            case "text":
                sizes = ((batch, None, None) for batch in (1, 2))
            case "timestep":
                sizes = [(_TIMESTEPS_PER_CALL, None, None)]
            case "image":
                sizes = dict.fromkeys((1, height, width) for _, height, width in self.sizes)
            case "cfg_half":
                sizes = self.variant_sizes[variant.cfg] if variant else self.sizes
        return [compiler.static_bucket(*size) for size in sizes]

    @property
    def draft_name(self) -> str:
        """The name of the draft's record."""
        return f"{self.model}.{self.target.key}.{self.precision.name}"

    def check_sizes(self) -> None:
        """Raise SizesRefused for sizes that would fail after compiling, or when the release is loaded."""
        checkpoints = [self.base] + ([self.refiner] if self.refiner else [])
        step = math.lcm(*(checkpoint.size_step() for checkpoint in checkpoints))
        for batch, height, width in self.sizes:
            valid = all(SMALLEST_SIDE <= side <= LARGEST_SIDE and side % step == 0 for side in (height, width))
            if batch < 1 or not valid:
                raise SizesRefused(
                    f"{width}x{height}@{batch} is not a possible size.",
                    f"Give sides that are multiples of {step} from {SMALLEST_SIDE} to {LARGEST_SIDE}, and a batch of "
                    "at least one.",
                )
        facts = read_model_facts(self.base, None)
        height, width = facts.native_height, facts.native_width
        default = f"{self.model} generates {width}x{height} by default"
        if not self.sizes and max(height, width) > compiler.LARGEST_DYNAMIC_SIDE:
            raise SizesRefused(
                f"{default}, and engines for a CPU take sides up to {compiler.LARGEST_DYNAMIC_SIDE}.",
                f"Set a smaller default: {self._default_size_entry(1024, 1024)}.",
            )
        if self.sizes and (height, width) not in [size[1:] for size in self.sizes]:
            _, other_height, other_width = self.sizes[0]
            raise SizesRefused(
                f"{default}, and that size is not built.",
                f"Add {width}x{height}, or set another default: {self._default_size_entry(other_width, other_height)}.",
            )

    def _default_size_entry(self, width: int, height: int) -> str:
        return f'{{"width": {width}, "height": {height}}} in {self.base.root}/defaults.json'
