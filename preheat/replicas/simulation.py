"""A discrete-event simulation of servers that batch in flight, and of the platform's autoscaler.

A server with n images takes `step_time(n)` seconds a step, and every image advances with each step. Waiting requests
join in the order of their arrival, if that shortens the seconds for each or if they are short (see
model/scheduling/admission.py). The platform averages the requests in flight over its
window. It needs as many replicas as keep each below concurrency_target * target utilization. New replicas start at once
and are ready after a cold start. Superfluous replicas are stopped after the scale-down delay. A request goes to the
replica with the fewest requests.

Not modelled: requests of several sizes, failures, and the platform's own routing, which is not documented.
"""

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.rows import percentile
from model.scheduling.admission import Joining, may_join, shortens_mean_latency
from preheat.replicas.traffic import Traffic

_AUTOSCALER_PERIOD_SECONDS = 5.0  # between two decisions


@dataclass(frozen=True)
class Server:
    """The speed and limits of one replica. `step_seconds`: images -> measured seconds of a step, interpolated linearly.

    `steps`: denoising steps of a request. `max_queue`: waiting requests before further ones are refused.
    """

    step_seconds: Mapping[int, float]
    steps: float
    cold_start_seconds: float
    max_queue: int = 64

    @property
    def capacity(self) -> int:
        """Largest number of images at once."""
        return max(self.step_seconds)

    def step_time(self, images: int) -> float:
        """Return the seconds of a step with `images`. Beyond the measured numbers it is that of the nearest one."""
        points = sorted(self.step_seconds.items())
        for (low, low_seconds), (high, high_seconds) in itertools.pairwise(points):
            if low <= images <= high:
                return low_seconds + (high_seconds - low_seconds) * (images - low) / (high - low)
        return points[0 if images < points[0][0] else -1][1]

    @property
    def most_efficient(self) -> int:
        """The smallest number of images at once with the largest throughput."""
        return min(self.step_seconds, key=lambda images: (self.step_seconds[images] / images, images))

    @property
    def images_per_second(self) -> float:
        """The largest throughput."""
        return self.most_efficient / (self.step_time(self.most_efficient) * self.steps)


@dataclass(frozen=True)
class Autoscaling:
    """The platform's settings, with the platform's names (truss/autoscaling/). Durations in seconds."""

    min_replica: int
    max_replica: int
    autoscaling_window: float = 60.0
    scale_down_delay: float = 600.0
    concurrency_target: int = 8
    target_utilization_percentage: float = 70.0


@dataclass
class Result:
    """The result of a simulation. `latencies`: seconds of answered requests.

    `replicas`: (second, number of paid replicas) at each change.
    """

    latencies: list[float] = field(default_factory=list)
    refused: int = 0
    replicas: list[tuple[float, int]] = field(default_factory=list)
    gpu_hours: float = 0.0

    def latency(self, share: float) -> float:
        """Return the seconds within which `share` of the answered requests were answered."""
        return percentile(self.latencies, share) if self.latencies else math.inf

    @property
    def refused_share(self) -> float:
        return self.refused / max(1, self.refused + len(self.latencies))


class _Replica:
    """One server. All of its images advance together, so each is stored with the step count at which it finishes."""

    def __init__(self, server: Server, result: Result, now: float) -> None:
        self.queue: deque[tuple[float, float]] = deque()  # arrival, steps
        self._active: list[tuple[float, float]] = []  # step count when finished, arrival
        self._server, self._result = server, result
        self._step_time = [server.step_time(images) for images in range(server.capacity + 1)]
        self._now, self._steps = now, 0.0

    @property
    def outstanding(self) -> int:
        return len(self._active) + len(self.queue)

    def add(self, arrived: float, steps: float) -> None:
        self.queue.append((arrived, steps))
        self._join()

    def advance(self, until: float) -> None:
        """Take the steps until that second, and answer the requests that finish."""
        while self._active:
            step_time = self._step_time[len(self._active)]
            finished = self._now + (self._active[0][0] - self._steps) * step_time
            if finished > until:
                self._steps += (until - self._now) / step_time
                break
            self._steps, arrived = heapq.heappop(self._active)
            self._now = finished
            self._result.latencies.append(finished - arrived)
            self._join()
        self._now = until

    def _join(self) -> None:
        while self.queue and len(self._active) < self._server.capacity:
            running = len(self._active)
            left = self._active[0][0] - self._steps if self._active else 0.0
            room = self._server.capacity - running
            of_image = self._step_time[running] / max(running, 1)
            together = self._step_time[running + 1 : running + 1 + len(self.queue)]
            joining = (Joining(seconds, count * of_image) for count, seconds in enumerate(together, running + 1))
            if not (
                not running
                or may_join(joining, len(self.queue) >= room)
                or shortens_mean_latency(self.queue[0][1], 1, running, running, left)
            ):
                break
            arrived, steps = self.queue.popleft()
            heapq.heappush(self._active, (self._steps + steps, arrived))


