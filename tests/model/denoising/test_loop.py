"""Images join and leave a loop between steps. The result of each is independent of the others, in both loops."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model.denoising.loop import ImageState, Known, Loop, has_room, slots
from model.denoising.networks import DenoiserVariant
from model.denoising.sampler_specs import SAMPLERS
from model.errors import EngineError
from model.loading.load import Loaded
from model.pipeline import spec
from model.pipeline.encoded_once import EncodedOnce
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.runner import Runner
from model.pipeline.text_to_image import denoise
from tests.support import loops
from tests.support.images import largest_difference
from tests.support.linear_networks import PLAIN, linear_model, stub
from tests.support.loops import HEIGHT, LEVELS, MASK, WIDTH, MakeLoop, Mix, assert_latents, bucketed, make_image
from tests.support.parity import image_of, params_of

both_loops = pytest.mark.parametrize("make_loop", [loops.eager_loop, loops.graph_loop])


@settings(max_examples=60, deadline=None)
@given(mix=loops.mixes, batches=st.sampled_from([(1, 2, 4, 8), (2, 5), (3,), (2,), (1,)]))
def test_any_mix_equals_the_images_alone(mix: Mix, batches: tuple[int, ...]) -> None:
    model = linear_model()
    loops.check_mix(loops.eager_loop(bucketed(model, *batches)), model, mix)
    for guided in ((), (2, 4, 8)):
        loops.check_mix(loops.graph_loop(bucketed(model, *batches, guided=guided)), model, mix)


@both_loops
def test_images_join_between_steps_and_finish_independently(make_loop: MakeLoop, model: LoadedModel) -> None:
    loop = make_loop(bucketed(model, 8))
    first = make_image(model, num_inference_steps=4)
    second = make_image(model, num_inference_steps=2, scheduler="Euler a")
    removed = make_image(model, seed=11)
    loop.add(first)
    loop.add(removed)
    assert loop.step() == []
    loop.remove(removed)
    loop.add(second)
    assert loop.images == [first, second] and loop.step() == []
    assert (first.step, second.step) == (2, 1)
    assert loop.step() == [second] and loop.images == [first]
    assert loop.step() == [first] and loop.images == []
    assert_latents(first.latents, num_inference_steps=4)
    assert_latents(second.latents, num_inference_steps=2, scheduler="Euler a")


@both_loops
def test_an_image_returns_for_its_next_pass_in_another_slot(make_loop: MakeLoop, model: LoadedModel) -> None:
    loop = make_loop(bucketed(model, 2, 4))
    changes: dict[str, Any] = {"seed": 2, "negative_prompt": "four", "prompt": "two words"}
    shorter = make_image(model, seed=1, negative_prompt="four")
    image = make_image(model, num_inference_steps=5, **changes)
    loop.add(shorter)
    loop.add(image)
    loops.run_to_end(loop)
    following = make_image(model, num_inference_steps=5, **changes)
    state = ("plan", "step", "latents", "cond", "uncond", "generator")
    vars(image).update({name: getattr(following, name) for name in state})
    loop.add(image)
    loops.run_to_end(loop)
    assert_latents(image.latents, num_inference_steps=5, **changes)


@both_loops
def test_nan_reaches_neither_other_images_nor_the_next_in_a_slot(make_loop: MakeLoop, model: LoadedModel) -> None:
    loop = make_loop(bucketed(model, 4))
    other, broken = make_image(model, seed=2, scheduler="DPM++ 2M"), make_image(model, image=LEVELS, masks=(MASK,))
    broken.latents = nan = torch.full_like(broken.latents, torch.nan)
    broken.known = Known(nan, nan, nan[:, :1])
    loop.add(broken)
    loop.add(other)
    loop.step()
    assert not loop.latents(broken).isfinite().any()
    loop.remove(broken)
    following = make_image(model, seed=3, scheduler="DPM++ 2M SDE Karras")
    loop.add(following)
    loops.run_to_end(loop)
    assert_latents(other.latents, seed=2, scheduler="DPM++ 2M")
    assert_latents(following.latents, seed=3, scheduler="DPM++ 2M SDE Karras")


@both_loops
def test_keeps_the_image_outside_of_the_mask(make_loop: MakeLoop, model: LoadedModel) -> None:
    right_half = np.zeros((HEIGHT, WIDTH), np.uint8)
    right_half[:, WIDTH // 2 :] = 255
    loop = make_loop(bucketed(model, 2))
    for steps in (2, PLAIN.num_inference_steps):
        image = make_image(model, image=LEVELS, masks=(replace(MASK, levels=right_half),), num_inference_steps=steps)
        assert image.known is not None
        loop.add(image)
        loops.run_to_end(loop)
        left, right = image.latents.chunk(2, dim=-1)
        torch.testing.assert_close(left, image.known.latents.chunk(2, dim=-1)[0])
        assert not torch.isclose(right, image.known.latents.chunk(2, dim=-1)[1]).any()


@both_loops
def test_images_beyond_the_capacity_wait(make_loop: MakeLoop, model: LoadedModel) -> None:
    """The capacity is the batch of the largest bucket, until it is lowered."""
    unet = bucketed(model, 2, 8)
    loop = make_loop(unet)
    assert loop.capacity == 8
    loop.capacity = 4
    images = [make_image(model, seed=seed, num_inference_steps=2 + seed) for seed in range(5)]
    denoise(loop, images)
    assert loop.images == []
    calls = [call["sample"] for engine in loops.stubs(unet) for call in engine.seen]
    assert {len(sample[:4].unique(dim=0)) for sample in calls} <= {1, 2}
    for seed, image in enumerate(images):
        assert_latents(image.latents, seed=seed, num_inference_steps=2 + seed)


@both_loops
def test_end_of_guidance_makes_room_for_another_image(make_loop: MakeLoop, model: LoadedModel) -> None:
    loop = make_loop(bucketed(model, 4))
    for seed in (1, 2):
        loop.add(make_image(model, seed=seed, guidance_end=0.5))
    assert slots(loop.images) == 4 and not has_room(loop, 1)
    loop.step()
    assert not has_room(loop, 1)
    loop.step()
    assert has_room(loop, 2) and not has_room(loop, 3)
    for seed in (3, 4):
        loop.add(make_image(model, seed=seed, guidance_scale=1.0))
    assert slots(loop.images) == 4 and not has_room(loop, 1)


@both_loops
def test_guidance_that_starts_late_keeps_its_place(make_loop: MakeLoop, model: LoadedModel) -> None:
    """Two images that are guided from the fourth step on fill a loop of four entries. The third one waits for them."""
    unet = bucketed(model, 2, 4)
    loop = make_loop(unet)

    def late(seed: int) -> ImageState:
        image = make_image(model, seed=seed, num_inference_steps=6, negative_prompt="four")
        image.plan = replace(image.plan, entries=np.array([1, 1, 1, 2, 2, 1], np.int8))
        return image

    def alone(seed: int) -> torch.Tensor:
        image = late(seed)
        denoise(loops.eager_loop(bucketed(model, 2)), [image])
        return image.latents

    images = [late(seed) for seed in range(3)]
    loop.add(images[0])
    assert has_room(loop, 2)
    loop.add(images[1])
    for _ in range(5):
        assert slots(loop.images) == 4 and not has_room(loop, 1)
        loop.step()
    assert slots(loop.images) == 2 and has_room(loop, 2)
    calls = [len(call["sample"]) for engine in loops.stubs(unet) for call in engine.seen]
    assert sorted(calls) == [2, 2, 2, 4, 4]
    loop.add(images[2])
    loops.run_to_end(loop)
    for seed, image in enumerate(images):
        torch.testing.assert_close(image.latents, alone(seed), rtol=1e-4, atol=1e-4)


def test_a_failed_loop_is_empty(model: LoadedModel) -> None:
    loop: Loop = loops.eager_loop(DenoiserVariant(model.engines[spec.UNET]))
    stub(model, spec.UNET).fails = EngineError("no")
    with pytest.raises(EngineError):
        denoise(loop, [make_image(model)])
    assert loop.images == []


compiled_requests = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from(["a large red circle", "two green squares on white", "a blue line"]),
        "negative_prompt": st.sampled_from([None, "", "a triangle"]),
        "seed": st.integers(0, 2**32 - 1),
        # LCM adds new noise at each step, which multiplies rounding errors: see docs/log/correctness.md.
        "scheduler": st.sampled_from([name for name in SAMPLERS if name != "LCM"]),
        "num_inference_steps": st.integers(1, 6),
        "guidance_scale": st.sampled_from([1.0, 2.0, 7.5]),
        "guidance_end": st.sampled_from([0.0, 0.4, 1.0]),
        "guidance_rescale": st.sampled_from([0.0, 0.7]),
        "clip_skip": st.sampled_from([0, 1]),
    }
)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mix=st.lists(st.tuples(compiled_requests, st.integers(0, 4)), min_size=2, max_size=5))
def test_image_is_independent_of_the_batch(mix: Mix, loaded: Loaded) -> None:
    """A request alone and in any mix, joining at any step: at most 1 of 255 apart in fp32."""
    runner = Runner(loaded.model)
    plans = [runner.plan(params_of(loaded, **request)) for request, _ in mix]
    images = [plan.images()[0] for plan in plans]
    for plan, image in zip(plans, images, strict=True):
        runner.advance(plan, image, EncodedOnce([0]))
    loops.run_mix(loaded.model.loop(spec.UNET, 128, 128), images, [first_step for _, first_step in mix])
    for plan, image in zip(plans, images, strict=True):
        assert runner.advance(plan, image, EncodedOnce([0])) is None and image.pixels is not None
        pixels = image.pixels.wait()
        assert pixels is not None
        assert largest_difference(pixels, image_of(loaded.model, plan.params)) <= 1
