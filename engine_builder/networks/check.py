"""Check a model, its base and its refiner, before any weights are read.

So a mistake is reported in seconds, and not after minutes of reading and compiling.
"""

import torch

from engine_builder.checkpoints.check import check_files, check_tokenizer, read_shapes
from engine_builder.checkpoints.folder import FAMILY_TITLES, Checkpoint, CheckpointError
from engine_builder.networks.network import load_meta_module
from engine_builder.networks.wrappers import WRAPPERS
from model.pipeline.spec import BASE, FAMILIES, REFINER, Part, components_of, tokenizers_of

_MAX_LAYERS = 128  # of one block; SDXL's second text encoder has 32
_LAYER_COUNTS = ("num_hidden_layers", "layers_per_block", "transformer_layers_per_block")


def check_model(base: Checkpoint, refiner: Checkpoint | None) -> None:
    """Raise CheckpointError for a file that is missing, damaged or not the family's.

    The error names the file and the fix.
    """
    if refiner is not None and (base.family, refiner.family) != ("sdxl", "sdxl"):
        raise CheckpointError(
            f"{refiner.root} is a {FAMILY_TITLES[refiner.family]} and {base.root} a {FAMILY_TITLES[base.family]}. Only "
            "Stable Diffusion XL has refiners.",
            "Leave out the refiner (--no-refiner).",
        )
    checkpoints: dict[Part, Checkpoint] = {"base": base}
    if refiner is not None:
        checkpoints["refiner"] = refiner
    for part, checkpoint in checkpoints.items():
        networks = {spec.checkpoint_folder: spec for spec in components_of(base.family, [part])}
        tokenizers = tokenizers_of(base.family) if part == "base" else ()
        check_files(checkpoint, [*networks, *tokenizers, "scheduler"])
        if checkpoint.widths().extra_channels and part == "refiner":
            raise CheckpointError(
                f"{checkpoint.root}/unet is for inpainting, and a refiner of this kind is not supported.",
                "Name another refiner, or build without one (`--no-refiner`).",
            )
        for folder, spec in networks.items():
            wrapper = WRAPPERS[spec.wrapper]
            _check_network(checkpoint, folder, wrapper.package, wrapper.class_name)
    for tokenizer, encoders in _encoders_by_tokenizer(checkpoints).items():
        check_tokenizer(base, tokenizer, encoders)


def _encoders_by_tokenizer(checkpoints: dict[Part, Checkpoint]) -> dict[str, list[tuple[Checkpoint, str]]]:
    """Return each tokenizer's text encoders, as checkpoint and subfolder."""
    encoders: dict[str, list[tuple[Checkpoint, str]]] = {}
    for denoiser in (BASE, REFINER):
        if denoiser.part in checkpoints:
            components = FAMILIES[checkpoints["base"].family]
            for component, tokenizer in denoiser.encoders(components):
                encoder = (checkpoints[denoiser.part], components[component].checkpoint_folder)
                encoders.setdefault(tokenizer, []).append(encoder)
    return encoders


def _check_network(checkpoint: Checkpoint, folder: str, package: str, class_name: str) -> None:
    """Check that a config.json describes a network, and that the stored tensors have its shapes.

    Missing tensors are found later, when the library loads the weights, because it also accepts older tensor names.
    """
    config, path = checkpoint.config(folder), checkpoint.root / folder / "config.json"
    for key in _LAYER_COUNTS:
        counts = config.get(key, 1)
        if any(type(count) is int and not 0 < count <= _MAX_LAYERS for count in _flatten(counts)):
            raise CheckpointError(f"{path}: {key} is {counts!r:.80}.", f"Set numbers from 1 to {_MAX_LAYERS}.")
    stored = read_shapes(checkpoint, folder)
    try:
        network = load_meta_module(package, class_name, checkpoint, folder, torch.float32)
    except Exception as error:  # the libraries raise many types for values of the wrong type
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path} does not describe a {class_name} ({type(error).__name__}: {reason}).") from error
    for name, tensor in network.state_dict().items():
        expected = tuple(tensor.shape)
        for shape in (stored[key] for key in (name, f"text_model.{name}") if key in stored):
            if shape != expected:
                raise CheckpointError(
                    f"{checkpoint.root}/{folder}: the shape of {name} is {list(shape)}, and config.json describes "
                    f"{list(expected)}.",
                    "Use the weights and the config.json of one model.",
                )


def _flatten(value: object) -> list[object]:
    return [leaf for item in value for leaf in _flatten(item)] if isinstance(value, list) else [value]
