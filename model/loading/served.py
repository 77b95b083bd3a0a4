"""The choices that a release offers to requests: sizes, refiner, and default values."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from model.denoising.sampler_specs import check_forecast, check_guidance, check_refiner, check_steps, sampler_spec
from model.deployment import Deployment, fits_pattern, is_pattern
from model.engines.signatures import clip_skip_columns, control_types, image_slots
from model.errors import ManifestError, NoEngineForTarget, RequestRefused
from model.loading.select import Selection
from model.pipeline.components import FAMILIES, find_component
from model.pipeline.spec import (
    CONTROLLED_UNET,
    CONTROLNET,
    CONTROLNET_IMAGE,
    CONTROLNET_TIME,
    IMAGE_ENCODER,
    IP_ADAPTER,
    IP_UNET,
    VAE_ENCODER,
    Family,
    controlnets_of,
    ip_adapters_of,
)
from model.request_fields import Defaults
from model.settings import ServedBucket
from model.store.manifest import Bucket, EngineRecord, Span
from model.validation import MAX_IP_IMAGES, Safety, explain


def read_defaults(entries: Mapping[str, Any]) -> Defaults:
    """Check a manifest's `defaults` against the limits of requests. Raises ManifestError naming the entry."""
    try:
        defaults = Defaults.model_validate(dict(entries))
        sampler = sampler_spec(defaults.scheduler)
        check_steps(defaults.num_inference_steps, sampler)
        check_forecast(sampler, defaults.forecast)
        check_guidance(defaults.guidance_start, defaults.guidance_end)
        if defaults.use_refiner:
            check_refiner(sampler)
    except ValidationError as error:
        problem = explain(error, Defaults)[0]
        raise ManifestError(f"The release's default for {problem.field}: {problem.message}.") from error
    except RequestRefused as error:
        raise ManifestError(f"The release's default for {error}") from error
    return defaults


@dataclass(frozen=True)
class SizeList:
    """The sizes that static engines serve, as (width, height) in pixels."""

    sizes: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        return ", ".join(f"{width}x{height}" for width, height in sorted(self.sizes))

    def check(self, width: int, height: int) -> None:
        """Raise RequestRefused, which lists the sizes, unless this size is among them."""
        if not self.holds(width, height):
            field = "height" if any(width == served for served, _ in self.sizes) else "width"
            raise RequestRefused(
                field, f"{width}x{height} is not a size served here; the sizes (width x height) are {self}."
            )

    def holds(self, width: int, height: int) -> bool:
        """True if this size is among them."""
        return (width, height) in self.sizes


@dataclass(frozen=True)
class SizeRange:
    """The sizes that dynamic engines serve: each side, in pixels, is a multiple within the bounds."""

    min_side: int
    max_side: int
    multiple: int

    def __str__(self) -> str:
        return f"sides from {self.min_side} to {self.max_side} in multiples of {self.multiple}"

    def check(self, width: int, height: int) -> None:
        """Raise RequestRefused, which states the accepted sides, unless both are accepted."""
        for name, side in (("width", width), ("height", height)):
            if not self._holds_side(side):
                raise RequestRefused(
                    name,
                    f"{side} is not served here; give a multiple of {self.multiple} "
                    f"from {self.min_side} to {self.max_side}.",
                )

    def holds(self, width: int, height: int) -> bool:
        """True if both sides are accepted."""
        return self._holds_side(width) and self._holds_side(height)

    def _holds_side(self, side: int) -> bool:
        return self.min_side <= side <= self.max_side and side % self.multiple == 0


Sizes = SizeList | SizeRange


@dataclass(frozen=True)
class ServedIpAdapter:
    """An IP-Adapter of a release. images: the most that it takes. side: the pixels of its encoder's square."""

    images: int
    side: int


