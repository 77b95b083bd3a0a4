"""Kernels that are loaded before the weights: which engines run at a time, and what happens after an error."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from engine_builder.stores.local import WritableLocalStore
from model.cold_start import ColdStart
from model.engines.aot_inductor.container import Container
from model.engines.shapes import bind_shapes
from model.errors import EngineError
from model.loading import kernels
from model.loading.kernels import CONCURRENT_PIXELS, loading_kernels
from model.store.manifest import Bucket, Constant, Signature, Span, TensorSpec
from tests.support.components import BASE_COMPONENTS
from tests.support.deployments import deployed, load_release
from tests.support.releases import RELEASE_NAME, Toy, cpu_target

CPU = torch.device("cpu")
SECONDS = 60.0  # in which another thread must come to a point
LATENTS: tuple[int | str, ...] = ("rows", 4, "height/8", "width/8")
SPEC = TensorSpec(name="x", dtype="float16", shape=LATENTS)


class FakeEngine:
    """Records its runs, and the memory and the values of its weights. `work`: what a run does."""

    component = "unet"
    signature = Signature(inputs=(SPEC,), outputs=(SPEC,))

    def __init__(self, batch: int = 1, side: int = 64, work: Callable[[], object] = lambda: None) -> None:
        span = Span(min=side, max=side) if side else None
        self.bucket = Bucket(batch=Span(min=batch, max=batch), height=span, width=span)
        self.constants: Mapping[str, Constant] = {
            "code_a": Constant(tensor="a.weight", dtype="float16", shape=(8, 4, 3, 3)),
            "code_b": Constant(tensor="b.bias", dtype="float32", shape=(7,)),
        }
        self.storages: list[torch.UntypedStorage] = []
        self.runs: list[dict[str, int]] = []
        self.values: list[dict[str, torch.Tensor]] = []
        self._work = work

    def load_kernels(self, weights: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> None:
        self.storages = [tensor.untyped_storage() for tensor in weights.values()]
        self.runs.append(bind_shapes(self.signature, inputs, self.component))
        self.values.append({name: tensor.clone() for name, tensor in weights.items()})
        self._work()


@pytest.fixture(autouse=True)
def _four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.os, "cpu_count", lambda: 4)


def test_runs_each_engine_once_on_zeros() -> None:
    engines = [FakeEngine(batch=2, side=128), FakeEngine()]
    cold_start = ColdStart()
    with loading_kernels(engines, CPU, cold_start):
        pass
    assert engines[0].runs == [{"rows": 2, "height": 128, "width": 128}]
    assert engines[1].runs == [{"rows": 1, "height": 64, "width": 64}]
    assert cold_start.phases.keys() == {"kernels", "kernels_wait"}
    for engine in engines:
        [values] = engine.values
        assert {name: (value.dtype, tuple(value.shape)) for name, value in values.items()} == {
            "a.weight": (torch.float16, (8, 4, 3, 3)),
            "b.bias": (torch.float32, (7,)),
        }
        assert not any(value.count_nonzero() for value in values.values())


def test_frees_the_zeros_that_engines_still_alias() -> None:
    """All weights of all engines share the memory of the largest weight."""
    engines = [FakeEngine(), FakeEngine()]
    with loading_kernels(engines, CPU, ColdStart()):
        pass
    storages = [storage for engine in engines for storage in engine.storages]
    assert len({storage._cdata for storage in storages}) == 1 and not storages[0].nbytes()


def test_engines_run_at_the_same_time_and_with_the_block() -> None:
    meeting = threading.Barrier(3)
    engines = [FakeEngine(work=lambda: meeting.wait(SECONDS)) for _ in range(2)]
    with loading_kernels(engines, CPU, ColdStart()):
        meeting.wait(SECONDS)
    assert [len(engine.runs) for engine in engines] == [1, 1]


def test_runs_at_a_time_have_few_pixels() -> None:
    """An engine with more pixels than the limit runs with engines that have none."""
    lock = threading.Lock()
    running, peaks = 0, []

    def engine_of(pixels: int, work: Callable[[], object] = lambda: None) -> FakeEngine:
        def count() -> None:
            nonlocal running
            with lock:
                running += pixels
                peaks.append(running)
            work()
            with lock:
                running -= pixels

        return FakeEngine(max(1, pixels // 2**20), side=1024 if pixels else 0, work=count)

    meeting = threading.Barrier(2)
    largest = 2 * CONCURRENT_PIXELS
    engines = [engine_of(pixels) for pixels in (2**20, largest // 2, largest, 2**20, largest // 2)]
    engines += [engine_of(0, lambda: meeting.wait(SECONDS)), engine_of(largest, lambda: meeting.wait(SECONDS))]
    with loading_kernels(engines, CPU, ColdStart()):
        pass
    assert all(len(engine.runs) == 1 for engine in engines) and max(peaks) == largest


def test_a_failing_engine_stops_neither_others_nor_the_load(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "preheat")

    def fail(error: Exception) -> None:
        raise error

    errors = (EngineError("The unet engine failed."), RuntimeError("out of memory"))
    engines = [FakeEngine(), *(FakeEngine(work=partial(fail, error)) for error in errors), FakeEngine()]
    with loading_kernels(engines, CPU, ColdStart()):
        pass
    assert [len(engine.runs) for engine in engines] == [1, 1, 1, 1]
    assert all(f"the kernels of unet were not loaded: {error}" in caplog.text for error in errors)


def test_the_first_run_reports_what_failed_while_kernels_were_loaded(
    store: WritableLocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("failed; standard error has the reason")

    monkeypatch.setattr(Container, "run", fail)
    x, messages = torch.zeros(1, 4, 8, 8), []
    for devices in ((), ("cpu",)):
        monkeypatch.setattr("model.loading.load.EARLY_KERNELS", devices)
        loaded = load_release(store, deployed(RELEASE_NAME), [cpu_target()], ColdStart())
        with pytest.raises(EngineError) as caught:
            loaded.model.engines["unet"].run({"x": x}, 64, 64)
        messages.append(str(caught.value))
    assert "The unet engine failed" in messages[0] and messages[1] == messages[0]


class NotifyingColdStart(ColdStart):
    """Sets an event when a phase begins."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self.begun = threading.Event()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if name == self._name:
            self.begun.set()
        with super().phase(name):
            yield


