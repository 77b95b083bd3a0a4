"""Load a release from a store onto this device: select, fetch, verify, map, open.

Nothing of a release is used before its digest is checked. A release that this machine cannot serve is refused with the
cause and the command that fixes it.
"""

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

import torch

from model.adapters.block_scales import unet_blocks
from model.adapters.library import AdapterLibrary
from model.cold_start import ColdStart
from model.cuda.libraries import loading_libraries
from model.denoising.edm_schedule import AnyNoiseSchedule, schedule_from_dict
from model.denoising.samplers import served_samplers
from model.deployment import Deployment
from model.engines.aot_inductor.compiled_engine import AotInductorEngine
from model.engines.aot_inductor.package import check_identity, folder_name
from model.engines.engine import Engine
from model.engines.features import engine_name, feature_sets
from model.engines.graphed import GraphedEngine
from model.engines.signatures import LORA_DOWN
from model.engines.tensorrt.plans import Plans
from model.engines.tensorrt.runtime_caches import RuntimeCacheFolder
from model.errors import PreheatError, ReleaseNotLoaded
from model.loading.adapters import open_library, read_adapters
from model.loading.select import Selection, select
from model.loading.served import ServedModel, ServedRelease, served_model
from model.loading.target import Target
from model.loading.token_tables import check_token_ids
from model.pipeline.components import COMPONENTS, FAMILIES, find_component, unets
from model.pipeline.denoisers import engine_sets
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.spec import ADDED_COMPONENTS
from model.prompts.tokenizer import ClipTokenizer, open_tokenizer
from model.store.adapter_record import AdapterRecord
from model.store.manifest import Blob, Bucket, EngineRecord, Fp16Steps, WeightsRecord
from model.store.precision import FP16, Precision
from model.store.signature import check_signature
from model.store.store import Store
from model.validation import BAND_COUNTS
from model.weights.cache import WeightsCache
from model.weights.layout import from_stored
from model.weights.slot import WeightSlot
from model.weights.stream import Tensors


@dataclass(frozen=True)
class Loaded:
    """A loaded release: the model, the choices of requests, and where it comes from.

    `weight_bytes`: of the weights that were streamed, and of those inside plans.
    """

    model: LoadedModel
    served: ServedModel
    release: str
    target: str
    runtime: str
    weight_bytes: int
    slot: WeightSlot = field(default_factory=lambda: WeightSlot({}, {}))
    plans: Plans | None = None
    precision: Precision = FP16

    @property
    def summary(self) -> ServedRelease:
        """The facts of the release that requests and their answers name."""
        device = self.model.device
        return ServedRelease(
            self.served,
            self.release,
            self.target,
            self.runtime,
            torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
            served_samplers(self.model.noise_schedules["base"]),
        )


@dataclass(frozen=True)
class Resolved:
    """What the manifest of a release says of its load. deployment: of this release alone. selection: of the
    deployment's components only.
    """

    deployment: Deployment
    selection: Selection
    served: ServedModel
    unet: EngineRecord
    adapters: Sequence[AdapterRecord]
    noise_schedules: Mapping[str, AnyNoiseSchedule]

    @property
    def release(self) -> str:
        """The name of the release."""
        [release] = self.deployment.releases
        return release

    def streamed_weights(self) -> list[WeightsRecord]:
        """Return the weights that are loaded onto the device."""
        unquantized = self.selection.unquantized
        return [*self.selection.streamed_weights(), *([unquantized] if unquantized else ())]

    def benchmarks(self) -> dict[tuple[str, bool, Bucket], float]:
        """Return the release's benchmarks; see `LoadedModel`."""
        return {
            (one.component, one.precision.is_quantized, one.bucket): one.benchmark.median / 1000
            for records in self.selection.engines.values()
            for one in records
            if one.benchmark is not None
        }


def resolve(store: Store, deployment: Deployment, targets: Sequence[Target]) -> Resolved:
    """Read the manifest of a deployment's only release, and select what the deployment serves.

    Raises what `load` raises because of the manifest alone.
    """
    [release] = deployment.releases
    manifest = store.read_release(release)
    check_signature(manifest, deployment.public_keys)
    selection = select(manifest, targets, deployment)
    served = served_model(selection, deployment)
    unet = selection.engines[FAMILIES[manifest.family].base.unet][0]
    selection = selection.only(deployment.components)
    adapters = read_adapters(store, deployment, selection)
    return Resolved(
        deployment,
        selection,
        replace(served, lora_bytes={record.name: record.total_bytes for record in adapters}),
        unet,
        adapters,
        {name: schedule_from_dict(entries) for name, entries in manifest.schedulers.items()},
    )