@dataclass(frozen=True)
class ServedModel:
    """The choices that a deployment offers to requests. Sizes in pixels."""

    native_width: int
    native_height: int
    sizes: Sizes
    has_refiner: bool
    defaults: Defaults
    release: str = ""
    cold_sizes: tuple[tuple[int, int], ...] = ()
    """The sizes (width, height) that the start does not warm up."""
    image_sizes: Sizes | None = None
    """The sizes of requests with an image, which need the VAE encoder. None: such requests are refused."""
    requires_masks: bool = False
    """True if the UNet was trained for inpainting only."""
    takes_sizes: bool = True
    """True if the UNet is conditioned on the sizes of images, as SDXL's is."""
    max_clip_skip: int | None = None
    """None: the text encoders were built without clip_skip."""
    safety: Safety = "off"
    """The treatment of images that the safety checker flags."""
    loras: tuple[str, ...] = ()
    """The names of the adapters that requests may use, and patterns of names."""
    lora_bytes: Mapping[str, int] = field(default_factory=dict)
    """The bytes of the adapters whose names are no patterns."""
    unet_blocks: Mapping[str, int] = field(default_factory=dict)
    """The resnets of each block of the UNet that adapters change."""
    controlnets: Mapping[str, int] = field(default_factory=dict)
    """By ControlNet the number of types of control images: 0 unless it is a Union network."""
    control_sizes: Mapping[str, Sizes] = field(default_factory=dict)
    """The sizes at which each ControlNet can be used, by name."""
    ip_adapters: Mapping[str, ServedIpAdapter] = field(default_factory=dict)
    """The IP-Adapters by name."""
    ip_adapter_sizes: Sizes | None = None
    """The sizes at which IP-Adapters can be used; None without IP-Adapters."""

    def has_adapter(self, name: str) -> bool:
        """True for an adapter that the server has known since its start."""
        return name in self.loras and not is_pattern(name)

    def may_have_adapter(self, name: str) -> bool:
        """True for an adapter that requests may name, if the store has it."""
        return self.has_adapter(name) or fits_pattern(name, filter(is_pattern, self.loras))

    @property
    def warmed_sizes(self) -> tuple[tuple[int, int], ...]:
        """The sizes (width, height) that the start warms up: the listed ones, or the native one."""
        if isinstance(self.sizes, SizeList):
            return tuple(size for size in self.sizes.sizes if size not in self.cold_sizes)
        return ((self.native_width, self.native_height),)

    def is_cold(self, bucket: Bucket) -> bool:
        """True if an engine runs only at sizes that the start does not warm up."""

        def serves(sizes: Iterable[tuple[int, int]]) -> bool:
            return any(bucket.holds(bucket.batch.min, height, width) for width, height in sizes)

        return serves(self.cold_sizes) and not serves(self.warmed_sizes)


@dataclass(frozen=True)
class ServedRelease:
    """A loaded release, as far as requests and their answers name it. It can be sent to another process.

    device: the name of the GPU, or "CPU". samplers: the accepted values of `scheduler`.
    """

    served: ServedModel
    release: str
    target: str
    runtime: str
    device: str
    samplers: tuple[str, ...]


def served_model(selection: Selection, deployment: Deployment) -> ServedModel:
    """Return the choices that a deployment offers.

    Raises ManifestError or NoEngineForTarget if the release's own defaults are not served. Every request that omits
    these fields would otherwise be refused.
    """
    manifest = selection.manifest
    defaults = read_defaults(manifest.defaults)
    settings = manifest.settings
    if defaults.use_refiner and not manifest.has_refiner:
        raise ManifestError(
            f"Release {manifest.name} uses a refiner by default and contains no refiner.",
            "Build it with one (`preheat build --refiner`) and publish a new release (`preheat publish`).",
        )
    family = FAMILIES[manifest.family]
    extra_channels = selection.engines[family.base.unet][0].signature.extra_channels
    if extra_channels not in (0, 1 + settings.latent_channels):
        raise ManifestError(
            f"Release {manifest.name}: its UNet takes {extra_channels} channels after the latents. This server knows "
            f"0, and {1 + settings.latent_channels} for inpainting.",
            "Serve the release with a newer version of Preheat.",
        )
    sizes = served_sizes(selection.engines, deployment.buckets)
    try:
        sizes.check(settings.native_width, settings.native_height)
    except RequestRefused as error:
        raise NoEngineForTarget(
            f"The default size of release {manifest.name}, {settings.native_width}x{settings.native_height}, is not "
            f"loaded. {error}",
            "Build that size (`preheat build`), or add it to the config's buckets.",
        ) from error
    max_clip_skip = _max_clip_skip(family, selection.engines)
    try:
        check_clip_skip(defaults.clip_skip, max_clip_skip, manifest.name)
    except RequestRefused as error:
        raise ManifestError(f"The default of release {manifest.name} for {error}") from error
    controls = control_sizes(selection.engines, sizes)
    ip_sizes = sizes_with(selection.engines, sizes, [IP_UNET])
    return ServedModel(
        settings.native_width,
        settings.native_height,
        sizes,
        manifest.has_refiner,
        defaults,
        manifest.name,
        cold_sizes=tuple((one.width, one.height) for one in deployment.buckets if not one.warm_up),
        image_sizes=sizes_with(selection.engines, sizes, [VAE_ENCODER]),
        requires_masks=extra_channels > 0,
        takes_sizes=family.takes_sizes,
        max_clip_skip=max_clip_skip,
        safety=deployment.safety,
        loras=deployment.adapters.names,
        controlnets={
            name: control_types(selection.engines[f"{CONTROLNET_TIME}.{name}"][0].signature) for name in controls
        },
        control_sizes=controls,
        ip_adapters={} if ip_sizes is None else _served_ip_adapters(manifest.name, selection.engines),
        ip_adapter_sizes=ip_sizes,
    )


