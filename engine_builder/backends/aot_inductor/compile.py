"""Export a network and compile it with AOTInductor for one target and bucket, without its weights."""

import inspect
import json
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch._inductor.choices import InductorChoices
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine_builder.backends.aot_inductor.inductor_fixes import declared_int_arrays, descriptor_memory
from engine_builder.backends.built import CompileError
from engine_builder.kernels.fp8_conv import CONV_VERSION, has_quantized_convs
from engine_builder.kernels.fp8_linear import LINEAR_VERSION
from engine_builder.kernels.int8_linear import INT8_LINEAR_VERSION
from engine_builder.kernels.low_rank_linear import LOW_RANK_VERSION
from engine_builder.networks.bands import BANDS_VERSION
from engine_builder.networks.network import NETWORK_VERSION, Network, digest_json, library_versions, public_name
from engine_builder.networks.vae import splits_scores
from model.engines.aot_inductor.package import IDENTITY, Identity
from model.engines.features import LORA
from model.engines.shapes import DTYPES, dtype_name, shape_at, symbol_of
from model.engines.signatures import CLIP_SKIP, LORA_DOWN, LORA_UP, TOKENS
from model.loading.target import Target, detect_targets
from model.pipeline.components import find_component
from model.store.manifest import Bucket, Signature, Span
from model.store.precision import INT8

# Part of every engine key. Raise it when the export or the compiler settings change the result for a network.
COMPILER_VERSION = 8
LARGEST_DYNAMIC_SIDE = 1024  # pixels; limit of CPU engines
# x86-64 level of CPU engines -> compiler flag, SIMD bits. A build uses the newest level that its machine supports.
_CPU_LEVELS = {"x86_64_v3": ("x86-64-v3", 256), "x86_64_v2": ("x86-64-v2", 0), "x86_64_v1": ("x86-64", 0)}
_CPU_LOOP_THREADS = 8  # parts that a CPU engine's loops are split into, on any number of cores
_MAX_TOKENS, _TRACED_TOKENS = 512, 154  # of a text, for CPU engines


def build_target() -> Target:
    """Return the target that this machine compiles for: its GPU, or its newest x86-64 level. Raises CompileError."""
    for target in detect_targets():
        if target.device == "cuda" or target.product in _CPU_LEVELS:
            return target
    raise CompileError("This processor is not supported.", "Build on an x86-64 machine, with or without an NVIDIA GPU.")


def dynamic_bucket(multiple: int | None, max_batch: int = 16, max_side: int = LARGEST_DYNAMIC_SIDE) -> Bucket:
    """Return the bucket of a CPU engine: batches up to `max_batch`, sides up to `max_side` in steps of `multiple`.

    Without `multiple` it has no sides.
    """
    batch = Span(min=1, max=max_batch)
    if multiple is None:
        return Bucket(batch=batch)
    side = Span(min=max(64, multiple), max=max_side, multiple=multiple)
    return Bucket(batch=batch, height=side, width=side)


def static_bucket(batch: int, height: int | None, width: int | None) -> Bucket:
    """Return the bucket of a GPU engine: one shape."""
    spans = [Span(min=size, max=size) if size else None for size in (height, width)]
    return Bucket(batch=Span(min=batch, max=batch), height=spans[0], width=spans[1])


def sizes_of(bucket: Bucket, end: Literal["min", "max"]) -> tuple[int, int, int]:
    """Return a bucket's smallest or largest batch, height and width. Without height and width these are 0."""
    batch, height, width = (getattr(span, end) if span else 0 for span in (bucket.batch, bucket.height, bucket.width))
    return batch, height, width


