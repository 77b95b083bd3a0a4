"""Time every convolution of SDXL's UNet or VAE decoder in fp16 and in FP8, on the GPU of this machine.

    python -m engine_builder.benchmarks.fp8_convolutions --batch 2 --size 1024x1024 --out rows.json
    python -m engine_builder.benchmarks.fp8_convolutions --network vae_decoder

Two comparisons for each shape, in microseconds:

- alone: PyTorch's convolution of fp16 pixels, and the FP8 kernel on E4M3 pixels with each choice of tiles. Layers whose
  fp16 engines use Winograd's kernels have their time, too. It includes the norm, because they do the norm's work.
- compiled: group norm, SiLU, convolution, bias and residual as engines have them, in fp16 and in FP8. Downsamplers and
  upsamplers have only the convolution, with the quantization of its input. The FP8 kernel has engines' tiles.

Each kernel's result is compared with the same numbers convolved in fp32. Tiles whose result is wrong are left out, and
so is a shape whose result is wrong with engines' tiles or when compiled.

Then it prints the sum over the network, and the layers that are no faster in FP8, as `keep_fp16` of a policy. For the
VAE decoder it also times the whole network in fp16, compiled. Weights and pixels are random. Four sets of them take
turns, because a network does not find its weights in the cache. A shape or tiles that fail are left out, and their
error is printed. The table comes last, after the rows as JSON.
"""

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine_builder.benchmarks.choices import Failures, time_choices
from engine_builder.benchmarks.rows import Row, append_rows, finish, make_row
from engine_builder.building.graph_timing import Timer, Work, time_on_gpu
from engine_builder.checkpoints.random_sdxl import make_network
from engine_builder.networks.blocks import norm_silu_conv
from engine_builder.networks.fp8_conv import QuantizedConv, conv_channels, quantize_conv, suits_kernel
from engine_builder.networks.fp8_conv_tiles import Tiles
from engine_builder.networks.kernel_form import plain_operations
from engine_builder.networks.network import public_name
from engine_builder.networks.unet import UnetNetwork, text_width, time_width
from engine_builder.networks.vae import VaeDecoderNetwork
from engine_builder.networks.winograd import WinogradConv

_BATCHES = {"unet": 2, "vae_decoder": 1}  # of one image
_SETS = 4  # of tensors
_TEXT_TOKENS = 77
# Largest errors of a correct kernel, relative by norm. Compiled, the norm's last bits round some numbers otherwise.
_MAX_ERROR, _MAX_COMPILED_ERROR = 1e-2, 5e-2
_SHARED_BYTES = {True: 227 * 1024, False: 99 * 1024}  # of a program, on a GPU of a data center and on others


@dataclass(frozen=True)
class ConvShape:
    """What decides the time of a convolution, except the batch. height, width: pixels of the input.

    in_resnet: group norm and SiLU precede it. adds_bias: of the time embedding, for each entry of the batch.
    """

    channels_in: int
    channels_out: int
    height: int
    width: int
    kernel: int
    stride: int
    padding: int
    in_resnet: bool
    adds_bias: bool
    adds_residual: bool
    uses_winograd: bool

    @property
    def output_sizes(self) -> tuple[int, int]:
        """Height and width of the result."""
        height, width = (
            (size + 2 * self.padding - self.kernel) // self.stride + 1 for size in (self.height, self.width)
        )
        return height, width

    @property
    def gigaflops(self) -> float:
        """Of one entry of the batch, by direct convolution."""
        height, width = self.output_sizes
        return 2e-9 * self.kernel**2 * self.channels_in * self.channels_out * height * width

    def __str__(self) -> str:
        parts = ("norm", self.in_resnet), ("bias", self.adds_bias), ("residual", self.adds_residual)
        around = "+".join(name for name, has in parts if has)
        size = f"{self.height}x{self.width}"
        return f"{self.channels_in}>{self.channels_out} {size} k{self.kernel} s{self.stride} {around or 'alone'}"


