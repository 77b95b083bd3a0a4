"""Compiled engines of the tiny model: they hold no bytes of weights, and compute with the tensors mapped into them."""

import shutil
import zipfile
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_builder.backends.aot_inductor import compile as compiler
from engine_builder.backends.aot_inductor import inductor_fixes
from engine_builder.backends.aot_inductor.compile import example_inputs
from engine_builder.building.validate import tolerance
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.networks.network import Network, load_network
from engine_builder.stores.store import WritableStore
from model.engines.aot_inductor.compiled_engine import AotInductorEngine
from model.errors import EngineError
from model.pipeline.components import find_component
from model.store.manifest import EngineRecord
from model.store.precision import FP16, FP32
from tests.engine_builder.helpers import edit_weights, perturb
from tests.support.components import BASE_COMPONENTS
from tests.support.repository import MODEL_FOLDER

Published = tuple[WritableStore, str]


@pytest.fixture
def folder_copy(tmp_path: Path) -> Path:
    """A copy of the tiny model's folder."""
    return Path(shutil.copytree(MODEL_FOLDER, tmp_path / "copy", ignore=shutil.ignore_patterns("refiner")))


def read_engine(published: Published, component: str) -> tuple[EngineRecord, Path, bytes]:
    store, release = published
    [record] = [engine for engine in store.read_release(release).engines if engine.component == component]
    package = store.get(record.blob.sha256, record.blob.bytes)
    return record, package, store.get(record.constants.sha256, record.constants.bytes).read_bytes()


def all_bytes(package: Path) -> bytes:
    """Return the bytes of a package, packed and unpacked."""
    with zipfile.ZipFile(package) as archive:
        return package.read_bytes() + b"".join(archive.read(name) for name in archive.namelist())


def kernel_lines(package: Path) -> list[str]:
    """Return the C++ lines of an engine's kernels, without comments."""
    with zipfile.ZipFile(package) as archive:
        [code] = [archive.read(name).decode() for name in archive.namelist() if name.endswith(".kernel.cpp")]
    lines = (line.strip() for line in code.splitlines())
    return [line for line in lines if line and not line.startswith("//")]


def open_engine(
    published: Published, network: Network, weights: dict[str, torch.Tensor] | None = None
) -> AotInductorEngine:
    record, package, constants = read_engine(published, network.component)
    tensors = network.tensors() if weights is None else weights
    cpu = torch.device("cpu")
    engine = AotInductorEngine(network.component, package.read_bytes(), record.signature, record.bucket, constants, cpu)
    engine.bind(tensors)
    return engine


@pytest.mark.parametrize("component", BASE_COMPONENTS)
def test_engine_contains_no_tensor_bytes(component: str, published: Published) -> None:
    content = all_bytes(read_engine(published, component)[1])
    assert b"aoti" in content or b"AOTI" in content
    tensors = load_network(Checkpoint(MODEL_FOLDER), component, FP32).tensors()
    weights = {
        name: tensor for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.unique().numel() > 1
    }
    small = 0
    for name, tensor in weights.items():
        data = tensor.contiguous().numpy().tobytes()
        assert data not in content, name
        if tensor.numel() <= 8:
            # Compiled-in constants are spread over the code, one number at a time.
            small += 1
            assert not all(data[at : at + 4] in content for at in range(0, len(data), 4)), name
    if component in ("unet", "vae_decoder"):
        assert small


@pytest.mark.parametrize("component", BASE_COMPONENTS)
def test_engine_computes_with_the_mapped_weights(component: str, published: Published, folder_copy: Path) -> None:
    subfolder = find_component(component).checkpoint_folder
    before = load_network(Checkpoint(folder_copy), component, FP32)
    edit_weights(folder_copy / subfolder, perturb)
    after = load_network(Checkpoint(folder_copy), component, FP32)
    inputs = example_inputs(before.signature, 2, 96, 64, "cpu")
    positional = [inputs[spec.name] for spec in before.signature.inputs]
    outputs = []
    for network in (before, after):
        actual = list(open_engine(published, network).run(inputs).values())
        with torch.inference_mode():
            expected = network.module(*positional)
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        outputs.append(actual)
    for one, other in zip(*outputs, strict=True):
        assert (one - other).abs().max() > 1e-2


def test_engine_reads_every_bias(published: Published) -> None:
    for component, tensor in (("unet", "conv_out.bias"), ("unet_time", "time_embedding.linear_1.bias")):
        network = load_network(Checkpoint(MODEL_FOLDER), component, FP32)
        inputs = example_inputs(network.signature, 1, 64, 64, "cpu")
        [before] = [out.clone() for out in open_engine(published, network).run(inputs).values()]
        network.tensors()[tensor].add_(1.0)
        [after] = open_engine(published, network).run(inputs).values()
        assert (after - before).abs().max() > 1e-3


def test_refuses_weights_that_do_not_fit(published: Published) -> None:
    network = load_network(Checkpoint(MODEL_FOLDER), "unet", FP32)
    tensors = network.tensors()
    del tensors["conv_out.bias"]
    for more in ({}, {"conv_out.bias": torch.zeros(5)}, {"conv_out.bias": torch.zeros(4, dtype=torch.float16)}):
        with pytest.raises(EngineError, match=r"conv_out\.bias"):
            open_engine(published, network, tensors | more)


