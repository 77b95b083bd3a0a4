"""Names of the networks of an SDXL pipeline, as manifests have them. Imports nothing."""

TEXT_ENCODER = "text_encoder"
TEXT_ENCODER_2 = "text_encoder_2"
UNET_TEXT = "unet_text"
UNET_TIME = "unet_time"
UNET = "unet"
# Optional variants of the UNet for classifier-free guidance (CFG) against zeros, that is, without a negative prompt.
UNET_UNCONDITIONAL = "unet_unconditional"  # the unconditional half alone; runs concurrently with the conditional UNet
UNET_GUIDED = "unet_guided"  # both halves in one call
CFG_VARIANTS = (UNET_UNCONDITIONAL, UNET_GUIDED)
REFINER_TEXT_ENCODER_2 = "refiner_text_encoder_2"
REFINER_UNET_TEXT = "refiner_unet_text"
REFINER_UNET_TIME = "refiner_unet_time"
REFINER_UNET = "refiner_unet"
VAE_DECODER = "vae_decoder"

BASE_COMPONENTS = (TEXT_ENCODER, TEXT_ENCODER_2, UNET_TEXT, UNET_TIME, UNET, VAE_DECODER)
REFINER_COMPONENTS = (REFINER_TEXT_ENCODER_2, REFINER_UNET_TEXT, REFINER_UNET_TIME, REFINER_UNET)
PER_STEP_COMPONENTS = (UNET, *CFG_VARIANTS, REFINER_UNET)
