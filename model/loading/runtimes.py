"""Find the targets that this machine can serve from, best first.

A release may hold engines of AOTInductor, TensorRT and TensorRT-RTX for one GPU. The setting `runtime` chooses one of
them, or "fastest": the runtime whose engines were fastest on the machine that built them. Imports no torch.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from model.engines.features import GUIDED_ZEROS, engine_name, parse_name
from model.engines.tensorrt.libraries import (
    LIBRARIES,
    TENSORRT_RTX,
    Library,
    TensorRTUnavailable,
    driver_cuda_version,
    driver_version,
    installed_version,
)
from model.engines.tensorrt.runtime_caches import RuntimeCacheFolder
from model.loading.target import Target, detect_targets
from model.pipeline.components import FAMILIES, unets
from model.settings import RuntimeChoice
from model.store.blob_cache import RUNTIME_CACHES
from model.store.manifest import EngineRecord, Manifest
from model.store.precision import SERVED_FIRST, Precision

Compatibility = Literal["none", "same_compute_capability", "ampere_plus"]
"""The GPUs that run a plan: GPUs of one product, of one compute capability, or all from Ampere on."""
_COMPARED_STEPS = 30  # the default number of steps, in the request whose time is compared


def find_targets(runtime: RuntimeChoice) -> list[Target]:
    """Return the targets to search for in a release on this machine, best first. Raises TensorRTUnavailable."""
    return list_targets(runtime, detect_targets())


def make_tensorrt_target(gpu: Target, tensorrt_tag: str, compatibility: Compatibility) -> Target:
    """Return the target of plans built on `gpu`. `tensorrt_tag`: see `Library.version_tag`.

    The key omits what the compatibility makes irrelevant. For the three compatibilities, in their order, an H200 has
    the keys cuda-h200-sm90-trt11.4, cuda-sm90-trt11.4 and cuda-ampere_plus-trt11.4. Plans of TensorRT-RTX have the
    second form.
    """
    match compatibility:
        case "none":
            return Target("cuda", gpu.product, gpu.capability, tensorrt_tag)
        case "same_compute_capability":
            return Target("cuda", "", gpu.capability, tensorrt_tag)
        case "ampere_plus":
            return Target("cuda", "ampere_plus", "", tensorrt_tag)


def runnable_plan_targets(library: Library, gpu: Target, tag: str) -> list[Target]:
    """Return the targets whose plans `gpu` runs: its product first, then its capability, then Ampere or newer.

    `tag`: the library's version tag. Raises TensorRTUnavailable if the library does not support the GPU.
    """
    library.check_capability(gpu.capability, gpu.product)
    if library.compiles_on_target:
        return [make_tensorrt_target(gpu, tag, "same_compute_capability")]
    compatibilities: list[Compatibility] = ["none", "same_compute_capability"]
    if int(gpu.capability.removeprefix("sm")) >= 80:
        compatibilities.append("ampere_plus")
    return [make_tensorrt_target(gpu, tag, compatibility) for compatibility in compatibilities]


def list_targets(runtime: RuntimeChoice, detected: Sequence[Target]) -> list[Target]:
    """Return the targets to search for in a release, best first.

    `detected`: the targets whose AOTInductor engines this machine runs. Raises TensorRTUnavailable if `runtime` names
    a library of plans that this machine lacks or that does not support its GPU or driver. "fastest" then omits the
    library's targets.
    """
    if runtime == "aot_inductor":
        return list(detected)
    if runtime in LIBRARIES:
        return _list_plan_targets(LIBRARIES[runtime], detected)
    plan_targets = []
    for library in LIBRARIES.values():
        with suppress(TensorRTUnavailable):
            plan_targets += _list_plan_targets(library, detected)
    return [*plan_targets, *detected]


def _list_plan_targets(library: Library, detected: Sequence[Target]) -> list[Target]:
    """Return the targets whose plans this machine's GPU and library run. Raises TensorRTUnavailable."""
    gpu = next((target for target in detected if target.device == "cuda"), None)
    if gpu is None:
        raise TensorRTUnavailable(f"{library.title} needs an NVIDIA GPU, and this machine has none.")
    version = installed_version(library)
    if version is None:
        raise TensorRTUnavailable(
            f"The runtime {library.runtime} is configured, and {library.title} is not installed here."
        )
    targets = runnable_plan_targets(library, gpu, library.version_tag(version))
    library.check_driver(driver_cuda_version())
    return targets


def runtime_cache_folder(cache_folder: Path, targets: Sequence[Target]) -> RuntimeCacheFolder | None:
    """Return the folder for the kernels of this machine's TensorRT-RTX, or None if it is not among its `targets`."""
    for target in targets:
        if _runtime_of(target) == TENSORRT_RTX.tag:
            library = f"{TENSORRT_RTX.tag}{installed_version(TENSORRT_RTX)}"
            machine = f"{target.capability}-driver{driver_version()}-{library}"
            return RuntimeCacheFolder(cache_folder / RUNTIME_CACHES, machine)
    return None


def version_of(library: Library, versions: Mapping[str, str | None] | None) -> str | None:
    """Return a library's version in `versions`, by runtime. If `versions` is None, return the installed version."""
    return installed_version(library) if versions is None else versions.get(library.runtime)


def can_run(engine: EngineRecord) -> bool:
    """True if this version of Preheat has a runtime for the engine, and the manifest has all that the runtime needs."""
    return engine.runtime == "aot_inductor" or (engine.runtime in LIBRARIES and engine.tensorrt is not None)


