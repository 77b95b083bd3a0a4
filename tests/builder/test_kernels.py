"""Our Triton kernels against PyTorch, in Triton's interpreter: what they compute, not how fast, and without a GPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# A folder with Triton in it, for environments without: `pip install --no-deps --target FOLDER triton`. Torch's builds
# for CUDA bring it.
FOLDER = os.environ.get("PREHEAT_TRITON", "")
NO_TRITON = not FOLDER and importlib.util.find_spec("triton") is None

SCRIPT = """
import inspect
import json
from types import SimpleNamespace

import torch
from torch import library

from triton.runtime import interpreter

from engine_builder.networks import blocks, kernels, winograd


def exact_tanh(x):  # the interpreter has no GPU's instructions
    return 1 - 2 / (1 + kernels.tl.exp(2 * x))


kernels._tanh = exact_tanh
patch_tensor = interpreter._patch_lang_tensor


def patch_tensor_and_index(tensor, scope):  # its own takes an array of one number for a number, which numpy 2.4 refuses
    patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = patch_tensor_and_index
torch.manual_seed(0)
torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=3)
errors, told = {}, {}
wrap = library.wrap_triton


class Recorder:
    # Writes down of what types a kernel's arguments are when it runs: those that are no tl.constexpr.

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*given, **named):
            parameters = inspect.signature(self.kernel.fn).parameters
            arguments = dict(zip(parameters, given)) | named
            running = [name for name, one in parameters.items() if "constexpr" not in str(one.annotation)]
            values = [arguments[name] for name in running]
            types = {"tensor" if torch.is_tensor(value) else type(value).__name__ for value in values}
            told.setdefault(self.kernel.fn.__name__, set()).update(types)
            return wrap(self.kernel)[grid](*given, **named)

        return launch


library.wrap_triton = Recorder


def compare(name, got, wanted):
    errors[name] = float((got - wanted).norm() / wanted.norm())


kernels._TEXT_PROGRAMS = 8
for tokens, texts in ((96, 77), (128, 128), (300, 77), (320, 40)):  # of one block and of several, and half empty ones
    queries, keys, values = torch.randn(2, tokens, 128), torch.randn(2, texts, 128), torch.randn(2, texts, 128)
    wanted = blocks.attend(queries, keys, values, 2)
    compare(f"text, {tokens}", kernels.attend_to_text(queries, keys, values, 2), wanted)
both = torch.randn(2, 77, 256)
keys, values = both.chunk(2, -1)  # as the UNet has them: slices of what was computed for all layers at once
compare("text, slices", kernels.attend_to_text(queries, keys, values, 2), blocks.attend(queries, keys, values, 2))
for tokens in (128, 256):
    fused = 3 * torch.randn(2, tokens, 3 * 128)
    compare(f"self, {tokens}", kernels.attend_to_itself(fused, 2), blocks.attend(*fused.chunk(3, -1), 2))
for rows, count, width in ((1, 128, 128), (2, 128, 256), (9, 128, 128), (2, 76, 128), (3, 130, 256)):
    # Fewer tiles than programs and several for each, whole ones and not.
    tokens, projection = torch.randn(rows, count, 128), torch.nn.Linear(128, 2 * width)
    with torch.no_grad():
        projection.weight *= 8  # gates far out, too
        got = kernels.geglu(tokens, projection.weight, projection.bias)
        compare(f"geglu, {rows} x {count} x {width}", got, blocks.geglu(projection, tokens))
winograd._CHANNELS = winograd._FEWEST = 64
sizes = ((2, 64, 64, 8, 6), (3, 128, 64, 5, 7), (1, 64, 192, 2, 2), (2, 128, 128, 13, 1))
for rows, before, after, height, width in sizes:
    # Sizes that are no whole tiles, tiles that are no whole programs, and both widths of a program.
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
    bias = torch.randn(rows, 3 * after).split(after, -1)[1]  # as the UNet has it: a slice of all blocks' biases
    with torch.no_grad():
        wanted = blocks.resnet(block, hidden, bias)
        winograd.transform_wide(block)
        compare(f"winograd, {rows} x {before} x {height} x {width}", blocks.resnet(block, hidden, bias), wanted)
        if rows == 1:  # as guided rows begin
            plain = SimpleNamespace(**vars(block) | {"conv1": convolutions[0], "conv2": convolutions[1]})
            more = torch.randn(2, after)
            compare("winograd, repeated", blocks.resnet(block, hidden, more), blocks.resnet(plain, hidden, more))
print(json.dumps({"errors": errors, "told": {name: sorted(types) for name, types in told.items()}}))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Relative errors by norm, and types of arguments. In a process of its own, for Triton reads its environment when
    it is imported."""
    path = os.pathsep.join([str(ROOT), *([FOLDER] if FOLDER else [])])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    measured: dict[str, Any] = json.loads(run.stdout)
    return measured


@pytest.mark.skipif(NO_TRITON, reason="no Triton here: name a folder that holds it in PREHEAT_TRITON")
@pytest.mark.parametrize("kernel", ["text", "self", "geglu", "winograd"])
def test_a_kernel_computes_what_pytorch_does(kernel: str, found: dict[str, Any]) -> None:
    errors = {name: error for name, error in found["errors"].items() if name.startswith(f"{kernel},")}
    assert len(errors) >= 2 and max(errors.values()) < 1e-5, errors


@pytest.mark.skipif(NO_TRITON, reason="no Triton here: name a folder that holds it in PREHEAT_TRITON")
def test_no_kernel_is_given_a_fraction_when_it_runs(found: dict[str, Any]) -> None:
    """Compiled into an engine it would be a double, and everything computed with it would be in fp64."""
    names = ("attend", "attend_self", "geglu", "winograd_tiles", "winograd_pixels")
    assert found["told"].keys() == {f"_{name}_kernel" for name in names}
    for kernel, types in found["told"].items():
        assert set(types) <= {"tensor", "int"}, kernel
