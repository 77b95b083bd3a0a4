"""Read the files of textual inversion: the vectors that a token stands for, of each text encoder."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine_builder.error_text import cause_of
from engine_builder.files import PICKLE_SUFFIXES
from model.errors import PreheatError

# The keys of kohya's scripts and diffusers' pivotal tuning, and those of diffusers' older scripts.
_SDXL_KEYS = (("clip_l", "clip_g"), ("text_encoders_0", "text_encoders_1"))
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MAX_FILE_BYTES = 64 * 2**20
_OF_WIDTH = {
    768: "SDXL's first text encoder or Stable Diffusion 1",
    1024: "Stable Diffusion 2",
    1280: "SDXL's second text encoder",
}
ONE_FILE_EACH = "Give a file for each text encoder, in their order: TOKEN=FIRST.safetensors,SECOND.safetensors."


class BadEmbedding(PreheatError):
    """A file is not an embedding that can be used with this model."""

    remedy = "Give a safetensors file of textual inversion that was trained for this model."


@dataclass(frozen=True)
class EmbeddingFiles:
    """The tensors of an embedding: of one file for all text encoders, or of one for each. digests: of the files."""

    files: tuple[tuple[Path, Mapping[str, torch.Tensor]], ...]
    digests: tuple[str, ...]


def open_embedding(paths: Sequence[Path]) -> EmbeddingFiles:
    """Read the files of an embedding. Raises BadEmbedding."""
    files = tuple((path, _read_tensors(path)) for path in paths)
    return EmbeddingFiles(files, tuple(hashlib.sha256(path.read_bytes()).hexdigest() for path in paths))


def read_vectors(embedding: EmbeddingFiles, encoders: int) -> list[torch.Tensor]:
    """Return the vectors of each text encoder, float32 [vectors, width]. Raises BadEmbedding.

    `encoders`: 2 for SDXL, whose single file has two tensors. 1 for others. A file for one text encoder has one tensor
    of any name.
    """
    files = embedding.files
    if len(files) == 1 and encoders == 2:
        [(path, tensors)] = files
        keys = next((keys for keys in _SDXL_KEYS if set(keys) == set(tensors)), None)
        if keys is None:
            raise _incomplete(path, tensors)
        vectors = [(path, key, tensors[key]) for key in keys]
    elif len(files) != encoders:
        raise BadEmbedding(
            f"{len(files)} files were given for one token. The model has {encoders} text encoder(s).", ONE_FILE_EACH
        )
    else:
        for path, tensors in files:
            if len(tensors) != 1:
                is_sdxl = any(set(keys) <= set(tensors) for keys in _SDXL_KEYS)
                reason = ": an embedding for the two text encoders of SDXL" if is_sdxl else ""
                raise BadEmbedding(
                    f"{path} has {_names(tensors)}{reason}. Expected one tensor, of one text encoder.",
                    "Give that file alone, for an SDXL model." if is_sdxl else None,
                )
        vectors = [(path, *next(iter(tensors.items()))) for path, tensors in files]
    vectors = [(path, key, tensor[None] if tensor.ndim == 1 else tensor) for path, key, tensor in vectors]
    for path, key, tensor in vectors:
        if tensor.dtype not in _DTYPES or tensor.ndim != 2 or not len(tensor):
            raise BadEmbedding(f"{path}: {key:.80} is {tensor.dtype} {list(tensor.shape)}, expected [vectors, width].")
        if not tensor.isfinite().all():
            raise BadEmbedding(f"{path}: {key:.80} holds NaN or infinity.")
    if len({len(tensor) for _, _, tensor in vectors}) > 1:
        counts = " and ".join(str(len(tensor)) for _, _, tensor in vectors)
        given = ", ".join(str(path) for path, _ in files)
        raise BadEmbedding(f"{given} has {counts} vectors for the text encoders. Their numbers must be equal.")
    return [tensor.float() for _, _, tensor in vectors]


def describe_width(width: int) -> str:
    """Return "width 768 (SDXL's first text encoder or Stable Diffusion 1)"."""
    return f"width {width} ({_OF_WIDTH[width]})" if width in _OF_WIDTH else f"width {width}"


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a safetensors file. Raises BadEmbedding."""
    if path.suffix in PICKLE_SUFFIXES:
        raise BadEmbedding(f"{path} may hold a pickle, which can run code. It was not opened.")
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise BadEmbedding(f"{path} has more than {_MAX_FILE_BYTES // 2**20} MiB.")
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}
    except OSError as error:
        raise BadEmbedding(f"{path} cannot be read: {cause_of(error)}.", "Name another file.") from error
    except (SafetensorError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise BadEmbedding(f"{path} is not a complete safetensors file ({reason}).") from error


def _incomplete(path: Path, tensors: Mapping[str, torch.Tensor]) -> BadEmbedding:
    """Return the refusal of a single file that has not the tensors of SDXL's two text encoders."""
    if len(tensors) != 1:
        return BadEmbedding(f"{path} has {_names(tensors)}, expected clip_l and clip_g.")
    [(name, tensor)] = tensors.items()
    for keys in _SDXL_KEYS:
        if name in keys:
            number = 1 - keys.index(name)
            missing, encoder = keys[number], ("first", "second")[number]
            return BadEmbedding(
                f"{path} has {name} and lacks {missing}, the vectors of SDXL's {encoder} text encoder.", ONE_FILE_EACH
            )
    width = describe_width(tensor.shape[-1]) if tensor.ndim else "no width"
    return BadEmbedding(
        f"{path} has the vectors of one text encoder only: {name:.80}, {width}. SDXL has two.", ONE_FILE_EACH
    )


def _names(tensors: Mapping[str, torch.Tensor]) -> str:
    return f"{', '.join(sorted(tensors)) or 'nothing':.200}"
