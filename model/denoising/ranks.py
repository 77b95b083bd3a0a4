"""The division of a UNet's batch among ranks: processes with a GPU each, which run the same steps of the same images.

Each rank runs the networks of a step for its own entries of the batch. Then all ranks get the predictions of all
entries, and each computes guidance and the sampler's update for all images. So the latents are the same on all ranks.
"""

import torch


class Ranks:
    """A single rank, which runs whole batches. `model.ranks.group` has the division among several."""

    rank = 0
    size = 1

    def share(self, entries: int) -> list[int]:
        """Return the entries of a batch that this rank runs, in order. Each rank has equally many.

        If `entries` is no multiple of `size`, the last ones repeat the last entry.
        """
        each = -(-entries // self.size)
        return [min(entry, entries - 1) for entry in range(self.rank * each, (self.rank + 1) * each)]

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks in their order, [size * entries, ...], from this rank's [entries, ...]."""
        return own


ALONE = Ranks()
