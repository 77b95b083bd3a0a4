"""The components of each model family's pipeline as data. The builder, the loader and the server iterate these tables.

A component is one network, and `ComponentSpec` has its facts. A new network is an entry here, a wrapper in the builder,
and a stage that uses it (model/pipeline/stages.py). Imports no torch.
"""

from collections.abc import Callable, Collection, Container, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from model.engines import signatures
from model.store.manifest import Family, Signature
from model.store.precision import Dtype
from model.validation import BAND_COUNTS

Part = Literal["base", "refiner"]
"""The checkpoint that a component is read from, and the UNet that it serves."""
Phase = Literal["prompt", "request", "step", "image"]
"""A component runs once for each prompt, request, denoising step or finished image."""
BatchUnit = Literal["text", "scaled_image", "timestep", "cfg_half", "image"]
"""The unit of a component's batch. Only the last two have a height and a width. A scaled image has one size."""
Stream = Literal["first_text", "text", "denoising", "encoding", "decoding"]
"""The CUDA stream that a component runs on. Components of one stream never overlap."""


@dataclass(frozen=True)
class Variant:
    """Further engines of a component. Weights and signature are the component's.

    `name`: the variant's name in a manifest. `wrapper`: its entry in `engine_builder.networks.wrappers`. `guided`: they
    serve only batches of images that are guided against zeros. `bands`: so many ranks run such an engine together, each
    for a band of the image (`model.engines.row_exchange`).
    """

    name: str
    wrapper: str
    guided: bool = False
    bands: int = 1


@dataclass(frozen=True)
class ComponentSpec:
    """One network of the pipeline.

    name: its name in a manifest.
    part, checkpoint_folder: where its weights are read from.
    wrapper: its entry in `engine_builder.networks.wrappers`.
    signature: the tensors that it takes and returns, for the widths of a network of its kind.
    batch_unit: what one entry of its batch is.
    stream: the CUDA stream that it runs on.
    by_step: with phase "step", the inputs that differ by step. Conditioning has one entry for each step for these
        inputs, and one entry for all steps for the others.
    feeds: with phase "step", the UNet before which the component runs. Its outputs are inputs of the UNet by name.
    replaces: the UNet that the component replaces in steps with a ControlNet or an IP-Adapter. Their weights are the
        same.
    precision_rule: "vae" if `force_upcast` of the VAE's config may require fp32.
    same_as: a component whose engines serve this one too if both have the same weights.
    variants: its further engines.
    low_rank_of: a UNet that this one replaces for images with adapters, which it takes as inputs. Their weights are the
        same. It is built and loaded only if adapters are asked for.
    optional: true if releases may lack it, or have it for fewer sizes. Requests that need it are then refused.
    """

    name: str
    part: Part
    checkpoint_folder: str
    wrapper: str
    signature: Callable[[Any, Dtype], Signature]
    phase: Phase
    batch_unit: BatchUnit
    stream: Stream = "text"
    by_step: tuple[str, ...] = ()
    feeds: str = ""
    replaces: str = ""
    precision_rule: Literal["model", "vae"] = "model"
    same_as: str = ""
    variants: tuple[Variant, ...] = ()
    low_rank_of: str = ""
    optional: bool = False


@dataclass(frozen=True)
class Denoiser:
    """One UNet, and the components that condition it.

    `text_encoders`: pairs of component and tokenizer, of every family. The last encoder's pooled text is used if the
    UNet takes one.
    """

    part: Part
    text_encoders: tuple[tuple[str, str], ...]
    unet_text: str
    unet_time: str
    unet: str

    def encoders(self, available: Container[str]) -> tuple[tuple[str, str], ...]:
        """Return the pairs of `text_encoders` whose component is `available`."""
        return tuple(pair for pair in self.text_encoders if pair[0] in available)


