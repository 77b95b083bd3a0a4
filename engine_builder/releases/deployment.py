"""Check a deployment's config.yaml against the release that it names, before it is pushed.

A replica refuses the same mistakes, but only after its image was built and started. Settings come from the file and
its environment_variables, not from this machine: a store whose endpoint or region is missing is read from Amazon S3 in
us-east-1, as by a replica. Credentials of the store and the cache of its blobs are those of this machine.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from engine_builder.releases.describe_deployment import describe, describe_memory
from engine_builder.releases.mounts import Mount, files_of, find_mount
from engine_builder.releases.runnable_targets import find_pinned_version, list_runnable_targets
from engine_builder.truss_config import PLACEHOLDER_STORES, read_preheat_settings, read_truss_config
from model.deployment import Deployment, ServedAdapters, fits_pattern, resolve_releases
from model.engines.tensorrt.libraries import LIBRARIES
from model.errors import AdapterError, ConfigError, PreheatError, StoreError, UntrustedRelease
from model.loading.alike import check_alike
from model.loading.select import Selection, select
from model.loading.served import served_model
from model.pipeline.spec import UNET
from model.settings import Settings, read_settings
from model.store.adapter_record import AdapterRecord
from model.store.manifest import Manifest
from model.store.signature import check_signature
from model.store.store import Store, local_store_folder, open_store

_SECRETS = ("aws_access_key_id", "aws_secret_access_key")
_Result = TypeVar("_Result")


class InvalidConfig(PreheatError):
    """The config of a deployment would fail after it is pushed."""


@dataclass
class DeploymentCheck:
    """The result of a check. Each of `refusals` would keep a replica from serving.

    `served`: lines that describe what a replica would serve, and `files`: the keys of the store's files that it would
    read. Both are empty after a refusal.
    """

    refusals: list[PreheatError] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    served: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    def attempt(self, work: Callable[[], _Result]) -> _Result | None:
        """Return the result of `work`, or None after an error, which is added to the refusals."""
        try:
            return work()
        except PreheatError as error:
            self.refusals.append(error)
            return None


def check_deployment(path: Path, store: str | None = None, releases: Sequence[str] = ()) -> DeploymentCheck:
    """Check the config at `path`. `store` and `releases` replace its own. Refusals are returned, not raised.

    The files of `releases` are not compared with those that the config mounts.
    """
    check = DeploymentCheck()
    config = check.attempt(lambda: _read_config(path))
    if config is None:
        return check
    settings = check.attempt(lambda: read_preheat_settings(config))
    if settings is None:
        return check
    own_store = settings.store
    mount = None if releases else check.attempt(lambda: find_mount(config, own_store))
    if mount is not None and store is None:
        source = check.attempt(lambda: _source_of(mount))
        if source is None:
            return check
        settings = settings.model_copy(update={"store": source})
    if store is not None:
        settings = settings.model_copy(update={"store": store})
    if releases:
        settings = settings.model_copy(update={"release": "", "releases": [*releases]})
    if mount is None and not releases:
        _check_secrets(check, config, settings)
    check.attempt(lambda: _check_gpus(config, settings))
    torch = check.attempt(lambda: _pinned_torch(check, config))
    manifests = check.attempt(lambda: _read_releases(settings, is_own_store=store is not None))
    if manifests is None:
        return check
    for manifest in manifests:
        check.attempt(partial(check_signature, manifest, settings.public_key))
    if not settings.public_key:
        names = ", ".join(manifest.name for manifest in manifests)
        check.warnings.append(
            f"The config has no public_key, so the server loads {names} without checking a signature. "
            "Sign releases with `preheat publish --sign`, and name the key."
        )
    admitted, queued = config.runtime.predict_concurrency, settings.limits.max_queue
    if admitted <= queued:
        check.warnings.append(
            f"runtime.predict_concurrency is {admitted}, and limits.max_queue {queued}: Truss holds further requests "
            f"back, so they can be neither batched nor refused. Set it to {max(256, 2 * queued)}."
        )
    if torch is not None:
        _check_selections(check, manifests, config, torch, settings, mount)
    return check


def _check_selections(
    check: DeploymentCheck, manifests: Sequence[Manifest], config: Any, torch: str, settings: Settings,
    mount: Mount | None,
) -> None:  # fmt: skip
    """Select what the server would load of each release, and describe it if nothing was refused."""
    selections: list[Selection] = []
    described: list[str] = []
    files: dict[str, None] = {}
    offered = check.attempt(lambda: _read_offered(check, settings)) or []
    for manifest in manifests:
        deployment = Deployment.of(settings).alone(manifest.name)
        selection = check.attempt(partial(_select, manifest, config, torch, deployment))
        if selection is None:
            continue
        selections.append(selection)
        check.warnings += _small_batches(selection, settings)
        served = check.attempt(partial(served_model, selection, deployment))
        adapters = check.attempt(partial(_check_adapters, check, settings, deployment, selection, offered)) or []
        files |= dict.fromkeys(files_of(manifest, adapters, selection.blobs()))
        if served is not None:
            described += describe(selection, served, settings)
    if selections:
        check.attempt(lambda: check_alike(selections))
    if selections and not check.refusals:
        described += describe_memory(selections, config, settings)
    if mount is not None:
        check.attempt(lambda: _check_mount(mount, [*files]))
    if not check.refusals:
        check.served, check.files = described, [*files]


def _read_config(path: Path) -> Any:
    """Return the TrussConfig. Raises ConfigError or InvalidConfig."""
    config = read_truss_config(path)
    try:
        config.validate_forbid_extra()
    except ValueError as error:
        reason = re.sub(r"\s+", " ", str(error)).strip()[:300].rstrip(".")
        raise InvalidConfig(
            f"{path} has an entry that is unknown to truss: {reason}.",
            "Remove it, or correct its name; truss/configs has examples.",
        ) from error
    return config


def _read_releases(settings: Settings, is_own_store: bool) -> list[Manifest]:
    """Read the releases. `is_own_store`: the store was named for this machine, so its path may be relative."""
    for name in ("store", "release"):
        if not getattr(settings, name) and not (name == "release" and settings.releases):
            other = ", or check against another store with --store" if name == "store" else ""
            raise ConfigError(
                f"No {name} is configured.",
                f"Set model_metadata.preheat.{name} in the config{other}. A replica does not have this machine's "
                "variables.",
            )
    store = settings.store
    if store.rstrip("/") in PLACEHOLDER_STORES:
        raise ConfigError(
            f"The store {store} is a placeholder.",
            "Name your own under model_metadata.preheat.store, and publish a release there.",
        )
    folder = local_store_folder(store)
    if folder is not None and not folder.is_absolute() and not is_own_store:
        raise InvalidConfig(
            f"The store {store} is a relative path, which a replica looks for in a folder of its own.",
            "Name s3://bucket/prefix, or file:// with the absolute path of a folder that is mounted in the replica.",
        )
    if folder is not None and not folder.is_dir():
        raise InvalidConfig(
            f"The store {store} is not a folder of this machine.",
            "Set model_metadata.preheat.store in the config, or check against a copy of the store with --store.",
        )
    opened = _open_store(settings)
    return [opened.read_release(name) for name in resolve_releases(settings.release_patterns(), opened)]


def _source_of(mount: Mount) -> str:
    """Return the URL of the bucket that the platform mounts. Raises InvalidConfig."""
    if not _is_bucket(mount.store):
        raise InvalidConfig(
            f"The store is mounted from {mount.store}, which this command cannot read.",
            "Check against the same store with --store: s3://bucket/prefix, or a folder with its files.",
        )
    return mount.store


def _check_mount(mount: Mount, files: list[str]) -> None:
    """Raise InvalidConfig if the platform would not mount a file that a server reads."""
    if lacking := mount.lacks(files):
        raise InvalidConfig(
            f"The weights entry for {mount.location} leaves out {len(lacking)} files that the server reads, such as "
            f"{mount.prefix}{lacking[0]}.",
            "Replace its allow_patterns by the output of `preheat weights`.",
        )


def _open_store(settings: Settings) -> Store:
    """Open the store at the endpoint and in the region that a replica would use, with the cache of this machine."""
    own = read_settings(variables=("cache_dir", "cache_bytes")).store_options()
    options = replace(
        settings.model_copy(update={"cache_dir": None}).store_options(),
        cache_dir=own.cache_dir,
        cache_bytes=own.cache_bytes,
        machine_defaults=False,
    )
    return open_store(settings.store, options)


def _read_offered(check: DeploymentCheck, settings: Settings) -> list[AdapterRecord]:
    """Read the adapters that fit a pattern of the config. Adds a warning for each that a server would refuse."""
    adapters, records = ServedAdapters(tuple(settings.loras)), []
    if not adapters.patterns:
        return []
    store = _open_store(settings)
    for name in store.adapters():
        if name not in adapters.fixed and fits_pattern(name, adapters.patterns):
            with _warning_of(check, name):
                record = store.read_adapter(name)
                check_signature(record, settings.public_key)
                records.append(record)
    return records


@contextmanager
def _warning_of(check: DeploymentCheck, adapter: str) -> Iterator[None]:
    """Turn an error of an adapter into a warning."""
    try:
        yield
    except (AdapterError, UntrustedRelease) as error:
        check.warnings.append(f"Requests for adapter {adapter} would be refused. {error.args[0]}")


def _check_adapters(
    check: DeploymentCheck,
    settings: Settings,
    deployment: Deployment,
    selection: Selection,
    offered: Sequence[AdapterRecord],
) -> Sequence[AdapterRecord]:
    """Return the adapters that requests could name now. Raises what the load of a server would raise for them.

    An offered adapter, which no load reads, is left out with a warning if it does not fit the release.
    """
    if not settings.loras:
        return ()
    from engine_builder.adapters.add import release_layers
    from model.adapters.library import check_fit  # imports PyTorch, which other checks do not need
    from model.loading.adapters import read_adapters

    store = _open_store(settings)
    records = read_adapters(store, deployment, selection)
    layers, release = release_layers(store, selection.manifest), f"release {selection.manifest.name}"
    for record in records:
        check_fit(record, layers, release)
    for record in offered:
        with _warning_of(check, record.name):
            check_fit(record, layers, release)
            records.append(record)
    return records


def _check_secrets(check: DeploymentCheck, config: Any, settings: Settings) -> None:
    missing = [name for name in _SECRETS if name not in (config.secrets or {})]
    environment = config.environment_variables or {}
    has_keys = environment.get("AWS_ACCESS_KEY_ID") and environment.get("AWS_SECRET_ACCESS_KEY")
    if _is_bucket(settings.store) and missing and not has_keys:
        check.refusals.append(
            InvalidConfig(
                f"The config does not declare {' and '.join(missing)} under secrets, so the server cannot read "
                f"{settings.store}.",
                "Add each under secrets with the value null, and keep its value in the workspace's secrets.",
            )
        )
    for name, value in (config.secrets or {}).items():
        if value:
            check.refusals.append(
                InvalidConfig(
                    f"The config holds a value for the secret {name}.",
                    "Set it to null, and keep the value in the workspace's secrets.",
                )
            )


def _is_bucket(store: str) -> bool:
    """True for an s3:// URL. An invalid one is refused when the release is read."""
    try:
        return local_store_folder(store) is None
    except StoreError:
        return False


