"""Read an adapter's file: low-rank factors by layer, checked. Nothing of it reaches a device before it is checked."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine_builder.adapters.names import UNSUPPORTED, dotted_name, kohya_names, split_key
from engine_builder.files import read_file
from model.adapters.layers import Layer
from model.errors import PreheatError
from model.store.adapter_record import MAX_RANK
from model.weights.safetensors_header import InvalidHeader, read_header
from model.weights.stream import tensor_view

MAX_FILE_BYTES = 4 * 2**30
MAX_SCALE = 1e4  # of alpha / rank; trainers write at most some hundreds
_DTYPES = {"F16", "BF16", "F32", "F64"}
_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"  # of a folder that PEFT wrote
_METADATA = "lora_adapter_metadata"  # diffusers' entry in the header: the options of PEFT


class BadAdapter(PreheatError):
    """A file is not a LoRA adapter that can be used with this model."""

    remedy = "Give a LoRA or LoCon in a safetensors file, made for this model by kohya's scripts, diffusers or PEFT."


@dataclass(frozen=True)
class Factors:
    """The change of one layer: scale * (up @ down).

    down: [rank, in] or [rank, in, height, width]. up: [out, rank]. shape: of the layer's weight.
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float
    shape: tuple[int, ...]


@dataclass(frozen=True)
class AdapterFile:
    """The bytes of a file, its tensors, and PEFT's options from its header or from the file next to it."""

    path: Path
    data: bytes
    tensors: Mapping[str, torch.Tensor]
    options: Mapping[str, Any]


def open_adapter(path: Path) -> AdapterFile:
    """Read a safetensors file, or the folder of one that PEFT wrote. Raises BadAdapter."""
    options: dict[str, Any] = {}
    if path.is_dir():
        config = path / _CONFIG
        if config.exists():
            options = _parse_options(_read(config).decode(errors="replace"), config)
        path = path / _WEIGHTS
    if path.suffix in (".pt", ".pth", ".ckpt", ".bin", ".pkl"):
        raise BadAdapter(f"{path} may hold a pickle, which can run code. It was not opened.")
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise BadAdapter(f"{path} has more than {MAX_FILE_BYTES // 2**30} GiB.")
    except OSError as error:
        raise BadAdapter(f"{path} cannot be read: {error.strerror or error}.", "Name another file.") from error
    data = _read(path)
    try:
        extents = read_header(data, len(data))
    except InvalidHeader as error:
        raise BadAdapter(f"{path} is not a safetensors file: {error}.") from error
    for key, extent in extents.items():
        if extent.dtype not in _DTYPES:
            raise BadAdapter(f"{path}: {key[:120]!r} is {extent.dtype}, expected F16, BF16, F32 or F64.")
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    tensors = {key: tensor_view(flat[extent.start : extent.end], extent) for key, extent in extents.items()}
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata = header.get("__metadata__") or {}
    if isinstance(metadata, dict) and isinstance(metadata.get(_METADATA), str):
        options = _parse_options(metadata[_METADATA], path)
    return AdapterFile(path, data, tensors, options)


def read_factors(file: AdapterFile, layers: Mapping[str, Layer]) -> dict[str, Factors]:
    """Return the factors by layer. `layers`: those of the model. Raises BadAdapter naming the first problem."""
    _refuse_unsupported(file)
    kohya = kohya_names(layers.values())
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in file.tensors.items():
        split = split_key(key)
        if split is None:
            raise BadAdapter(f"{file.path}: {key[:120]!r} is not the name of a LoRA's tensor.")
        stem, role = split
        layer = kohya.get(stem) if stem.startswith("lora_") else dotted_name(stem)
        if layer is None or layer not in layers:
            raise BadAdapter(
                f"{file.path}: this model has no layer for {key[:120]!r}. The adapter is for another model."
            )
        if role in found.setdefault(layer, {}):
            raise BadAdapter(f"{file.path}: {layer} has two tensors {role!r}.")
        found[layer][role] = tensor
    if not found:
        raise BadAdapter(f"{file.path} has no tensors.")
    return {name: _factors(file, layers[name], parts) for name, parts in sorted(found.items())}


