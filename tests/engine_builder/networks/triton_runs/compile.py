"""Compiles every kernel for a GPU with tensor memory accelerators, in SDXL's shapes. Needs no GPU.

The kernels that run on other GPUs with FP8, too, are also compiled for compute capability 8.9, and the kernel of INT8
for 8.0 and 8.6. The kernel of FP8 convolutions has other tiles on each GPU, and is compiled for that one. Prints JSON:
the most bytes of shared memory that each kernel takes, by compute capability ("90").
"""

import json
from types import SimpleNamespace

import torch
import triton
from torch import Tensor, library
from triton.backends.compiler import GPUTarget

from engine_builder.kernels import attention_kernels as kernels
from engine_builder.kernels import fp8_conv_kernels, fp8_norm_kernels, int8_kernels, winograd_kernels
from tests.engine_builder.networks.triton_runs.launches import Launch, intercept

TYPES = {torch.int8: "*i8", torch.float16: "*fp16", torch.float32: "*fp32", torch.float8_e4m3fn: "*fp8e4nv"}
FP8 = torch.float8_e4m3fn
scale = torch.ones(())
shared_bytes: dict[str, dict[str, int]] = {}


def type_of(value: object) -> str:
    """Return Triton's name of an argument's type."""
    return TYPES[value.dtype] if torch.is_tensor(value) else "i32"


def compile_kernel(launch: Launch) -> None:
    """Compile the kernel for the arguments of its launch."""
    constants = {name: value for name, value in launch.arguments.items() if name in launch.constants or value is None}
    types = {name: "constexpr" if name in constants else type_of(value) for name, value in launch.arguments.items()}
    # Memory begins at multiples of 16 bytes. Otherwise loads are not asynchronous, and stages take no shared memory.
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(types) if types[name].startswith("*")}
    source = triton.compiler.ASTSource(launch.kernel, types, constants, aligned)
    for target in targets(launch.name):
        compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=launch.options)
        assert compiled.asm["cubin"]
        if launch.name == "_fp8_conv_kernel":  # products of E4M3 numbers, and loads that do not wait
            assert "e4m3.e4m3" in compiled.asm["ptx"] and "cp.async.cg" in compiled.asm["ptx"]
        most = shared_bytes.setdefault(launch.name, {})
        most[str(target)] = max(compiled.metadata.shared, most.get(str(target), 0))


def targets(kernel: str) -> tuple[int, ...]:
    """Return the compute capabilities for which a launch of this kernel is compiled."""
    if kernel == "_fp8_conv_kernel":
        major, minor = torch.cuda.get_device_capability(None)
        return (10 * major + minor,)
    if kernel == "_int8_linear_kernel":  # for GPUs without FP8
        return 80, 86, 89, 90
    if kernel in ("_geglu_kernel", "_low_rank_linear_kernel"):
        return (90,)  # GPUs with tensor memory accelerators
    return 89, 90


def fp16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float16)


if __name__ == "__main__":
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)
    library.wrap_triton = intercept(compile_kernel)
    for height, width in ((32, 32), (38, 26)):  # the UNet's lowest level for 1024x1024 and 832x1216
        tokens, tiles = height * width, 2 * height * width // 4
        for out_scale in (None, scale):
            kernels.attend_to_text(fp16(2, tokens, 1280), fp16(2, 77, 1280), fp16(2, 77, 1280), 20, out_scale)
            for adapters, count in ((1, 16), (2, 64)):
                images = fp16(2, adapters * count, 1280), fp16(2, adapters * count, 1280)
                kernels.attend_to_text(
                    fp16(2, tokens, 1280), fp16(2, 77, 1280), fp16(2, 77, 1280), 20, out_scale,
                    *images, torch.zeros(2, adapters, count),
                )  # fmt: skip
        kernels.geglu(fp16(2, tokens, 1280), fp16(10240, 1280), fp16(10240), None, None)
        for out_scale in (scale, None):
            kernels.geglu(fp16(2, tokens, 1280).to(FP8), fp16(10240, 1280).to(FP8), fp16(10240), scale, out_scale)
        if tokens % 128 == 0:
            for parts, rank in ((1, 32), (3, 32), (1, 128), (3, 16)):
                narrow, up = fp16(2, tokens, parts * rank), fp16(2, parts * rank * 1280)
                kernels.low_rank_linear(
                    fp16(2, tokens, 1280), fp16(parts * 1280, 1280), fp16(parts * 1280), narrow, up, parts
                )
            for rank in (32, 128):
                narrow, up = fp16(2, tokens, rank), fp16(2, rank * 10240)
                kernels.geglu(fp16(2, tokens, 1280), fp16(10240, 1280), fp16(10240), None, None, narrow, up)
        hidden, groups, products = fp16(2, height, width, 1280), torch.zeros(2, 32), fp16(16, tiles, 1280)
        for rows in (None, fp16(2, 2, width, 1280)):
            winograd_kernels.winograd_tiles(hidden, groups, groups, fp16(1280), fp16(1280), rows)
        winograd_kernels.winograd_pixels(products, fp16(1280), height, width, fp16(2, 1280), None)
        winograd_kernels.winograd_pixels(products, fp16(1280), height, width, None, hidden)
    for capability in ((8, 9), (9, 0)):
        torch.cuda.get_device_capability = lambda device, found=capability: found
        for size, depth, width, kernel, stride in (
            (128, 320, 320, 3, 1), (128, 640, 320, 3, 1), (64, 640, 640, 3, 2), (32, 2560, 1280, 3, 1),
        ):  # fmt: skip
            numbers, weight = fp16(2, size, size, depth).to(FP8), fp16(width, kernel, kernel, depth).to(FP8)
            out_size = (size + 2 - kernel) // stride + 1
            for added in ((None, None), (fp16(2, width), fp16(2, out_size, out_size, width))):
                fp8_conv_kernels.fp8_conv(
                    numbers, weight, scale, torch.ones(width), fp16(width), *added, stride, 1, torch.float16
                )
        for size, width in ((32, 1280), (64, 640)):
            numbers, weight = fp16(2, size, size, width).to(FP8), fp16(4 * width, 2, 2, width).to(FP8)
            fp8_conv_kernels.fp8_upsample(numbers, weight, scale, torch.ones(4 * width), fp16(4 * width), torch.float16)
    for batch, height, width, channels in (
        (1, 1024, 1024, 128),
        (1, 128, 128, 512),
        (2, 76, 52, 960),
        (2, 38, 26, 1920),
    ):
        hidden, groups = torch.empty(batch, height, width, channels, dtype=torch.float16), torch.ones(batch, 32)
        fp8_norm_kernels.norm_silu_e4m3(hidden, groups, groups, fp16(channels), fp16(channels), scale)
    for out_scale in (None, scale):
        kernels.attend_to_itself(fp16(1, 256, 3 * 1280), 20, out_scale)
    for depth, width, bias in ((1280, 3840, None), (5120, 1280, fp16(1280)), (640, 5120, fp16(5120))):
        numbers = torch.zeros(4096, depth, dtype=torch.int8), torch.zeros(width, depth, dtype=torch.int8)
        int8_kernels.int8_linear(*numbers, torch.ones(width), bias, torch.float16)
    print(json.dumps(shared_bytes))
