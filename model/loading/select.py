"""Select the engines and weights of a release that serve a deployment. The prefetch and the load use the same answer.

Imports neither torch nor numpy, so it runs while torch is still being imported, and in the prefetch process.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from model.deployment import Deployment, ServedPrecision
from model.engines.features import GUIDED_ZEROS, engine_name, has, parse_name
from model.engines.tensorrt.libraries import LIBRARIES
from model.errors import ConfigError, EngineError, MissingComponent, NoEngineForTarget
from model.loading.runtimes import can_run, servable_engines, sort_fastest_first, version_of
from model.loading.target import Target
from model.pipeline.components import FAMILIES, find_component, unets
from model.pipeline.spec import (
    SAFETY_CHECKER,
    VAE_DECODER,
    control_components,
    controlnets_of,
    ip_adapters_of,
    ip_components,
    model_parts,
)
from model.settings import ServedBucket
from model.store.manifest import Blob, Bucket, EngineRecord, Fp16Steps, Manifest, WeightsRecord
from model.store.precision import FP16, Precision


@dataclass(frozen=True)
class Selection:
    """The engines and weights that serve a release on this machine, by component.

    `weights[name][i]` belongs to `engines[name][i]`. A UNet's variants for bands or guidance against zeros follow its
    other engines; its variants with other features have entries by their names. `shared`: components without engines
    -> the component with the same weights whose engines serve both. `fp16_steps`: the steps in fp16; None: no step.
    With them, or if images are compared with fp16, UNets have engines in two precisions: first the served one, then
    fp16. In a comparison the VAE decoder has them too.
    `unquantized`: with adapters, the weights that an 8-bit UNet's were quantized from, if the release has them.
    """

    manifest: Manifest
    target: str
    engines: dict[str, list[EngineRecord]]
    weights: dict[str, list[WeightsRecord]]
    shared: dict[str, str]
    fp16_steps: Fp16Steps | None = None
    unquantized: WeightsRecord | None = None

    def only(self, components: Collection[str] | None) -> "Selection":
        """Return the selection of these components; None: all."""
        if components is None:
            return self
        return replace(
            self,
            engines={name: records for name, records in self.engines.items() if name in components},
            weights={name: records for name, records in self.weights.items() if name in components},
            shared={name: owner for name, owner in self.shared.items() if {name, owner} <= set(components)},
        )

    def streamed_weights(self) -> list[WeightsRecord]:
        """Return the weights that are loaded onto the device: all but those inside plans."""
        return [
            record
            for name, records in self.weights.items()
            for engine, record in zip(self.engines[name], records, strict=True)
            if not engine.holds_weights
        ]

    def weight_blobs(self) -> list[Blob]:
        """Return the blobs of the weights that are loaded onto the device, each once."""
        blobs = [blob for record in self.streamed_weights() for blob in record.blobs]
        return list({blob.sha256: blob for blob in blobs}.values())

    def plan_weight_bytes(self) -> int:
        """Return the bytes of the weights inside plans, as the release stores them; each plan has a copy."""
        held = {
            engine.blob.sha256: record
            for name, records in self.weights.items()
            for engine, record in zip(self.engines[name], records, strict=True)
            if engine.holds_weights
        }
        return sum(blob.bytes for record in held.values() for blob in record.blobs)

    def blobs(self, weights: bool = True) -> list[Blob]:
        """Return the blobs of engines, tokenizers and (by default) weights, the largest first: they take longest."""
        records = [record for engines in self.engines.values() for record in engines]
        blobs = self.weight_blobs() if weights else []
        blobs += self.unquantized.blobs if weights and self.unquantized else ()
        blobs += [blob for record in records for blob in (record.blob, record.constants)]
        blobs += [record.tensorrt.literals for record in records if record.tensorrt]
        blobs += [record.blob for record in self.manifest.tokenizers.values()]
        return sorted({blob.sha256: blob for blob in blobs}.values(), key=lambda blob: -blob.bytes)


def select(
    manifest: Manifest,
    targets: Sequence[Target],
    deployment: Deployment,
    versions: Mapping[str, str | None] | None = None,
) -> Selection:
    """Select the engines and weights that a deployment serves, for the first of `targets` that has all engines.

    Optional components may lack sizes, and are left out if they have none of the buckets. With adapters, the UNets that
    take them as inputs are selected too, if the release has them. The release must have the safety checker if images
    are checked, and UNets for several bands. The deployment's `components` do not change the selection: see
    `Selection.only`. `versions`: runtime -> the server's version of that library; None: the installed ones.

    Raises MissingComponent, NoEngineForTarget, EngineError, or ConfigError if UNets that are not 8-bit are to be
    compared with fp16, before any blob is read.
    """
    names = required_components(manifest)
    buckets, precision, bands = deployment.buckets, deployment.precision, deployment.bands
    wanted, with_adapters = precision.unet, bool(deployment.adapters.names)
    target = choose_target(manifest, sort_fastest_first(manifest, targets, names, versions, wanted), names)
    if wanted is not None:
        check_precision(manifest, target, wanted, "remove `precision` from the config")
    unet = FAMILIES[manifest.family].base.unet
    served_in = choose_engines(manifest, unet, target, buckets, wanted)[0].precision
    fp16_steps = _fp16_steps(manifest, served_in, precision)
    if precision.compares and not served_in.is_quantized:
        raise ConfigError(
            f"compare_every compares images of 8-bit UNets with fp16, and release {manifest.name} is served in "
            f"{served_in}.",
            "Set `precision` to an 8-bit precision of the release, or remove `compare_every` from the config.",
        )
    remedies = []
    if fp16_steps is not None:
        remedies.append("set `fp16_steps: {}` in the config to run all steps in 8 bits")
    if precision.compares:
        remedies.append("remove `compare_every` from the config")
    if remedies:
        check_precision(manifest, target, FP16, " and ".join(remedies))

    def choose(name: str) -> list[EngineRecord]:
        """Return a component's engines, with those in fp16 if images need both. Without these, return none."""
        records = choose_engines(manifest, name, target, buckets, wanted)
        if not remedies or not find_component(name).is_quantizable or not records or records[0].precision == FP16:
            return records
        in_fp16 = [e for e in choose_engines(manifest, name, target, buckets, FP16) if e.precision == FP16]
        return [*records, *in_fp16] if in_fp16 else []

    engines = {name: choose(name) for name in names}
    chosen = {name: choose(name) for name in optional_components(manifest, target, wanted, with_adapters)}
    added = _added_components(manifest)
    incomplete = chosen.keys() & {name for components in added for name in components}
    for components in added:
        if all(chosen.get(name) for name in components):
            incomplete -= set(components)
    engines |= {name: records for name, records in chosen.items() if records and name not in incomplete}
    if deployment.safety != "off":
        engines[SAFETY_CHECKER] = _choose_safety_checker(manifest, target)
    if precision.compares and engines[VAE_DECODER][0].precision.is_quantized:
        engines[VAE_DECODER] += choose_engines(manifest, VAE_DECODER, target, buckets, FP16)
    for name, records in engines.items():
        records += [
            engine
            for engine in choose_variants(manifest, name, records, bands)
            if bands == 1 or not buckets or any(_serves(engine.bucket, bucket) for bucket in buckets)
        ]
    if bands > 1 and all(engine.component == unet for engine in engines[unet]):
        raise NoEngineForTarget(
            f"Release {manifest.name} has no {unet} engine in {engines[unet][0].precision} for {bands} bands on "
            f"{target} in the served sizes.",
            f"Build it (`preheat build --bands {bands}`) and publish a new release, or set bands_per_image to 1.",
        )
    weights = {name: [weights_of(manifest, engine) for engine in records] for name, records in engines.items()}
    for name, records in engines.items():
        first = {engine.precision.unquantized: engine.signature for engine in reversed(records)}
        if any(engine.signature != first[engine.precision.unquantized] for engine in records):
            raise EngineError(f"The {name} engines of release {manifest.name} differ in what they take and return.")
        check_plan_versions(manifest, records, versions)
        for engine, record in zip(records, weights[name], strict=True):
            check_refit(engine, record)
    identities = {name: {record.identity for record in records} for name, records in weights.items()}
    same_as = {name: find_component(name).same_as for name in engines}
    shared = {name: owner for name, owner in same_as.items() if owner and identities[name] == identities[owner]}
    for name in shared:
        del engines[name], weights[name]
    unquantized = _unquantized(manifest, weights[unet][0]) if with_adapters else None
    return Selection(manifest, target, engines, weights, shared, fp16_steps, unquantized)


