"""An engine holds no weights: none of their bytes, and it computes with whichever are mapped into it."""

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_builder.backends.aot_inductor import compile as compiler
from engine_builder.backends.aot_inductor.compile import example_inputs
from engine_builder.building.validate import tolerance
from engine_builder.networks.network import (
    ModelFolder,
    Network,
    load_network,
)
from model.engines.aot_inductor.engine import AotInductorEngine
from model.engines.components import BASE_COMPONENTS
from model.errors import EngineError
from model.store.manifest import EngineRecord
from model.store.store import Store

RELEASE = "toy-sdxl/1"


def engine_of(store: Store, component: str) -> tuple[EngineRecord, Path, bytes]:
    [record] = [engine for engine in store.read_release(RELEASE).engines if engine.component == component]
    package = store.get(record.blob.sha256, record.blob.bytes)
    return record, package, store.get(record.constants.sha256, record.constants.bytes).read_bytes()


def content(package: Path) -> bytes:
    """Everything in a package, as it lies there and unpacked."""
    with zipfile.ZipFile(package) as archive:
        return package.read_bytes() + b"".join(archive.read(name) for name in archive.namelist())


def kernels(package: Path) -> list[str]:
    """The lines of C++ of an engine's kernels, without comments."""
    with zipfile.ZipFile(package) as archive:
        [code] = [archive.read(name).decode() for name in archive.namelist() if name.endswith(".kernel.cpp")]
    lines = (line.strip() for line in code.splitlines())
    return [line for line in lines if line and not line.startswith("//")]


def open_with(store: Store, network: Network) -> AotInductorEngine:
    record, package, constants = engine_of(store, network.component)
    tensors = network.tensors()
    return AotInductorEngine(
        network.component, package, record.signature, record.bucket, constants, tensors, torch.device("cpu")
    )


@pytest.mark.parametrize("component", BASE_COMPONENTS)
def test_no_tensor_s_bytes_are_in_an_engine(component: str, toy_store: Store, toy_folder: Path) -> None:
    held = content(engine_of(toy_store, component)[1])
    assert b"aoti" in held or b"AOTI" in held
    tensors = load_network(ModelFolder(toy_folder), component, "fp32").tensors()
    weights = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    small = 0
    for name, tensor in weights.items():
        data = tensor.contiguous().numpy().tobytes()
        assert data not in held, name
        if tensor.numel() <= 8:
            # What is baked into code is spread over it, a number at a time.
            small += 1
            assert not all(data[at : at + 4] in held for at in range(0, len(data), 4)), name
    if component in ("unet", "vae_decoder"):
        assert small