TEXT_ENCODER = "text_encoder"
TEXT_ENCODER_FINAL = "text_encoder_final"
TEXT_ENCODER_2 = "text_encoder_2"
UNET_TEXT = "unet_text"
UNET_TIME = "unet_time"
UNET = "unet"
UNET_GUIDED = "unet_guided"
UNET_LORA = "unet_lora"
UNET_CONTROLLED = "unet_controlled"
CONTROLNET = "controlnet"
CONTROLNET_TEXT = "controlnet_text"
CONTROLNET_TIME = "controlnet_time"
CONTROLNET_IMAGE = "controlnet_image"
UNET_IP = "unet_ip"
IP_ADAPTER = "ip_adapter"
IMAGE_ENCODER = "image_encoder"
VAE_ENCODER = "vae_encoder"
VAE_DECODER = "vae_decoder"
SAFETY_CHECKER = "safety_checker"
REFINER_TEXT_ENCODER_2 = "refiner_text_encoder_2"
REFINER_UNET_TEXT = "refiner_unet_text"
REFINER_UNET_TIME = "refiner_unet_time"
REFINER_UNET = "refiner_unet"

_GUIDED_VARIANT = Variant(UNET_GUIDED, "GuidedUnetNetwork", guided=True)
_BAND_VARIANTS = tuple(Variant(f"{UNET}_{bands}_bands", "BandUnetNetwork", bands=bands) for bands in BAND_COUNTS)


def _unet_components(part: Part, prefix: str, variants: tuple[Variant, ...]) -> tuple[ComponentSpec, ...]:
    """Return the three networks that a UNet is divided into, by how often each of them runs."""
    folder, by_step = "unet", ("time_embeds",)
    return (
        ComponentSpec(
            f"{prefix}unet_text", part, folder, "UnetTextNetwork", signatures.unet_text_signature, "prompt", "text"
        ),
        ComponentSpec(
            f"{prefix}unet_time", part, folder, "UnetTimeNetwork", signatures.unet_time_signature, "request", "timestep"
        ),
        ComponentSpec(
            f"{prefix}unet", part, folder, "UnetNetwork", signatures.unet_signature, "step", "cfg_half", "denoising",
            by_step, variants=variants,
        ),
    )  # fmt: skip


Components = dict[str, ComponentSpec]


def _table(*specs: ComponentSpec) -> Components:
    return {spec.name: spec for spec in specs}


_IMAGE_COMPONENTS = (
    *_unet_components("base", "", (_GUIDED_VARIANT, *_BAND_VARIANTS)),
    ComponentSpec(
        VAE_ENCODER, "base", "vae", "VaeEncoderNetwork", signatures.vae_encoder_signature, "request", "image",
        "encoding", precision_rule="vae", optional=True,
    ),
    ComponentSpec(
        VAE_DECODER, "base", "vae", "VaeDecoderNetwork", signatures.vae_decoder_signature, "image", "image", "decoding",
        precision_rule="vae",
    ),
)  # fmt: skip
SDXL = _table(
    ComponentSpec(
        TEXT_ENCODER, "base", "text_encoder", "TextNetwork", signatures.text_signature, "prompt", "text", "first_text"
    ),
    ComponentSpec(
        TEXT_ENCODER_2, "base", "text_encoder_2", "PooledTextNetwork", signatures.pooled_text_signature, "prompt",
        "text",
    ),
    *_IMAGE_COMPONENTS,
    ComponentSpec(
        REFINER_TEXT_ENCODER_2, "refiner", "text_encoder_2", "PooledTextNetwork", signatures.pooled_text_signature,
        "prompt", "text", same_as=TEXT_ENCODER_2,
    ),
    *_unet_components("refiner", "refiner_", ()),
)  # fmt: skip
SD = _table(
    ComponentSpec(
        TEXT_ENCODER_FINAL, "base", "text_encoder", "FinalTextNetwork", signatures.text_signature, "prompt", "text"
    ),
    *_IMAGE_COMPONENTS,
)
"""Stable Diffusion 1 and 2. Its text encoder is not SDXL's first one: the UNet reads another layer of it."""