def _serves(engine: Bucket, served: ServedBucket) -> bool:
    return engine.batch.min <= served.rows and engine.holds(engine.batch.min, served.height, served.width)


def _choose_safety_checker(manifest: Manifest, target: str) -> list[EngineRecord]:
    if engines := servable_engines(manifest, SAFETY_CHECKER, target, None):
        return engines
    raise MissingComponent(
        f"Release {manifest.name} has no safety checker for {target}, and the setting `safety` requires one.",
        "Build it (`preheat build --safety-checker PATH`) and publish a new release, or set `safety: off`.",
    )


def _fp16_steps(manifest: Manifest, unet: Precision, configured: ServedPrecision) -> Fp16Steps | None:
    """Return the steps of a UNet of this precision that run in fp16, or None if there are none."""
    if not unet.is_quantized:
        return None
    steps = manifest.fp16_steps if configured.fp16_steps is None else configured.fp16_steps
    return steps if steps is not None and steps.exist else None


def required_components(manifest: Manifest) -> tuple[str, ...]:
    """Return the components that serving this release needs. Raises MissingComponent naming those that it lacks."""
    family, parts = FAMILIES[manifest.family], model_parts(manifest.has_refiner)
    names = tuple(spec.name for spec in family.specs(*parts) if not spec.optional)
    missing = [name for name in names if name not in manifest.architectures]
    missing += [name for name in names if name not in {weights.component for weights in manifest.weights}]
    missing += [name for name in family.tokenizers if name not in manifest.tokenizers]
    missing += [f"{part} scheduler" for part in parts if part not in manifest.schedulers]
    if missing:
        raise MissingComponent(f"Release {manifest.name} lacks {', '.join(dict.fromkeys(missing))}.")
    return names