def _factors(file: AdapterFile, layer: Layer, parts: Mapping[str, torch.Tensor]) -> Factors:
    """Check the tensors of one layer, and return its factors."""
    where = f"{file.path}: {layer.name}"
    for role in ("down", "up"):
        if role not in parts:
            raise BadAdapter(f"{where} has no {role!r} tensor.")
    down, up = (_as_float(parts[role]) for role in ("down", "up"))
    rank, shape = down.shape[0] if down.ndim else 0, layer.shape
    if not 1 <= rank <= MAX_RANK:
        raise BadAdapter(f"{where} has rank {rank}, expected 1 to {MAX_RANK}.", "Train or resize it to a smaller rank.")
    # A linear's factors may be written as those of a 1x1 convolution, and a 1x1 convolution's as a linear's.
    kernel = shape[2:] if math.prod(shape[2:]) > 1 else ()
    if math.prod(down.shape[2:]) == 1 and not kernel:
        down = down.reshape(down.shape[:2])
    if math.prod(up.shape[2:]) == 1:
        up = up.reshape(up.shape[:2])
    if tuple(down.shape) != (rank, shape[1], *kernel) or tuple(up.shape) != (shape[0], rank):
        raise BadAdapter(
            f"{where} has factors of the shapes {list(parts['down'].shape)} and {list(parts['up'].shape)}, and the "
            f"layer's weight is {list(shape)}. The adapter is for another model."
        )
    for role, tensor in (("down", down), ("up", up)):
        if not bool(torch.isfinite(tensor).all()):
            raise BadAdapter(f"{where}: the {role!r} tensor has NaN or infinite values.")
    scale = _scale(file, layer, parts.get("alpha"), rank, where)
    return Factors(down, up, scale, (*shape[:2], *kernel))


def _as_float(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def _scale(file: AdapterFile, layer: Layer, alpha: torch.Tensor | None, rank: int, where: str) -> float:
    """Return alpha / rank. The file's own alpha comes before PEFT's options; without either it is 1."""
    value: object = rank
    if alpha is not None:
        value = alpha.item() if alpha.numel() == 1 else None
    elif file.options:
        component, _, module = layer.name.partition(".")
        options = {
            key.removeprefix(f"{component}."): entry
            for key, entry in file.options.items()
            if key.startswith(f"{component}.") or "." not in key
        }
        pattern = options.get("alpha_pattern")
        value = options.get("lora_alpha", rank)
        for name, entry in pattern.items() if isinstance(pattern, dict) else ():
            if module == name or module.endswith(f".{name}"):
                value = entry
    # Compared before the division, which raises OverflowError for a whole number beyond a float's range.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_SCALE * rank:
        raise BadAdapter(f"{where} has an invalid alpha ({str(value)[:40]}).")
    return value / rank


def _refuse_unsupported(file: AdapterFile) -> None:
    for key in file.tensors:
        for part, kind in UNSUPPORTED.items():
            if part in key:
                raise BadAdapter(
                    f"{file.path} is not a plain LoRA: {key[:120]!r} shows {kind}, which is not supported."
                )
    for key, value in file.options.items():
        option = key.rpartition(".")[2]
        if option in ("use_dora", "use_rslora") and value:
            kind = {"use_dora": "DoRA", "use_rslora": "rsLoRA"}[option]
            raise BadAdapter(f"{file.path} is not a plain LoRA: it is a {kind}, which is not supported.")
        if option == "peft_type" and value != "LORA":
            raise BadAdapter(f"{file.path} is not a plain LoRA: it is a {str(value)[:40]}, which is not supported.")


def _parse_options(text: str, path: Path) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadAdapter(f"{path}: the options of PEFT are not JSON.") from error
    if not isinstance(options, dict):
        raise BadAdapter(f"{path}: the options of PEFT are not a JSON object.")
    return options


def _read(path: Path) -> bytes:
    try:
        return read_file(path)
    except OSError as error:
        raise BadAdapter(f"{path} cannot be read: {error.strerror or error}.", "Name another file.") from error
