"""Run a peer in its own process, so that it shares no state of PyTorch with the release.

torch.compile's CUDA graphs clear caches of the whole process, and use the memory pools of other captured graphs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch

from engine_builder.benchmarks.bench import Work
from engine_builder.benchmarks.peers import diffusers_pipeline, diffusers_work
from engine_builder.checkpoints.folder import Checkpoint
from engine_builder.worker_process import end_process, end_with_parent
from model.errors import PreheatError
from model.pipeline.params import GenerationParams


class PeerFailed(PreheatError):
    """A peer's process ended, or diffusers failed in it."""


@contextmanager
def peer_works(
    folder: Checkpoint, precision: str, kinds: Sequence[str], params: GenerationParams
) -> Iterator[list[Work]]:
    """Start a process for each of `kinds`. Yields functions that each generate the request in one of them.

    The processes load concurrently. Raises PeerFailed.
    """
    with ExitStack() as stack:
        connections = [stack.enter_context(_process(folder, precision, kind, params)) for kind in kinds]
        for connection, kind in zip(connections, kinds, strict=True):
            _receive(connection, kind)
        yield [_work(connection, kind) for connection, kind in zip(connections, kinds, strict=True)]


@contextmanager
def _process(folder: Checkpoint, precision: str, kind: str, params: GenerationParams) -> Iterator[Connection]:
    context = get_context("spawn")
    parent_end, peer_end = context.Pipe()
    process = context.Process(target=_run_peer, args=(peer_end, folder, precision, kind == "compiled", params))
    process.start()
    peer_end.close()
    try:
        yield parent_end
    finally:
        parent_end.close()
        end_process(process)


def _work(connection: Connection, kind: str) -> Work:
    def work() -> dict[str, float]:
        with suppress(ConnectionError):  # `_receive` raises the error
            connection.send(None)
        _receive(connection, kind)
        return {}

    return work


def _receive(connection: Connection, kind: str) -> None:
    try:
        error: PreheatError | None = connection.recv()
    except (EOFError, ConnectionError) as ended:
        raise PeerFailed(
            f"The process of diffusers ({kind}) ended before it answered.", "If memory was short, measure fewer peers."
        ) from ended
    if error is not None:
        raise error


def _run_peer(
    connection: Connection, folder: Checkpoint, precision: str, compiled: bool, params: GenerationParams
) -> None:
    """Load the peer, then generate the request for each received message. Sends None or an error after each."""
    end_with_parent()
    works: list[Work] = []

    def load() -> None:
        works.append(diffusers_work(diffusers_pipeline(folder, precision, compiled), params))

    with suppress(EOFError, ConnectionError):
        connection.send(_error_of(load))
        while works:
            connection.recv()
            connection.send(_error_of(works[0]))


def out_of_memory() -> PeerFailed:
    """Return the error for a GPU that cannot hold the release and its peers."""
    return PeerFailed(
        "This GPU's memory is too small for the release and its peers, which are loaded together.",
        "Measure without --compiled, or on a larger GPU.",
    )


def _error_of(work: Callable[[], object]) -> PreheatError | None:
    try:
        work()
    except PreheatError as error:
        return error
    except torch.OutOfMemoryError:
        return out_of_memory()
    except Exception as error:
        return PeerFailed(f"diffusers failed: {type(error).__name__}: {error}", "Measure without --peer.")
    return None
