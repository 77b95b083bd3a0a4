"""The comparison of servers: every server gets the same requests, and ratios are to the Truss server."""

from collections.abc import Callable

from engine_builder.benchmarks.triton_overhead import make_rows, measure


def test_every_server_gets_the_same_seeds() -> None:
    seeds: dict[str, list[int]] = {"truss": [], "generate_loop": []}
    order: list[str] = []

    def call_of(name: str) -> Callable[[int], None]:
        def call(seed: int) -> None:
            order.append(name)
            seeds[name].append(seed)

        return call

    times = measure({name: call_of(name) for name in seeds}, runs=20, warmups=2)
    assert {name: len(values) for name, values in times.items()} == dict.fromkeys(seeds, 20)
    assert seeds == dict.fromkeys(seeds, list(range(22)))
    assert len(set(zip(order[::2], order[1::2], strict=True))) == 2  # neither is always the first


def test_rows_have_the_ratio_to_truss() -> None:
    rows = make_rows({"truss": [100.0, 200.0, 300.0], "generate_loop": [90.0, 210.0, 400.0]}, "fp32", 20)
    assert [(row.value, row.extra["of_truss"], row.extra["of_truss_min"]) for row in rows] == [
        (200.0, 1.0, 1.0),
        (210.0, 1.05, 0.9),
    ]
