"""Rows that join and leave between steps: each goes its own way, whatever its company."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model.api.request import GenerationRequest, resolve
from model.denoising.eager_loop import EagerLoop
from model.denoising.loop import ImageState, StepNetworks, has_room, unet_batch
from model.denoising.sampler_names import SAMPLERS
from model.engines.engine import EngineSet
from model.errors import EngineError
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
    return EagerLoop(model.step_networks(spec.UNET), HEIGHT, WIDTH)


def row_of(model: LoadedModel, **asked: object) -> ImageState:
    request = replace(PLAIN, **asked)  # type: ignore[arg-type]
    runner = Runner(model)
    plan = runner.plan(request)
    [row] = plan.images()
    runner.advance(plan, row)
    return row


def alone(model: LoadedModel, **asked: object) -> torch.Tensor:
    row = row_of(model, **asked)
    denoise(make_loop(model, spec.UNET, HEIGHT, WIDTH), [row])
    return row.latents


def test_a_newcomer_waits_one_step_and_each_finishes_at_its_own(model: LoadedModel, loop: EagerLoop) -> None:
    first, second = row_of(model, num_inference_steps=4), row_of(model, num_inference_steps=2, scheduler="Euler a")
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
    torch.testing.assert_close(first.latents, alone(model, num_inference_steps=4))
    torch.testing.assert_close(second.latents, alone(model, num_inference_steps=2, scheduler="Euler a"))


def test_what_a_row_leaves_behind_is_not_found_by_the_next(model: LoadedModel, loop: EagerLoop) -> None:
    """DPM++ 2M reads the previous denoised estimate: of its own row, and nothing at the first step."""
    expected = alone(model, scheduler="DPM++ 2M")
    unet = stub(model, spec.UNET)
    unet.poison = (len(unet.seen), float("nan"))
    broken = row_of(model, seed=11)
    loop.add(broken)
    loop.step()
    assert not loop.latents(broken).isfinite().all()
    row = row_of(model, scheduler="DPM++ 2M")
    loop.add(row)
    loop.step()
    loop.remove(broken)
    assert loop.images == [row]
    while loop.images:
        loop.step()
    torch.testing.assert_close(row.latents, expected)


def test_a_row_that_leaves_costs_its_companions_nothing(model: LoadedModel, loop: EagerLoop) -> None:
    rows = [row_of(model, seed=seed, scheduler="DPM++ 2M SDE Karras") for seed in (1, 2, 3)]
    for row in rows:
        loop.add(row)
    loop.step()
    loop.remove(rows[1])
    seen = stub(model, spec.UNET).seen
    loop.step()
    assert len(seen[-1]["sample"]) == 4
    while loop.images:
        loop.step()
    for row, seed in ((rows[0], 1), (rows[2], 3)):
        torch.testing.assert_close(row.latents, alone(model, seed=seed, scheduler="DPM++ 2M SDE Karras"))


def test_the_estimate_for_a_preview_is_a_copy_and_ends_as_the_result(model: LoadedModel, loop: EagerLoop) -> None:
    row = row_of(model, num_inference_steps=2)
    loop.add(row)
    assert not loop.latents(row).any()
    loop.step()
    before = loop.latents(row)
    before.zero_()
    assert loop.latents(row).any()
    second = loop.latents(row)
    assert loop.step() == [row]
    assert second.shape == row.latents.shape and not torch.equal(second, row.latents)


def test_joining_copies(model: LoadedModel, loop: EagerLoop) -> None:
    expected = alone(model)
    row = row_of(model)
    given = row.latents
    loop.add(row)
    with torch.inference_mode():
        given.zero_()
    while loop.images:
        loop.step()
    torch.testing.assert_close(row.latents, expected)


@pytest.mark.parametrize("rows", [(2,), (2, 8), (1,)])
def test_the_largest_bucket_says_how_many_rows_fit(model: LoadedModel, rows: tuple[int, ...]) -> None:
    engine = stub(model, spec.UNET)
    engines = []
    for count in rows:
        sized = Span(min=HEIGHT, max=HEIGHT), Span(min=WIDTH, max=WIDTH)
        engines.append(replace(engine))
        engines[-1].bucket = Bucket(batch=Span(min=count, max=count), height=sized[0], width=sized[1])
    networks = StepNetworks(EngineSet(engines), ["time_embeds"])
    assert EagerLoop(networks, HEIGHT, WIDTH).capacity == max(rows)
    with pytest.raises(EngineError, match="No loaded unet engine serves 64x64"):
        EagerLoop(networks, 64, 64)


def test_more_rows_than_fit_take_turns(model: LoadedModel, loop: EagerLoop) -> None:
    loop.capacity = 4
    rows = [row_of(model, seed=seed, num_inference_steps=2 + seed) for seed in range(5)]
    denoise(loop, rows)
    assert loop.images == []
    for seed, row in enumerate(rows):
        torch.testing.assert_close(row.latents, alone(model, seed=seed, num_inference_steps=2 + seed))


def test_an_image_whose_guidance_ends_makes_room_for_one_more(model: LoadedModel, loop: EagerLoop) -> None:
    loop.capacity = 4
    first, second = (row_of(model, seed=seed, end_cfg_frac=0.5) for seed in (1, 2))
    plain = [row_of(model, seed=seed, guidance_scale=1.0) for seed in (3, 4)]
    loop.add(first)
    loop.add(second)
    assert unet_batch(loop.images) == 4 and not has_room(loop, 1)
    loop.step()
    assert not has_room(loop, 1)
    loop.step()
    assert has_room(loop, 2) and not has_room(loop, 3)
    for row in plain:
        loop.add(row)
    assert unet_batch(loop.images) == 4 and not has_room(loop, 1)
    with pytest.raises(AssertionError):
        loop.add(row_of(model, guidance_scale=1.0))
    while loop.images:
        loop.step()
    for seed, row in ((1, first), (2, second)):
        torch.testing.assert_close(row.latents, alone(model, seed=seed, end_cfg_frac=0.5))
    for seed, row in ((3, plain[0]), (4, plain[1])):
        torch.testing.assert_close(row.latents, alone(model, seed=seed, guidance_scale=1.0))


def test_a_loop_that_failed_is_empty(model: LoadedModel, loop: EagerLoop) -> None:
    stub(model, spec.UNET).fails = EngineError("no")
    with pytest.raises(EngineError):
        denoise(loop, [row_of(model)])
    assert loop.images == []


def test_the_loop_of_a_size_is_made_once(model: LoadedModel) -> None:
    one = model.loop(spec.UNET, 64, 96)
    assert model.loop(spec.UNET, 64, 96) is one
    assert model.loop(spec.UNET, 96, 64) is not one
    assert model.loop(spec.REFINER_UNET, 64, 96) is not one


# -- on the compiled engines ------------------------------------------------------------------------------------------

requests = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from(["a large red circle", "two green squares on white", "a blue line"]),
        "negative_prompt": st.sampled_from([None, "", "a triangle"]),
        "seed": st.integers(0, 2**32 - 1),
        # LCM noises the picture anew at each step, which multiplies rounding: see docs/log/correctness.md.
        "scheduler": st.sampled_from([name for name in SAMPLERS if name != "LCM"]),
        "num_inference_steps": st.integers(1, 6),
        "guidance_scale": st.sampled_from([1.0, 2.0, 7.5]),
        "end_cfg_frac": st.sampled_from([0.0, 0.4, 1.0]),
    }
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mix=st.lists(st.tuples(requests, st.integers(0, 4)), min_size=2, max_size=5))
def test_a_picture_does_not_depend_on_its_company(mix: list[tuple[dict[str, object], int]], loaded: Loaded) -> None:
    """The same request alone and in any mix, joining at any step: at most 1 of 255 apart in fp32."""
    asked = [
        resolve(GenerationRequest.model_validate({**request, "width": 128, "height": 128}), loaded.served)
        for request, _ in mix
    ]
    together = list(_drawn_in_a_mix(loaded.model, asked, [joins for _, joins in mix]))
    for request, picture in zip(asked, together, strict=True):
        [expected] = generate(loaded.model, [request])[0]
        assert np.abs(picture.astype(int) - expected.astype(int)).max() <= 1


def _drawn_in_a_mix(
    model: LoadedModel, asked: list[GenerationParams], joins: list[int]
) -> Iterator[np.typing.NDArray[np.uint8]]:
    loop = model.loop(spec.UNET, 128, 128)
    runner = Runner(model)
    plans = [runner.plan(request) for request in asked]
    rows = [plan.images()[0] for plan in plans]
    for plan, row in zip(plans, rows, strict=True):
        runner.advance(plan, row)
    waiting = sorted(zip(joins, range(len(rows)), rows, strict=True))
    step = 0
    while waiting or loop.images:
        while waiting and waiting[0][0] <= step and has_room(loop, waiting[0][2].unet_batch):
            loop.add(waiting.pop(0)[2])
        if loop.images:
            loop.step()
        step += 1
    for plan, row in zip(plans, rows, strict=True):
        assert runner.advance(plan, row) is None and row.pixels is not None
        picture = row.pixels.wait()
        assert picture is not None
        yield picture
