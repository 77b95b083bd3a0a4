"""Engines of TensorRT and TensorRT-RTX: the calls of the library, their order and addresses, and refusals.

The library is a fake here (`tests.support.fake_tensorrt`). test_tensorrt_real.py runs the real TensorRT where it is
installed. test_tensorrt_rtx.py runs the real TensorRT-RTX as far as it runs without a GPU.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from model.engines.engine import EngineSet
from model.engines.tensorrt import libraries
from model.engines.tensorrt.engine import TensorRTEngine, TensorRTPlan, Workspace, named_tensors
from model.engines.tensorrt.execution import Execution, Plan, PlanError, RawTensor
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
from model.errors import EngineError
from model.store.manifest import Bucket, Signature, Span, TensorSpec
from tests.support.fake_tensorrt import (
    RTX_VERSION,
    VERSION,
    Fake,
    FakeCuda,
    install_distribution,
    install_fake,
)

CPU = torch.device("cpu")
SIGNATURE = Signature(
    inputs=(TensorSpec(name="x", dtype="float32", shape=("rows", 4)),),
    outputs=(TensorSpec(name="y", dtype="float32", shape=("rows", 4)),),
)
CONSTANTS = json.dumps({"w": {"tensor": "layer.weight", "dtype": "float32", "shape": [4]}}).encode()
WEIGHTS = {"layer.weight": torch.tensor([1.0, 2.0, 3.0, 4.0])}
LITERALS = {"b": torch.full((4,), 0.5)}
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


def open_plan(**changes: Any) -> TensorRTPlan:
    """Open a plan with `constants`, `weights` and `literals`."""
    arguments = {
        "library": TENSORRT,
        "component": "unet",
        "plan_bytes": b"plan",
        "version": VERSION,
        "signature": SIGNATURE,
        "device": CPU,
    } | changes
    tensors = {"constants": CONSTANTS, "weights": WEIGHTS, "literals": LITERALS}
    tensors |= {name: arguments.pop(name) for name in tensors if name in arguments}
    return TensorRTPlan(tensors=named_tensors("unet", **tensors, device=CPU), **arguments)


def open_rtx_plan(runtime_cache: bytes = b"") -> TensorRTPlan:
    """Open a plan of TensorRT-RTX that holds its weights."""
    return TensorRTPlan(TENSORRT_RTX, "unet", b"plan", RTX_VERSION, SIGNATURE, None, CPU, runtime_cache)


def open_engines(workspace: Workspace | None = None, **changes: Any) -> list[TensorRTEngine]:
    """Open a plan's engines of batch 1 and of batch 2 to 4."""
    workspace = workspace or Workspace(CPU)
    plan = open_plan(**changes)
    return [TensorRTEngine(plan, number, bucket, workspace) for number, bucket in enumerate((ONE, FOUR))]


def expected_output(x: torch.Tensor) -> torch.Tensor:
    return x * WEIGHTS["layer.weight"] + 0.5


def refusal(**changes: Any) -> str:
    """The message with which a plan is refused."""
    with pytest.raises(EngineError) as caught:
        open_plan(**changes)
    message = str(caught.value)
    assert message.isprintable() and len(message) < 600 and "preheat build" in message
    return message


def test_refits_a_plan_and_runs_it_in_order(fake: Fake) -> None:
    one, _ = open_engines()
    x = torch.randn(1, 4)
    torch.testing.assert_close(one.run({"x": x})["y"], expected_output(x))
    assert fake.call_names() == [
        *("deserialize", "set_weights", "set_weights", "refit", "synchronize", "release_refit"),
        *("context", "profile", "synchronize", "context", "profile", "synchronize"),
        *("device_memory", "shape", "address", "address", "execute"),
    ]
    assert fake.calls[0] == ("deserialize", b"plan")
    assert fake.calls_of("set_weights") == [("set_weights", "w", "DEVICE"), ("set_weights", "b", "DEVICE")]
    assert fake.calls_of("context") == [("context", "USER_MANAGED")] * 2
    assert fake.calls_of("profile") == [("profile", 0, 7), ("profile", 1, 7)]
    assert fake.calls_of("execute") == [("execute", 7)]


