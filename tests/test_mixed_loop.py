"""Images move between two loops: the first and last steps on one UNet, the steps between on another."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.denoising.eager_loop import EagerLoop
from model.denoising.loop import Loop, StepNetworks
from model.denoising.mixed_loop import MixedLoop
from model.engines.engine import EngineSet
from model.pipeline import spec
from model.pipeline.loaded_model import LoadedModel
from tests.support.linear_networks import Stub, linear_model, stub
from tests.test_graph_loop import bucketed, eager_latents, graph_loop, make_image, requests, run_mix

HEIGHT, WIDTH = 64, 96


def eager_loop(unet: EngineSet) -> EagerLoop:
    return EagerLoop(StepNetworks(unet, ["time_embeds"]), HEIGHT, WIDTH)


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
    unet = bucketed(model, 1, 2, 4, both=(2, 4))
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
