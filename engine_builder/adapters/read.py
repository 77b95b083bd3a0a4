"""Read an adapter's file: low-rank factors by layer, checked. Nothing of it reaches a device before it is checked."""

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from engine_builder.adapters.bad_adapter import FORMATS, BadAdapter
from engine_builder.adapters.names import UNSUPPORTED, FoundName, LayerNames, embedding_name, split_key
from engine_builder.adapters.options import (
    Module,
    PeftOptions,
    Stated,
    check_options,
    diffusers_name,
    parse_options,
    stated_scales,
)
from engine_builder.files import read_file
from model.adapters.layers import Layer
from model.store.adapter_record import MAX_RANK
from model.store.manifest_json import printable
from model.weights.safetensors_header import InvalidHeader, read_header
from model.weights.stream import tensor_view

MAX_FILE_BYTES = 4 * 2**30
MAX_SCALE = 1e4  # of alpha / rank; trainers write at most some hundreds
_FLOATS = ("F16", "BF16", "F32", "F64")
_INTEGERS = ("I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64")  # kohya's extraction stores alpha as one
_PEFT_WEIGHTS, _PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"  # of a folder that PEFT wrote
_DIFFUSERS_WEIGHTS = "pytorch_lora_weights.safetensors"  # of a folder that diffusers wrote
_METADATA = "lora_adapter_metadata"  # diffusers' entry in the header: the options of PEFT
_PICKLES = (".pt", ".pth", ".ckpt", ".bin", ".pkl")
_ALPHA_TOLERANCE = 0.01  # between a tensor, which may be BF16, and PEFT's options
_MAX_NAMED = 5  # files or embeddings in one message


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
    """The bytes of a file, its tensors, PEFT's options, and sentences about what is left out.

    tensors: without those of bundled embeddings. options: from the header or from PEFT's file next to it; None: none.
    """

    path: Path
    data: bytes
    tensors: Mapping[str, torch.Tensor]
    options: PeftOptions | None
    warnings: tuple[str, ...]


def open_adapter(path: Path) -> AdapterFile:
    """Read a safetensors file, or the folder of one that PEFT or diffusers wrote. Raises BadAdapter."""
    path = _file_in(path) if path.is_dir() else path
    if path.suffix in _PICKLES:
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
    embeddings = {key: name for key in extents if (name := embedding_name(key))}
    keys = [key for key in extents if key not in embeddings]
    if not keys:
        found = f"only embeddings ({_listed(embeddings.values())})" if embeddings else "no tensors"
        raise BadAdapter(f"{path} has {found}.")
    options = _options(path, data, keys)
    warnings = _warnings(path, keys, options, embeddings.values())
    _refuse_unsupported(path, keys)
    for key in keys:
        allowed = _FLOATS + _INTEGERS if key.endswith(".alpha") else _FLOATS
        if extents[key].dtype not in allowed:
            expected = f"{', '.join(allowed[:-1])} or {allowed[-1]}"
            raise BadAdapter(f"{path}: {key[:120]!r} is {extents[key].dtype}, expected {expected}.")
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    tensors = {key: tensor_view(flat[extents[key].start : extents[key].end], extents[key]) for key in keys}
    return AdapterFile(path, data, tensors, options, tuple(warnings))


def read_factors(file: AdapterFile, layers: Mapping[str, Layer]) -> dict[str, Factors]:
    """Return the factors by layer. `layers`: those of the model. Raises BadAdapter naming the first problem."""
    names = LayerNames(layers.values())
    found: dict[str, dict[str, torch.Tensor]] = {}
    modules: dict[str, Module] = {}
    for key, tensor in file.tensors.items():
        split = split_key(key)
        if split is None:
            raise BadAdapter(f"{file.path}: {key[:120]!r} is not the name of a LoRA's tensor.")
        stem, role = split
        name = names.find(stem)
        if name is None:
            raise BadAdapter(
                f"{file.path}: the key format of {key[:120]!r} is unknown. These formats are read: {FORMATS}."
            )
        if name.layer is None:
            raise BadAdapter(
                f"{file.path}: this model has no layer for {key[:120]!r}. The adapter is for another model."
            )
        if role in found.setdefault(name.layer, {}):
            raise BadAdapter(f"{file.path}: {name.layer} has two tensors {role!r}.")
        found[name.layer][role] = tensor
        modules[name.layer] = _module(file.options, name.layer, name)
    stated = stated_scales(file.options, modules, str(file.path)) if file.options else {}
    return {
        name: _factors(file, layers[name], parts, stated.get(name, Stated(None, None)))
        for name, parts in sorted(found.items())
    }


