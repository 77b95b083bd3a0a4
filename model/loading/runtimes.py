"""The runtimes that may serve on this machine: which targets to look for in a release, and in which order.

A release may hold engines of AOTInductor and of TensorRT for one GPU. The setting `runtime` chooses "aot_inductor",
"tensorrt" or "fastest": the runtime whose engines were faster on the machine that built them. Imports no torch.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Literal

from model.engines.tensorrt import api as tensorrt_api
from model.engines.tensorrt.api import TensorRTUnavailable
from model.loading.target import Target, detect_targets
from model.pipeline.spec import SDXL, UNET, UNET_GUIDED, UNET_UNCONDITIONAL, components_of
from model.settings import RuntimeChoice
from model.store.manifest import EngineRecord, Manifest
from model.store.precision import SERVED_FIRST

Compatibility = Literal["none", "same_compute_capability", "ampere_plus"]
_COMPARED_STEPS = 30  # of the request whose time is compared: the default number of steps


def targets_here(choice: RuntimeChoice) -> list[Target]:
    """Return the targets to look for on this machine, best first. Raises TensorRTUnavailable."""
    return targets_of(choice, detect_targets())


def tensorrt_target(gpu: Target, tag: str, compatibility: Compatibility) -> Target:
    """Return the target of plans built on `gpu`. Its key omits what their compatibility makes irrelevant.

    By compatibility: cuda-h200-sm90-trt11.4, cuda-sm90-trt11.4, cuda-ampere_plus-trt11.4.
    """
    product = {"none": gpu.product, "same_compute_capability": "", "ampere_plus": "ampere_plus"}[compatibility]
    return Target("cuda", product, "" if compatibility == "ampere_plus" else gpu.capability, tag)


def tensorrt_targets(gpu: Target, tag: str) -> list[Target]:
    """Return the targets whose plans a GPU runs, best first: its product, its compute capability, Ampere or newer."""
    choices: list[Compatibility] = ["none", "same_compute_capability"]
    if int(gpu.capability.removeprefix("sm")) >= 80:
        choices.append("ampere_plus")
    return [tensorrt_target(gpu, tag, choice) for choice in choices]


def targets_of(choice: RuntimeChoice, detected: Sequence[Target]) -> list[Target]:
    """Return the targets to look for in a release. `detected`: those whose AOTInductor engines this machine runs.

    Raises TensorRTUnavailable if "tensorrt" is chosen and not available here; "fastest" then omits its targets.
    """
    if choice == "aot_inductor":
        return list(detected)
    gpu = next((target for target in detected if target.device == "cuda"), None)
    version = tensorrt_api.installed_version()
    if choice == "tensorrt":
        if gpu is None:
            raise TensorRTUnavailable("TensorRT needs an NVIDIA GPU, and this machine has none.")
        if version is None:
            raise TensorRTUnavailable("The runtime tensorrt is configured, and TensorRT is not installed here.")
        return tensorrt_targets(gpu, tensorrt_api.version_tag(version))
    if gpu is None or version is None:
        return list(detected)
    try:
        return [*tensorrt_targets(gpu, tensorrt_api.version_tag(version)), *detected]
    except TensorRTUnavailable:
        return list(detected)


def can_run(engine: EngineRecord) -> bool:
    """True if this version has a runtime for the engine, and the record holds all that the runtime needs."""
    return engine.runtime == "aot_inductor" or (engine.runtime == "tensorrt" and engine.tensorrt is not None)


def servable(manifest: Manifest, component: str, target: str) -> list[EngineRecord]:
    """Return a component's engines for a target that this version can run, in the one precision that is served."""
    engines = [e for e in manifest.engines if (e.component, e.target) == (component, target) and can_run(e)]
    precision = min((engine.precision for engine in engines), key=SERVED_FIRST.index, default=None)
    return [engine for engine in engines if engine.precision == precision]


def fastest_first(
    manifest: Manifest, targets: Sequence[Target], names: Sequence[str], tensorrt: str | None = None
) -> list[Target]:
    """Sort `targets`. The first that serves all components `names` is then the one to use.

    Targets with missing engines, or plans of another version than `tensorrt` (None: the installed one), come last. If
    targets of both runtimes remain, those with benchmarks come first, the fastest before the others. Otherwise the
    order is kept.
    """
    if not any(_is_tensorrt(target) for target in targets):
        return list(targets)
    version = tensorrt or tensorrt_api.installed_version()
    engines: dict[Target, list[EngineRecord]] = {}
    complete = []
    for target in targets:
        variants = [variant.name for name in names for variant in SDXL[name].variants]
        by_name = {name: servable(manifest, name, target.key) for name in (*names, *variants)}
        engines[target] = [engine for records in by_name.values() for engine in records]
        if all(by_name[name] for name in names) and all(_is_readable(engine, version) for engine in engines[target]):
            complete.append(target)
    if len({_is_tensorrt(target) for target in complete}) > 1:
        times = {target: request_milliseconds(manifest, engines[target], names) for target in complete}
        complete.sort(key=lambda target: math.inf if (time := times[target]) is None else time)
    return complete + [target for target in targets if target not in complete]


def request_milliseconds(manifest: Manifest, engines: Iterable[EngineRecord], names: Sequence[str]) -> float | None:
    """Return the time of one image of the native size: 30 guided steps, no negative prompt. None without benchmarks.

    Computed from the engines' benchmarks, each component in its smallest bucket that holds the image. A step runs both
    CFG halves in one call, or each half in an engine of its own; the shorter time counts. Two engines run concurrently,
    so their sum is an upper bound: they take about as long as the one call.
    """
    height, width = manifest.settings.native_height, manifest.settings.native_width
    fitting = [engine for engine in engines if engine.bucket.holds(engine.bucket.batch.max, height, width)]

    def median(name: str, batch: int) -> float | None:
        holding = [engine for engine in fitting if engine.component == name and engine.bucket.batch.max >= batch]
        benchmark = min(holding, key=lambda engine: engine.bucket.batch.max).benchmark if holding else None
        return benchmark.median if benchmark else None

    both_halves = UNET_GUIDED if UNET_GUIDED in {engine.component for engine in fitting} else UNET
    steps = [median(both_halves, 2), _sum([median(UNET, 1), median(UNET_UNCONDITIONAL, 1)])]
    step = min((time for time in steps if time is not None), default=None)
    # Requests use no refiner by default.
    once = [spec for spec in components_of(["base"]) if spec.name in names and spec.phase != "step"]
    before_and_after = _sum([median(spec.name, 1 if spec.batch_unit == "image" else 2) for spec in once])
    return None if step is None or before_and_after is None else before_and_after + _COMPARED_STEPS * step


def _sum(times: Sequence[float | None]) -> float | None:
    """Return the sum, or None if one of `times` is unknown."""
    known = [time for time in times if time is not None]
    return sum(known) if len(known) == len(times) else None


def _is_tensorrt(target: Target) -> bool:
    return target.runtime_tag.startswith("trt")


def _is_readable(engine: EngineRecord, version: str | None) -> bool:
    """True unless the engine is a plan of another version of TensorRT."""
    return engine.runtime != "tensorrt" or engine.runtime_version == version