def test_one_engine_serves_every_size(published: Published) -> None:
    network = load_network(Checkpoint(MODEL_FOLDER), "unet", FP32)
    engine = open_engine(published, network)
    for size in ((1, 64, 64), (5, 96, 128), (16, 64, 96)):
        inputs = example_inputs(network.signature, *size, "cpu")
        with torch.inference_mode():
            expected = network.module(*(inputs[spec.name] for spec in network.signature.inputs))[0]
        torch.testing.assert_close(engine.run(inputs)["noise"], expected, rtol=1e-4, atol=1e-4)
    for size in ((17, 64, 64), (1, 32, 64), (1, 64, 80), (1, 64, 1056)):
        with pytest.raises(EngineError, match="no bucket for"):
            engine.run(example_inputs(network.signature, *size, "cpu"))


def test_code_is_independent_of_the_builders_threads(published: Published, tmp_path: Path) -> None:
    """An engine uses the threads of the machine that runs it, even if the builder had fewer."""
    network = load_network(Checkpoint(MODEL_FOLDER), "text_encoder", FP32)
    bucket = compiler.dynamic_bucket(network.multiple)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 2)
    try:
        compiled = compiler.compile_network(network, compiler.build_target(), bucket, tmp_path / "engine.pt2")
    finally:
        torch.set_num_threads(threads)
    lines = kernel_lines(compiled.package)
    assert lines == kernel_lines(read_engine(published, "text_encoder")[1])
    assert "#pragma omp parallel" in lines


def test_tolerance_of_fp32_convolutions_on_gpu_is_tf32s() -> None:
    folder = Checkpoint(MODEL_FOLDER)
    for component in ("unet", "vae_decoder"):
        single, half = (load_network(folder, component, precision) for precision in (FP32, FP16))
        assert tolerance(single, "cpu") < tolerance(single, "cuda") == tolerance(half, "cuda")
    for component in ("text_encoder", "unet_text", "unet_time"):
        single = load_network(folder, component, FP32)
        assert tolerance(single, "cuda") == tolerance(single, "cpu")


def test_allocates_descriptors_for_every_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code that torch 2.13 generates does so by itself. For older versions the workspace is enlarged."""
    from torch._inductor.codegen.common import TritonScratchWorkspace
    from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides

    def allocation(bytes_each: int) -> str:
        workspace = TritonScratchWorkspace(bytes_each, lambda: "cached_torch_dtype_uint8")
        return CUDADeviceOpOverrides().cpp_scratch(0, workspace)[0][0]

    complete = allocation(384)
    with inductor_fixes.descriptor_memory():
        assert allocation(384) == complete and "grid_0" in complete
    unchanged = CUDADeviceOpOverrides.cpp_scratch

    def as_in_2_11(self: Any, index: int, workspace: Any, prefix: Any = None) -> Any:
        return [f"int64_t size[] = {{{workspace.size}}};"], "scratch"

    monkeypatch.setattr(CUDADeviceOpOverrides, "cpp_scratch", as_in_2_11)
    with inductor_fixes.descriptor_memory():
        assert allocation(384) == f"int64_t size[] = {{{384 * inductor_fixes.MAX_PROGRAMS}}};"
        assert allocation(0) == "int64_t size[] = {0};"
    assert CUDADeviceOpOverrides.cpp_scratch is as_in_2_11
    monkeypatch.undo()
    assert CUDADeviceOpOverrides.cpp_scratch is unchanged


@pytest.mark.parametrize("as_in_2_11", [True, False], ids=["torch 2.11", "installed"])
def test_every_int_array_is_declared_in_the_code_that_uses_it(
    as_in_2_11: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    generator: Any = CppWrapperCpu.__new__(CppWrapperCpu)
    generator.int_array_id, generator.declared_int_array_vars = count(), set()
    generator.codegen_int_array_var_cache = names = {}

    def codegen_by_function(self: Any, int_array: str, writeline: Any) -> Any:
        key = int_array, id(writeline)
        if key not in names:
            names[key] = self._codegen_int_array_var_impl(int_array, writeline, False)
        return names[key]

    if as_in_2_11:
        monkeypatch.setattr(CppWrapperCpu, "codegen_int_array_var", codegen_by_function)
    original = CppWrapperCpu.codegen_int_array_var

    def is_declared() -> bool:
        """Write the same array to a list of lines, by a function that is deleted afterwards."""
        lines: list[str] = []
        name = generator.codegen_int_array_var("{64L}", lambda line: lines.append(line))
        return any(name in line for line in lines)

    with inductor_fixes.declared_int_arrays():
        assert all(is_declared() for _ in range(100))
        lines: list[str] = []
        names_of_one = {generator.codegen_int_array_var("{64L}", lines.append) for _ in range(100)}
        assert len(names_of_one) == len(lines) == 1  # declared once for all its uses
    assert CppWrapperCpu.codegen_int_array_var is original
