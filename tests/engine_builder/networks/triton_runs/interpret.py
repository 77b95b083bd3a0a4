"""Runs every kernel in Triton's interpreter (TRITON_INTERPRET=1) and compares the results with PyTorch's.

Prints JSON: `errors`, relative errors by norm of each case, and `types` of the arguments that each kernel takes at run
time.
"""

import json
import threading
from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, library, nn
from triton.runtime import interpreter

from engine_builder.building.band_engine import BandEngine
from engine_builder.kernels import attention_kernels as kernels
from engine_builder.kernels import fp8_conv_kernels, fp8_norm_kernels, int8_kernels, winograd
from engine_builder.kernels.fp8_conv import quantize_conv
from engine_builder.kernels.low_rank_linear import LowRankLinear, LowRankVectors
from engine_builder.networks import blocks
from engine_builder.networks.bands import divided, own_rows, whole_image
from model.adapters.layers import Layer
from model.adapters.packing import make_packing
from model.pipeline.spec import UNET
from model.weights.fp8 import quantize
from tests.engine_builder.networks.triton_runs.launches import Launch, intercept

OUT_SCALE = torch.tensor(0.25)
errors: dict[str, float] = {}
types: dict[str, set[str]] = {}
launches: Counter[str] = Counter()
interpreting = threading.Lock()  # the interpreter patches Triton while a kernel runs
wrap_triton = library.wrap_triton
patch_tensor = interpreter._patch_lang_tensor
convert_float = interpreter._convert_float


def exact_tanh(x: Any) -> Any:
    """Replaces a GPU instruction, which the interpreter cannot run."""
    return 1 - 2 / (1 + kernels.tl.exp(2 * x))


def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
    """Triton's own patch converts an array of one number to a number, which numpy 2.4 refuses."""
    patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def convert_as_pytorch(values: Any, from_type: Any, to_type: Any, rounding: Any) -> Any:
    """Triton 3.9's own conversion to E4M3 loses the carry when the mantissa overflows: 1.96 becomes 1 instead of 2.

    From E4M3 it makes a number of NaN.
    """
    if from_type == kernels.tl.float8e4nv and to_type == kernels.tl.float16:
        numbers = torch.from_numpy(np.ascontiguousarray(values)).view(torch.float8_e4m3fn)
        return numbers.half().numpy().view(np.uint16)
    if to_type != kernels.tl.float8e4nv:
        return convert_float(values, from_type, to_type, rounding)
    return torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def record_types(launch: Launch) -> object:
    launches[launch.name] += 1
    given = {name: value for name, value in launch.arguments.items() if value is not None}
    values = [value for name, value in given.items() if name not in launch.constants]
    names = ("tensor" if torch.is_tensor(value) else type(value).__name__ for value in values)
    types.setdefault(launch.name, set()).update(names)
    with interpreting:
        return wrap_triton(launch.kernel)[launch.grid](**launch.arguments, **launch.options)


def compare(case: str, actual: Tensor, expected: Tensor) -> None:
    errors[case] = float((actual.float() - expected.float()).norm() / expected.float().norm())


def run_cross_attention() -> None:
    kernels._TEXT_PROGRAMS = 8
    for tokens, text_tokens in ((96, 77), (128, 128), (300, 77), (320, 40)):  # one block and several, some incomplete
        queries = torch.randn(2, tokens, 128)
        keys, values = torch.randn(2, text_tokens, 128), torch.randn(2, text_tokens, 128)
        expected = blocks.attend(queries, keys, values, 2)
        compare(f"text, {tokens}", kernels.attend_to_text(queries, keys, values, 2, None), expected)
        scaled = kernels.attend_to_text(queries, keys, values, 2, OUT_SCALE)
        compare(f"scaled, text {tokens}", scaled, quantize(expected, OUT_SCALE))
    keys, values = torch.randn(2, 77, 256).chunk(2, -1)  # as in the UNet: slices of one tensor for all layers
    actual = kernels.attend_to_text(queries, keys, values, 2, None)
    compare("text, slices", actual, blocks.attend(queries, keys, values, 2))


