"""The first and last steps of an image run on the UNet in fp16, the steps between on the 8-bit UNet, in one loop."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.denoising.eager_loop import EagerLoop
from model.denoising.graph_loop import GraphLoop
from model.denoising.loop import ImageState, Loop
from model.denoising.networks import Denoiser, DenoiserVariant
from model.engines.engine import EngineSet
from model.loading.load import Loaded
from model.loading.served import ServedModel, SizeRange
from model.loading.warmup import step_measurement, warm_up
from model.pipeline import spec
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.runner import Runner
from model.pipeline.text_to_image import generate
from model.request_fields import Defaults
from model.scheduling.scheduler import Scheduler
from model.settings import Limits
from model.store.manifest import Fp16Steps
from tests.support import loops
from tests.support.images import largest_difference
from tests.support.linear_networks import PLAIN, Stub, linear_model, stub
from tests.support.loops import CPU, HEIGHT, WIDTH, assert_latents, bucketed, captured, make_image, run_to_end
from tests.support.parity import image_of
from tests.support.scheduling import results


def make_loop(kind: str, inner: DenoiserVariant, outer: DenoiserVariant) -> Loop:
    """Return a loop with an 8-bit UNet and one in fp16."""
    denoiser = Denoiser((replace(inner, exact=False), outer))
    graphs = kind == "graphs"
    return captured(GraphLoop(denoiser, HEIGHT, WIDTH, CPU)) if graphs else EagerLoop(denoiser, HEIGHT, WIDTH)


def exact_image(model: LoadedModel, first: int, last: int, **changes: object) -> ImageState:
    model.fp16_steps = Fp16Steps(first=first, last=last)
    return make_image(model, **changes)


@settings(max_examples=30, deadline=None)
@given(mix=loops.mixes, first=st.integers(0, 4), last=st.integers(0, 4), kind=st.sampled_from(["graphs", "eager"]))
def test_steps_on_equal_unets_equal_one_unet(mix: loops.Mix, first: int, last: int, kind: str) -> None:
    """Latents, the samplers' estimate of the step before, noise, guidance and conditioning equal a loop of one UNet."""
    model = linear_model()
    model.fp16_steps = Fp16Steps(first=first, last=last)
    inner, outer = (bucketed(model, 1, 2, 4, guided=(2, 4)) for _ in range(2))
    loops.check_mix(make_loop(kind, inner, outer), model, mix)


@pytest.mark.parametrize("kind", ["graphs", "eager"])
@pytest.mark.parametrize(
    ("first", "last", "steps", "of_outer"),
    [(2, 1, 6, [0, 1, 5]), (0, 2, 5, [3, 4]), (0, 0, 3, []), (2, 2, 3, [0, 1, 2]), (50, 0, 2, [0, 1])],
)
def test_each_step_runs_on_its_unet(
    kind: str, first: int, last: int, steps: int, of_outer: list[int], model: LoadedModel
) -> None:
    inner, outer = bucketed(model, 2), bucketed(model, 2)
    loop = make_loop(kind, inner, outer)
    image = exact_image(model, first, last, num_inference_steps=steps)
    loop.add(image)
    ran = []
    [unet] = loops.stubs(outer)
    for step in range(steps):
        before = len(unet.seen)
        assert loop.step() == ([image] if step == steps - 1 else [])
        ran += [step] * (len(unet.seen) - before)
    assert ran == of_outer and len(loops.stubs(inner)[0].seen) == steps - len(of_outer)
    assert loop.images == []


@pytest.mark.parametrize("kind", ["graphs", "eager"])
def test_images_of_different_precision_share_no_call(kind: str, model: LoadedModel) -> None:
    inner, outer = bucketed(model, 8), bucketed(model, 8)
    loop = make_loop(kind, inner, outer)
    for steps in (4, 2):
        loop.add(exact_image(model, 1, 0, num_inference_steps=steps))
        loop.step()  # in the second step the first image runs in 8 bits, and the second one in fp16
    assert [len(one.seen) for one in (*loops.stubs(inner), *loops.stubs(outer))] == [1, 2]
    run_to_end(loop)


