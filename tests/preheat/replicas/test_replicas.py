"""The simulation of replicas, compared with queueing theory and with the platform's rules."""

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from preheat.replicas import simulation
from preheat.replicas.simulation import (
    Autoscaling,
    Result,
    Server,
    candidates,
    recommend,
    simulate,
)
from preheat.replicas.traffic import DAY_SECONDS, BadTraffic, Traffic, read_traffic

STEADY = Autoscaling(min_replica=1, max_replica=1)


def constant(rate: float, seconds: float) -> Traffic:
    return read_traffic(f"constant:{rate}", seconds / 3600)


def exponential(mean: float) -> Callable[[random.Random], float]:
    return lambda chance: chance.expovariate(1 / mean)


def erlang_c_wait(rate: float, service_seconds: float, servers: int) -> float:
    """Return the mean wait in an M/M/c queue (Erlang 1917): C(c, a) / (c / s - rate), with a = rate * s."""
    load = rate * service_seconds
    term, total = 1.0, 1.0
    for k in range(1, servers):
        term *= load / k
        total += term
    last = term * load / servers * servers / (servers - load)
    return last / (total + last) / (servers / service_seconds - rate)


# -- theory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("servers, load", [(1, 0.6), (4, 0.8), (8, 0.9)])
def test_server_with_constant_step_time_is_an_m_m_c_queue(servers: int, load: float) -> None:
    """A batch takes the time of one image, so images are served in parallel. Numbers of steps are exponential."""
    server = Server({1: 0.1, servers: 0.1}, steps=10, cold_start_seconds=0, max_queue=10**9)
    rate = load * servers / 1.0  # ten steps of a tenth of a second
    result = simulate(constant(rate, 60_000 / rate), server, STEADY, seed=3, steps=exponential(10))
    waits = sum(result.latencies) / len(result.latencies) - 1.0
    assert waits == pytest.approx(erlang_c_wait(rate, 1.0, servers), rel=0.1)


class Burst(Traffic):
    """Five requests at second 0."""

    def arrivals(self, seed: int) -> Iterator[float]:
        return iter([0.0] * 5)


def test_step_time_follows_the_curve() -> None:
    server = Server({1: 0.1, 4: 0.4}, steps=10, cold_start_seconds=0)
    assert [server.step_time(images) for images in (1, 2, 3, 4)] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert server.images_per_second == pytest.approx(1.0) and server.most_efficient == 1
    slow_together = Server({1: 0.1, 2: 0.19, 4: 0.5}, steps=10, cold_start_seconds=0)
    assert slow_together.images_per_second == pytest.approx(2 / 1.9) and slow_together.most_efficient == 2
    alone = simulate(constant(0.001, 100_000), server, STEADY)
    assert alone.latency(0.5) == pytest.approx(1.0)
    five_at_once = simulate(Burst("burst", lambda second: 0.0, 0.0, 0.0), server, STEADY)
    assert sorted(five_at_once.latencies) == pytest.approx([1.0, 2.0, 3.0, 4.0, 5.0])  # none is faster together
    saving = Server({1: 0.1, 4: 0.2}, steps=10, cold_start_seconds=0)
    five_at_once = simulate(Burst("burst", lambda second: 0.0, 0.0, 0.0), saving, STEADY)
    assert sorted(five_at_once.latencies) == pytest.approx([2.0, 2.0, 2.0, 2.0, 3.0])


def test_small_batches_shorten_the_median_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    """One image nearly fills the GPU. The loads are 70 % and 150 % of its capacity."""
    curve = {1: 0.031, 2: 0.059, 4: 0.115, 8: 0.227}
    server = Server(curve, steps=30, cold_start_seconds=0, max_queue=100)
    loads = [constant(share * server.images_per_second, 10_000) for share in (0.7, 1.5)]
    small, small_overloaded = (simulate(load, server, STEADY) for load in loads)
    monkeypatch.setattr(simulation, "may_join", lambda *_: True)
    full, full_overloaded = (simulate(load, server, STEADY) for load in loads)
    assert small.latency(0.5) < 0.85 * full.latency(0.5)
    assert small.latency(0.99) < 1.2 * full.latency(0.99)
    assert len(small_overloaded.latencies) == pytest.approx(len(full_overloaded.latencies), rel=0.01)


# -- the platform -----------------------------------------------------------------------------------------------------

SERVER = Server({1: 0.05, 8: 0.1}, steps=20, cold_start_seconds=45)  # at most 4 images/s, 1 s for a single image


def test_every_request_is_answered_or_refused() -> None:
    traffic = constant(6, 600)
    result = simulate(traffic, SERVER, STEADY)
    assert len(result.latencies) + result.refused == sum(1 for _ in traffic.arrivals(0))
    assert result.refused > 0 and result.gpu_hours == pytest.approx(600 / 3600, rel=0.01)


