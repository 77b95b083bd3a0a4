"""Find the networks of each step of a UNet at a size: its variants, and the networks before them.

`EngineSet`s of loaded engines and of their records in a manifest have the same answer, so the memory of a loop is known
before anything is loaded.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from model.denoising.networks import Denoiser, DenoiserVariant, StepNetwork
from model.denoising.ranks import ALONE, Ranks
from model.engines.engine import Engine, EngineSet
from model.engines.features import FEATURES, features_of, has, parse_name
from model.pipeline.components import COMPONENTS
from model.pipeline.spec import Components, added_component


@dataclass(frozen=True)
class StepEngines:
    """The engines of a release, by their names in the manifest.

    exact: the engines in fp16 for steps in fp16, of names that `served` has in 8 bits. quantized: the names in `served`
    whose weights are quantized.
    """

    served: Mapping[str, EngineSet]
    exact: Mapping[str, EngineSet] = field(default_factory=dict)
    quantized: Collection[str] = ()


def engine_sets(engines: Iterable[Engine]) -> dict[str, EngineSet]:
    """Group engines of one precision by name. Engines for bands take the place of their component's own."""
    engines = list(engines)
    of_bands = [engine for engine in engines if parse_name(engine.component).bands > 1]
    replaced = [(parse_name(engine.component).component, engine.bucket) for engine in of_bands]
    by_name: dict[str, list[Engine]] = {}
    for engine in of_bands:
        by_name.setdefault(parse_name(engine.component).component, []).append(engine)
    for engine in engines:
        if engine not in of_bands and (engine.component, engine.bucket) not in replaced:
            by_name.setdefault(engine.component, []).append(engine)
    return {name: EngineSet(group) for name, group in by_name.items()}


def find_denoiser(
    engines: StepEngines, unet: str, height: int, width: int, ranks: Ranks = ALONE, components: Components = COMPONENTS
) -> Denoiser:
    """Return the networks of each step of a UNet at `height` x `width` pixels.

    Variants and networks without engines of this size are left out. So is a network whose feature no variant has, and a
    variant for the outputs of networks that are all left out, unless no other variant has its other features. With
    several ranks nothing is paired: a half of guidance without text would not be faster than the rank that runs the
    other half. Raises EngineError if the UNet has no engines of this size.
    """
    engines.served[unet].serving(height, width)

    def of_size(found: Mapping[str, EngineSet]) -> dict[str, EngineSet]:
        return {name: one for name, one in found.items() if one.of_size(height, width)}

    served, exact = of_size(engines.served), of_size(engines.exact)
    variants = [*_variants(served, unet, engines.quantized, ranks), *_variants(exact, unet, (), ranks)]
    part = components[unet].part
    before = [
        StepNetwork(name.partition(".")[2] or name, engine_set, spec.adds_to, spec.inputs)
        for name, engine_set in served.items()
        for spec in [added_component(name) or components.get(name)]
        if spec is not None and spec.adds_to and spec.part == part
    ]
    left = {network.feature for network in before}
    for variant in list(variants):
        rest = frozenset(name for name in variant.features if not _is_added(name) or name in left)
        if rest != variant.features and any(one.features == rest and one.exact == variant.exact for one in variants):
            variants.remove(variant)
    taken = frozenset().union(*(variant.features for variant in variants))
    return Denoiser(tuple(variants), tuple(network for network in before if network.feature in taken), ranks)


def _variants(
    engines: Mapping[str, EngineSet], unet: str, quantized: Collection[str], ranks: Ranks
) -> Iterator[DenoiserVariant]:
    """Yield the variants of a UNet, the fewest features first."""
    features = {
        name: features_of(name, one.signature) for name, one in engines.items() if parse_name(name).component == unet
    }
    paired = {
        frozenset(name for name in own if not FEATURES[name].paired): engines[component]
        for component, own in features.items()
        if has(own, "paired") and not any(map(_is_added, own)) and ranks.size == 1
    }
    for name, own in sorted(features.items(), key=lambda one: len(one[1])):
        if not has(own, "paired"):
            yield DenoiserVariant(engines[name], own, paired.get(own), exact=name not in quantized)


def _is_added(feature: str) -> bool:
    return any(one.added for one in FEATURES[feature].inputs)
