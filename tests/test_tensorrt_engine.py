"""TensorRT engines: the calls of TensorRT, their order and addresses, and how refusals are handled.

TensorRT is a fake here (tests/support/fake_tensorrt.py). tests/builder/test_tensorrt_real.py runs the real one where it
is installed.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from model.engines.engine import EngineSet
from model.engines.tensorrt.api import TensorRTUnavailable, installed_version, require, version_tag
from model.engines.tensorrt.engine import TensorRTEngine, TensorRTPlan, Workspace
from model.errors import EngineError
from model.store.manifest import Bucket, Signature, Span, TensorSpec
from tests.support.fake_tensorrt import VERSION, Fake, FakeCuda, install_distribution, install_fake

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


def open_plan(**changes: Any) -> TensorRTPlan:
    arguments = {
        "component": "unet",
        "plan_bytes": b"plan",
        "version": VERSION,
        "signature": SIGNATURE,
        "constants": CONSTANTS,
        "weights": WEIGHTS,
        "literals": LITERALS,
        "device": CPU,
    }
    return TensorRTPlan(**(arguments | changes))


def open_engines(workspace: Workspace | None = None) -> list[TensorRTEngine]:
    """Open a plan's engines of batch 1 and of batch 2 to 4."""
    workspace = workspace or Workspace(CPU)
    plan = open_plan()
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
    plan: Any = open_plan(constants=constants, weights={"w": weight})
    assert plan.engine.held["w"].tolist() == list(range(16))


def test_engines_of_one_workspace_share_memory(fake: Fake) -> None:
    workspace = Workspace(CPU)
    one, four = open_engines(workspace)
    assert workspace.bytes == 1024
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
    with pytest.raises(EngineError, match=f"refused the {words}"):
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


# -- the installed version ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "tag"), [("10.16.1.11", "trt10.16"), ("11.4.0.106", "trt11.4"), ("11.0", "trt11.0")]
)
def test_supported_versions_have_a_tag(version: str, tag: str) -> None:
    assert version_tag(version) == tag


@pytest.mark.parametrize("version", ["10.15.9", "8.6.1", "12.0.0", "dev", ""])
def test_refuses_other_versions(version: str) -> None:
    with pytest.raises(TensorRTUnavailable, match="is not supported. Install 10.16"):
        version_tag(version)


def test_missing_tensorrt_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_distribution(monkeypatch, tmp_path, None)
    with pytest.raises(
        TensorRTUnavailable, match="TensorRT is not installed here. Install TensorRT .docs/tensorrt.md."
    ) as caught:
        require()
    assert isinstance(caught.value, EngineError) and "aot_inductor" in str(caught.value)


@pytest.mark.parametrize(
    ("device", "has_gpu", "words"),
    [
        ("cuda", False, "needs an NVIDIA GPU, and PyTorch finds none"),
        ("cpu", True, "needs an NVIDIA GPU, and PyTorch finds none"),
        ("cuda", True, "cannot be imported .libnvinfer.so was not found.*Install TensorRT"),
    ],
)
def test_does_not_import_tensorrt_without_a_gpu(
    device: str, has_gpu: bool, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A Runtime without a GPU ends the process. The import here fails, so its error shows that it was tried."""
    install_distribution(monkeypatch, tmp_path, VERSION)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    with pytest.raises(TensorRTUnavailable, match=words):
        require(device)


@pytest.mark.parametrize("name", ["tensorrt", "tensorrt-cu13", "tensorrt-cu12"])
def test_reads_the_version_without_the_libraries(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if installed_version() is not None:
        pytest.skip("TensorRT is installed here, and may be found first")
    install_distribution(monkeypatch, tmp_path, "11.4.0.107", name)
    assert installed_version() == "11.4.0.107"