def test_replicas_follow_a_spike_and_the_delay() -> None:
    scaling = Autoscaling(1, 6, autoscaling_window=60, scale_down_delay=300, concurrency_target=8)
    result = simulate(read_traffic("spike:0.5:12:20", 3), SERVER, scaling)
    counts = [count for _, count in result.replicas]
    assert counts[0] == 1 and max(counts) >= 4 and counts[-1] == 1
    grown = next(second for second, count in result.replicas if count > 1)
    shrunk = [second for (_, before), (second, after) in itertools.pairwise(result.replicas) if after < before]
    begins = 1.5 * 3600 - 600
    assert begins <= grown <= begins + 70
    assert min(shrunk) >= grown + 300
    assert 3 < result.gpu_hours < 3 + 5 * (max(shrunk) - grown) / 3600


def test_requests_wait_for_a_cold_start_without_replicas() -> None:
    result = simulate(constant(0.001, 20_000), SERVER, Autoscaling(0, 1, scale_down_delay=60))
    assert min(result.latencies) >= 1.0
    assert result.latency(0.99) == pytest.approx(45 + 1 + 2.5, abs=4)  # the autoscaler runs every 5 s
    assert result.gpu_hours < 0.5 * 20_000 / 3600


def test_recommends_the_cheapest_sufficient_setting() -> None:
    def result(p99: float, hours: float, refused: int = 0) -> Result:
        return Result(latencies=[p99] * 100, refused=refused, gpu_hours=hours)

    results = [
        (Autoscaling(1, 4), result(9.0, 10)),
        (Autoscaling(2, 4), result(3.0, 20)),
        (Autoscaling(3, 4), result(2.0, 30)),
        (Autoscaling(4, 4), result(1.0, 15, refused=1)),
    ]
    best = recommend(results, p99=4.0)
    assert best is not None and best[0].min_replica == 2
    assert recommend(results, p99=0.5) is None


def test_candidates_can_serve_the_traffic() -> None:
    tried = candidates(SERVER, constant(10, 3600), max_replica=6)
    assert {one.min_replica for one in tried} == {1, 2, 3, 4}  # two or three replicas serve the mean rate
    assert {one.concurrency_target for one in tried} == {8}


# -- traffic ----------------------------------------------------------------------------------------------------------


def test_traffic_arrives_at_its_rate(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("0,1\n1000,5\n2000,0\n3000,0\n")
    for text, expected in (
        ("constant:2", 2 * DAY_SECONDS),
        ("wave:2:0.5", 2 * DAY_SECONDS),
        ("spike:1:11:60", DAY_SECONDS + 10 * 3600),
        (str(trace), 6000),
    ):
        seconds = list(read_traffic(text, 24).arrivals(seed=5))
        assert len(seconds) == pytest.approx(expected, rel=0.05), text
        assert seconds == sorted(seconds)
    wave = read_traffic("wave:2:0.5", 24)
    assert [wave.rate(t) for t in (0, DAY_SECONDS / 4, DAY_SECONDS / 2)] == pytest.approx([1, 2, 3])
    assert all(t < 2000 for t in read_traffic(str(trace), 24).arrivals(seed=5))


def test_refuses_invalid_traffic(tmp_path: Path) -> None:
    for text in ("constant", "constant:-1", "wave:2:1.5", "spike:1:2", "constant:inf", "nowhere.csv"):
        with pytest.raises(BadTraffic, match=f"{text.partition(':')[0]}.* is not a valid traffic.*Give constant:RATE"):
            read_traffic(text, 1)
    trace = tmp_path / "trace.csv"
    for lines in ("0,1\n", "0,1\n0,2\n", "5,1\n1,1\n", "a,b\nc,d\n", "0,1,2\n1,1,2\n", "0,-1\n1,1\n"):
        trace.write_text(lines)
        with pytest.raises(BadTraffic):
            read_traffic(str(trace), 1)


def test_arrivals_are_a_poisson_process() -> None:
    """The variance of the number per hour equals its mean. A seed gives the same arrivals."""
    traffic = read_traffic("wave:0.05:0", 1)
    assert list(traffic.arrivals(5)) == list(traffic.arrivals(5)) != list(traffic.arrivals(6))
    counts = [sum(1 for _ in traffic.arrivals(seed)) for seed in range(400)]
    mean = sum(counts) / len(counts)
    assert mean == pytest.approx(180, rel=0.03)
    assert sum((count - mean) ** 2 for count in counts) / len(counts) == pytest.approx(mean, rel=0.25)
