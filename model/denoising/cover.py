"""Divide the batch entries of a step into calls of engines, in the cheapest way. Imports neither torch nor numpy.

The cost of a step is the sum of the seconds of its calls. A call pads its entries to the batch of an engine, and its
variant of the denoiser has the features that each of its entries needs. Entries of different precision share no call.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from typing import NamedTuple

_LEAST_GAIN = 0.05  # share of a step's seconds that another call must save
_MAX_ENTRIES = 32  # that are divided in the best way; further ones fill calls one kind after the other
_MAX_ENTRIES_OF_MANY = 16  # the same for more than two kinds: with 32 a cover takes up to a second


class Kind(NamedTuple):
    """What an image needs in its next step.

    needs: features, see `model.engines.features`. exact: its denoiser is not quantized. paired: it has two entries,
    which paired engines may compute.
    """

    needs: frozenset[str]
    exact: bool = True
    paired: bool = False


class Option(NamedTuple):
    """A call that the engines of a denoiser can make. variant: its number among the denoiser's."""

    variant: int
    features: frozenset[str]
    exact: bool
    paired: bool
    batch: int


class Call(NamedTuple):
    """A call of a step, with the number of its entries of each kind."""

    variant: int
    paired: bool
    batch: int
    entries: tuple[tuple[Kind, int], ...]


Counts = tuple[tuple[Kind, int], ...]
"""The numbers of batch entries of a step by kind."""
Cover = tuple[Call, ...]
"""The calls of a step, calls of paired engines first."""


class _Front(NamedTuple):
    """The cheapest calls for some entries, for one number of calls. rest: the front of the other calls."""

    seconds: float
    option: Option | None = None
    fill: tuple[int, ...] = ()
    rest: "dict[int, _Front] | None" = None


def cheapest(counts: Counts, seconds: Mapping[Option, float]) -> Cover:
    """Return the cheapest calls for entries. A further call must save 5 % of the seconds.

    counts: of paired kinds even numbers. seconds: of each call that can be made. Each kind needs a call that is not
    paired.
    """
    calls: list[Call] = []
    for exact in (False, True):
        own = [(kind, count) for kind, count in counts if kind.exact == exact and count]
        if own:
            calls += _cover(own, {option: cost for option, cost in seconds.items() if option.exact == exact})
    return tuple(sorted(calls, key=lambda call: not call.paired))