@pytest.mark.parametrize("kind", ["graphs", "eager"])
def test_removed_image_leaves_the_others_unchanged(kind: str, model: LoadedModel) -> None:
    loop = make_loop(kind, bucketed(model, 1, 2, 4), bucketed(model, 1, 2, 4))
    kept, removed = (exact_image(model, 1, 1, seed=seed) for seed in (1, 2))
    loop.add(kept)
    loop.add(removed)
    for _ in range(2):
        loop.step()
    loop.remove(removed)
    assert loop.images == [kept]
    run_to_end(loop)
    assert_latents(kept.latents, seed=1)


@pytest.mark.parametrize("failing", ["outer", "inner"])
def test_all_images_can_be_removed_after_an_error(failing: str, model: LoadedModel) -> None:
    inner, outer = bucketed(model, 8), bucketed(model, 8)
    loop = make_loop("eager", inner, outer)
    loop.add(exact_image(model, 1, 0, num_inference_steps=3))
    loop.step()
    for steps in (1, 3):
        loop.add(exact_image(model, 1, 0, num_inference_steps=steps))
    loops.stubs(outer if failing == "outer" else inner)[0].fails = RuntimeError("once")
    with pytest.raises(RuntimeError, match="once"):
        loop.step()
    for image in list(loop.images):
        loop.remove(image)
    assert loop.images == []


def test_serves_what_the_8_bit_unet_serves(model: LoadedModel) -> None:
    """The fp16 UNet has smaller batches. Its steps then take several calls."""
    inner, outer = bucketed(model, 2, 4, 8, width=64), bucketed(model, 2, 4, width=64)
    model.engines[spec.UNET], model.quantized = inner.engines, frozenset({spec.UNET})
    model.fp16_engines, model.fp16_steps = {spec.UNET: outer.engines}, Fp16Steps(first=1, last=1)
    served = ServedModel(64, 64, SizeRange(64, 512, 8), has_refiner=True, defaults=Defaults())
    loaded = Loaded(model, served, "linear/1", "cpu", "aot_inductor", 0)
    warm_up(loaded)
    list(step_measurement(loaded))
    assert model.loop(spec.UNET, 64, 64).capacity == 8
    smaller, larger, largest = loops.stubs(inner)
    assert smaller.seen and larger.seen and largest.seen
    assert loops.stubs(outer)[0].seen, "a step that runs in fp16"
    batch = [replace(PLAIN, width=64, seed=seed) for seed in range(3)]
    for image, params in zip(generate(model, batch)[0], batch, strict=True):
        assert largest_difference(image, image_of(model, params)) <= 1


def test_refiner_begins_without_the_estimate_of_the_base(model: LoadedModel) -> None:
    model.fp16_engines, model.fp16_steps = {spec.UNET: model.engines[spec.UNET]}, Fp16Steps(first=1, last=1)
    model.quantized = frozenset({spec.UNET})
    params = replace(PLAIN, use_refiner=True, num_inference_steps=8, scheduler="DPM++ 2M")
    np.testing.assert_array_equal(image_of(model, params), image_of(linear_model(), params))


def test_server_goes_on_after_one_step_failed(model: LoadedModel) -> None:
    signature = stub(model, spec.UNET).signature
    outer, inner = Stub(spec.UNET, signature), Stub(spec.UNET, signature)
    model.engines[spec.UNET], model.quantized = EngineSet([inner]), frozenset({spec.UNET})
    model.fp16_engines, model.fp16_steps = {spec.UNET: EngineSet([outer])}, Fp16Steps(first=1)
    scheduler = Scheduler([Runner(model)], Limits(), lambda: None)
    try:
        inner.fails = torch.OutOfMemoryError("once")
        with pytest.raises(torch.OutOfMemoryError):
            results(scheduler.submit(PLAIN))
        inner.fails = None
        [result] = results(scheduler.submit(PLAIN))
        assert len(result.images) == 1 and result.images[0]
    finally:
        scheduler.close()
