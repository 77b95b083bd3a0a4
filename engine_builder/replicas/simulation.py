"""What a traffic makes of replicas: a discrete-event simulation of servers that batch in flight and of the platform's
autoscaler, and the cheapest setting whose latency is good enough.

A server with n images takes `curve(n)` seconds a step, and every image moves on with each step. What it does not let in
waits in its queue, first come, first served: it lets in as many as run efficiently or are soon gone again, and as many
as fit once so many are there (`model.scheduling.admission`). The platform counts the requests in flight, averages them over its
window, and wants as many replicas as keep each below concurrency_target * target utilization. More are started at once
and ready after a cold start; one too many is kept for the scale-down delay. A request goes to the replica with the
fewest.

Not modelled: requests of several sizes, failures, and how the platform itself routes, which it does not say.
"""

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine_builder.benchmarks.rows import percentile
from engine_builder.replicas.traffic import Traffic
from model.scheduling.admission import (
    efficient_images,
    is_brief,
    may_join,
)

_LOOK_SECONDS = 5.0  # between two looks of the autoscaler


@dataclass(frozen=True)
class Server:
    """One replica. `step_seconds`: of a step with so many images (measured points, straight lines between)."""

    step_seconds: Mapping[int, float]
    steps: float
    cold_start_seconds: float
    max_queue: int = 64

    @property
    def capacity(self) -> int:
        """Images at once."""
        return max(self.step_seconds)

    def curve(self, images: int) -> float:
        """Seconds of a step with `images`, at most the capacity."""
        points = sorted(self.step_seconds.items())
        if images <= points[0][0]:
            return points[0][1]
        for (low, first), (high, last) in itertools.pairwise(points):
            if images <= high:
                return first + (last - first) * (images - low) / (high - low)
        return points[-1][1]

    @property
    def efficient(self) -> int:
        """Images beyond which more at once hardly pay."""
        counts = {2**power for power in range(self.capacity.bit_length())} | {self.capacity}
        return efficient_images((count, self.curve(count)) for count in sorted(counts))

    @property
    def images_per_second(self) -> float:
        """At capacity."""
        return self.capacity / (self.curve(self.capacity) * self.steps)


@dataclass(frozen=True)
class Autoscaling:
    """The platform's settings, under its own names (truss/autoscaling/)."""

    min_replica: int
    max_replica: int
    autoscaling_window: float = 60.0
    scale_down_delay: float = 600.0
    concurrency_target: int = 8
    target_utilization_percentage: float = 70.0


@dataclass
class Result:
    """Latencies in seconds, of requests answered with a picture; `replicas`: (second, how many are paid for)."""

    latencies: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    refused: int = 0
    replicas: list[tuple[float, int]] = field(default_factory=list)
    gpu_hours: float = 0.0

    def latency(self, share: float) -> float:
        return percentile(self.latencies, share) if self.latencies else math.inf

    @property
    def refused_share(self) -> float:
        return self.refused / max(1, self.refused + len(self.latencies))


class _Replica:
    """One server in simulated time. All of its images move on at one pace, so what each has left is kept as the mark on
    a common counter of steps at which it is done; only the next to finish needs an event."""

    def __init__(self, env: Any, server: Server, result: Result) -> None:
        self.env, self.server, self.result = env, server, result
        self.active: list[tuple[float, int, float, float]] = []  # done at, tie, arrived, began
        self.queue: deque[tuple[float, float]] = deque()  # arrived, steps
        self._curve = [server.curve(images) for images in range(server.capacity + 1)]
        self._efficient = server.efficient
        self._steps, self._at = 0.0, env.now
        self._ties = itertools.count()
        self._changed = env.event()
        env.process(self._run())

    @property
    def outstanding(self) -> int:
        return len(self.active) + len(self.queue)

    @property
    def full(self) -> bool:
        return len(self.queue) >= self.server.max_queue

    def add(self, arrived: float, steps: float) -> None:
        self._advance()
        self.queue.append((arrived, steps))
        self._join()
        self._wake()

    def _join(self) -> None:
        capacity = self.server.capacity
        while self.queue and len(self.active) < capacity:
            under_way = len(self.active)
            left = self.active[0][0] - self._steps if self.active else 0.0
            if not (
                may_join(under_way, len(self.queue), 1, self._efficient, capacity)
                or is_brief(self.queue[0][1], 1, under_way, under_way, left)
            ):
                break
            arrived, steps = self.queue.popleft()
            self.result.waits.append(self.env.now - arrived)
            heapq.heappush(self.active, (self._steps + steps, next(self._ties), arrived, self.env.now))

    def _advance(self) -> None:
        """Count the steps that were made since the last change."""
        if self.active:
            self._steps += (self.env.now - self._at) / self._curve[len(self.active)]
        self._at = self.env.now

    def _wake(self) -> None:
        if not self._changed.triggered:
            self._changed.succeed()

    def _run(self) -> Generator[Any, Any, None]:
        while True:
            if not self.active:
                yield self._changed
            else:
                seconds = (self.active[0][0] - self._steps) * self._curve[len(self.active)]
                finished = self.env.timeout(max(0.0, seconds))
                yield finished | self._changed
                if finished.processed:
                    self._advance()
                    _, _, arrived, _ = heapq.heappop(self.active)
                    self.result.latencies.append(self.env.now - arrived)
                    self._join()
            if self._changed.triggered:
                self._changed = self.env.event()


