"""Merge adapters into a checkpoint's weights while it is built, so that a release has them for good."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from engine_builder.adapters.read import open_adapter, read_changes
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.networks.network import load_meta_module
from engine_builder.networks.wrappers import WRAPPERS
from model.adapters.changes import Change, difference
from model.adapters.layers import Layer
from model.pipeline.components import FAMILIES

_FOLDERS = ("unet", "text_encoder", "text_encoder_2")
_TEXT_MODULES = ("encoder.", "final_layer_norm")  # of a CLIP without projection, which has no level `text_model`


@dataclass(frozen=True)
class OfflineMerge:
    """Adapters to merge into one checkpoint: their changes by layer, and their scales.

    sources: SHA-256 of the files, each with its scale. warnings: sentences about what is left out of the files.
    """

    root: Path
    layers: Mapping[str, Layer]
    adapters: tuple[tuple[Mapping[str, Change], float], ...]
    sources: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    @torch.no_grad()
    def change(self, root: Path, subfolder: str, network: nn.Module) -> None:
        """Merge the adapters into a network of a checkpoint, in place. Others are not changed."""
        if root != self.root:
            return
        for name in {name: None for changes, _ in self.adapters for name in changes}:
            layer = self.layers[name]
            if layer.component != subfolder:
                continue
            tensor = network.get_parameter(layer.tensor)
            own = tensor.float().clone()
            for changes, scale in self.adapters:
                if name in changes and scale:  # 0 leaves an adapter out, also a DoRA
                    tensor.copy_(tensor.float() + difference(changes[name].in_float(), scale, own).view(own.shape))


def read_merge(checkpoint: Checkpoint, adapters: Iterable[tuple[Path, float]]) -> OfflineMerge:
    """Read adapters for a checkpoint. Raises BadAdapter."""
    from hashlib import sha256

    layers = checkpoint_layers(checkpoint)
    read: list[tuple[Mapping[str, Change], float]] = []
    sources: list[str] = []
    warnings: list[str] = []
    for path, scale in adapters:
        file = open_adapter(path)
        read.append((read_changes(file, layers), scale))
        sources.append(f"{sha256(file.data).hexdigest()}:{scale:g}")
        warnings += file.warnings + file.left_out
    return OfflineMerge(checkpoint.root, layers, tuple(read), tuple(sources), tuple(warnings))


def checkpoint_layers(checkpoint: Checkpoint) -> dict[str, Layer]:
    """Return the layers of a checkpoint. A layer's component is its folder, its tensor the name of the parameter."""
    layers = {}
    specs = {spec.checkpoint_folder: spec for spec in FAMILIES[checkpoint.family].specs("base")}
    for folder in _FOLDERS:
        if folder not in specs:
            continue
        wrapper = WRAPPERS[specs[folder].wrapper]
        network = load_meta_module(wrapper.package, wrapper.class_name, checkpoint, folder, torch.float32)
        for module_name, module in network.named_modules():
            if not isinstance(module, nn.Linear | nn.Conv2d | nn.GroupNorm | nn.LayerNorm):
                continue
            prefix = "text_model." if module_name.startswith(_TEXT_MODULES) else ""
            for kind, parameter in module.named_parameters(recurse=False):
                end = "" if parameter.ndim > 1 else f".{kind}"
                name = f"{folder}.{prefix}{module_name}{end}"
                layers[name] = Layer(name, tuple(parameter.shape), folder, f"{module_name}.{kind}")
    return layers


def parse_adapters(texts: Sequence[str]) -> list[tuple[Path, float]]:
    """Parse "PATH:SCALE", or "PATH" for the scale 1. Raises ValueError for a scale that is not a finite number."""
    parsed = []
    for text in texts:
        path, colon, scale = text.rpartition(":")
        value = float(scale) if colon else 1.0
        if not abs(value) <= 10:
            raise ValueError(f"{scale} is not a scale from -10 to 10")
        parsed.append((Path(path if colon else text), value))
    return parsed
