"""What each network of an SDXL pipeline takes and gives, and the check that holds callers to it.

Shapes are symbolic in rows and pixels ("height/8" is a latent's side). Both runtimes accept tensors of a wrong shape
and answer nonsense, so every engine checks its inputs here. This module knows nothing of weights or devices.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from model.errors import EngineError
from model.store.manifest import Dtype, Precision, Signature, TensorSpec

TEXT_ENCODER = "text_encoder"
TEXT_ENCODER_2 = "text_encoder_2"
UNET_TEXT = "unet_text"
UNET_TIME = "unet_time"
UNET = "unet"
# Optional, for guidance against no text at all: rows that are told none, to run beside the UNet of those that are told
# one, and both in one call.
UNET_UNCONDITIONAL = "unet_unconditional"
UNET_GUIDED = "unet_guided"
GUIDED = (UNET_UNCONDITIONAL, UNET_GUIDED)
REFINER_TEXT_ENCODER_2 = "refiner_text_encoder_2"
REFINER_UNET_TEXT = "refiner_unet_text"
REFINER_UNET_TIME = "refiner_unet_time"
REFINER_UNET = "refiner_unet"
VAE_DECODER = "vae_decoder"

BASE_COMPONENTS = (TEXT_ENCODER, TEXT_ENCODER_2, UNET_TEXT, UNET_TIME, UNET, VAE_DECODER)
REFINER_COMPONENTS = (REFINER_TEXT_ENCODER_2, REFINER_UNET_TEXT, REFINER_UNET_TIME, REFINER_UNET)

LOOPED = (UNET, *GUIDED, REFINER_UNET)  # what a denoising loop runs at each step

TIMESTEP_COND = "timestep_cond"  # the embedded guidance scale, as diffusers calls it

DTYPES: dict[Dtype, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
}
PRECISIONS: dict[Precision, Dtype] = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def dtype_name(dtype: torch.dtype) -> str:
    """torch.float32 -> "float32"."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Widths:
    """The numbers of a model that shapes depend on; see `engine_builder.networks` for where they are read."""

    tokens: int
    text_width: int
    text_width_2: int
    pooled_width: int
    latent_channels: int
    time_ids: int
    vae_scale: int
    timestep_cond: int = 0  # none


def text_signature(width: int, tokens: int, dtype: Dtype, pooled_width: int | None) -> Signature:
    """input_ids [rows, tokens] -> penultimate hidden states [rows, tokens, width] (and the pooled projection)."""
    outputs = [TensorSpec(name="hidden_states", dtype=dtype, shape=("rows", tokens, width))]
    if pooled_width is not None:
        outputs.append(TensorSpec(name="pooled", dtype=dtype, shape=("rows", pooled_width)))
    ids = TensorSpec(name="input_ids", dtype="int64", shape=("rows", tokens))
    return Signature(inputs=(ids,), outputs=tuple(outputs))


def unet_text_signature(tokens: int, context_width: int, text_width: int, dtype: Dtype) -> Signature:
    """The text -> keys and values of all of a UNet's cross-attentions: computed once a prompt."""
    return Signature(
        inputs=(TensorSpec(name="encoder_hidden_states", dtype=dtype, shape=("rows", tokens, context_width)),),
        outputs=(TensorSpec(name="keys_values", dtype=dtype, shape=("rows", tokens, text_width)),),
    )


def unet_time_signature(widths: Widths, time_width: int, dtype: Dtype) -> Signature:
    """Timestep, pooled text and sizes -> what they add in each of a UNet's ResNet blocks. A row here is a step: all
    steps of a request are computed at once. A UNet that embeds guidance (`Widths.timestep_cond`) also takes that."""
    inputs = [
        TensorSpec(name="timestep", dtype="float32", shape=("rows",)),
        TensorSpec(name="text_embeds", dtype=dtype, shape=("rows", widths.pooled_width)),
        TensorSpec(name="time_ids", dtype="float32", shape=("rows", widths.time_ids)),
    ]
    if widths.timestep_cond:
        inputs.append(TensorSpec(name=TIMESTEP_COND, dtype=dtype, shape=("rows", widths.timestep_cond)))
    return Signature(
        inputs=tuple(inputs),
        outputs=(TensorSpec(name="time_embeds", dtype=dtype, shape=("rows", time_width)),),
    )


def timestep_cond_width(signature: Signature) -> int:
    """The width of a time network's embedded guidance; 0 where it takes none."""
    return next((int(spec.shape[1]) for spec in signature.inputs if spec.name == TIMESTEP_COND), 0)


def unet_signature(widths: Widths, time_width: int, text_width: int, dtype: Dtype) -> Signature:
    """Latents of each row, and what its time and text came to -> the predicted noise, of the latents' shape."""
    height, width = f"height/{widths.vae_scale}", f"width/{widths.vae_scale}"
    latent = ("rows", widths.latent_channels, height, width)
    return Signature(
        inputs=(
            TensorSpec(name="sample", dtype=dtype, shape=latent),
            TensorSpec(name="time_embeds", dtype=dtype, shape=("rows", time_width)),
            TensorSpec(name="keys_values", dtype=dtype, shape=("rows", widths.tokens, text_width)),
        ),
        outputs=(TensorSpec(name="noise", dtype=dtype, shape=latent),),
    )


def vae_decoder_signature(latent_channels: int, vae_scale: int, dtype: Dtype) -> Signature:
    """Latents divided by the scaling factor -> pixels in [-1, 1], [rows, 3, height, width]."""
    latent = ("rows", latent_channels, f"height/{vae_scale}", f"width/{vae_scale}")
    return Signature(
        inputs=(TensorSpec(name="latents", dtype=dtype, shape=latent),),
        outputs=(TensorSpec(name="pixels", dtype=dtype, shape=("rows", 3, "height", "width")),),
    )


def solve(signature: Signature, inputs: Mapping[str, torch.Tensor], component: str) -> dict[str, int]:
    """Check `inputs` against the signature and return {"rows": ..., "height": ..., "width": ...} in rows and pixels.

    Raises EngineError naming the input: missing or unknown, a wrong dtype, a shape that contradicts the signature or
    another input.
    """
    names = [spec.name for spec in signature.inputs]
    if set(names) != set(inputs):
        raise EngineError(f"{component} takes {', '.join(names)}; it was given {', '.join(inputs) or 'nothing'}.")
    known: dict[str, int] = {}
    for spec in signature.inputs:
        tensor = inputs[spec.name]
        fits = tensor.dtype == DTYPES[spec.dtype] and len(tensor.shape) == len(spec.shape)
        for size, dimension in zip(tensor.shape, spec.shape, strict=False):
            if isinstance(dimension, int):
                fits = fits and size == dimension
            else:
                symbol, _, divisor = dimension.partition("/")
                value = size * int(divisor or 1)
                fits = fits and known.setdefault(symbol, value) == value
        if not fits:
            raise EngineError(
                f"{component}: input {spec.name} is {dtype_name(tensor.dtype)} {list(tensor.shape)}, "
                f"expected {spec.dtype} {list(spec.shape)}" + (f" with {known}." if known else ".")
            )
    return known