def test_runs_on_the_current_stream(fake: Fake, cuda: FakeCuda) -> None:
    one, _ = open_engines()
    cuda.current = 9
    one.run({"x": torch.zeros(1, 4)})
    assert fake.calls_of("execute") == [("execute", 9)]


def test_engines_of_one_plan_serve_all_batches(fake: Fake) -> None:
    """Batches are padded and split as for any engines. The plan is deserialized and refit once."""
    engines = EngineSet(open_engines())
    x = torch.randn(6, 4)
    torch.testing.assert_close(engines.run({"x": x})["y"], expected_output(x))
    assert [shape for _, _, shape in fake.calls_of("shape")] == [(4, 4), (2, 4)]
    assert len(fake.calls_of("deserialize")) == len(fake.calls_of("refit")) == 1


def test_sets_a_shape_once_and_addresses_at_every_run(fake: Fake) -> None:
    _, four = open_engines()
    for rows in (3, 3, 2, 3):
        four.run({"x": torch.zeros(rows, 4)})
    assert [call[2] for call in fake.calls_of("shape")] == [(3, 4), (2, 4), (3, 4)]
    assert len(fake.calls_of("address")) == 8 and len(fake.calls_of("device_memory")) == 1


def test_next_run_on_another_stream_waits_for_a_failed_run(fake: Fake, cuda: FakeCuda) -> None:
    """A run that fails may have enqueued kernels, which use the workspace."""
    one, four = open_engines()
    fake.refuse = {"execute"}
    with pytest.raises(EngineError, match="refused the run"):
        one.run({"x": torch.zeros(1, 4)})
    fake.refuse = set()
    cuda.current = 8
    four.run({"x": torch.zeros(2, 4)})
    assert fake.calls_of("wait") == [("wait", 8, 7)]


def test_copies_an_input_at_an_unaligned_address(fake: Fake) -> None:
    """The second entry of a batch begins 16 bytes after the first."""
    one, _ = open_engines()
    x = torch.randn(4, 4)[1:2]
    torch.testing.assert_close(one.run({"x": x})["y"], expected_output(x))
    [address] = [address for _, name, address in fake.calls_of("address") if name == "x"]
    assert address != x.data_ptr()


def test_copies_an_input_that_is_not_contiguous(fake: Fake) -> None:
    _, four = open_engines()
    x = torch.randn(4, 4).T
    torch.testing.assert_close(four.run({"x": x})["y"], expected_output(x))


def test_weights_stored_with_channels_last_are_made_contiguous(fake: Fake) -> None:
    fake.weights = {"w": 16, "b": 4}
    weight = torch.arange(16.0).reshape(1, 4, 2, 2).contiguous(memory_format=torch.channels_last)
    constants = json.dumps({"w": {"tensor": "w", "dtype": "float32", "shape": [1, 4, 2, 2]}}).encode()
    engine: Any = open_plan(constants=constants, weights={"w": weight}).plan.engine
    assert engine.held["w"].tolist() == list(range(16))


def test_engines_of_one_workspace_share_memory(fake: Fake) -> None:
    workspace = Workspace(CPU)
    one, four = open_engines(workspace)
    assert workspace.memory.bytes == 1024
    for engine, rows in ((one, 1), (four, 3)):
        engine.run({"x": torch.zeros(rows, 4)})
    [(_, first, small), (_, second, large)] = fake.calls_of("device_memory")
    assert first == second and first % 256 == 0
    assert (small, large) == (64, 1024)
    fake.profiles = [4096, 4096]
    with pytest.raises(EngineError, match="Open all engines of a release first"):
        open_engines(workspace)


