"""The Triton kernels without a GPU: their results in Triton's interpreter equal PyTorch's, and they compile for GPUs.

The compiler accepts less than the interpreter. Speed is not tested.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# Folders with Triton, for environments without it: `pip install --no-deps --target FOLDER triton`. Torch's CUDA builds
# include it. Several folders, separated as in PATH, test the Triton versions of several torch versions.
FOLDERS = os.environ.get("PREHEAT_TRITON", "").split(os.pathsep)
NO_TRITON = not FOLDERS[0] and importlib.util.find_spec("triton") is None
KERNELS = ("attend", "attend_self", "geglu", "winograd_tiles", "winograd_pixels")

# The head of both scripts: its `wrap_triton` passes the arguments of a kernel launch to `take`.
HEAD = """
import inspect
import json
from types import SimpleNamespace

import torch
from torch import library


def started_with(take):
    class Wrapped:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            def launch(*given, **named):
                parameters = inspect.signature(self.kernel.fn).parameters
                arguments = dict(zip(parameters, given)) | {name: named[name] for name in named if name in parameters}
                constant = {name for name, one in parameters.items() if "constexpr" in str(one.annotation)}
                options = {name: named[name] for name in named if name not in parameters}
                return take(self.kernel, grid, arguments, constant, options)

            return launch

    return Wrapped
"""

SCRIPT = """
from triton.runtime import interpreter

from engine_builder.networks import blocks, kernels, winograd


def exact_tanh(x):  # the interpreter has no GPU instructions
    return 1 - 2 / (1 + kernels.tl.exp(2 * x))


kernels._tanh = exact_tanh
patch_tensor = interpreter._patch_lang_tensor


# The original converts an array of one number to a number, which numpy 2.4 refuses.
def patch_tensor_and_index(tensor, scope):
    patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = patch_tensor_and_index
torch.manual_seed(0)
torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=3)
errors, arguments_of = {}, {}
wrap = library.wrap_triton


def record(kernel, grid, arguments, constant, options):
    # Records the types of the arguments that a kernel takes at run time, that is, all but tl.constexpr.
    values = [value for name, value in arguments.items() if name not in constant]
    types = {"tensor" if torch.is_tensor(value) else type(value).__name__ for value in values}
    arguments_of.setdefault(kernel.fn.__name__, set()).update(types)
    return wrap(kernel)[grid](**arguments, **options)


library.wrap_triton = started_with(record)


def compare(name, actual, expected):
    errors[name] = float((actual - expected).norm() / expected.norm())


kernels._TEXT_PROGRAMS = 8
for tokens, texts in ((96, 77), (128, 128), (300, 77), (320, 40)):  # one block and several, and partly empty ones
    queries, keys, values = torch.randn(2, tokens, 128), torch.randn(2, texts, 128), torch.randn(2, texts, 128)
    wanted = blocks.attend(queries, keys, values, 2)
    compare(f"text, {tokens}", kernels.attend_to_text(queries, keys, values, 2), wanted)
both = torch.randn(2, 77, 256)
keys, values = both.chunk(2, -1)  # as in the UNet: slices of one tensor for all layers
compare("text, slices", kernels.attend_to_text(queries, keys, values, 2), blocks.attend(queries, keys, values, 2))
for tokens in (128, 256):
    fused = 3 * torch.randn(2, tokens, 3 * 128)
    compare(f"self, {tokens}", kernels.attend_to_itself(fused, 2), blocks.attend(*fused.chunk(3, -1), 2))
for rows, count, width in ((1, 128, 128), (2, 128, 256), (9, 128, 128), (2, 76, 128), (3, 130, 256)):
    # Fewer tiles than programs and several per program, complete tiles and partial ones.
    tokens, projection = torch.randn(rows, count, 128), torch.nn.Linear(128, 2 * width)
    with torch.no_grad():
        projection.weight *= 8  # also large gates
        got = kernels.geglu(tokens, projection.weight, projection.bias)
        compare(f"geglu, {rows} x {count} x {width}", got, blocks.geglu(projection, tokens))
winograd._MIN_WIDER_SIDE = winograd._MIN_NARROWER_SIDE = 64
sizes = ((2, 64, 64, 8, 6), (3, 128, 64, 5, 7), (1, 64, 192, 2, 2), (2, 128, 128, 13, 1))
for rows, before, after, height, width in sizes:
    # Sizes that are not multiples of a tile, tiles that are not multiples of a program, both widths of a program.
    norms = [torch.nn.GroupNorm(8, channels) for channels in (before, after)]
    for norm in norms:
        torch.nn.init.normal_(norm.weight)
        torch.nn.init.normal_(norm.bias)
    convolutions = [torch.nn.Conv2d(channels, after, 3, padding=1) for channels in (before, after)]
    shortcut = torch.nn.Conv2d(before, after, 1) if before != after else None
    block = SimpleNamespace(
        norm1=norms[0], conv1=convolutions[0], norm2=norms[1], conv2=convolutions[1], conv_shortcut=shortcut
    )
    hidden = torch.randn(rows, before, height, width).to(memory_format=torch.channels_last)
    bias = torch.randn(rows, 3 * after).split(after, -1)[1]  # as in the UNet: a slice of all blocks' biases
    with torch.no_grad():
        wanted = blocks.resnet(block, hidden, bias)
        winograd.replace_wide_convs(block)
        compare(f"winograd, {rows} x {before} x {height} x {width}", blocks.resnet(block, hidden, bias), wanted)
        if rows == 1:  # as both halves of guidance begin
            plain = SimpleNamespace(**vars(block) | {"conv1": convolutions[0], "conv2": convolutions[1]})
            more = torch.randn(2, after)
            compare("winograd, repeated", blocks.resnet(block, hidden, more), blocks.resnet(plain, hidden, more))
