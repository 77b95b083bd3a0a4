"""What the images of a request share on the device is freed with the last of them, while the request is still known."""

import gc
import weakref
from collections.abc import Collection
from dataclasses import replace

import numpy as np
import pytest

from model.denoising.loop import Conditioning
from model.errors import Cancelled, EngineError
from model.pipeline import spec
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.params import Mask
from model.pipeline.vae import LatentDistribution
from model.scheduling.scheduler import Scheduler
from tests.support.linear_networks import stub
from tests.support.scheduling import Gate, params, results, settle
from tests.support.waiting import eventually

LEVELS = np.zeros((64, 96, 3), np.uint8)
MASKS = tuple(Mask(np.full((64, 96), 255, np.uint8), prompt, "six", strength=0.75) for prompt in ("one", "two"))
REQUEST = params(1, image=LEVELS, masks=MASKS, num_images=3, use_refiner=True)


class Alive:
    """The objects of some types that were made since this one."""

    def __init__(self, *types: type) -> None:
        self._types = types
        self._before = [weakref.ref(found) for found in self._all()]

    def _all(self) -> list[object]:
        gc.collect()
        return [found for found in gc.get_objects() if type(found) in self._types]

    def __len__(self) -> int:
        before = {id(reference()) for reference in self._before}
        return sum(id(found) not in before for found in self._all())


@pytest.mark.parametrize("indices", [None, (1,), (0, 2)], ids=["all images", "one of three", "two of three"])
def test_nothing_is_held_for_images_of_other_servers(indices: Collection[int] | None, scheduler: Scheduler) -> None:
    alive = Alive(Conditioning, LatentDistribution)
    job = scheduler.submit(REQUEST, indices=indices)
    [result] = results(job)
    assert len(result.images) == len(indices or range(3))
    eventually(lambda: not len(alive), "no text and no input image on the device")


@pytest.mark.parametrize("end", ["cancelled", "failed"])
def test_request_that_ends_early_frees_its_input_image(
    end: str, model: LoadedModel, gate: Gate, scheduler: Scheduler
) -> None:
    alive = Alive(LatentDistribution)
    job = scheduler.submit(replace(REQUEST, use_refiner=False, num_inference_steps=12))
    gate.run(2)
    assert len(alive) == 1, "two of three images have joined"
    if end == "failed":
        stub(model, spec.UNET).fails = EngineError("it does not run")
    else:
        scheduler.cancel(job, Cancelled("The client left."))
    gate.open()
    with pytest.raises((Cancelled, EngineError)):
        results(job)
    settle(scheduler)
    assert not len(alive)
