"""A discrete-event simulation of servers that batch in flight, and of the platform's autoscaler.

A server with n images takes `step_time(n)` seconds a step, and every image advances with each step. Waiting requests
join in the order of their arrival. They join while the batch stays efficient, if they are short, or if enough wait to
fill the largest batch (see model/scheduling/admission.py). The platform averages the requests in flight over its
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

from engine_builder.benchmarks.rows import percentile
from engine_builder.replicas.traffic import Traffic
from model.scheduling.admission import efficient_images, may_join, shortens_mean_latency

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
        """Return the seconds of a step with `images`, at most the capacity."""
        points = sorted(self.step_seconds.items())
        if images <= points[0][0]:
            return points[0][1]
        for (low, low_seconds), (high, high_seconds) in itertools.pairwise(points):
            if images <= high:
                return low_seconds + (high_seconds - low_seconds) * (images - low) / (high - low)
        return points[-1][1]

    @property
    def efficient(self) -> int:
        """The number of images beyond which a larger batch hardly improves throughput."""
        counts = {2**power for power in range(self.capacity.bit_length())} | {self.capacity}
        return efficient_images((count, self.step_time(count)) for count in sorted(counts))

    @property
    def images_per_second(self) -> float:
        """Throughput at capacity."""
        return self.capacity / (self.step_time(self.capacity) * self.steps)


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
    """The result of a simulation. `latencies`, `waits`: seconds of answered requests.

    `replicas`: (second, number of paid replicas) at each change.
    """

    latencies: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    refused: int = 0
    replicas: list[tuple[float, int]] = field(default_factory=list)
    gpu_hours: float = 0.0

    def latency(self, share: float) -> float:
        """Return the seconds within which `share` of the answered requests were answered."""
        return percentile(self.latencies, share) if self.latencies else math.inf

    @property
    def refused_share(self) -> float:
        return self.refused / max(1, self.refused + len(self.latencies))


class _Clock:
    """The simulated time in seconds, and the actions that are due later."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[int], None], int]] = []
        self._ties = itertools.count()  # orders actions of the same second

    def call(self, seconds: float, action: Callable[[int], None], argument: int = 0) -> None:
        """Call `action(argument)` in `seconds` from now."""
        heapq.heappush(self._due, (self.now + seconds, next(self._ties), action, argument))

    def run(self, until: float) -> None:
        """Call all actions that are due until that second."""
        while self._due and self._due[0][0] <= until:
            self.now, _, action, argument = heapq.heappop(self._due)
            action(argument)
        self.now = until


class _Replica:
    """One server in simulated time.

    All of its images advance together. So each image is stored with the server's step count at which it finishes, and
    only the next image to finish needs an event. Every change of the batch replaces that event.
    """

    def __init__(self, clock: _Clock, server: Server, result: Result) -> None:
        self.clock, self.server, self.result = clock, server, result
        self.active: list[tuple[float, int, float]] = []  # step count when finished, tie breaker, arrival
        self.queue: deque[tuple[float, float]] = deque()  # arrival, steps
        self._step_time = [server.step_time(images) for images in range(server.capacity + 1)]
        self._efficient = server.efficient
        self._steps, self._counted_at = 0.0, clock.now
        self._ties = itertools.count()  # orders images that finish at the same step
        self._event = 0  # the number of the event that is not yet replaced

    @property
    def outstanding(self) -> int:
        return len(self.active) + len(self.queue)

    def add(self, arrived: float, steps: float) -> None:
        self._advance()
        self.queue.append((arrived, steps))
        self._join()
        self._plan()

    def _join(self) -> None:
        capacity = self.server.capacity
        while self.queue and len(self.active) < capacity:
            running = len(self.active)
            left = self.active[0][0] - self._steps if self.active else 0.0
            if not (
                may_join(running, len(self.queue), 1, self._efficient, capacity)
                or shortens_mean_latency(self.queue[0][1], 1, running, running, left)
            ):
                break
            arrived, steps = self.queue.popleft()
            self.result.waits.append(self.clock.now - arrived)
            heapq.heappush(self.active, (self._steps + steps, next(self._ties), arrived))

    def _advance(self) -> None:
        """Add the steps since the last call to the step count."""
        if self.active:
            self._steps += (self.clock.now - self._counted_at) / self._step_time[len(self.active)]
        self._counted_at = self.clock.now

    def _plan(self) -> None:
        """Replace the event of the next image to finish."""
        self._event += 1
        if self.active:
            seconds = (self.active[0][0] - self._steps) * self._step_time[len(self.active)]
            self.clock.call(max(0.0, seconds), self._finish, self._event)

    def _finish(self, event: int) -> None:
        if event != self._event:
            return
        self._advance()
        _, _, arrived = heapq.heappop(self.active)
        self.result.latencies.append(self.clock.now - arrived)
        self._join()
        self._plan()