def _check_gpus(config: Any, settings: Settings) -> None:
    """Raise InvalidConfig if `workers` and `gpus_per_image` need more GPUs than the config requests."""
    spec, workers = config.resources.accelerator, settings.workers or 1
    needed = workers * settings.gpus_per_image
    if spec.accelerator and spec.count < needed:
        name = spec.accelerator.value
        asked = f"{workers} workers with {settings.gpus_per_image} GPUs for each image need {needed} GPUs"
        raise InvalidConfig(
            f"{f'gpus_per_image is {needed}' if workers == 1 else asked}, and the config requests {spec.count} {name}.",
            f"Set resources.accelerator to {name}:{needed}, or lower {'workers' if workers > 1 else 'gpus_per_image'}.",
        )


def _pinned_torch(check: DeploymentCheck, config: Any) -> str:
    """Return the pinned version of torch. Raises InvalidConfig."""
    version = find_pinned_version(config.requirements, "torch")
    if version is None:
        raise InvalidConfig(
            "The config's requirements do not pin torch (torch==VERSION).",
            "Pin the version that the release was built with: an engine runs on no other.",
        )
    if config.resources.accelerator.accelerator and "+" not in version:
        check.warnings.append(
            f"The pin torch=={version} does not name a CUDA build, which an engine needs too. Pin it as the shipped "
            "configs do (torch==2.11.0+cu130)."
        )
    return version