def optional_components(
    manifest: Manifest, target: str, precision: Precision | None = None, with_adapters: bool = False
) -> tuple[str, ...]:
    """Return the optional components that the release has engines of for a target. `precision`: of the UNet.

    The components of a ControlNet or IP-Adapter are returned all or not at all. UNets with features are returned
    too; those that take adapters only `with_adapters`.
    """

    def has_engines(name: str) -> bool:
        return bool(servable_engines(manifest, name, target, precision))

    specs = [spec for spec in FAMILIES[manifest.family].specs(*model_parts(manifest.has_refiner)) if spec.optional]
    names = [spec.name for spec in specs]
    added = _added_components(manifest)
    built = dict.fromkeys(engine.component for engine in manifest.engines)
    of_added = {name for components in added for name in components}
    names += [name for name in built if name not in of_added and _is_variant(name, with_adapters)]
    names = [name for name in names if has_engines(name)]
    complete = (components for components in added if all(map(has_engines, components)))
    return (*names, *dict.fromkeys(name for components in complete for name in components))


def _added_components(manifest: Manifest) -> list[list[str]]:
    """Return the names of the components that each ControlNet and each IP-Adapter of a release needs."""
    of_each = [control_components([name]) for name in controlnets_of(manifest.architectures)]
    of_each += [ip_components([name]) for name in ip_adapters_of(manifest.architectures)]
    return [[name for name in names if name in manifest.architectures] for names in of_each]


def _is_variant(name: str, with_adapters: bool) -> bool:
    """True for a UNet with features that a deployment needs. Its paired twin is chosen with it."""
    features = parse_name(name).features
    return bool(features) and not has(features, "paired") and (with_adapters or not has(features, "adapts"))


def choose_target(manifest: Manifest, targets: Sequence[Target], names: Sequence[str]) -> str:
    """Return the key of the first of `targets` with an engine of every component. Raises NoEngineForTarget."""
    built: dict[str, set[str]] = {}
    for engine in manifest.engines:
        built.setdefault(engine.target, set()).add(engine.component)
    for target in targets:
        if set(names) <= built.get(target.key, set()):
            return target.key
    lacking = set(names) - built.get(targets[0].key, set())
    components = f" for its {', '.join(sorted(lacking))}" if targets[0].key in built else ""
    raise NoEngineForTarget(
        f"Release {manifest.name} has no engine for this machine ({targets[0].key}){components}. It has engines for "
        f"{', '.join(manifest.targets) or 'nothing'}."
    )


def check_precision(manifest: Manifest, target: str, precision: Precision, remedy: str) -> None:
    """Raise NoEngineForTarget unless each UNet of the release has an engine in that precision.

    remedy: how to do without it, as the end of a sentence.
    """
    for unet in unets():
        built = {e.precision for e in manifest.engines if (e.component, e.target) == (unet.name, target)}
        if built and precision not in built:
            names = ", ".join(sorted(map(str, built)))
            raise NoEngineForTarget(
                f"Release {manifest.name} has no {unet.name} engine in {precision} for {target}. It has {names}.",
                f"Build it (`preheat build --precision {precision}`) and publish a new release, or {remedy}.",
            )