FAMILIES: dict[Family, Components] = {"sdxl": SDXL, "sd": SD}
"""The components of each family by name, in the order in which they are built. Variants are entries of theirs."""
LOW_RANK = _table(
    ComponentSpec(
        UNET_LORA, "base", "unet", "LowRankUnetNetwork", signatures.lora_unet_signature, "step", "cfg_half",
        "denoising", ("time_embeds",), low_rank_of=UNET, optional=True,
        variants=(Variant(f"{UNET_LORA}_guided", "GuidedLowRankUnetNetwork", guided=True),),
    ),
)  # fmt: skip
"""UNets that any family may have in addition."""
SAFETY = _table(
    ComponentSpec(
        SAFETY_CHECKER, "base", "safety_checker", "SafetyCheckerNetwork", signatures.safety_checker_signature, "image",
        "scaled_image", "decoding", optional=True,
    ),
)  # fmt: skip
"""A network that any family may have in addition. It is built and loaded only if it is asked for."""
COMPONENTS: Components = SDXL | SD | LOW_RANK | SAFETY
"""The components of all families. A name means the same network in each of them."""

CONTROL_COMPONENTS = _table(
    ComponentSpec(
        UNET_CONTROLLED, "base", "unet", "ControlledUnetNetwork", signatures.controlled_unet_signature, "step",
        "cfg_half", "denoising", ("time_embeds",), replaces=UNET, optional=True,
    ),
    ComponentSpec(
        CONTROLNET_TEXT, "base", CONTROLNET, "ControlnetTextNetwork", signatures.unet_text_signature, "prompt", "text",
        optional=True,
    ),
    ComponentSpec(
        CONTROLNET_TIME, "base", CONTROLNET, "ControlnetTimeNetwork", signatures.controlnet_time_signature, "request",
        "timestep", optional=True,
    ),
    ComponentSpec(
        CONTROLNET_IMAGE, "base", CONTROLNET, "ControlnetImageNetwork", signatures.controlnet_image_signature,
        "request", "image", optional=True,
    ),
    ComponentSpec(
        CONTROLNET, "base", CONTROLNET, "ControlnetNetwork", signatures.controlnet_signature, "step", "cfg_half",
        "denoising", ("time_embeds", signatures.CONTROL_SCALE), feeds=UNET_CONTROLLED, optional=True,
    ),
)  # fmt: skip
"""The components of releases with ControlNets: a UNet that takes their outputs, and the networks that each ControlNet
is divided into. "controlnet_time.canny" is the time network of the ControlNet "canny"."""

IP_COMPONENTS = _table(
    ComponentSpec(
        UNET_IP, "base", "unet", "ImagePromptUnetNetwork", signatures.ip_unet_signature, "step", "cfg_half",
        "denoising", ("time_embeds",), replaces=UNET, optional=True,
    ),
    ComponentSpec(
        IMAGE_ENCODER, "base", IMAGE_ENCODER, "ImageEncoderNetwork", signatures.image_encoder_signature, "request",
        "scaled_image", optional=True,
    ),
    ComponentSpec(
        IP_ADAPTER, "base", IP_ADAPTER, "IpAdapterNetwork", signatures.ip_adapter_signature, "request", "scaled_image",
        optional=True,
    ),
)  # fmt: skip
"""The components of releases with IP-Adapters: a UNet that takes keys and values of reference images, and for each
adapter its image encoder and itself. "image_encoder.style" is the encoder of the adapter "style"."""
ADDED_COMPONENTS: Components = CONTROL_COMPONENTS | IP_COMPONENTS
"""The components that a build adds by name: those of ControlNets and IP-Adapters."""

BASE = Denoiser(
    "base",
    ((TEXT_ENCODER_FINAL, "tokenizer"), (TEXT_ENCODER, "tokenizer"), (TEXT_ENCODER_2, "tokenizer_2")),
    UNET_TEXT,
    UNET_TIME,
    UNET,
)
REFINER = Denoiser(
    "refiner", ((REFINER_TEXT_ENCODER_2, "tokenizer_2"),), REFINER_UNET_TEXT, REFINER_UNET_TIME, REFINER_UNET
)


def model_parts(has_refiner: bool) -> tuple[Part, ...]:
    """Return the parts of a model without or with a refiner."""
    return ("base", "refiner") if has_refiner else ("base",)


def components_of(family: Family, parts: Collection[Part]) -> tuple[ComponentSpec, ...]:
    """Return a family's components of these parts, in the order of its table."""
    return tuple(spec for spec in FAMILIES[family].values() if spec.part in parts)