def test_workspace_waits_for_its_last_use_on_another_stream(fake: Fake, cuda: FakeCuda) -> None:
    one, four = open_engines()
    one.run({"x": torch.zeros(1, 4)})
    one.run({"x": torch.zeros(1, 4)})
    assert not fake.calls_of("wait")
    cuda.current = 8
    four.run({"x": torch.zeros(2, 4)})
    assert fake.calls_of("wait") == [("wait", 8, 7)]
    assert fake.call_names().index("wait") < len(fake.calls) - 1 and fake.calls[-1] == ("execute", 8)
    cuda.capturing = True
    cuda.current = 9
    four.run({"x": torch.zeros(2, 4)})  # a graph neither waits for work outside nor leaves an event there
    cuda.capturing = False
    cuda.current = 8
    four.run({"x": torch.zeros(2, 4)})
    assert len(fake.calls_of("wait")) == 1


def test_constants_of_the_parser_may_stay_in_the_plan(fake: Fake) -> None:
    fake.weights["tmp_weight_1"] = 1
    fake.refuse = {"kept in plan"}
    open_plan()
    assert [call[1] for call in fake.calls_of("set_weights")] == ["w", "b"]


# -- refusals -----------------------------------------------------------------------------------------------------


def test_does_not_open_a_plan_of_another_version(fake: Fake) -> None:
    message = refusal(version="10.16.1.11")
    assert "built by TensorRT 10.16.1.11 and this machine has 11.4.0.106" in message
    assert not fake.calls


def test_refuses_a_plan_of_another_gpu_with_tensorrts_error(fake: Fake) -> None:
    fake.refuse = {"deserialize"}
    message = refusal()
    assert "generated on an incompatible device" in message and "more" not in message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda fake: fake.names.update(z="INPUT"), "has input x, input z, output y, and its manifest entry states"),
        (lambda fake: fake.names.update(y="INPUT"), "has input x, input y, and its manifest entry states"),
        (lambda fake: fake.dtypes.update(y="HALF"), "has y as HALF, and its manifest entry states float32"),
        (
            lambda fake: fake.weights.update({"tmp_weight_1": 3}),
            "needs 1 weights that the release lacks, 'tmp_weight_1'",
        ),
        (lambda fake: fake.weights.update(w=5), "needs w as 5 values"),
        (lambda fake: fake.refuse.add("set_weights"), "refuses w"),
        (lambda fake: fake.refuse.add("missing"), "needs 1 weights that the release lacks, 'w' first"),
        (lambda fake: fake.refuse.add("refit"), "cannot be refit"),
    ],
    ids=["tensor", "direction", "dtype", "unknown weight", "size", "refused weight", "missing weight", "refused refit"],
)
def test_refuses_a_plan_that_does_not_fit(fake: Fake, change: Callable[[Fake], None], words: str) -> None:
    change(fake)
    assert words in refusal()
    assert not fake.calls_of("context")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weights": {}}, "lack layer.weight"),
        ({"weights": {"layer.weight": torch.zeros(5)}}, "do not fit its engine"),
        ({"weights": {"layer.weight": torch.zeros(4, dtype=torch.float16)}}, "is float16"),
        ({"weights": {"layer.weight": torch.zeros(4, device="meta")}}, "must be on cpu"),
        ({"literals": {"b": torch.zeros(4), "w": torch.zeros(4)}}, "has w among its weights and among its literals"),
        ({"constants": b"{"}, "map of constants is damaged"),
    ],
    ids=["missing", "shape", "dtype", "device", "named twice", "damaged map"],
)
def test_refuses_weights_that_do_not_fit(fake: Fake, changes: dict[str, Any], words: str) -> None:
    assert words in refusal(**changes)
    assert not fake.calls_of("set_weights", "refit")


def test_refuses_a_missing_profile_and_one_without_memory(fake: Fake) -> None:
    with pytest.raises(EngineError, match="2 profiles, and its manifest entry names number 2"):
        TensorRTEngine(open_plan(), 2, ONE, Workspace(CPU))
    for step in ("context", "profile"):
        fake.refuse = {step}
        with pytest.raises(EngineError, match="cannot be set up"):
            TensorRTEngine(open_plan(), 0, ONE, Workspace(CPU))


