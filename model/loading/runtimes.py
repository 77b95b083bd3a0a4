"""Which runtime serves a release here: what the deployment asks for, what is installed, what was measured.

A release may hold engines of AOTInductor and of TensorRT for one GPU. `model_metadata.preheat.runtime` (or
PREHEAT_RUNTIME) picks "aot_inductor", "tensorrt" or "fastest"; the fastest is the one whose engines took the least time
where they were built. Knows nothing of stores and opens nothing.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from model.engines import components
from model.engines.tensorrt import api as tensorrt_api
from model.engines.tensorrt.api import TensorRTUnavailable
from model.errors import EngineError, ManifestError, NoEngineForTarget
from model.loading.prefetch import setting
from model.loading.target import (
    Target,
    detect_targets,
)
from model.store.manifest import SERVED_FIRST, EngineRecord, Manifest, WeightsRecord

RuntimeChoice = Literal["aot_inductor", "tensorrt", "fastest"]
Compatibility = Literal["none", "same_compute_capability", "ampere_plus"]
CHOICES: tuple[RuntimeChoice, ...] = ("aot_inductor", "tensorrt", "fastest")
_STEPS = 30  # of a request whose time is compared: what one has unless it says otherwise


def read_choice(value: object) -> RuntimeChoice:
    """The setting `runtime`; none means aot_inductor. Raises ManifestError."""
    for choice in CHOICES:
        if value == choice:
            return choice
    if value is None or value == "":
        return "aot_inductor"
    raise ManifestError(
        f"config: runtime is one of {', '.join(CHOICES)}, not {value!r:.60}: mend model_metadata.preheat.runtime in "
        "config.yaml, or PREHEAT_RUNTIME."
    )


def targets_here(settings: Mapping[str, Any]) -> list[Target]:
    """The targets to look for on this machine; `settings` are model_metadata.preheat. Raises ManifestError or
    TensorRTUnavailable."""
    return targets_of(read_choice(setting(settings, "runtime")), detect_targets())


def tensorrt_target(gpu: Target, tag: str, compatibility: Compatibility) -> Target:
    """The target of plans built on `gpu`, whose key leaves out what their compatibility makes irrelevant:
    cuda-h200-sm90-trt11.4, cuda-sm90-trt11.4, cuda-ampere_plus-trt11.4."""
    product = {"none": gpu.product, "same_compute_capability": "", "ampere_plus": "ampere_plus"}[compatibility]
    return Target("cuda", product, "" if compatibility == "ampere_plus" else gpu.capability, tag)


def tensorrt_targets(gpu: Target, tag: str) -> list[Target]:
    """The targets whose plans a GPU runs, best first: its product's, its compute capability's, Ampere's and newer."""
    choices: list[Compatibility] = ["none", "same_compute_capability"]
    if int(gpu.capability.removeprefix("sm")) >= 80:
        choices.append("ampere_plus")
    return [tensorrt_target(gpu, tag, choice) for choice in choices]


def targets_of(choice: RuntimeChoice, detected: Sequence[Target]) -> list[Target]:
    """The targets to look for in a release, given those that AOTInductor has on this machine.

    Raises TensorRTUnavailable where TensorRT is asked for and cannot be used here; for "fastest" it is left out then.
    """
    if choice == "aot_inductor":
        return list(detected)
    gpu = next((target for target in detected if target.device == "cuda"), None)
    version = tensorrt_api.installed_version()
    if choice == "tensorrt":
        if gpu is None:
            raise TensorRTUnavailable(
                "TensorRT needs an NVIDIA GPU and there is none here: start on a machine with a GPU, or set "
                "model_metadata.preheat.runtime to aot_inductor."
            )
        if version is None:
            raise TensorRTUnavailable(
                "TensorRT is asked for and not installed here: install it (docs/tensorrt.md), or set "
                "model_metadata.preheat.runtime to aot_inductor."
            )
        return tensorrt_targets(gpu, tensorrt_api.version_tag(version))
    if gpu is None or version is None:
        return list(detected)
    try:
        return [*tensorrt_targets(gpu, tensorrt_api.version_tag(version)), *detected]
    except TensorRTUnavailable:
        return list(detected)