def choose_engines(
    manifest: Manifest,
    name: str,
    target: str,
    buckets: Sequence[ServedBucket],
    precision: Precision | None = None,
) -> list[EngineRecord]:
    """Return a component's engines that the configured buckets need.

    Raises NoEngineForTarget naming the bucket. For an optional component the result may lack buckets, or be empty.
    """
    engines = servable_engines(manifest, name, target, precision)
    if not engines:
        raise NoEngineForTarget(
            f"Release {manifest.name} has no {name} engine for {target} that this server can run (of AOTInductor, or "
            "a plan of TensorRT or TensorRT-RTX with what its refit needs)."
        )
    if not buckets or all(engine.bucket.height is None for engine in engines):
        return engines  # networks of text and time have no size, and their batch is not the UNet's
    chosen: dict[str, EngineRecord] = {}
    for bucket in buckets:
        fitting = [e for e in engines if e.bucket.holds(e.bucket.batch.min, bucket.height, bucket.width)]
        fitting = [e for e in fitting if e.bucket.batch.min <= bucket.rows]
        if not fitting and not find_component(name).optional:
            size = f"{bucket.width}x{bucket.height}"
            raise NoEngineForTarget(
                f"Release {manifest.name} has no {name} engine for {size} with a batch of at most {bucket.rows} on "
                f"{target}.",
                f"Build it (`preheat build --size {size}@{bucket.rows}`) and publish a new release, or remove that "
                "bucket from the config.",
            )
        chosen |= {engine.key: engine for engine in fitting}
    return list(chosen.values())


def choose_variants(
    manifest: Manifest, name: str, chosen: Sequence[EngineRecord], bands: int = 1
) -> list[EngineRecord]:
    """Return the paired engines of a component with the target, runtime, precision, layout and bucket of `chosen`.

    With several `bands` these are the engines for one of so many bands. Those of a CPU serve fewer heights than
    `chosen`, so they have another bucket.
    """
    component, features, _ = parse_name(name)
    twin = engine_name(component, features | {GUIDED_ZEROS}) if bands == 1 else engine_name(name, bands=bands)
    engines = [engine for engine in manifest.engines if engine.component == twin and can_run(engine)]

    def identity(engine: EngineRecord) -> tuple[object, ...]:
        is_dynamic = bands > 1 and engine.bucket.batch.min < engine.bucket.batch.max
        bucket = None if is_dynamic else engine.bucket
        return engine.target, engine.runtime, engine.precision, engine.layout, bucket

    identities = [identity(engine) for engine in chosen]
    return [engine for engine in engines if identity(engine) in identities]


def weights_of(manifest: Manifest, engine: EngineRecord) -> WeightsRecord:
    """Return the weights in the precision and layout that an engine needs. Raises MissingComponent."""
    identity = (engine.component, engine.precision, engine.layout)
    for record in manifest.weights:
        if (record.component, record.precision, record.layout) == identity:
            return record
    raise MissingComponent(
        f"Release {manifest.name} has no {engine.precision} weights of {engine.component} in layout {engine.layout}."
    )


def _unquantized(manifest: Manifest, served: WeightsRecord) -> WeightsRecord | None:
    """Return the weights that 8-bit weights were quantized from. None for others, or if the release lacks them."""
    wanted = (served.component, served.precision.unquantized, served.layout)
    records = manifest.weights if served.precision.is_quantized else ()
    return next((record for record in records if (record.component, record.precision, record.layout) == wanted), None)


def check_plan_versions(
    manifest: Manifest, engines: Iterable[EngineRecord], versions: Mapping[str, str | None] | None = None
) -> None:
    """Refuse plans of another version of their library. `versions`: see `select`. Raises NoEngineForTarget."""
    for runtime, needed in sorted({(e.runtime, e.runtime_version) for e in engines if e.runtime in LIBRARIES}):
        library = LIBRARIES[runtime]
        installed = version_of(library, versions)
        if installed != needed:
            raise NoEngineForTarget(
                f"Release {manifest.name} has plans of {library.title} {needed}, and this machine has "
                f"{installed or 'none'}. A plan is read only by the version that built it.",
                f"Install {needed} (docs/tensorrt.md), or build with this version (`{library.build_command}`) and "
                "publish a new release (`preheat publish`).",
            )


def check_refit(engine: EngineRecord, weights: WeightsRecord) -> None:
    """Refuse weights that a plan does not take: TensorRT would compute wrong results with them. Raises EngineError."""
    plan = engine.tensorrt
    if plan is not None and plan.refit != "any" and plan.weights != weights.identity:
        verb, other = (
            ("holds", "") if engine.holds_weights else ("takes only", ", or for weights of any model (`--refit any`)")
        )
        raise EngineError(
            f"The {engine.component} plan {verb} the weights it was built with, and the release has others.",
            f"Build it with these weights (`{LIBRARIES[engine.runtime].build_command}`){other}.",
        )