def tokenizers_of(family: Family) -> tuple[str, ...]:
    """Return the names of a family's tokenizers, each once."""
    return tuple(dict.fromkeys(tokenizer for _, tokenizer in BASE.encoders(FAMILIES[family])))


def find_component(name: str, components: Components = COMPONENTS) -> tuple[ComponentSpec, Variant | None]:
    """Return the component that has this name in a manifest, or whose variant has it, and that variant."""
    for spec in components.values():
        for variant in spec.variants:
            if variant.name == name:
                return spec, variant
    kind, _, own_name = name.partition(".")
    if kind in ADDED_COMPONENTS:
        spec = ADDED_COMPONENTS[kind]
        folder = f"{spec.checkpoint_folder}.{own_name}"
        return (replace(spec, name=name, checkpoint_folder=folder) if own_name else spec), None
    return components[name], None


def control_components(controlnets: Collection[str]) -> tuple[ComponentSpec, ...]:
    """Return the components that a build with these ControlNets may add, in the order in which they are built."""
    if not controlnets:
        return ()
    kinds = (CONTROLNET_TEXT, CONTROLNET_TIME, CONTROLNET_IMAGE, CONTROLNET)
    names = [UNET_CONTROLLED, *(f"{kind}.{controlnet}" for controlnet in controlnets for kind in kinds)]
    return tuple(find_component(name)[0] for name in names)


def controlnets_of(components: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the ControlNets that are among the components of a release, in their order."""
    prefix = f"{CONTROLNET}."
    return tuple(name.removeprefix(prefix) for name in components if name.startswith(prefix))


def ip_components(adapters: Collection[str]) -> tuple[ComponentSpec, ...]:
    """Return the components that a build with these IP-Adapters adds, in the order in which they are built."""
    if not adapters:
        return ()
    names = [UNET_IP, *(f"{kind}.{adapter}" for adapter in adapters for kind in (IMAGE_ENCODER, IP_ADAPTER))]
    return tuple(find_component(name)[0] for name in names)


def ip_adapters_of(components: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the IP-Adapters that are among the components of a release, in their order."""
    prefix = f"{IP_ADAPTER}."
    return tuple(name.removeprefix(prefix) for name in components if name.startswith(prefix))


def unets(components: Components = COMPONENTS) -> tuple[ComponentSpec, ...]:
    """Return the UNets, without those that replace one of them for images with adapters."""
    return tuple(spec for spec in loop_unets(components) if not spec.low_rank_of)


def loop_unets(components: Components = COMPONENTS) -> tuple[ComponentSpec, ...]:
    """Return the components that denoising loops run."""
    return tuple(spec for spec in components.values() if spec.phase == "step" and not spec.feeds)


def step_components(
    unet: str, available: Container[str], components: Components = COMPONENTS
) -> tuple[tuple[ComponentSpec, ...], list[str]]:
    """Return the `available` components that run in each step of a UNet, and the names of inputs that differ by step.

    The components are in the order in which they run, the UNet last.
    """
    before = (spec for spec in components.values() if spec.feeds == unet and spec.name in available)
    specs = (*before, components[unet])
    return specs, [name for spec in specs for name in spec.by_step]


def controlled_unet(unet: str) -> str:
    """Return the component that replaces a UNet in steps with a ControlNet, or "" if the UNet has none."""
    return next((spec.name for spec in CONTROL_COMPONENTS.values() if spec.replaces == unet), "")


def ip_unet(unet: str) -> str:
    """Return the component that replaces a UNet in steps with an IP-Adapter, or "" if the UNet has none."""
    return next((spec.name for spec in IP_COMPONENTS.values() if spec.replaces == unet), "")


def control_inputs_by_step(controlnets: Iterable[str]) -> list[str]:
    """Return the names of the inputs of ControlNets that differ by step, as an image's conditioning has them."""
    by_step = CONTROL_COMPONENTS[CONTROLNET].by_step
    return [signatures.control_input(controlnet, name) for controlnet in controlnets for name in by_step]
