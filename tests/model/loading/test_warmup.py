"""The warm-up runs every size and reports a lack of memory. A later measurement finds what the calls of a step take."""

from collections.abc import Mapping
from copy import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from model.cold_start import ColdStart, warm_up_part
from model.cuda.probe import DeviceProbe
from model.denoising.cover import Kind
from model.engines.engine import EngineSet
from model.errors import EngineError, OutOfDeviceMemory
from model.loading.load import Loaded
from model.loading.served import Defaults, ServedModel, SizeList, SizeRange
from model.loading.warmup import step_measurement, warm_up, warm_up_in_parts
from model.pipeline import spec
from model.pipeline.loaded_model import LoadedModel
from model.store.manifest import Bucket, Span
from tests.support.linear_networks import PLAIN, Stub, linear_model, stub
from tests.support.parity import image_of

SIZES = ((64, 64), (96, 64))


@pytest.fixture
def loaded() -> Loaded:
    """Two sizes, with UNet engines of batch 2, 4 and 8 for each."""
    served = ServedModel(64, 64, SizeList(SIZES), has_refiner=True, defaults=Defaults())
    return Loaded(static_model(), served, "line/1", "cpu", "aot_inductor", 0)


def static_model() -> LoadedModel:
    model = linear_model()
    for name in (spec.UNET, spec.REFINER_UNET):
        engines = []
        for width, height in SIZES:
            for batch in (2, 4, 8):
                engines.append(replace(stub(model, name)))
                engines[-1].bucket = Bucket(
                    batch=Span(min=batch, max=batch),
                    height=Span(min=height, max=height),
                    width=Span(min=width, max=width),
                )
        model.engines[name] = EngineSet(engines)
    return model


class FakeProbe(DeviceProbe):
    """A fake clock. Each call of the base's UNet advances it by `seconds[batch]`, and nothing else does."""

    def __init__(self, model: LoadedModel, seconds: Mapping[int, float]) -> None:
        super().__init__(model.device)
        self.measured: list[tuple[int, int]] = []
        """Width in pixels and batch of each measured step."""
        self._model, self._seconds = model, seconds
        self._time, self._measuring = 0.0, False
        self.first_takes = 1.0  # times the seconds of further steps of the same width and batch

    def now(self) -> float:
        for width, batch in self._new_calls():
            self._time += self._seconds[batch] * (self.first_takes if (width, batch) not in self.measured else 1)
            if self._measuring:
                self.measured.append((width, batch))
        self._measuring = not self._measuring  # the clock is read before and after a measured step
        return self._time

    def _new_calls(self) -> list[tuple[int, int]]:
        calls = []
        for engine in self._model.engines[spec.UNET].engines:
            assert isinstance(engine, Stub)
            samples = [inputs["sample"] for inputs in engine.seen]
            engine.seen.clear()
            calls += [(8 * sample.shape[-1], len(sample)) for sample in samples]
        return calls


def measure(loaded: Loaded, probe: DeviceProbe) -> None:
    with torch.inference_mode():
        warm_up(loaded, probe)
        probe.now()  # forget the calls of the warm-up
        probe.now()
        list(step_measurement(loaded, probe))


def seconds_of(loaded: Loaded, width: int, entries: int) -> float:
    """Return the seconds of a step of the base."""
    return loaded.model.loop(spec.UNET, 64, width).costs.seconds(((Kind(frozenset()), entries),))


