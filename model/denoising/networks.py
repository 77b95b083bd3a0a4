"""The networks of a step: the variants of a denoiser, and the networks whose outputs are added to its inputs."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from model.denoising.buffers import NetworkShape
from model.denoising.cover import Counts, Cover, Kind, Option, count_entries
from model.denoising.loop import ImageState
from model.denoising.ranks import ALONE, Ranks
from model.denoising.step_plan import StepNeeds
from model.engines.engine import Engine, EngineSet
from model.engines.features import Input, denoiser_inputs
from model.errors import EngineError

_MOST_ENTRIES = 32  # of a call, where engines take any number: more make no call cheaper


@dataclass(frozen=True, eq=False)
class StepNetwork:
    """A network that runs before the denoiser for the images that use it, for example a ControlNet.

    Its outputs are added to the denoiser's inputs of the same names. Only variants with `feature` have these. `inputs`:
    by their names in its signature. An image's conditioning has them with the prefix "name.".
    """

    name: str
    engines: EngineSet
    feature: str
    inputs: tuple[Input, ...]

    @property
    def prefix(self) -> str:
        """Return the prefix of the names of its inputs in a conditioning."""
        return f"{self.name}."


@dataclass(frozen=True, eq=False)
class DenoiserVariant:
    """Engines of a denoiser that take the inputs of the same features, in one precision.

    paired: faster engines for calls whose images are all guided against zeros, or None. The entries of their batch are
        conditional and then, for the same images, unconditional.
    exact: true if the weights are not quantized.
    """

    engines: EngineSet
    features: frozenset[str] = frozenset()
    paired: EngineSet | None = None
    exact: bool = True


class StepCall(NamedTuple):
    """A call of engines in a step.

    entries: an image and which half of its guidance it is: 0 for the unconditional one, else 1. Those of paired engines
    are all of half 1, then the same images' entries of half 0.
    """

    variant: DenoiserVariant
    paired: bool
    batch: int
    entries: list[tuple[ImageState, int]]


@dataclass(frozen=True, eq=False)
class Denoiser:
    """The networks of each step of a UNet at one size.

    variants: the served precision before the exact one, and then the fewest features first.
    before: in the order in which their outputs are added.
    ranks: the ranks that divide the batch of a call.
    """

    variants: tuple[DenoiserVariant, ...]
    before: tuple[StepNetwork, ...] = ()
    ranks: Ranks = ALONE

    @property
    def plain(self) -> DenoiserVariant:
        """The variant of images without features, in the served precision."""
        return self.variants[0]

    def covers(self, needs: frozenset[str]) -> bool:
        """True if a variant has all of these features."""
        return any(needs <= variant.features for variant in self.variants)

    def options(self, height: int, width: int, in_graphs: bool = True) -> dict[Option, Engine]:
        """Return the calls that can be made at a size in pixels, with their engines.

        in_graphs: each engine runs its largest batch only, and paired engines are used.
        """
        return {
            Option(number, variant.features, variant.exact, engines is variant.paired, self.ranks.size * batch): engine
            for number, variant in enumerate(self.variants)
            for engines in (variant.engines, variant.paired if in_graphs else None)
            if engines is not None
            for engine in reversed(engines.serving(height, width))
            for span in [engine.bucket.batch]
            for batch in ([span.max] if in_graphs else range(span.min, min(span.max, _MOST_ENTRIES) + 1))
        }

    def engines_of(self, option: Option) -> EngineSet:
        """Return the engines that make a call."""
        variant = self.variants[option.variant]
        return variant.paired if option.paired and variant.paired is not None else variant.engines

    def kind(self, needs: StepNeeds) -> Kind:
        """Return what a step needs of a call. Raises EngineError if no variant has its features.

        An image has the precision that it has alone.
        """
        for variant in self.variants:
            if needs.features <= variant.features and (variant.exact or not needs.exact):
                return Kind(needs.features, variant.exact, needs.zero_negative)
        component, features = self.plain.engines.component, ", ".join(sorted(needs.features))
        raise EngineError(f"No {component} engine takes {features}.", "")

    def counts(self, images: Sequence[ImageState]) -> Counts:
        """Return the entries of the next step of images, by kind."""
        return count_entries((self.kind(image.now), image.now.entries) for image in images)

    def calls(self, cover: Cover, images: Sequence[ImageState]) -> list[StepCall]:
        """Return the calls of a step with their entries, in the order of the images."""
        order = {image: number for number, image in enumerate(images)}
        whole: dict[Kind, deque[ImageState]] = {}
        for image in images:
            whole.setdefault(self.kind(image.now), deque()).append(image)
        single: dict[Kind, deque[tuple[ImageState, int]]] = {}
        calls = []
        for call in cover:
            taken: list[tuple[ImageState, int]] = []
            for kind, count in call.entries:
                if call.paired:
                    taken += [(whole[kind].popleft(), 1) for _ in range(count // 2)]
                    continue
                if kind not in single:
                    halves = [(image, half) for image in whole[kind] for half in range(2 - image.now.entries, 2)]
                    single[kind] = deque(halves)
                taken += [single[kind].popleft() for _ in range(count)]
            taken.sort(key=lambda entry: (order[entry[0]], entry[1]))
            if call.paired:
                taken += [(image, 0) for image, _ in taken]
            calls.append(StepCall(self.variants[call.variant], call.paired, call.batch, taken))
        return calls

    def shapes(self, height: int, width: int) -> list[tuple[EngineSet, NetworkShape]]:
        """Return all networks of a step at a size in pixels: the plain variant first, then others, then `before`."""
        found = [(engines, denoiser_inputs(), "") for engines in self._denoisers()]
        found += [(network.engines, network.inputs, network.prefix) for network in self.before]
        return [
            (
                engines,
                NetworkShape(
                    f"{engines.component} {number}",
                    engines.signature,
                    tuple(self.ranks.size * engine.bucket.batch.max for engine in engines.serving(height, width)),
                    inputs,
                    prefix,
                ),
            )
            for number, (engines, inputs, prefix) in enumerate(found)
        ]

    def _denoisers(self) -> Iterator[EngineSet]:
        for variant in self.variants:
            yield variant.engines
            if variant.paired is not None:
                yield variant.paired
