"""Rank 0: it starts the processes of the other ranks, and sends them each call of its loops before it makes it itself.

The other ranks are followers (`model.ranks.follower`). They decide nothing. If one of them ends, no further step is
possible, because its share of each batch is missing. Then all requests are answered with Unavailable, and this process
ends, so that the platform replaces the replica.
"""

import itertools
import logging
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from model.child_process import exit_now, start_connected_child, visible_gpu
from model.denoising.cover import Cover, Kind, StepCosts
from model.denoising.loop import ImageState, Loop
from model.denoising.step_plan import StepNeeds
from model.errors import ConfigError, RankFailed, Unavailable
from model.pipeline.loaded_model import LoadedModel, LoopKey
from model.ranks.group import GroupRanks, leave
from model.ranks.messages import (
    AddImage,
    Join,
    Leave,
    MakeLoop,
    Message,
    RemoveImage,
    Start,
    Step,
    take_tensors,
)
from model.settings import Settings, plain_secrets

logger = logging.getLogger("preheat")

_START_SECONDS = 1800.0  # in which all ranks must have loaded the release
_EXIT_SECONDS = 2.0  # in which a rank whose connection broke is seen to have ended
_POLL_SECONDS = 0.1


def start_followers(settings: Settings, secrets: Mapping[str, str]) -> "Followers":
    """Start the processes of the ranks that `gpus_per_image` asks for. Raises ConfigError if there are too few GPUs."""
    gpus = torch.cuda.device_count()
    if gpus and gpus < settings.gpus_per_image:
        raise ConfigError(
            f"gpus_per_image is {settings.gpus_per_image}, and this machine has {gpus} GPU{'s' if gpus > 1 else ''}.",
            f"Deploy with as many GPUs (`accelerator: H100:{settings.gpus_per_image}`), or lower gpus_per_image.",
        )
    return Followers(settings, secrets, gpus)


class Followers:
    """The processes of all ranks but 0. Constructing it starts them. They load the release on their own."""

    def __init__(
        self, settings: Settings, secrets: Mapping[str, str], gpus: int, entry: str = "model.ranks.follower.main"
    ) -> None:
        """`gpus`: the number of GPUs that this process sees, 0 on a CPU; each rank uses one. `entry`: the function that
        runs a rank. Raises OSError if a process cannot be started.
        """
        self.size = settings.gpus_per_image
        self._bands = settings.bands_per_image
        self._folder = tempfile.TemporaryDirectory(prefix="preheat-ranks-")
        self._meeting = Path(self._folder.name) / "meeting"
        self._closing = False
        self._ended = threading.Event()
        self._joined: tuple[LoadedModel, GroupRanks] | None = None
        self._reason = "A process that runs a share of each batch has ended; this server is being replaced."
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        for rank in range(1, self.size):
            # Ranks on a CPU share its cores. Threads that wait for their turn spin, which took most of a step.
            threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, len(os.sched_getaffinity(0)) // self.size))
            variables = {"CUDA_VISIBLE_DEVICES": visible_gpu(rank, gpus)} if gpus else {"OMP_NUM_THREADS": threads}
            process, connection = start_connected_child(entry, variables)
            self._processes.append(process)
            self._connections.append(connection)
            with suppress(OSError):  # it has ended; `join` reports that
                connection.send(Start(settings, plain_secrets(secrets), rank, self.size, str(self._meeting)))

    def join(self, model: LoadedModel) -> None:
        """Wait until all ranks have loaded the release, and divide the batches of the model's loops among them.

        Raises RankFailed if one of them could not load it.
        """
        deadline = time.monotonic() + _START_SECONDS
        for rank, (process, connection) in enumerate(zip(self._processes, self._connections, strict=True), start=1):
            while not connection.poll(_POLL_SECONDS):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RankFailed(f"Rank {rank} of {self.size} did not load the release.")
            try:
                error = connection.recv()
            except (EOFError, OSError):
                error = "its process has ended"
            if error is not None:
                raise RankFailed(f"Rank {rank} of {self.size} did not load the release: {error}")
        for connection in self._connections:
            connection.send(Join())
        ranks = GroupRanks(0, self.size, self._meeting, model.device, self._bands)
        self._joined = model, ranks
        model.ranks, model.lead = ranks, self._lead

    def watch(self, on_end: Callable[[str], None]) -> None:
        """Call `on_end` with the reason once a process ends, from a separate thread."""
        for process in self._processes:
            threading.Thread(target=self._watch, args=[process, on_end], name="preheat-rank", daemon=True).start()

    @property
    def pids(self) -> list[int]:
        """The process ids, by rank."""
        return [process.pid for process in self._processes]

    def send(self, message: Message) -> None:
        """Send a message to all followers. Raises Unavailable if one has ended."""
        with self.guard():
            for connection in self._connections:
                connection.send(message)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send a tensor to all followers, by a collective."""
        with self.guard():
            self._ranks.broadcast(tensor.contiguous())

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Kill the followers after an error: the ranks are no longer at the same call, so no step is possible.

        Raises Unavailable for an error that the end of a follower has caused.
        """
        try:
            yield
        except Exception as error:
            out_of_memory = isinstance(error, torch.OutOfMemoryError)  # of this rank, so perhaps of all
            by_follower = isinstance(error, RuntimeError | OSError) and not out_of_memory and self._one_ends()
            for process in self._processes:
                process.kill()
            if by_follower:
                raise Unavailable(self._reason) from error
            raise

    def _one_ends(self) -> bool:
        """True if a follower has ended, or ends within _EXIT_SECONDS."""
        deadline = time.monotonic() + _EXIT_SECONDS
        while time.monotonic() < deadline:
            if any(process.poll() is not None for process in self._processes):
                return True
            time.sleep(_POLL_SECONDS)
        return False

    def close(self) -> bool:
        """Leave the group and end the other processes. The model has no loops afterwards.

        Returns False if the group has not ended. The interpreter would then hang at its end; see `GroupRanks.close`.
        """
        self._closing = True
        try:
            return self._joined is None or self._leave(*self._joined)
        finally:
            self._joined = None
            self._end_processes()

    def exit_process(self) -> None:
        """End the other processes and this one, without waiting for the interpreter's end, in which NCCL may hang."""
        self._closing = True
        self._end_processes()
        exit_now(0)

    def _leave(self, model: LoadedModel, ranks: GroupRanks) -> bool:
        with suppress(Unavailable, OSError):
            self.send(Leave())
        return leave(model, ranks)

    def _end_processes(self) -> None:
        for process, connection in zip(self._processes, self._connections, strict=True):
            connection.close()
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_EXIT_SECONDS)
            if process.poll() is None:
                process.kill()
                process.wait()
        self._folder.cleanup()

    @property
    def _ranks(self) -> GroupRanks:
        assert self._joined is not None
        return self._joined[1]

    def _lead(self, make: Callable[[], Loop], key: LoopKey) -> Loop:
        self.send(MakeLoop(key))
        with self.guard():
            return LeadLoop(make(), key, self)

    def _watch(self, process: "subprocess.Popen[bytes]", on_end: Callable[[str], None]) -> None:
        code = process.wait()
        if not self._closing and not self._ended.is_set():
            self._ended.set()
            logger.critical("a rank ended with exit code %d", code)
            on_end(self._reason)