print(json.dumps({"errors": errors, "arguments": {name: sorted(types) for name, types in arguments_of.items()}}))
"""

COMPILING = """
import triton
from triton.backends.compiler import GPUTarget

from engine_builder.networks import kernels, winograd_kernels

TYPES = {torch.float16: "*fp16", torch.float32: "*fp32"}
torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)
shared = {}


def compile_for_a_gpu(kernel, grid, arguments, constant, options):
    # Compiles for the given arguments and a GPU with tensor memory accelerators, without a launch.
    constants = {name: value for name, value in arguments.items() if name in constant or value is None}
    types = {
        name: "constexpr" if name in constants else TYPES[value.dtype] if torch.is_tensor(value) else "i32"
        for name, value in arguments.items()
    }
    source = triton.compiler.ASTSource(kernel, types, constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert made.asm["cubin"]
    shared[kernel.fn.__name__] = max(made.metadata.shared, shared.get(kernel.fn.__name__, 0))


def halves(*shape):
    return torch.zeros(shape, dtype=torch.float16)


library.wrap_triton = started_with(compile_for_a_gpu)
for height, width in ((32, 32), (38, 26)):  # 1024x1024 and 832x1216 at the UNet's lowest level
    tokens, tiles = height * width, 2 * height * width // 4
    kernels.attend_to_text(halves(2, tokens, 1280), halves(2, 77, 1280), halves(2, 77, 1280), 20)
    kernels.geglu(halves(2, tokens, 1280), halves(10240, 1280), halves(10240))
    hidden, groups, products = halves(2, height, width, 1280), torch.zeros(2, 32), halves(16, tiles, 1280)
    winograd_kernels.winograd_tiles(hidden, groups, groups, halves(1280), halves(1280))
    winograd_kernels.winograd_pixels(products, halves(1280), height, width, halves(2, 1280), None)
    winograd_kernels.winograd_pixels(products, halves(1280), height, width, None, hidden)
kernels.attend_to_itself(halves(1, 256, 3 * 1280), 20)
print(json.dumps(shared))
"""


def run(script: str, folder: str, environment: dict[str, str]) -> dict[str, Any]:
    """Run a script and parse its output. `folder` holds Triton, or is empty.

    It runs in its own process, because Triton reads its environment when it is imported.
    """
    path = os.pathsep.join([str(ROOT), *([folder] if folder else [])])
    command = [sys.executable, "-W", "ignore", "-c", HEAD + script]
    ran = subprocess.run(command, env=os.environ | environment | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    printed: dict[str, Any] = json.loads(ran.stdout)
    return printed


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Relative errors by norm, and types of run-time arguments."""
    return run(SCRIPT, FOLDERS[0], {"TRITON_INTERPRET": "1"})


@pytest.mark.skipif(NO_TRITON, reason="no Triton here: name a folder that holds it in PREHEAT_TRITON")
@pytest.mark.parametrize("kernel", ["text", "self", "geglu", "winograd"])
def test_kernel_equals_pytorch(kernel: str, found: dict[str, Any]) -> None:
    errors = {name: error for name, error in found["errors"].items() if name.startswith(f"{kernel},")}
    assert len(errors) >= 2 and max(errors.values()) < 1e-5, errors


@pytest.mark.skipif(NO_TRITON, reason="no Triton here: name a folder that holds it in PREHEAT_TRITON")
def test_kernels_take_no_floats_at_run_time(found: dict[str, Any]) -> None:
    """In a compiled engine a float would be a double, and everything computed with it in fp64."""
    assert found["arguments"].keys() == {f"_{name}_kernel" for name in KERNELS}
    for kernel, types in found["arguments"].items():
        assert set(types) <= {"tensor", "int"}, kernel


@pytest.mark.skipif(NO_TRITON, reason="no Triton here: name a folder that holds it in PREHEAT_TRITON")
@pytest.mark.parametrize("folder", FOLDERS)
def test_every_kernel_compiles_for_a_gpu(folder: str, tmp_path: Path) -> None:
    shared = run(COMPILING, folder, {"TRITON_CACHE_DIR": str(tmp_path)})
    assert shared.keys() == {f"_{name}_kernel" for name in KERNELS}
    assert max(shared.values()) <= 227 * 1024  # per program on an H100 or H200 (CUDA C++ Programming Guide)
