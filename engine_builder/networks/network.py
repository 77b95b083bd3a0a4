"""Load a component of a checkpoint as a module that takes and returns flat named tensors, ready to export.

The wrappers compute what diffusers' and transformers' networks compute. They drop dictionaries and unused outputs, and
write some blocks in a form that is faster once compiled.
"""

import copy
import hashlib
import importlib
import importlib.metadata
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn

from engine_builder.checkpoints.folder import DOWNLOAD_AGAIN, Checkpoint, CheckpointError, variant_of
from engine_builder.checkpoints.ip_adapter import features_of_image, image_slots, open_adapter, tokens_of_image
from engine_builder.checkpoints.safety_checker import checked_side
from engine_builder.checkpoints.tokenizers import export_tokenizer
from engine_builder.networks.controlnet import control_type_count
from engine_builder.networks.ip_adapter import image_encoder_network, read_ip_adapter
from engine_builder.networks.quiet import quiet_libraries
from engine_builder.networks.text import LARGEST_ID, add_embedding_rows
from engine_builder.networks.unet import StepUnet, residual_shapes, text_width, time_width
from engine_builder.networks.wrappers import WRAPPERS
from model.engines.features import CONTROL, denoiser_signature
from model.engines.shapes import DTYPES
from model.engines.signatures import ImageEncoderWidths, IpAdapterWidths, SafetyCheckerWidths, UnetWidths
from model.pipeline.components import find_component
from model.pipeline.spec import CONTROLNET, IMAGE_ENCODER, IP_ADAPTER, IP_UNET, SAFETY_CHECKER
from model.store.manifest import Signature
from model.store.precision import Precision
from model.weights.layout import LAYOUTS, Layout

# Part of every engine key. Raise it when a wrapper changes: its arithmetic, or its tensors' names or shapes.
NETWORK_VERSION = 8

# Part of every draft. Raise it when a build adds an input or output to a component. Engine keys have the signatures.
SIGNATURES_VERSION = 3

