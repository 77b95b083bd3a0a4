"""Covers of a step by calls: the cheapest of all, whole, and with each entry on engines that have what it needs."""

import itertools
from collections.abc import Iterator, Mapping
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.denoising.cover import Call, Counts, Kind, Option, StepCosts, cheapest, count_entries

FEATURES = ("control", "image_prompt", "lora")
PLAIN, ZEROS = Kind(frozenset()), Kind(frozenset(), paired=True)
feature_sets = st.sets(st.sampled_from(FEATURES)).map(frozenset)
batches = st.sets(st.integers(1, 5), min_size=1, max_size=3)


@st.composite
def denoisers(draw: st.DrawFn) -> dict[Option, float]:
    """Seconds of the calls of a denoiser, one of whose variants has all features."""
    sets = [frozenset[str](), *draw(st.lists(feature_sets, max_size=2, unique=True)), frozenset(FEATURES)]
    options = [
        Option(variant, features, exact=True, paired=False, batch=batch)
        for variant, features in enumerate(sets)
        for batch in sorted(draw(batches))
    ]
    for variant, features in enumerate(sets):
        if draw(st.booleans()):
            options += [Option(variant, features, True, True, 2 * batch) for batch in sorted(draw(batches))]
    return {option: draw(st.integers(1, 20)) * 0.5 + option.batch for option in options}


@st.composite
def entries(draw: st.DrawFn) -> Counts:
    kinds = draw(
        st.lists(st.builds(Kind, feature_sets, st.just(True), st.booleans()), min_size=1, max_size=3, unique=True)
    )
    images = [(kind, draw(st.integers(1, 2 if kind.paired else 3))) for kind in kinds]
    return count_entries([(kind, count * (1 + kind.paired)) for kind, count in images])


def seconds_of(cover: tuple[Call, ...], seconds: Mapping[Option, float]) -> float:
    by_call = {(option.variant, option.paired, option.batch): cost for option, cost in seconds.items()}
    return sum(by_call[call[:3]] for call in cover)


def check(cover: tuple[Call, ...], counts: Counts, seconds: Mapping[Option, float]) -> None:
    """Each entry is in one call, on engines with what it needs. Paired calls have whole images."""
    assert count_entries(one for call in cover for one in call.entries) == counts
    features = {option.variant: (option.features, option.exact) for option in seconds}
    for call in cover:
        assert 1 <= sum(count for _, count in call.entries) <= call.batch
        for kind, count in call.entries:
            assert kind.needs <= features[call.variant][0] and kind.exact == features[call.variant][1]
            assert not call.paired or (kind.paired and count % 2 == 0)