class _Platform:
    """Replicas, their autoscaler, and the requests that wait while no replica is ready."""

    def __init__(self, clock: _Clock, server: Server, scaling: Autoscaling, result: Result) -> None:
        self.clock, self.server, self.scaling, self.result = clock, server, scaling, result
        self.ready: list[_Replica] = []
        self.ending: list[_Replica] = []  # receive no new requests, and are paid until they have answered
        self.starting = 0
        self.waiting: deque[tuple[float, float]] = deque()  # arrival, steps
        self._samples: deque[tuple[float, int]] = deque()
        self._below_since: float | None = None
        for _ in range(scaling.min_replica):
            self.ready.append(_Replica(clock, server, result))
        self._autoscale(0)

    @property
    def replicas(self) -> int:
        """Number of replicas that are ready or starting."""
        return self.starting + len(self.ready)

    def request(self, steps: float) -> None:
        if not self.ready:
            self.waiting.append((self.clock.now, steps))
            return
        replica = min(self.ready, key=lambda replica: replica.outstanding)
        if len(replica.queue) >= self.server.max_queue:
            self.result.refused += 1
        else:
            replica.add(self.clock.now, steps)

    def _autoscale(self, _: int) -> None:
        self.ending = [replica for replica in self.ending if replica.outstanding]
        self._scale()
        self._record_paid()
        self.clock.call(_AUTOSCALER_PERIOD_SECONDS, self._autoscale)

    def _scale(self) -> None:
        now, settings = self.clock.now, self.scaling
        in_flight = len(self.waiting) + sum(replica.outstanding for replica in self.ready)
        self._samples.append((now, in_flight))
        while self._samples[0][0] < now - settings.autoscaling_window:
            self._samples.popleft()
        mean = sum(count for _, count in self._samples) / len(self._samples)
        share = settings.concurrency_target * settings.target_utilization_percentage / 100
        target = min(settings.max_replica, max(settings.min_replica, math.ceil(mean / share - 1e-9)))
        if self.waiting and not self.replicas:
            target = max(1, target)
        if target > self.replicas:
            self._below_since = None
            for _ in range(target - self.replicas):
                self.starting += 1
                self.clock.call(self.server.cold_start_seconds, self._start)
        elif target < self.replicas:
            self._below_since = now if self._below_since is None else self._below_since
            if now - self._below_since >= settings.scale_down_delay:
                self._stop(self.replicas - target)
        else:
            self._below_since = None

    def _start(self, _: int) -> None:
        self.starting -= 1
        self.ready.append(_Replica(self.clock, self.server, self.result))
        while self.waiting:
            arrived, steps = self.waiting.popleft()
            min(self.ready, key=lambda replica: replica.outstanding).add(arrived, steps)

    def _stop(self, count: int) -> None:
        """Stop the replicas with the fewest requests. Those that are still starting are kept."""
        for replica in sorted(self.ready, key=lambda replica: replica.outstanding)[:count]:
            self.ready.remove(replica)
            self.ending.append(replica)

    def _record_paid(self) -> None:
        paid = self.replicas + len(self.ending)
        if not self.result.replicas or self.result.replicas[-1][1] != paid:
            self.result.replicas.append((self.clock.now, paid))


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
    clock = _Clock()
    result = Result()
    platform = _Platform(clock, server, scaling, result)
    generator = random.Random(seed + 1)
    for at in traffic.arrivals(seed):
        clock.run(at)
        platform.request(steps(generator) if steps is not None else server.steps)
    end = max(clock.now, traffic.seconds)
    clock.run(end + 1e-9)
    result.gpu_hours = paid_hours(result.replicas, end)
    while platform.waiting or any(replica.outstanding for replica in platform.ready + platform.ending):
        clock.run(clock.now + 60)
    return result


def paid_hours(replicas: Sequence[tuple[float, int]], end: float) -> float:
    """Return the replica-hours until second `end`. `replicas`: (second, number of replicas) at each change."""
    total = 0.0
    for (start, count), (stop, _) in itertools.pairwise([*replicas, (max(end, replicas[-1][0]), 0)]):
        total += count * (min(stop, end) - min(start, end))
    return total / 3600


def candidates(server: Server, traffic: Traffic, max_replica: int) -> list[Autoscaling]:
    """Return settings to try. They differ in min_replica, target utilization and scale-down delay."""
    average = sum(traffic.rate(traffic.seconds * (i + 0.5) / 200) for i in range(200)) / 200
    steady = max(1, round(average / server.images_per_second))
    min_replicas = sorted({1, steady, min(max_replica, steady + 1), min(max_replica, 2 * steady)})
    return [
        Autoscaling(min_replica, max_replica, 60, delay, server.capacity, utilization)
        for min_replica in min_replicas
        for utilization in (50, 70, 90)
        for delay in (300, 900)
        if min_replica <= max_replica
    ]


def recommend(results: Sequence[tuple[Autoscaling, Result]], p99: float) -> tuple[Autoscaling, Result] | None:
    """Return the setting with the fewest GPU-hours that meets the p99 and refuses at most one request in 1000.

    `p99`: seconds. Returns None if no setting does.
    """
    good = [pair for pair in results if pair[1].latency(0.99) <= p99 and pair[1].refused_share <= 0.001]
    return min(good, key=lambda pair: pair[1].gpu_hours, default=None)
