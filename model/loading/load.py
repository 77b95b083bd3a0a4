"""A release in a store -> a loaded model on this device. Fetch, verify, map, open; every mismatch is an answer.

Promises that nothing of a release is used before its digest was checked, and that a release which cannot be served
here is refused with one sentence that says why and which command mends it.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

from model.api.request import (
    Defaults,
    ServedModel,
    SizeList,
    SizeRange,
    read_defaults,
)
from model.cold_start import ColdStart
from model.denoising.graph_loop import GraphLoop
from model.denoising.noise_schedule import NoiseSchedule
from model.engines import components
from model.engines.aot_inductor.engine import AotInductorEngine
from model.engines.components import (
    BASE_COMPONENTS,
    REFINER_COMPONENTS,
)
from model.engines.engine import (
    Engine,
    EngineSet,
)
from model.engines.graphed import GraphedEngine
from model.engines.tensorrt.plans import (
    Plans,
    extra_blobs,
    extra_bytes,
)
from model.errors import ManifestError, MissingComponent, NoEngineForTarget, RequestRefused
from model.loading.runtimes import (
    can_run,
    check_installed,
    check_refit,
    fastest_first,
    servable,
)
from model.loading.target import Target
from model.pipeline.text_to_image import LoadedModel
from model.pipeline.tokenizer import (
    ClipTokenizer,
    TokenizerSettings,
)
from model.store.manifest import Blob, EngineRecord, Manifest, Span, WeightsRecord
from model.store.signature import PublicKey, check_signature
from model.store.store import Store
from model.weights.cache import WeightsCache
from model.weights.layout import from_stored

_TOKENIZERS: tuple[Literal["tokenizer", "tokenizer_2"], ...] = ("tokenizer", "tokenizer_2")


@dataclass(frozen=True)
class ServedBucket:
    """One entry of the deployment's `buckets`: which engines to load. Pixels; rows of the UNet at most."""

    height: int
    width: int
    rows: int

    @classmethod
    def from_config(cls, entry: Mapping[str, Any]) -> "ServedBucket":
        """Raises ManifestError unless `entry` is three whole numbers above zero."""
        whole = isinstance(entry, Mapping) and set(entry) == {"height", "width", "rows"}
        if not whole or not all(type(value) is int and value > 0 for value in entry.values()):
            raise ManifestError(
                f"config: a bucket is {{height: 1024, width: 1024, rows: 2}}, three whole numbers, not {entry!r:.200}: "
                "mend model_metadata.preheat.buckets in config.yaml."
            )
        return cls(**entry)


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
    public_keys: Sequence[PublicKey] = (),
) -> Loaded:
    """Load `release` for the first of `targets` it has engines for; an empty `buckets` means all of them. With
    `public_keys`, only what one of them has signed.

    Raises ReleaseNotFound, ManifestError, UntrustedRelease, MissingComponent, NoEngineForTarget, StoreError,
    CorruptBlob or EngineError; whatever the manifest alone can tell, before any blob is read.
    """
    device = torch.device("cuda:0" if targets[0].device == "cuda" else "cpu")
    if device.type == "cuda":
        # What is left to the host is small: to wake a thread for each of its cores takes longer than the work.
        torch.set_num_threads(1)
    with cold_start.phase("resolve"):
        manifest = store.read_release(release)
        check_signature(manifest, public_keys)
        names = required_components(manifest)
        target = choose_target(manifest, fastest_first(manifest, targets, names), names)
        chosen = {name: choose_engines(manifest, name, target, buckets) for name in names}
        for name in components.GUIDED:
            if guided := guided_engines(manifest, name, chosen[components.UNET]):
                chosen[name] = guided
        weights = {name: [weights_of(manifest, engine) for engine in engines] for name, engines in chosen.items()}
        for name, engines_of_it in chosen.items():
            check_installed(manifest, engines_of_it)
            for engine, record in zip(engines_of_it, weights[name], strict=True):
                check_refit(engine, record)
        served = served_model(manifest, {name: chosen[name] for name in names}, buckets)
        noise_schedules: dict[str, NoiseSchedule] = {
            name: NoiseSchedule.from_dict(entries) for name, entries in manifest.schedulers.items()
        }
        every = [engine for records in chosen.values() for engine in records]
        sizes = {name: sum(blob.bytes for blob in records[0].blobs) for name, records in weights.items()}
        extra = extra_bytes(every, sizes) + (loop_bytes(chosen) if device.type == "cuda" else 0)
        check_memory(device, [r for records in weights.values() for r in records], extra)
    needed = {name: list({record.identity: record for record in records}.values()) for name, records in weights.items()}
    with WeightsCache(store, device) as cache:
        streamed = cache.begin([record for records in needed.values() for record in records], cold_start)
        blobs = needed_blobs(manifest, chosen, {} if streamed else needed)
        with cold_start.phase("fetch"):
            store.fetch(blobs)
        with cold_start.phase("verify"):
            verify(store, blobs)
        with cold_start.phase("tokenizers"):
            tokenizers: dict[str, ClipTokenizer] = {name: _tokenizer(store, manifest, name) for name in _TOKENIZERS}
        with cold_start.phase("weights"):
            tensors = {
                name: [_in_layout(cache.load(record), record) for record in records]
                for name, records in weights.items()
            }
        with cold_start.phase("engines"):
            plans = Plans(store, device)
            engines = {
                name: EngineSet(
                    [_open(store, *pair, device, plans) for pair in zip(records, tensors[name], strict=True)]
                )
                for name, records in chosen.items()
            }
    second, refiners = weights[components.TEXT_ENCODER_2], weights.get(components.REFINER_TEXT_ENCODER_2, [])
    model = LoadedModel(
        engines=engines,
        tokenizers=tokenizers,
        noise_schedules=noise_schedules,
        settings=manifest.settings,
        device=device,
        shares_text_encoder_2={record.identity for record in second} == {record.identity for record in refiners},
    )
    return Loaded(model, served, release, target, chosen[components.UNET][0].runtime, cache.bytes)