@pytest.mark.parametrize(("step", "words"), [("shape", "shape"), ("address", "address of x"), ("execute", "run")])
def test_refused_run_is_an_error_and_the_next_one_works(fake: Fake, step: str, words: str) -> None:
    one, _ = open_engines()
    fake.refuse = {step}
    with pytest.raises(EngineError, match=f"TensorRT refused the {words}"):
        one.run({"x": torch.zeros(1, 4)})
    fake.refuse = set()
    one.run({"x": torch.ones(1, 4)})
    assert fake.calls[-1][0] == "execute" and fake.calls[-4][0] == "shape"  # the shape is set again


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


def test_rtx_reads_the_header_before_the_plan(rtx: Fake) -> None:
    open_rtx_plan()
    assert rtx.call_names() == ["validity", "deserialize"]  # no refit: the plan holds its weights


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
    assert rtx.call_names() == ["validity"]


def test_rtx_compiles_kernels_before_a_capture(rtx: Fake) -> None:
    """With the default strategy a graph could keep kernels that are not yet specialized."""
    plan = open_rtx_plan()
    TensorRTEngine(plan, 0, ONE, Workspace(CPU))
    [(_, config)] = rtx.calls_of("context")
    assert config.dynamic_shapes_kernel_specialization_strategy == "EAGER"
    assert config.get_execution_context_allocation_strategy() == "USER_MANAGED"
    assert plan.runtime_cache is not None and config.get_runtime_cache() is plan.runtime_cache.cache


def test_rtx_loads_the_kernels_of_an_earlier_process(rtx: Fake) -> None:
    plan = open_rtx_plan(b"kernels")
    assert rtx.calls_of("load_cache") == [("load_cache", b"kernels")]
    assert plan.runtime_cache is not None and plan.runtime_cache.serialize() == b"kernels+kernels"


def test_refusals_of_rtx_name_it(rtx: Fake) -> None:
    engine = TensorRTEngine(open_rtx_plan(), 0, ONE, Workspace(CPU))
    rtx.refuse = {"shape"}
    with pytest.raises(EngineError, match="TensorRT-RTX refused the shape"):
        engine.run({"x": torch.zeros(1, 4)})


@pytest.mark.parametrize("data", [b"", b"of another driver"], ids=["none", "refused"])
def test_rtx_compiles_without_usable_kernels(rtx: Fake, data: bytes) -> None:
    rtx.refuse = {"load_cache"}
    plan = open_rtx_plan(data)
    assert plan.runtime_cache is not None and plan.runtime_cache.serialize() == b"+kernels"
    assert len(rtx.calls_of("load_cache")) == bool(data)


@pytest.mark.usefixtures("fake")
def test_tensorrt_has_no_runtime_cache() -> None:
    assert open_plan(runtime_cache=b"kernels").runtime_cache is None


@pytest.mark.usefixtures("rtx")
def test_refuses_a_plan_of_another_rtx_by_name() -> None:
    with pytest.raises(PlanError, match=r"built by TensorRT-RTX 1\.8\.0 and this machine has 1\.7\.1\.116") as caught:
        TensorRTPlan(TENSORRT_RTX, "unet", b"plan", "1.8.0", SIGNATURE, None, CPU)
    assert "`preheat build --runtime tensorrt-rtx --gpu GPU`" in str(caught.value)


# -- raw addresses ------------------------------------------------------------------------------------------------


