"""Encode the reference images of IP-Adapters, once for all images and steps of a request.

The arithmetic equals diffusers' `prepare_ip_adapter_image_embeds`, `MultiIPAdapterImageProjection` and
`IPAdapterAttnProcessor2_0`. The text's attention gets, for each adapter, `scale` times the attention to its tokens.
All images of an adapter add tokens to one attention. The unconditional half attends to tokens of an image of zeros
after normalization. If the encoder returns one embedding of an image, it attends to tokens of an embedding of zeros.
"""

from collections.abc import Sequence

import torch

from model.cuda.streams import to_device
from model.engines.shapes import DTYPES
from model.engines.signatures import IMAGE_BIAS, IMAGE_FEATURES, IMAGE_KEYS, IMAGE_VALUES
from model.images.clip_input import normalize
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.params import ImagePrompt
from model.pipeline.spec import IMAGE_ENCODER, IP_ADAPTER, IP_UNET

MASKED = -1e4  # the bias of an unused token: its share of the attention is 0 in float32


def condition_image_prompts(
    model: LoadedModel, prompts: Sequence[ImagePrompt], guided: bool
) -> list[dict[str, torch.Tensor]]:
    """Return the UNet's inputs for the conditional half and, if `guided`, for the unconditional one.

    Each adapter has a slot. Unused tokens of its slot are masked. The values of an unused slot are zeros, so it adds
    nothing. Call it on the text stream.
    """
    halves = []
    for conditional in (True, False)[: 1 + guided]:
        inputs = {
            spec.name: torch.zeros((1, *map(int, spec.shape[1:])), dtype=DTYPES[spec.dtype], device=model.device)
            for spec in model.engines[IP_UNET].signature.inputs
            if spec.name in (IMAGE_KEYS, IMAGE_VALUES, IMAGE_BIAS)
        }
        for slot, prompt in enumerate(prompts):
            features = encode_images(model, prompt) if conditional else _unconditional_features(model, prompt.name)
            outputs = model.engines[f"{IP_ADAPTER}.{prompt.name}"].run({IMAGE_FEATURES: features})
            keys, values = outputs[IMAGE_KEYS].flatten(0, 1), outputs[IMAGE_VALUES].flatten(0, 1)  # [tokens, width]
            inputs[IMAGE_KEYS][0, slot, : len(keys)] = keys
            inputs[IMAGE_VALUES][0, slot, : len(values)] = values * prompt.scale
            inputs[IMAGE_BIAS][0, slot, len(keys) :] = MASKED
        halves.append(inputs)
    return halves


def encode_images(model: LoadedModel, prompt: ImagePrompt) -> torch.Tensor:
    """Return the features of an adapter's reference images, [images, width] or [images, tokens, width]."""
    levels = to_device(torch.from_numpy(prompt.levels), model.device)
    return _encode(model, prompt.name, to_encoder_input(levels))


def to_encoder_input(levels: torch.Tensor) -> torch.Tensor:
    """Convert uint8 [images, side, side, 3] to float32 [images, 3, side, side], as `CLIPImageProcessor` normalizes."""
    return normalize(levels.permute(0, 3, 1, 2).float()).contiguous()


def _unconditional_features(model: LoadedModel, adapter: str) -> torch.Tensor:
    """Return the features of the unconditional half, [1, ...]. They depend on no image."""
    [features] = model.engines[f"{IP_ADAPTER}.{adapter}"].signature.inputs
    if len(features.shape) == 2:
        return torch.zeros((1, int(features.shape[1])), dtype=DTYPES[features.dtype], device=model.device)
    [pixels] = model.engines[f"{IMAGE_ENCODER}.{adapter}"].signature.inputs
    return _encode(model, adapter, torch.zeros((1, *map(int, pixels.shape[1:])), device=model.device))


def _encode(model: LoadedModel, adapter: str, pixels: torch.Tensor) -> torch.Tensor:
    encoder = model.engines[f"{IMAGE_ENCODER}.{adapter}"]
    dtype = DTYPES[encoder.signature.inputs[0].dtype]
    return encoder.run({"pixels": pixels.to(dtype)})[IMAGE_FEATURES]
