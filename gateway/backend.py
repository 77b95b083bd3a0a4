"""A Preheat server behind the gateway: its address, and what is known of its state."""

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.backend_answers import Event
from gateway.endpoint import LOOPBACK, PREDICT_PATH, READY_PATH, BadEndpoint, split_url
from gateway.errors import GatewayConfigError

KEY_VARIABLE = "PREHEAT_BACKEND_API_KEY"
DOWN_SECONDS = 5.0  # a server that failed is the last choice for this long
CONNECT_SECONDS = 5.0
DESCRIPTION_SECONDS = 60.0  # a description is read again after this time
_DESCRIPTION_WAIT_SECONDS = 5.0  # a request that others may answer waits so long for a server's description


@dataclass(eq=False)
class Backend:
    """A server. `health_url`: None for a deployed model, which checks would keep from scaling to zero."""

    name: str
    predict_url: str
    health_url: str | None
    headers: Mapping[str, str] = field(repr=False)
    is_loopback: bool = False
    images: int = 0
    """Images of requests in flight."""
    failures: int = 0
    """Requests that failed after the server may have started them."""
    down_until: float = 0.0
    descriptions: dict[str, Event] = field(default_factory=dict)
    """By release, in the server's order; empty: unknown."""
    described_at: float = -DESCRIPTION_SECONDS
    reading: asyncio.Task[None] | None = field(default=None, repr=False)
    """The task that reads the descriptions, or the last one that did."""
    reading_since: float = 0.0
    description_problem: str = ""
    """The reason why the description could not be read the last time."""

    def is_being_described(self) -> bool:
        """True while a task reads the description."""
        return self.reading is not None and not self.reading.done()

    def wait_left(self) -> float:
        """Return the seconds left in which the description may be waited for by requests that others may answer."""
        return self.reading_since + _DESCRIPTION_WAIT_SECONDS - time.monotonic() if self.is_being_described() else 0.0

    def is_up(self) -> bool:
        """True unless it failed within the last seconds."""
        return time.monotonic() >= self.down_until

    def forget_descriptions(self, release: str) -> None:
        """Read the descriptions again before their next use, if they still have `release`, which the server left."""
        if release in self.descriptions:
            self.descriptions = {}
            self.described_at = -DESCRIPTION_SECONDS

    def mark_down(self) -> None:
        """Choose it last for a while."""
        self.down_until = time.monotonic() + DOWN_SECONDS
        self.described_at = -DESCRIPTION_SECONDS  # it may come back with another release


def parse_backend(url: str, variables: Mapping[str, str] = os.environ) -> Backend:
    """Return the backend of a URL: a server without a path, or the whole URL of a deployed model's `predict`.

    A deployed model gets the key in PREHEAT_BACKEND_API_KEY, over https only. Raises GatewayConfigError.
    """
    remedy = "Give one like http://127.0.0.1:8080 or https://model-ID.api.baseten.co/environments/production/predict."
    try:
        parts = split_url(url, url)
    except BadEndpoint as error:
        raise GatewayConfigError(error.args[0], remedy) from error
    if parts.query:
        raise GatewayConfigError(f"{url!r} is not the URL of a server: it has a query.", remedy)
    is_loopback = parts.hostname in LOOPBACK
    if not parts.path.rstrip("/").endswith("/predict"):
        base = url.rstrip("/")
        return Backend(url, base + PREDICT_PATH, base + READY_PATH, {}, is_loopback)
    key = variables.get(KEY_VARIABLE)
    if key and parts.scheme != "https":
        raise GatewayConfigError(f"{url!r} would receive the key in {KEY_VARIABLE} unencrypted.", "Give an https URL.")
    return Backend(url, url, None, {"Authorization": f"Api-Key {key}"} if key else {}, is_loopback)
