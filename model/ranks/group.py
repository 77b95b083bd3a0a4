"""The group of ranks of one replica: collectives of torch.distributed, by NCCL between GPUs and by gloo on a CPU.

The processes are on one machine. They find each other by a file, and their sockets are on its loopback interface.
"""

import gc
import logging
import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from model.denoising.ranks import Ranks
from model.engines import row_exchange
from model.pipeline.loaded_model import LoadedModel

logger = logging.getLogger("preheat")

COLLECTIVE_SECONDS = 120.0  # after which a collective fails that a rank does not take part in
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name since torch 2.13
_CLOSE_SECONDS = 5.0  # in which a rank leaves the group
_INTERFACES = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


class GroupRanks(Ranks):
    """One rank of several. Its collectives run on the current stream, also in a captured CUDA graph.

    Groups of `bands` ranks divide the rows of each image among them, and the batch is divided among these groups. So
    `rank` and `size` are those of groups.
    """

    def __init__(self, rank: int, size: int, meeting: Path, device: torch.device, bands: int = 1) -> None:
        """Wait for the other ranks. `meeting`: the file by which they find each other; it must not exist before.

        rank, size: among all ranks. Raises RuntimeError if they do not come within COLLECTIVE_SECONDS.
        """
        self.rank, self.size = rank // bands, size // bands
        for name, value in _INTERFACES.items():
            os.environ.setdefault(name, value)
        on_gpu = device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=meeting.absolute().as_uri(),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=COLLECTIVE_SECONDS),
            device_id=device if on_gpu else None,
        )
        self._group: Any = None  # of all ranks
        if bands > 1:
            index = rank % bands
            if self.size > 1:
                self._group = _new_groups([range(band, size, bands) for band in range(bands)])[index]
            of_image = _new_groups([range(first, first + bands) for first in range(0, size, bands)])[self.rank]
            row_exchange.join(_GroupBands(index, bands, of_image))

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        if self.size == 1:
            return own
        own = own.contiguous()
        gathered = own.new_empty((self.size * len(own), *own.shape[1:]))
        _all_gather(gathered, own, self._group)
        return gathered

    def close(self) -> bool:
        """Leave the group, as all ranks must. Returns True if it has ended; then another one can be made.

        `destroy_process_group` blocks while a CUDA graph holds NCCL collectives of the group, and so does the end of
        the interpreter. After _CLOSE_SECONDS this stops waiting and returns False.
        """
        row_exchange.join(None)
        ended = threading.Event()

        def leave_group() -> None:
            try:
                dist.destroy_process_group()
                ended.set()
            except RuntimeError:
                logger.exception("The group of ranks cannot be left.")

        thread = threading.Thread(target=leave_group, name="preheat-leave-ranks", daemon=True)
        thread.start()
        thread.join(_CLOSE_SECONDS)
        return ended.is_set()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite a contiguous tensor by that of rank 0."""
        dist.broadcast(tensor, 0)


def leave(model: LoadedModel, ranks: GroupRanks) -> bool:
    """Delete the loops of a model, whose graphs hold collectives of the group. Then do as `GroupRanks.close`."""
    model.loops.clear()
    gc.collect()  # what refers to a loop may be part of a reference cycle
    return ranks.close()


def _new_groups(members: Sequence[range]) -> list[Any]:
    """Make groups of these ranks. Each process must make all groups, in the same order."""
    return [dist.new_group(ranks, timeout=timedelta(seconds=COLLECTIVE_SECONDS)) for ranks in members]


class _GroupBands:
    """The bands of an image on the ranks of a group. Implements `model.engines.row_exchange.Bands`."""

    def __init__(self, index: int, count: int, group: Any) -> None:
        self.index, self.count = index, count
        self._group = group

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        gathered = own.new_empty((self.count, *own.shape))
        _all_gather(gathered, own[None], self._group)
        return gathered