def engine_key(network: Network, target: Target, bucket: Bucket) -> str:
    """Return the SHA-256 of everything that decides the compiled code. The weights do not count."""
    # Entries of some networks only, so that the keys of other engines stay what they were.
    linear_version = INT8_LINEAR_VERSION if network.precision == INT8 else LINEAR_VERSION
    optional: dict[str, Any] = {"quantized": [linear_version, *sorted(network.clips)]} if network.clips else {}
    if has_quantized_convs(network.module):
        optional["convolutions"] = CONV_VERSION
    if target.device == "cuda" and LORA in find_component(network.component).features:
        optional["low_rank"] = LOW_RANK_VERSION
    if network.bands > 1:
        optional["bands"] = [BANDS_VERSION, network.bands]
    if target.device == "cuda" and find_component(network.component).precision_rule == "vae":
        batch, height, width = sizes_of(bucket, "max")
        if splits_scores(batch, height * width // (network.multiple or 1) ** 2):
            optional["attention"] = "in pieces"
    return digest_json(
        {
            "recipe": COMPILER_VERSION,
            "form": NETWORK_VERSION,
            "component": network.code_name,
            "architecture": network.architecture,
            "signature": network.signature.model_dump(mode="json"),
            "target": target.key,
            "torch": torch.__version__.split("+")[0],
            "libraries": library_versions(),
            "bucket": bucket.model_dump(mode="json"),
            "precision": network.precision.name,
            "layout": network.layout,
        }
        | optional
    )


def example_inputs(
    signature: Signature, batch: int, height: int, width: int, device: str, seed: int = 0, tokens: int = 300
) -> dict[str, torch.Tensor]:
    """Return seeded random inputs for a batch at `height` x `width` pixels. Token ids are below `tokens`."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"rows": batch, "height": height, "width": width, TOKENS: _TRACED_TOKENS}
    inputs: dict[str, torch.Tensor] = {}
    for spec in signature.inputs:
        shape = shape_at(spec.shape, sizes)
        if spec.name == CLIP_SKIP:
            value = torch.nn.functional.one_hot(torch.arange(batch) % shape[1], shape[1])
        elif spec.dtype == "int64":
            value = torch.randint(0, tokens, shape, generator=generator)
        elif spec.name == "timestep":
            value = torch.randint(1, 1000, shape, generator=generator).to(torch.float32)
        elif spec.name == "time_ids":
            # Original size, crop and target size; the refiner has an aesthetic score in place of the target size.
            time_ids = [height, width, 0, 0, height, width] if shape[1] == 6 else [height, width, 0, 0, 6.0]
            value = torch.tensor([time_ids] * batch, dtype=torch.float32)
        else:
            spread = 0.02 if spec.name in (LORA_DOWN, LORA_UP) else 1.0  # as small as the factors of real adapters
            value = spread * torch.randn(shape, generator=generator)
            value = value.to(DTYPES[spec.dtype])
        inputs[spec.name] = value.to(device)
    return inputs


@dataclass(frozen=True)
class CompiledNetwork:
    """A package and the map of its constants: name in the code -> {tensor, dtype, shape}."""

    package: Path
    constants: dict[str, dict[str, Any]]

    def constants_json(self) -> bytes:
        """Return the map as JSON with sorted keys."""
        return json.dumps(self.constants, sort_keys=True).encode()


def describe_constant(network: Network, tensors: Mapping[str, torch.Tensor], name: str) -> dict[str, Any]:
    """Return the {tensor, dtype, shape} of a constant of the compiled code. `tensors` are the network's.

    Raises CompileError if the constant is not a tensor of the model.
    """
    tensor = tensors.get(public_name(name))
    if tensor is None:
        raise CompileError(
            f"The compiled {network.component} needs the constant {name}, which is not a tensor of the model.",
            "Compute it in the component's wrapper: engines hold no data.",
        )
    return {"tensor": public_name(name), "dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}


def compile_network(network: Network, target: Target, bucket: Bucket, package: Path) -> CompiledNetwork:
    """Write the `.pt2` of `network` for `target` and `bucket` to `package`. Raises CompileError."""
    device = target.device
    example = trace_inputs(network, bucket, device)
    settings = _gpu_compiler_settings() if device == "cuda" else nullcontext()
    with without_warnings(), declared_int_arrays(), settings:
        exported = torch.export.export(
            network.module, tuple(example.values()), dynamic_shapes=dynamic_shapes(network, bucket), strict=False
        )
        torch._inductor.aoti_compile_and_package(
            exported, package_path=str(package), inductor_configs=_inductor_settings(target)
        )
    write_identity(package, Identity(bucket=bucket, signature=network.signature))
    loader = torch._C._aoti.AOTIModelPackageLoader(str(package), "model", True, 1, 0 if device == "cuda" else -1)
    tensors = network.tensors()
    names = loader.get_constant_fqns()
    return CompiledNetwork(package, {name: describe_constant(network, tensors, name) for name in names})


def write_identity(package: Path, identity: Identity) -> None:
    """Add to a new package what it was compiled for, which a server compares with the engine's record."""
    with zipfile.ZipFile(package, "a") as archive:
        archive.writestr(f"{package.stem}/{IDENTITY}", identity.model_dump_json())


def trace_inputs(network: Network, bucket: Bucket, device: str) -> dict[str, torch.Tensor]:
    """Return inputs to trace with.

    For a dynamic bucket they have unequal and uncommon sizes, so that the export specializes on none of them.
    """
    if bucket.batch.min == bucket.batch.max:
        return example_inputs(network.signature, *sizes_of(bucket, "min"), device)
    step = network.multiple or 8
    height, width = ((64 + step * count) // step * step for count in (5, 3))
    return example_inputs(network.signature, 3, height, width, device)


def dynamic_shapes(network: Network, bucket: Bucket) -> dict[str, Any] | None:
    """Return torch.export's dynamic shapes of a bucket, argument -> {dimension: Dim}, or None for a static bucket.

    The argument `*inputs` of a network has a tuple of them.
    """
    if bucket.batch.min == bucket.batch.max:
        return None
    dims: dict[str, Any] = {
        "rows": torch.export.Dim("rows", min=1, max=bucket.batch.max),
        TOKENS: torch.export.Dim(TOKENS, min=2, max=_MAX_TOKENS),
    }
    for side in ("height", "width"):
        span = getattr(bucket, side)
        if span is not None:
            # The export accepts a latent's side only if it is written as a multiple of the UNet's downsampling factor.
            low, high = span.min // span.multiple, span.max // span.multiple
            dims[side] = torch.export.Dim(f"_{side}", min=low, max=high)

    def dim_of(dimension: str) -> Any:
        symbol, divisor = symbol_of(dimension)
        factor = 1 if symbol in ("rows", TOKENS) else getattr(bucket, symbol).multiple // divisor
        return factor * dims[symbol] if factor > 1 else dims[symbol]

    of_inputs = [
        {index: dim_of(size) for index, size in enumerate(spec.shape) if isinstance(size, str)}
        for spec in network.signature.inputs
    ]
    return inspect.signature(network.module.forward).bind(*of_inputs).arguments


def _inductor_settings(target: Target) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "aot_inductor.package_constants_in_so": False,
        "aot_inductor.package_constants_on_disk_format": None,
        # Otherwise constants of up to eight elements are compiled into the code, and another model's images are wrong.
        "always_keep_tensor_constants": True,
    }
    if target.device == "cpu":
        march, simdlen = _CPU_LEVELS[target.product]
        # The level is known. Otherwise the compiler finds it by compiling test programs, which takes 7 s.
        settings |= {"cpp.march": march, "cpp.simdlen": simdlen, "cpp.vec_isa_ok": True}
        # Otherwise the code depends on the number of threads of this process, and its buffers are sized for it.
        settings |= {"cpp.threads": _CPU_LOOP_THREADS, "cpp.dynamic_threads": True}
    return settings


@contextmanager
def without_warnings() -> Iterator[None]:
    """Suppress warnings and the recording of gradients. torch's own export code emits deprecation warnings."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _gpu_compiler_settings() -> Iterator[None]:
    """Adapt the compiler to SDXL on a GPU.

    cuDNN's attention comes first: on an H200 it takes two thirds of the time of PyTorch's.
    """
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True), V.set_choices_handler(_LargerReductions()), descriptor_memory():
        yield


class _LargerReductions(InductorChoices):
    """Reduce up to 2,048 contiguous elements in one pass that keeps them in registers.

    The compiler's own limit is 1,024. SDXL's layer norms have 1,280 elements, which it would read three times.
    """

    @staticmethod
    def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
        inner = features.get_reduction_hint() == ReductionHint.INNER
        if inner and V.graph.sizevars.statically_known_leq(features.reduction_numel, 2048):
            return True
        choice: bool = InductorChoices.should_use_persistent_reduction(features, cooperative_reduction)
        return choice
