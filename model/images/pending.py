"""Pixels in flight from the device: queued by one thread, waited for by another."""

import torch

from model.cuda.graphs import CAPTURING
from model.images.pixels import Pixels


class PendingImage:
    """A decoded image whose copy to the host is queued on the current stream. `wait` may be called from any thread.

    The GPU continues with other images meanwhile.
    """

    def __init__(self, levels: torch.Tensor, finite: torch.Tensor, flagged: torch.Tensor | None = None) -> None:
        """`levels`: uint8 [1, height, width, 3].

        `finite`: bool [checks], of what the image was made of (`model.pipeline.overflow`) and, last, of the image.

        `flagged`: bool [1], true if a safety checker flagged them; None: they were not checked.
        """
        self._queued = [levels[0], finite, *([] if flagged is None else [flagged])]
        self._done = None
        self._finite: list[bool] = []
        self._flagged: bool | None = None
        if levels.is_cuda:
            self._queued = [_to_pinned(tensor) for tensor in self._queued]
            self._done = torch.cuda.current_stream(levels.device).record_event()

    def wait(self) -> Pixels | None:
        """Return uint8 [height, width, 3], or None if the image holds NaN or infinity. Call it once."""
        if self._done is not None:
            self._done.synchronize()
        levels, finite, *flagged = self._queued
        self._finite, self._flagged = finite.tolist(), bool(flagged[0]) if flagged else None
        pixels: Pixels = levels.numpy()
        if self._done is not None:
            pixels = pixels.copy()
            with CAPTURING:
                self._queued.clear()
                del levels, finite, flagged
        return pixels if self._finite[-1] else None

    def failed_check(self) -> int:
        """Return the number of the first check that was false. Call it after `wait` has returned None."""
        return self._finite.index(False)

    def flagged(self) -> bool | None:
        """Return whether a safety checker flagged the image; None if it was not checked. Call it after `wait`."""
        return self._flagged


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
