"""TensorRT engines: what is asked of TensorRT, in which order, at which addresses, and what is made of refusals.

TensorRT itself is a stand-in here (tests/support/fake_tensorrt.py); tests/builder/test_tensorrt_real.py runs the real
one where it is.
"""

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from model.engines.engine import EngineSet
from model.engines.tensorrt import api as tensorrt_api
from model.engines.tensorrt.api import TensorRTUnavailable, require, version_tag
from model.engines.tensorrt.engine import TensorRTEngine, TensorRTPlan, Workspace
from model.errors import EngineError
from model.store.manifest import Bucket, Signature, Span, TensorSpec
from tests.support.fake_tensorrt import VERSION, Fake, FakeCuda

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
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake()
    monkeypatch.setitem(sys.modules, "tensorrt", made.module)
    monkeypatch.setattr(tensorrt_api, "require", lambda *_: VERSION)
    return made


@pytest.fixture(autouse=True)
def cuda(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    made = FakeCuda(fake.record)
    for name in ("current_stream", "Event", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    return made


def plan(**changed: Any) -> TensorRTPlan:
    given = {
        "component": "unet",
        "data": b"plan",
        "version": VERSION,
        "signature": SIGNATURE,
        "constants": CONSTANTS,
        "weights": WEIGHTS,
        "literals": LITERALS,
        "device": CPU,
    }
    return TensorRTPlan(**(given | changed))


def engines(workspace: Workspace | None = None) -> list[TensorRTEngine]:
    workspace = workspace or Workspace(CPU)
    opened = plan()
    return [TensorRTEngine(opened, number, bucket, workspace) for number, bucket in enumerate((ONE, FOUR))]


def refusal(**changed: Any) -> str:
    with pytest.raises(EngineError) as caught:
        plan(**changed)
    message = str(caught.value)
    assert message.isprintable() and len(message) < 600 and "preheat build" in message
    return message


def test_a_plan_is_refit_and_run_in_order(fake: Fake) -> None:
    one, _ = engines()
    x = torch.randn(1, 4)
    torch.testing.assert_close(one.run({"x": x})["y"], x * WEIGHTS["layer.weight"] + 0.5)
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


def test_the_stream_is_the_current_one_when_it_runs(fake: Fake, cuda: FakeCuda) -> None:
    one, _ = engines()
    cuda.current = 9
    one.run({"x": torch.zeros(1, 4)})
    assert fake.calls_of("execute") == [("execute", 9)]


def test_one_plan_serves_its_buckets(fake: Fake) -> None:
    """Padded and in several calls, as any engines; and deserialized and refit once."""
    several = EngineSet(engines())
    x = torch.randn(6, 4)
    torch.testing.assert_close(several.run({"x": x})["y"], x * WEIGHTS["layer.weight"] + 0.5)
    assert [shape for _, _, shape in fake.calls_of("shape")] == [(4, 4), (2, 4)]
    assert len(fake.calls_of("deserialize")) == len(fake.calls_of("refit")) == 1


def test_a_shape_is_set_once_and_addresses_every_time(fake: Fake) -> None:
    _, four = engines()
    for rows in (3, 3, 2, 3):
        four.run({"x": torch.zeros(rows, 4)})
    assert [call[2] for call in fake.calls_of("shape")] == [(3, 4), (2, 4), (3, 4)]
    assert len(fake.calls_of("address")) == 8 and len(fake.calls_of("device_memory")) == 1


def test_inputs_are_at_aligned_addresses(fake: Fake) -> None:
    """A row of a batch begins 16 bytes after another, and a transposed tensor is not in order at all."""
    one, four = engines()
    batch = torch.randn(4, 4)
    for tensor, engine in ((batch[1:2], one), (batch[:, :].T, four)):
        fake.calls.clear()
        got = engine.run({"x": tensor})["y"]
        torch.testing.assert_close(got, tensor * WEIGHTS["layer.weight"] + 0.5)
        x = next(address for _, name, address in fake.calls_of("address") if name == "x")
        if engine is one:
            assert x != tensor.data_ptr()


def test_weights_with_channels_last_are_turned(fake: Fake) -> None:
    fake.weights = {"w": 16, "b": 4}
    weight = torch.arange(16.0).reshape(1, 4, 2, 2).contiguous(memory_format=torch.channels_last)
    constants = json.dumps({"w": {"tensor": "w", "dtype": "float32", "shape": [1, 4, 2, 2]}}).encode()
    opened: Any = plan(constants=constants, weights={"w": weight})
    assert opened.engine.held["w"].tolist() == list(range(16))


def test_components_that_take_turns_share_memory(fake: Fake) -> None:
    workspace = Workspace(CPU)
    one, four = engines(workspace)
    assert workspace.bytes == 1024
    for engine, rows in ((one, 1), (four, 3)):
        engine.run({"x": torch.zeros(rows, 4)})
    [(_, first, small), (_, second, large)] = fake.calls_of("device_memory")
    assert first == second and first % 256 == 0
    assert (small, large) == (64, 1024)
    fake.profiles = [4096, 4096]
    with pytest.raises(EngineError, match="Open all engines of a release first"):
        engines(workspace)


def test_memory_waits_for_its_last_use_on_another_stream(fake: Fake, cuda: FakeCuda) -> None:
    one, four = engines()
    one.run({"x": torch.zeros(1, 4)})
    one.run({"x": torch.zeros(1, 4)})
    assert not fake.calls_of("wait")
    cuda.current = 8
    four.run({"x": torch.zeros(2, 4)})
    assert fake.calls_of("wait") == [("wait", 8, 7)]
    assert fake.call_names().index("wait") < len(fake.calls) - 1 and fake.calls[-1] == ("execute", 8)
    cuda.capturing = True
    cuda.current = 9
    four.run({"x": torch.zeros(2, 4)})  # neither waits for what is outside of its graph nor leaves an event there
    cuda.capturing = False
    cuda.current = 8
    four.run({"x": torch.zeros(2, 4)})
    assert len(fake.calls_of("wait")) == 1


def test_a_constant_of_the_parser_s_own_may_stay_in_the_plan(fake: Fake) -> None:
    fake.weights["tmp_weight_1"] = 1
    fake.refuse = {"kept in plan"}
    plan()
    assert [call[1] for call in fake.calls_of("set_weights")] == ["w", "b"]


# -- refusals -----------------------------------------------------------------------------------------------------


def test_a_plan_of_another_version_is_not_even_opened(fake: Fake) -> None:
    message = refusal(version="10.16.1.11")
    assert "built by TensorRT 10.16.1.11 and this machine has 11.4.0.106" in message
    assert not fake.calls


def test_a_plan_of_another_gpu_is_refused_with_tensorrt_s_words(fake: Fake) -> None:
    fake.refuse = {"deserialize"}
    message = refusal()
    assert "generated on an incompatible device" in message and "more" not in message


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda fake: fake.names.update(z="INPUT"), "has the tensors x, y, z"),
        (lambda fake: fake.names.update(y="INPUT"), "has the tensors"),
        (
            lambda fake: fake.weights.update({"tmp_weight_1": 3}),
            "needs 1 weights that the release lacks, 'tmp_weight_1'",
        ),
        (lambda fake: fake.weights.update(w=5), "needs w as 5 values"),
        (lambda fake: fake.refuse.add("set_weights"), "refuses w"),
        (lambda fake: fake.refuse.add("missing"), "needs 1 weights that the release lacks, 'w' first"),
        (lambda fake: fake.refuse.add("refit"), "cannot be refit"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(fake: Fake, break_it: Callable[[Fake], None], words: str) -> None:
    break_it(fake)
    assert words in refusal()
    assert not fake.calls_of("context")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"weights": {}}, "lack layer.weight"),
        ({"weights": {"layer.weight": torch.zeros(5)}}, "do not fit its engine"),
        ({"weights": {"layer.weight": torch.zeros(4, dtype=torch.float16)}}, "is float16"),
        ({"weights": {"layer.weight": torch.zeros(4, device="meta")}}, "must be on cpu"),
        ({"literals": {"b": torch.zeros(4), "w": torch.zeros(4)}}, "has w among its weights and its own"),
        ({"constants": b"{"}, "map of constants is damaged"),
    ],
)
def test_weights_that_do_not_fit_are_refused(fake: Fake, changed: dict[str, Any], words: str) -> None:
    assert words in refusal(**changed)
    assert not fake.calls_of("set_weights", "refit")