class _Platform:
    """Replicas, their autoscaler, and the requests that wait while there is none."""

    def __init__(self, env: Any, server: Server, scaling: Autoscaling, result: Result) -> None:
        self.env, self.server, self.scaling, self.result = env, server, scaling, result
        self.ready: list[_Replica] = []
        self.ending: list[_Replica] = []  # asked no more, and paid for until they have answered
        self.starting = 0
        self.held: deque[tuple[float, float]] = deque()
        self._samples: deque[tuple[float, int]] = deque()
        self._below_since: float | None = None
        for _ in range(scaling.min_replica):
            self.ready.append(_Replica(env, server, result))
        env.process(self._look())

    @property
    def wished(self) -> int:
        return self.starting + len(self.ready)

    def request(self, steps: float) -> None:
        if not self.ready:
            self.held.append((self.env.now, steps))
            return
        replica = min(self.ready, key=lambda replica: replica.outstanding)
        if replica.full:
            self.result.refused += 1
        else:
            replica.add(self.env.now, steps)

    def _look(self) -> Generator[Any, Any, None]:
        while True:
            self.ending = [replica for replica in self.ending if replica.outstanding]
            self._scale()
            self._note()
            yield self.env.timeout(_LOOK_SECONDS)

    def _scale(self) -> None:
        now, settings = self.env.now, self.scaling
        in_flight = len(self.held) + sum(replica.outstanding for replica in self.ready)
        self._samples.append((now, in_flight))
        while self._samples[0][0] < now - settings.autoscaling_window:
            self._samples.popleft()
        mean = sum(count for _, count in self._samples) / len(self._samples)
        share = settings.concurrency_target * settings.target_utilization_percentage / 100
        wanted = min(settings.max_replica, max(settings.min_replica, math.ceil(mean / share - 1e-9)))
        if self.held and not self.wished:
            wanted = max(1, wanted)
        if wanted > self.wished:
            self._below_since = None
            for _ in range(wanted - self.wished):
                self.starting += 1
                self.env.process(self._start())
        elif wanted < self.wished:
            self._below_since = now if self._below_since is None else self._below_since
            if now - self._below_since >= settings.scale_down_delay:
                self._stop(self.wished - wanted)
        else:
            self._below_since = None

    def _start(self) -> Generator[Any, Any, None]:
        yield self.env.timeout(self.server.cold_start_seconds)
        self.starting -= 1
        self.ready.append(_Replica(self.env, self.server, self.result))
        while self.held:
            arrived, steps = self.held.popleft()
            min(self.ready, key=lambda replica: replica.outstanding).add(arrived, steps)

    def _stop(self, count: int) -> None:
        """Those with the least to do; one that is still starting is not called back."""
        for replica in sorted(self.ready, key=lambda replica: replica.outstanding)[:count]:
            self.ready.remove(replica)
            self.ending.append(replica)

    def _note(self) -> None:
        paid = self.wished + len(self.ending)
        if not self.result.replicas or self.result.replicas[-1][1] != paid:
            self.result.replicas.append((self.env.now, paid))


def simulate(
    traffic: Traffic,
    server: Server,
    scaling: Autoscaling,
    seed: int = 0,
    steps: Callable[[random.Random], float] | None = None,
) -> Result:
    """Run the traffic to its end and every request to its answer. `steps`: of a request, default the server's."""
    import simpy

    env = simpy.Environment()
    result = Result()
    platform = _Platform(env, server, scaling, result)
    chance = random.Random(seed + 1)

    def arrive() -> Generator[Any, Any, None]:
        for at in traffic.arrivals(seed):
            yield env.timeout(at - env.now)
            platform.request(steps(chance) if steps is not None else server.steps)

    env.run(until=env.process(arrive()))
    end = max(env.now, traffic.seconds)
    env.run(until=end + 1e-9)
    result.gpu_hours = paid_hours(result.replicas, end)
    while platform.held or any(replica.outstanding for replica in platform.ready + platform.ending):
        env.run(until=env.now + 60)
    return result


def paid_hours(replicas: Sequence[tuple[float, int]], end: float) -> float:
    """Replica-hours of a curve of (second, how many) up to `end`."""
    total = 0.0
    for (start, count), (stop, _) in itertools.pairwise([*replicas, (max(end, replicas[-1][0]), 0)]):
        total += count * (min(stop, end) - min(start, end))
    return total / 3600


def candidates(server: Server, traffic: Traffic, max_replica: int) -> list[Autoscaling]:
    """Settings worth trying: how many are always there, how full they may be, and how long one too many is kept."""
    average = sum(traffic.rate(traffic.seconds * (i + 0.5) / 200) for i in range(200)) / 200
    steady = max(1, round(average / server.images_per_second))
    always = sorted({1, steady, min(max_replica, steady + 1), min(max_replica, 2 * steady)})
    return [
        Autoscaling(least, max_replica, 60, delay, server.capacity, utilization)
        for least in always
        for utilization in (50, 70, 90)
        for delay in (300, 900)
        if least <= max_replica
    ]


def recommend(results: Sequence[tuple[Autoscaling, Result]], p99: float) -> tuple[Autoscaling, Result] | None:
    """The fewest GPU-hours with p99 within the target and at most one request in a thousand refused."""
    good = [pair for pair in results if pair[1].latency(0.99) <= p99 and pair[1].refused_share <= 0.001]
    return min(good, key=lambda pair: pair[1].gpu_hours, default=None)


def erlang_c_wait(rate: float, service_seconds: float, servers: int) -> float:
    """Mean wait in an M/M/c queue (Erlang 1917): C(c, a) / (c / s - rate), with a = rate * s."""
    load = rate * service_seconds
    term, total = 1.0, 1.0
    for k in range(1, servers):
        term *= load / k
        total += term
    last = term * load / servers * servers / (servers - load)
    return last / (total + last) / (servers / service_seconds - rate)
