"""Images join and leave the eager loop between steps. The result of each is independent of the others."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model.api.request import GenerationRequest
from model.api.resolve import resolve
from model.denoising.eager_loop import EagerLoop
from model.denoising.loop import ImageState, StepNetworks, has_room, unet_batch
from model.denoising.sampler_names import SAMPLERS
from model.engines.engine import EngineSet
from model.errors import EngineError
from model.images.encode import Pixels
from model.loading.load import Loaded
from model.pipeline import spec
from model.pipeline.loaded_model import LoadedModel, make_loop
from model.pipeline.params import GenerationParams
from model.pipeline.runner import Runner
from model.pipeline.text_to_image import denoise, generate
from model.store.manifest import Bucket, Span
from tests.support.linear_networks import PLAIN, linear_model, stub

HEIGHT, WIDTH = 64, 96


@pytest.fixture
def model() -> LoadedModel:
    return linear_model()


@pytest.fixture
def loop(model: LoadedModel) -> EagerLoop:
    return EagerLoop(model.step_networks(spec.UNET, HEIGHT, WIDTH), HEIGHT, WIDTH)


def make_image(model: LoadedModel, **changes: object) -> ImageState:
    """Return an image at the start of its first loop."""
    runner = Runner(model)
    plan = runner.plan(replace(PLAIN, **changes))  # type: ignore[arg-type]
    [image] = plan.images()
    runner.advance(plan, image)
    return image


def latents_alone(model: LoadedModel, **changes: object) -> torch.Tensor:
    """Return the result of a request that runs alone."""
    image = make_image(model, **changes)
    denoise(make_loop(model, spec.UNET, HEIGHT, WIDTH), [image])
    return image.latents


def run_to_end(loop: EagerLoop) -> None:
    while loop.images:
        loop.step()


def test_images_join_between_steps_and_finish_independently(model: LoadedModel, loop: EagerLoop) -> None:
    first, second = (
        make_image(model, num_inference_steps=4),
        make_image(model, num_inference_steps=2, scheduler="Euler a"),
    )
    loop.add(first)
    assert loop.step() == []
    loop.add(second)
    assert loop.images == [first, second]
    assert loop.step() == []
    assert (first.step, second.step) == (2, 1)
    assert loop.step() == [second]
    assert loop.images == [first]
    assert loop.step() == [first]
    assert loop.images == []
    torch.testing.assert_close(first.latents, latents_alone(model, num_inference_steps=4))
    torch.testing.assert_close(second.latents, latents_alone(model, num_inference_steps=2, scheduler="Euler a"))


def test_an_image_does_not_see_the_state_of_an_earlier_one(model: LoadedModel, loop: EagerLoop) -> None:
    """DPM++ 2M reads the previous denoised estimate of its own image, and none at the first step."""
    expected = latents_alone(model, scheduler="DPM++ 2M")
    unet = stub(model, spec.UNET)
    unet.poison = (len(unet.seen), float("nan"))
    broken = make_image(model, seed=11)
    loop.add(broken)
    loop.step()
    assert not loop.latents(broken).isfinite().all()
    image = make_image(model, scheduler="DPM++ 2M")
    loop.add(image)
    loop.step()
    loop.remove(broken)
    assert loop.images == [image]
    run_to_end(loop)
    torch.testing.assert_close(image.latents, expected)


def test_removing_an_image_does_not_affect_the_others(model: LoadedModel, loop: EagerLoop) -> None:
    images = [make_image(model, seed=seed, scheduler="DPM++ 2M SDE Karras") for seed in (1, 2, 3)]
    for image in images:
        loop.add(image)
    loop.step()
    loop.remove(images[1])
    seen = stub(model, spec.UNET).seen
    loop.step()
    assert len(seen[-1]["sample"]) == 4
    run_to_end(loop)
    for image, seed in ((images[0], 1), (images[2], 3)):
        expected = latents_alone(model, seed=seed, scheduler="DPM++ 2M SDE Karras")
        torch.testing.assert_close(image.latents, expected)


def test_estimate_for_a_preview_is_a_copy(model: LoadedModel, loop: EagerLoop) -> None:
    image = make_image(model, num_inference_steps=2)
    loop.add(image)
    assert not loop.latents(image).any()
    loop.step()
    loop.latents(image).zero_()
    estimate = loop.latents(image)
    assert estimate.any()
    assert loop.step() == [image]
    assert estimate.shape == image.latents.shape and not torch.equal(estimate, image.latents)


def test_loop_copies_the_latents_of_an_image(model: LoadedModel, loop: EagerLoop) -> None:
    expected = latents_alone(model)
    image = make_image(model)
    original = image.latents
    loop.add(image)
    with torch.inference_mode():
        original.zero_()
    run_to_end(loop)
    torch.testing.assert_close(image.latents, expected)


@pytest.mark.parametrize("batches", [(2,), (2, 8), (1,)], ids=str)
def test_capacity_is_the_batch_of_the_largest_bucket(model: LoadedModel, batches: tuple[int, ...]) -> None:
    engines = []
    for batch in batches:
        engines.append(replace(stub(model, spec.UNET)))
        engines[-1].bucket = Bucket(
            batch=Span(min=batch, max=batch), height=Span(min=HEIGHT, max=HEIGHT), width=Span(min=WIDTH, max=WIDTH)
        )
    networks = StepNetworks(EngineSet(engines), ["time_embeds"])
    assert EagerLoop(networks, HEIGHT, WIDTH).capacity == max(batches)
    with pytest.raises(EngineError, match="No loaded unet engine serves 64x64"):
        EagerLoop(networks, 64, 64)


def test_images_beyond_the_capacity_wait(model: LoadedModel, loop: EagerLoop) -> None:
    loop.capacity = 4
    images = [make_image(model, seed=seed, num_inference_steps=2 + seed) for seed in range(5)]
    denoise(loop, images)
    assert loop.images == []
    for seed, image in enumerate(images):
        torch.testing.assert_close(image.latents, latents_alone(model, seed=seed, num_inference_steps=2 + seed))


def test_end_of_guidance_makes_room_for_another_image(model: LoadedModel, loop: EagerLoop) -> None:
    loop.capacity = 4
    first, second = (make_image(model, seed=seed, end_cfg_frac=0.5) for seed in (1, 2))
    plain = [make_image(model, seed=seed, guidance_scale=1.0) for seed in (3, 4)]
    loop.add(first)
    loop.add(second)
    assert unet_batch(loop.images) == 4 and not has_room(loop, 1)
    loop.step()
    assert not has_room(loop, 1)
    loop.step()
    assert has_room(loop, 2) and not has_room(loop, 3)
    for image in plain:
        loop.add(image)
    assert unet_batch(loop.images) == 4 and not has_room(loop, 1)
    with pytest.raises(AssertionError):
        loop.add(make_image(model, guidance_scale=1.0))
    run_to_end(loop)
    for seed, image in ((1, first), (2, second)):
        torch.testing.assert_close(image.latents, latents_alone(model, seed=seed, end_cfg_frac=0.5))
    for seed, image in ((3, plain[0]), (4, plain[1])):
        torch.testing.assert_close(image.latents, latents_alone(model, seed=seed, guidance_scale=1.0))


def test_a_failed_loop_is_empty(model: LoadedModel, loop: EagerLoop) -> None:
    stub(model, spec.UNET).fails = EngineError("no")
    with pytest.raises(EngineError):
        denoise(loop, [make_image(model)])
    assert loop.images == []


def test_each_unet_and_size_has_one_loop(model: LoadedModel) -> None:
    loop = model.loop(spec.UNET, 64, 96)
    assert model.loop(spec.UNET, 64, 96) is loop
    assert model.loop(spec.UNET, 96, 64) is not loop
    assert model.loop(spec.REFINER_UNET, 64, 96) is not loop


# -- on the compiled engines ------------------------------------------------------------------------------------------

requests = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from(["a large red circle", "two green squares on white", "a blue line"]),
        "negative_prompt": st.sampled_from([None, "", "a triangle"]),
        "seed": st.integers(0, 2**32 - 1),
        # LCM adds new noise at each step, which multiplies rounding errors: see docs/log/correctness.md.
        "scheduler": st.sampled_from([name for name in SAMPLERS if name != "LCM"]),
        "num_inference_steps": st.integers(1, 6),
        "guidance_scale": st.sampled_from([1.0, 2.0, 7.5]),
        "end_cfg_frac": st.sampled_from([0.0, 0.4, 1.0]),
        "guidance_rescale": st.sampled_from([0.0, 0.7]),
        "clip_skip": st.sampled_from([0, 1]),
    }
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mix=st.lists(st.tuples(requests, st.integers(0, 4)), min_size=2, max_size=5))
def test_image_is_independent_of_the_batch(mix: list[tuple[dict[str, object], int]], loaded: Loaded) -> None:
    """A request alone and in any mix, joining at any step: at most 1 of 255 apart in fp32."""
    batch = [
        resolve(GenerationRequest.model_validate({**request, "width": 128, "height": 128}), loaded.served)
        for request, _ in mix
    ]
    images = generate_mix(loaded.model, batch, [first_step for _, first_step in mix])
    for params, image in zip(batch, images, strict=True):
        [expected] = generate(loaded.model, [params])[0]
        assert np.abs(image.astype(int) - expected.astype(int)).max() <= 1


def generate_mix(model: LoadedModel, batch: list[GenerationParams], first_steps: list[int]) -> list[Pixels]:
    """Return the images of requests that join the loop at these steps, or as soon as there is room."""
    loop = model.loop(spec.UNET, 128, 128)
    runner = Runner(model)
    plans = [runner.plan(params) for params in batch]
    images = [plan.images()[0] for plan in plans]
    for plan, image in zip(plans, images, strict=True):
        runner.advance(plan, image)
    waiting = sorted(zip(first_steps, range(len(images)), images, strict=True))
    step = 0
    while waiting or loop.images:
        while waiting and waiting[0][0] <= step and has_room(loop, waiting[0][2].unet_batch):
            loop.add(waiting.pop(0)[2])
        if loop.images:
            loop.step()
        step += 1
    decoded = []
    for plan, image in zip(plans, images, strict=True):
        assert runner.advance(plan, image) is None and image.pixels is not None
        pixels = image.pixels.wait()
        assert pixels is not None
        decoded.append(pixels)
    return decoded
