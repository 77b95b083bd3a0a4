"""Read an adapter's file: changes by layer, checked. Nothing of it reaches a device before it is checked."""

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from engine_builder.adapters.algorithms import OUTPUT_BIAS, VECTORS, check_finite, read_change
from engine_builder.adapters.bad_adapter import FORMATS, BadAdapter
from engine_builder.adapters.names import UNSUPPORTED, FoundName, LayerNames, embedding_key, split_key
from engine_builder.adapters.options import (
    Module,
    PeftOptions,
    Stated,
    check_options,
    diffusers_name,
    parse_options,
    stated_scales,
)
from engine_builder.embeddings.read import EmbeddingFiles
from engine_builder.files import PICKLE_SUFFIXES, read_file
from model.adapters.changes import Change
from model.adapters.layers import Layer
from model.store.manifest_json import printable
from model.weights.safetensors_header import InvalidHeader, read_header
from model.weights.stream import tensor_view

MAX_FILE_BYTES = 4 * 2**30
_FLOATS = ("F16", "BF16", "F32", "F64")
_INTEGERS = ("I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64")  # kohya's extraction stores alpha as one
_PEFT_WEIGHTS, _PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"  # of a folder that PEFT wrote
_DIFFUSERS_WEIGHTS = "pytorch_lora_weights.safetensors"  # of a folder that diffusers wrote
_METADATA = "lora_adapter_metadata"  # diffusers' entry in the header: the options of PEFT
_MAX_NAMED = 5  # files or embeddings in one message


@dataclass(frozen=True)
class AdapterFile:
    """The bytes of a file, its tensors, PEFT's options, bundled embeddings by token, and warnings.

    options: from the header or from PEFT's file next to it; None: none.
    """

    path: Path
    data: bytes
    tensors: Mapping[str, torch.Tensor]
    options: PeftOptions | None
    embeddings: Mapping[str, EmbeddingFiles]
    warnings: tuple[str, ...]

    @property
    def left_out(self) -> tuple[str, ...]:
        """A warning of the embeddings, for those who do not add them."""
        if not self.embeddings:
            return ()
        return (
            f"{self.path} also has embeddings, which were left out: {_listed(self.embeddings)}. Add them to a release "
            "that was built with --embedding-rows: `preheat add-lora NAME FILE --embeddings MODEL/VERSION`.",
        )


def open_adapter(path: Path) -> AdapterFile:
    """Read a safetensors file, or the folder of one that PEFT or diffusers wrote. Raises BadAdapter."""
    path = _file_in(path) if path.is_dir() else path
    if path.suffix in PICKLE_SUFFIXES:
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
    bundled = {key: found for key in extents if (found := embedding_key(key))}
    keys = [key for key in extents if key not in bundled]
    if not keys:
        content = f"only embeddings ({_listed(name for name, _ in bundled.values())})" if bundled else "no tensors"
        raise BadAdapter(f"{path} has {content}.", "Add them with `preheat add-embedding`." if bundled else None)
    options = _options(path, data, keys)
    warnings = _warnings(path, keys, options)
    _refuse_unsupported(path, keys)
    for key in keys:
        allowed = _FLOATS + _INTEGERS if key.endswith((".alpha", ".on_input")) else _FLOATS
        if extents[key].dtype not in allowed:
            expected = f"{', '.join(allowed[:-1])} or {allowed[-1]}"
            raise BadAdapter(f"{path}: {key[:120]!r} is {extents[key].dtype}, expected {expected}.")
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    tensors = {key: tensor_view(flat[extents[key].start : extents[key].end], extents[key]) for key in extents}
    embeddings: dict[str, dict[str, torch.Tensor]] = {}
    for key, (token, role) in bundled.items():
        embeddings.setdefault(token, {})[role] = tensors.pop(key)
    digest = hashlib.sha256(data).hexdigest()
    files = {token: EmbeddingFiles(((path, of_token),), (digest,)) for token, of_token in embeddings.items()}
    return AdapterFile(path, data, tensors, options, files, tuple(warnings))


