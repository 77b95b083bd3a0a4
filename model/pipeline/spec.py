"""Components and families, and the components that any family may have in addition.

The builder, the loader and the server iterate these tables and the tables of `model.pipeline.families`.
A component is one network, and `ComponentSpec` has its facts. A new network is an entry of a table, a wrapper in the
builder, and a stage that uses it (model/pipeline/stages.py). Imports no torch.
"""

from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, MutableMapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from model.engines import signatures
from model.engines.features import CONTROL, CONTROLNET_INPUTS, IMAGE_PROMPT, Input, engine_name, has
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
class ComponentSpec:
    """One network of the pipeline.

    name: its name in a manifest.
    part, checkpoint_folder: where its weights are read from.
    wrapper: its entry in `engine_builder.networks.wrappers`.
    signature: the tensors that it takes and returns, for the widths of a network of its kind.
    batch_unit: what one entry of its batch is.
    stream: the CUDA stream that it runs on.
    inputs: of a network that runs before a denoiser in each step, in addition to its latents.
    adds_to: the feature of the denoisers that take the sum of the outputs of these networks.
    precision_rule: "vae" if `force_upcast` of the VAE's config may require fp32.
    same_as: a component whose engines serve this one too if both have the same weights.
    features, bands: of a variant of a denoiser, see `model.engines.features`. Its weights are the denoiser's.
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
    inputs: tuple[Input, ...] = ()
    adds_to: str = ""
    precision_rule: Literal["model", "vae"] = "model"
    same_as: str = ""
    features: frozenset[str] = frozenset()
    bands: int = 1
    optional: bool = False

    @property
    def is_denoiser(self) -> bool:
        """True for a UNet of a step, or a variant of one."""
        return self.phase == "step" and not self.adds_to

    @property
    def is_quantizable(self) -> bool:
        """True if an 8-bit release has it in 8 bits. The VAE decoder is quantized only if a policy says so."""
        return self.is_denoiser and not has(self.features, "adapts")


Components = MutableMapping[str, ComponentSpec]
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
    """The differences between the families of models.

    title: its name in messages. pipelines: a pattern of the classes in model_index.json, diffusers' own and
        classes of community pipelines.
    components: the components of base and refiner by name, in the order in which they are built, without variants.
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
CONTROLNET = "controlnet"
CONTROLNET_TEXT = "controlnet_text"
CONTROLNET_TIME = "controlnet_time"
CONTROLNET_IMAGE = "controlnet_image"
IP_ADAPTER = "ip_adapter"
IMAGE_ENCODER = "image_encoder"
VAE_ENCODER = "vae_encoder"
VAE_DECODER = "vae_decoder"
SAFETY_CHECKER = "safety_checker"
REFINER_TEXT_ENCODER_2 = "refiner_text_encoder_2"
REFINER_UNET_TEXT = "refiner_unet_text"
REFINER_UNET_TIME = "refiner_unet_time"
REFINER_UNET = "refiner_unet"
CONTROLLED_UNET = engine_name(UNET, {CONTROL})
IP_UNET = engine_name(UNET, {IMAGE_PROMPT})


def table(*specs: ComponentSpec) -> Components:
    """Return components by name."""
    return {spec.name: spec for spec in specs}


SAFETY = table(
    ComponentSpec(
        SAFETY_CHECKER, "base", "safety_checker", "SafetyCheckerNetwork", signatures.safety_checker_signature, "image",
        "scaled_image", "decoding", optional=True,
    ),
)  # fmt: skip
"""A network that any family may have in addition. It is built and loaded only if it is asked for."""
CONTROL_COMPONENTS = table(
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
        "denoising", CONTROLNET_INPUTS, adds_to=CONTROL, optional=True,
    ),
)  # fmt: skip
"""The networks that each ControlNet is divided into. "controlnet_time.canny" is one of the ControlNet "canny"."""

IP_COMPONENTS = table(
    ComponentSpec(
        IMAGE_ENCODER, "base", IMAGE_ENCODER, "ImageEncoderNetwork", signatures.image_encoder_signature, "request",
        "scaled_image", optional=True,
    ),
    ComponentSpec(
        IP_ADAPTER, "base", IP_ADAPTER, "IpAdapterNetwork", signatures.ip_adapter_signature, "request", "scaled_image",
        optional=True,
    ),
)  # fmt: skip
"""For each IP-Adapter its image encoder and itself. "image_encoder.style" is the encoder of the adapter "style"."""
ADDED_COMPONENTS: Components = ChainMap(IP_COMPONENTS, CONTROL_COMPONENTS)
"""The components that a build adds by name: the networks of ControlNets and IP-Adapters. A view of these tables."""


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


def control_components(controlnets: Collection[str]) -> tuple[str, ...]:
    """Return the components that a build with these ControlNets may add, in the order in which they are built."""
    if not controlnets:
        return ()
    kinds = (CONTROLNET_TEXT, CONTROLNET_TIME, CONTROLNET_IMAGE, CONTROLNET)
    return (CONTROLLED_UNET, *(f"{kind}.{name}" for name in controlnets for kind in kinds))


def ip_components(adapters: Collection[str]) -> tuple[str, ...]:
    """Return the components that a build with these IP-Adapters adds, in the order in which they are built."""
    if not adapters:
        return ()
    kinds = (IMAGE_ENCODER, IP_ADAPTER)
    return (IP_UNET, *(f"{kind}.{name}" for name in adapters for kind in kinds))


def controlnets_of(components: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the ControlNets that are among the components of a release, in their order."""
    prefix = f"{CONTROLNET}."
    return tuple(name.removeprefix(prefix) for name in components if name.startswith(prefix))


def ip_adapters_of(components: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the IP-Adapters that are among the components of a release, in their order."""
    prefix = f"{IP_ADAPTER}."
    return tuple(name.removeprefix(prefix) for name in components if name.startswith(prefix))
