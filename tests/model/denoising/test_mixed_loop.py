"""Images move between two loops: the first and last steps on one UNet, the steps between on another."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.denoising.loop import ImageState, Loop
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
from tests.model.denoising.test_graph_loop import (
    bucketed,
    eager_latents,
    eager_loop,
    graph_loop,
    make_image,
    requests,
    run_mix,
    stubs,
)
from tests.support.linear_networks import PLAIN, Stub, linear_model, stub
from tests.support.scheduling import results

HEIGHT, WIDTH = 64, 96


@pytest.fixture
def model() -> LoadedModel:
    return linear_model()


def unets(model: LoadedModel) -> tuple[Stub, Stub]:
    """Return two UNets that record their inputs."""
    signature = stub(model, spec.UNET).signature
    return Stub(spec.UNET, signature), Stub(spec.UNET, signature)


@settings(max_examples=60, deadline=None)
@given(
    mix=st.lists(st.tuples(requests, st.integers(0, 6)), min_size=1, max_size=8),
    first=st.integers(0, 4),
    last=st.integers(0, 4),
    make_loop=st.sampled_from([graph_loop, eager_loop]),
)
def test_two_loops_of_one_unet_equal_one_loop(
    mix: list[tuple[dict[str, object], int]], first: int, last: int, make_loop: Callable[[EngineSet], Loop]
) -> None:
    """Latents, the samplers' estimate of the step before, noise, guidance and conditioning all move along."""
    model = linear_model()
    expected = [eager_latents(model, **changes) for changes, _ in mix]
    unet = bucketed(model, 1, 2, 4, guided=(2, 4))
    results = run_mix(MixedLoop(make_loop(unet), make_loop(unet), first, last), model, mix)
    for latents, alone in zip(results, expected, strict=True):
        torch.testing.assert_close(latents, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("first", "last", "steps", "of_outer"),
    [
        (2, 1, 6, [0, 1, 5]),
        (0, 2, 5, [3, 4]),
        (3, 0, 5, [0, 1, 2]),
        (0, 0, 3, []),
        (2, 2, 3, [0, 1, 2]),
        (50, 0, 2, [0, 1]),
    ],
)
def test_each_step_runs_on_its_unet(first: int, last: int, steps: int, of_outer: list[int], model: LoadedModel) -> None:
    outer, inner = unets(model)
    loop = MixedLoop(eager_loop(EngineSet([outer])), eager_loop(EngineSet([inner])), first, last)
    image = make_image(model, num_inference_steps=steps)
    loop.add(image)
    ran = []
    for step in range(steps):
        before = len(outer.seen)
        finished = loop.step()
        assert finished == ([image] if step == steps - 1 else [])
        if len(outer.seen) > before:
            ran.append(step)
    assert ran == of_outer
    assert len(inner.seen) == steps - len(of_outer)
    assert loop.images == []


def test_images_at_different_steps_run_on_both_unets_in_one_step(model: LoadedModel) -> None:
    outer, inner = unets(model)
    loop = MixedLoop(eager_loop(EngineSet([outer])), eager_loop(EngineSet([inner])), 1, 0)
    early, late = make_image(model, num_inference_steps=4, seed=1), make_image(model, num_inference_steps=4, seed=2)
    loop.add(early)
    loop.step()
    loop.add(late)
    loop.step()
    assert (early.step, late.step) == (2, 1)
    assert [len(stub.seen) for stub in (outer, inner)] == [2, 1]
    loop.step()
    assert inner.seen[-1]["sample"].shape[0] == 4, "two guided images share a batch once both are at inner steps"


@pytest.mark.parametrize("make_loop", [graph_loop, eager_loop])
def test_removed_image_leaves_the_loop_that_it_is_in(
    make_loop: Callable[[EngineSet], Loop], model: LoadedModel
) -> None:
    unet = bucketed(model, 1, 2, 4)
    loop = MixedLoop(make_loop(unet), make_loop(unet), 1, 1)
    kept, removed = make_image(model, seed=1), make_image(model, seed=2)
    loop.add(kept)
    loop.add(removed)
    loop.step()
    loop.remove(removed)
    assert loop.images == [kept]
    while loop.images:
        loop.step()
    torch.testing.assert_close(kept.latents, eager_latents(model, seed=1), rtol=1e-4, atol=1e-4)