def _in_layout(tensors: Mapping[str, torch.Tensor], record: WeightsRecord) -> dict[str, torch.Tensor]:
    return {name: from_stored(tensor, record.layout) for name, tensor in tensors.items()}


def required_components(manifest: Manifest) -> tuple[str, ...]:
    """The components that serving this release takes. Raises MissingComponent naming what is not there."""
    names = BASE_COMPONENTS + (REFINER_COMPONENTS if manifest.settings.refiner else ())
    missing = [name for name in names if name not in manifest.architectures]
    missing += [name for name in names if name not in {weights.component for weights in manifest.weights}]
    missing += [name for name in _TOKENIZERS if name not in manifest.tokenizers]
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
        f"{', '.join(manifest.targets) or 'nothing'}. Run `preheat build` on such a machine and publish "
        "a new release (`preheat publish`)."
    )


def choose_engines(manifest: Manifest, name: str, target: str, buckets: Sequence[ServedBucket]) -> list[EngineRecord]:
    """The engines of a component that the configured buckets need. Raises NoEngineForTarget naming the bucket."""
    every = servable(manifest, name, target)
    if not every:
        raise NoEngineForTarget(
            f"Release {manifest.name} has no {name} engine for {target} that this server can run (aot_inductor's, "
            "or tensorrt's with what its refit needs): build one (`preheat build`) and publish a new release "
            "(`preheat publish`)."
        )
    if not buckets or all(engine.bucket.height is None for engine in every):
        return every  # what reads text or times has no size, and its rows are not the UNet's
    chosen: dict[str, EngineRecord] = {}
    for bucket in buckets:
        fitting = [e for e in every if e.bucket.holds(e.bucket.rows.min, bucket.height, bucket.width)]
        fitting = [e for e in fitting if e.bucket.rows.min <= bucket.rows]
        if not fitting:
            raise NoEngineForTarget(
                f"Release {manifest.name} has no {name} engine for {bucket.width}x{bucket.height} with {bucket.rows} "
                f"rows on {target}: build it (`preheat build --size {bucket.width}x{bucket.height}@{bucket.rows}`) and "
                "publish a new release, or take that bucket out of the config."
            )
        chosen |= {engine.key: engine for engine in fitting}
    return list(chosen.values())


def guided_engines(manifest: Manifest, name: str, unets: Sequence[EngineRecord]) -> list[EngineRecord]:
    """The engines of `name`, a component for guided rows alone, that a release has beside these of the UNet."""
    beside = [(e.target, e.runtime, e.precision, e.layout, e.bucket) for e in unets]
    every = [engine for engine in manifest.engines if engine.component == name]
    return [e for e in every if (e.target, e.runtime, e.precision, e.layout, e.bucket) in beside and can_run(e)]


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
        "build it again and publish a new release (`preheat build`, `preheat publish`)."
    )


def needed_blobs(
    manifest: Manifest,
    engines: Mapping[str, Sequence[EngineRecord]],
    weights: Mapping[str, Sequence[WeightsRecord]],
) -> list[Blob]:
    """The blobs that loading these reads, the largest first: what takes longest must not begin last."""
    blobs = [blob for records in weights.values() for record in records for blob in record.blobs]
    blobs += [blob for records in engines.values() for engine in records for blob in (engine.blob, engine.constants)]
    blobs += [blob for records in engines.values() for blob in extra_blobs(records)]
    blobs += [manifest.tokenizers[name].blob for name in _TOKENIZERS]
    return sorted({blob.sha256: blob for blob in blobs}.values(), key=lambda blob: -blob.bytes)


