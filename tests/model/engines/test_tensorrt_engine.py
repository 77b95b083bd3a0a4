"""Engines of TensorRT and TensorRT-RTX: refit, streams, workspaces, captures, and refusals.

The library is a fake here (`tests.support.fake_tensorrt`). test_tensorrt_pipeline.py has the images of plans.
test_tensorrt_real.py runs the real TensorRT, and test_tensorrt_rtx.py the real TensorRT-RTX, as far as it runs without
a GPU.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from onnx import TensorProto

from model.engines.engine import EngineSet
from model.engines.tensorrt import libraries
from model.engines.tensorrt.execution import PlanError
from model.engines.tensorrt.libraries import (
    LIBRARIES,
    TENSORRT,
    TENSORRT_RTX,
    Library,
    TensorRTUnavailable,
    driver_cuda_version,
    driver_version,
    installed_version,
    require,
)
from model.engines.tensorrt.plan_engine import TensorRTEngine, TensorRTPlan, Workspace, named_tensors
from model.errors import EngineError
from model.store.manifest import Bucket, Signature, Span, TensorSpec
from tests.support.fake_tensorrt import (
    RTX_VERSION,
    VERSION,
    WORKSPACE_BYTES,
    Fake,
    FakeCuda,
    affine_plan,
    install_distribution,
    install_fake,
)

CPU = torch.device("cpu")
SIGNATURE = Signature(
    inputs=(TensorSpec(name="x", dtype="float32", shape=("rows", 4)),),
    outputs=(TensorSpec(name="y", dtype="float32", shape=("rows", 4)),),
)
WEIGHTS = {"layer.weight": torch.tensor([1.0, 2.0, 3.0, 4.0])}
ONE, FOUR = Bucket(batch=Span(min=1, max=1)), Bucket(batch=Span(min=2, max=4))


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> tuple[Fake, FakeCuda]:
    return install_fake(monkeypatch)


@pytest.fixture
def fake(fakes: tuple[Fake, FakeCuda]) -> Fake:
    return fakes[0]


@pytest.fixture
def cuda(fakes: tuple[Fake, FakeCuda]) -> FakeCuda:
    return fakes[1]


@pytest.fixture
def rtx(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return install_fake(monkeypatch, TENSORRT_RTX)[0]


def constants(shape: list[int]) -> bytes:
    return json.dumps({"w": {"tensor": "layer.weight", "dtype": "float32", "shape": shape}}).encode()


def open_plan(data: bytes | None = None, version: str = VERSION, **changes: Any) -> TensorRTPlan:
    """Open a plan of y = x * w + b. `changes`: of its map of constants, weights and literals."""
    tensors = {"constants": constants([4]), "weights": WEIGHTS, "literals": {"b": torch.full((4,), 0.5)}} | changes
    named = named_tensors("unet", **tensors, device=CPU)
    return TensorRTPlan(TENSORRT, "unet", data or affine_plan(), version, SIGNATURE, named, CPU)


def open_rtx_plan(runtime_cache: bytes = b"", version: str = RTX_VERSION) -> TensorRTPlan:
    """Open a plan of TensorRT-RTX that holds its weights."""
    plan = affine_plan(stripped=False)
    return TensorRTPlan(TENSORRT_RTX, "unet", plan, version, SIGNATURE, None, CPU, runtime_cache)


def open_engines(workspace: Workspace | None = None, **changes: Any) -> list[TensorRTEngine]:
    """Open a plan's engines of batch 1 and of batch 2 to 4."""
    workspace, plan = workspace or Workspace(CPU), open_plan(**changes)
    return [TensorRTEngine(plan, number, bucket, workspace) for number, bucket in enumerate((ONE, FOUR))]


def run(engine: TensorRTEngine | EngineSet, x: torch.Tensor) -> None:
    """Run an engine, and compare its output."""
    torch.testing.assert_close(engine.run({"x": x})["y"], x * WEIGHTS["layer.weight"] + 0.5)


def test_engines_of_one_plan_serve_all_batches(fake: Fake) -> None:
    """Batches are padded and split as for any engines. The plan is deserialized and refit once."""
    run(EngineSet(open_engines()), torch.randn(6, 4))
    assert [shape for _, _, shape in fake.calls_of("shape")] == [(4, 4), (2, 4)]
    assert len(fake.calls_of("deserialize")) == len(fake.calls_of("refit")) == 1
    assert {location for _, _, location in fake.calls_of("set_weights")} == {"DEVICE"}
    names = [call[0] for call in fake.calls]
    assert names[names.index("refit") + 1] == "synchronize", "the weights may be freed afterwards"


