"""The warm-up: every size is run, efficient batches are measured, and a lack of memory is reported."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from model.denoising.eager_loop import EagerLoop
from model.denoising.loop import ImageState
from model.engines.engine import EngineSet
from model.errors import EngineError, OutOfDeviceMemory
from model.loading import warmup
from model.loading.load import Loaded
from model.loading.served import Defaults, ServedModel, SizeList, SizeRange
from model.loading.warmup import efficient_by_size, warm_up
from model.pipeline import spec
from model.store.manifest import Bucket, Span
from tests.support.line_networks import line_model, stub


@pytest.fixture
def loaded() -> Loaded:
    """Two sizes, with UNet engines of batch 2, 4 and 8 for each."""
    model = line_model()
    sizes = ((64, 64), (96, 64))
    for name in (spec.UNET, spec.REFINER_UNET):
        engines = []
        for width, height in sizes:
            for batch in (2, 4, 8):
                engines.append(replace(stub(model, name)))
                engines[-1].bucket = Bucket(
                    batch=Span(min=batch, max=batch),
                    height=Span(min=height, max=height),
                    width=Span(min=width, max=width),
                )
        model.engines[name] = EngineSet(engines)
    served = ServedModel(64, 64, SizeList(sizes), has_refiner=True, defaults=Defaults())
    return Loaded(model, served, "line/1", "cpu", "aot_inductor", 0)


Clocked = Callable[..., list[tuple[int, int]]]


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> Clocked:
    """Set the warm-up's clock: seconds of a step by its number of images, times the factors of `rising` for the first
    measured steps. Returns (width, images) of each measured step."""

    def set_up(seconds: dict[int, float], rising: Sequence[float] = ()) -> list[tuple[int, int]]:
        now, looked, seen, step = 0.0, 0, [], EagerLoop.step

        def one_step(self: EagerLoop) -> list[ImageState]:
            nonlocal now, looked
            now += seconds[len(self.images)] * (rising[len(seen)] if len(seen) < len(rising) else 1)
            if looked % 2:  # the clock was read before, and will be after
                seen.append((self._width, len(self.images)))
            return step(self)

        def read() -> float:
            nonlocal looked
            looked += 1
            return now

        monkeypatch.setattr(EagerLoop, "step", one_step)
        monkeypatch.setattr(warmup, "time", SimpleNamespace(perf_counter=read))
        return seen

    return set_up


def test_makes_every_loop_and_runs_every_size(loaded: Loaded) -> None:
    with torch.inference_mode():
        preview_map = warm_up(loaded)
    assert preview_map.weight.shape == (4, 3)
    names = (spec.UNET, spec.REFINER_UNET)
    assert set(loaded.model.loops) == {(name, 64, width) for name in names for width in (64, 96)}
    assert all(not loop.images for loop in loaded.model.loops.values())
    widths = {inputs["latents"].shape[-1] for inputs in stub(loaded.model, spec.VAE_DECODER).seen}
    assert widths == {64 // 8, 96 // 8}


@pytest.mark.parametrize(
    "seconds, efficient, tried",
    [
        ({1: 0.031, 2: 0.059, 4: 0.114}, 1, (1, 2)),  # two take nearly twice as long as one: four are not tried
        ({1: 0.080, 2: 0.140, 4: 0.270}, 2, (1, 2, 4)),
        ({1: 0.050, 2: 0.055, 4: 0.060}, 4, (1, 2, 4)),
    ],
)
def test_measures_the_efficient_batch_of_each_listed_size(
    seconds: dict[int, float], efficient: int, tried: tuple[int, ...], loaded: Loaded, clocked: Clocked
) -> None:
    seen = clocked(seconds)
    with torch.inference_mode():
        warm_up(loaded)
    assert efficient_by_size(loaded.model) == {"64x64": 2 * efficient, "96x64": 2 * efficient}
    assert seen == [(width, images) for width in (64, 96) for images in tried]  # on a CPU once each
    assert loaded.model.efficient_pixels is None


def test_measures_unguided_images_for_a_release_without_guidance(loaded: Loaded, clocked: Clocked) -> None:
    """Each takes one batch entry: eight of them fill the largest bucket."""
    seen = clocked({1: 0.050, 2: 0.080, 4: 0.140, 8: 0.290})
    served = replace(loaded.served, defaults=loaded.served.defaults.model_copy(update={"guidance_scale": 1.0}))
    with torch.inference_mode():
        warm_up(replace(loaded, served=served))
    assert efficient_by_size(loaded.model) == {"64x64": 4, "96x64": 4}
    assert list(dict.fromkeys(images for width, images in seen if width == 64)) == [2, 4, 8]


def test_rising_clocks_do_not_raise_the_efficient_batch(
    loaded: Loaded, clocked: Clocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two images cost 96 % of what one costs, each; one image's first steps are slower than they will be."""
    monkeypatch.setattr(warmup, "_clocks_rise", lambda _: True)
    clocked({1: 0.0287, 2: 0.0549}, rising=(1.4, 1.2, 1.05))
    with torch.inference_mode():
        warm_up(loaded)
    assert efficient_by_size(loaded.model) == {"64x64": 2, "96x64": 2}


