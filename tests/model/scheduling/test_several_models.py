"""Models on one device share a scheduler: their loops take turns, and an image depends on its own model only."""

import random
from pathlib import Path

import pytest

from model.adapters.layers import AdapterSet
from model.denoising.eager_loop import EagerLoop
from model.denoising.loop import ImageState
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.runner import Runner
from model.scheduling.scheduler import Scheduler
from model.settings import Limits
from tests.support.adapter_model import adapter_model
from tests.support.linear_networks import linear_model, stub
from tests.support.scheduling import params, paused, results, served_together, settle


def models(count: int) -> list[LoadedModel]:
    """Models with different VAEs."""
    made = [linear_model() for _ in range(count)]
    for number, model in enumerate(made):
        model.settings = model.settings.model_copy(update={"vae_scaling_factor": 0.5 + 0.2 * number})
    return made


def scheduler_of(served: list[LoadedModel], limits: Limits | None = None) -> Scheduler:
    return Scheduler([Runner(model) for model in served], limits or Limits(), lambda: None)


def test_images_are_those_of_a_server_of_their_model_alone() -> None:
    served, generator = models(3), random.Random(0)
    scheduler = scheduler_of(served, Limits(max_queue=200))
    requests = [
        (
            params(seed, width=generator.choice((64, 96)), num_images=generator.choice((1, 3)),
                   use_refiner=generator.random() < 0.3),
            generator.randrange(3),
        )
        for seed in range(40)
    ]  # fmt: skip
    with paused(scheduler):
        jobs = [scheduler.submit(request, model=number) for request, number in requests]
    found = results(*jobs)
    scheduler.close()
    alone = [[request for request, number in requests if number == model] for model in range(3)]
    expected = [iter(served_together(model, own)) for model, own in zip(models(3), alone, strict=True)]
    for result, (_, number) in zip(found, requests, strict=True):
        assert result.images == next(expected[number]).images
    one, other = (served_together(model, [params(0)])[0].images for model in models(2))
    assert one != other


def test_loops_of_models_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[EagerLoop] = []
    original = EagerLoop.step

    def step(loop: EagerLoop) -> list[ImageState]:
        steps.append(loop)
        return original(loop)

    monkeypatch.setattr(EagerLoop, "step", step)
    served = models(2)
    scheduler = scheduler_of(served)
    with paused(scheduler):
        jobs = [scheduler.submit(params(seed, num_inference_steps=6), model=seed % 2) for seed in range(6)]
    results(*jobs)
    scheduler.close()
    first, second = (model.loop("unet", 64, 96) for model in served)
    assert steps == [first, second] * 6, "three images of each model share a call, and no call has both models"


def test_a_merge_waits_for_its_own_model_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapted, other = adapter_model(tmp_path).model, models(2)[1]
    assert adapted.adapters is not None
    adapted.adapters.load(["a"])
    in_flight: list[int] = []  # images of the other model, at each merge
    original = LoadedModel.use_adapters

    def use_adapters(model: LoadedModel, adapters: AdapterSet) -> None:
        in_flight.append(len(other.loop("unet", 64, 96).images))
        original(model, adapters)

    monkeypatch.setattr(LoadedModel, "use_adapters", use_adapters)
    scheduler = scheduler_of([adapted, other])
    long = scheduler.submit(params(1, num_inference_steps=100, num_images=8), model=1)
    settle(scheduler)
    merged, plain = results(scheduler.submit(params(2, loras=(("a", 1.0),))), scheduler.submit(params(2)))
    assert in_flight[0] == 8 and merged.images != plain.images
    results(long)
    scheduler.close()


def test_an_error_of_one_model_fails_its_requests_only() -> None:
    served = models(2)
    stub(served[0], "unet").fails = ValueError("broken")
    scheduler = scheduler_of(served)
    with paused(scheduler):
        jobs = [scheduler.submit(params(seed), model=seed % 2) for seed in range(4)]
    for job in jobs[::2]:
        with pytest.raises(ValueError, match="broken"):
            results(job)
    assert len(results(*jobs[1::2])) == 2
    scheduler.close()


def test_sizes_at_once_count_for_all_models() -> None:
    served = models(2)
    scheduler = scheduler_of(served, Limits(sizes_at_once=1))
    with paused(scheduler):
        jobs = [
            scheduler.submit(params(seed, width=width), model=model)
            for seed, (width, model) in enumerate(((96, 0), (64, 1), (96, 1)))
        ]
    results(*jobs)
    scheduler.close()
