"""Check a deployment's config.yaml against the release that it names, before it is pushed.

A replica refuses the same mistakes, but only after its image was built and started. Settings come from the file alone:
the environment of this machine is not the deployment's. Credentials of the store do come from the environment.
"""

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from model.errors import ConfigError, NoEngineForTarget, PreheatError
from model.loading.select import Selection, select
from model.loading.served import SizeList, SizeRange, served_model
from model.loading.target import Target, gpu_product
from model.settings import Settings, read_settings
from model.store.manifest import Manifest
from model.store.signature import check_signature
from model.store.store import open_store

PLACEHOLDER_STORES = ("s3://preheat-releases", "s3://bucket/prefix")
_SECRETS = ("aws_access_key_id", "aws_secret_access_key")


class InvalidConfig(PreheatError):
    """The config of a deployment would fail where it is pushed."""

    remedy = "Fix it in the config, and check again."


@dataclass
class DeploymentCheck:
    """What was found. `refusals`: each would keep a replica from serving. `served`: what it would serve, as lines."""

    refusals: list[PreheatError] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    served: list[str] = field(default_factory=list)


def check_deployment(path: Path, store: str | None = None) -> DeploymentCheck:
    """Check the config at `path`; `store` takes the place of its store. Never raises for what the check is about."""
    found = DeploymentCheck()
    config = _attempt(found, lambda: _read_config(path))
    if config is None:
        return found
    section = (config.model_metadata or {}).get("preheat")
    settings = _attempt(found, lambda: read_settings(section if section is not None else {}, variables=()))
    torch = _attempt(found, lambda: _torch_tag(config))
    if settings is None:
        return found
    if store is not None:
        settings = settings.model_copy(update={"store": store})
    _check_secrets(found, config, settings)
    manifest = _attempt(found, lambda: _read_release(settings))
    if manifest is None:
        return found
    _attempt(found, lambda: check_signature(manifest, settings.public_key))
    if not settings.public_key:
        found.warnings.append(
            f"The config has no public_key, so the server loads {manifest.name} unchecked. Sign releases with "
            "`preheat publish --sign`, and name the key."
        )
    if torch is not None:
        selection = _attempt(found, lambda: _select(manifest, config, torch, settings))
        if selection is not None:
            served = _attempt(found, lambda: served_model(selection, settings.buckets))
            if served is not None and not found.refusals:
                found.served = _describe(manifest, selection, served.sizes)
    return found


def _attempt(found: DeploymentCheck, work: Callable[[], Any]) -> Any:
    """Return the result of `work`, or None after an error, which is added to the refusals."""
    try:
        return work()
    except PreheatError as error:
        found.refusals.append(error)
        return None


def _read_config(path: Path) -> Any:
    """Return the TrussConfig. Raises InvalidConfig."""
    with warnings.catch_warnings(action="ignore"):
        from truss.base.truss_config import TrussConfig  # type: ignore[import-untyped]
    try:
        config = TrussConfig.from_yaml(path)
        config.validate_forbid_extra()
    except Exception as error:  # of yaml, pydantic and truss: any of them means the same
        reason = re.sub(r"\s+", " ", str(error)).strip()[:300]
        raise InvalidConfig(f"{path} is not a Truss config: {reason.rstrip('.')}.") from error
    return config


def _read_release(settings: Settings) -> Manifest:
    store = settings.required("store")
    if store.rstrip("/") in PLACEHOLDER_STORES:
        raise ConfigError(
            f"The store {store} is a placeholder.",
            "Name your own under model_metadata.preheat.store, and publish a release there.",
        )
    return open_store(store, settings.store_options()).read_release(settings.required("release"))


def _check_secrets(found: DeploymentCheck, config: Any, settings: Settings) -> None:
    missing = [name for name in _SECRETS if name not in (config.secrets or {})]
    if settings.store.startswith("s3:") and missing:
        found.warnings.append(
            f"The config declares no secret {' and '.join(missing)}, so the server must find other credentials for "
            f"{settings.store}."
        )
    for name, value in (config.secrets or {}).items():
        if value:
            found.refusals.append(
                InvalidConfig(
                    f"The config holds a value for the secret {name}.",
                    "Set it to null, and keep the value in the workspace's secrets.",
                )
            )


def _torch_tag(config: Any) -> str:
    """The runtime tag of the engines that the config's torch runs: "torch2.11-cu130", without a build "torch2.11"."""
    for line in config.requirements:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue  # an option of pip
        if requirement.name == "torch":
            exact = [specifier.version for specifier in requirement.specifier if specifier.operator == "=="]
            if len(exact) == 1 and len(requirement.specifier) == 1:
                version, _, build = exact[0].partition("+")
                return "torch" + ".".join(version.split(".")[:2]) + (f"-{build}" if build.startswith("cu") else "")
    raise InvalidConfig(
        "The config's requirements do not pin torch (torch==VERSION).",
        "Pin the version that the release was built with: an engine runs on no other.",
    )


def _select(manifest: Manifest, config: Any, torch: str, settings: Settings) -> Selection:
    """Select the engines for the config's GPU (or CPU) and torch. Raises NoEngineForTarget and as `select` does."""
    accelerator = config.resources.accelerator.accelerator
    product = gpu_product(accelerator.value.replace("_", " ")) if accelerator else ""
    device = f"cuda-{product}-" if product else "cpu-"
    of_device = [key for key in manifest.targets if key.startswith(device)]
    where = f"the {accelerator.value}" if accelerator else "a CPU"
    if not of_device:
        raise NoEngineForTarget(
            f"Release {manifest.name} has no engine for {where}. It has engines for {', '.join(manifest.targets)}.",
            "Build on that GPU and publish a new release, or choose another accelerator under resources.",
        )
    keys = [key for key in of_device if re.search(rf"-{re.escape(torch)}(-|$)", key)]
    if settings.runtime != "aot_inductor":
        keys += [key for key in of_device if "-trt" in key]
    if not keys:
        raise NoEngineForTarget(
            f"The config pins {torch}, and release {manifest.name} has engines for {', '.join(of_device)}.",
            "Pin the torch of the release under requirements, or build and publish with the pinned one.",
        )
    targets = [_parse_target(key) for key in keys]
    return select(manifest, targets, settings.buckets)


def _parse_target(key: str) -> Target:
    """ "cuda-h100-sm90-torch2.11-cu130" -> Target. Its key is the same text."""
    device, product, *rest = key.split("-")
    capability = rest.pop(0) if rest and rest[0].startswith("sm") else ""
    return Target(device, product, capability, "-".join(rest))


def _describe(manifest: Manifest, selection: Selection, sizes: SizeList | SizeRange) -> list[str]:
    total = sum(blob.bytes for blob in selection.blobs())
    if isinstance(sizes, SizeList):
        listed = ", ".join(f"{width}x{height}" for width, height in sizes.sizes)
    else:
        listed = f"sides from {sizes.min_side} to {sizes.max_side} pixels in steps of {sizes.multiple}"
    signer = f"signed by {manifest.signature.key_id}" if manifest.signature else "not signed"
    return [
        f"release  {manifest.name}, {signer}",
        f"target   {selection.target}",
        f"sizes    {listed}",
        f"fetches  {total / 2**20:.0f} MiB at a cold start",
    ]
