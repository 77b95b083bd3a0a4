"""What a server and its workers send each other. Imports no torch, so that workers can be started before that import.

A request has one number for each worker that it was given to.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from model.loading.served import ServedRelease
from model.pipeline.params import GenerationParams
from model.scheduling.job import ImageEvent, StepEvent
from model.settings import Settings
from model.store.adapter_record import AdapterRecord

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
"""The values of a metric's samples, by name and labels."""


@dataclass(frozen=True)
class Start:
    """To a worker, first: what to load. secrets: those of Truss."""

    settings: Settings
    secrets: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True)
class Submit:
    """To a worker: generate the images `indices` of a request.

    model: see `JobScheduler`. streams: steps are reported. adapters: those of the request that the worker lacks.
    """

    number: int
    model: int
    params: GenerationParams
    indices: tuple[int, ...]
    streams: bool
    preview_every: int
    adapters: tuple[AdapterRecord, ...] = ()


@dataclass(frozen=True)
class Cancel:
    """To a worker: stop the images of a request, which was answered."""

    number: int


@dataclass(frozen=True)
class Ready:
    """From a worker: it serves. phases: the seconds of its cold start."""

    releases: list[ServedRelease]
    phases: dict[str, float]


@dataclass(frozen=True)
class LoadFailed:
    """From a worker: it could not load the releases, and ends."""

    error: Exception


@dataclass(frozen=True)
class Planned:
    """From a worker: it accepted a request. steps: those of the images that it was given. warnings: of the request."""

    number: int
    steps: int
    images_ahead: int
    warnings: list[str]


@dataclass(frozen=True)
class Progress:
    """From a worker: an event of a request."""

    number: int
    event: StepEvent | ImageEvent


@dataclass(frozen=True)
class Finished:
    """From a worker: all images of a request were sent. timings: milliseconds by stage."""

    number: int
    timings: dict[str, float]


@dataclass(frozen=True)
class Failed:
    """From a worker: a request ended with an error."""

    number: int
    error: Exception


@dataclass(frozen=True)
class Status:
    """From a worker, several times a second.

    seen: the number of the last request that it has received.
    queued: images that wait for a loop. images_ahead: by the number of each waiting request.
    placed: the indices of the releases whose weights are on the device, or are fetched or loaded.
    adapters: those whose factors are on the device.
    counters, gauges: the samples of its metrics, by metric; empty: unchanged since the last status that has them.
    """

    healthy: bool
    seen: int
    queued: int
    retry_after: int
    images_ahead: dict[int, int]
    placed: tuple[int, ...] = (0,)
    adapters: frozenset[str] = frozenset()
    counters: dict[str, Samples] = field(default_factory=dict)
    gauges: dict[str, Samples] = field(default_factory=dict)


@dataclass(frozen=True)
class Logged:
    """From a worker: a line of its log. level: of `logging`."""

    level: int
    text: str


WhileServing = Planned | Progress | Finished | Failed | Status | Logged
FromWorker = Ready | LoadFailed | WhileServing
