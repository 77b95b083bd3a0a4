"""The release beside diffusers: the same request in turns, each peer in a process of its own."""

from collections.abc import Sequence

import torch

from engine_builder.benchmarks.bench import measure, precision_of, release_work, timed_row
from engine_builder.benchmarks.peer_process import out_of_memory, peer_works
from engine_builder.benchmarks.peers import find_peer
from engine_builder.benchmarks.rows import Row
from model.api.request import GenerationRequest, resolve
from model.loading.load import Loaded


def bench_beside_diffusers(
    loaded: Loaded, request: GenerationRequest, model: str, kinds: Sequence[str], warm_ups: int, runs: int
) -> list[Row]:
    """Measure the release and diffusers' pipeline in turns, from the request to the encoded image.

    `model` is a folder or a Hub id with the peer's weights; `kinds` are some of `PEERS`. The release's row comes first.
    Raises CheckpointError or RequestRefused if the images would differ, PeerFailed if a peer cannot be measured.
    """
    params, precision = resolve(request, loaded.served), precision_of(loaded)
    folder = find_peer(model, params)
    try:
        with peer_works(folder, precision, kinds, params) as peers:
            measured = measure([release_work(loaded, params), *peers], warm_ups, runs)
    except torch.OutOfMemoryError as error:
        raise out_of_memory() from error
    names = [loaded.release, *(f"diffusers {kind}" for kind in kinds)]
    return [timed_row(name, params, precision, *found) for name, found in zip(names, measured, strict=True)]
