"""The captured parts of a step of one network, and the engines that divide a step's batch."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from model.engines.engine import Engine, EngineSet


class Replays(NamedTuple):
    """The replays of one network by batch, and for a single guided image if two runs of batch 1 are faster."""

    by_batch: dict[int, Callable[[], None]]
    single_image: Callable[[], None] | None

    def smallest(self, needed: int, images: int) -> Callable[[], None]:
        """Return the replay of the smallest batch that holds `needed` entries, of so many images."""
        if self.single_image is not None and images == 1 and needed == 2:
            return self.single_image
        return self.by_batch[self.batch(needed)]

    def batch(self, needed: int) -> int:
        """Return the smallest batch that holds `needed` entries."""
        return next(batch for batch in self.by_batch if batch >= needed)


def call_all(calls: Sequence[Callable[[], None]]) -> None:
    """Call all of them, in order."""
    for call in calls:
        call()


def divide_batches(
    network: EngineSet, height: int, width: int, ranks: int = 1
) -> tuple[dict[int, list[Engine]], dict[int, list[Engine]]]:
    """Return the engines that run a step together, by the batch of the step: for any images, and for the CFG variants.

    The variants serve images that are all guided against zeros (see `GraphLoop._map_for_cfg_variants`). Two engines of
    batch 1 each run one half of a single guided image.

    With several `ranks` each of them runs the engines for its entries, and no variants: a half of guidance without text
    would not be faster than the rank that runs the other half.
    """
    if ranks > 1:
        of_a_rank, _ = divide_batches(network, height, width)
        return {ranks * batch: engines for batch, engines in of_a_rank.items()}, {}
    engines_by_batch = {engine.bucket.batch.max: [engine] for engine in network.serving(height, width)}
    cfg_engines_by_batch = {engine.bucket.batch.max: [engine] for engine in network.of_size(height, width, "both")}
    if 1 in engines_by_batch:
        engines_by_batch.setdefault(2, 2 * engines_by_batch[1])
        for engine in network.of_size(height, width, "uncond"):  # of batch 1, like the conditional one
            cfg_engines_by_batch[2] = [*engines_by_batch[1], engine]
    return engines_by_batch, cfg_engines_by_batch
