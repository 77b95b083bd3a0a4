"""Export a network and compile it with AOTInductor for one target and bucket, without its weights."""

import hashlib
import json
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._inductor.choices import InductorChoices
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine_builder.networks.network import (
    FORM,
    Network,
    library_versions,
    public_name,
)
from model.engines.components import (
    DTYPES,
    dtype_name,
)
from model.errors import PreheatError
from model.loading.target import (
    Target,
    detect_targets,
)
from model.store.manifest import Bucket, Signature, Span

# Raised whenever the export or the compile settings change what comes out of one network.
RECIPE = 8
# CPU engines are compiled for the newest of these levels that the machine has; see Target.
_CPU_LEVELS = {"x86_64_v3": ("x86-64-v3", 256), "x86_64_v2": ("x86-64-v2", 0), "x86_64_v1": ("x86-64", 0)}

LARGEST_DYNAMIC_SIDE = 1024  # pixels, of what a CPU engine draws
_THREADS = 8  # for which a CPU engine's loops are cut; it runs on as many as there are


class CompileError(PreheatError):
    """A network could not be exported or compiled."""


def build_target() -> Target:
    """The target this machine compiles for: its GPU, or the newest x86-64 level that engines are made for."""
    for target in detect_targets():
        if target.device == "cuda" or target.product in _CPU_LEVELS:
            return target
    raise CompileError("Engines are built on x86-64 machines, with or without an NVIDIA GPU.")


def dynamic_bucket(multiple: int | None, max_rows: int = 16, max_side: int = LARGEST_DYNAMIC_SIDE) -> Bucket:
    """The one bucket of a CPU engine: any rows up to `max_rows`, any size up to `max_side` in steps of `multiple`."""
    if multiple is None:
        return Bucket(rows=Span(min=1, max=max_rows))
    side = Span(min=64, max=max_side, multiple=multiple)
    return Bucket(rows=Span(min=1, max=max_rows), height=side, width=side)


def static_bucket(rows: int, height: int | None, width: int | None) -> Bucket:
    """A GPU engine's bucket: one shape."""
    side = {
        "height": Span(min=height, max=height) if height else None,
        "width": Span(min=width, max=width) if width else None,
    }
    return Bucket(rows=Span(min=rows, max=rows), **side)


def engine_key(network: Network, target: Target, bucket: Bucket) -> str:
    """SHA-256 over all that decides the compiled code, which the weights do not."""
    recipe = {
        "recipe": RECIPE,
        "form": FORM,
        "component": type(network.module).__name__,
        "architecture": network.architecture,
        "signature": network.signature.model_dump(mode="json"),
        "target": target.key,
        "torch": torch.__version__.split("+")[0],
        "libraries": library_versions(),
        "bucket": bucket.model_dump(mode="json"),
        "precision": network.precision,
        "layout": network.layout,
    }
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()


