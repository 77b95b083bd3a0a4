"""Images move between two loops: the first and last steps on one UNet, the steps between on another."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.denoising.mixed_loop import MixedLoop
from model.engines.engine import EngineSet
from model.loading.load import Loaded
from model.loading.served import Defaults, ServedModel, SizeRange
from model.loading.warmup import batch_measurement, warm_up
from model.pipeline import spec
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.runner import Runner
from model.pipeline.text_to_image import generate
from model.scheduling.scheduler import Scheduler
from model.settings import Limits
from model.store.manifest import Fp16Steps
from tests.support import loops
from tests.support.images import largest_difference
from tests.support.linear_networks import PLAIN, Stub, linear_model, stub
from tests.support.loops import MakeLoop, assert_latents, bucketed, eager_loop, graph_loop, make_image, run_to_end
from tests.support.parity import image_of
from tests.support.scheduling import results

LOOPS: list[MakeLoop] = [graph_loop, eager_loop]


def unets(model: LoadedModel) -> tuple[Stub, Stub]:
    """Return two UNets that record their inputs."""
    signature = stub(model, spec.UNET).signature
    return Stub(spec.UNET, signature), Stub(spec.UNET, signature)


@settings(max_examples=30, deadline=None)
@given(
    mix=loops.mixes,
    first=st.integers(0, 4),
    last=st.integers(0, 4),
    make_loop=st.sampled_from([graph_loop, eager_loop]),
)
def test_two_loops_of_one_unet_equal_one_loop(mix: loops.Mix, first: int, last: int, make_loop: MakeLoop) -> None:
    """Latents, the samplers' estimate of the step before, noise, guidance and conditioning all move along."""
    model = linear_model()
    unet = bucketed(model, 1, 2, 4, guided=(2, 4))
    loops.check_mix(MixedLoop(make_loop(unet), make_loop(unet), first, last), model, mix)


@pytest.mark.parametrize(
    ("first", "last", "steps", "of_outer"),
    [(2, 1, 6, [0, 1, 5]), (0, 2, 5, [3, 4]), (0, 0, 3, []), (2, 2, 3, [0, 1, 2]), (50, 0, 2, [0, 1])],
)
def test_each_step_runs_on_its_unet(first: int, last: int, steps: int, of_outer: list[int], model: LoadedModel) -> None:
    outer, inner = unets(model)
    loop = MixedLoop(eager_loop(EngineSet([outer])), eager_loop(EngineSet([inner])), first, last)
    image = make_image(model, num_inference_steps=steps)
    loop.add(image)
    ran = []
    for step in range(steps):
        before = len(outer.seen)
        assert loop.step() == ([image] if step == steps - 1 else [])
        ran += [step] * (len(outer.seen) - before)
    assert ran == of_outer and len(inner.seen) == steps - len(of_outer)
    assert loop.images == []


@pytest.mark.parametrize("make_loop", LOOPS)
def test_removed_image_leaves_the_loop_that_it_is_in(make_loop: MakeLoop, model: LoadedModel) -> None:
    unet = bucketed(model, 1, 2, 4)
    loop, plain = MixedLoop(make_loop(unet), make_loop(unet), 1, 1), make_loop(unet)
    kept, removed, alone = make_image(model, seed=1), make_image(model, seed=2), make_image(model, seed=1)
    loop.add(kept)
    loop.add(removed)
    plain.add(alone)
    for _ in range(2):
        loop.step()
        plain.step()
    loop.remove(removed)
    assert loop.images == [kept]
    torch.testing.assert_close(loop.latents(kept), plain.latents(alone))  # for a preview
    run_to_end(loop)
    assert_latents(kept.latents, seed=1)


@pytest.mark.parametrize("failing", ["outer", "inner"])
def test_all_images_can_be_removed_after_an_error(failing: str, model: LoadedModel) -> None:
    """Also those that finished in the other loop in the same step, or that were between the loops."""
    outer, inner = unets(model)
    both = [eager_loop(EngineSet([outer])), eager_loop(EngineSet([inner]))]
    loop = MixedLoop(*both, 1, 0)
    loop.add(make_image(model, num_inference_steps=3))
    loop.step()
    for steps in (1, 3):
        loop.add(make_image(model, num_inference_steps=steps))
    (outer if failing == "outer" else inner).fails = RuntimeError("once")
    with pytest.raises(RuntimeError, match="once"):
        loop.step()
    for image in list(loop.images):
        loop.remove(image)
    assert loop.images == both[0].images == both[1].images == []


def test_serves_what_both_unets_serve(model: LoadedModel) -> None:
    """The fp16 UNet has smaller batches. A later measurement finds batches that both have, on the inner UNet."""
    inner, outer = bucketed(model, 2, 4, 8, width=64), bucketed(model, 2, 4, width=64)
    model.engines[spec.UNET] = inner
    model.fp16_engines, model.fp16_steps = {spec.UNET: outer}, Fp16Steps(first=1, last=1)
    served = ServedModel(64, 64, SizeRange(64, 512, 8), has_refiner=True, defaults=Defaults())
    loaded = Loaded(model, served, "linear/1", "cpu", "aot_inductor", 0)
    warm_up(loaded)
    list(batch_measurement(loaded))
    loop = model.loop(spec.UNET, 64, 64)
    assert isinstance(loop, MixedLoop) and loop.capacity == 4
    smaller, larger, unused = loops.stubs(inner)
    assert smaller.seen and larger.seen and not unused.seen
    assert loops.stubs(outer)[0].seen, "a step that runs in fp16"
    batch = [replace(PLAIN, width=64, seed=seed) for seed in range(3)]
    for image, params in zip(generate(model, batch)[0], batch, strict=True):
        assert largest_difference(image, image_of(model, params)) <= 1


def test_refiner_begins_without_the_estimate_of_a_mixed_base(model: LoadedModel) -> None:
    model.fp16_engines, model.fp16_steps = {spec.UNET: model.engines[spec.UNET]}, Fp16Steps(first=1, last=1)
    params = replace(PLAIN, use_refiner=True, num_inference_steps=8, scheduler="DPM++ 2M")
    np.testing.assert_array_equal(image_of(model, params), image_of(linear_model(), params))


def test_server_goes_on_after_one_step_failed(model: LoadedModel) -> None:
    outer, inner = unets(model)
    model.engines[spec.UNET] = EngineSet([inner])
    model.fp16_engines, model.fp16_steps = {spec.UNET: EngineSet([outer])}, Fp16Steps(first=1)
    scheduler = Scheduler(Runner(model), Limits(), lambda: None)
    try:
        inner.fails = torch.OutOfMemoryError("once")
        with pytest.raises(torch.OutOfMemoryError):
            results(scheduler.submit(PLAIN))
        inner.fails = None
        [result] = results(scheduler.submit(PLAIN))
        assert len(result.images) == 1 and result.images[0]
    finally:
        scheduler.close()
