"""A model folder in diffusers' layout: its family, its configurations, and the check that these describe the family.

The folder is a full checkout (plain, with `variant="fp16"` or with sharded weights) or `data/tiny-sdxl`. This module
loads no weights: `engine_builder.networks.network` does.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from engine_builder.checkpoints.presets import Preset
from engine_builder.files import read_file
from model.engines.signatures import TextEncoderWidths, UnetWidths, VaeWidths
from model.errors import PreheatError
from model.pipeline.components import FAMILIES
from model.pipeline.spec import CONTROLNET, IMAGE_ENCODER, SAFETY_CHECKER
from model.store.manifest import Family
from model.validation import COMPONENT_NAME

DOWNLOAD_AGAIN = "Download the model again, completely."
_CORRECT = "Correct the file, or download the model again."
TEXT_LIMIT = 64 * 2**20  # bytes of a configuration or a vocabulary; SDXL's largest has 2 MiB
_MAX_LEVELS = 8
_MAX_DIMENSION = 2**20  # in a config.json; SDXL's largest is its vocabulary, 49,408
_SHARD = re.compile(r"-\d{5}-of-(\d{5})")  # in the name of one of several files that hold a network's weights


class CheckpointError(PreheatError):
    """The folder is not a diffusers checkout that Preheat can build from."""

    remedy = "Pass a folder that holds an SDXL or a Stable Diffusion 1 or 2 in diffusers' layout."


class CheckpointConfig(dict[str, Any]):
    """The entries of a JSON file. Looking up a missing key raises CheckpointError."""

    def __init__(self, path: Path, entries: Mapping[str, Any]) -> None:
        super().__init__(entries)
        self.path = path

    def __missing__(self, key: str) -> Any:
        raise CheckpointError(f"{self.path} has no {key}.", "Add it, as the original model's file has it.")

    def size(self, key: str) -> int:
        """Return the size of a dimension. Raises CheckpointError unless it is a positive integer."""
        value = self[key]
        if type(value) is not int or not 0 < value <= _MAX_DIMENSION:
            raise CheckpointError(
                f"{self.path}: {key} is {value!r:.80}.", f"Set a whole number from 1 to {_MAX_DIMENSION}."
            )
        return value

    def levels(self) -> int:
        """Return the number of levels of a UNet or VAE. Raises CheckpointError."""
        value = self["block_out_channels"]
        if not isinstance(value, list) or not 0 < len(value) <= _MAX_LEVELS:
            raise CheckpointError(
                f"{self.path}: block_out_channels is {value!r:.80}.", f"Set a list of 1 to {_MAX_LEVELS} numbers."
            )
        return len(value)


@dataclass(frozen=True)
class IpAdapterFiles:
    """An IP-Adapter. path: its safetensors file. encoder: the folder of its CLIP image encoder."""

    name: str
    path: Path
    encoder: Path


@dataclass(frozen=True)
class Checkpoint:
    """A diffusers checkout on disk.

    vae: the folder of a VAE in place of the model's own. preset: replaces entries of the scheduler's config.
    controlnets: pairs of a name and a folder of a ControlNet, which is read as the subfolder "controlnet.NAME".
    ip_adapters: the IP-Adapters. The image encoder of one is read as the subfolder "image_encoder.NAME".
    ip_images: the most reference images of an IP-Adapter in a request.
    embedding_rows: rows that the text encoders' tables of tokens get for embeddings of textual inversion.
    safety_checker: the folder of a safety checker to build; None: none is built.
    """

    root: Path
    vae: Path | None = None
    preset: Preset | None = None
    controlnets: tuple[tuple[str, Path], ...] = ()
    ip_adapters: tuple[IpAdapterFiles, ...] = ()
    ip_images: int = 4
    embedding_rows: int = 0
    safety_checker: Path | None = None

    def folder(self, subfolder: str) -> Path:
        """Return the folder that a subfolder is read from."""
        kind, _, name = subfolder.partition(".")
        if kind == CONTROLNET and name:
            return dict(self.controlnets)[name]
        if kind == IMAGE_ENCODER and name:
            return self.ip_adapter(name).encoder
        if subfolder == SAFETY_CHECKER and self.safety_checker is not None:
            return self.safety_checker
        return self.vae if subfolder == "vae" and self.vae is not None else self.root / subfolder

    def ip_adapter(self, name: str) -> IpAdapterFiles:
        """Return the IP-Adapter of a name."""
        return next(files for files in self.ip_adapters if files.name == name)

    def config(self, subfolder: str, file: str = "config.json") -> CheckpointConfig:
        """Read a JSON file. Raises CheckpointError if it is missing or not a JSON object."""
        path = self.folder(subfolder) / file
        try:
            entries = read_json(path)
        except FileNotFoundError as error:
            missing = (
                f"{self.root} has no {subfolder}/{file}" if path.is_relative_to(self.root) else f"No {path} exists"
            )
            raise CheckpointError(f"{missing}.") from error
        if not isinstance(entries, dict):
            raise CheckpointError(f"{path} is not a JSON object.", _CORRECT)
        replaced = self.preset.scheduler if self.preset and subfolder == "scheduler" else {}
        return CheckpointConfig(path, entries | replaced)

    @property
    def index(self) -> CheckpointConfig:
        """The entries of model_index.json."""
        return self.config(".", "model_index.json")

    @property
    def family(self) -> Family:
        """The family of model_index.json's pipeline class. Raises CheckpointError."""
        name = self.index.get("_class_name")
        if isinstance(name, list) and len(name) == 2:
            name = name[1]  # a community pipeline: its module and its class
        for family in FAMILIES.values():
            if isinstance(name, str) and re.fullmatch(family.pipelines, name):
                return family.name
        raise CheckpointError(
            f"{self.root}/model_index.json: _class_name is {name!r:.80}, not a pipeline of "
            f"{' or '.join(family.title for family in FAMILIES.values())} (StableDiffusionXLPipeline, "
            "StableDiffusionPipeline)."
        )

    def vae_widths(self) -> VaeWidths:
        """Return the sizes of the VAE. Raises CheckpointError."""
        vae = self.config("vae")
        return VaeWidths(vae.size("latent_channels"), 2 ** (vae.levels() - 1))

    def text_widths(self, subfolder: str) -> TextEncoderWidths:
        """Return the sizes of a text encoder. Raises CheckpointError."""
        config = self.config(subfolder)
        return TextEncoderWidths(
            tokens=config.size("max_position_embeddings"),
            width=config.size("hidden_size"),
            pooled_width=config.get("projection_dim", 0),
            layers=config.size("num_hidden_layers"),
        )

    def unet_widths(self) -> UnetWidths:
        """Return the sizes of the UNet. Raises CheckpointError if the VAE or the text encoders do not fit it."""
        unet, vae, family = self.config("unet"), self.vae_widths(), FAMILIES[self.family]
        extra_channels = unet.size("in_channels") - vae.latent_channels
        if extra_channels not in (0, 1 + vae.latent_channels):
            raise CheckpointError(
                f"{self.root}/unet takes {vae.latent_channels + extra_channels} channels and the VAE returns "
                f"{vae.latent_channels}. Only UNets for text to image ({vae.latent_channels}) and for inpainting "
                f"({2 * vae.latent_channels + 1}) are supported."
            )
        if (out_channels := unet.get("out_channels", 4)) != vae.latent_channels:
            raise CheckpointError(
                f"{unet.path}: out_channels is {out_channels}, and the latents of the VAE have {vae.latent_channels} "
                "channels.",
                "Use the VAE and the UNet of one model.",
            )
        *others, last = (family.components[name].checkpoint_folder for name, _ in family.base.text_encoders)
        others = [folder for folder in others if self.folder(folder).is_dir()]  # a refiner has the last one only
        texts = [self.text_widths(folder) for folder in (last, *others)]
        pooled_width = time_ids = 0
        if family.takes_sizes:
            pooled_width = self.config(last).size("projection_dim")
            embedded = unet.size("projection_class_embeddings_input_dim") - pooled_width
            time_ids, rest = divmod(embedded, unet.size("addition_time_embed_dim"))
            if rest or time_ids < 1:
                raise CheckpointError(
                    f"{unet.path}: projection_class_embeddings_input_dim is {embedded + pooled_width}, expected "
                    f"the text encoder's projection_dim ({pooled_width}) and a multiple of addition_time_embed_dim "
                    f"({unet['addition_time_embed_dim']}).",
                    "Use the text encoder and the UNet of one model.",
                )
        context_width, text_width = unet.size("cross_attention_dim"), sum(text.width for text in texts)
        if context_width != text_width:
            raise CheckpointError(
                f"{self.root}/unet reads texts of width {context_width} (cross_attention_dim), and the text "
                f"encoders together return {text_width} (hidden_size).",
                "Use the text encoders and the UNet of one model.",
            )
        return UnetWidths(
            vae,
            tokens=texts[0].tokens,
            context_width=context_width,
            pooled_width=pooled_width,
            time_ids=time_ids,
            timestep_cond=unet.size("time_cond_proj_dim") if unet.get("time_cond_proj_dim") is not None else 0,
            extra_channels=extra_channels,
        )

    def size_step(self) -> int:
        """Return the pixels that height and width must be multiples of. Each UNet level halves the latents."""
        return self.vae_widths().scale << (self.config("unet").levels() - 1)