def example_inputs(
    signature: Signature, rows: int, height: int, width: int, device: str, seed: int = 0, tokens: int = 300
) -> dict[str, torch.Tensor]:
    """Seeded random inputs of a signature at `rows`, `height` x `width` pixels. Token ids stay below `tokens`."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"rows": rows, "height": height, "width": width}
    made: dict[str, torch.Tensor] = {}
    for spec in signature.inputs:
        shape = []
        for dimension in spec.shape:
            symbol, _, divisor = str(dimension).partition("/")
            shape.append(dimension if isinstance(dimension, int) else sizes[symbol] // int(divisor or 1))
        if spec.dtype == "int64":
            value = torch.randint(0, tokens, shape, generator=generator)
        elif spec.name == "timestep":
            value = torch.randint(1, 1000, shape, generator=generator).to(torch.float32)
        elif spec.name == "time_ids":
            plain = [height, width, 0, 0, height, width] if shape[1] == 6 else [height, width, 0, 0, 6.0]
            value = torch.tensor([plain] * rows, dtype=torch.float32)
        else:
            value = torch.randn(shape, generator=generator).to(DTYPES[spec.dtype])
        made[spec.name] = value.to(device)
    return made


@dataclass(frozen=True)
class Compiled:
    """A package and the map of its constants: name in the code -> {tensor, dtype, shape}."""

    package: Path
    constants: dict[str, dict[str, Any]]

    def constants_json(self) -> bytes:
        return json.dumps(self.constants, sort_keys=True).encode()


def compile_network(network: Network, target: Target, bucket: Bucket, package: Path) -> Compiled:
    """Write the `.pt2` of `network` for `target` and `bucket` to `package`. Raises CompileError."""
    device = target.device
    example = example_of(network, bucket, device)
    with quiet(), _attention_kernels(device), _reductions(device), _descriptors(device):
        exported = torch.export.export(
            network.module,
            tuple(example.values()),
            dynamic_shapes=dynamic_shapes(network, bucket),
            strict=False,
        )
        torch._inductor.aoti_compile_and_package(
            exported, package_path=str(package), inductor_configs=_inductor_settings(target)
        )
    loader = torch._C._aoti.AOTIModelPackageLoader(str(package), "model", True, 1, 0 if device == "cuda" else -1)
    tensors = network.tensors()
    constants: dict[str, dict[str, Any]] = {}
    for name in loader.get_constant_fqns():
        tensor = tensors.get(public_name(name))
        if tensor is None:
            raise CompileError(
                f"The compiled {network.component} needs the constant {name}, which is no tensor of the model: "
                "its wrapper must compute it, because engines hold no data."
            )
        constants[name] = {
            "tensor": public_name(name),
            "dtype": dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
        }
    return Compiled(package, constants)


def example_of(network: Network, bucket: Bucket, device: str) -> dict[str, torch.Tensor]:
    """Inputs to trace with. Dynamic sizes are traced at unequal, uncommon values so that nothing is specialised."""
    if bucket.rows.min == bucket.rows.max:
        rows = bucket.rows.min
        height = bucket.height.min if bucket.height else 0
        width = bucket.width.min if bucket.width else 0
    else:
        step = network.multiple or 8
        rows, height, width = 3, 64 + step * 5, 64 + step * 3
        height, width = height // step * step, width // step * step
    return example_inputs(network.signature, rows, height, width, device)


def dynamic_shapes(network: Network, bucket: Bucket) -> dict[str, Any] | None:
    """torch.export's dynamic shapes of a bucket: names of inputs -> {dimension: Dim}. None for a static bucket."""
    if bucket.rows.min == bucket.rows.max:
        return None
    dims: dict[str, Any] = {"rows": torch.export.Dim("rows", min=1, max=bucket.rows.max)}
    for side in ("height", "width"):
        span = getattr(bucket, side)
        if span is not None:
            # A latent side is a multiple of what the UNet halves: written so, or the export refuses it.
            low, high = span.min // span.multiple, span.max // span.multiple
            dims[side] = torch.export.Dim(f"_{side}", min=low, max=high)
    shapes: dict[str, Any] = {}
    for spec in network.signature.inputs:
        shapes[spec.name] = {}
        for index, dimension in enumerate(spec.shape):
            if isinstance(dimension, int):
                continue
            symbol, _, divisor = dimension.partition("/")
            if symbol == "rows":
                shapes[spec.name][index] = dims["rows"]
            else:
                factor = getattr(bucket, symbol).multiple // int(divisor or 1)
                shapes[spec.name][index] = factor * dims[symbol] if factor > 1 else dims[symbol]
    return shapes


def _inductor_settings(target: Target) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "aot_inductor.package_constants_in_so": False,
        "aot_inductor.package_constants_on_disk_format": None,
        # Without it constants of up to eight elements are baked into the code, and other weights give wrong pictures.
        "always_keep_tensor_constants": True,
    }
    if target.device == "cpu":
        march, simdlen = _CPU_LEVELS[target.product]
        settings |= {"cpp.march": march, "cpp.simdlen": simdlen}
        # Else this process' number of threads, and buffers for that many, would be in the code.
        settings |= {"cpp.threads": _THREADS, "cpp.dynamic_threads": True}
    return settings


@contextmanager
def quiet() -> Iterator[None]:
    """torch's own deprecations inside export and compile are not the reader's to mend."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _attention_kernels(device: str) -> Iterator[None]:
    """Which attention is compiled in. On a GPU cuDNN's comes first: on an H200 it takes two thirds of the time of
    PyTorch's own."""
    if device != "cuda":
        yield
        return
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True):
        yield


class _Reductions(InductorChoices):
    """Rows of up to 2,048 elements are reduced in one pass that keeps them in registers. The compiler's own limit is
    1,024, and SDXL's layer norms are 1,280 wide: it would read each row three times."""

    @staticmethod
    def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
        inner = features.get_reduction_hint() == ReductionHint.INNER
        if inner and V.graph.sizevars.statically_known_leq(features.reduction_numel, 2048):
            return True
        wanted: bool = InductorChoices.should_use_persistent_reduction(features, cooperative_reduction)
        return wanted


def _reductions(device: str) -> AbstractContextManager[None]:
    context: AbstractContextManager[None] = V.set_choices_handler(_Reductions()) if device == "cuda" else nullcontext()
    return context


_PROGRAMS = 1024  # of one kernel that makes descriptors, at most: as many as a GPU has multiprocessors


@contextmanager
def _descriptors(device: str) -> Iterator[None]:
    """Room for the tensor descriptors of every program of a kernel. torch 2.11's generated code makes room for one
    program's, and Triton writes each program's behind the last one's; torch 2.13's makes room for all."""
    if device != "cuda":
        yield
        return
    from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides

    generator: Any = CUDADeviceOpOverrides
    one = generator.cpp_scratch

    def cpp_scratch(self: Any, index: int, workspace: Any, prefix: str | None = None) -> Any:
        made = one(self, index, workspace, prefix)
        if workspace.size > 0 and not any("grid_0" in line for line in made[0]):
            workspace.size *= _PROGRAMS
            made = one(self, index, workspace, prefix)
        return made

    generator.cpp_scratch = cpp_scratch
    try:
        yield
    finally:
        generator.cpp_scratch = one
