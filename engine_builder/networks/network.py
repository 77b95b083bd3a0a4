"""The networks of a diffusers-layout folder, wrapped so that flat named tensors go in and come out.

A folder is a full SDXL checkout, plain or with `variant="fp16"` or sharded weights, or `data/tiny-sdxl`. The wrappers
compute what the libraries' networks do: they drop dictionaries and outputs that nobody reads, and write some parts in a
form that is faster once it is compiled.
"""

import copy
import importlib.metadata
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn

from engine_builder.networks.text import PooledTextNetwork, TextNetwork
from engine_builder.networks.unet import (
    GuidedUnetNetwork,
    UnconditionalUnetNetwork,
    UnetNetwork,
    UnetTextNetwork,
    UnetTimeNetwork,
    text_width,
    time_width,
)
from engine_builder.networks.vae import VaeDecoderNetwork
from model.engines import components
from model.engines.components import (
    PRECISIONS,
    Widths,
)
from model.errors import PreheatError
from model.store.manifest import Precision, Signature
from model.weights.layout import (
    LAYOUTS,
    Layout,
)

# Raised whenever a wrapper changes: what it computes and how, or its tensors' names and shapes.
FORM = 8
_SHARD = re.compile(r"-\d{5}-of-(\d{5})")  # of one of the files that a part's weights are in


def library_versions() -> dict[str, str]:
    """Of the libraries whose networks are wrapped: an update can change what is computed."""
    return {name: importlib.metadata.version(name) for name in ("diffusers", "transformers")}


class ModelFolderError(PreheatError):
    """The folder is not a diffusers checkout that Preheat can build from."""


# What makes a UNet SDXL's: sizes beside the text, and blocks of the kinds that `unet` computes. A key that a config
# leaves out has diffusers' default.
_SDXL_UNET: dict[str, tuple[Any, Any]] = {  # key -> wanted, diffusers' default
    "addition_embed_type": ("text_time", None),
    "use_linear_projection": (True, False),
    "act_fn": ("silu", "silu"),
    "resnet_time_scale_shift": ("default", "default"),
    "only_cross_attention": (False, False),
    "dual_cross_attention": (False, False),
    "class_embed_type": (None, None),
    "encoder_hid_dim_type": (None, None),
    "time_embedding_act_fn": (None, None),
    "cross_attention_norm": (None, None),
    "mid_block_type": ("UNetMidBlock2DCrossAttn", "UNetMidBlock2DCrossAttn"),
    "attention_type": ("default", "default"),
}
_SDXL_VAE: dict[str, tuple[Any, Any]] = {"act_fn": ("silu", "silu"), "mid_block_add_attention": (True, True)}


@dataclass(frozen=True)
class Network:
    """A component ready to export. `multiple`: sizes (pixels) must be multiples of it, None for text encoders."""

    component: str
    module: nn.Module
    signature: Signature
    architecture: dict[str, Any]
    precision: Precision
    layout: Layout
    multiple: int | None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every parameter and buffer by its public name (the checkpoint's, without the wrapper's prefix)."""
        named = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        return {public_name(name): tensor.detach() for name, tensor in named.items()}


def public_name(name: str) -> str:
    """The checkpoint's name of a wrapper's parameter."""
    return name.removeprefix("network.")


class Config(dict[str, Any]):
    """JSON settings of a part. Asking for a key that is not there raises ModelFolderError."""

    def __init__(self, path: Path, entries: Mapping[str, Any]) -> None:
        super().__init__(entries)
        self._path = path

    def __missing__(self, key: str) -> Any:
        raise ModelFolderError(
            f"{self._path} has no {key}: give SDXL's in diffusers' layout, for example data/tiny-sdxl."
        )


@dataclass(frozen=True)
class ModelFolder:
    """A diffusers checkout on disk."""

    root: Path

    def config(self, part: str, file: str = "config.json") -> Config:
        """A part's JSON settings. Raises ModelFolderError where the file is missing or is no JSON object."""
        path = self.root / part / file
        try:
            entries = json.loads(path.read_text())
        except FileNotFoundError as error:
            raise ModelFolderError(
                f"{self.root} has no {part}/{file}: give a folder in diffusers' layout, for example data/tiny-sdxl."
            ) from error
        except ValueError as error:
            raise ModelFolderError(f"{path} is not JSON: {error}.") from error
        if not isinstance(entries, dict):
            raise ModelFolderError(f"{path} is no JSON object.")
        return Config(path, entries)

    @property
    def index(self) -> Config:
        """model_index.json."""
        return self.config(".", "model_index.json")

    def widths(self) -> Widths:
        """The numbers that shapes depend on. Raises ModelFolderError where these are no networks of an SDXL."""
        network = self.config("unet")
        vae, second = self.config("vae"), self.config("text_encoder_2")
        for part, config, settings in (("unet", network, _SDXL_UNET), ("vae", vae, _SDXL_VAE)):
            for key, (wanted, default) in settings.items():
                if config.get(key, default) != wanted:
                    raise ModelFolderError(
                        f"{self.root}/{part} is not SDXL's: its {key} is {config.get(key, default)!r}, not {wanted!r}, "
                        "and only that is served."
                    )
        if network["in_channels"] != vae["latent_channels"]:
            raise ModelFolderError(
                f"{self.root}/unet takes {network['in_channels']} channels and the VAE gives {vae['latent_channels']}: "
                "a UNet for inpainting or editing is not served."
            )
        has_first = (self.root / "text_encoder").is_dir()
        embedded = network["projection_class_embeddings_input_dim"] - second["projection_dim"]
        return Widths(
            tokens=second["max_position_embeddings"],
            text_width=self.config("text_encoder")["hidden_size"] if has_first else 0,
            text_width_2=second["hidden_size"],
            pooled_width=second["projection_dim"],
            latent_channels=network["in_channels"],
            time_ids=embedded // network["addition_time_embed_dim"],
            vae_scale=2 ** (len(vae["block_out_channels"]) - 1),
            timestep_cond=network.get("time_cond_proj_dim") or 0,
        )

    def size_step(self) -> int:
        """Both sides of a picture, in pixels, are multiples of it: its latents are halved at each level of the UNet."""
        levels = len(self.config("unet")["block_out_channels"])
        return self.widths().vae_scale << (levels - 1)