def _select(manifest: Manifest, config: Any, torch: str, deployment: Deployment) -> Selection:
    """Select the engines for the config's GPU (or CPU), torch and libraries of plans, as a server with them does."""
    accelerator = config.resources.accelerator.accelerator
    name = accelerator.value if accelerator else ""
    versions: dict[str, str | None] = {
        library.runtime: find_pinned_version(config.requirements, "|".join(library.distributions))
        for library in LIBRARIES.values()
    }
    targets = list_runnable_targets(manifest, name, torch, versions, deployment.runtime)
    return select(manifest, targets, deployment, versions)


def _small_batches(selection: Selection, settings: Settings) -> Iterator[str]:
    """Yield a warning for each bucket of the config whose rows no engine of the UNet fills."""
    for bucket in settings.buckets:
        size = (bucket.height, bucket.width)
        batches = [one.bucket.batch for one in selection.engines[UNET] if one.bucket.holds(one.bucket.batch.min, *size)]
        largest = max((batch.max for batch in batches), default=bucket.rows)
        if largest < bucket.rows:
            label = f"{bucket.width}x{bucket.height}"
            yield (
                f"The config has {bucket.rows} rows at {label}, and the largest batch of {selection.manifest.name} is "
                f"{largest}: {max(1, largest // 2)} guided images at once. Build it for more (`preheat build --size "
                f"{label}@{bucket.rows}`)."
            )
