"""Loops that divide their batches among ranks, which are threads here, give the latents of one loop."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from model.cuda.graphs import StepQueue
from model.denoising.eager_loop import EagerLoop
from model.denoising.graph_loop import GraphLoop
from model.denoising.loop import ImageState, Loop
from model.denoising.networks import Denoiser, DenoiserVariant
from model.denoising.ranks import ALONE, Ranks
from model.engines.engine import EngineSet
from model.pipeline import spec
from model.pipeline.encoded_once import EncodedOnce
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.runner import Runner
from model.pipeline.text_to_image import denoise
from model.store.manifest import Bucket, Span
from tests.support.linear_networks import PLAIN, Stub, linear_model, stub
from tests.support.loops import captured

HEIGHT, WIDTH = 64, 96
DEADLINE = 30.0  # seconds, of a collective
REQUESTS = (
    {"seed": 1},
    {"seed": 2, "scheduler": "Euler a", "num_inference_steps": 3},
    {"seed": 3, "guidance_scale": 1.0, "num_inference_steps": 5},
)


class ThreadRanks(Ranks):
    """Ranks that are threads of this process. `results` and `barrier` are common to all of them."""

    def __init__(self, rank: int, barrier: threading.Barrier, results: list[torch.Tensor | None]) -> None:
        self.rank, self.size = rank, barrier.parties
        self._barrier, self._results = barrier, results

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        self._results[self.rank] = own.clone()
        self._barrier.wait(DEADLINE)
        gathered = torch.cat([result for result in self._results if result is not None])
        self._barrier.wait(DEADLINE)
        return gathered


class StaticStub(Stub):
    """An engine of one batch size, like an engine for a GPU."""

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        assert {len(tensor) for tensor in inputs.values()} == {self.bucket.batch.max}
        return super().run(inputs)


def static_unet(model: LoadedModel, *batches: int) -> EngineSet:
    """Return the UNet in static buckets, as on a GPU."""
    engines = [StaticStub(spec.UNET, stub(model, spec.UNET).signature) for _ in batches]
    sides = {"height": Span(min=HEIGHT, max=HEIGHT), "width": Span(min=WIDTH, max=WIDTH)}
    for engine, batch in zip(engines, batches, strict=True):
        engine.bucket = Bucket(batch=Span(min=batch, max=batch), **sides)
    return EngineSet(engines)


class CapturingQueue(StepQueue):
    """Runs what is captured once, as a capture on a GPU does."""

    def capture(self, work: Callable[[], None], workspace: bool, name: str) -> Callable[[], None]:
        work()
        return work


def graph_loop(denoiser: Denoiser) -> GraphLoop:
    device = torch.device("cpu")
    return captured(GraphLoop(denoiser, HEIGHT, WIDTH, device, CapturingQueue(device)))


def eager_loop(denoiser: Denoiser) -> EagerLoop:
    return EagerLoop(denoiser, HEIGHT, WIDTH)


def latents_of(
    model: LoadedModel, make_loop: Callable[[Denoiser], Loop], ranks: Ranks, batches: tuple[int, ...]
) -> list[torch.Tensor]:
    """Return the latents of REQUESTS, which share a loop of these ranks. `batches`: of the UNet's engines."""
    runner, images = Runner(model), list[ImageState]()
    for changes in REQUESTS:
        plan = runner.plan(replace(PLAIN, **changes))  # type: ignore[arg-type]
        images += plan.images()
        runner.advance(plan, images[-1], EncodedOnce([0]))
    denoiser = Denoiser((DenoiserVariant(static_unet(model, *batches)),), ranks=ranks)
    with torch.inference_mode():
        denoise(make_loop(denoiser), images)
    return [image.latents for image in images]


@pytest.mark.parametrize(("entries", "size", "shares"), [
    (2, 2, [[0], [1]]),
    (3, 2, [[0, 1], [2, 2]]),
    (1, 4, [[0], [0], [0], [0]]),
    (5, 4, [[0, 1], [2, 3], [4, 4], [4, 4]]),
])  # fmt: skip
def test_each_entry_has_a_rank_and_all_shares_are_equal(entries: int, size: int, shares: list[list[int]]) -> None:
    for rank, share in enumerate(shares):
        assert ThreadRanks(rank, threading.Barrier(size), [None] * size).share(entries) == share


@pytest.mark.parametrize("make_loop", [eager_loop, graph_loop])
@pytest.mark.parametrize("size, batches", [(2, (1,)), (3, (2,)), (2, (1, 2, 5)), (3, (1, 2, 5))])
def test_ranks_compute_the_latents_of_one_loop(
    make_loop: Callable[[Denoiser], Loop], size: int, batches: tuple[int, ...]
) -> None:
    expected = latents_of(linear_model(), make_loop, ALONE, batches)
    barrier, results = threading.Barrier(size), list[torch.Tensor | None]([None] * size)
    ranks = [ThreadRanks(rank, barrier, results) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        of_ranks = list(pool.map(lambda one: latents_of(linear_model(), make_loop, one, batches), ranks))
    for latents in of_ranks:
        for got, wanted in zip(latents, expected, strict=True):
            torch.testing.assert_close(got, wanted)
    for latents in of_ranks[1:]:
        assert all(torch.equal(*pair) for pair in zip(latents, of_ranks[0], strict=True)), "ranks must agree exactly"
