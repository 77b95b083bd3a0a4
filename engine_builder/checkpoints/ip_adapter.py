"""The files of an IP-Adapter: the adapter in one safetensors file, and the folder of its CLIP image encoder.

The kinds that are read are those whose features come from a CLIP image encoder: plain, plus (also plus-face) and full.
This module reads headers only, except for `AdapterFile.tensors`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from engine_builder.checkpoints.folder import (
    Checkpoint,
    CheckpointError,
    IpAdapterFiles,
    parse_named_path,
    read_tensor_shapes,
)
from model.pipeline.components import FAMILIES
from model.validation import MAX_IP_ADAPTERS

REMEDY = (
    "Name an IP-Adapter for Stable Diffusion XL whose features come from a CLIP image encoder: plain, plus or face."
)
_PLAIN_TOKENS = 4  # of an image, of a plain adapter; diffusers has the same constant
_FOLDERS = ("image_encoder", "../image_encoder", "../models/image_encoder")  # next to a file of the public repository


@dataclass(frozen=True)
class AdapterFile:
    """The header of an adapter's file. shapes: of all tensors by name."""

    path: Path
    shapes: dict[str, tuple[int, ...]]

    @property
    def reads_embedding(self) -> bool:
        """True if the adapter reads one embedding of an image, false if it reads hidden states."""
        return "image_proj.proj.weight" in self.shapes

    @property
    def features(self) -> int:
        """The width of the features of an image that the adapter reads."""
        if self.reads_embedding:
            return self.shapes["image_proj.proj.weight"][1]
        name = "image_proj.proj.0.weight" if self._is_full else "image_proj.proj_in.weight"
        return self.shapes[name][1]

    def tokens(self, encoder_tokens: int) -> int:
        """Return the tokens of an image. `encoder_tokens`: of the hidden states of the image encoder."""
        if self.reads_embedding:
            return _PLAIN_TOKENS
        return encoder_tokens if self._is_full else self.shapes["image_proj.latents"][1]

    @property
    def architecture(self) -> dict[str, Any]:
        """The shapes of the projection, which decide the compiled code."""
        return {name: list(shape) for name, shape in sorted(self.shapes.items()) if name.startswith("image_proj.")}

    @property
    def _is_full(self) -> bool:
        return "image_proj.proj.3.weight" in self.shapes

    @contextmanager
    def tensors(self) -> Iterator[dict[str, torch.Tensor]]:
        """Return all tensors by name, mapped from the file."""
        with safe_open(self.path, framework="pt") as file:
            yield {name: file.get_tensor(name) for name in self.shapes}


def parse_ip_adapters(texts: Sequence[str], encoders: Sequence[str], base: Checkpoint) -> tuple[IpAdapterFiles, ...]:
    """Parse "NAME=PATH" of each adapter, and the folders of the image encoders: one of each adapter, or one of all.

    Without folders, each adapter's is searched next to its file, then in the model's folder. Raises CheckpointError.
    """
    if encoders and len(encoders) not in (1, len(texts)):
        raise CheckpointError(
            f"{len(encoders)} image encoders were given for {len(texts)} IP-Adapters.",
            "Give one --image-encoder for each --ip-adapter in the same order, or one for all.",
        )
    files = []
    for index, text in enumerate(texts):
        name, path = parse_named_path(text, "file", "plus=models/ip-adapter-plus_sdxl_vit-h.safetensors")
        encoder = Path(encoders[index % len(encoders)]) if encoders else _find_encoder(path, base)
        files.append(IpAdapterFiles(name, path, encoder))
    return tuple(files)


def _find_encoder(path: Path, base: Checkpoint) -> Path:
    folders = [*(path.parent / folder for folder in _FOLDERS), base.root / "image_encoder"]
    for folder in folders:
        if (folder / "config.json").is_file():
            return folder
    raise CheckpointError(
        f"The image encoder of {path} was not found. Searched: {', '.join(map(str, folders))}.",
        "Name its folder (`--image-encoder`): image_encoder of the adapter's repository.",
    )