def test_a_profile_that_is_not_there_or_has_no_room_is_refused(fake: Fake) -> None:
    with pytest.raises(EngineError, match="2 profiles, and its record names number 2"):
        TensorRTEngine(plan(), 2, ONE, Workspace(CPU))
    for step in ("context", "profile"):
        fake.refuse = {step}
        with pytest.raises(EngineError, match="cannot be set up"):
            TensorRTEngine(plan(), 0, ONE, Workspace(CPU))


@pytest.mark.parametrize(("step", "words"), [("shape", "shape"), ("address", "address of x"), ("execute", "run")])
def test_what_tensorrt_refuses_to_run_is_an_error(fake: Fake, step: str, words: str) -> None:
    one, _ = engines()
    fake.refuse = {step}
    with pytest.raises(EngineError, match=f"refused the {words}"):
        one.run({"x": torch.zeros(1, 4)})
    fake.refuse = set()
    one.run({"x": torch.ones(1, 4)})
    assert fake.calls[-1][0] == "execute" and fake.calls[-4][0] == "shape"  # the shape is said again


def test_inputs_are_checked_before_tensorrt_sees_them(fake: Fake) -> None:
    one, _ = engines()
    for inputs, words in (
        ({"x": torch.zeros(2, 4)}, "no bucket for batch 2"),
        ({"x": torch.zeros(1, 5)}, "expected float32"),
        ({"y": torch.zeros(1, 4)}, "takes x"),
        ({"x": torch.zeros(1, 4, device="meta")}, "is on meta"),
    ):
        with pytest.raises(EngineError, match=words):
            one.run(inputs)
    assert not fake.calls_of("execute")