def run_image_attention() -> None:
    """Compare one adapter and two, of few tokens and many, also with tokens that are masked."""
    for tokens, adapters, image_tokens in ((96, 1, 4), (300, 2, 16), (130, 1, 64)):
        queries, keys, values = torch.randn(2, tokens, 128), torch.randn(2, 77, 128), torch.randn(2, 77, 128)
        slices = torch.randn(2, adapters * image_tokens, 256).chunk(2, -1)
        bias = torch.randn(2, adapters, image_tokens)
        bias[1, :, -2:] = -float("inf")
        image = blocks.ImageContext(*slices, bias)
        expected = blocks.attend(queries, keys, values, 2) + blocks.image_attention(queries, *image, 2)
        compare(f"images, {image_tokens}", kernels.attend_to_text(queries, keys, values, 2, None, *image), expected)
        scaled = kernels.attend_to_text(queries, keys, values, 2, OUT_SCALE, *image)
        compare(f"scaled, images {image_tokens}", scaled, quantize(expected, OUT_SCALE))


def run_self_attention() -> None:
    for tokens in (128, 256):
        fused = 3 * torch.randn(2, tokens, 3 * 128)
        expected = blocks.attend(*fused.chunk(3, -1), 2)
        compare(f"self, {tokens}", kernels.attend_to_itself(fused, 2, None), expected)
        scaled = kernels.attend_to_itself(fused, 2, OUT_SCALE)
        compare(f"scaled, self {tokens}", scaled, quantize(expected, OUT_SCALE))


def run_geglu() -> None:
    # Fewer tiles than programs and several per program, complete tiles and partial ones.
    for batch, count, width in ((1, 128, 128), (2, 128, 256), (9, 128, 128), (2, 76, 128), (3, 130, 256)):
        tokens, projection = torch.randn(batch, count, 128), nn.Linear(128, 2 * width)
        projection.weight *= 8  # so that some gates are large
        case, expected = f"{batch} x {count} x {width}", blocks.geglu(projection, tokens)
        compare(f"geglu, {case}", kernels.geglu(tokens, projection.weight, projection.bias, None, None), expected)
        scale = torch.tensor(0.3)
        actual = kernels.geglu(tokens, projection.weight / 0.3, projection.bias, scale, OUT_SCALE)
        compare(f"scaled, {case}", actual, quantize(expected, OUT_SCALE))


def run_low_rank() -> None:
    """One part and several, ranks in one block and in several, more tiles than programs, a bias or none."""
    for batch, count, parts, rank, width in ((2, 128, 1, 16, 128), (3, 256, 3, 64, 128), (2, 128, 2, 48, 256)):
        layers = {str(index): Layer(str(index), (width, 128), UNET, "w", index * width) for index in range(parts)}
        packing = make_packing(layers, rank)
        vectors = LowRankVectors()
        # The vectors have other layers before and after these.
        vectors.down = torch.randn(batch, packing.down_width + 64)[:, 32:-32]
        vectors.up = torch.randn(batch, packing.up_width + 64)[:, 32:-32]
        linear = LowRankLinear(nn.Linear(128, parts * width, bias=parts == 1), packing.layers, rank, vectors)
        x = torch.randn(batch, count, 128)
        change = linear.narrow(x), linear.up()
        actual = kernels.low_rank_linear(x, linear.weight, linear.bias, *change, parts)
        compare(f"low rank, {parts} parts of rank {rank}", actual, linear(x))
    for batch, rank in ((2, 16), (3, 96)):
        layers = {"0": Layer("0", (512, 128), UNET, "w")}
        packing, vectors = make_packing(layers, rank), LowRankVectors()
        vectors.down, vectors.up = torch.randn(batch, packing.down_width), torch.randn(batch, packing.up_width)
        linear = LowRankLinear(nn.Linear(128, 512), packing.layers, rank, vectors)
        x = torch.randn(batch, 128, 128)
        actual = kernels.geglu(x, linear.weight, linear.bias, None, None, linear.narrow(x), linear.up())
        compare(f"low rank, geglu, rank {rank}", actual, blocks.geglu(linear, x))


def run_int8() -> None:
    """Complete tiles and partial ones, sums beyond fp16's exact integers, with and without a bias."""
    for rows, depth, width in ((128, 64, 128), (300, 192, 272), (17, 1280, 48)):
        numbers = [torch.randint(-127, 128, shape, dtype=torch.int8) for shape in ((rows, depth), (width, depth))]
        scale, bias = torch.rand(width) / 1000, torch.randn(width)
        sums = numbers[0].long() @ numbers[1].long().t()
        for added in (None, bias):
            actual = int8_kernels.int8_linear(*numbers, scale, added, torch.float32)
            compare(f"int8, {rows} {added is not None}", actual, sums * scale + (0 if added is None else added))