@dataclass(frozen=True)
class ConvTimes:
    """The times of one shape in microseconds, of each repetition.

    layers: names. winograd: None if engines do not use it. by_tiles: of the FP8 kernel alone, by the tiles' name.
    error: of the FP8 kernel with engines' tiles, relative by norm, against the same numbers convolved in fp32.
    """

    shape: ConvShape
    layers: tuple[str, ...]
    fp16: list[float]
    winograd: list[float] | None
    by_tiles: dict[str, list[float]]
    compiled_fp16: list[float]
    compiled_fp8: list[float]
    error: float

    @property
    def best_tiles(self) -> str:
        return min(self.by_tiles, key=lambda name: statistics.median(self.by_tiles[name]))

    @property
    def ratio(self) -> float:
        """How many times as fast the compiled form is in FP8."""
        return statistics.median(self.compiled_fp16) / statistics.median(self.compiled_fp8)


def network_convolutions(name: str, height: int, width: int) -> dict[ConvShape, tuple[str, ...]]:
    """Return the layers of SDXL's "unet" or "vae_decoder" that FP8 suits, by shape.

    height, width: pixels of the image.
    """
    found: dict[ConvShape, tuple[str, ...]] = {}

    def observe(layer: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def add(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            shape = _shape_of(name, layer, module, inputs[0])
            found[shape] = (*found.get(shape, ()), layer)

        return add

    with torch.device("meta"), torch.inference_mode(), plain_operations():
        inputs = [torch.empty(1, 4, height // 8, width // 8)]
        network: nn.Module
        if name == "vae_decoder":
            network = VaeDecoderNetwork(make_network("vae"))
        else:
            unet = make_network("unet")
            network = UnetNetwork(unet, use_winograd=True)
            inputs += [torch.empty(1, time_width(unet)), torch.empty(1, _TEXT_TOKENS, text_width(unet))]
        for layer, module in network.named_modules():
            if suits_kernel(module):
                module.register_forward_pre_hook(observe(public_name(layer)))
        network(*inputs)
    return found


def _shape_of(network: str, layer: str, module: nn.Module, inputs: Tensor) -> ConvShape:
    assert isinstance(module, nn.Conv2d | WinogradConv)
    kernel, stride, padding = (3, 1, 1)
    if isinstance(module, nn.Conv2d):
        kernel, stride, padding = module.kernel_size[0], module.stride[0], int(module.padding[0])
    return ConvShape(
        *conv_channels(module), inputs.shape[2], inputs.shape[3], kernel, stride, padding,
        in_resnet=".resnets." in layer,
        adds_bias=network == "unet" and layer.endswith(".conv1"),
        adds_residual=layer.endswith(".conv2"),
        uses_winograd=isinstance(module, WinogradConv),
    )  # fmt: skip


def candidate_tiles() -> dict[str, Tiles]:
    """Return the tiles that are compared, by name: pixels x channels x depth, warps, stages."""
    choices = [
        Tiles(pixels, channels, depth, warps=warps, stages=stages)
        for pixels, channels, depth, warps, stages in (
            (128, 128, 128, 8, 3), (128, 128, 128, 8, 4), (128, 128, 64, 8, 4), (128, 128, 128, 4, 3),
            (64, 128, 128, 4, 4), (128, 64, 128, 4, 4), (64, 64, 128, 4, 4), (128, 256, 64, 8, 4),
            (128, 256, 128, 8, 3), (256, 128, 64, 8, 4), (256, 128, 128, 8, 3), (256, 64, 64, 8, 4),
            (256, 64, 64, 4, 4), (128, 64, 64, 4, 4),
        )
    ]  # fmt: skip
    return {str(tiles): tiles for tiles in choices}


@torch.no_grad()
def measure(
    shape: ConvShape, layers: tuple[str, ...], batch: int, device: str, timer: Timer, tiles: dict[str, Tiles],
    failures: Failures,
) -> ConvTimes:  # fmt: skip
    """Time all forms of one shape. On a CPU nothing is compiled. Tiles that fail or are wrong are left out.

    Raises RuntimeError if the kernel is wrong with engines' tiles or when compiled, or fails with all tiles.
    """
    from engine_builder.networks.fp8_conv_kernels import fp8_conv, run_fp8_conv

    dtype = torch.float16 if device == "cuda" else torch.float32
    height, width = shape.output_sizes
    in_channels_last = {"memory_format": torch.channels_last}

    def random(*sizes: int) -> Tensor:
        values = torch.randn(sizes, device=device).to(dtype)
        return values.to(**in_channels_last) if len(sizes) == 4 else values  # type: ignore[call-overload]

    fp16: list[Work] = []
    winograd: list[Work] = []
    compiled: dict[str, list[Work]] = {"fp16": [], "fp8": []}
    by_tiles: dict[str, list[Work]] = {}
    error = 0.0
    norm = nn.GroupNorm(32, shape.channels_in).to(device, dtype)
    for number in range(_SETS):
        conv = nn.Conv2d(shape.channels_in, shape.channels_out, shape.kernel, shape.stride, shape.padding)
        conv = conv.to(device, dtype).to(**in_channels_last)  # type: ignore[call-overload]
        hidden = random(batch, shape.channels_in, shape.height, shape.width)
        entry_bias = random(batch, shape.channels_out) if shape.adds_bias else None
        residual = random(batch, shape.channels_out, height, width) if shape.adds_residual else None
        layer = quantize_conv(conv, 4.0)
        numbers = layer.quantize_inputs(hidden)
        pixels, weight = numbers.permute(0, 2, 3, 1), layer.weight.permute(0, 2, 3, 1)
        arguments = (
            pixels, weight, layer.input_scale, layer.weight_scale, layer.bias, None, None, shape.stride, shape.padding,
            dtype,
        )  # fmt: skip
        if number == 0:
            with plain_operations():
                expected = layer(numbers).float()
            expected = expected.permute(0, 2, 3, 1)
            error = _error(fp8_conv(*arguments), expected)
            if not error <= _MAX_ERROR:
                raise RuntimeError(f"The FP8 kernel is wrong with engines' tiles: an error of {error:.3f}.")
            tiles = _right_tiles(tiles, partial(run_fp8_conv, *arguments), expected, shape, failures)
            by_tiles = {name: [] for name in tiles}
        fp16.append(_call(F.conv2d, hidden, conv.weight, conv.bias, shape.stride, shape.padding))
        for name, works in by_tiles.items():
            works.append(_call(run_fp8_conv, *arguments, tiles[name]))
        engine_conv = WinogradConv(conv) if shape.uses_winograd else conv
        if shape.uses_winograd:
            winograd.append(_call(norm_silu_conv, norm, engine_conv, hidden, entry_bias, residual))
        for name, module in (("fp16", engine_conv), ("fp8", layer)):
            form, inputs = _Form(norm, module, shape.in_resnet), (hidden, entry_bias, residual)
            compiled[name].append(compile_module(form, inputs) if device == "cuda" else _call(form, *inputs))
        if number == 0:
            with plain_operations():
                expected = form(*inputs).float()
            if not (compiled_error := _error(cast(Tensor, compiled["fp8"][0]()), expected)) <= _MAX_COMPILED_ERROR:
                raise RuntimeError(f"The compiled form in FP8 is wrong: an error of {compiled_error:.3f}.")
    times_by_tiles = time_choices(by_tiles, timer, failures)
    if not times_by_tiles:
        raise RuntimeError("The FP8 kernel fails with all tiles.")
    return ConvTimes(
        shape, layers, timer(fp16), timer(winograd) if winograd else None, times_by_tiles, timer(compiled["fp16"]),
        timer(compiled["fp8"]), error,
    )  # fmt: skip


def _right_tiles(
    tiles: dict[str, Tiles], run: Callable[[Tiles], Tensor], expected: Tensor, shape: ConvShape, failures: Failures
) -> dict[str, Tiles]:
    """Return the tiles whose result is near `expected`. The others are printed. run: the kernel with given tiles."""
    errors = time_choices(
        {name: [_call(run, choice)] for name, choice in tiles.items()},
        lambda works: [_error(cast(Tensor, work()), expected) for work in works],
        failures,
    )
    for name, [error] in errors.items():
        if not error <= _MAX_ERROR:
            failures.print(f"{shape}, {name}", RuntimeError(f"The result is wrong: an error of {error:.3f}."))
    return {name: tiles[name] for name, [error] in errors.items() if error <= _MAX_ERROR}


def _error(found: Tensor, expected: Tensor) -> float:
    """Return the relative error by norm. `expected`: fp32, of the same shape."""
    return float((found.float() - expected).norm() / expected.norm())


def _call(function: Callable[..., object], *arguments: object) -> Work:
    return lambda: function(*arguments)


class _Form(nn.Module):
    """A convolution with what is around it in its network."""

    def __init__(self, norm: nn.GroupNorm, conv: nn.Conv2d | WinogradConv | QuantizedConv, in_resnet: bool) -> None:
        super().__init__()
        self.norm, self.conv, self.in_resnet = norm, conv, in_resnet

    def forward(self, hidden: Tensor, entry_bias: Tensor | None, residual: Tensor | None) -> Any:
        if self.in_resnet:
            return norm_silu_conv(self.norm, self.conv, hidden, entry_bias, residual)
        return self.conv(hidden)


def compile_module(module: nn.Module, inputs: tuple[Tensor | None, ...], backend: str = "inductor") -> Work:
    """Return calls of a module on these inputs, compiled as one graph.

    It is traced by torch.export, as engines are, because torch.compile's own tracing would divide the networks where
    they read a ContextVar, and fuse less.
    """
    module = module.eval().requires_grad_(False)
    exported = torch.export.export(module, inputs, strict=False).module()
    return _call(torch.compile(exported, dynamic=False, fullgraph=True, backend=backend), *inputs)


@torch.no_grad()
def time_vae_decoder(batch: int, height: int, width: int, timer: Timer) -> list[float]:
    """Return microseconds of the whole decoder in fp16, compiled, of each repetition. Weights are random."""
    network = VaeDecoderNetwork(make_network("vae").half().cuda())
    network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    latents = torch.randn(batch, 4, height // 8, width // 8, dtype=torch.float16, device="cuda")
    return timer([compile_module(network, (latents,))])


_HEADING = (
    f"{'convolution':42} {'n':>2} {'fp16':>6} {'Winogr.':>7} {'FP8':>6} {'TFLOP/s':>7} {'best tiles':19} "
    f"{'error':>7} | {'fp16':>6} {'FP8':>6} {'gain':>5}  compiled"
)


def table_line(one: ConvTimes, batch: int) -> str:
    """Return the line of the table of one shape, under `_HEADING`."""
    best = statistics.median(one.by_tiles[one.best_tiles])
    fp16, fp8 = map(statistics.median, (one.compiled_fp16, one.compiled_fp8))
    winograd = f"{statistics.median(one.winograd):.1f}" if one.winograd else ""
    speed = batch * one.shape.gigaflops / best * 1e3
    return (
        f"{one.shape!s:42} {len(one.layers):2} {statistics.median(one.fp16):6.1f} {winograd:>7} {best:6.1f} "
        f"{speed:7.0f} {one.best_tiles:19} {one.error:7.5f} | {fp16:6.1f} {fp8:6.1f} "
        f"{one.ratio:5.2f}"
    )


def report(times: Sequence[ConvTimes], batch: int, whole: Sequence[float] = ()) -> str:
    """Return the table, the sums over the network, and the layers that FP8 does not make faster.

    whole: microseconds of the whole network in fp16, of each repetition; empty if it was not timed.
    """
    lines = [_HEADING]
    totals = [0.0, 0.0, 0.0]
    slower: list[str] = []
    for one in sorted(times, key=lambda one: one.ratio):
        lines.append(table_line(one, batch))
        fp16, fp8 = map(statistics.median, (one.compiled_fp16, one.compiled_fp8))
        medians = fp16, fp8, min(fp16, fp8)
        totals = [total + len(one.layers) * us for total, us in zip(totals, medians, strict=True)]
        slower += one.layers if one.ratio <= 1 else ()
    everywhere, all_fp8, mixed = totals
    lines.append(f"all layers, us: {everywhere:.0f} in fp16, {all_fp8:.0f} in FP8, {mixed:.0f} with the faster of each")
    if whole:
        lines.append(f"the whole network, us: {statistics.median(whole):.0f} in fp16")
    lines += ["slower in FP8:", *(f'    "{name}",' for name in sorted(slower))]
    return "\n".join(lines)


def rows_of(times: Sequence[ConvTimes], batch: int) -> list[Row]:
    """Return two rows of each shape: the compiled form in fp16 and in FP8. Extra entries have the kernels' times."""
    rows = []
    for one in times:
        alone = {name: round(statistics.median(values), 2) for name, values in one.by_tiles.items()}
        for precision, values in (("float16", one.compiled_fp16), ("fp8", one.compiled_fp8)):
            extra: dict[str, Any] = {"layers": list(one.layers)}
            if precision == "fp8":
                extra |= {"alone_by_tiles": alone, "error": round(one.error, 6)}
            else:
                winograd = one.winograd and round(statistics.median(one.winograd), 2)
                extra |= {"alone": round(statistics.median(one.fp16), 2), "winograd": winograd}
            rows.append(make_row(str(one.shape), values, "us", precision, 1, batch, digits=2, **extra))
    return rows


def measure_all(
    shapes: Mapping[ConvShape, tuple[str, ...]],
    measure_shape: Callable[[ConvShape, tuple[str, ...]], ConvTimes],
    batch: int,
    out: Path | None,
    failures: Failures,
) -> tuple[list[ConvTimes], list[Row]]:
    """Measure every shape and print its line of the table. Shapes that fail are left out.

    Its rows are appended to the file `out` at once, unless that is None: a run that is stopped loses no shape.
    """
    times: list[ConvTimes] = []
    rows: list[Row] = []
    print(_HEADING, flush=True)
    for shape, layers in shapes.items():
        try:
            times.append(measure_shape(shape, layers))
        except Exception as error:
            failures.print(str(shape), error)
            continue
        print(table_line(times[-1], batch), flush=True)
        added = rows_of(times[-1:], batch)
        rows += added
        if out is not None:
            append_rows(out, added)
    return times, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=sorted(_BATCHES), default="unet")
    parser.add_argument("--batch", type=int, help="entries of the network's batch; default: those of one image")
    parser.add_argument("--size", default="1024x1024", help="WIDTHxHEIGHT of the image")
    parser.add_argument("--out", type=Path, help="file of rows to append to, after each shape")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        parser.error("this benchmark needs a GPU of compute capability 8.9 or newer")
    batch = arguments.batch or _BATCHES[arguments.network]
    width, height = map(int, arguments.size.split("x"))
    largest = _SHARED_BYTES[torch.cuda.get_device_capability() in ((9, 0), (10, 0))]
    tiles = {
        name: t for name, t in candidate_tiles().items() if (t.pixels + t.channels) * t.depth * t.stages <= largest
    }
    failures = Failures()

    def measure_on_gpu(shape: ConvShape, layers: tuple[str, ...]) -> ConvTimes:
        try:
            return measure(shape, layers, batch, "cuda", time_on_gpu, tiles, failures)
        finally:
            torch._dynamo.reset()

    shapes = network_convolutions(arguments.network, height, width)
    times, rows = measure_all(shapes, measure_on_gpu, batch, arguments.out, failures)
    whole: list[float] = []
    if arguments.network == "vae_decoder":
        try:
            whole = time_vae_decoder(batch, height, width, time_on_gpu)
        except Exception as error:
            failures.print("vae_decoder", error)
        else:
            row = make_row("vae_decoder", whole, "us", "float16", 1, batch, digits=2)
            rows.append(row)
            if arguments.out is not None:
                append_rows(arguments.out, [row])
    finish(rows, None)
    print(report(times, batch, whole), flush=True)


if __name__ == "__main__":
    main()
