"""Check a model, its base and its refiner, before any weights are read.

So a mistake is reported in seconds, and not after minutes of reading and compiling.
"""

import torch

from engine_builder.checkpoints.controlnet import check_controlnets
from engine_builder.checkpoints.folder import Checkpoint, CheckpointConfig, CheckpointError, weight_files
from engine_builder.checkpoints.ip_adapter import check_ip_adapters
from engine_builder.checkpoints.model_check import check_files, check_folder, check_tokenizer, read_shapes
from engine_builder.checkpoints.presets import PRESETS
from engine_builder.checkpoints.safety_checker import check_safety_checker
from engine_builder.networks.config_rules import check_config
from engine_builder.networks.network import load_meta_module, load_network
from engine_builder.networks.wrappers import WRAPPERS
from model.pipeline.components import FAMILIES
from model.pipeline.spec import (
    CONTROL_COMPONENTS,
    CONTROLNET,
    IMAGE_ENCODER,
    IP_ADAPTER,
    IP_COMPONENTS,
    SAFETY,
    SAFETY_CHECKER,
    Family,
    Part,
)
from model.store.precision import FP32

_MAX_LAYERS = 128  # of one block; SDXL's second text encoder has 32
_LAYER_COUNTS = ("num_hidden_layers", "layers_per_block", "transformer_layers_per_block")


def check_model(base: Checkpoint, refiner: Checkpoint | None) -> None:
    """Raise CheckpointError for a file that is missing, damaged or not the family's.

    The error names the file and the fix.
    """
    networks = check_configs(base, refiner)
    for checkpoint, folder, package, class_name in networks:
        _check_network(checkpoint, folder, package, class_name)
    for files in base.ip_adapters:
        load_network(base, f"{IP_ADAPTER}.{files.name}", FP32, device="meta")
    for tokenizer, encoders in _encoders_by_tokenizer(_by_part(base, refiner)).items():
        check_tokenizer(base, tokenizer, encoders)


Network = tuple[Checkpoint, str, str, str]
"""A network to check: its checkpoint and subfolder, and the library and the class that read it."""


def check_configs(base: Checkpoint, refiner: Checkpoint | None) -> list[Network]:
    """Check all configurations in less than a second, without the libraries. Returns the networks.

    Raises CheckpointError naming the file, the entry and the fix.
    """
    if refiner is not None and (base.family, refiner.family) != ("sdxl", "sdxl"):
        raise CheckpointError(
            f"{refiner.root} is a {FAMILIES[refiner.family].title} and {base.root} a {FAMILIES[base.family].title}. "
            "Only Stable Diffusion XL has refiners.",
            "Leave out the refiner (--no-refiner).",
        )
    checkpoints = _by_part(base, refiner)
    networks = [
        network
        for part, checkpoint in checkpoints.items()
        for network in _check_part(checkpoint, part, FAMILIES[base.family])
    ]
    _check_vae(base)
    _check_preset(base)
    return networks + _check_added(base)


def _by_part(base: Checkpoint, refiner: Checkpoint | None) -> dict[Part, Checkpoint]:
    return {"base": base} if refiner is None else {"base": base, "refiner": refiner}


def _check_part(checkpoint: Checkpoint, part: Part, family: Family) -> list[Network]:
    """Check the files and configurations of a base or a refiner. Returns its networks."""
    wrappers = {spec.checkpoint_folder: WRAPPERS[spec.wrapper] for spec in family.specs(part)}
    tokenizers = family.tokenizers if part == "base" else ()
    check_files(checkpoint, [*wrappers, *tokenizers, "scheduler"])
    for folder, wrapper in wrappers.items():
        check_config(checkpoint.config(folder), wrapper.class_name, family.name)
        weight_files(checkpoint, folder)
    # The base's VAE decodes the refiner's images, whose own is not read.
    widths = checkpoint.unet_widths()
    if widths.extra_channels and part == "refiner":
        raise CheckpointError(
            f"{checkpoint.root}/unet is for inpainting, and a refiner of this kind is not supported.",
            "Name another refiner, or build without one (`--no-refiner`).",
        )
    has_score = part == "refiner" and checkpoint.index.get("requires_aesthetics_score", False)
    expected = (5 if has_score else 6) if family.takes_sizes else 0
    if widths.time_ids != expected:
        raise CheckpointError(
            f"{checkpoint.root}/unet embeds {widths.time_ids} numbers of an image's size, and diffusers' pipeline of a "
            f"{part} passes {expected}.",
            "Name a refiner with --refiner and its base as the model: a refiner embeds 5 numbers, a base 6.",
        )
    return [(checkpoint, folder, wrapper.package, wrapper.class_name) for folder, wrapper in wrappers.items()]


