"""Read a file of textual inversion: the vectors that a token stands for, of each text encoder."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from model.errors import PreheatError

_PICKLES = (".pt", ".pth", ".ckpt", ".bin", ".pkl")
# The keys of kohya's scripts and diffusers' pivotal tuning, and those of diffusers' older scripts.
_SDXL_KEYS = (("clip_l", "clip_g"), ("text_encoders_0", "text_encoders_1"))
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MAX_FILE_BYTES = 64 * 2**20


class BadEmbedding(PreheatError):
    """A file is not an embedding that can be used with this model."""

    remedy = "Give a safetensors file of textual inversion that was trained for this model."


def read_embedding(path: Path, encoders: int) -> list[torch.Tensor]:
    """Return the vectors of each text encoder, float32 [vectors, width]. Raises BadEmbedding.

    `encoders`: 2 for SDXL, whose files have two tensors. 1 for others, whose files have one tensor of any name.
    """
    if path.suffix in _PICKLES:
        raise BadEmbedding(f"{path} may hold a pickle, which can run code. It was not opened.")
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise BadEmbedding(f"{path} has more than {_MAX_FILE_BYTES // 2**20} MiB.")
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise BadEmbedding(f"{path} is not a complete safetensors file ({reason}).") from error
    keys = [tuple(tensors)] if encoders == 1 else [keys for keys in _SDXL_KEYS if set(keys) == set(tensors)]
    if not keys or len(keys[0]) != encoders:
        found, wanted = ", ".join(sorted(tensors)) or "nothing", "clip_l and clip_g" if encoders == 2 else "one tensor"
        raise BadEmbedding(f"{path} has {found:.200}, expected {wanted}.")
    vectors = [tensors[key] for key in keys[0]]
    vectors = [tensor[None] if tensor.ndim == 1 else tensor for tensor in vectors]
    for key, tensor in zip(keys[0], vectors, strict=True):
        if tensor.dtype not in _DTYPES or tensor.ndim != 2 or not len(tensor):
            raise BadEmbedding(f"{path}: {key:.80} is {tensor.dtype} {list(tensor.shape)}, expected [vectors, width].")
        if not tensor.isfinite().all():
            raise BadEmbedding(f"{path}: {key:.80} holds NaN or infinity.")
    if len({len(tensor) for tensor in vectors}) > 1:
        counts = " and ".join(str(len(tensor)) for tensor in vectors)
        raise BadEmbedding(f"{path} has {counts} vectors for the text encoders. Their numbers must be equal.")
    return [tensor.float() for tensor in vectors]