def _served_ip_adapters(release: str, engines: Mapping[str, Sequence[EngineRecord]]) -> dict[str, ServedIpAdapter]:
    """Return the IP-Adapters by name. Raises ManifestError if the UNet has no space for the tokens of an image."""
    served = {}
    for name in ip_adapters_of(engines):
        slots, most_tokens = image_slots(engines[IP_UNET][0].signature)
        tokens = int(engines[f"{IP_ADAPTER}.{name}"][0].signature.outputs[0].shape[1])
        side = int(engines[f"{IMAGE_ENCODER}.{name}"][0].signature.inputs[0].shape[2])
        if not slots or most_tokens < tokens:
            raise ManifestError(
                f"Release {release}: the IP-Adapter {name} makes {tokens} tokens of an image, and {IP_UNET} takes "
                f"{most_tokens} of each of {slots} adapters."
            )
        served[name] = ServedIpAdapter(min(most_tokens // tokens, MAX_IP_IMAGES), side)
    return served


def check_clip_skip(clip_skip: int, largest: int | None, release: str) -> None:
    """Raise RequestRefused unless the text encoders of a release have so many layers to skip.

    largest: see `ServedModel.max_clip_skip`.
    """
    if clip_skip and largest is None:
        raise RequestRefused(
            "clip_skip",
            f"{clip_skip} is not accepted, because the text encoders of release {release} were built without it. Build "
            "the model again with this version (`preheat build`) and publish a new release (`preheat publish`), or "
            "set 0.",
        )
    if clip_skip > (largest or 0):
        raise RequestRefused(
            "clip_skip",
            f"{clip_skip} is more than the layers of this release's text encoders. Set 0 to {largest}.",
        )


def _max_clip_skip(family: Family, engines: Mapping[str, Sequence[EngineRecord]]) -> int | None:
    """Return the largest clip_skip that every text encoder takes, None if one of them takes none."""
    encoders = {name for one in family.denoisers for name, _ in one.text_encoders if name in engines}
    least = min(clip_skip_columns(engines[name][0].signature) for name in encoders)
    return least - 1 if least else None


def served_sizes(engines: Mapping[str, Sequence[EngineRecord]], buckets: Sequence[ServedBucket]) -> Sizes:
    """Return the sizes that every required component with a size serves. Configured buckets limit it to their sizes."""
    if buckets:
        return SizeList(tuple(sorted({(bucket.width, bucket.height) for bucket in buckets})))
    return _common_sizes({name: records for name, records in engines.items() if not find_component(name).optional})


def sizes_with(engines: Mapping[str, Sequence[EngineRecord]], sizes: Sizes, components: Sequence[str]) -> Sizes | None:
    """Return the served `sizes` at which these optional components run too. None: there is no such size."""
    added = {name: engines.get(name, ()) for name in components}
    if not all(added.values()):
        return None
    if isinstance(sizes, SizeList):
        sized = _spans_by_component(added)
        common = SizeList(
            tuple(size for size in sizes.sizes if all(any(_holds(span, size) for span in spans) for spans in sized))
        )
        return common if common.sizes else None
    required = {name: records for name, records in engines.items() if not find_component(name).optional}
    found = _common_sizes(required | added)
    is_empty = not found.sizes if isinstance(found, SizeList) else found.min_side > found.max_side
    return None if is_empty else found


def control_sizes(engines: Mapping[str, Sequence[EngineRecord]], sizes: Sizes) -> dict[str, Sizes]:
    """Return the sizes at which each ControlNet can be used, by name. ControlNets without such a size are left out."""
    kinds = (CONTROLNET_IMAGE, CONTROLNET)
    found = {
        name: sizes_with(engines, sizes, [CONTROLLED_UNET, *(f"{kind}.{name}" for kind in kinds)])
        for name in controlnets_of(engines)
    }
    return {name: served for name, served in found.items() if served is not None}


def _common_sizes(engines: Mapping[str, Sequence[EngineRecord]]) -> Sizes:
    """Return the sizes that every component with a size serves: a range if all engines are dynamic, else a list."""
    sized = _spans_by_component(engines)
    static = {(w.min, h.min) for spans in sized for h, w in spans if h.min == h.max and w.min == w.max}
    if static or not sized:
        served = [size for size in static if all(any(_holds(span, size) for span in spans) for spans in sized)]
        return SizeList(tuple(sorted(served)))
    # If a component has several dynamic engines, the one with the largest sides decides.
    sides = [side for spans in sized for side in max(spans, key=lambda span: span[0].max)]
    return SizeRange(
        max(side.min for side in sides), min(side.max for side in sides), math.lcm(*(side.multiple for side in sides))
    )


def _spans_by_component(engines: Mapping[str, Sequence[EngineRecord]]) -> list[list[tuple[Span, Span]]]:
    """Return `_spans` of each component with a size, without variants. Each precision of a component is an entry."""
    by_component = [
        [engine for engine in records if (engine.component, engine.precision) == (name, precision)]
        for name, records in engines.items()
        for precision in {engine.precision for engine in records}
    ]
    return [spans for records in by_component if (spans := _spans(records))]


def _spans(records: Sequence[EngineRecord]) -> list[tuple[Span, Span]]:
    """Return the heights and widths of a component's engines, empty for a text encoder."""
    return [(e.bucket.height, e.bucket.width) for e in records if e.bucket.height and e.bucket.width]


def _holds(span: tuple[Span, Span], size: tuple[int, int]) -> bool:
    """True if (height, width) holds the size (width, height)."""
    return span[0].holds(size[1]) and span[1].holds(size[0])
