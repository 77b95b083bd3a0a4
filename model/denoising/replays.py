"""The captured parts of a step of one network, and the engines that divide a step's batch."""

from collections.abc import Callable, Sequence

from model.engines.engine import Engine, EngineSet

Replays = dict[int, Callable[[], None]]
"""The replays of one network by batch, the smallest first."""


def smallest_batch(replays: Replays, needed: int) -> int:
    """Return the smallest batch that holds `needed` entries."""
    return next(batch for batch in replays if batch >= needed)


def call_all(calls: Sequence[Callable[[], None]]) -> None:
    """Call all of them, in order."""
    for call in calls:
        call()


def divide_batches(
    network: EngineSet, height: int, width: int, ranks: int = 1
) -> tuple[dict[int, list[Engine]], dict[int, list[Engine]]]:
    """Return the engines that run a step, by the batch of the step: for any images, and of the variant for guided ones.

    The variant serves images that are all guided against zeros (see `GraphLoop._map_for_guided_variant`). A batch of 2
    without an engine of its own is divided: the engine of batch 1 runs twice.

    With several `ranks` each of them runs the engines for its entries, and no variant: a half of guidance without text
    would not be faster than the rank that runs the other half.
    """
    if ranks > 1:
        of_a_rank, _ = divide_batches(network, height, width)
        return {ranks * batch: engines for batch, engines in of_a_rank.items()}, {}
    engines_by_batch = {engine.bucket.batch.max: [engine] for engine in network.serving(height, width)}
    if 1 in engines_by_batch:
        engines_by_batch.setdefault(2, 2 * engines_by_batch[1])
    guided = {engine.bucket.batch.max: [engine] for engine in network.of_size(height, width, guided=True)}
    return engines_by_batch, guided