def check_ip_adapters(base: Checkpoint) -> None:
    """Check the header of each of a model's IP-Adapters, and its encoder's config. Raises CheckpointError."""
    names = [files.name for files in base.ip_adapters]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise CheckpointError(f"Two IP-Adapters have the name {repeated[0]}.", "Give each a name of its own.")
    if names and base.family != "sdxl":
        raise CheckpointError(
            f"IP-Adapters are supported for Stable Diffusion XL, and {base.root} is a {FAMILIES[base.family].title}.",
            "Leave out --ip-adapter.",
        )
    for files in base.ip_adapters:
        adapter, encoder = open_adapter(files), base.config(f"image_encoder.{files.name}")
        key = "projection_dim" if adapter.reads_embedding else "hidden_size"
        if encoder.size(key) != adapter.features:
            raise CheckpointError(
                f"{files.path} reads features of width {adapter.features}, and {key} of {files.encoder}/config.json is "
                f"{encoder[key]}.",
                "Name the image encoder that the adapter was trained with (`--image-encoder`).",
            )
        for size in ("image_size", "patch_size"):
            encoder.size(size)


def open_adapter(files: IpAdapterFiles) -> AdapterFile:
    """Read the header of an adapter's file. Raises CheckpointError for a file of another kind."""
    path = files.path
    if path.suffix != ".safetensors":
        raise CheckpointError(
            f"{path} is not a .safetensors file. Other formats are not read: opening a .bin file can run its code.",
            "Use the .safetensors file of the same repository, or convert the file on a machine that may run its code.",
        )
    parts = ("image_proj.", "ip_adapter.")
    shapes = {name: shape for name, shape in read_tensor_shapes(path).items() if name.startswith(parts)}
    if any("perceiver_resampler" in name or name == "image_proj.norm.weight" for name in shapes) and (
        "image_proj.proj.weight" not in shapes
    ):
        raise CheckpointError(
            f"{path} is an IP-Adapter FaceID. It reads the embedding of a face by insightface, which is not supported.",
            REMEDY,
        )
    adapter = AdapterFile(path, shapes)
    required = {
        "image_proj.proj.weight": 2, "image_proj.proj.0.weight": 2, "image_proj.proj_in.weight": 2,
        "image_proj.latents": 3,
    }  # fmt: skip
    known = {name: len(shapes[name]) for name, rank in required.items() if name in shapes and len(shapes[name]) == rank}
    is_plus = {"image_proj.proj_in.weight", "image_proj.latents"} <= known.keys()
    is_full = {"image_proj.proj.0.weight"} <= known.keys() and "image_proj.proj.3.weight" in shapes
    if not ("image_proj.proj.weight" in known or is_plus or is_full):
        raise CheckpointError(f"{path} has no projection of images that is known (image_proj).", REMEDY)
    return adapter


def image_slots(base: Checkpoint) -> tuple[int, int]:
    """Return the most adapters that a request may use, and the most tokens of each: those of `ip_images` images."""
    tokens = [tokens_of_image(base, files) for files in base.ip_adapters]
    return min(len(tokens), MAX_IP_ADAPTERS), base.ip_images * max(tokens)


def tokens_of_image(base: Checkpoint, files: IpAdapterFiles) -> int:
    """Return the tokens that an adapter makes of an image."""
    return open_adapter(files).tokens(features_of_image(base, files)[0])


def features_of_image(base: Checkpoint, files: IpAdapterFiles) -> tuple[int, ...]:
    """Return the shape of an adapter's features of an image: (width,) or (tokens, width)."""
    adapter, encoder = open_adapter(files), base.config(f"image_encoder.{files.name}")
    if adapter.reads_embedding:
        return (adapter.features,)
    return 1 + (encoder.size("image_size") // encoder.size("patch_size")) ** 2, adapter.features