def _cover(counts: Sequence[tuple[Kind, int]], seconds: Mapping[Option, float]) -> Iterator[Call]:
    """Yield the cheapest calls for entries of one precision."""
    kinds = [kind for kind, _ in counts]
    left = [count for _, count in counts]
    ordinary = {option: cost for option, cost in seconds.items() if not option.paired}
    paired = {option: cost for option, cost in seconds.items() if option.paired}
    while sum(left) > (_MAX_ENTRIES if len(kinds) <= 2 else _MAX_ENTRIES_OF_MANY):
        first = max(range(len(kinds)), key=lambda index: (left[index] > 0, len(kinds[index].needs)))
        option = min(
            (one for one in ordinary if kinds[first].needs <= one.features),
            key=lambda one: ordinary[one] / min(one.batch, left[first]),
        )
        count = min(left[first], option.batch)
        # What is left of a paired kind is an even number.
        parts = (count,) if not (kinds[first].paired and count % 2) else (count - 1,) if count > 1 else (1, 1)
        left[first] -= sum(parts)
        for part in parts:
            yield Call(option.variant, False, option.batch, ((kinds[first], part),))

    # An entry that fewer variants serve is served first: exchanging it with another one never costs more.
    served = [frozenset(one.variant for one in ordinary if kind.needs <= one.features) for kind in kinds]
    classes = sorted(set(served), key=lambda variants: (len(variants), sorted(variants)))

    @cache
    def cover_entries(entries: tuple[int, ...]) -> dict[int, _Front]:
        """Return the cheapest calls for entries of each class, by their number."""
        found: dict[int, _Front] = {}
        first = next((index for index, count in enumerate(entries) if count), None)
        if first is None:
            return {0: _Front(0.0)}
        for option, cost in ordinary.items():
            if option.variant in classes[first]:
                able = [option.variant in variants for variants in classes]
                for fill in _nested_fills(option.batch, entries, able, classes):
                    if fill[first]:
                        _extend(found, cost, option, fill, cover_entries(_subtract(entries, fill)))
        return _undominated(found)

    @cache
    def cover_images(images: tuple[int, ...]) -> dict[int, _Front]:
        """Return the cheapest calls for images of each kind: of paired engines, and of others for those left."""
        entries = [2 * count if kind.paired else count for kind, count in zip(kinds, images, strict=True)]
        sums = tuple(sum(n for n, own in zip(entries, served, strict=True) if own == one) for one in classes)
        found = {number: _Front(front.seconds, rest={number: front}) for number, front in cover_entries(sums).items()}
        for option, cost in paired.items():
            usable = [
                count if kind.paired and kind.needs <= option.features else 0
                for kind, count in zip(kinds, images, strict=True)
            ]
            if any(usable):
                for fill in _fills(min(option.batch // 2, sum(usable)), usable):
                    _extend(found, cost, option, fill, cover_images(_subtract(images, fill)))
        return _undominated(found)

    fronts = cover_images(tuple(count // 2 if kind.paired else count for kind, count in zip(kinds, left, strict=True)))
    least = min(front.seconds for front in fronts.values())
    number = min(number for number, front in fronts.items() if least >= (1 - _LEAST_GAIN) * front.seconds)
    while number:
        front = fronts[number]
        if front.option is None:  # the end of the paired calls
            assert front.rest is not None
            fronts = front.rest
            continue
        option = front.option
        if option.paired:
            counts_of = {kind: 2 * count for kind, count in zip(kinds, front.fill, strict=True) if count}
        else:
            counts_of = {}
            for variants, count in zip(classes, front.fill, strict=True):
                for index, kind in enumerate(kinds):
                    if served[index] == variants and (taken := min(count, left[index])):
                        counts_of[kind] = taken
                        count -= taken
        left = [count - counts_of.get(kind, 0) for kind, count in zip(kinds, left, strict=True)]
        yield Call(option.variant, option.paired, option.batch, tuple(counts_of.items()))
        assert front.rest is not None
        fronts, number = front.rest, number - 1


def _extend(
    found: dict[int, _Front], cost: float, option: Option, fill: tuple[int, ...], rest: dict[int, _Front]
) -> None:
    """Add one call before each of the calls of `rest` to what was found."""
    for number, front in rest.items():
        if number + 1 not in found or cost + front.seconds < found[number + 1].seconds:
            found[number + 1] = _Front(cost + front.seconds, option, fill, rest)


def _undominated(found: dict[int, _Front]) -> dict[int, _Front]:
    """Leave out calls that cost as much as fewer ones."""
    kept: dict[int, _Front] = {}
    for number in sorted(found):
        if not kept or found[number].seconds < min(front.seconds for front in kept.values()):
            kept[number] = found[number]
    return kept


def _nested_fills(
    batch: int, entries: Sequence[int], able: Sequence[bool], classes: Sequence[frozenset[int]]
) -> Iterator[tuple[int, ...]]:
    """Yield the ways to fill a call in which no class displaces one that only some of its variants serve."""
    usable = [count if can else 0 for count, can in zip(entries, able, strict=True)]
    for fill in _fills(min(batch, sum(usable)), usable):
        if not any(
            fill[inner] < usable[inner] and fill[outer] and classes[inner] < classes[outer]
            for outer in range(len(classes))
            for inner in range(outer)
        ):
            yield fill


def _fills(places: int, usable: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the ways to divide places among groups with so many members."""
    if not usable:
        if not places:
            yield ()
        return
    others = sum(usable[1:])
    for count in range(max(0, places - others), min(places, usable[0]) + 1):
        for rest in _fills(places - count, usable[1:]):
            yield (count, *rest)


def _subtract(counts: Sequence[int], fill: Sequence[int]) -> tuple[int, ...]:
    return tuple(count - taken for count, taken in zip(counts, fill, strict=True))


class StepCosts:
    """The seconds of the calls of a loop, and the covers that follow from them. Used from one thread.

    Until all are known, a call is taken to cost as much as two more entries than its batch, and 10 % more by feature.
    """

    def __init__(self, options: Iterable[Option]) -> None:
        self.options = tuple(options)
        self.replace({})

    def replace(self, known: Mapping[Option, float]) -> None:
        """Replace the seconds of all calls. They are a guess if one is not known."""
        self.is_known = set(self.options) <= set(known)
        self._seconds = {one: known[one] if self.is_known else _guess(one) for one in self.options}
        self._by_call = {(one.variant, one.paired, one.batch): seconds for one, seconds in self._seconds.items()}
        self._cheapest = lru_cache(maxsize=4096)(partial(cheapest, seconds=self._seconds))

    def cheapest(self, counts: Counts) -> Cover:
        """Return the calls of a step. See `cheapest`."""
        return self._cheapest(counts)

    def seconds(self, counts: Counts) -> float:
        """Return the seconds of a step, in arbitrary units if they are not known."""
        return sum(self._by_call[call[:3]] for call in self.cheapest(counts))


def scaled(
    points: Mapping[tuple[int, bool], Mapping[int, float]], options: Iterable[Option], pixels: int
) -> dict[Option, float]:
    """Return the seconds of calls from measured ones.

    points: by variant and whether it is paired, batch entries times pixels of a call -> seconds. pixels: of an image.
    Between two points the seconds are interpolated, and beyond them they are in proportion.
    """
    found = {}
    for option in options:
        measured, size = points.get((option.variant, option.paired), {}), option.batch * pixels
        least = max((one for one in measured if one <= size), default=min(measured, default=0))
        most = min((one for one in measured if one >= size), default=least)
        if least in measured:
            share = (size - least) / (most - least) if most > least else 0.0
            inner = measured[least] + share * (measured[most] - measured[least])
            found[option] = inner if least <= size <= most else measured[least] * size / least
    return found


def _guess(option: Option) -> float:
    return (option.batch + 2) * (1 + 0.1 * len(option.features)) * (0.9 if option.paired else 1)


def count_entries(kinds: Iterable[tuple[Kind, int]]) -> Counts:
    """Return the numbers of entries by kind, from the kind and the entries of each image."""
    counts: dict[Kind, int] = {}
    for kind, entries in kinds:
        counts[kind] = counts.get(kind, 0) + entries
    return tuple(sorted(counts.items(), key=lambda one: (sorted(one[0].needs), one[0].exact, one[0].paired)))