def servable_engines(
    manifest: Manifest, component: str, target: str, precision: Precision | None = None
) -> list[EngineRecord]:
    """Return a component's engines for a target that `can_run` accepts, in the one precision that is served.

    `precision`: of the UNet; None: the first of SERVED_FIRST that it has. A component that lacks the UNet's precision
    gets the one that goes with it (fp16 with fp8), and otherwise the first of SERVED_FIRST that it has.
    """
    engines = _engines_of(manifest, component, target)
    unets_of_base = _engines_of(manifest, FAMILIES[manifest.family].base.unet, target)
    of_unet = precision or _first({engine.precision for engine in unets_of_base}, SERVED_FIRST)
    preferred = (of_unet, of_unet.unquantized, *SERVED_FIRST) if of_unet else SERVED_FIRST
    served = _first({engine.precision for engine in engines}, preferred)
    return [engine for engine in engines if engine.precision == served]


def _engines_of(manifest: Manifest, component: str, target: str) -> list[EngineRecord]:
    return [e for e in manifest.engines if (e.component, e.target) == (component, target) and can_run(e)]


def _first(precisions: Collection[Precision], order: Sequence[Precision]) -> Precision | None:
    """Return the first precision of `order` that is among `precisions`."""
    return next((precision for precision in order if precision in precisions), None)


def sort_fastest_first(
    manifest: Manifest,
    targets: Sequence[Target],
    components: Sequence[str],
    versions: Mapping[str, str | None] | None = None,
    precision: Precision | None = None,
) -> list[Target]:
    """Sort `targets` so that the first target that serves all `components` is the target to use.

    `versions`: see `version_of`. `precision`: see `servable_engines`. The order depends on the targets that are
    complete: they have an engine of every component, and no plan of another version of its library.

    - Complete targets come before the others. With `precision` their UNets have it.
    - If several runtimes have complete targets, the fastest complete target comes first, and targets without benchmarks
      come last of the complete ones.
    - Otherwise, and among equals, the given order is kept.
    """
    if all(_runtime_of(target) == "torch" for target in targets):
        return list(targets)
    readable: dict[str, str | None] = {library.runtime: version_of(library, versions) for library in LIBRARIES.values()}
    names = {engine.component: parse_name(engine.component) for engine in manifest.engines}
    variants = [
        name
        for name, (component, features, bands) in names.items()
        if component in components and (bands > 1 or features == {GUIDED_ZEROS})
    ]
    engines: dict[Target, list[EngineRecord]] = {}
    complete = []
    for target in targets:
        by_component = {
            name: servable_engines(manifest, name, target.key, precision) for name in (*components, *variants)
        }
        engines[target] = [engine for records in by_component.values() for engine in records]
        has_components = all(by_component[component] for component in components)
        if precision is not None:
            of_unets = [e for spec in unets() for e in by_component.get(spec.name, ())]
            has_components = has_components and all(engine.precision == precision for engine in of_unets)
        if has_components and all(
            readable.get(e.runtime, e.runtime_version) == e.runtime_version for e in engines[target]
        ):
            complete.append(target)
    if len({_runtime_of(target) for target in complete}) > 1:
        times = {target: request_milliseconds(manifest, engines[target], components) for target in complete}
        complete.sort(key=lambda target: _or_infinity(times[target]))
    return complete + [target for target in targets if target not in complete]


def request_milliseconds(
    manifest: Manifest, engines: Iterable[EngineRecord], components: Sequence[str]
) -> float | None:
    """Return the estimated time of one image of the native size: 30 guided steps, no refiner. None without benchmarks.

    The time is the sum of the engines' benchmarks. Each component uses the engine with the smallest batch that is large
    enough. A step runs both CFG halves in one call, in the UNet's variant for guided images if it has that batch.
    With batch 1 only it takes two calls.
    """
    height, width = manifest.settings.native_height, manifest.settings.native_width
    usable = [engine for engine in engines if engine.bucket.holds(engine.bucket.batch.max, height, width)]

    def median(batch: int, *names: str) -> float | None:
        """Return the time of the first of these components that has the smallest batch."""
        large_enough = [e for e in usable if e.component in names and e.bucket.batch.max >= batch]
        smallest = min(large_enough, key=lambda e: (e.bucket.batch.max, names.index(e.component)), default=None)
        return smallest.benchmark.median if smallest is not None and smallest.benchmark else None

    unet = FAMILIES[manifest.family].base.unet
    step = median(2, engine_name(unet, {GUIDED_ZEROS}), unet)
    if step is None and (half := median(1, unet)) is not None:  # no batch holds both halves
        step = 2 * half
    # Requests use no refiner by default. Outside the steps a request has one image and two texts: the prompt and the
    # negative prompt. All timesteps fit into one call of the time network, whose buckets are larger than 2.
    other_specs = [
        spec for spec in FAMILIES[manifest.family].specs("base") if spec.phase != "step" and not spec.optional
    ]
    other_specs = [spec for spec in other_specs if spec.name in components]
    other_times = [median(1 if spec.batch_unit == "image" else 2, spec.name) for spec in other_specs]
    before_and_after = _sum_if_known(other_times)
    return None if step is None or before_and_after is None else before_and_after + _COMPARED_STEPS * step


def _or_infinity(time: float | None) -> float:
    return math.inf if time is None else time


def _sum_if_known(times: Sequence[float | None]) -> float | None:
    """Return the sum, or None if an entry of `times` is None."""
    known = [time for time in times if time is not None]
    return sum(known) if len(known) == len(times) else None


def _runtime_of(target: Target) -> str:
    """Return the letters of the runtime tag: "torch", "trt" or "rtx"."""
    return target.runtime_tag.partition("-")[0].rstrip("0123456789.")
