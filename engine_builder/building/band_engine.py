"""An engine for bands of an image, run in one process: a thread for each band. To check it against the whole image."""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from model.engines.engine import Engine
from model.engines.row_exchange import joined
from model.errors import EngineError

_SECONDS = 600.0  # in which all bands must come to an exchange


class BandEngine:
    """Runs the same engine once for each band. Implements `model.engines.engine.Engine`."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        """`engines`: one for each band, opened from the same package."""
        self.component, self.signature, self.bucket = engines[0].component, engines[0].signature, engines[0].bucket
        self._engines = engines

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs of the first band, which are those of all bands. Raises EngineError."""
        barrier = threading.Barrier(len(self._engines))
        first: list[BaseException] = []
        exchanged: list[Tensor] = [torch.empty(0)] * len(self._engines)

        def run(index: int) -> dict[str, Tensor]:
            try:
                with torch.inference_mode(), joined(_ThreadBands(index, barrier, exchanged)):
                    return self._engines[index].run(inputs)
            except BaseException as error:
                first.append(error)  # before the others fail, because they wait for this band
                barrier.abort()
                raise

        with ThreadPoolExecutor(len(self._engines)) as threads:
            runs = [threads.submit(run, index) for index in range(len(self._engines))]
        if first and isinstance(first[0], RuntimeError) and not isinstance(first[0], torch.OutOfMemoryError):
            raise EngineError(f"The {self.component} engine failed ({first[0]}).") from first[0]
        if first:
            raise first[0]
        return runs[0].result()


class _ThreadBands:
    """Bands that are threads of this process and use one stream. Implements `model.engines.row_exchange.Bands`."""

    def __init__(self, index: int, barrier: threading.Barrier, exchanged: list[Tensor]) -> None:
        """`exchanged`: what each band passes on, which all threads write."""
        self.index, self.count = index, barrier.parties
        self._barrier, self._exchanged = barrier, exchanged

    def gather(self, own: Tensor) -> Tensor:
        self._exchanged[self.index] = own.clone()
        self._barrier.wait(_SECONDS)
        gathered = torch.stack(self._exchanged)
        self._barrier.wait(_SECONDS)
        return gathered