class _Platform:
    """Replicas, their autoscaler, and the requests that wait while no replica is ready."""

    def __init__(self, server: Server, scaling: Autoscaling, result: Result) -> None:
        self._server, self._scaling, self._result = server, scaling, result
        self._ready = [_Replica(server, result, 0.0) for _ in range(scaling.min_replica)]
        self._ending: list[_Replica] = []  # receive no new requests, and are paid until they have answered
        self._starting: deque[float] = deque()  # the second at which each replica will be ready
        self._waiting: deque[tuple[float, float]] = deque()  # arrival, steps
        self._samples: deque[tuple[float, int]] = deque()
        self._below_since: float | None = None
        self._decision = 0.0  # the second of the autoscaler's next one
        self._end = math.inf

    @property
    def outstanding(self) -> int:
        return len(self._waiting) + sum(replica.outstanding for replica in self._ready + self._ending)

    def request(self, now: float, steps: float) -> None:
        replica = min(self._ready, key=lambda replica: replica.outstanding, default=None)
        if replica is None:
            self._waiting.append((now, steps))
        elif len(replica.queue) >= self._server.max_queue:
            self._result.refused += 1
        else:
            replica.add(now, steps)

    def run(self, until: float) -> None:
        """Run the replicas and the autoscaler until that second."""
        while (now := min(self._decision, *self._starting, until)) < until or now == self._decision:
            self._advance(now)
            if self._starting and self._starting[0] == now:
                self._start(now)
            else:
                self._decision += _AUTOSCALER_PERIOD_SECONDS
                self._scale(now)
        self._advance(until)

    def _advance(self, now: float) -> None:
        for replica in self._ready + self._ending:
            replica.advance(now)

    def _start(self, now: float) -> None:
        self._starting.popleft()
        self._ready.append(_Replica(self._server, self._result, now))
        while self._waiting:
            min(self._ready, key=lambda replica: replica.outstanding).add(*self._waiting.popleft())

    def _scale(self, now: float) -> None:
        """Decide on the number of replicas, and start or stop some. Those with the fewest requests are stopped."""
        settings, count = self._scaling, len(self._starting) + len(self._ready)
        self._ending = [replica for replica in self._ending if replica.outstanding]
        self._samples.append((now, len(self._waiting) + sum(replica.outstanding for replica in self._ready)))
        while self._samples[0][0] < now - settings.autoscaling_window:
            self._samples.popleft()
        mean = sum(in_flight for _, in_flight in self._samples) / len(self._samples)
        share = settings.concurrency_target * settings.target_utilization_percentage / 100
        target = min(settings.max_replica, max(settings.min_replica, math.ceil(mean / share - 1e-9)))
        if self._waiting and not count:
            target = max(1, target)
        self._starting += [now + self._server.cold_start_seconds] * (target - count)
        if target >= count:
            self._below_since = None
        elif self._below_since is None:
            self._below_since = now
        if self._below_since is not None and now - self._below_since >= settings.scale_down_delay:
            self._ready.sort(key=lambda replica: replica.outstanding)
            self._ending += self._ready[: count - target]
            del self._ready[: count - target]
        paid = len(self._starting) + len(self._ready) + len(self._ending)
        if not self._result.replicas or self._result.replicas[-1][1] != paid:
            self._result.replicas.append((now, paid))


def simulate(
    traffic: Traffic,
    server: Server,
    scaling: Autoscaling,
    seed: int = 0,
    steps: Callable[[random.Random], float] | None = None,
) -> Result:
    """Run the traffic to its end and every request to its answer.

    `steps` returns a request's number of steps from a random generator; None: the server's.
    """
    result, now = Result(), 0.0
    platform = _Platform(server, scaling, result)
    generator = random.Random(seed + 1)
    for now in traffic.arrivals(seed):
        platform.run(now)
        platform.request(now, steps(generator) if steps is not None else server.steps)
    now = max(now, traffic.seconds)
    platform.run(now)
    changes = [*result.replicas, (now, 0)]
    result.gpu_hours = sum((after - at) * count for (at, count), (after, _) in itertools.pairwise(changes)) / 3600
    while platform.outstanding:
        platform.run(now := now + 60)
    return result


def candidates(server: Server, traffic: Traffic, max_replica: int) -> list[Autoscaling]:
    """Return settings to try. They differ in min_replica, target utilization and scale-down delay."""
    average = sum(traffic.rate(traffic.seconds * (i + 0.5) / 200) for i in range(200)) / 200
    steady = max(1, round(average / server.images_per_second))
    return [
        Autoscaling(min_replica, max_replica, 60, delay, server.capacity, utilization)
        for min_replica in sorted({1, steady, steady + 1, 2 * steady, max_replica})
        for utilization in (50, 70, 90)
        for delay in (300, 900)
        if min_replica <= min(max_replica, 2 * steady)
    ]


def recommend(results: Sequence[tuple[Autoscaling, Result]], p99: float) -> tuple[Autoscaling, Result] | None:
    """Return the setting with the fewest GPU-hours that meets the p99 and refuses at most one request in 1000.

    `p99`: seconds. Returns None if no setting does.
    """
    good = [pair for pair in results if pair[1].latency(0.99) <= p99 and pair[1].refused_share <= 0.001]
    return min(good, key=lambda pair: pair[1].gpu_hours, default=None)