def run_fp8_conv() -> None:
    """Partial tiles of pixels and channels, channels that are no multiple of a tile, strides, borders, a 2x2 kernel."""
    # batch, in, out, height, width, kernel, stride, padding
    sizes = (
        (1, 4, 320, 7, 5, 3, 1, 1), (2, 320, 4, 9, 6, 3, 1, 1), (2, 640, 48, 5, 7, 3, 2, 1),
        (1, 1280, 144, 4, 5, 2, 1, 1), (1, 1920, 16, 3, 3, 3, 1, 0), (3, 64, 320, 6, 11, 3, 1, 1),
    )  # fmt: skip
    for batch, before, after, height, width, kernel, stride, padding in sizes:
        conv = nn.Conv2d(before, after, kernel, stride, padding)
        layer, hidden = quantize_conv(conv, 2.0), torch.randn(batch, before, height, width)
        layer.weight_scale *= torch.rand(after) + 0.5  # each channel has its own
        entry_bias = torch.randn(batch, 3 * after).split(after, -1)[1]  # as in the UNet: a slice of all blocks' biases
        residual = torch.randn_like(conv(hidden)).to(memory_format=torch.channels_last)
        case = f"fp8 conv, {before} to {after}, {kernel} {stride}"
        numbers = layer.quantize_inputs(hidden)
        compare(case, layer._run_kernel(numbers, None, None), layer(hidden))
        compare(f"{case}, sums", layer._run_kernel(numbers, entry_bias, residual), layer(hidden, entry_bias, residual))
    tiles = fp8_conv_kernels.Tiles(pixels=64, channels=32, depth=64, group=2)
    pixels, weight = (tensor.permute(0, 2, 3, 1).contiguous() for tensor in (numbers, layer.weight))
    actual = fp8_conv_kernels.run_fp8_conv(
        pixels, weight, layer.input_scale, layer.weight_scale, layer.bias, None, None, 1, 1, torch.float16, tiles
    )
    compare("fp8 conv, other tiles", actual.permute(0, 3, 1, 2), layer(hidden).half())


def run_fp8_upsample() -> None:
    """Odd sizes, one row, several tiles of pixels, phases of several tiles and channels that are no multiple of one."""
    sizes = (2, 64, 48, 3, 5), (1, 16, 272, 5, 3), (3, 128, 16, 1, 1), (2, 320, 144, 9, 11)
    for batch, before, after, height, width in sizes:
        upsampler = SimpleNamespace(conv=nn.Conv2d(before, after, 3, padding=1))
        blocks.subpixel_upsample(upsampler)
        upsampler.phases.bias.add_(torch.randn(4 * after))  # each phase has its own
        upsampler.phases = quantize_conv(upsampler.phases, 2.0)
        upsampler.phases.weight_scale *= torch.rand(4 * after) + 0.5
        hidden = torch.randn(batch, before, height, width)
        expected = blocks.upsample(upsampler, hidden)
        with (
            mock.patch.object(blocks, "has_kernels", return_value=True),
            mock.patch.object(torch, "empty", empty_of_nan),
            mock.patch.object(torch, "stack", side_effect=AssertionError("The phases are interleaved by PyTorch.")),
        ):
            actual = blocks.upsample(upsampler, hidden)
        assert actual.shape == expected.shape and actual.is_contiguous(memory_format=torch.channels_last)
        compare(f"fp8 upsample, {batch} x {before} to {after} x {height} x {width}", actual, expected)


def empty_of_nan(*sizes: int, **options: Any) -> Tensor:
    """Replaces torch.empty, so that no pixel that the kernel leaves out is right by chance."""
    return torch.full(sizes, torch.nan, **options)


def compare_e4m3(case: str, actual: Tensor, expected: Tensor) -> None:
    """Record the largest difference in steps of E4M3, and the share of numbers that differ."""

    def places(numbers: Tensor) -> Tensor:
        """Return each number's place among all of E4M3; 0: zero."""
        codes = numbers.contiguous().view(torch.uint8).int()
        return torch.where(codes < 128, codes, 128 - codes)

    steps = (places(actual) - places(expected)).abs()
    errors[f"norm steps, {case}"] = float(steps.max())
    errors[f"norm share, {case}"] = float((steps > 0).double().mean())