class LeadLoop:
    """A loop of rank 0, whose calls the followers repeat. Implements `model.denoising.loop.Loop`."""

    def __init__(self, loop: Loop, key: LoopKey, followers: Followers) -> None:
        self._loop = loop
        self._key = key
        self._followers = followers
        self._numbers = itertools.count()
        self._number_of: dict[ImageState, int] = {}
        self.images = loop.images  # the same list, which the loop changes

    @property
    def capacity(self) -> int:
        return self._loop.capacity

    @capacity.setter
    def capacity(self, capacity: int) -> None:
        self._loop.capacity = capacity

    @property
    def costs(self) -> StepCosts:
        return self._loop.costs

    def kind(self, needs: StepNeeds) -> Kind:
        return self._loop.kind(needs)

    def cover(self) -> Cover:
        return self._loop.cover()

    def add(self, image: ImageState) -> None:
        image.wait_for_inputs()
        number = next(self._numbers)
        message, tensors = take_tensors(AddImage(self._key, number, image))
        self._followers.send(message)
        for tensor in tensors:
            self._followers.broadcast(tensor)
        try:
            self._loop.add(image)
        except BaseException:
            self._followers.send(RemoveImage(self._key, number))
            raise
        self._number_of[image] = number

    def remove(self, image: ImageState) -> None:
        self._loop.remove(image)
        self._send_removal(image)

    def step(self, cover: Cover | None = None) -> list[ImageState]:
        """Run a step. All ranks make the same calls, also where their own costs differ."""
        cover = self.cover() if cover is None else cover
        self._followers.send(Step(self._key, cover))
        with self._followers.guard():
            finished = self._loop.step(cover)
        for image in finished:
            del self._number_of[image]
        return finished

    def latents(self, image: ImageState) -> torch.Tensor:
        return self._loop.latents(image)

    def _send_removal(self, image: ImageState) -> None:
        with suppress(Unavailable):  # an image leaves also if no step is possible any more
            self._followers.send(RemoveImage(self._key, self._number_of.pop(image)))