@pytest.mark.parametrize("component", BASE_COMPONENTS)
def test_an_engine_computes_with_the_weights_it_is_given(
    component: str, toy_store: Store, folder_copy: Path, edit_weights: Callable[..., None]
) -> None:
    def others(tensors: dict[str, torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(1)
        for tensor in tensors.values():
            tensor.add_(0.1 * torch.randn(tensor.shape, generator=generator))

    part = {"vae_decoder": "vae", "unet_text": "unet", "unet_time": "unet"}.get(component, component)
    before = load_network(ModelFolder(folder_copy), component, "fp32")
    edit_weights(folder_copy / part, others)
    after = load_network(ModelFolder(folder_copy), component, "fp32")
    inputs = example_inputs(before.signature, 2, 96, 64, "cpu")
    given = [inputs[spec.name] for spec in before.signature.inputs]
    outputs = []
    for network in (before, after):
        got = list(open_with(toy_store, network).run(inputs).values())
        with torch.inference_mode():
            expected = network.module(*given)
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        outputs.append(got)
    for one, other in zip(*outputs, strict=True):
        assert (one - other).abs().max() > 1e-2


@pytest.mark.parametrize(
    "component, tensor",
    [("unet", "conv_out.bias"), ("unet", "conv_in.bias"), ("unet_time", "time_embedding.linear_1.bias")],
)
def test_every_tensor_counts_also_the_smallest(component: str, tensor: str, toy_store: Store, toy_folder: Path) -> None:
    network = load_network(ModelFolder(toy_folder), component, "fp32")
    inputs = example_inputs(network.signature, 1, 64, 64, "cpu")
    [before] = [out.clone() for out in open_with(toy_store, network).run(inputs).values()]
    network.tensors()[tensor].add_(1.0)
    [after] = open_with(toy_store, network).run(inputs).values()
    assert (after - before).abs().max() > 1e-3


def test_weights_that_do_not_fit_are_refused(toy_store: Store, toy_folder: Path) -> None:
    record, package, constants = engine_of(toy_store, "unet")
    tensors = load_network(ModelFolder(toy_folder), "unet", "fp32").tensors()

    def opened(weights: dict[str, torch.Tensor]) -> None:
        AotInductorEngine("unet", package, record.signature, record.bucket, constants, weights, torch.device("cpu"))

    lacking = {name: tensor for name, tensor in tensors.items() if name != "conv_out.bias"}
    for weights in (
        lacking,
        tensors | {"conv_out.bias": torch.zeros(5)},
        tensors | {"conv_out.bias": torch.zeros(4, dtype=torch.float16)},
    ):
        with pytest.raises(EngineError, match=r"conv_out\.bias"):
            opened(weights)


@pytest.mark.parametrize("rows, height, width", [(1, 64, 64), (5, 76, 128), (16, 64, 68)])
def test_one_engine_serves_every_size(rows: int, height: int, width: int, toy_store: Store, toy_folder: Path) -> None:
    network = load_network(ModelFolder(toy_folder), "unet", "fp32")
    inputs = example_inputs(network.signature, rows, height, width, "cpu")
    with torch.inference_mode():
        expected = network.module(*(inputs[spec.name] for spec in network.signature.inputs))[0]
    torch.testing.assert_close(open_with(toy_store, network).run(inputs)["noise"], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows, height, width", [(17, 64, 64), (1, 60, 64), (1, 64, 66), (1, 64, 1028)])
def test_what_is_outside_of_the_bucket_is_refused(
    rows: int, height: int, width: int, toy_store: Store, toy_folder: Path
) -> None:
    network = load_network(ModelFolder(toy_folder), "unet", "fp32")
    with pytest.raises(EngineError, match="no bucket for"):
        open_with(toy_store, network).run(example_inputs(network.signature, rows, height, width, "cpu"))


def test_an_engine_s_code_is_the_same_whatever_number_of_threads_compiled_it(toy_folder: Path, tmp_path: Path) -> None:
    """It runs on as many as its machine has, also where those are more than the builder's."""
    network = load_network(ModelFolder(toy_folder), "text_encoder", "fp32")
    bucket = compiler.dynamic_bucket(network.multiple)
    threads = torch.get_num_threads()
    codes = []
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            package = tmp_path / f"{number}.pt2"
            compiler.compile_network(network, compiler.build_target(), bucket, package)
            codes.append(kernels(package))
    finally:
        torch.set_num_threads(threads)
    assert codes[0] == codes[1]
    assert "#pragma omp parallel" in codes[0]


def test_fp32_convolutions_on_a_gpu_may_be_off_by_what_tf32_rounds(toy_folder: Path) -> None:
    folder = ModelFolder(toy_folder)
    for component in ("unet", "vae_decoder"):
        single, half = (load_network(folder, component, precision) for precision in ("fp32", "fp16"))
        assert tolerance(single, "cpu") < tolerance(single, "cuda") == tolerance(half, "cuda")
    for component in ("text_encoder", "unet_text", "unet_time"):
        single = load_network(folder, component, "fp32")
        assert tolerance(single, "cuda") == tolerance(single, "cpu")


def test_a_kernel_s_descriptors_have_room_for_each_of_its_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's generated code makes the room since 2.13; before that it is asked for more."""
    from torch._inductor.codegen.common import TritonScratchWorkspace
    from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides

    def room(bytes_each: int) -> str:
        workspace = TritonScratchWorkspace(bytes_each, lambda: "cached_torch_dtype_uint8")
        return CUDADeviceOpOverrides().cpp_scratch(0, workspace)[0][0]

    whole = room(384)
    with compiler._descriptors("cuda"):
        assert room(384) == whole and "grid_0" in whole
    one = CUDADeviceOpOverrides.cpp_scratch

    def as_in_2_11(self: Any, index: int, workspace: Any, prefix: Any = None) -> Any:
        return [f"int64_t size[] = {{{workspace.size}}};"], "scratch"

    monkeypatch.setattr(CUDADeviceOpOverrides, "cpp_scratch", as_in_2_11)
    with compiler._descriptors("cuda"):
        assert room(384) == f"int64_t size[] = {{{384 * compiler._PROGRAMS}}};"
        assert room(0) == "int64_t size[] = {0};"
    assert CUDADeviceOpOverrides.cpp_scratch is as_in_2_11
    with compiler._descriptors("cpu"):
        assert CUDADeviceOpOverrides.cpp_scratch is as_in_2_11
    monkeypatch.undo()
    assert CUDADeviceOpOverrides.cpp_scratch is one