def test_single_bucket_is_not_measured(loaded: Loaded, clocked: Clocked) -> None:
    """Fewer images would take as long."""
    seen = clocked({1: 0.1})
    for name in (spec.UNET, spec.REFINER_UNET):
        engines = loaded.model.engines[name].engines
        loaded.model.engines[name] = EngineSet([engine for engine in engines if engine.bucket.batch.max == 8])
    with torch.inference_mode():
        warm_up(loaded)
    assert efficient_by_size(loaded.model) == {"64x64": 8, "96x64": 8} and not seen


def test_other_sizes_of_a_dynamic_engine_get_as_many_pixels(loaded: Loaded, clocked: Clocked) -> None:
    model = line_model()
    for name in (spec.UNET, spec.REFINER_UNET):
        side = Span(min=16, max=1024, multiple=8)
        stub(model, name).bucket = Bucket(batch=Span(min=1, max=16), height=side, width=side)
    served = replace(loaded.served, sizes=SizeRange(64, 1024, 8))
    clocked({1: 0.080, 2: 0.140, 4: 0.240, 8: 0.480})
    with torch.inference_mode():
        warm_up(replace(loaded, model=model, served=served))
    assert efficient_by_size(model) == {"64x64": 8}
    for (height, width), batch in {(64, 128): 4, (128, 128): 2, (1024, 1024): 1, (32, 64): 16, (16, 16): 16}.items():
        assert model.loop(spec.UNET, height, width).efficient_batch == batch


@pytest.mark.parametrize("guidance_scale", [7.5, 1.0])
def test_encodes_text_in_every_batch_size(guidance_scale: float, loaded: Loaded) -> None:
    served = replace(
        loaded.served, defaults=loaded.served.defaults.model_copy(update={"guidance_scale": guidance_scale})
    )
    with torch.inference_mode():
        warm_up(replace(loaded, served=served))
    texts = (
        spec.TEXT_ENCODER, spec.TEXT_ENCODER_2, spec.UNET_TEXT, spec.REFINER_TEXT_ENCODER_2,
        spec.REFINER_UNET_TEXT,
    )  # fmt: skip
    for name in texts:
        batches = {len(next(iter(inputs.values()))) for inputs in stub(loaded.model, name).seen}
        assert batches == {1, 2}, name


class EngineFailed(RuntimeError):
    """Like the RuntimeError that an AOTInductor engine raises for any failure."""


@pytest.mark.parametrize("refused", [True, False])
def test_distinguishes_a_lack_of_memory_from_other_failures(
    refused: bool, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = iter([3, 4 if refused else 3])  # of which one, or none, in the warm-up
    monkeypatch.setattr(warmup, "_refused_allocations", lambda model: next(refusals))
    stub(loaded.model, spec.VAE_DECODER).fails = EngineFailed("run_func_(...) API call failed")
    expected = pytest.raises(OutOfDeviceMemory, match="does not fit") if refused else pytest.raises(EngineFailed)
    with expected, torch.inference_mode():
        warm_up(loaded)


def test_reports_a_gpu_that_is_too_small(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(warmup, "generate", full)
    with pytest.raises(OutOfDeviceMemory, match="line/1 does not fit .* Configure smaller batches .* or fewer sizes"):
        warm_up(loaded)


def test_names_engines_that_do_not_fit_together(loaded: Loaded) -> None:
    """The refiner's text network has other widths than the base's."""
    loaded.model.engines[spec.UNET_TEXT] = EngineSet([stub(loaded.model, spec.REFINER_UNET_TEXT)])
    words = "engines of line/1 do not fit together. .*encoder_hidden_states.*`preheat build`"
    with pytest.raises(EngineError, match=words), torch.inference_mode():
        warm_up(loaded)


def test_refuses_the_interface_of_another_component(loaded: Loaded) -> None:
    loaded.model.engines[spec.VAE_DECODER] = EngineSet([stub(loaded.model, spec.UNET_TIME)])
    words = "vae_decoder engines cannot be used. They take timestep, .* vae_decoder takes latents and returns pixels"
    with pytest.raises(EngineError, match=f"{words}.*`preheat build`"), torch.inference_mode():
        warm_up(loaded)
