"""The networks of a step: the variants of a denoiser, and the networks whose outputs are added to its inputs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from model.denoising.buffers import NetworkShape
from model.denoising.loop import ImageState
from model.denoising.ranks import ALONE, Ranks
from model.engines.engine import EngineSet
from model.engines.features import Input, denoiser_inputs
from model.errors import EngineError


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

    def calls(self, images: Sequence[ImageState]) -> list[tuple[DenoiserVariant, list[ImageState]]]:
        """Divide the images of a step into calls. Raises EngineError if no variant has an image's features.

        An image has the precision that it has alone, so images of different precision share no call. Images of one
        precision share a call if a variant has the features of all of them.
        """
        by_precision: dict[bool, list[ImageState]] = {}
        for image in images:
            by_precision.setdefault(self._covering(image).exact, []).append(image)
        calls = []
        for exact, waiting in by_precision.items():
            while waiting:
                needs = [image.needs for image in waiting]
                variant = self._smallest(frozenset().union(*needs), exact)
                variant = variant or self._smallest(max(needs, key=len), exact)
                assert variant is not None
                calls.append((variant, [image for image in waiting if image.needs <= variant.features]))
                waiting = [image for image in waiting if not image.needs <= variant.features]
        return calls

    def _covering(self, image: ImageState) -> DenoiserVariant:
        for variant in self.variants:
            if image.needs <= variant.features and (variant.exact or not image.is_exact):
                return variant
        component, features = self.plain.engines.component, ", ".join(sorted(image.needs))
        raise EngineError(f"No {component} engine takes {features}.", "")

    def _smallest(self, needs: frozenset[str], exact: bool) -> DenoiserVariant | None:
        """Return the variant of this precision with the fewest features among which `needs` are."""
        found = (one for one in self.variants if needs <= one.features and one.exact == exact)
        return min(found, key=lambda one: len(one.features), default=None)

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
