"""The networks that the families of UNets share: the three that a UNet is divided into, and the VAE."""

from model.engines import signatures
from model.pipeline.spec import VAE_DECODER, VAE_ENCODER, ComponentSpec, Denoiser, Part


def unet_components(part: Part, prefix: str) -> tuple[ComponentSpec, ...]:
    """Return the three networks that a UNet is divided into, by how often each of them runs."""
    folder = "unet"
    return (
        ComponentSpec(
            f"{prefix}unet_text", part, folder, "UnetTextNetwork", signatures.unet_text_signature, "prompt", "text"
        ),
        ComponentSpec(
            f"{prefix}unet_time", part, folder, "UnetTimeNetwork", signatures.unet_time_signature, "request", "timestep"
        ),
        ComponentSpec(
            f"{prefix}unet", part, folder, "StepUnet", signatures.unet_signature, "step", "cfg_half", "denoising"
        ),
    )  # fmt: skip


def unet_denoiser(part: Part, prefix: str, *text_encoders: tuple[str, str]) -> Denoiser:
    """Return the roles of these networks, with pairs of text encoder and tokenizer."""
    return Denoiser(part, text_encoders, f"{prefix}unet_text", f"{prefix}unet_time", f"{prefix}unet")


IMAGE_COMPONENTS = (
    *unet_components("base", ""),
    ComponentSpec(
        VAE_ENCODER, "base", "vae", "VaeEncoderNetwork", signatures.vae_encoder_signature, "request", "image",
        "encoding", precision_rule="vae", optional=True,
    ),
    ComponentSpec(
        VAE_DECODER, "base", "vae", "VaeDecoderNetwork", signatures.vae_decoder_signature, "image", "image", "decoding",
        precision_rule="vae",
    ),
)  # fmt: skip
"""The UNet of the base, and the VAE."""