def _check_added(base: Checkpoint) -> list[Network]:
    """Check the files and configurations of a build's ControlNets, IP-Adapters and safety checker.

    Returns their networks.
    """
    networks: list[Network] = []
    check_controlnets(base)
    for name, _ in base.controlnets:
        folder, wrapper = f"{CONTROLNET}.{name}", WRAPPERS[CONTROL_COMPONENTS[CONTROLNET].wrapper]
        networks.append((base, folder, wrapper.package, wrapper.class_of(base.config(folder))))
    check_ip_adapters(base)
    for files in base.ip_adapters:
        wrapper = WRAPPERS[IP_COMPONENTS[IMAGE_ENCODER].wrapper]
        networks.append((base, f"{IMAGE_ENCODER}.{files.name}", wrapper.package, wrapper.class_name))
    for _, folder, _, class_name in networks:
        check_folder(base.folder(folder))
        check_config(base.config(folder), class_name, base.family)
    if base.safety_checker is not None:
        check_safety_checker(base)
        check_folder(base.safety_checker)
        config, wrapper = base.config(SAFETY_CHECKER), WRAPPERS[SAFETY[SAFETY_CHECKER].wrapper]
        check_config(config, wrapper.class_name, base.family)
        vision = CheckpointConfig(config.path, config["vision_config"])
        check_config(vision, WRAPPERS[IP_COMPONENTS[IMAGE_ENCODER].wrapper].class_name, base.family, "vision_config")
        networks.append((base, SAFETY_CHECKER, wrapper.package, wrapper.class_name))
    return networks


def _check_vae(base: Checkpoint) -> None:
    """Check that a separate VAE has the latents of the model's own, if it has one."""
    own = Checkpoint(base.root)
    if base.vae is None or not own.folder("vae").is_dir():
        return
    configs = own.config("vae"), base.config("vae")
    for key, default in (("latent_channels", 4), ("scaling_factor", 0.18215), ("latents_mean", None),
                         ("latents_std", None), ("shift_factor", None)):  # fmt: skip
        expected, actual = (config.get(key, default) for config in configs)
        if actual != expected:
            raise CheckpointError(
                f"{base.vae}/config.json: {key} is {actual!r:.80}, and that of the model's own VAE is "
                f"{expected!r:.80}. The UNet cannot use these latents.",
                "Use a VAE that was made for this model.",
            )
    if own.vae_widths().scale != base.vae_widths().scale:
        raise CheckpointError(
            f"{base.vae} divides sides by {base.vae_widths().scale}, and the model's own VAE by "
            f"{own.vae_widths().scale}.",
            "Use a VAE that was made for this model.",
        )


def _check_preset(base: Checkpoint) -> None:
    preset = base.preset
    if preset is None:
        return
    if base.family not in preset.families:
        names = " and ".join(FAMILIES[family].title for family in preset.families)
        raise CheckpointError(
            f"The preset {preset.name} is for {names}, and {base.root} is a {FAMILIES[base.family].title}.",
            f"Choose one of {', '.join(one.name for one in PRESETS.values() if base.family in one.families)}.",
        )
    embeds_guidance = base.unet_widths().timestep_cond > 0
    if embeds_guidance != preset.embeds_guidance:
        takes = "takes the guidance scale as an input" if embeds_guidance else "takes no guidance scale as an input"
        raise CheckpointError(
            f"{base.root}/unet {takes}, unlike those that the preset {preset.name} is for.",
            f"Use --preset {'lcm' if embeds_guidance else 'lcm-lora'} for a latent consistency model.",
        )


def _encoders_by_tokenizer(checkpoints: dict[Part, Checkpoint]) -> dict[str, list[tuple[Checkpoint, str]]]:
    """Return each tokenizer's text encoders, as checkpoint and subfolder."""
    encoders: dict[str, list[tuple[Checkpoint, str]]] = {}
    family = FAMILIES[checkpoints["base"].family]
    for denoiser in family.denoisers:
        if denoiser.part in checkpoints:
            for component, tokenizer in denoiser.text_encoders:
                encoder = (checkpoints[denoiser.part], family.components[component].checkpoint_folder)
                encoders.setdefault(tokenizer, []).append(encoder)
    return encoders


def _check_network(checkpoint: Checkpoint, folder: str, package: str, class_name: str) -> None:
    """Check that a config.json describes a network, and that the stored tensors have its shapes.

    Missing tensors are found later, when the library loads the weights, because it also accepts older tensor names.
    """
    config, path = checkpoint.config(folder), checkpoint.folder(folder) / "config.json"
    for key in _LAYER_COUNTS:
        counts = config.get(key, 1)
        least = 0 if key == "transformer_layers_per_block" else 1  # a small ControlNet's transformers have no layers
        if any(type(count) is int and not least <= count <= _MAX_LAYERS for count in _flatten(counts)):
            raise CheckpointError(f"{path}: {key} is {counts!r:.80}.", f"Set numbers from {least} to {_MAX_LAYERS}.")
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
                    f"{checkpoint.folder(folder)}: the shape of {name} is {list(shape)}, and config.json describes "
                    f"{list(expected)}.",
                    "Use the weights and the config.json of one model.",
                )


def _flatten(value: object) -> list[object]:
    return [leaf for item in value for leaf in _flatten(item)] if isinstance(value, list) else [value]
