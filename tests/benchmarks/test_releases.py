"""`preheat bench releases`: what it asks a server for, and what it counts as a swap."""

import itertools
import json
import time
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from benchmarks import releases as bench
from engine_builder.stores.store import WritableStore
from preheat.main import app
from tests.support.http_server import HttpServer, QuietHandler

NAMES = ("a/1", "b/1", "c/1")
REQUEST = {"prompt": "a red circle", "seed": 1}


class TwoSlots(QuietHandler):
    """Answers at once, or after 40 ms if the release has neither of the slots. The first release keeps its slot."""

    asked: list[str] = []
    slots = ["a/1"]
    swaps = 0
    failed = 0

    def do_POST(self) -> None:
        name = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["model"]
        self.asked.append(name)
        if name not in self.slots:
            time.sleep(0.04)
            self.slots[1] = name
            type(self).swaps += 1
        time.sleep(0.01)
        self._answer(json.dumps({"images": [], "timings": {}}))

    def do_GET(self) -> None:
        if len(self.slots) == 1:  # the second one is opened after the start
            self.slots.append("b/1")
        lines = [f'preheat_release_resident{{release="{name}"}} {float(name in self.slots)}' for name in NAMES]
        kinds = {"count": self.swaps, "sum": 0.25 * self.swaps}
        lines += [f'preheat_release_load_seconds_{kind}{{outcome="fill"}} {value}' for kind, value in kinds.items()]
        lines.append(f'preheat_release_loads_total{{outcome="failed"}} {self.failed}')
        self._answer("# HELP of nothing\n" + "\n".join(lines) + "\n")

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def url() -> Iterator[str]:
    TwoSlots.asked, TwoSlots.slots, TwoSlots.swaps, TwoSlots.failed = [], ["a/1"], 0, 0
    with HttpServer(TwoSlots) as server:
        yield f"http://127.0.0.1:{server.port}"


def test_measures_turns(url: str) -> None:
    bench.wait_resident(url, NAMES[:2], 60)
    turns = bench.measure_turns(url, NAMES[:2], REQUEST, warm_ups=0, runs=4)
    assert len(turns.alone) == len(turns.alternating) == 4
    alone, alternating = TwoSlots.asked[:5], TwoSlots.asked[5:]
    assert alone == ["a/1"] * 5 and alternating == [*itertools.islice(itertools.cycle(NAMES[:2]), 5)]


def test_a_release_without_a_slot_ends_the_wait(url: str) -> None:
    with pytest.raises(bench.NotSwapped, match="After 0 s no slot was opened for c/1"):
        bench.wait_resident(url, NAMES, 0)
    TwoSlots.failed = 1
    with pytest.raises(bench.NotSwapped, match="cannot be loaded; c/1 without a slot"):
        bench.wait_resident(url, NAMES, 60)


def test_requests_without_swaps_end_the_measurement(url: str) -> None:
    TwoSlots.slots = [*NAMES]
    with pytest.raises(bench.NotSwapped, match="made 0 swaps"):
        bench.measure_swaps(url, NAMES, REQUEST, runs=2)


def test_measures_each_swap_once(url: str) -> None:
    bench.wait_resident(url, NAMES[:2], 60)
    swaps = bench.measure_swaps(url, NAMES, REQUEST, runs=6)
    assert swaps.swaps == [0.25] * 8 and TwoSlots.swaps == 8, "each round swaps four times"
    others = [name for name in TwoSlots.asked if name != "a/1"]
    assert others == (["b/1"] * 4 + ["c/1", "b/1"] * 2) * 2
    assert len(swaps.without_swaps) + len(swaps.with_swaps) == TwoSlots.asked.count("a/1")
    times = bench.Swaps([0.25], with_swaps=[0.5], without_swaps=[0.125])
    rows = bench.make_rows(bench.Turns([1.0], [2.0]), times, "64x64", "float32", 4, memory_gib=1.5)
    assert {row.case.removeprefix("several releases, "): row.p50 for row in rows} == {
        "one release 64x64": 1, "two releases in turns 64x64": 2, "a swap 64x64": 250,
        "one release while another one generates 64x64": 125, "one release while others are swapped 64x64": 500,
    }  # fmt: skip
    assert [(row.unit, row.extra["memory_gib"]) for row in rows] == [("ms", 1.5)] * 5


def test_command_needs_three_releases(toy_store: WritableStore) -> None:
    for names in (["a/1", "b/1"], ["a/1", "b/1", "a/1"]):
        result = CliRunner().invoke(app, ["bench", "releases", *names, "--store", toy_store.url])
        assert result.exit_code == 2 and "give three different releases" in result.output