# Config entries that do not change the compiled code: their origin, and what is applied outside of an engine.
_PROVENANCE = (
    "_name_or_path", "_diffusers_version", "transformers_version", "torch_dtype", "dtype", "architectures",
)  # fmt: skip
_POSITIONS = r"(?:^|\.)position_ids$"
_CLIP_TEXT = re.compile(rf"{_POSITIONS}|^logit_scale$|^(?:text_projection|visual_projection|vision_model)\.")
# Class -> weights that it does not read although they may be beside its own: positions, the scale of CLIP's training,
# its projections, and its other tower. Classes of diffusers read all.
_MAY_BE_UNREAD = {
    "CLIPTextModel": _CLIP_TEXT,
    "CLIPTextModelWithProjection": _CLIP_TEXT,
    "CLIPVisionModelWithProjection": re.compile(rf"{_POSITIONS}|^logit_scale$|^(?:text_projection|text_model)\."),
    "StableDiffusionSafetyChecker": re.compile(_POSITIONS),
}
_APPLIED_OUTSIDE = ("scaling_factor", "force_upcast")
_NORMALIZATION = ("latents_mean", "latents_std")  # applied outside, too; kept as null, as other VAEs have them


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries whose networks are wrapped. An update can change what they compute."""
    return {name: importlib.metadata.version(name) for name in ("diffusers", "transformers")}


def digest_json(value: object) -> str:
    """Return the SHA-256 of `value` as JSON with sorted keys. Engine, graph and plan keys are such digests."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Network:
    """A component ready to export.

    `multiple`: height and width are multiples of this number of pixels; None: the component has no height and width.
    `clips`: of each quantized layer, the absolute input that is mapped to the number type's largest number. `bands`:
    the ranks that run the network together, each for a band of the image.
    """

    component: str
    module: nn.Module
    signature: Signature
    architecture: dict[str, Any]
    precision: Precision
    layout: Layout
    multiple: int | None
    clips: Mapping[str, float] = field(default_factory=dict)
    bands: int = 1

    @property
    def code_name(self) -> str:
        """The name of the module's code in the keys of engines and graphs."""
        return self.module.code_name if isinstance(self.module, StepUnet) else type(self.module).__name__

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all parameters and buffers under their public names."""
        named = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        return {public_name(name): tensor.detach() for name, tensor in named.items()}


def public_name(name: str) -> str:
    """Return the checkpoint's name of a wrapper's parameter, which has no prefix."""
    return name.removeprefix("network.")


def architecture(config: dict[str, Any], component: str) -> dict[str, Any]:
    """Return the entries of a config.json that decide which code is compiled.

    Only the time network embeds the guidance scale, and only the step's network takes a mask. So a model's other
    engines also serve models that were trained from it to embed guidance or to inpaint.
    """
    entries = {key: value for key, value in config.items() if key not in _PROVENANCE + _APPLIED_OUTSIDE}
    entries |= {key: None for key in _NORMALIZATION if key in entries}
    if "time_cond_proj_dim" in entries and find_component(component).phase != "request":
        entries["time_cond_proj_dim"] = None
    if "in_channels" in entries and find_component(component).phase in ("prompt", "request"):
        entries["in_channels"] = entries.get("out_channels", entries["in_channels"])
    return entries


class ModuleReader:
    """Reads modules and caches the last one, so that the three components of a UNet read its weights once.

    Each call returns new modules, which the caller may change. They share the cached tensors.
    """

    def __init__(self, change: Callable[[Path, str, nn.Module], None] | None = None) -> None:
        """`change` changes the weights of each network that was read; its arguments are root, subfolder and network."""
        self._change = change
        self._last: tuple[object, nn.Module] | None = None

    def read(
        self, library: str, class_name: str, checkpoint: Checkpoint, subfolder: str, dtype: torch.dtype
    ) -> nn.Module:
        """Return the network in a subfolder. Raises CheckpointError."""
        identity = (checkpoint.folder(subfolder), dtype)
        if self._last is None or self._last[0] != identity:
            self._last = None  # free it before the next network is read
            network = _load(library, class_name, checkpoint, subfolder, dtype)
            if self._change is not None:
                self._change(checkpoint.root, subfolder, network)
            self._last = (identity, network)
        network = self._last[1]
        tensors = [*network.parameters(), *network.buffers()]
        return copy.deepcopy(network, {id(tensor): tensor for tensor in tensors})


def load_network(
    checkpoint: Checkpoint,
    component: str,
    precision: Precision,
    device: str = "cpu",
    reader: ModuleReader | None = None,
    plain: bool = False,
    lora_rank: int = 0,
    text_chunks: int | None = 1,
) -> Network:
    """Load a component in eval mode on `device`. On "meta" it has shapes only, and no weights are read.

    `component` is the name of a component or of a UNet's variant in a manifest, see `find_component`. Refiner
    components need the refiner's own checkpoint. Pass one `reader` to load several components one after the other.
    `plain` selects the CPU's weight layout and convolutions on any device, because ONNX can express those. `lora_rank`:
    of a UNet with the feature "lora". `text_chunks`: chunks of text that a UNet reads; None: any number. Raises
    CheckpointError if the checkpoint lacks the component, or if its files cannot be read as the wrapper's class.
    """
    if component.startswith((f"{IMAGE_ENCODER}.", f"{IP_ADAPTER}.")):
        return _load_ip_adapter(checkpoint, component, precision, device, reader, plain)
    spec = find_component(component)
    wrapper = WRAPPERS[spec.wrapper]
    config = checkpoint.config(spec.checkpoint_folder)
    layout = "plain" if plain else LAYOUTS.get(torch.device(device).type, "plain")
    read = load_meta_module if device == "meta" else (reader or ModuleReader()).read
    dtype = DTYPES[precision.storage]
    network = read(wrapper.package, wrapper.class_of(config), checkpoint, spec.checkpoint_folder, dtype)
    widths = read_widths(checkpoint, spec.checkpoint_folder, network)
    if isinstance(widths, UnetWidths):
        widths = replace(widths, chunks=text_chunks)
    if checkpoint.embedding_rows and wrapper.package == "transformers":
        end_token = None
        if config.get("eos_token_id") == LARGEST_ID:
            tokenizer = spec.checkpoint_folder.replace("text_encoder", "tokenizer")
            end_token = config["eos_token_id"] = export_tokenizer(checkpoint.root / tokenizer)[1].eos_token_id
        add_embedding_rows(network, checkpoint.embedding_rows, end_token)
        config["vocab_size"] += checkpoint.embedding_rows
    options: dict[str, Any] = {}
    if spec.is_denoiser:
        features = spec.features | ({CONTROL} if component == IP_UNET and checkpoint.controlnets else set())
        spec = replace(spec, features=features, signature=partial(denoiser_signature, features=features))
        options = {"features": features, "rank": lora_rank, "bands": spec.bands}
    if wrapper.accepts_winograd:
        options["use_winograd"] = layout == "channels_last" and precision.compute != "float32"
    module = wrapper.wrap(network, **options)
    if isinstance(module, StepUnet) and module.low_rank is not None:
        assert isinstance(widths, UnetWidths)
        packing = module.low_rank.packing
        widths = replace(widths, lora_down=packing.down_width, lora_up=packing.up_width)
    multiples = {"cfg_half": spec.bands * checkpoint.size_step(), "image": checkpoint.vae_widths().scale}
    return Network(
        component,
        _placed(module, device, layout),
        spec.signature(widths, precision.io),
        architecture(config, component),
        precision,
        layout,
        multiples.get(spec.batch_unit),
        bands=spec.bands,
    )


def read_widths(checkpoint: Checkpoint, subfolder: str, network: nn.Module) -> object:
    """Return the sizes that a component's signature takes, from its own network, config.json or file.

    The sizes of an IP-Adapter depend on the UNet, which is its `network`.
    """
    kind, _, name = subfolder.partition(".")
    if kind in ("unet", CONTROLNET):  # a ControlNet reads the UNet's texts, and embeds the same sizes
        widths = checkpoint.unet_widths()
        return replace(
            widths,
            time_embeds_width=time_width(network),
            keys_values_width=text_width(network),
            residuals=residual_shapes(network, widths.vae.scale),
            control_types=control_type_count(network),
            image_slots=image_slots(checkpoint) if checkpoint.ip_adapters else (1, 1),
        )
    if kind in (IMAGE_ENCODER, IP_ADAPTER):
        files = checkpoint.ip_adapter(name)
        features = features_of_image(checkpoint, files)
        if kind == IMAGE_ENCODER:
            return ImageEncoderWidths(checkpoint.config(subfolder).size("image_size"), features)
        return IpAdapterWidths(features, tokens_of_image(checkpoint, files), text_width(network))
    if kind == SAFETY_CHECKER:
        concepts, special = (len(network.get_parameter(name)) for name in ("concept_embeds", "special_care_embeds"))
        return SafetyCheckerWidths(checked_side(checkpoint), concepts, special)
    return checkpoint.vae_widths() if kind == "vae" else checkpoint.text_widths(subfolder)


def _placed(module: nn.Module, device: str, layout: Layout) -> nn.Module:
    """Return a module for inference on a device, with its weights in a layout."""
    module = module.to(device).eval().requires_grad_(False)
    if layout == "channels_last":
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return module


def _load_ip_adapter(
    checkpoint: Checkpoint, component: str, precision: Precision, device: str, reader: ModuleReader | None, plain: bool
) -> Network:
    """Load an IP-Adapter, or its image encoder, as `load_network` does."""
    spec = find_component(component)
    kind, _, name = component.partition(".")
    files, dtype = checkpoint.ip_adapter(name), DTYPES[precision.storage]
    layout = "plain" if plain else LAYOUTS.get(torch.device(device).type, "plain")
    unet_class = WRAPPERS["StepUnet"]
    unet = load_meta_module(unet_class.package, unet_class.class_name, checkpoint, "unet", dtype)
    if kind == IMAGE_ENCODER:
        wrapper = WRAPPERS[spec.wrapper]
        read = load_meta_module if device == "meta" else (reader or ModuleReader()).read
        network = read(wrapper.package, wrapper.class_name, checkpoint, spec.checkpoint_folder, dtype)
        module = image_encoder_network(files, network)
        entries = architecture(checkpoint.config(spec.checkpoint_folder), component)
    else:
        module = read_ip_adapter(files, unet, dtype, device)
        entries = architecture(checkpoint.config("unet"), component) | open_adapter(files).architecture
    signature = spec.signature(read_widths(checkpoint, spec.checkpoint_folder, unet), precision.io)
    return Network(component, _placed(module, device, layout), signature, entries, precision, layout, None)


def _load(library: str, class_name: str, checkpoint: Checkpoint, subfolder: str, dtype: torch.dtype) -> nn.Module:
    variant = variant_of(checkpoint, subfolder)
    network_class = getattr(importlib.import_module(library), class_name)
    dtype_option = "torch_dtype" if library == "diffusers" else "dtype"
    options = {"variant": variant, "use_safetensors": True, "output_loading_info": True, dtype_option: dtype}
    try:
        with quiet_libraries():
            network, loading_info = network_class.from_pretrained(checkpoint.folder(subfolder), **options)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{checkpoint.folder(subfolder)} cannot be loaded ({reason}).", DOWNLOAD_AGAIN) from error
    if missing := sorted(loading_info["missing_keys"]):  # the library fills them with random numbers
        raise CheckpointError(
            f"{checkpoint.folder(subfolder)} lacks {len(missing)} of its network's weights, {missing[0]} first.",
            DOWNLOAD_AGAIN,
        )
    ignored = _MAY_BE_UNREAD.get(class_name)
    if unread := sorted(name for name in loading_info["unexpected_keys"] if not (ignored and ignored.search(name))):
        raise CheckpointError(
            f"{checkpoint.folder(subfolder)}/config.json describes another network than the weights beside it: "
            f"{unread[0]:.80}{f' and {len(unread) - 1} others' if len(unread) > 1 else ''} would not be read.",
            "Take config.json and the weights from the same model.",
        )
    return cast(nn.Module, network)


def load_meta_module(
    library: str, class_name: str, checkpoint: Checkpoint, subfolder: str, dtype: torch.dtype
) -> nn.Module:
    """Return the network that a subfolder's config.json describes, with shapes only."""
    network_class = getattr(importlib.import_module(library), class_name)
    config = checkpoint.config(subfolder)
    with torch.device("meta"):
        if library == "diffusers":
            network: nn.Module = network_class.from_config(config)
        else:
            network = network_class(network_class.config_class.from_dict(config))
    return nn.Module.to(network, dtype)  # diffusers' own `to` warns about what from_pretrained does