def load(
    store: Store,
    resolved: Resolved,
    device: torch.device,
    cold_start: ColdStart,
    caches: RuntimeCacheFolder | None = None,
    common: Collection[str] = (),
    shared: Mapping[str, Tensors] = MappingProxyType({}),
    is_stopped: Callable[[], bool] = lambda: False,
) -> Loaded:
    """Load a release with engines of its own.

    `caches`: the folder of kernels that TensorRT-RTX compiles on this GPU; None: they are not kept. `common`: the
    digests of the weights that no others will replace. `shared`: by digest, such weights that were loaded before.

    Raises OutOfDeviceMemory, AdapterError, StoreError, CorruptBlob or EngineError, and Unavailable soon after
    `is_stopped` is true.
    """
    deployment, selection, served = resolved.deployment, resolved.selection, resolved.served
    manifest, unquantized, release = selection.manifest, selection.unquantized, resolved.release
    uses_torch = _uses_torch_on_gpu(device, selection)
    with loading_libraries(uses_torch, cold_start), WeightsCache(store, device, shared, is_stopped) as cache:
        cache.begin(resolved.streamed_weights(), cold_start)
        with cold_start.phase("fetch"):
            store.fetch(_blobs_before_engines(selection))
        with cold_start.phase("verify"):
            contents = read_blobs(store, _warm_blobs(selection, served), selection)
        with cold_start.phase("engines"):
            opened = {
                name: [_open_code(contents, record, device, store) for record in records]
                for name, records in selection.engines.items()
            }
        with cold_start.phase("tokenizers"):
            tokenizers = open_tokenizers(selection, contents)
        with cold_start.phase("weights"):
            tensors = {
                name: [
                    {} if engine.holds_weights else _in_layout(cache.load(record), record)
                    for engine, record in zip(selection.engines[name], records, strict=True)
                ]
                for name, records in selection.weights.items()
            }
        library: AdapterLibrary | None = None
        if deployment.adapters.names:
            with cold_start.phase("adapters"):
                originals = _in_layout(cache.load(unquantized), unquantized) if unquantized else None
                library = open_library(
                    store,
                    resolved.adapters,
                    tensors,
                    originals,
                    release,
                    device,
                    deployment.adapters,
                    _lora_down(selection),
                )
                served = replace(served, unet_blocks=unet_blocks(library.layers))
        with cold_start.phase("engines"):
            plans = Plans(store, device, caches)
            served_engines: list[Engine] = []
            fp16: list[Engine] = []
            quantized = set[str]()
            for name, records in selection.engines.items():
                for record, code, weights in zip(records, opened[name], tensors[name], strict=True):
                    engine = _bind(record, code, weights, device, plans)
                    if record.precision != records[0].precision:
                        fp16.append(engine)
                        continue
                    served_engines.append(engine)
                    if record.precision.is_quantized:
                        quantized.add(record.component)
            engines, fp16_engines = engine_sets(served_engines), engine_sets(fp16)
            engines |= {name: engines[owner] for name, owner in selection.shared.items()}
            check_token_ids(selection, tokenizers, contents)
    model = LoadedModel(
        engines=engines,
        tokenizers=tokenizers,
        noise_schedules=dict(resolved.noise_schedules),
        settings=manifest.settings,
        device=device,
        family=FAMILIES[manifest.family],
        fp16_engines=fp16_engines,
        quantized=frozenset(quantized),
        fp16_steps=selection.fp16_steps or Fp16Steps(),
        adapters=library,
        blanks_flagged=deployment.safety == "blank",
        benchmarks=resolved.benchmarks(),
    )
    weight_bytes = cache.bytes + selection.plan_weight_bytes()
    slot = WeightSlot(
        {record.key: cache.load(record) for record in resolved.streamed_weights()},
        {digest: cache.tensors[digest] for digest in common},
    )
    unet = resolved.unet
    return Loaded(model, served, release, selection.target, unet.runtime, weight_bytes, slot, plans, unet.precision)


def open_tokenizers(selection: Selection, contents: Mapping[str, bytes]) -> dict[str, ClipTokenizer]:
    """Return a release's tokenizers by name. `contents`: their verified files, by digest."""
    return {
        name: open_tokenizer(contents[record.blob.sha256], record)
        for name, record in selection.manifest.tokenizers.items()
    }


def _uses_torch_on_gpu(device: torch.device, selection: Selection) -> bool:
    """True if an engine on the GPU calls torch's libraries. Plans call TensorRT's libraries."""
    records = [record for engines in selection.engines.values() for record in engines]
    return device.type == "cuda" and any(record.tensorrt is None for record in records)


def _lora_down(selection: Selection) -> int:
    """Return the elements of the input `lora_down` of a UNet that takes adapters as inputs, 0 without one."""
    specs = (spec for records in selection.engines.values() for engine in records for spec in engine.signature.inputs)
    return next((int(spec.shape[1]) for spec in specs if spec.name == LORA_DOWN), 0)


