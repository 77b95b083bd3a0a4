"""What the families of UNets share: the networks that a UNet is divided into, and the VAE."""

from model.engines import signatures
from model.pipeline.spec import UNET, UNET_GUIDED, VAE_DECODER, VAE_ENCODER, ComponentSpec, Denoiser, Part, Variant
from model.validation import BAND_COUNTS

_GUIDED_VARIANT = Variant(UNET_GUIDED, "GuidedUnetNetwork", guided=True)
_BAND_VARIANTS = tuple(Variant(f"{UNET}_{bands}_bands", "BandUnetNetwork", bands=bands) for bands in BAND_COUNTS)


def unet_components(part: Part, prefix: str, variants: tuple[Variant, ...]) -> tuple[ComponentSpec, ...]:
    """Return the three networks that a UNet is divided into, by how often each of them runs."""
    folder, by_step = "unet", ("time_embeds",)
    return (
        ComponentSpec(
            f"{prefix}unet_text", part, folder, "UnetTextNetwork", signatures.unet_text_signature, "prompt", "text"
        ),
        ComponentSpec(
            f"{prefix}unet_time", part, folder, "UnetTimeNetwork", signatures.unet_time_signature, "request", "timestep"
        ),
        ComponentSpec(
            f"{prefix}unet", part, folder, "UnetNetwork", signatures.unet_signature, "step", "cfg_half", "denoising",
            by_step, variants=variants,
        ),
    )  # fmt: skip


def unet_denoiser(part: Part, prefix: str, *text_encoders: tuple[str, str]) -> Denoiser:
    """Return the roles of these networks, with pairs of text encoder and tokenizer."""
    return Denoiser(part, text_encoders, f"{prefix}unet_text", f"{prefix}unet_time", f"{prefix}unet")


IMAGE_COMPONENTS = (
    *unet_components("base", "", (_GUIDED_VARIANT, *_BAND_VARIANTS)),
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