# Keys that say where a config came from, not what is computed.
_PROVENANCE = (
    "_name_or_path",
    "_diffusers_version",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "architectures",
)

_OUTSIDE = ("scaling_factor", "force_upcast")


def architecture(config: dict[str, Any], component: str) -> dict[str, Any]:
    """The part of a config.json that decides which code is compiled; names and versions of its writer are left out, and
    what is applied outside of an engine.

    Embedding guidance is the time network's alone: a UNet distilled to that runs on the engines of the one it was
    distilled from.
    """
    decides = {key: value for key, value in config.items() if key not in _PROVENANCE + _OUTSIDE}
    if "time_cond_proj_dim" in decides and component not in (components.UNET_TIME, components.REFINER_UNET_TIME):
        decides["time_cond_proj_dim"] = None
    return decides


_UNETS = {components.UNET_GUIDED: GuidedUnetNetwork, components.UNET_UNCONDITIONAL: UnconditionalUnetNetwork}


class Reader:
    """Reads a part of a checkout and remembers it until another is asked for: a UNet's three components read it once.

    What it gives has modules of its own, to be changed, and shares their tensors.
    """

    def __init__(self) -> None:
        self._last: tuple[object, nn.Module] | None = None

    def read(self, library: str, name: str, folder: ModelFolder, part: str, dtype: torch.dtype) -> nn.Module:
        """The network of class `name` of `library` in `folder`/`part`. Raises ModelFolderError."""
        asked = (folder.root, part, dtype)
        if self._last is None or self._last[0] != asked:
            self._last = None  # not held beside the next
            self._last = (asked, _load(library, name, folder, part, dtype))
        network = self._last[1]
        tensors = [*network.parameters(), *network.buffers()]
        return copy.deepcopy(network, {id(tensor): tensor for tensor in tensors})