def test_preview_is_of_the_loop_that_runs_the_image(model: LoadedModel) -> None:
    unet = bucketed(model, 1, 2, 4)
    mixed, plain = MixedLoop(eager_loop(unet), eager_loop(unet), 1, 1), eager_loop(unet)
    images = [make_image(model), make_image(model)]
    for loop, image in zip((mixed, plain), images, strict=True):
        loop.add(image)
        loop.step()
        loop.step()
    torch.testing.assert_close(mixed.latents(images[0]), plain.latents(images[1]))


@pytest.mark.parametrize("failing", ["outer", "inner", "moving"])
def test_all_images_can_be_removed_after_an_error(failing: str, model: LoadedModel) -> None:
    """Also those that finished in the other loop in the same step, or that were between the loops."""
    outer, inner = unets(model)
    loops = [eager_loop(EngineSet([outer])), eager_loop(EngineSet([inner]))]
    loop = MixedLoop(*loops, 1, 0)
    finishing, moving = make_image(model, num_inference_steps=1), make_image(model, num_inference_steps=3)
    inside = make_image(model, num_inference_steps=3)
    loop.add(inside)
    loop.step()
    loop.add(finishing)
    loop.add(moving)
    error = RuntimeError("once")
    if failing == "moving":
        loops[1].add = raising(error)  # type: ignore[method-assign]
    else:
        (outer if failing == "outer" else inner).fails = error
    with pytest.raises(RuntimeError, match="once"):
        loop.step()
    for image in list(loop.images):
        loop.remove(image)
    assert loop.images == loops[0].images == loops[1].images == []


def raising(error: Exception) -> Callable[[ImageState], None]:
    def add(image: ImageState) -> None:
        raise error

    return add


def test_image_that_could_not_join_leaves_no_trace(model: LoadedModel) -> None:
    unet = bucketed(model, 1, 2, 4)
    loops = eager_loop(unet), eager_loop(unet)
    loop = MixedLoop(*loops, 1, 1)
    loops[0].add = raising(RuntimeError("full"))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="full"):
        loop.add(make_image(model))
    assert loop.images == [] and not loop._texts and not loop._loop_of


def test_keeps_conditioning_only_while_an_image_may_move(model: LoadedModel) -> None:
    unet = bucketed(model, 1, 2, 4)
    loop = MixedLoop(graph_loop(unet), graph_loop(unet), 1, 1)
    loop.add(make_image(model, num_inference_steps=4))
    kept = []
    while loop.images:
        kept.append(len(loop._texts))
        loop.step()
    assert kept == [1, 1, 1, 0]
    short = MixedLoop(graph_loop(unet), graph_loop(unet), 2, 2)
    short.add(make_image(model, num_inference_steps=4))
    assert not short._texts, "all steps run in one loop"


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
    smaller, larger, unused = stubs(inner)
    assert smaller.seen and larger.seen and not unused.seen
    assert outer.engines[0].seen, "a step that runs in fp16"  # type: ignore[attr-defined]
    batch = [replace(PLAIN, width=64, seed=seed) for seed in range(3)]
    alone = [generate(model, [params])[0][0] for params in batch]
    together = generate(model, batch)[0]
    for image, expected in zip(together, alone, strict=True):
        np.testing.assert_allclose(image, expected, atol=1)


def test_refiner_begins_without_the_estimate_of_a_mixed_base(model: LoadedModel) -> None:
    plain = linear_model()
    model.fp16_engines, model.fp16_steps = {spec.UNET: model.engines[spec.UNET]}, Fp16Steps(first=1, last=1)
    params = replace(PLAIN, use_refiner=True, num_inference_steps=8, scheduler="DPM++ 2M")
    np.testing.assert_array_equal(generate(model, [params])[0][0], generate(plain, [params])[0][0])


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


def test_taken_image_goes_on_in_another_loop(model: LoadedModel) -> None:
    unet = bucketed(model, 1, 2, 4)
    image = make_image(model, scheduler="DPM++ 2M")
    texts = image.cond, image.uncond
    mixed = MixedLoop(graph_loop(unet), graph_loop(unet), 1, 1)
    mixed.add(image)
    mixed.step()
    mixed.take(image)
    assert mixed.images == [] and image.denoised is not None
    image.cond, image.uncond = texts
    other = eager_loop(unet)
    other.add(image)
    while other.images:
        other.step()
    expected = eager_latents(model, scheduler="DPM++ 2M")
    torch.testing.assert_close(image.latents, expected, rtol=1e-4, atol=1e-4)