def brute_force(counts: Counts, seconds: Mapping[Option, float]) -> dict[int, float]:
    """Return the least seconds for each number of calls, by trying every call with every choice of entries."""
    kinds = [kind for kind, _ in counts]

    def choices(option: Option, kind: Kind, whole: int, single: int) -> Iterator[tuple[int, int, int]]:
        """Yield the taken entries of a kind, and the whole images and single entries that are left."""
        yield 0, whole, single
        if not kind.needs <= option.features or (option.paired and not kind.paired):
            return
        if option.paired:
            yield from ((2 * images, whole - images, single) for images in range(1, whole + 1))
            return
        for images, halves, singles in itertools.product(range(whole + 1), range(whole + 1), range(single + 1)):
            if images + halves <= whole and images + halves + singles:
                yield 2 * images + halves + singles, whole - images - halves, single - singles + halves

    @cache
    def least(left: tuple[tuple[int, int], ...]) -> dict[int, float]:
        if not any(map(any, left)):
            return {0: 0.0}
        found: dict[int, float] = {}
        for option, cost in seconds.items():
            of_kinds = [choices(option, kind, *one) for kind, one in zip(kinds, left, strict=True)]
            for taken in itertools.product(*map(list, of_kinds)):
                if 0 < sum(one[0] for one in taken) <= option.batch:
                    for number, rest in least(tuple(one[1:] for one in taken)).items():
                        found[number + 1] = min(cost + rest, found.get(number + 1, cost + rest))
        return found

    return least(tuple((count // 2, 0) if kind.paired else (0, count) for kind, count in counts))


@settings(max_examples=300, deadline=None)
@given(seconds=denoisers(), counts=entries())
def test_cheapest_equals_brute_force(seconds: dict[Option, float], counts: Counts) -> None:
    cover = cheapest(counts, seconds)
    check(cover, counts, seconds)
    tried = brute_force(counts, seconds)
    least = min(tried.values())
    number = min(number for number, cost in tried.items() if least >= 0.95 * cost)
    assert (len(cover), seconds_of(cover, seconds)) == (number, pytest.approx(tried[number]))


def options(*batches: int, paired: bool = False) -> list[Option]:
    return [Option(0, frozenset(), True, paired, batch) for batch in batches]


@pytest.mark.parametrize(
    ("count", "calls"),
    [(2, [2]), (4, [2, 2]), (12, [2] * 6), (14, [16]), (16, [16]), (18, [2, 16])],
)
def test_middling_batches_are_divided(count: int, calls: list[int]) -> None:
    """With batches 2 and 16, the seconds of two calls of batch 2 are fewer than those of one of batch 16."""
    costs = StepCosts(options(1, 2, 16))
    costs.replace(dict(zip(costs.options, (0.6, 1.0, 6.9), strict=True)))
    cover = costs.cheapest(((PLAIN, count),))
    assert sorted(call.batch for call in cover) == calls
    assert costs.is_known and costs.seconds(((PLAIN, count),)) == pytest.approx(sum({2: 1, 16: 6.9}[n] for n in calls))


def test_a_small_gain_is_no_reason_for_another_call() -> None:
    for seconds, calls in ((1.9, 1), (1.96, 1), (2.2, 2)):
        assert len(cheapest(((PLAIN, 2),), dict(zip(options(1, 2), (0.99, seconds), strict=True)))) == calls


def test_images_of_different_precision_share_no_call() -> None:
    both = [Option(variant, frozenset(), exact, False, 4) for variant, exact in enumerate((False, True))]
    counts = count_entries([(PLAIN, 2), (Kind(frozenset(), exact=False), 2)])
    cover = StepCosts(both).cheapest(counts)
    assert [(call.variant, len(call.entries)) for call in cover] == [(0, 1), (1, 1)]


def test_costs_are_a_guess_until_all_are_known() -> None:
    made = options(1, 2, 4) + options(2, 4, paired=True)
    costs = StepCosts(made)
    costs.replace({made[0]: 0.1})
    assert not costs.is_known
    assert [call.batch for call in costs.cheapest(((PLAIN, 3),))] == [4]
    assert [call.paired for call in costs.cheapest(((ZEROS, 4),))] == [True]
    costs.replace(dict.fromkeys(made, 1.0))
    assert costs.is_known and costs.seconds(((PLAIN, 4),)) == 1.0


def test_many_entries_of_many_kinds_are_divided_at_once() -> None:
    """More than 32 entries are not divided in the best way, which would take seconds."""
    sets = [frozenset[str](), *(frozenset({name}) for name in FEATURES), frozenset(FEATURES)]
    seconds = {
        Option(variant, features, True, False, batch): batch + 1.0 + len(features)
        for variant, features in enumerate(sets)
        for batch in (1, 2, 4, 8, 16)
    }
    counts = count_entries([(Kind(features), 16) for features in sets])
    check(cheapest(counts, seconds), counts, seconds)


@pytest.mark.parametrize("cheapest_batch", ["smallest", "largest"])
@pytest.mark.parametrize("batches", [(1,), (1, 3), (1, 2, 4)])
def test_many_entries_of_paired_kinds_are_divided_into_whole_images(
    batches: tuple[int, ...], cheapest_batch: str
) -> None:
    """Whichever batch takes the fewest seconds per entry, what is left of a paired kind must be whole images."""
    counts = ((ZEROS, 40),)
    slope = 0.01 if cheapest_batch == "smallest" else -0.01
    seconds = {option: option.batch * (1 + slope * option.batch) for option in options(*batches)}
    check(cheapest(counts, seconds), counts, seconds)
