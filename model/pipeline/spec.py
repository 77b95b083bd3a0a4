"""What a component and a family are, and the components that any family may have in addition.

The builder, the loader and the server iterate these tables and those of `model.pipeline.families`.
A component is one network, and `ComponentSpec` has its facts. A new network is an entry of a table, a wrapper in the
builder, and a stage that uses it (model/pipeline/stages.py). Imports no torch.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from model.engines import signatures
from model.store.manifest import Family as FamilyName
from model.store.manifest import ModelFacts, RefinerFacts, Signature
from model.store.precision import Dtype

if TYPE_CHECKING:
    import torch

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


Components = dict[str, ComponentSpec]
EncodeTexts = Callable[[str, str], "dict[str, torch.Tensor]"]
"""Runs a text encoder on what its tokenizer made of the texts of a request. Returns its outputs for all chunks."""
Pair = tuple[int, int]
TimeIds = tuple[list[float], list[float]]
"""Sizes and scores that a UNet is conditioned on, of the conditional and of the unconditional half."""


@dataclass(frozen=True)
class Denoiser:
    """One UNet, and the components that condition it, by role.

    text_encoders: pairs of component and tokenizer.
    text: computes keys and values of encoded texts. time: computes embeddings of timesteps. unet: runs in each step.
    """

    part: Part
    text_encoders: tuple[tuple[str, str], ...]
    text: str
    time: str
    unet: str


@dataclass(frozen=True, eq=False)
class Family:
    """What differs between the families of models.

    title: its name in messages. pipelines: a pattern of the classes in model_index.json, diffusers' own and those of
        community pipelines.
    components: those of base and refiner by name, in the order in which they are built. Variants are entries of theirs.
    denoisers: the base's, and the refiner's if the family has refiners.
    vae_scaling: the scaling factor of its latents.
    encode_prompt: runs a denoiser's text encoders with the given function. Returns hidden states
        [chunks, tokens, width] and pooled texts [chunks, width], or None if the UNets take none.
    takes_sizes: true if UNets are conditioned on sizes.
    time_ids: the numbers of the original size, of the crop (top and left) and of the target size, for the facts of a
        base or a refiner.
    time_inputs: the inputs of a time network for one text by name, of its pooled text and its `time_ids`.
    """

    name: FamilyName
    title: str
    pipelines: str
    components: Components
    denoisers: tuple[Denoiser, ...]
    vae_scaling: float
    takes_sizes: bool
    encode_prompt: "Callable[[Denoiser, EncodeTexts], tuple[torch.Tensor, torch.Tensor | None]]"
    time_ids: Callable[[Pair, Pair, Pair, ModelFacts | RefinerFacts], TimeIds]
    time_inputs: "Callable[[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]"

    @property
    def base(self) -> Denoiser:
        """The denoiser of the base."""
        return self.denoisers[0]

    @property
    def tokenizers(self) -> tuple[str, ...]:
        """The names of its tokenizers, each once."""
        return tuple(dict.fromkeys(tokenizer for _, tokenizer in self.base.text_encoders))

    def denoiser(self, part: Part) -> Denoiser | None:
        """Return the denoiser of a part, or None for the refiner of a family without refiners."""
        return next((denoiser for denoiser in self.denoisers if denoiser.part == part), None)

    def specs(self, *parts: Part) -> tuple[ComponentSpec, ...]:
        """Return its components of these parts, in the order of its table."""
        return tuple(spec for spec in self.components.values() if spec.part in parts)


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


def table(*specs: ComponentSpec) -> Components:
    """Return components by name."""
    return {spec.name: spec for spec in specs}


LOW_RANK = table(
    ComponentSpec(
        UNET_LORA, "base", "unet", "LowRankUnetNetwork", signatures.lora_unet_signature, "step", "cfg_half",
        "denoising", ("time_embeds",), low_rank_of=UNET, optional=True,
        variants=(Variant(f"{UNET_LORA}_guided", "GuidedLowRankUnetNetwork", guided=True),),
    ),
)  # fmt: skip
"""UNets that any family may have in addition."""
SAFETY = table(
    ComponentSpec(
        SAFETY_CHECKER, "base", "safety_checker", "SafetyCheckerNetwork", signatures.safety_checker_signature, "image",
        "scaled_image", "decoding", optional=True,
    ),
)  # fmt: skip
"""A network that any family may have in addition. It is built and loaded only if it is asked for."""
CONTROL_COMPONENTS = table(
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

IP_COMPONENTS = table(
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


def model_parts(has_refiner: bool) -> tuple[Part, ...]:
    """Return the parts of a model without or with a refiner."""
    return ("base", "refiner") if has_refiner else ("base",)


def added_component(name: str) -> ComponentSpec | None:
    """Return the component of a ControlNet or an IP-Adapter that has this name in a manifest, or None."""
    kind, _, own_name = name.partition(".")
    spec = ADDED_COMPONENTS.get(kind)
    if spec is None or not own_name:
        return spec
    return replace(spec, name=name, checkpoint_folder=f"{spec.checkpoint_folder}.{own_name}")


def control_components(controlnets: Collection[str]) -> tuple[ComponentSpec, ...]:
    """Return the components that a build with these ControlNets may add, in the order in which they are built."""
    if not controlnets:
        return ()
    kinds = (CONTROLNET_TEXT, CONTROLNET_TIME, CONTROLNET_IMAGE, CONTROLNET)
    names = [UNET_CONTROLLED, *(f"{kind}.{controlnet}" for controlnet in controlnets for kind in kinds)]
    return tuple(spec for name in names if (spec := added_component(name)))


def ip_components(adapters: Collection[str]) -> tuple[ComponentSpec, ...]:
    """Return the components that a build with these IP-Adapters adds, in the order in which they are built."""
    if not adapters:
        return ()
    names = [UNET_IP, *(f"{kind}.{adapter}" for adapter in adapters for kind in (IMAGE_ENCODER, IP_ADAPTER))]
    return tuple(spec for name in names if (spec := added_component(name)))


def controlnets_of(components: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the ControlNets that are among the components of a release, in their order."""
    prefix = f"{CONTROLNET}."
    return tuple(name.removeprefix(prefix) for name in components if name.startswith(prefix))


def ip_adapters_of(components: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the IP-Adapters that are among the components of a release, in their order."""
    prefix = f"{IP_ADAPTER}."
    return tuple(name.removeprefix(prefix) for name in components if name.startswith(prefix))


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
