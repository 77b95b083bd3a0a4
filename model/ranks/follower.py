"""The process of a rank other than 0. It loads the release, and then makes the calls of rank 0's loops.

It ends when rank 0 ends, and with an error of its own: rank 0 then knows that a share of the batch is missing.
"""

import logging
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from model.child_process import FAILED_EXIT_CODE, end_with_parent
from model.cold_start import ColdStart
from model.denoising.loop import ImageState
from model.deployment import Deployment
from model.errors import PreheatError
from model.loading.releases import load_deployment
from model.pipeline.loaded_model import LoadedModel, LoopKey
from model.ranks.group import GroupRanks, leave
from model.ranks.messages import AddImage, Leave, MakeLoop, RemoveImage, Start, TensorShape, put_tensors
from model.store.store import open_store


def main(connection_number: int) -> None:
    """Run a follower. `connection_number`: the file descriptor of the connection to rank 0."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to all processes of a group; rank 0 handles them
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    logging.basicConfig(level=logging.INFO)
    connection = Connection(connection_number)
    try:
        _run(connection)
    except EOFError:
        os._exit(0)  # rank 0 has ended
    except Exception:
        logging.getLogger("preheat").critical("A rank failed.", exc_info=True)
        os._exit(FAILED_EXIT_CODE)


def _run(connection: Connection) -> None:
    start: Start = connection.recv()
    try:
        model = _load(start)
    except PreheatError as error:
        connection.send(str(error))
        return
    connection.send(None)
    connection.recv()  # Join
    ranks = GroupRanks(start.rank, start.size, Path(start.meeting), model.device, start.settings.bands_per_image)
    model.ranks = ranks
    _follow(model, ranks, connection)
    leave(model, ranks)
    os._exit(0)


def _follow(model: LoadedModel, ranks: GroupRanks, connection: Connection) -> None:
    """Make the calls that rank 0 sends, until it sends Leave."""
    images: dict[tuple[LoopKey, int], ImageState] = {}

    def receive(tensor: TensorShape) -> torch.Tensor:
        received = torch.empty(tensor.shape, dtype=tensor.dtype, device=model.device)
        ranks.broadcast(received)
        return received

    with torch.inference_mode():
        while True:
            message = connection.recv()
            if isinstance(message, AddImage):
                image = put_tensors(message.image, receive)
                model.loop(*message.key).add(image)
                images[message.key, message.number] = image
            elif isinstance(message, RemoveImage):
                image = images.pop((message.key, message.number))
                if image in model.loop(*message.key).images:
                    model.loop(*message.key).remove(image)
            elif isinstance(message, MakeLoop):
                model.loop(*message.key)
            elif isinstance(message, Leave):
                return
            else:
                finished = model.loop(*message.key).step(message.cover)
                images = {name: image for name, image in images.items() if image not in finished}


def _load(start: Start) -> LoadedModel:
    settings = start.settings
    options = settings.store_options(start.secrets)
    store, deployment = open_store(settings.required("store"), options), Deployment.of(settings).of_follower()
    loaded = load_deployment(store, deployment, options.cache_folder, ColdStart())
    return loaded.model