def verify(store: Store, blobs: Iterable[Blob]) -> None:
    """Hash blobs side by side, which releases the interpreter lock; `Store.get` remembers which are right."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="preheat-verify") as pool:
        for _ in pool.map(lambda blob: store.get(blob.sha256, blob.bytes), blobs):
            pass


def check_memory(device: torch.device, records: Iterable[WeightsRecord], extra: int = 0) -> None:
    """Refuse before loading what cannot fit: the distinct weights and `extra` bytes against the GPU's free memory. What
    steps and decoding take besides, the warm-up finds out."""
    if device.type != "cuda":
        return
    needed = sum({blob.sha256: blob.bytes for record in records for blob in record.blobs}.values()) + extra
    free = torch.cuda.mem_get_info(device)[0]
    if needed > free:
        raise NoEngineForTarget(
            f"Weights and loops take {needed / 2**30:.1f} GiB and this GPU has {free / 2**30:.1f} GiB free: configure "
            "fewer rows or sizes (model_metadata.preheat.buckets in config.yaml), or use a larger GPU."
        )


def loop_bytes(chosen: Mapping[str, Sequence[EngineRecord]]) -> int:
    """Device memory of the buffers of all loops that these engines, by component, will have on a GPU."""
    total = 0
    for name in (components.UNET, components.REFINER_UNET):
        if records := chosen.get(name):
            engines = EngineSet([cast(Engine, record) for record in records])  # of which only shapes are asked
            buckets = [record.bucket for record in records]
            for height, width in {(b.height.max, b.width.max) for b in buckets if b.height and b.width}:
                if engines.is_static(height, width):
                    total += GraphLoop(engines, height, width, torch.device("meta")).bytes
    return total


def served_model(
    manifest: Manifest, chosen: Mapping[str, Sequence[EngineRecord]], buckets: Sequence[ServedBucket]
) -> ServedModel:
    """What requests may ask for. Raises ManifestError or NoEngineForTarget where the release's own defaults are not
    served: every request that leaves them open would be refused."""
    defaults = read_defaults(manifest.defaults)
    settings = manifest.settings
    if defaults.use_refiner and not manifest.has_refiner:
        raise ManifestError(
            f"Release {manifest.name} uses a refiner by default and has none: build it with one "
            "(`preheat build --refiner`) and publish a new release (`preheat publish`)."
        )
    native = f"{settings.native_width}x{settings.native_height}"
    sizes = served_sizes(chosen, buckets)
    try:
        sizes.check(settings.native_width, settings.native_height)
    except RequestRefused as error:
        raise NoEngineForTarget(
            f"Release {manifest.name} draws {native} unless asked otherwise, and what is loaded here does not: {error} "
            "Build that size (`preheat build`), or add it to the config's buckets."
        ) from error
    return ServedModel(settings.native_width, settings.native_height, sizes, manifest.has_refiner, defaults)


def served_sizes(chosen: Mapping[str, Sequence[EngineRecord]], buckets: Sequence[ServedBucket]) -> SizeList | SizeRange:
    """The sizes that every sized component serves: a rule where all engines are dynamic, else a list.

    Configured buckets narrow it: only their sizes are served then.
    """
    if buckets:
        return SizeList(tuple(sorted({(bucket.width, bucket.height) for bucket in buckets})))
    sized = [spans for records in chosen.values() if (spans := _spans(records))]
    static = {(w.min, h.min) for spans in sized for h, w in spans if h.min == h.max and w.min == w.max}
    if static or not sized:
        held = [size for size in static if all(any(_holds(span, size) for span in spans) for spans in sized)]
        return SizeList(tuple(sorted(held)))
    # Of several dynamic engines of a component the widest decides.
    sides = [side for spans in sized for side in max(spans, key=lambda span: span[0].max)]
    return SizeRange(
        max(side.min for side in sides),
        min(side.max for side in sides),
        math.lcm(*(side.multiple for side in sides)),
    )


def _spans(records: Sequence[EngineRecord]) -> list[tuple[Span, Span]]:
    """Heights and widths of a component's engines; none for a text encoder."""
    return [(e.bucket.height, e.bucket.width) for e in records if e.bucket.height and e.bucket.width]


def _holds(span: tuple[Span, Span], size: tuple[int, int]) -> bool:
    return span[0].holds(size[1]) and span[1].holds(size[0])


def _tokenizer(store: Store, manifest: Manifest, name: Literal["tokenizer", "tokenizer_2"]) -> ClipTokenizer:
    record = manifest.tokenizers[name]
    settings = TokenizerSettings(
        max_length=record.max_length,
        bos_token_id=record.bos_token_id,
        eos_token_id=record.eos_token_id,
        pad_token_id=record.pad_token_id,
    )
    return ClipTokenizer(_read(store, record.blob), settings)


def _open(
    store: Store, record: EngineRecord, weights: Mapping[str, torch.Tensor], device: torch.device, plans: Plans
) -> Engine:
    engine: Engine
    if record.tensorrt is not None:
        engine = plans.open(record, weights)
    else:
        constants = _read(store, record.constants)
        package = store.get(record.blob.sha256, record.blob.bytes)
        engine = AotInductorEngine(
            record.component, package, record.signature, record.bucket, constants, weights, device
        )
    # The loops have graphs of their own, around the UNet and all else of a step.
    return engine if record.component in components.LOOPED or device.type != "cuda" else GraphedEngine(engine)


def _read(store: Store, blob: Blob) -> bytes:
    """A small blob whole; the bytes that were checked are the bytes that are used."""
    buffer = bytearray(blob.bytes)
    store.read(blob.sha256, memoryview(buffer))
    return bytes(buffer)


__all__ = ["Defaults", "Loaded", "ServedBucket", "load_release"]