# -- what is installed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "tag"), [("10.16.1.11", "trt10.16"), ("11.4.0.106", "trt11.4"), ("11.0", "trt11.0")]
)
def test_versions_that_are_served(version: str, tag: str) -> None:
    assert version_tag(version) == tag


@pytest.mark.parametrize("version", ["10.15.9", "8.6.1", "12.0.0", "dev", ""])
def test_versions_that_are_not_served_are_refused(version: str) -> None:
    with pytest.raises(TensorRTUnavailable, match="is not supported. Install 10.16"):
        version_tag(version)


def test_without_tensorrt_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tensorrt")
    if tensorrt_api.installed_version() is not None:
        pytest.skip("TensorRT is installed here")
    with pytest.raises(
        TensorRTUnavailable, match="TensorRT is not installed here. Install TensorRT .docs/tensorrt.md."
    ) as caught:
        require()
    assert isinstance(caught.value, EngineError) and "aot_inductor" in str(caught.value)


def test_without_a_gpu_tensorrt_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Runtime without a GPU ends the process, so nothing may get as far as the module."""
    monkeypatch.setattr(tensorrt_api, "installed_version", lambda: VERSION)
    monkeypatch.setitem(sys.modules, "tensorrt", None)  # importing it would raise
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TensorRTUnavailable, match="needs an NVIDIA GPU, and PyTorch finds none"):
        require()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(TensorRTUnavailable, match="needs an NVIDIA GPU, and PyTorch finds none"):
        require("cpu")
    with pytest.raises(TensorRTUnavailable, match="cannot be imported .*Install TensorRT"):
        require()


def test_the_version_is_known_without_the_libraries(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "tensorrt-cu13":
            return "11.4.0.106"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    assert tensorrt_api.installed_version() == "11.4.0.106"


def test_serving_without_tensorrt_imports_nothing_of_it() -> None:
    script = "import sys; import model.loading.load; print('tensorrt' in sys.modules, 'onnx' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["False", "False"]