def test_runs_on_inputs_of_any_layout(fake: Fake) -> None:
    """The second entry of a batch begins 16 bytes after the first, where TensorRT cannot read it."""
    one, four = open_engines()
    for engine, x in ((one, torch.randn(4, 4)[1:2]), (four, torch.randn(4, 4).T)):
        run(engine, x)
        assert x.data_ptr() not in {address for _, name, address in fake.calls_of("address") if name == "x"}


def test_weights_stored_with_channels_last_are_made_contiguous(fake: Fake) -> None:
    weight = torch.arange(4.0).reshape(1, 2, 2, 1).contiguous(memory_format=torch.channels_last)
    one, _ = open_engines(weights={"layer.weight": weight}, constants=constants([1, 2, 2, 1]))
    assert one.run({"x": torch.ones(1, 4)})["y"].tolist() == [[0.5, 1.5, 2.5, 3.5]]


def test_engines_of_one_workspace_share_memory(fake: Fake) -> None:
    workspace = Workspace(CPU)
    one, four = open_engines(workspace)
    for engine, rows in ((one, 1), (four, 3)):
        run(engine, torch.zeros(rows, 4))
    [(_, first, small), (_, second, large)] = fake.calls_of("device_memory")
    assert first == second and (small, large) == (WORKSPACE_BYTES, 2 * WORKSPACE_BYTES)
    workspace.reserve(large)
    with pytest.raises(EngineError, match="Open all engines of a release first"):
        workspace.reserve(large + 1)


def test_workspace_waits_for_its_last_use_on_another_stream(fake: Fake, cuda: FakeCuda) -> None:
    """Also after a run that failed, which may have enqueued kernels. A graph does not wait for work outside of it."""
    one, four = open_engines()
    run(one, torch.zeros(1, 4))
    run(one, torch.zeros(1, 4))
    assert not fake.calls_of("wait")
    cuda.current = 8
    run(four, torch.zeros(2, 4))
    assert fake.calls_of("wait", "execute")[-2:] == [("wait", 8, 7), ("execute", 8)]
    cuda.capturing, cuda.current = True, 9
    run(four, torch.zeros(2, 4))
    cuda.capturing, cuda.current = False, 8
    run(four, torch.zeros(2, 4))
    assert len(fake.calls_of("wait")) == 1
    fake.refuse, cuda.current = {"execute"}, 6
    with pytest.raises(EngineError, match="refused the run"):
        one.run({"x": torch.zeros(1, 4)})
    fake.refuse, cuda.current = set(), 7
    run(four, torch.zeros(2, 4))
    assert fake.calls_of("wait")[1:] == [("wait", 6, 8), ("wait", 7, 6)]


def test_capture_needs_a_shape_that_has_run(fake: Fake, cuda: FakeCuda) -> None:
    """The library finishes its setup in the first run of a shape, which a capture does not allow."""
    _, four = open_engines()
    for rows in (2, 3):
        cuda.capturing = True
        with pytest.raises(EngineError, match="unet: a CUDA graph captures a shape that has not run before"):
            four.run({"x": torch.zeros(rows, 4)})
        cuda.capturing = False
        run(four, torch.zeros(rows, 4))
        cuda.capturing = True
        run(four, torch.zeros(rows, 4))


# -- refusals -----------------------------------------------------------------------------------------------------

OTHER_PLANS: dict[str, tuple[dict[str, Any], str]] = {
    "tensor": ({"inputs": "xz"}, "has input x, input z, output y, and its manifest entry states"),
    "dtype": ({"output": TensorProto.FLOAT16}, "has y as HALF, and its manifest entry states float32"),
    "unknown weight": ({"extra": ("other", False)}, "needs 1 weights that the release lacks, 'other' first"),
    "size": ({"width": 5}, "needs w as 5 values"),
}
REFUSED_CALLS = {
    "deserialize": r"generated on an incompatible device\.",
    "set_weights": "refuses w",
    "refit": "cannot be refit",
}
OTHER_WEIGHTS: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"weights": {}}, "lack layer.weight"),
    "shape": ({"weights": {"layer.weight": torch.zeros(5)}}, "do not fit its engine"),
    "dtype": ({"weights": {"layer.weight": torch.zeros(4, dtype=torch.float16)}}, "is float16"),
    "device": ({"weights": {"layer.weight": torch.zeros(4, device="meta")}}, "must be on cpu"),
    "named twice": ({"literals": {"w": torch.zeros(4)}}, "has w among its weights and among its literals"),
    "damaged map": ({"constants": b"{"}, "map of constants is damaged"),
}