def test_runs_on_raw_addresses(fake: Fake) -> None:
    """Without torch.cuda: streams are handles, and tensors are addresses in the host's memory."""
    plan = Plan(fake.module, b"plan", "unet")
    plan.check_tensors({"x": "float32"}, {"y": "float32"})
    assert plan.output_dtypes() == {"y": "float32"}
    tensors = {"w": WEIGHTS["layer.weight"], "b": LITERALS["b"]}
    plan.refit({name: raw(tensor) for name, tensor in tensors.items()}, 5, lambda: None)
    execution = Execution(plan, 1, 5, lambda: None)
    assert execution.workspace_bytes == 1024
    memory = torch.empty(1024, dtype=torch.uint8)
    execution.set_workspace(memory.data_ptr())
    x, y = torch.randn(2, 4), torch.empty(2, 4)
    execution.set_shapes({"x": raw(x)})
    assert execution.output_shape("y") == (2, 4)
    execution.set_tensors({"x": raw(x)}, {"y": raw(y)})
    execution.enqueue(5)
    torch.testing.assert_close(y, expected_output(x))
    assert fake.calls_of("device_memory")[0][1] == memory.data_ptr()
    assert [location for _, _, location in fake.calls_of("set_weights")] == ["DEVICE"] * 2
    assert fake.calls_of("refit") == [("refit", 5)]


def test_capture_needs_a_shape_that_has_run(fake: Fake) -> None:
    """The library finishes its setup in the first run of a shape, which a capture does not allow."""
    execution = Execution(open_plan().plan, 1, 7, lambda: None)
    y = torch.empty(4, 4)
    for rows in (2, 3):
        x = torch.zeros(rows, 4)
        execution.set_tensors({"x": raw(x)}, {"y": raw(y)})
        with pytest.raises(EngineError, match="unet: a CUDA graph captures a shape that has not run before"):
            execution.enqueue(7, is_capturing=True)
        execution.enqueue(7)
        execution.enqueue(7, is_capturing=True)
    assert len(fake.calls_of("execute")) == 4


def raw(tensor: torch.Tensor) -> RawTensor:
    return RawTensor(tensor.data_ptr(), "float32", tuple(tensor.shape))


# -- the installed version ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("library", "version", "tag"),
    [
        (TENSORRT, "10.16.1.11", "trt10.16"),
        (TENSORRT, "11.4.0.106", "trt11.4"),
        (TENSORRT, "11.0", "trt11.0"),
        (TENSORRT_RTX, "1.7.1.116", "rtx1.7"),
        (TENSORRT_RTX, "1.12", "rtx1.12"),
    ],
)
def test_supported_versions_have_a_tag(library: Library, version: str, tag: str) -> None:
    assert library.version_tag(version) == tag


@pytest.mark.parametrize(
    ("library", "version"),
    [(TENSORRT, version) for version in ("10.15.9", "8.6.1", "12.0.0", "dev", "")]
    + [(TENSORRT_RTX, version) for version in ("1.6.9", "2.0.0", "11.4.0")],
)
def test_refuses_other_versions(library: Library, version: str) -> None:
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


