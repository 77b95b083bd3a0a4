"""The plan of a build: model, target, precisions and sizes, and the engines that follow from them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine_builder.adapters.offline import OfflineMerge
from engine_builder.backends.aot_inductor import compile as compiler
from engine_builder.backends.tensorrt.plan_options import PlanOptions
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.checkpoints.release_settings import read_model_facts
from engine_builder.networks.controlnet import components_of_controlnets
from engine_builder.networks.ip_adapter import components_of_ip_adapters
from engine_builder.networks.network import ModuleReader, Network, load_network
from engine_builder.quantization.quantization_plan import Quantization
from model.engines.features import FEATURES, GUIDED_ZEROS, LORA, engine_name, has, parse_name
from model.errors import PreheatError
from model.loading.target import Target
from model.pipeline.components import FAMILIES, find_component
from model.pipeline.spec import SAFETY_CHECKER, VAE_DECODER, ComponentSpec, model_parts
from model.store.manifest import Bucket
from model.store.precision import FP16, FP32, Precision
from model.validation import BAND_COUNTS, LARGEST_SIDE, MAX_STEPS, SMALLEST_SIDE

_TEXT_BATCHES = (1, 2)  # of a GPU's text networks: the prompt, or the prompt and the negative prompt
_TIMESTEPS_PER_CALL = 32  # batch of a GPU's time network; a request with more steps takes several calls


class Size(NamedTuple):
    """A batch of the UNet, and the height and width of its images in pixels."""

    batch: int
    height: int
    width: int


class SizesRefused(PreheatError):
    """The model cannot generate a requested size, or the release's default size is not among them."""


class CombinationRefused(PreheatError):
    """A requested UNet takes a feature that the build lacks."""

    remedy = "Add the option that builds it (--lora-rank, --controlnet, --ip-adapter), or change --combine."


def default_sizes(base: Checkpoint, target: Target) -> tuple[Size, ...]:
    """Return the sizes of a build without explicit sizes.

    A GPU gets one image of the model's native size, without and with guidance. A CPU gets no sizes, because its engines
    are dynamic.
    """
    if target.device != "cuda":
        return ()
    facts = read_model_facts(base, None)
    return tuple(Size(batch, facts.native_height, facts.native_width) for batch in (1, 2))