def test_makes_every_loop_and_runs_every_size(loaded: Loaded) -> None:
    with torch.inference_mode():
        preview_map = warm_up(loaded)
    assert [weight.shape for weight, _ in preview_map.layers] == [(9 * 4, 3)]  # a linear map of the neighbourhood
    names = (spec.UNET, spec.REFINER_UNET)
    assert set(loaded.model.loops) == {(name, 64, width) for name in names for width in (64, 96)}
    assert all(not loop.images for loop in loaded.model.loops.values())
    widths = {inputs["latents"].shape[-1] for inputs in stub(loaded.model, spec.VAE_DECODER).seen}
    assert widths == {64 // 8, 96 // 8}
    encoder = stub(loaded.model, spec.VAE_ENCODER)
    encoder.seen.clear()
    with torch.inference_mode():
        warm_up(replace(loaded, served=replace(loaded.served, image_sizes=SizeList(((96, 64),)))))
    assert [inputs["pixels"].shape[-1] for inputs in encoder.seen] == [96]


def test_other_work_may_run_between_two_parts(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not count as a part of the warm-up."""
    now = 0.0
    monkeypatch.setattr("model.cold_start.time.perf_counter", lambda: now)
    cold_start, images = ColdStart(), list[int]()
    with torch.inference_mode():
        for _ in warm_up_in_parts(loaded, cold_start=cold_start):
            images.append(len(stub(loaded.model, spec.VAE_DECODER).seen))
            now += 1
            with warm_up_part("of another model"):
                now += 1
    assert images[:2] == [0, 0] and {0, 1, 2} == {*images} and len(images) >= 4, "texts, then two images"
    assert set(cold_start.phases.values()) == {0.0}
    assert {"warm_up_image_64x64", "warm_up_image_96x64", "warm_up_texts", "warm_up_preview"} < cold_start.phases.keys()
    assert "warm_up_of another model" not in cold_start.phases


def test_a_size_that_is_not_warmed_up_is_made_by_its_first_request(loaded: Loaded) -> None:
    cold = replace(loaded, served=replace(loaded.served, cold_sizes=((96, 64),)))
    with torch.inference_mode():
        measure(cold, FakeProbe(cold.model, {2: 0.031, 4: 0.080, 8: 0.081}))
    assert {(height, width) for _, height, width in cold.model.loops} == {(64, 64)}
    params = replace(PLAIN, width=96, seed=3)
    first, again = (image_of(cold.model, params) for _ in range(2))
    assert np.array_equal(first, again) and (spec.UNET, 64, 96) in cold.model.loops
    whole = replace(loaded, model=linear_model())
    assert np.array_equal(first, image_of(whole.model, params))


@pytest.mark.parametrize("guidance_scale", [7.5, 1.0])
def test_encodes_text_in_every_batch_size(guidance_scale: float, loaded: Loaded) -> None:
    """So that no request is the first to run a text network at a size."""
    defaults = loaded.served.defaults.model_copy(update={"guidance_scale": guidance_scale})
    with torch.inference_mode():
        warm_up(replace(loaded, served=replace(loaded.served, defaults=defaults)))
    refiner = (spec.REFINER_TEXT_ENCODER_2, spec.REFINER_UNET_TEXT)
    for name in (spec.TEXT_ENCODER, spec.TEXT_ENCODER_2, spec.UNET_TEXT, *refiner):
        batches = {len(next(iter(inputs.values()))) for inputs in stub(loaded.model, name).seen}
        assert batches == {1, 2}, name


def test_measures_every_call_of_each_listed_size(loaded: Loaded) -> None:
    probe = FakeProbe(loaded.model, {2: 0.031, 4: 0.080, 8: 0.081})
    measure(loaded, probe)
    assert probe.measured == [(width, batch) for width in (64, 96) for batch in (2, 4, 8)]  # once each on a CPU
    for width in (64, 96):
        seconds = [seconds_of(loaded, width, entries) for entries in (1, 2, 4, 5)]
        assert seconds == pytest.approx([0.031, 0.031, 0.062, 0.081])


def test_loops_of_later_slots_have_the_measured_times(loaded: Loaded) -> None:
    """Also where the engines of each size have times of their own, and if another release is in the first slot."""
    first, second, third = loaded.model, static_model(), static_model()
    first.same_code.append(first.loops)
    with torch.inference_mode():
        warm_up(loaded)
        second.loop(spec.UNET, 64, 96)
    first.same_code.append(second.loops)
    first_slot = replace(loaded, model=copy(first))
    first.run_on(second)
    measure(loaded, FakeProbe(second, {2: 0.031, 4: 0.080, 8: 0.081}))
    third.step_times = first.step_times  # opened after the measurement
    for model in (first_slot.model, second, third):
        assert seconds_of(replace(loaded, model=model), 96, 5) == pytest.approx(0.081)


def test_a_gpu_is_measured_under_load(loaded: Loaded) -> None:
    """Its first steps after a pause run at other clocks, and differ by more than two engines of one batch may."""
    for first_takes in (0.9, 1.5):
        probe = FakeProbe(loaded.model, {2: 0.031, 4: 0.080, 8: 0.081})
        probe.clocks_rise, probe.first_takes = True, first_takes
        measure(loaded, probe)
        assert {batch: probe.measured.count((64, batch)) >= 3 for batch in (2, 4, 8)} == dict.fromkeys((2, 4, 8), True)
        assert sum(probe.measured.count((64, batch)) * seconds for batch, seconds in ((2, 0.031), (4, 0.080))) > 0.3
        assert [seconds_of(loaded, 64, entries) for entries in (2, 5)] == pytest.approx([0.031, 0.081])


def test_measured_steps_change_no_picture(loaded: Loaded) -> None:
    params = replace(PLAIN, width=64)
    before = image_of(loaded.model, params)
    measure(loaded, FakeProbe(loaded.model, {2: 1.0, 4: 1.0, 8: 1.0}))
    assert np.array_equal(image_of(loaded.model, params), before)


@pytest.mark.parametrize(
    ("seconds", "tried"),
    [
        ({1: 0.5, 2: 1.0, 4: 2.0, 8: 4.0, 16: 8.0}, (1, 2)),  # twice the batch takes twice as long: 4 is not tried
        ({1: 0.5, 2: 0.6, 4: 0.8, 8: 1.2, 16: 2.0}, (1, 2, 4, 8, 16)),
    ],
)
def test_times_of_a_dynamic_engine_hold_for_all_sizes(
    seconds: dict[int, float], tried: tuple[int, ...], loaded: Loaded
) -> None:
    model = linear_model()
    for name in (spec.UNET, spec.REFINER_UNET):
        side = Span(min=16, max=1024, multiple=8)
        stub(model, name).bucket = Bucket(batch=Span(min=1, max=16), height=side, width=side)
    served = replace(loaded.served, sizes=SizeRange(64, 1024, 8))
    loaded = replace(loaded, model=model, served=served)
    model.loop(spec.UNET, 64, 128)  # made before the measurement
    probe = FakeProbe(model, seconds)
    measure(loaded, probe)
    assert probe.measured == [(64, batch) for batch in tried]
    for width in (128, 256, 32):  # of 64 x 64 pixels the seconds are those of `seconds`
        for entries in (1, 2, 4):
            expected = seconds.get(entries * width // 64, seconds[1] / 2)
            assert seconds_of(loaded, width, entries) == pytest.approx(expected), (width, entries)


def test_benchmarks_of_a_release_count_until_the_measurement(loaded: Loaded) -> None:
    buckets = {engine.bucket for engine in loaded.model.engines[spec.UNET].engines}
    loaded.model.benchmarks = {(spec.UNET, False, bucket): float(bucket.batch.max) for bucket in buckets}
    assert seconds_of(loaded, 64, 8) == 8.0
    measure(loaded, FakeProbe(loaded.model, {2: 3.0, 4: 5.0, 8: 7.0}))
    assert seconds_of(loaded, 64, 8) == 7.0


class EngineFailed(RuntimeError):
    """Like the RuntimeError that an AOTInductor engine raises for any failure."""


@pytest.mark.parametrize(
    ("failure", "refusals_after", "expected"),
    [
        (EngineFailed("run_func_(...) API call failed"), 3, EngineFailed),
        (EngineFailed("run_func_(...) API call failed"), 4, OutOfDeviceMemory),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), 3, OutOfDeviceMemory),
    ],
)
def test_distinguishes_a_lack_of_memory_from_other_failures(
    failure: Exception, refusals_after: int, expected: type[Exception], loaded: Loaded
) -> None:
    refusals = iter([3, refusals_after])  # before and after the failure

    class Probe(DeviceProbe):
        def refused_allocations(self) -> int:
            return next(refusals)

    stub(loaded.model, spec.VAE_DECODER).fails = failure
    with pytest.raises(expected) as caught, torch.inference_mode():
        warm_up(loaded, Probe(loaded.model.device))
    if expected is OutOfDeviceMemory:
        assert "line/1 does not fit" in str(caught.value) and "Configure smaller batches" in str(caught.value)


def test_names_engines_that_do_not_fit_together(loaded: Loaded) -> None:
    """The refiner's text network has other widths than the base's."""
    loaded.model.engines[spec.UNET_TEXT] = EngineSet([stub(loaded.model, spec.REFINER_UNET_TEXT)])
    words = "engines of line/1 do not fit together. .*encoder_hidden_states.*`preheat build`"
    with pytest.raises(EngineError, match=words), torch.inference_mode():
        warm_up(loaded)