def test_refuses_a_plan_that_does_not_fit(fake: Fake) -> None:
    def check(message: str, **changes: Any) -> None:
        with pytest.raises(EngineError, match=f"{message}.*preheat build"):
            open_plan(**changes)

    check("built by TensorRT 10.16.1.11 and this machine has 11.4.0.106", version="10.16.1.11")
    assert not fake.calls
    for changes, message in OTHER_WEIGHTS.values():
        check(message, **changes)
    assert not fake.calls, "nothing is opened with weights that do not fit"
    for changes, message in OTHER_PLANS.values():
        check(message, data=affine_plan(**changes))
    for call, message in REFUSED_CALLS.items():
        fake.refuse = {call}
        check(message)
    fake.refuse = set()
    open_plan(affine_plan(extra=("constant of the parser", True)))  # which the plan holds


def test_refuses_a_missing_profile_and_one_without_memory(fake: Fake) -> None:
    with pytest.raises(EngineError, match="2 profiles, and its manifest entry names number 2"):
        TensorRTEngine(open_plan(), 2, ONE, Workspace(CPU))
    for step in ("context", "profile"):
        fake.refuse = {step}
        with pytest.raises(EngineError, match="cannot be set up"):
            TensorRTEngine(open_plan(), 0, ONE, Workspace(CPU))


def test_refused_run_is_an_error_and_the_next_one_works(fake: Fake) -> None:
    one, _ = open_engines()
    for step, words in (("shape", "shape"), ("address", "address of x"), ("execute", "run")):
        fake.refuse = {step}
        with pytest.raises(EngineError, match=f"TensorRT refused the {words}"):
            one.run({"x": torch.zeros(1, 4)})
        fake.refuse = set()
        run(one, torch.ones(1, 4))
        assert fake.calls_of("shape", "execute")[-2][0] == "shape", "the shape is set again"


def test_checks_inputs_before_the_run(fake: Fake) -> None:
    one, _ = open_engines()
    for inputs, words in (
        ({"x": torch.zeros(2, 4)}, "no bucket for batch 2"),
        ({"x": torch.zeros(1, 5)}, "expected float32"),
        ({"y": torch.zeros(1, 4)}, "takes x"),
        ({"x": torch.zeros(1, 4, device="meta")}, "is on meta"),
    ):
        with pytest.raises(EngineError, match=words):
            one.run(inputs)
    assert not fake.calls_of("execute")


# -- TensorRT-RTX -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("invalid", "reason"),
    [
        (["VERSION_MISMATCH", "UNSUPPORTED_CC"], "version mismatch, unsupported cc"),
        (["MALFORMED_ENGINE"], "malformed engine"),
        ([], "Error reading CUDA GPU properties"),
    ],
    ids=["two reasons", "malformed", "no GPU"],
)
def test_rtx_does_not_read_a_plan_with_an_invalid_header(rtx: Fake, invalid: list[str], reason: str) -> None:
    rtx.invalid = invalid
    with pytest.raises(PlanError, match=f"unet plan cannot be opened on this machine: {reason}\\. Build and publish"):
        open_rtx_plan()
    assert rtx.calls == [("validity",)]


def test_rtx_runs_kernels_of_an_earlier_process(rtx: Fake) -> None:
    """They are compiled before a capture: with the default strategy a graph could keep unspecialized kernels."""
    plan = open_rtx_plan(b"kernels")
    assert rtx.calls_of("load_cache") == [("load_cache", b"kernels")] and not rtx.calls_of("refit")
    assert plan.runtime_cache is not None and plan.runtime_cache.serialize() == b"kernels+kernels"
    engine = TensorRTEngine(plan, 0, ONE, Workspace(CPU))
    [(_, config)] = rtx.calls_of("context")
    assert config.dynamic_shapes_kernel_specialization_strategy == "EAGER"
    assert config.strategy == "USER_MANAGED" and config.cache is plan.runtime_cache.cache
    assert engine.run({"x": torch.zeros(1, 4)})["y"].tolist() == [[1.0] * 4]
    rtx.refuse = {"shape", "load_cache"}
    other = open_rtx_plan(b"of another driver")
    assert other.runtime_cache is not None and other.runtime_cache.serialize() == b"+kernels"
    with pytest.raises(EngineError, match="TensorRT-RTX refused the shape"):
        TensorRTEngine(other, 0, ONE, Workspace(CPU)).run({"x": torch.zeros(1, 4)})


@pytest.mark.usefixtures("rtx")
def test_refuses_a_plan_of_another_rtx_by_name() -> None:
    with pytest.raises(PlanError, match=r"built by TensorRT-RTX 1\.8\.0 and this machine has 1\.7\.1\.116") as caught:
        open_rtx_plan(version="1.8.0")
    assert "`preheat build --runtime tensorrt-rtx --gpu GPU`" in str(caught.value)


# -- the installed version ----------------------------------------------------------------------------------------