@pytest.mark.parametrize(
    ("device", "has_gpu", "words"),
    [
        ("cuda", False, "needs an NVIDIA GPU, and PyTorch finds none"),
        ("cpu", True, "needs an NVIDIA GPU, and PyTorch finds none"),
        ("cuda", True, "cannot be imported .libnvinfer.so was not found.*Install the library"),
    ],
)
def test_does_not_import_a_library_without_a_gpu(
    device: str, has_gpu: bool, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A Runtime without a GPU ends the process. The import here fails, so its error shows that it was tried."""
    install_distribution(monkeypatch, tmp_path, VERSION)
    use_gpu(monkeypatch, (8, 6) if has_gpu else None)
    with pytest.raises(TensorRTUnavailable, match=words):
        require(TENSORRT, device)


def use_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    """Let torch report a GPU of a compute capability; None: no GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Test GPU")


@pytest.mark.parametrize(
    ("capability", "cuda", "words"),
    [
        (
            (9, 0),
            (13, 0),
            r"does not support the GPU NVIDIA .* \(compute capability 9\.0\); it supports 7\.5, 8\.0",
        ),
        ((12, 0), (12, 9), r"needs a driver for CUDA 13\.0 or later, and this machine's driver supports CUDA 12\.9\."),
        ((12, 1), (13, 1), r"cannot be imported"),
    ],
    ids=["GPU", "driver", "supported"],
)
def test_rtx_checks_gpu_and_driver_before_its_import(
    capability: tuple[int, int], cuda: tuple[int, int], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install_distribution(monkeypatch, tmp_path, RTX_VERSION, TENSORRT_RTX)
    use_gpu(monkeypatch, capability)
    monkeypatch.setattr(libraries, "driver_cuda_version", lambda: cuda)
    with pytest.raises(TensorRTUnavailable, match=f"^TensorRT-RTX .*{words}"):
        require(TENSORRT_RTX)


class FakeDriver:
    """The driver's library, which supports a version of CUDA: 12090 is 12.9."""

    def __init__(self, version: int, error: int = 0) -> None:
        self._version, self._error = version, error

    def cuDriverGetVersion(self, into: Any) -> int:
        into._obj.value = self._version
        return self._error


@pytest.mark.parametrize(("number", "version"), [(13000, (13, 0)), (12090, (12, 9)), (13020, (13, 2))])
def test_reads_the_cuda_version_of_the_driver(number: int, version: tuple[int, int]) -> None:
    opened: Any = FakeDriver(number)
    assert driver_cuda_version(lambda name: opened) == version


def test_machine_without_a_usable_driver_has_no_cuda_version() -> None:
    broken: Any = FakeDriver(0, error=999)
    assert driver_cuda_version(lambda name: broken) is None

    def fail(name: str) -> Any:
        raise OSError(f"{name} was not found")

    assert driver_cuda_version(fail) is None


class FakeNvml:
    """libnvidia-ml. `failing`: the name of the call that fails."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.calls: list[str] = []

    def nvmlInit_v2(self) -> int:
        self.calls.append("init")
        return int(self.failing == "init")

    def nvmlSystemGetDriverVersion(self, into: Any, length: int) -> int:
        self.calls.append("version")
        into.value = b"580.159.04"
        assert length == 80
        return int(self.failing == "version")

    def nvmlShutdown(self) -> int:
        self.calls.append("shutdown")
        return 0


@pytest.mark.parametrize(
    ("failing", "version", "calls"),
    [
        ("", "580.159.04", ["init", "version", "shutdown"]),
        ("init", "unknown", ["init"]),
        ("version", "unknown", ["init", "version", "shutdown"]),
    ],
)
def test_reads_the_version_of_the_driver(failing: str, version: str, calls: list[str]) -> None:
    opened: Any = FakeNvml(failing)
    assert driver_version(lambda name: opened) == version and opened.calls == calls


def test_machine_without_a_driver_has_an_unknown_version() -> None:
    def fail(name: str) -> Any:
        raise OSError(f"{name} was not found")

    assert driver_version(fail) == "unknown"


def test_driver_is_not_checked_without_a_driver() -> None:
    """The GPU's own check then refuses the machine. A machine that only builds has no driver."""
    TENSORRT_RTX.check_driver(None)
    TENSORRT_RTX.check_driver((13, 0))
    TENSORRT.check_driver((11, 0))
    with pytest.raises(TensorRTUnavailable, match="Update the NVIDIA driver, or choose the runtime aot_inductor"):
        TENSORRT_RTX.check_driver((12, 9))


@pytest.mark.parametrize(
    ("library", "name"), [(library, name) for library in LIBRARIES.values() for name in library.distributions]
)
def test_reads_the_version_without_the_shared_objects(
    library: Library, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if library is TENSORRT and installed_version(library) is not None:
        pytest.skip("TensorRT is installed here, and may be found first")
    install_distribution(monkeypatch, tmp_path, f"{library.oldest[0]}.99.0.107", library, name)
    assert installed_version(library) == f"{library.oldest[0]}.99.0.107"