def fastest_first(manifest: Manifest, targets: Sequence[Target], names: Sequence[str]) -> list[Target]:
    """`targets` in the order in which to take the first that serves everything.

    Plans of another build of TensorRT than the one installed come last. Where the others are of both runtimes, those
    that were measured come first, the fastest before; else they stay as they were.
    """
    if not any(_is_tensorrt(target) for target in targets):
        return list(targets)
    version = tensorrt_api.installed_version()
    engines: dict[Target, list[EngineRecord]] = {}
    whole = []
    for target in targets:
        found = {name: servable(manifest, name, target.key) for name in (*names, *components.GUIDED)}
        engines[target] = [engine for some in found.values() for engine in some]
        if all(found[name] for name in names) and all(_is_of(engine, version) for engine in engines[target]):
            whole.append(target)
    if len({_is_tensorrt(target) for target in whole}) > 1:
        times = {target: request_time(manifest, engines[target], names) for target in whole}
        whole.sort(key=lambda target: math.inf if (time := times[target]) is None else time)
    return whole + [target for target in targets if target not in whole]


def request_time(manifest: Manifest, engines: Iterable[EngineRecord], names: Sequence[str]) -> float | None:
    """Milliseconds of the engines' own for one picture of the native size in 30 steps, guided against no prompt, by
    their benchmarks.

    Of each component the bucket that holds it with the fewest rows. A step is its two rows in one call or an engine for
    each, whichever is less: two that run beside each other take less than the sum of both, and about as long as that
    call. None where something was not measured.
    """
    height, width = manifest.settings.native_height, manifest.settings.native_width
    held = [engine for engine in engines if engine.bucket.holds(engine.bucket.rows.max, height, width)]

    def median(name: str, rows: int) -> float | None:
        holding = [engine for engine in held if engine.component == name and engine.bucket.rows.max >= rows]
        benchmark = min(holding, key=lambda engine: engine.bucket.rows.max).benchmark if holding else None
        return benchmark.median if benchmark else None

    both = components.UNET_GUIDED if components.UNET_GUIDED in {e.component for e in held} else components.UNET
    steps = [median(both, 2), _sum([median(components.UNET, 1), median(components.UNET_UNCONDITIONAL, 1)])]
    step = min((time for time in steps if time is not None), default=None)
    once = [name for name in names if name != components.UNET and not name.startswith("refiner_")]  # unless asked for
    rest = _sum([median(name, 1 if name == components.VAE_DECODER else 2) for name in once])
    return None if step is None or rest is None else rest + _STEPS * step


def _sum(times: Iterable[float | None]) -> float | None:
    """None where one of them is not known."""
    known = [*times]
    return None if None in known else sum(time for time in known if time is not None)


def servable(manifest: Manifest, component: str, target: str) -> list[EngineRecord]:
    """A component's engines for a target that this version can run, of the one precision that is served."""
    every = [e for e in manifest.engines if (e.component, e.target) == (component, target) and can_run(e)]
    precision = min((engine.precision for engine in every), key=SERVED_FIRST.index, default=None)
    return [engine for engine in every if engine.precision == precision]


def can_run(engine: EngineRecord) -> bool:
    """Whether this version has a runtime for an engine, and its record all that the runtime needs."""
    return engine.runtime == "aot_inductor" or (engine.runtime == "tensorrt" and engine.tensorrt is not None)


def check_installed(manifest: Manifest, engines: Iterable[EngineRecord]) -> None:
    """Refuse plans of another build of TensorRT before anything is fetched. Raises NoEngineForTarget."""
    wanted = {engine.runtime_version for engine in engines if engine.runtime == "tensorrt"}
    installed = tensorrt_api.installed_version() if wanted else None
    if other := sorted(wanted - {installed}):
        raise NoEngineForTarget(
            f"Release {manifest.name} has plans of TensorRT {other[0]} and this machine has {installed or 'none'}; a "
            f"plan is read by the version that built it: install {other[0]} (docs/tensorrt.md), or run `preheat build "
            "--runtime tensorrt` with this one and publish a new release (`preheat publish`)."
        )


def check_refit(engine: EngineRecord, weights: WeightsRecord) -> None:
    """Refuse weights that a plan does not take: TensorRT would use them and draw nonsense. Raises EngineError."""
    plan = engine.tensorrt
    if plan is not None and plan.refit == "identical" and plan.weights != weights.identity:
        raise EngineError(
            f"The {engine.component} plan takes the weights it was built with and the release has others: build it "
            "with these (`preheat build --runtime tensorrt`), or for weights of any model (--refit any)."
        )


def _is_tensorrt(target: Target) -> bool:
    return target.runtime_tag.startswith("trt")


def _is_of(engine: EngineRecord, version: str | None) -> bool:
    return engine.runtime != "tensorrt" or engine.runtime_version == version