@dataclass(frozen=True)
class BuildPlan:
    """The model and its refiner, and the target, precisions and sizes to build them for.

    sizes: the UNet gets an engine for each. Other components get engines for the same images (`buckets_of`). Without
        sizes, engines are dynamic (CPU).
    tensorrt: options of plans, whose target differs from AOTInductor's. None: AOTInductor engines.
    more_targets: further targets that the same plans serve, if TensorRT-RTX builds them.
    quantization: how the UNets, and maybe the VAE decoder, are quantized. Required for FP8, otherwise None.
    merge: adapters that are merged into the weights of `base`; None: no adapter.
    lora_rank: of a further UNet that takes adapters as inputs; 0: it is not built.
    text_chunks: chunks of a prompt that the UNets read, if there are sizes. Dynamic engines read any number.
    vae_precision: replaces the VAE's default precision (`precision_of`).
    bands: numbers of bands of an image; for each the UNet also gets engines that compute one band.
    combine: the sets of features of further UNets. None: all of `features`, if adapters are one of at least two.
    """

    model: str
    base: Checkpoint
    refiner: Checkpoint | None
    target: Target
    precision: Precision
    sizes: tuple[Size, ...] = ()
    tensorrt: PlanOptions | None = None
    vae_precision: Precision | None = None
    more_targets: tuple[Target, ...] = ()
    quantization: Quantization | None = None
    lora_rank: int = 0
    merge: OfflineMerge | None = None
    text_chunks: int = 1
    bands: tuple[int, ...] = ()
    combine: tuple[frozenset[str], ...] | None = None

    @property
    def targets(self) -> tuple[Target, ...]:
        """All targets. The release gets a draft for each."""
        return (self.target, *self.more_targets)

    @property
    def runs_here(self) -> bool:
        """True if this machine has the target's device. Plans of TensorRT-RTX are built without their GPU."""
        return self.tensorrt is None or not self.tensorrt.plan_library.compiles_on_target

    @property
    def network_device(self) -> str:
        """The device that the networks are loaded onto."""
        return self.target.device if self.runs_here else "cpu"

    @property
    def components(self) -> tuple[str, ...]:
        """The components to build, each followed by its variants that have sizes.

        The networks of ControlNets and IP-Adapters follow, and last the UNets that take several features.
        """
        combine = self.combine
        if combine is None:
            combine = (self.features,) if len(self.features) > 1 and has(self.features, "adapts") else ()
        unet = FAMILIES[self.base.family].base.unet
        names = (*self._of_one_feature, *(engine_name(unet, features) for features in combine))
        return tuple(dict.fromkeys(names))

    @property
    def features(self) -> frozenset[str]:
        """The features with inputs that UNets of this build take."""
        found = frozenset[str]().union(*(find_component(name).features for name in self._of_one_feature))
        return frozenset(name for name in found if FEATURES[name].inputs)

    @property
    def _of_one_feature(self) -> tuple[str, ...]:
        """The components without the UNets of `combine`."""
        family = FAMILIES[self.base.family]
        of_model: list[str] = []
        for spec in family.specs(*model_parts(self.refiner is not None)):
            of_model += [spec.name, *(self._variants(spec.name) if spec.name == family.base.unet else ())]
        if self.lora_rank:
            name = engine_name(family.base.unet, {LORA})
            of_model += [name, *self._variants(name)]
        checker = (SAFETY_CHECKER,) if self.base.safety_checker else ()
        of_inputs = components_of_controlnets(self.base) + components_of_ip_adapters(self.base)
        names = (*of_model, *checker, *of_inputs)
        added = dict.fromkeys(find_component(name).adds_to for name in names)
        return (*names, *(engine_name(family.base.unet, {feature}) for feature in added if feature))

    @property
    def guided_sizes(self) -> tuple[Size, ...]:
        """The sizes of the UNets' variants for images guided against zeros: sizes with an even batch, or none.

        Only CUDA graphs use them, so CPU builds leave them out. Plans leave them out because each plan holds a copy
        of the weights.
        """
        if self.target.device != "cuda" or self.tensorrt:
            return ()
        if not read_model_facts(self.base, refiner=None).force_zeros_for_empty_prompt:
            return ()
        return tuple(size for size in self.sizes if size.batch % 2 == 0)

    def _variants(self, unet: str) -> list[str]:
        """Return the names of a UNet's variants that have sizes: for guidance against zeros, and for bands."""
        component, features, _ = parse_name(unet)
        paired = engine_name(component, features | {GUIDED_ZEROS})
        in_bands = [] if features else [engine_name(unet, bands=bands) for bands in BAND_COUNTS if bands in self.bands]
        of_bands = [name for name in in_bands if not self.sizes or self._sizes_of(find_component(name))]
        return [*([paired] if self.guided_sizes else ()), *of_bands]

    def _sizes_of(self, spec: ComponentSpec) -> tuple[Size, ...]:
        """Return the sizes of a UNet, or of a variant."""
        sizes = self.guided_sizes if has(spec.features, "paired") else self.sizes
        multiple = spec.bands * self.base.size_step()
        return tuple(size for size in sizes if spec.bands == 1 or size.height % multiple == 0)

    def checkpoint_of(self, component: str) -> Checkpoint:
        """Return the checkpoint that a component is read from."""
        if find_component(component).part == "base":
            return self.base
        assert self.refiner is not None
        return self.refiner

    def precision_of(self, component: str) -> Precision:
        """Return a component's precision.

        The UNets have an 8-bit precision, and so has the VAE decoder if it is quantized. The other components of such a
        model, also ControlNets, are fp16. The VAE of an fp16 model is fp32 if its config has force_upcast, because it
        overflows in fp16. An explicit `vae_precision` replaces that.
        """
        spec = find_component(component)
        if component == VAE_DECODER and self.quantizes_vae:
            return self.precision
        if spec.precision_rule == "model":
            return self.precision if spec.is_quantizable else self.precision.unquantized
        return self.unquantized_vae_precision

    @property
    def unquantized_vae_precision(self) -> Precision:
        """The precision of the VAE, apart from a decoder that is quantized."""
        if self.vae_precision is not None:
            return self.vae_precision
        return FP32 if self.precision.unquantized == FP16 and self.upcasts_vae else self.precision.unquantized

    @property
    def quantizes_vae(self) -> bool:
        """True if the VAE decoder is quantized."""
        return self.quantization is not None and self.quantization.covers(VAE_DECODER)

    def load(self, component: str, reader: ModuleReader) -> Network:
        """Load a component's network for the build, quantized if its precision is. Raises as `load_network` does."""
        precision = self.precision_of(component)
        network = load_network(
            self.checkpoint_of(component),
            component,
            precision.unquantized,
            self.network_device,
            reader,
            plain=self.tensorrt is not None,
            lora_rank=self.lora_rank,
            text_chunks=self.unet_chunks,
        )
        if not precision.is_quantized:
            return network
        assert self.quantization is not None
        return self.quantization.apply(network)[0]

    @property
    def unet_chunks(self) -> int | None:
        """The chunks of text that the UNets read; None: any number."""
        return self.text_chunks if self.sizes else None

    @property
    def upcasts_vae(self) -> bool:
        """True if the VAE's config has force_upcast, as diffusers defaults to. Only its SDXL pipelines read it."""
        return self.base.family == "sdxl" and bool(self.base.config("vae").get("force_upcast", True))

    def buckets_of(self, network: Network) -> list[Bucket]:
        """Return the buckets that one component is compiled for.

        With sizes the batch is 1 or 2 texts, 32 timesteps, 1 image or reference image, or the batch of each size for a
        UNet. Without sizes there is one dynamic bucket.
        """
        spec = find_component(network.component)
        if not self.sizes:
            if spec.batch_unit == "timestep":
                return [compiler.dynamic_bucket(multiple=None, max_batch=MAX_STEPS)]
            return [compiler.dynamic_bucket(network.multiple)]
        return [compiler.static_bucket(*shape) for shape in self._shapes_of(spec)]

    def engine_count(self, component: str) -> int:
        """Return the number of engines of a component, also of those that the store has."""
        return len(self._shapes_of(find_component(component))) if self.sizes else 1

    def _shapes_of(self, spec: ComponentSpec) -> Sequence[tuple[int, int | None, int | None]]:
        """Return the batch, height and width of each static engine of a component."""
        match spec.batch_unit:
            case "text":
                return [(batch, None, None) for batch in _TEXT_BATCHES]
            case "timestep":
                return [(_TIMESTEPS_PER_CALL, None, None)]
            case "scaled_image":
                return [(1, None, None)]
            case "image":
                return list(dict.fromkeys(size._replace(batch=1) for size in self.sizes))
            case "cfg_half":
                return self._sizes_of(spec)

    def draft_name(self, target: Target) -> str:
        """Return the name of the record of a target's draft in the store.

        A build with other sizes or another `vae_precision` replaces the draft: a release has one draft for each target
        and precision.
        """
        return f"{self.model}.{target.key}.{self.precision.name}"

    def check_combinations(self) -> None:
        """Raise CombinationRefused for a set of `combine` with a feature that the build lacks."""
        for features in self.combine or ():
            if lacking := sorted(features - self.features):
                raise CombinationRefused(
                    f"A UNet with {'+'.join(sorted(features))} needs {' and '.join(lacking)}. This build has "
                    f"{', '.join(sorted(self.features)) or 'no such feature'}."
                )

    def check_sizes(self) -> None:
        """Raise SizesRefused for sizes that would fail after compiling, or when the release is loaded."""
        checkpoints = [self.base] if self.refiner is None else [self.base, self.refiner]
        multiple = math.lcm(*(checkpoint.size_step() for checkpoint in checkpoints))
        for size in self.sizes:
            sides = (size.height, size.width)
            are_possible = all(SMALLEST_SIDE <= side <= LARGEST_SIDE and side % multiple == 0 for side in sides)
            if size.batch < 1 or not are_possible:
                raise SizesRefused(
                    f"{size.width}x{size.height}@{size.batch} is not a possible size.",
                    f"Give sides that are multiples of {multiple} from {SMALLEST_SIDE} to {LARGEST_SIDE}, and a batch "
                    "of at least one.",
                )
            if self.quantizes_vae and self._decoder_elements(size) >= 2**31:
                raise SizesRefused(
                    f"{size.width}x{size.height} is too large for a VAE decoder in {self.precision}.",
                    "Build without this size, or with a policy without vae_convolutions.",
                )
        for bands in self.bands:
            multiple = bands * self.base.size_step()
            if not self.sizes and 64 + 5 * multiple > compiler.LARGEST_DYNAMIC_SIDE:
                raise SizesRefused(
                    f"Engines for any size take sides up to {compiler.LARGEST_DYNAMIC_SIDE}, and {bands} bands need "
                    f"heights in steps of {multiple}.",
                    f"Build for explicit sizes (--size), or without --bands {bands}.",
                )
            if self.sizes and not any(size.height % multiple == 0 for size in self.sizes):
                raise SizesRefused(
                    f"No size of this build can be divided into {bands} bands.",
                    f"Add a size whose height is a multiple of {multiple}, or build without --bands {bands}.",
                )
        facts = read_model_facts(self.base, refiner=None)
        height, width = facts.native_height, facts.native_width
        default = f"{self.model} generates {width}x{height} by default"
        if not self.sizes and max(height, width) > compiler.LARGEST_DYNAMIC_SIDE:
            side = compiler.LARGEST_DYNAMIC_SIDE
            raise SizesRefused(
                f"{default}, and engines for a CPU take sides up to {side}.",
                f"Set a smaller default: {self._default_size_entry(side, side)}.",
            )
        if self.sizes and not any((size.height, size.width) == (height, width) for size in self.sizes):
            first = self.sizes[0]
            raise SizesRefused(
                f"{default}, and that size is not built.",
                f"Add {width}x{height}, or set another default: {self._default_size_entry(first.width, first.height)}.",
            )

    def _decoder_elements(self, size: Size) -> int:
        """Return the elements of the decoder's largest tensor: the last level begins with the channels before it."""
        channels = self.base.config("vae")["block_out_channels"]
        return size.height * size.width * int(max(channels[:2]))

    def _default_size_entry(self, width: int, height: int) -> str:
        """Return the entry of the model's defaults.json that sets its default size, and the file's path."""
        return f'{{"width": {width}, "height": {height}}} in {self.base.root}/defaults.json'
