"""What a server of a test serves."""

from typing import Any

from model.deployment import Deployment


def deployed(release: str = "toy/1", **changes: Any) -> Deployment:
    """Return a deployment of a release. `changes`: fields that are not at their defaults."""
    return Deployment((release,), **changes)
