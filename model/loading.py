"""A release in a store -> a loaded model on this device. Fetch, verify, map, open; every mismatch is an answer.

Promises that nothing of a release is used before its digest was checked, and that a release which cannot be served
here is refused with one sentence that says why and which command mends it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from model import components
from model.coldstart import ColdStart
from model.components import BASE_COMPONENTS, REFINER_COMPONENTS
from model.engines import Engine, EngineSet
from model.engines.aot_inductor import AotInductorEngine
from model.errors import ManifestError, MissingComponent, NoEngineForTarget
from model.pipeline import LoadedModel
from model.request import Defaults, ServedModel, SizeList, SizeRange, read_defaults
from model.schedule import NoiseSchedule
from model.store import Store
from model.store.manifest import EngineRecord, Manifest, WeightsRecord
from model.target import Target
from model.tokenizer import ClipTokenizer, TokenizerSettings
from model.weights import WeightsCache

# Where a release has a component in several precisions, the first of these is served.
_PRECISIONS = ("fp16", "bf16", "fp32")


@dataclass(frozen=True)
class ServedBucket:
    """One entry of the deployment's `buckets`: which engines to load. Pixels; rows of the UNet at most."""

    height: int
    width: int
    rows: int

    @classmethod
    def from_config(cls, entry: Mapping[str, Any]) -> "ServedBucket":
        try:
            return cls(**{key: int(value) for key, value in entry.items()})
        except (TypeError, ValueError) as error:
            raise ManifestError(f"config: a bucket is height, width and rows as numbers, not {dict(entry)}.") from error


@dataclass(frozen=True)
class Loaded:
    """What serving needs: the model, what requests may ask of it, and what it is."""

    model: LoadedModel
    served: ServedModel
    release: str
    target: str
    runtime: str
    weight_bytes: int


def load_release(
    store: Store,
    release: str,
    targets: Sequence[Target],
    buckets: Sequence[ServedBucket],
    cold_start: ColdStart,
) -> Loaded:
    """Load `release` for the first of `targets` it has engines for; an empty `buckets` means all of them.

    Raises ReleaseNotFound, ManifestError, MissingComponent, NoEngineForTarget, CorruptBlob or EngineError.
    """
    device = torch.device("cuda:0" if targets[0].device == "cuda" else "cpu")
    with cold_start.phase("resolve"):
        manifest = store.read_release(release)
        defaults = read_defaults(manifest.defaults)
        names = required_components(manifest)
        target = choose_target(manifest, targets, names)
        chosen = {name: choose_engines(manifest, name, target, buckets) for name in names}
        weights = {name: weights_of(manifest, chosen[name][0]) for name in names}
        check_memory(device, weights.values())
    with cold_start.phase("weights"):
        cache = WeightsCache(store, device)
        tensors = {name: cache.load(record) for name, record in weights.items()}
        tokenizers = {name: _tokenizer(store, manifest, name) for name in ("tokenizer", "tokenizer_2")}
    with cold_start.phase("engines"):
        engines = {
            name: EngineSet([_open(store, record, tensors[name], device) for record in records])
            for name, records in chosen.items()
        }
    model = LoadedModel(
        engines=engines,
        tokenizers=tokenizers,
        noise_schedules={name: NoiseSchedule.from_dict(entries) for name, entries in manifest.schedulers.items()},
        settings=manifest.settings,
        device=device,
        shares_text_encoder_2=components.REFINER_TEXT_ENCODER_2 in weights
        and weights[components.REFINER_TEXT_ENCODER_2].identity == weights[components.TEXT_ENCODER_2].identity,
    )
    served = ServedModel(
        native_width=manifest.settings.native_width,
        native_height=manifest.settings.native_height,
        sizes=served_sizes(chosen, buckets),
        has_refiner=manifest.has_refiner,
        defaults=defaults,
    )
    return Loaded(model, served, release, target, chosen[components.UNET][0].runtime, cache.bytes)


def required_components(manifest: Manifest) -> tuple[str, ...]:
    """The components that serving this release takes. Raises MissingComponent naming what is not there."""
    names = BASE_COMPONENTS + (REFINER_COMPONENTS if manifest.settings.refiner else ())
    missing = [name for name in names if name not in manifest.architectures]
    missing += [name for name in names if name not in {weights.component for weights in manifest.weights}]
    missing += [name for name in ("tokenizer", "tokenizer_2") if name not in manifest.tokenizers]
    missing += [f"{name} scheduler" for name in ("base", "refiner") if _lacks_scheduler(manifest, name)]
    if missing:
        raise MissingComponent(
            f"Release {manifest.name} lacks {', '.join(dict.fromkeys(missing))}: build the whole model and publish it "
            "as a new release (`preheat build`, `preheat publish`)."
        )
    return names


def _lacks_scheduler(manifest: Manifest, name: str) -> bool:
    needed = name == "base" or manifest.settings.refiner is not None
    return needed and name not in manifest.schedulers