def test_only_supported_versions_have_a_tag() -> None:
    for library, version, tag in (
        (TENSORRT, "10.16.1.11", "trt10.16"),
        (TENSORRT, "11.0", "trt11.0"),
        (TENSORRT_RTX, "1.12", "rtx1.12"),
    ):
        assert library.version_tag(version) == tag
    refused = [(TENSORRT, version) for version in ("10.15.9", "8.6.1", "12.0.0", "dev", "")]
    refused += [(TENSORRT_RTX, version) for version in ("1.6.9", "2.0.0", "11.4.0")]
    for library, version in refused:
        oldest = {"tensorrt": r"10\.16", "tensorrt-rtx": r"1\.7"}[library.runtime]
        with pytest.raises(TensorRTUnavailable, match=f"^{library.title} .*is not supported. Install {oldest}"):
            library.version_tag(version)


@pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)
def test_missing_library_is_one_sentence(library: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_distribution(monkeypatch, tmp_path, None, library)
    with pytest.raises(
        TensorRTUnavailable, match=f"^{library.title} is not installed here. Install the library .docs/tensorrt.md."
    ) as caught:
        require(library)
    assert isinstance(caught.value, EngineError) and "aot_inductor" in str(caught.value)


def use_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    """Let torch report a GPU of a compute capability; None: no GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Test GPU")


MACHINES: dict[str, tuple[Library, str, tuple[int, int] | None, tuple[int, int] | None, str]] = {
    "no GPU": (TENSORRT, "cuda", None, None, "needs an NVIDIA GPU, and PyTorch finds none"),
    "CPU of a machine with a GPU": (TENSORRT, "cpu", (8, 6), None, "needs an NVIDIA GPU, and PyTorch finds none"),
    "damaged": (TENSORRT, "cuda", (8, 6), None, "cannot be imported .libnvinfer.so was not found.*Install the library"),
    "GPU": (
        TENSORRT_RTX, "cuda", (9, 0), (13, 0),
        r"does not support the GPU NVIDIA .* \(compute capability 9\.0\); it supports 7\.5, 8\.0",
    ),
    "driver": (
        TENSORRT_RTX, "cuda", (12, 0), (12, 9),
        r"needs a driver for CUDA 13\.0 or later, and this machine's driver supports CUDA 12\.9\. Update the NVIDIA",
    ),
    "supported": (TENSORRT_RTX, "cuda", (12, 1), (13, 1), "cannot be imported"),
    "unknown driver": (TENSORRT_RTX, "cuda", (12, 1), None, "cannot be imported"),
}  # fmt: skip


@pytest.mark.parametrize("machine", MACHINES)
def test_checks_the_machine_before_an_import(machine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A Runtime without a GPU ends the process. The import here fails, so its error shows that it was tried."""
    library, device, capability, cuda, words = MACHINES[machine]
    install_distribution(monkeypatch, tmp_path, VERSION if library is TENSORRT else RTX_VERSION, library)
    use_gpu(monkeypatch, capability)
    monkeypatch.setattr(libraries, "driver_cuda_version", lambda: cuda)
    with pytest.raises(TensorRTUnavailable, match=f"^{library.title} .*{words}"):
        require(library, device)


@pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)
def test_reads_the_version_without_the_shared_objects(
    library: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if library is TENSORRT and installed_version(library) is not None:
        pytest.skip("TensorRT is installed here, and may be found first")
    version, name = f"{library.oldest[0]}.99.0.107", library.distributions[-1]
    install_distribution(monkeypatch, tmp_path, version, library, name)
    assert installed_version(library) == version


class FakeDriver:
    """The libraries of the driver, which supports CUDA 12.9. `failing`: the name of the call that fails."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.is_open = False

    def cuDriverGetVersion(self, into: Any) -> int:
        into._obj.value = 12090
        return int(self.failing == "cuda")

    def nvmlInit_v2(self) -> int:
        self.is_open = self.failing != "init"
        return int(self.failing == "init")

    def nvmlSystemGetDriverVersion(self, into: Any, length: int) -> int:
        into.value = b"580.159.04"
        return int(self.failing == "version" or length != 80)

    def nvmlShutdown(self) -> int:
        self.is_open = False
        return 0


def test_reads_the_versions_of_the_driver() -> None:
    for failing, cuda, version in (
        ("", (12, 9), "580.159.04"),
        ("cuda", None, "580.159.04"),
        ("init", (12, 9), "unknown"),
        ("version", (12, 9), "unknown"),
    ):
        driver: Any = FakeDriver(failing)
        assert (driver_cuda_version(lambda _, d=driver: d), driver_version(lambda _, d=driver: d)) == (cuda, version)
        assert not driver.is_open

    def fail(name: str) -> Any:
        raise OSError(f"{name} was not found")

    assert (driver_cuda_version(fail), driver_version(fail)) == (None, "unknown")