def parse_named_path(text: str, kind: str, example: str) -> tuple[str, Path]:
    """Parse "NAME=PATH". `kind`: what the path names, for the remedy. Raises CheckpointError."""
    name, separator, path = text.partition("=")
    if not separator or not re.fullmatch(COMPONENT_NAME, name) or not path:
        raise CheckpointError(
            f"{text!r:.80} is not NAME=PATH.",
            f"Give a name of lower-case letters, digits, - and _ (at most 32) and a {kind}, for example {example}.",
        )
    return name, Path(path)


def read_tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a safetensors file's tensors by name. Raises CheckpointError for an incomplete file.

    The library checks that the header's tensors fill the file. It maps the file and reads no tensor.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    except (SafetensorError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path} is not a complete safetensors file ({reason}).", DOWNLOAD_AGAIN) from error


def read_json(path: Path) -> Any:
    """Return the value in a JSON file. Raises CheckpointError, or FileNotFoundError for a missing file."""
    try:
        return json.loads(read_small_file(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {str(error)[:200]}.", _CORRECT) from error


def read_small_file(path: Path) -> bytes:
    """Return the bytes of a small file. Raises CheckpointError, or FileNotFoundError for a missing file."""
    try:
        size = path.stat().st_size
        if size > TEXT_LIMIT:
            raise CheckpointError(f"{path} has {size:,} bytes, more than {TEXT_LIMIT:,}.", DOWNLOAD_AGAIN)
        return read_file(path)
    except FileNotFoundError:
        if path.is_symlink():
            raise CheckpointError(f"{path} is a link to a missing file.", DOWNLOAD_AGAIN) from None
        raise
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{path} cannot be read: {reason}.", "Check the file and its permissions.") from error


def variant_of(checkpoint: Checkpoint, subfolder: str) -> str | None:
    """Return diffusers' `variant` of a subfolder's weights: "fp16" if its plain files are missing or incomplete.

    Raises CheckpointError if there are no safetensors files.
    """
    folder = checkpoint.folder(subfolder)
    names = [file.name for file in folder.glob("*.safetensors")]
    if not names:
        raise CheckpointError(
            f"{folder} has no .safetensors file. Other formats are not read.",
            "Load the model in diffusers and write it with save_pretrained, which saves safetensors."
            if any(folder.glob("*.bin"))
            else DOWNLOAD_AGAIN,
        )
    plain = [name for name in names if ".fp16" not in name]
    return None if _is_complete(plain) or len(plain) == len(names) else "fp16"


def weight_files(checkpoint: Checkpoint, subfolder: str) -> list[Path]:
    """Return the files that hold a network's weights: one, or all shards. Raises CheckpointError if they are missing.

    The names are those that diffusers and transformers read.
    """
    folder, variant = checkpoint.folder(subfolder), variant_of(checkpoint, subfolder)
    of_transformers = subfolder.startswith(("text_encoder", f"{IMAGE_ENCODER}.", SAFETY_CHECKER))
    stem = "model" if of_transformers else "diffusion_pytorch_model"
    suffix = re.escape(f".{variant}") if variant else ""
    pattern = re.compile(rf"{stem}({suffix}|{suffix}{_SHARD.pattern}|{_SHARD.pattern}{suffix})\.safetensors")
    paths = sorted(path for path in folder.glob("*.safetensors") if pattern.fullmatch(path.name))
    single = f"{stem}{f'.{variant}' if variant else ''}.safetensors"
    if not paths:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
        raise CheckpointError(
            f"{folder} has no {single}. Other names are not read: {', '.join(names)[:200]}.",
            f"Rename {names[0] if len(names) == 1 else 'the file of this network'} to {single}.",
        )
    if not _is_complete([path.name for path in paths]):
        raise CheckpointError(f"{folder} lacks some of the files that together replace {single}.", DOWNLOAD_AGAIN)
    return paths


def _is_complete(names: list[str]) -> bool:
    """True for one file of weights, or all shards of one. An interrupted download leaves only some shards."""
    shards = [int(match[1]) for name in names if (match := _SHARD.search(name))]
    return len(shards) < len(names) or set(shards) == {len(shards)}