def choose_target(manifest: Manifest, targets: Sequence[Target], names: Sequence[str]) -> str:
    """The first target key, best first, for which every component has an engine. Raises NoEngineForTarget."""
    built: dict[str, set[str]] = {}
    for engine in manifest.engines:
        built.setdefault(engine.target, set()).add(engine.component)
    for target in targets:
        if set(names) <= built.get(target.key, set()):
            return target.key
    lacking = set(names) - built.get(targets[0].key, set())
    some = f" for its {', '.join(sorted(lacking))}" if targets[0].key in built else ""
    raise NoEngineForTarget(
        f"Release {manifest.name} has no engine for this machine ({targets[0].key}){some}; it has engines for "
        f"{', '.join(manifest.targets) or 'nothing'}. Run `preheat build` on such a machine and publish a new release."
    )


def choose_engines(manifest: Manifest, name: str, target: str, buckets: Sequence[ServedBucket]) -> list[EngineRecord]:
    """The engines of a component that the configured buckets need. Raises NoEngineForTarget naming the bucket."""
    every = [engine for engine in manifest.engines if engine.component == name and engine.target == target]
    precision = min((engine.precision for engine in every), key=_PRECISIONS.index)
    every = [engine for engine in every if engine.precision == precision]
    if not buckets:
        return every
    chosen: dict[str, EngineRecord] = {}
    for bucket in buckets:
        fitting = [e for e in every if e.bucket.holds(e.bucket.rows.min, bucket.height, bucket.width)]
        fitting = [e for e in fitting if e.bucket.rows.min <= bucket.rows]
        if not fitting:
            raise NoEngineForTarget(
                f"Release {manifest.name} has no {name} engine for {bucket.width}x{bucket.height} with {bucket.rows} rows "
                f"on {target}: build that bucket, or take it out of the config's buckets."
            )
        chosen |= {engine.key: engine for engine in fitting}
    return list(chosen.values())


def weights_of(manifest: Manifest, engine: EngineRecord) -> WeightsRecord:
    """The weights in the precision and layout that an engine wants. Raises MissingComponent."""
    for record in manifest.weights:
        if (record.component, record.precision, record.layout) == (
            engine.component,
            engine.precision,
            engine.layout,
        ):
            return record
    raise MissingComponent(
        f"Release {manifest.name} has no {engine.precision} weights of {engine.component} in layout {engine.layout}: "
        "build it again and publish a new release."
    )


def check_memory(device: torch.device, records: Sequence[WeightsRecord] | Any) -> None:
    """Refuse before loading what cannot fit: the distinct weights against the GPU's free memory."""
    if device.type != "cuda":
        return
    needed = sum({blob.sha256: blob.bytes for record in records for blob in record.blobs}.values())
    free = torch.cuda.mem_get_info(device)[0]
    if needed > free:
        raise NoEngineForTarget(
            f"The weights take {needed / 2**30:.1f} GiB and this GPU has {free / 2**30:.1f} GiB free: use a larger GPU."
        )


def served_sizes(chosen: Mapping[str, Sequence[EngineRecord]], buckets: Sequence[ServedBucket]) -> SizeList | SizeRange:
    """The sizes that every sized component serves: a rule where engines are dynamic, else a list.

    Configured buckets narrow it: only their sizes are served then.
    """
    if buckets:
        return SizeList(tuple(sorted({(bucket.width, bucket.height) for bucket in buckets})))
    sized = [[e.bucket for e in records if e.bucket.height] for records in chosen.values()]
    spans = [[(b.height, b.width) for b in component if b.height and b.width] for component in sized if component]
    if all(len(component) == 1 and component[0][0].min < component[0][0].max for component in spans):
        sides = [side for component in spans for side in component[0]]
        return SizeRange(
            max(side.min for side in sides),
            min(side.max for side in sides),
            max(side.multiple for side in sides),
        )
    listed = [{(width.min, height.min) for height, width in component} for component in spans]
    return SizeList(tuple(sorted(set.intersection(*listed))))


def _tokenizer(store: Store, manifest: Manifest, name: Any) -> ClipTokenizer:
    record = manifest.tokenizers[name]
    settings = TokenizerSettings(
        max_length=record.max_length,
        bos_token_id=record.bos_token_id,
        eos_token_id=record.eos_token_id,
        pad_token_id=record.pad_token_id,
    )
    return ClipTokenizer(store.get(record.blob.sha256, record.blob.bytes).read_bytes(), settings)


def _open(store: Store, record: EngineRecord, weights: Mapping[str, torch.Tensor], device: torch.device) -> Engine:
    if record.runtime != "aot_inductor":
        raise NoEngineForTarget(
            f"This server runs AOTInductor engines; {record.component} is built for {record.runtime}."
        )
    package = store.get(record.blob.sha256, record.blob.bytes)
    constants = store.get(record.constants.sha256, record.constants.bytes).read_bytes()
    return AotInductorEngine(record.component, package, record.signature, record.bucket, constants, weights, device)


__all__ = ["Defaults", "Loaded", "ServedBucket", "load_release"]