def read_changes(file: AdapterFile, layers: Mapping[str, Layer]) -> dict[str, Change]:
    """Return the changes by layer. `layers`: those of the model. Raises BadAdapter naming the first problem."""
    names = LayerNames(layers.values())
    found: dict[str, dict[str, torch.Tensor]] = {}
    named: dict[str, Module] = {}
    for key, tensor in file.tensors.items():
        split = split_key(key)
        name = names.find(split[0]) if split else None
        if split is None or name is None:
            raise BadAdapter(
                f"{file.path}: the key format of {key[:120]!r} is unknown. These formats are read: {FORMATS}."
            )
        if name.module is None:
            raise BadAdapter(
                f"{file.path}: this model has no layer for {key[:120]!r}. The adapter is for another model."
            )
        if split[1] in found.setdefault(name.module, {}):
            raise BadAdapter(f"{file.path}: {name.module} has two tensors {split[1]!r}.")
        found[name.module][split[1]] = tensor if tensor.dtype != torch.float64 else tensor.float()
        named[name.module] = _module(file.options, name)
    stated = stated_scales(file.options, named, str(file.path)) if file.options else {}
    changes: dict[str, Change] = {}
    for module, tensors in sorted(found.items()):
        changes |= _changes_of(module, tensors, layers, stated.get(module, Stated()), f"{file.path}: {module}")
    return changes


def _changes_of(
    module: str, tensors: dict[str, torch.Tensor], layers: Mapping[str, Layer], stated: Stated, where: str
) -> dict[str, Change]:
    """Return the changes that a module's tensors make, by layer: of its weight, of its bias. Raises BadAdapter."""
    ends = VECTORS | ({} if module in layers else {"diff": ".weight"})  # a norm may have a full difference
    vectors: dict[str, torch.Tensor] = {}
    for role in [role for role in ends if role in tensors]:
        if ends[role] in vectors:
            raise BadAdapter(f"{where} has two differences of its {ends[role][1:]}.")
        vectors[ends[role]] = tensors.pop(role)
    bias = tensors.pop(OUTPUT_BIAS, None)
    changes: dict[str, Change] = {}
    if tensors and module not in layers:
        raise BadAdapter(f"{where} is a norm, and has tensors of a linear: {', '.join(sorted(tensors))}.")
    if tensors:
        changes[module] = read_change(tensors, layers[module].shape, stated, where)
    elif bias is not None:
        raise BadAdapter(f"{where} has a bias of a LoRA, and no LoRA.")
    scales = dict.fromkeys(vectors, 1.0)
    if bias is not None:
        if ".bias" in vectors:
            raise BadAdapter(f"{where} has two differences of its bias.")
        vectors[".bias"], scales[".bias"] = bias, changes[module].scale
    for end, vector in vectors.items():
        layer = layers.get(module + end)
        if layer is None:
            raise BadAdapter(f"{where} has a difference of its {end[1:]}, and this model's layer has none.")
        if vector.numel() != layer.shape[0]:
            raise BadAdapter(
                f"{where} has a difference of its {end[1:]} of the shape {list(vector.shape)}, and the layer's is "
                f"{list(layer.shape)}. The adapter is for another model."
            )
        parts = {"full": vector.flatten()}
        check_finite(parts, where + end)
        changes[module + end] = Change("matrix", parts, scales[end])
    return changes


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
    pickles = [path.name for path in files if path.suffix in PICKLE_SUFFIXES]
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


def _warnings(path: Path, keys: Collection[str], options: PeftOptions | None) -> list[str]:
    """Return sentences about what of a file is left out, or not understood. Raises BadAdapter."""
    warnings = check_options(options, str(path)) if options else []
    if options is None and any(map(_is_wrapped, keys)) and not any(key.endswith(".alpha") for key in keys):
        warnings.append(
            f"{path} states no alpha, and {_PEFT_CONFIG}, which PEFT writes next to it, is missing. Its scale is 1."
        )
    return warnings


def _listed(names: Iterable[str]) -> str:
    """Return the first names of several, and how many more there are."""
    unique = list(dict.fromkeys(names))
    more = f" and {len(unique) - _MAX_NAMED} more" if len(unique) > _MAX_NAMED else ""
    return ", ".join(printable(name[:80]) for name in unique[:_MAX_NAMED]) + more


def _module(options: PeftOptions | None, found: FoundName) -> Module:
    """Return how PEFT's options name a module that was found."""
    assert found.module is not None
    component, _, module = found.module.partition(".")
    if options is None or not options.by_component:
        return Module("", found.own_name)
    return Module("" if found.is_bare else component, diffusers_name(component, module))


def _refuse_unsupported(path: Path, keys: Iterable[str]) -> None:
    for key in keys:
        for pattern, kind in UNSUPPORTED.items():
            if re.search(pattern, key):
                raise BadAdapter(f"{path}: {key[:120]!r} shows {kind}, which is not supported.")


def _read(path: Path) -> bytes:
    try:
        return read_file(path)
    except OSError as error:
        raise BadAdapter(f"{path} cannot be read: {error.strerror or error}.", "Name another file.") from error