def load_network(
    folder: ModelFolder,
    component: str,
    precision: Precision,
    device: str = "cpu",
    reader: Reader | None = None,
    plain: bool = False,
) -> Network:
    """One component of a checkout in `precision`, in eval mode on `device`; on "meta" its shapes alone, which takes no
    weights. `plain`: as it is on a CPU, whatever the device: weights and convolutions that ONNX has a form for.

    `component` is a name of `model.engines.components`; those of the refiner are read from the refiner's own checkout, by
    `reader` where several are loaded in turn. Raises ModelFolderError where the folder lacks it or it is no SDXL
    network.
    """
    dtype_name = PRECISIONS[precision]
    dtype = components.DTYPES[dtype_name]
    widths = folder.widths()
    part = {
        components.REFINER_TEXT_ENCODER_2: "text_encoder_2",
        components.UNET_TEXT: "unet",
        components.UNET_TIME: "unet",
        components.UNET_GUIDED: "unet",
        components.UNET_UNCONDITIONAL: "unet",
        components.REFINER_UNET_TEXT: "unet",
        components.REFINER_UNET_TIME: "unet",
        components.REFINER_UNET: "unet",
        components.VAE_DECODER: "vae",
    }.get(component, component)
    config = folder.config(part)
    multiple: int | None = None
    layout = "plain" if plain else LAYOUTS.get(torch.device(device).type, "plain")
    module: nn.Module
    load = _load_shapes if device == "meta" else (reader or Reader()).read
    if part == "text_encoder":
        module = TextNetwork(load("transformers", "CLIPTextModel", folder, part, dtype))
        signature = components.text_signature(widths.text_width, widths.tokens, dtype_name, None)
    elif part == "text_encoder_2":
        module = PooledTextNetwork(load("transformers", "CLIPTextModelWithProjection", folder, part, dtype))
        signature = components.text_signature(widths.text_width_2, widths.tokens, dtype_name, widths.pooled_width)
    elif part == "unet":
        network = load("diffusers", "UNet2DConditionModel", folder, part, dtype)
        time, text = time_width(network), text_width(network)
        if component in (components.UNET_TEXT, components.REFINER_UNET_TEXT):
            module = UnetTextNetwork(network)
            signature = components.unet_text_signature(widths.tokens, config["cross_attention_dim"], text, dtype_name)
        elif component in (components.UNET_TIME, components.REFINER_UNET_TIME):
            module = UnetTimeNetwork(network)
            signature = components.unet_time_signature(widths, time, dtype_name)
        else:
            by_tiles = layout == "channels_last" and precision != "fp32"
            module = _UNETS.get(component, UnetNetwork)(network, by_tiles)
            signature = components.unet_signature(widths, time, text, dtype_name)
            multiple = folder.size_step()
    else:
        module = VaeDecoderNetwork(load("diffusers", "AutoencoderKL", folder, part, dtype))
        signature = components.vae_decoder_signature(widths.latent_channels, widths.vae_scale, dtype_name)
        multiple = widths.vae_scale
    module = module.to(device).eval().requires_grad_(False)
    if layout == "channels_last":
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Network(component, module, signature, architecture(config, component), precision, layout, multiple)


def variant_of(folder: ModelFolder, part: str) -> str | None:
    """What diffusers calls the variant of a part's files: "fp16" where there is no whole set of plain ones.

    Raises ModelFolderError.
    """
    names = [file.name for file in (folder.root / part).glob("*.safetensors")]
    if not names:
        raise ModelFolderError(f"{folder.root}/{part} has no .safetensors file (other formats are not read).")
    plain = [name for name in names if ".fp16" not in name]
    return None if _is_whole(plain) or len(plain) == len(names) else "fp16"


def _is_whole(names: list[str]) -> bool:
    """Whether these are weights in one file, or all of several: a fetch that broke off leaves some."""
    shards = [int(match[1]) for name in names if (match := _SHARD.search(name))]
    return len(shards) < len(names) or set(shards) == {len(shards)}


def _load(library: str, name: str, folder: ModelFolder, part: str, dtype: torch.dtype) -> nn.Module:
    import importlib

    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # the build has a bar of its own
    variant = variant_of(folder, part)
    cls = getattr(importlib.import_module(library), name)
    kind = "torch_dtype" if library == "diffusers" else "dtype"
    options = {"variant": variant, "use_safetensors": True, "output_loading_info": True, kind: dtype}
    try:
        network, found = cls.from_pretrained(folder.root / part, **options)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        said = " ".join(str(error).split())[:300]
        raise ModelFolderError(
            f"{folder.root}/{part} cannot be loaded ({said}): fetch the model again, whole."
        ) from error
    if missing := sorted(found["missing_keys"]):  # which would be random numbers
        raise ModelFolderError(
            f"{folder.root}/{part} lacks {len(missing)} of its network's weights, {missing[0]} first: fetch the model "
            "again, whole."
        )
    return cast(nn.Module, network)


def _load_shapes(library: str, name: str, folder: ModelFolder, part: str, dtype: torch.dtype) -> nn.Module:
    import importlib

    cls = getattr(importlib.import_module(library), name)
    with torch.device("meta"):
        if library == "diffusers":
            network: nn.Module = cls.from_config(folder.config(part))
        else:
            network = cls(cls.config_class.from_dict(folder.config(part)))
    return nn.Module.to(network, dtype)  # diffusers' own `to` warns of what from_pretrained does
