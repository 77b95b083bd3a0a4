"""Compare a release with diffusers: both generate the same request alternately, each peer in its own process."""

from collections.abc import Sequence
from importlib.metadata import version

import torch

from engine_builder.benchmarks.bench import measure, precision_of, release_work, timed_row
from engine_builder.benchmarks.peer_process import out_of_memory, peer_works
from engine_builder.benchmarks.peers import find_peer
from engine_builder.benchmarks.rows import Row
from model.api.request import GenerationRequest
from model.api.resolve import resolve
from model.loading.load import Loaded


def bench_against_diffusers(
    loaded: Loaded, request: GenerationRequest, model: str, kinds: Sequence[str], warm_ups: int, runs: int
) -> list[Row]:
    """Measure the release and diffusers' pipeline alternately, from the request to the encoded image.

    `model`: folder or Hub id with the peers' weights. `kinds`: some of `PEERS`. The release's row comes first, and the
    others name the version of diffusers.
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
    rows = [timed_row(name, params, precision, *result) for name, result in zip(names, measured, strict=True)]
    return [rows[0], *(row.model_copy(update={"diffusers": version("diffusers")}) for row in rows[1:])]