def _in_layout(tensors: Mapping[str, torch.Tensor], record: WeightsRecord) -> dict[str, torch.Tensor]:
    return {name: from_stored(tensor, record.layout) for name, tensor in tensors.items()}


def read_blobs(store: Store, blobs: Iterable[Blob], selection: Selection) -> dict[str, bytes]:
    """Verify blobs of a selection, concurrently: hashing releases the interpreter lock.

    Returns contents by digest, so that the verified bytes are the bytes that are used. Plans and their literals have no
    content here: `Plans` reads and verifies them later.
    """
    records = [record for engines in selection.engines.values() for record in engines if record.tensorrt]
    plan_blobs = {
        blob.sha256 for record in records if record.tensorrt for blob in (record.blob, record.tensorrt.literals)
    }

    def read(blob: Blob) -> tuple[str, bytes]:
        if blob.sha256 in plan_blobs:
            store.get(blob.sha256, blob.bytes)
            return blob.sha256, b""
        return blob.sha256, read_blob(store, blob)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="preheat-verify") as pool:
        return dict(pool.map(read, blobs))


def read_blob(store: Store, blob: Blob) -> bytes:
    """Return the verified bytes of a blob. Raises CorruptBlob or StoreError."""
    buffer = bytearray(blob.bytes)
    store.read(blob.sha256, memoryview(buffer))
    return bytes(buffer)


def _blobs_before_engines(selection: Selection) -> list[Blob]:
    """Return the blobs to fetch and verify before engines are opened: all but weights and the plans that hold them.

    `Plans` fetches and verifies such a plan while it reads it. Its gigabytes are then hashed once, which takes seconds.
    """
    plans = {e.blob.sha256 for records in selection.engines.values() for e in records if e.holds_weights}
    return [blob for blob in selection.blobs(weights=False) if blob.sha256 not in plans]


def _warm_blobs(selection: Selection, served: ServedModel) -> list[Blob]:
    """Return `_blobs_before_engines` without the packages that only sizes need that the start does not warm up."""
    records = [record for engines in selection.engines.values() for record in engines]
    warm = {record.blob.sha256 for record in records if not served.is_cold(record.bucket)}
    cold = {record.blob.sha256 for record in records} - warm
    return [blob for blob in _blobs_before_engines(selection) if blob.sha256 not in cold]


def _open_code(
    contents: Mapping[str, bytes], record: EngineRecord, device: torch.device, store: Store
) -> AotInductorEngine | None:
    """Open the package of a record from verified `contents`, by digest. None for a plan, which opens with its weights.

    The first run of the engine reads and opens a package that is not in `contents`. Raises EngineError.
    """
    if record.tensorrt is not None:
        return None
    constants = contents[record.constants.sha256]
    package = contents.get(record.blob.sha256)
    verified = partial(_verified_package, store, record) if package is None else _same_engine(record, package)
    return AotInductorEngine(record.component, verified, record.signature, record.bucket, constants, device)


def _verified_package(store: Store, record: EngineRecord) -> bytes:
    """Return the package of a record, for a request that needs it. Raises ReleaseNotLoaded."""
    try:
        return _same_engine(record, read_blob(store, record.blob))
    except PreheatError as error:
        raise ReleaseNotLoaded(f"The {record.component} engine of this size cannot be read. {error}") from error


def _same_engine(record: EngineRecord, package: bytes) -> bytes:
    """Return the package of a record. Raises EngineError if it was compiled for another one."""
    check_identity(record, package, _folders_with_other_code(record.component))
    return package


def _bind(
    record: EngineRecord,
    code: AotInductorEngine | None,
    weights: Mapping[str, torch.Tensor],
    device: torch.device,
    plans: Plans,
) -> Engine:
    """Return the engine of a record on its weights. `code`: see `_open_code`. Raises EngineError.

    On a GPU, engines outside the denoising loops are replayed as CUDA graphs. Loops capture the graphs
    of a step, with its engines inside.
    """
    spec = find_component(record.component)
    engine: Engine
    if code is None:
        engine = plans.open(record, weights, spec.stream)
    else:
        code.bind(weights)
        engine = code
    return engine if spec.phase == "step" or device.type != "cuda" else GraphedEngine(engine)


def _folders_with_other_code(component: str) -> set[str]:
    """Return the top folders of components and variants whose code differs even with this component's architecture."""
    variants = [engine_name(unet.name, features) for unet in unets() for features in feature_sets()]
    variants += [engine_name(unet.name, bands=bands) for unet in unets() for bands in BAND_COUNTS]
    names = {*COMPONENTS, *ADDED_COMPONENTS, *variants}
    own = _code_of(component)
    return {folder_name(name) for name in names if _code_of(name) != own}


def _code_of(component: str) -> tuple[str, frozenset[str], int]:
    """Return what decides a component's code besides its architecture."""
    spec = find_component(component)
    return spec.wrapper, spec.features, spec.bands
