"""The tensors that each network of an SDXL pipeline takes and returns, and the check of callers' tensors against them.

Shapes are symbolic in the batch ("rows", the manifest's word for it) and in pixels ("height/8" is a latent's side).
Neither runtime checks the shapes of its inputs, so every engine checks them here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from model.errors import EngineError
from model.store.manifest import Signature, TensorSpec
from model.store.precision import Dtype, StorageDtype

TIMESTEP_COND = "timestep_cond"  # the embedded guidance scale, as diffusers calls it

DTYPES: dict[StorageDtype, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int64": torch.int64,
    "int32": torch.int32,
    "int8": torch.int8,
    "uint8": torch.uint8,
}


def dtype_name(dtype: torch.dtype) -> str:
    """torch.float32 -> "float32"."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Widths:
    """The sizes of a model that shapes depend on; `engine_builder.checkpoints` reads them."""

    tokens: int
    text_width: int
    text_width_2: int
    pooled_width: int
    latent_channels: int
    time_ids: int
    vae_scale: int
    timestep_cond: int = 0  # 0: the UNet does not embed the guidance scale


def text_signature(width: int, tokens: int, dtype: Dtype, pooled_width: int | None) -> Signature:
    """input_ids [batch, tokens] -> penultimate hidden states [batch, tokens, width] (and the pooled projection)."""
    outputs = [TensorSpec(name="hidden_states", dtype=dtype, shape=("rows", tokens, width))]
    if pooled_width is not None:
        outputs.append(TensorSpec(name="pooled", dtype=dtype, shape=("rows", pooled_width)))
    ids = TensorSpec(name="input_ids", dtype="int64", shape=("rows", tokens))
    return Signature(inputs=(ids,), outputs=tuple(outputs))


def unet_text_signature(tokens: int, context_width: int, text_width: int, dtype: Dtype) -> Signature:
    """Text embeddings -> keys and values of all cross-attentions of a UNet, computed once a prompt."""
    return Signature(
        inputs=(TensorSpec(name="encoder_hidden_states", dtype=dtype, shape=("rows", tokens, context_width)),),
        outputs=(TensorSpec(name="keys_values", dtype=dtype, shape=("rows", tokens, text_width)),),
    )


def unet_time_signature(widths: Widths, time_width: int, dtype: Dtype) -> Signature:
    """Timestep, pooled text and sizes -> what they add in each ResNet block of a UNet.

    The batch is the number of timesteps: all steps of a request are computed at once. A UNet that embeds the guidance
    scale (`Widths.timestep_cond`) takes that too.
    """
    inputs = [
        TensorSpec(name="timestep", dtype="float32", shape=("rows",)),
        TensorSpec(name="text_embeds", dtype=dtype, shape=("rows", widths.pooled_width)),
        TensorSpec(name="time_ids", dtype="float32", shape=("rows", widths.time_ids)),
    ]
    if widths.timestep_cond:
        inputs.append(TensorSpec(name=TIMESTEP_COND, dtype=dtype, shape=("rows", widths.timestep_cond)))
    return Signature(
        inputs=tuple(inputs), outputs=(TensorSpec(name="time_embeds", dtype=dtype, shape=("rows", time_width)),)
    )


def timestep_cond_width(signature: Signature) -> int:
    """Width of the embedded guidance scale that a time network takes; 0 where it takes none."""
    return next((int(spec.shape[1]) for spec in signature.inputs if spec.name == TIMESTEP_COND), 0)


def unet_signature(widths: Widths, time_width: int, text_width: int, dtype: Dtype) -> Signature:
    """Latents with their time embeddings, keys and values -> the predicted noise, of the latents' shape."""
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
    """Latents divided by the scaling factor -> pixels in [-1, 1], [batch, 3, height, width]."""
    latent = ("rows", latent_channels, f"height/{vae_scale}", f"width/{vae_scale}")
    return Signature(
        inputs=(TensorSpec(name="latents", dtype=dtype, shape=latent),),
        outputs=(TensorSpec(name="pixels", dtype=dtype, shape=("rows", 3, "height", "width")),),
    )


def bind_shapes(signature: Signature, inputs: Mapping[str, torch.Tensor], component: str) -> dict[str, int]:
    """Check `inputs` against the signature and return its symbols: {"rows": batch, "height": pixels, "width": pixels}.

    Raises EngineError naming the input: missing or unknown, a wrong dtype, a shape that contradicts the signature or
    another input.
    """
    names = [spec.name for spec in signature.inputs]
    if set(names) != set(inputs):
        raise EngineError(f"{component} takes {', '.join(names)}; it received {', '.join(inputs) or 'nothing'}.", "")
    known: dict[str, int] = {}
    for spec in signature.inputs:
        tensor = inputs[spec.name]
        matches = tensor.dtype == DTYPES[spec.dtype] and len(tensor.shape) == len(spec.shape)
        for size, dimension in zip(tensor.shape, spec.shape, strict=False):
            if isinstance(dimension, int):
                matches = matches and size == dimension
            else:
                symbol, _, divisor = dimension.partition("/")
                value = size * int(divisor or 1)
                matches = matches and known.setdefault(symbol, value) == value
        if not matches:
            raise EngineError(
                f"{component}: input {spec.name} is {dtype_name(tensor.dtype)} {list(tensor.shape)}, "
                f"expected {spec.dtype} {list(spec.shape)}" + (f" with {known}." if known else "."),
                "",
            )
    return known
