"""Compare served images with the same images in fp16, while the server has nothing else to do.

One in N finished images of an 8-bit UNet is generated again, one step at a time, with the UNet and the VAE decoder in
fp16. Both pictures are compared before post-processing. A request that arrives ends the comparison. Of all images, at
most one is kept for it, and nothing of it afterwards.

The fp16 steps run op by op, in the smallest batch that holds one image: graphs would hold memory all the time. Only
images without LoRA adapters are compared, and only while none is merged into the weights.
"""

import json
import logging
import threading
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import NamedTuple

from model import metrics
from model.cuda.probe import DeviceProbe
from model.images.distance import psnr
from model.images.pixels import Pixels
from model.pipeline.encoded_once import EncodedOnce
from model.pipeline.loaded_model import LoadedModel, make_loop
from model.pipeline.params import GenerationParams
from model.pipeline.runner import Runner

logger = logging.getLogger("preheat")

MAX_DECIBELS = 100.0  # of equal pictures, whose ratio is infinite and would make the metric's sum infinite


class _Candidate(NamedTuple):
    """A finished image that was not compared yet: its request for this image alone, and its pixels."""

    params: GenerationParams
    pixels: Pixels


class ImageComparison:
    """Any thread may call `offer`. The rest runs on the scheduler's thread."""

    def __init__(self, model: LoadedModel, every: int) -> None:
        """Compare one in `every` images that are offered. `model` must have its 8-bit networks in fp16, too."""
        self.model, self._every = model, every
        self._reference = model.in_fp16()
        self._probe = DeviceProbe(model.device)
        self._lock = threading.Lock()  # guards the next two
        self._offered = 0
        self._candidate: _Candidate | None = None
        self._work: Generator[None, None, None] | None = None
        self._outcome = "dropped"  # of the work, if it ended now

    def offer(self, params: GenerationParams, index: int, pixels: Pixels) -> bool:
        """Count image `index` of a request, and keep it if its turn has come. Return True if it was kept.

        `pixels`: uint8 [height, width, 3], as decoded. An image that still waits is dropped for a newer one.
        """
        if params.loras:
            return False
        with self._lock:
            self._offered += 1
            if self._offered % self._every:
                return False
            if self._candidate is not None:
                metrics.COMPARISONS.labels("dropped").inc()
            self._candidate = _Candidate(replace(params, seed=params.seeds[index], num_images=1), pixels)
        return True

    @property
    def work(self) -> Iterator[None] | None:
        """The comparison that runs, or the next one. Each part takes a step. None: no image waits."""
        if self._work is not None and self.model.active_adapters != ():
            self.end()  # they were merged since its last step
        if self._work is None and (candidate := self._take()) is not None:
            if self.model.active_adapters != ():
                metrics.COMPARISONS.labels("dropped").inc()
            else:
                self._work, self._outcome = self._compare(candidate), "dropped"
        return self._work

    def end(self) -> None:
        """Count the comparison that runs as finished, or drop it. Drop the image that waits."""
        if self._take() is not None:
            metrics.COMPARISONS.labels("dropped").inc()
        if self._work is not None:
            self._work.close()
            self._work = None
            metrics.COMPARISONS.labels(self._outcome).inc()

    def warm_up(self, params: GenerationParams) -> None:
        """Generate an image as comparisons do, so that their memory is allocated before the server is ready."""
        for _ in self._regenerate(params):
            pass

    def _take(self) -> _Candidate | None:
        with self._lock:
            candidate, self._candidate = self._candidate, None
        return candidate

    def _compare(self, candidate: _Candidate) -> Generator[None, None, None]:
        """Generate an image again, and report its distance. Yields after each step."""
        try:
            pixels = yield from self._regenerate(candidate.params)
        except Exception:
            self._outcome = "failed"
            raise
        if pixels is None:
            self._outcome = "failed"
            return
        self._outcome = "compared"
        decibels = min(psnr(pixels, candidate.pixels), MAX_DECIBELS)
        metrics.COMPARISON_DECIBELS.observe(decibels)
        height, width, _ = pixels.shape
        size = {"width": width, "height": height, "steps": candidate.params.num_inference_steps}
        logger.info(json.dumps({"event": "compared", "psnr_decibels": round(decibels, 2), **size}))

    def _regenerate(self, params: GenerationParams) -> Generator[None, None, Pixels | None]:
        """Generate the only image of a request in fp16. Yields after each step, once the device has finished it.

        Returns uint8 [height, width, 3], or None if the image holds NaN or infinity.
        """
        runner = Runner(self._reference)
        plan = runner.plan(params)
        [image], encoded = plan.images(), EncodedOnce([0])
        while (key := runner.advance(plan, image, encoded)) is not None:
            loop = make_loop(self._reference, *key, use_graphs=False)
            loop.add(image)
            while loop.images:
                loop.step()
                self._probe.now()
                yield
        assert image.pixels is not None
        return image.pixels.wait()
