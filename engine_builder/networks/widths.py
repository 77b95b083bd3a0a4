"""Read the sizes that a component's signature takes, each from its own network, config.json or file."""

from dataclasses import replace

from torch import nn

from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.checkpoints.ip_adapter import features_of_image, image_slots, tokens_of_image
from engine_builder.checkpoints.safety_checker import checked_side
from engine_builder.networks.controlnet import control_type_count
from engine_builder.networks.unet import residual_shapes, text_width, time_width
from model.engines.signatures import (
    ImageEncoderWidths,
    IpAdapterWidths,
    SafetyCheckerWidths,
    TextEncoderWidths,
    UnetWidths,
    VaeWidths,
)


def text_widths(checkpoint: Checkpoint, subfolder: str, network: nn.Module) -> TextEncoderWidths:
    """Return the sizes of a text encoder."""
    return checkpoint.text_widths(subfolder)


def unet_widths(checkpoint: Checkpoint, subfolder: str, network: nn.Module) -> UnetWidths:
    """Return the sizes of a UNet or a ControlNet. They read the same texts, and embed the same sizes."""
    widths = checkpoint.unet_widths()
    return replace(
        widths,
        time_embeds_width=time_width(network),
        keys_values_width=text_width(network),
        residuals=residual_shapes(network, widths.vae.scale),
        control_types=control_type_count(network),
        image_slots=image_slots(checkpoint) if checkpoint.ip_adapters else (1, 1),
    )


def vae_widths(checkpoint: Checkpoint, subfolder: str, network: nn.Module) -> VaeWidths:
    """Return the sizes of a VAE."""
    return checkpoint.vae_widths()


def image_encoder_widths(checkpoint: Checkpoint, subfolder: str, network: nn.Module) -> ImageEncoderWidths:
    """Return the sizes of an IP-Adapter's image encoder."""
    files = checkpoint.ip_adapter(subfolder.partition(".")[2])
    return ImageEncoderWidths(checkpoint.config(subfolder).size("image_size"), features_of_image(checkpoint, files))


def ip_adapter_widths(checkpoint: Checkpoint, subfolder: str, network: nn.Module) -> IpAdapterWidths:
    """Return the sizes of an IP-Adapter for a UNet."""
    files = checkpoint.ip_adapter(subfolder.partition(".")[2])
    features, tokens = features_of_image(checkpoint, files), tokens_of_image(checkpoint, files)
    return IpAdapterWidths(features, tokens, text_width(network))


def safety_checker_widths(checkpoint: Checkpoint, subfolder: str, network: nn.Module) -> SafetyCheckerWidths:
    """Return the sizes of a safety checker."""
    concepts, special = (len(network.get_parameter(name)) for name in ("concept_embeds", "special_care_embeds"))
    return SafetyCheckerWidths(checked_side(checkpoint), concepts, special)
