"""Pixels in flight from the device: queued by one thread, waited for by another."""

import torch

from model.images.encode import Pixels


class PendingImage:
    """A decoded image whose copy to the host is queued on the current stream. `wait` may be called from any thread.

    The GPU continues with other images meanwhile.
    """

    def __init__(self, levels: torch.Tensor, finite: torch.Tensor, flagged: torch.Tensor | None = None) -> None:
        """`levels`: uint8 [1, height, width, 3].

        `finite`: bool [checks], of what the image was made of (`model.pipeline.overflow`) and, last, of the image.

        `flagged`: bool [1], true if a safety checker flagged them; None: they were not checked.
        """
        self._levels, self._finite, self._flagged, self._done = levels[0], finite, flagged, None
        if levels.is_cuda:
            self._levels, self._finite = _to_pinned(levels[0]), _to_pinned(finite)
            self._flagged = None if flagged is None else _to_pinned(flagged)
            self._done = torch.cuda.current_stream(levels.device).record_event()

    def wait(self) -> Pixels | None:
        """Return uint8 [height, width, 3], or None if the image holds NaN or infinity."""
        if self._done is not None:
            self._done.synchronize()
        if not bool(self._finite[-1]):
            return None
        pixels: Pixels = self._levels.numpy()
        return pixels

    def failed_check(self) -> int:
        """Return the number of the first check that was false. Call it after `wait` has returned None."""
        return self._finite.tolist().index(False)

    def flagged(self) -> bool | None:
        """Return whether a safety checker flagged the image; None if it was not checked. Call it after `wait`."""
        return None if self._flagged is None else bool(self._flagged)


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
