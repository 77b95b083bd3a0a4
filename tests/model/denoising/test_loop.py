"""Images join and leave a loop between steps. The result of each is independent of the others, in both loops."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model.denoising.loop import ImageState, Known, Loop, has_room, unet_batch
from model.denoising.sampler_names import SAMPLERS
from model.engines.engine import EngineSet
from model.engines.signatures import unet_signature
from model.errors import EngineError
from model.images.encode import Pixels
from model.loading.load import Loaded
from model.pipeline import spec
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.params import GenerationParams
from model.pipeline.runner import Runner
from model.pipeline.text_to_image import denoise
from tests.support.images import largest_difference
from tests.support.linear_networks import PLAIN, WIDTHS, Stub, linear_model, stub
from tests.support.loops import (
    HEIGHT,
    LEVELS,
    MASK,
    WIDTH,
    MakeLoop,
    Mix,
    assert_latents,
    bucketed,
    check_mix,
    eager_loop,
    graph_loop,
    make_image,
    mixes,
    run_to_end,
    stubs,
)
from tests.support.parity import image_of, params_of

both_loops = pytest.mark.parametrize("make_loop", [eager_loop, graph_loop])


@pytest.fixture
def model() -> LoadedModel:
    return linear_model()


@settings(max_examples=60, deadline=None)
@given(mix=mixes, batches=st.sampled_from([(1, 2, 4, 8), (2, 5), (3,), (2,), (1,)]))
def test_any_mix_equals_the_images_alone(mix: Mix, batches: tuple[int, ...]) -> None:
    model = linear_model()
    check_mix(eager_loop(bucketed(model, *batches)), model, mix)
    for guided in ((), (2, 4, 8)):
        check_mix(graph_loop(bucketed(model, *batches, guided=guided)), model, mix)


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
    run_to_end(loop)
    assert_latents(other.latents, seed=2, scheduler="DPM++ 2M")
    assert_latents(following.latents, seed=3, scheduler="DPM++ 2M SDE Karras")


@both_loops
def test_latents_are_copies(make_loop: MakeLoop, model: LoadedModel) -> None:
    """Those that an image brings, and those that a preview gets."""
    loop, image = make_loop(bucketed(model, 2)), make_image(model)
    original = image.latents
    loop.add(image)
    with torch.inference_mode():
        original.zero_()
        loop.step()
        assert loop.latents(image).any()
        loop.latents(image).zero_()
    assert loop.latents(image).any()
    run_to_end(loop)
    assert_latents(image.latents)


@both_loops
def test_each_step_keeps_the_image_outside_of_the_mask(make_loop: MakeLoop, model: LoadedModel) -> None:
    right_half = np.zeros((HEIGHT, WIDTH), np.uint8)
    right_half[:, WIDTH // 2 :] = 255
    loop = make_loop(bucketed(model, 2))
    for steps in (1, PLAIN.num_inference_steps):
        image = make_image(model, image=LEVELS, masks=(replace(MASK, levels=right_half),))
        assert image.known is not None
        loop.add(image)
        for _ in range(steps):
            loop.step()
        expected = image.known.latents
        if loop.images:  # noised as much as the next step expects
            loop.take(image)
            signal, noise = image.schedule.noising[1].tolist()
            expected = signal * image.known.latents + noise * image.known.noise
        left, right = image.latents.chunk(2, dim=-1)
        torch.testing.assert_close(left, expected.chunk(2, dim=-1)[0])
        assert not torch.isclose(right, expected.chunk(2, dim=-1)[1]).any()


def with_chunks(chunks: int | None) -> LoadedModel:
    """Return a model whose UNet reads so many chunks of text."""
    model = linear_model()
    stub(model, spec.UNET).signature = unet_signature(replace(WIDTHS, unet_chunks=chunks), "float32")
    return model


def test_texts_of_other_lengths_share_a_batch() -> None:
    def images() -> list[ImageState]:
        generator = torch.Generator().manual_seed(0)
        made = [make_image(linear_model(), seed=seed, negative_prompt="four") for seed in range(3)]
        for image, chunks in zip(made, (1, 2, 4), strict=True):
            shape = (1, chunks * WIDTHS.tokens, WIDTHS.keys_values_width)
            image.cond.inputs["keys_values"] = torch.randn(shape, generator=generator)
        return made

    alone = images()
    for image in alone:
        denoise(eager_loop(bucketed(with_chunks(None), 6)), [image])
    loops: list[tuple[MakeLoop, int | None]] = [(graph_loop, 4), (eager_loop, 4), (eager_loop, None)]
    for make_loop, chunks in loops:
        together = images()
        denoise(make_loop(bucketed(with_chunks(chunks), 6)), together)
        for image, expected in zip(together, alone, strict=True):
            torch.testing.assert_close(image.latents, expected.latents, rtol=1e-4, atol=1e-4)


class InpaintStub(Stub):
    """A UNet that takes further channels after the latents, and does not use them."""

    def outputs(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return super().outputs({**inputs, "sample": inputs["sample"][:, :4]})


@both_loops
def test_unet_gets_the_extra_channels_of_each_image(make_loop: MakeLoop, model: LoadedModel) -> None:
    sample, *others = stub(model, spec.UNET).signature.inputs
    wide = sample.model_copy(update={"shape": ("rows", 9, *sample.shape[2:])})
    signature = stub(model, spec.UNET).signature.model_copy(update={"inputs": (wide, *others)})
    unet = InpaintStub(spec.UNET, signature)
    unet.bucket = bucketed(model, 2).engines[0].bucket
    loop = make_loop(EngineSet([unet]))
    extra = torch.randn(1, 5, HEIGHT // 8, WIDTH // 8)
    plain, inpainted = (make_image(model, guidance_scale=1.0, num_inference_steps=2, seed=seed) for seed in (1, 2))
    inpainted.extra_channels = extra
    loop.add(inpainted)
    loop.add(plain)
    run_to_end(loop)
    for call in unet.seen[-2:]:
        assert torch.equal(call["sample"][:, 4:], torch.cat([extra, torch.zeros_like(extra)]))
    unet.seen.clear()
    again = make_image(model, guidance_scale=1.0, num_inference_steps=2, seed=1)
    denoise(loop, [again])  # in the slot of the inpainted image
    assert not any(call["sample"][0, 4:].any() for call in unet.seen)
    torch.testing.assert_close(again.latents, plain.latents)


@both_loops
def test_images_beyond_the_capacity_wait(make_loop: MakeLoop, model: LoadedModel) -> None:
    """The capacity is that of the largest bucket, until it is lowered."""
    unet = bucketed(model, 2, 8)
    loop = make_loop(unet)
    assert loop.capacity == 8
    loop.capacity = 4
    images = [make_image(model, seed=seed, num_inference_steps=2 + seed) for seed in range(5)]
    denoise(loop, images)
    assert loop.images == []
    calls = [call["sample"] for engine in stubs(unet) for call in engine.seen]
    assert {len(sample[:4].unique(dim=0)) for sample in calls} <= {1, 2}
    for seed, image in enumerate(images):
        assert_latents(image.latents, seed=seed, num_inference_steps=2 + seed)


@both_loops
def test_end_of_guidance_makes_room_for_another_image(make_loop: MakeLoop, model: LoadedModel) -> None:
    loop = make_loop(bucketed(model, 4))
    for seed in (1, 2):
        loop.add(make_image(model, seed=seed, end_cfg_frac=0.5))
    assert unet_batch(loop.images) == 4 and not has_room(loop, 1)
    loop.step()
    assert not has_room(loop, 1)
    loop.step()
    assert has_room(loop, 2) and not has_room(loop, 3)
    for seed in (3, 4):
        loop.add(make_image(model, seed=seed, guidance_scale=1.0))
    assert unet_batch(loop.images) == 4 and not has_room(loop, 1)


def test_a_failed_loop_is_empty(model: LoadedModel) -> None:
    loop: Loop = eager_loop(model.engines[spec.UNET])
    stub(model, spec.UNET).fails = EngineError("no")
    with pytest.raises(EngineError):
        denoise(loop, [make_image(model)])
    assert loop.images == []


# -- on the compiled engines ------------------------------------------------------------------------------------------

compiled_requests = st.fixed_dictionaries(
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


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mix=st.lists(st.tuples(compiled_requests, st.integers(0, 4)), min_size=2, max_size=5))
def test_image_is_independent_of_the_batch(mix: Mix, loaded: Loaded) -> None:
    """A request alone and in any mix, joining at any step: at most 1 of 255 apart in fp32."""
    batch = [params_of(loaded, **request) for request, _ in mix]
    images = generate_mix(loaded.model, batch, [first_step for _, first_step in mix])
    for params, image in zip(batch, images, strict=True):
        assert largest_difference(image, image_of(loaded.model, params)) <= 1


def generate_mix(model: LoadedModel, batch: list[GenerationParams], first_steps: list[int]) -> list[Pixels]:
    """Return the images of requests that join the loop at these steps, or as soon as there is room."""
    loop, runner = model.loop(spec.UNET, 128, 128), Runner(model)
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
    for plan, image in zip(plans, images, strict=True):
        assert runner.advance(plan, image) is None
    decoded = [image.pixels.wait() for image in images if image.pixels is not None]
    return [pixels for pixels in decoded if pixels is not None]
