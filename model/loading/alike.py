"""Whether releases can share a server: their engines must be the same, so that each can run on the engines of another.

Imports neither torch nor numpy.
"""

from collections.abc import Iterator, Sequence

from model.errors import ConfigError
from model.loading.select import Selection


def check_alike(selections: Sequence[Selection]) -> None:
    """Raise ConfigError unless releases have the same architecture, precision, sizes, variants and engines.

    Weights, tokenizers, schedulers and defaults may differ. Then all releases run the same code, and none of them
    changes what the others may be asked. Plans of TensorRT are refused: they have their own copies of the weights.
    """
    first, *others = selections
    if others and any(engine.tensorrt for engines in first.engines.values() for engine in engines):
        raise ConfigError(
            f"{first.manifest.name} and {others[0].manifest.name} cannot share a server. Plans of TensorRT have their "
            "own copies of the weights, which the weights of another release cannot replace.",
            "Set `runtime: aot_inductor`, or serve them by servers of their own.",
        )
    for other in others:
        own, theirs = set(_traits(first)), set(_traits(other))
        if different := sorted(own ^ theirs):
            owner = first if different[0] in own else other
            more = f", and {len(different) - 1} more" if len(different) > 1 else ""
            raise ConfigError(
                f"{first.manifest.name} and {other.manifest.name} cannot share a server. Only {owner.manifest.name} "
                f"has {different[0]}{more}.",
                "Build both with the same options and the same version, or serve them by servers of their own.",
            )


def _traits(selection: Selection) -> Iterator[str]:
    """Yield what the releases of a server have in common, in words. What explains more comes first in the alphabet."""
    manifest = selection.manifest
    for records in selection.engines.values():
        for one in records:
            engine = f"{one.component} in {one.precision} at {one.bucket.label}"
            yield f"an engine of {engine}"
            yield f"this engine of {engine}: {one.key[:12]}"
    for name, digest in manifest.architectures.items():
        yield f"this architecture of {name}: {digest[:12]}"
    yield f"the family {manifest.family}"
    yield f"the target {selection.target}"
    first: dict[str, str] = {}
    for record in selection.streamed_weights():
        for digest in record.identity:
            if (owner := first.setdefault(digest, record.component)) != record.component:
                yield f"weights of {owner} in {record.component}"
