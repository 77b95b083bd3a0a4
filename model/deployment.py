"""What a server serves: the releases, and what of them. The load, the prefetch and other processes use the same value.

Imports neither torch nor numpy.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Annotated

from pydantic import PlainSerializer, PlainValidator, TypeAdapter

from model.settings import RuntimeChoice, ServedBucket, Settings
from model.store.keys import release_not_found
from model.store.manifest import Fp16Steps
from model.store.precision import Precision, PrecisionField
from model.store.signature import PublicKey
from model.store.store import Store
from model.validation import Safety

_Key = Annotated[PublicKey, PlainValidator(PublicKey.parse), PlainSerializer(str)]


@dataclass(frozen=True)
class ServedPrecision:
    """What a deployment configures about precision.

    `unet`: see `model.loading.runtimes.servable_engines`. `fp16_steps`: None: the release's default. `compares`: images
    of 8-bit UNets are compared with fp16.
    """

    unet: PrecisionField | None = None
    fp16_steps: Fp16Steps | None = None
    compares: bool = False


@dataclass(frozen=True)
class ServedAdapters:
    """What a deployment configures about adapters. `names`: and patterns. `cache_bytes`: see `AdapterLibrary`."""

    names: tuple[str, ...] = ()
    cache_bytes: int = 4 * 2**30

    @property
    def fixed(self) -> tuple[str, ...]:
        """The adapters that are read when a server starts, without duplicates."""
        return tuple(dict.fromkeys(name for name in self.names if not is_pattern(name)))

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns of further adapters, which are read when a request names them."""
        return tuple(name for name in self.names if is_pattern(name))


@dataclass(frozen=True)
class Deployment:
    """What a server serves. It can be pickled, and sent as JSON."""

    releases: tuple[str, ...]
    """The releases, or until they are `resolved` patterns of them. Requests without a model get the first."""
    public_keys: tuple[_Key, ...] = ()
    """The releases must be signed by one of these; empty: no signature is needed."""
    runtime: RuntimeChoice = "aot_inductor"
    buckets: tuple[ServedBucket, ...] = ()
    """The sizes to serve; empty: all sizes of the release."""
    precision: ServedPrecision = ServedPrecision()
    adapters: ServedAdapters = ServedAdapters()
    """The adapters that requests may use."""
    safety: Safety = "off"
    """What happens with images that the safety checker flags. It is loaded unless this is off."""
    ranks: int = 1
    """The ranks, or groups of ranks with a band each, that divide the batches of the loops."""
    bands: int = 1
    """The bands that each image is divided into."""
    components: frozenset[str] | None = None
    """The only components to fetch and open, for a process that runs a part of the pipeline; None: all."""

    @classmethod
    def of(cls, settings: Settings) -> "Deployment":
        """Return the deployment that settings describe. Raises ConfigError if they name no release."""
        unet = None if settings.precision is None else Precision.named(settings.precision)
        return cls(
            releases=settings.release_patterns(),
            public_keys=tuple(settings.public_key),
            runtime=settings.runtime,
            buckets=tuple(settings.buckets),
            precision=ServedPrecision(unet, settings.fp16_steps, settings.compare_every is not None),
            adapters=ServedAdapters(tuple(settings.loras), settings.lora_cache_bytes),
            safety=settings.safety,
            ranks=settings.gpus_per_image // settings.bands_per_image,
            bands=settings.bands_per_image,
        )

    def resolved(self, store: Store) -> "Deployment":
        """Return the deployment with its patterns resolved; see `resolve_releases`."""
        return replace(self, releases=resolve_releases(self.releases, store))

    def alone(self, release: str) -> "Deployment":
        """Return the deployment of one of the releases, with its share of the memory for unused adapters."""
        share = self.adapters.cache_bytes // len(self.releases)
        return replace(self, releases=(release,), adapters=replace(self.adapters, cache_bytes=share))

    def of_follower(self) -> "Deployment":
        """Return what a rank other than 0 loads: no adapters, which one GPU alone serves, and no safety checker."""
        return replace(self, adapters=ServedAdapters(), safety="off")

    @classmethod
    def from_json(cls, text: str) -> "Deployment":
        """Return the deployment that `to_json` wrote."""
        return TypeAdapter(cls).validate_json(text)

    def to_json(self) -> str:
        """Return the deployment as JSON, for another process."""
        return TypeAdapter(Deployment).dump_json(self).decode()


def is_pattern(name: str) -> bool:
    """True for a pattern of adapters' names."""
    return "*" in name or "?" in name


def fits_pattern(name: str, patterns: Iterable[str]) -> bool:
    """True if an adapter's name fits one of these patterns, see `fnmatch`."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def resolve_releases(patterns: Sequence[str], store: Store) -> tuple[str, ...]:
    """Return the releases that patterns name. "NAME/*" stands for all versions in the store, the highest number first,
    and versions that are no number last.

    Raises ReleaseNotFound for a pattern that fits none, and StoreError.
    """
    names: list[str] = []
    for pattern in patterns:
        if not pattern.endswith("/*"):
            names.append(pattern)
            continue
        found = store.releases(pattern.removesuffix("/*"))
        if not found:
            raise release_not_found(pattern, store.url, store.releases())
        names += sorted(found, key=version_number, reverse=True)
    return tuple(dict.fromkeys(names))


def version_number(release: str) -> int:
    """Return the number that a release's version is, -1 if it is no number."""
    version = release.rpartition("/")[2]
    return int(version) if re.fullmatch("[0-9]{1,18}", version) else -1