def _file_in(folder: Path) -> Path:
    """Return the file that PEFT or diffusers wrote into a folder, or its only safetensors file."""
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    except OSError as error:
        raise BadAdapter(f"{folder} cannot be read: {error.strerror or error}.", "Name another file.") from error
    written = [path for path in files if path.name in (_PEFT_WEIGHTS, _DIFFUSERS_WEIGHTS)]
    found = written or [path for path in files if path.suffix == ".safetensors"]
    if len(found) == 1:
        return found[0]
    if found:
        raise BadAdapter(f"{folder} has several files: {_listed(path.name for path in found)}.", "Name one of them.")
    pickles = [path.name for path in files if path.suffix in _PICKLES]
    other = f" {_listed(pickles)} may hold a pickle, which can run code." if pickles else ""
    raise BadAdapter(f"{folder} has no safetensors file, such as {_PEFT_WEIGHTS} or {_DIFFUSERS_WEIGHTS}.{other}")


def _options(path: Path, data: bytes, keys: Iterable[str]) -> PeftOptions | None:
    """Return PEFT's options from the header, or else from the file that PEFT wrote next to its weights."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata = header.get("__metadata__") or {}
    if isinstance(metadata, dict) and isinstance(metadata.get(_METADATA), str):
        return parse_options(metadata[_METADATA], str(path), by_component=True)
    config = path.parent / _PEFT_CONFIG
    if (path.name == _PEFT_WEIGHTS or any(map(_is_wrapped, keys))) and config.exists():
        return parse_options(_read(config).decode(errors="replace"), str(config), by_component=False)
    return None


def _is_wrapped(key: str) -> bool:
    """True for a key of a model that PEFT wrapped. diffusers' own files have none."""
    return key.startswith("base_model.model.")


def _warnings(path: Path, keys: Collection[str], options: PeftOptions | None, embeddings: Collection[str]) -> list[str]:
    """Return sentences about what of a file is left out, or not understood. Raises BadAdapter."""
    warnings = check_options(options, str(path)) if options else []
    if options is None and any(map(_is_wrapped, keys)) and not any(key.endswith(".alpha") for key in keys):
        warnings.append(
            f"{path} states no alpha, and {_PEFT_CONFIG}, which PEFT writes next to it, is missing. Its scale is 1."
        )
    if embeddings:
        warnings.append(
            f"{path} also has embeddings, which were left out: {_listed(embeddings)}. Save each as a file of its own, "
            "with the keys clip_l and clip_g, and add it with `preheat add-embedding RELEASE TOKEN=FILE`."
        )
    return warnings


def _listed(names: Iterable[str]) -> str:
    """Return the first names of several, and how many more there are."""
    unique = list(dict.fromkeys(names))
    more = f" and {len(unique) - _MAX_NAMED} more" if len(unique) > _MAX_NAMED else ""
    return ", ".join(printable(name[:80]) for name in unique[:_MAX_NAMED]) + more


def _module(options: PeftOptions | None, layer: str, found: FoundName) -> Module:
    """Return how PEFT's options name a layer."""
    component, _, module = layer.partition(".")
    if options is None or not options.by_component:
        return Module("", found.module)
    return Module("" if found.is_bare else component, diffusers_name(component, module))


def _factors(file: AdapterFile, layer: Layer, parts: Mapping[str, torch.Tensor], stated: Stated) -> Factors:
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
    return Factors(down, up, _scale(parts.get("alpha"), stated, rank, where), (*shape[:2], *kernel))


def _as_float(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def _scale(alpha: torch.Tensor | None, stated: Stated, rank: int, where: str) -> float:
    """Return alpha / rank, of the file's own alpha or PEFT's options. Without either it is 1."""
    if stated.rank not in (None, rank):
        raise BadAdapter(f"{where} has rank {rank}, and PEFT's options state {str(stated.rank)[:40]}.")
    own = None if alpha is None else alpha.item() if alpha.numel() == 1 else math.nan
    values = [value for value in (own, stated.alpha) if value is not None] or [rank]
    for value in values:
        # Compared before the division, which raises OverflowError for a whole number beyond a float's range.
        if not abs(value) <= MAX_SCALE * rank:
            raise BadAdapter(f"{where} has an invalid alpha ({str(value)[:40]}).")
    if not math.isclose(values[0], values[-1], rel_tol=_ALPHA_TOLERANCE):
        raise BadAdapter(f"{where} has alpha {values[0]:g}, and PEFT's options state {values[-1]:g}.")
    return values[0] / rank


def _refuse_unsupported(path: Path, keys: Iterable[str]) -> None:
    for key in keys:
        for pattern, kind in UNSUPPORTED.items():
            if re.search(pattern, key):
                raise BadAdapter(f"{path} is not a plain LoRA: {key[:120]!r} shows {kind}, which is not supported.")


def _read(path: Path) -> bytes:
    try:
        return read_file(path)
    except OSError as error:
        raise BadAdapter(f"{path} cannot be read: {error.strerror or error}.", "Name another file.") from error