def test_an_error_in_the_block_skips_waiting_engines() -> None:
    """The engine that runs is waited for. Otherwise it would write to memory that the next load uses."""
    cold_start = NotifyingColdStart("kernels_wait")
    started = threading.Event()

    def work() -> None:
        started.set()
        assert cold_start.begun.wait(SECONDS)

    side = 2048  # one such engine runs at a time
    engines = [FakeEngine(side=side, work=work) for _ in range(3)]
    assert side**2 == CONCURRENT_PIXELS
    with pytest.raises(KeyError), loading_kernels(engines, CPU, cold_start):
        assert started.wait(SECONDS)
        raise KeyError
    assert sum(len(engine.runs) for engine in engines) == 1


def test_loads_a_release_whose_kernels_are_loaded_early(
    store: WritableLocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold_start = ColdStart()
    monkeypatch.setattr("model.loading.load.EARLY_KERNELS", {"cpu"})
    loaded = load_release(store, deployed(RELEASE_NAME), [cpu_target()], cold_start)
    assert {"kernels", "kernels_wait", "weights", "engines"} <= cold_start.phases.keys()
    for seed, name in enumerate(BASE_COMPONENTS):
        x = torch.randn(6, 4, 8, 8)
        torch.testing.assert_close(loaded.model.engines[name].run({"x": x}, 64, 64)["y"], Toy(seed)(x)[0])


def test_does_not_load_kernels_early_on_a_cpu(store: WritableLocalStore) -> None:
    cold_start = ColdStart()
    load_release(store, deployed(RELEASE_NAME), [cpu_target()], cold_start)
    assert "kernels" not in cold_start.phases
