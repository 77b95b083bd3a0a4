"""What a server of a test serves, and loading it as a server does."""

from collections.abc import Sequence
from typing import Any

from model.cold_start import ColdStart
from model.deployment import Deployment
from model.engines.tensorrt.runtime_caches import RuntimeCacheFolder
from model.loading.load import Loaded
from model.loading.releases import Releases
from model.loading.target import Target
from model.store.store import Store


def deployed(release: str = "toy/1", **changes: Any) -> Deployment:
    """Return a deployment of a release. `changes`: fields that are not at their defaults."""
    return Deployment((release,), **changes)


def load_release(
    store: Store,
    deployment: Deployment,
    targets: Sequence[Target],
    cold_start: ColdStart,
    caches: RuntimeCacheFolder | None = None,
) -> Loaded:
    """Load the first release of a deployment."""
    return Releases(store, deployment, targets, cold_start, caches).open(0)