def run_norm() -> None:
    """Slices of 16 to 128 channels, pixels that no block divides, one block for a program and several, clipping."""
    # batch, channels, groups, height, width, type, the least programs
    cases = (
        (2, 96, 32, 7, 5, torch.float32, 4096), (1, 128, 32, 13, 11, torch.float16, 2),
        (2, 320, 32, 9, 7, torch.float16, 1), (3, 48, 8, 3, 3, torch.bfloat16, 4096),
        (2, 256, 32, 16, 12, torch.float32, 12), (1, 1920, 32, 8, 9, torch.float16, 1),
    )  # fmt: skip
    for batch, channels, groups, height, width, dtype, programs in cases:
        fp8_norm_kernels._MIN_PROGRAMS = programs
        norm, hidden = nn.GroupNorm(groups, channels), torch.randn(batch, height, width, channels)
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
        # Each entry and each group has its own statistics.
        hidden *= torch.rand(batch, 1, 1, groups, 1).expand(-1, -1, -1, -1, channels // groups).flatten(3) + 0.5
        hidden = (hidden + torch.randn(batch, 1, 1, 1)).to(dtype)
        norm = norm.to(dtype)
        input_scale = torch.tensor(2 / 448)
        by_group = hidden.float().unflatten(3, (groups, -1))
        variance, mean = torch.var_mean(by_group, (1, 2, 4), correction=0)
        deviation = (variance + norm.eps).sqrt()
        actual = fp8_norm_kernels.norm_silu_e4m3(hidden, mean, deviation, norm.weight, norm.bias, input_scale)
        expected = quantize(nn.functional.silu(norm.float()(hidden.float().permute(0, 3, 1, 2))), input_scale)
        assert not actual.float().isnan().any()  # the last place before NaN is 448
        assert 0 < int((expected.float().abs() == 448).sum()) < expected.numel() / 2
        compare_e4m3(f"{channels}, {height} x {width}", actual.permute(0, 3, 1, 2), expected)


def run_end_of_norm() -> None:
    """The last block writes no pixels of the next entry. Its own programs would replace them here, but not on a GPU."""
    kernel, ones, hidden = fp8_norm_kernels._norm_silu_e4m3_kernel, torch.ones(32), torch.ones(35, 32)
    for blocks_of_program in (1, 2, 4):
        out = torch.zeros(256, 32).to(torch.float8_e4m3fn)
        library.wrap_triton(kernel)[(2, 1, 1)](
            hidden, 0 * ones, ones, ones, ones, ones[0], out, PIXELS=35, CHANNELS=32, GROUPS=32, BLOCK=32,
            BLOCKS=blocks_of_program, SLICE=32,
        )  # fmt: skip
        assert bool(out[:35].float().all()) and not out[35:].float().any()


def run_norm_in_blocks() -> None:
    """`norm_silu_conv` with the kernel and without, also where the bias has more entries than the pixels."""
    norm, conv = nn.GroupNorm(8, 48), quantize_conv(nn.Conv2d(48, 32, 3, padding=1), 3.0)
    nn.init.normal_(norm.weight)
    hidden = torch.randn(2, 48, 6, 5).to(memory_format=torch.channels_last)
    name, has_half_kernels = "_norm_silu_e4m3_kernel", blocks.has_half_kernels
    for entries in (2, 4):
        around = torch.randn(entries, 32), torch.randn(entries, 32, 6, 5)
        before = launches[name]
        expected = blocks.norm_silu_conv(norm, conv, hidden, *around)
        assert launches[name] == before
        try:  # as on a GPU
            blocks.has_half_kernels = lambda tensor: True
            compare(f"scaled, norm, {entries}", blocks.norm_silu_conv(norm, conv, hidden, *around), expected)
            assert launches[name] == before + 1
            blocks.norm_silu_conv(norm, nn.Conv2d(48, 32, 3, padding=1), hidden, *around)
            assert launches[name] == before + 1
        finally:
            blocks.has_half_kernels = has_half_kernels


def run_nan() -> None:
    """NaN must reach the result in E4M3: clipping it would hide a broken image."""
    tokens, projection = torch.randn(1, 128, 128), nn.Linear(128, 256)
    tokens[0, 3, 5] = torch.nan
    gated = kernels.geglu(tokens, projection.weight, projection.bias, None, OUT_SCALE)
    mixed = kernels.attend_to_itself(torch.full((1, 128, 3 * 64), torch.nan), 1, OUT_SCALE)
    image = torch.zeros(1, 16, 4, 4)
    image[0, 5, 1, 1] = torch.nan
    layer = quantize_conv(nn.Conv2d(16, 16, 3, padding=1), 1.0)
    convolved = layer._run_kernel(layer.quantize_inputs(image), None, None)[:, :, :3, :3]
    ones, pixels = torch.ones(32), image.permute(0, 2, 3, 1).contiguous()
    normed = fp8_norm_kernels.norm_silu_e4m3(pixels, 0 * ones[None, :8], ones[None, :8], ones, ones, OUT_SCALE)
    assert int(normed.float().isnan().sum()) == 1
    for case, found in (("geglu", gated[0, 3]), ("self", mixed), ("conv", convolved), ("norm", normed[0, 1, 1, 5])):
        errors[f"nan, {case}"] = float(not found.float().isnan().all())


def in_bands(block: SimpleNamespace, hidden: Tensor, bias: Tensor, bands: int) -> Tensor:
    """Return what a ResNet block makes of [batch, channels, height, width] in `bands` bands."""

    class Band:
        component = UNET
        signature: Any = None  # not read
        bucket: Any = None

        def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
            with divided(bands):
                out = blocks.resnet(block, own_rows(inputs["hidden"], bands), inputs["bias"])
                return {"out": whole_image(out)}

    return BandEngine([Band() for _ in range(bands)]).run({"hidden": hidden, "bias": bias})["out"]


def run_winograd() -> None:
    winograd._MIN_WIDER_SIDE = winograd._MIN_NARROWER_SIDE = 64
    # Sizes that are not multiples of a tile, tiles that are not multiples of a program, both widths of a program.
    sizes = ((2, 64, 64, 6, 5), (3, 128, 64, 5, 7), (1, 64, 192, 8, 2), (2, 128, 128, 13, 1))
    for batch, before, after, height, width in sizes:
        norms = [nn.GroupNorm(8, channels) for channels in (before, after)]
        for norm in norms:
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
        convolutions = [nn.Conv2d(channels, after, 3, padding=1) for channels in (before, after)]
        shortcut = nn.Conv2d(before, after, 1) if before != after else None
        block = SimpleNamespace(
            norm1=norms[0], conv1=convolutions[0], norm2=norms[1], conv2=convolutions[1], conv_shortcut=shortcut
        )
        hidden = torch.randn(batch, before, height, width).to(memory_format=torch.channels_last)
        bias = torch.randn(batch, 3 * after).split(after, -1)[1]  # as in the UNet: a slice of all blocks' biases
        expected = blocks.resnet(block, hidden, bias)
        winograd.replace_wide_convs(block)
        case = f"winograd, {batch} x {before} x {height} x {width}"
        compare(case, blocks.resnet(block, hidden, bias), expected)
        for bands in (2, 3, 6):  # of 4, 3, 2 rows and one
            if height % bands == 0:
                compare(f"{case}, {bands} bands", in_bands(block, hidden, bias, bands), expected)
        if batch == 1:  # as both halves of guidance begin
            plain = SimpleNamespace(**vars(block) | {"conv1": convolutions[0], "conv2": convolutions[1]})
            biases = torch.randn(2, after)
            expected = blocks.resnet(plain, hidden, biases)
            compare("winograd, repeated", blocks.resnet(block, hidden, biases), expected)
            compare("winograd, repeated, bands", in_bands(block, hidden, biases, 2), expected)
        elif height % 2 == 0:  # in the precision of releases
            for module in filter(None, vars(block).values()):
                module.half()
            compare(f"half, {case}", blocks.resnet(block, hidden.half(), bias.half()), expected)
            compare(f"half, {case}, bands", in_bands(block, hidden.half(), bias.half(), 3), expected)


if __name__ == "__main__":
    kernels._tanh = exact_tanh
    interpreter._patch_lang_tensor = patch_tensor_and_index
    interpreter._convert_float = convert_as_pytorch
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=3)
    torch.cuda.get_device_capability = lambda device: (8, 9)
    library.wrap_triton = intercept(record_types)
    torch.manual_seed(0)
    with torch.no_grad():
        run_cross_attention()
        run_image_attention()
        run_self_attention()
        run_geglu()
        run_low_rank()
        run_int8()
        run_fp8_conv()
        run_fp8_upsample()
        run_norm()
        run_end_of_norm()
        run_norm_in_blocks()
        run_nan()
        run_winograd()
    print(json.dumps({"errors": errors, "types": {name: sorted(found) for name, found in types.items()}}))
