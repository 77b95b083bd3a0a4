"""The address of a server, a gateway or a deployed model, and the API key that it gets."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import SplitResult, urlsplit

import httpx

from engine_builder.error_text import cause_of
from model.errors import PreheatError

KEY_VARIABLE = "PREHEAT_API_KEY"
BASETEN_KEY_VARIABLE = "BASETEN_API_KEY"
READY_PATH = "/v1/models/model"
PREDICT_PATH = f"{READY_PATH}:predict"
DESCRIBE = {"prompt": "description", "describe": True}  # a request for the description of a server
_DEPLOYED_EXAMPLE = "https://model-ID.api.baseten.co/environments/production/predict"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


class BadEndpoint(PreheatError):
    """The URL of a server or the API key for it cannot be used. No message has a part of a key."""

    remedy = f"Give a URL like http://127.0.0.1:8080, or {_DEPLOYED_EXAMPLE}."


@dataclass(frozen=True)
class Endpoint:
    """Where requests are sent. `url`: for messages. `is_deployed`: a model's `predict` URL, which may scale to zero."""

    url: str
    predict_url: str
    is_local: bool
    """On this machine, which a proxy of the environment cannot reach."""
    is_deployed: bool
    key: str = field(default="", repr=False)

    @property
    def headers(self) -> dict[str, str]:
        """The headers of a request, with the key as the endpoint expects it."""
        scheme = "Api-Key" if self.is_deployed else "Bearer"
        return {"Content-Type": "application/json"} | ({"Authorization": f"{scheme} {self.key}"} if self.key else {})

    @property
    def exposes_key(self) -> bool:
        """True if the key crosses a network unencrypted."""
        return bool(self.key) and not self.is_local and not self.predict_url.startswith("https:")

    def hide_key(self, text: str) -> str:
        """Return a text of the endpoint without the key, which it may have repeated."""
        return text.replace(self.key, "***") if self.key else text


def parse_endpoint(url: str, api_key: str | None = None, variables: Mapping[str, str] = os.environ) -> Endpoint:
    """Return the endpoint of a URL. Raises BadEndpoint.

    A URL names a server or gateway without a path (or with OpenAI's /v1), or is the whole URL of a `predict`. Without a
    scheme it is http, for Baseten https. The key is `api_key`, else BASETEN_API_KEY for Baseten's hosts, else
    PREHEAT_API_KEY.
    """
    text = url.strip()
    parts = split_url(text if _SCHEME.match(text) else f"http://{text.removeprefix('//')}", url)
    host = parts.hostname or ""
    is_baseten = host == "baseten.co" or host.endswith(".baseten.co")
    if is_baseten and not _SCHEME.match(text):
        parts = parts._replace(scheme="https")
    path = parts.path.rstrip("/")
    is_deployed = path.endswith("/predict")
    if is_baseten and not (is_deployed and parts.scheme == "https"):
        raise BadEndpoint(
            f"{url!r} is not the https URL of a deployment's predict.", f"Give one like {_DEPLOYED_EXAMPLE}."
        )
    if not is_deployed and not path.endswith(PREDICT_PATH):
        if parts.query:
            raise BadEndpoint(f"{url!r} is not the URL of a server: it has a query.")
        parts = parts._replace(path=path.removesuffix("/v1") + PREDICT_PATH)
    key = _find_key(api_key, is_baseten, variables)
    if is_baseten and not key:
        raise BadEndpoint(f"{host} needs an API key.", f"Set the variable {BASETEN_KEY_VARIABLE}.")
    return Endpoint(text, parts.geturl(), host in LOOPBACK, is_deployed, key)


def split_url(text: str, given: str) -> SplitResult:
    """Return the parts of a server's URL. `given`: as the user wrote it. Raises BadEndpoint."""
    _, at, host = text.partition("://")[2].partition("/")[0].rpartition("@")
    if at:
        raise BadEndpoint(
            f"The URL of {host} has a user name or a password.", f"Leave it out, and set {KEY_VARIABLE} for a key."
        )
    try:
        parts = urlsplit(text)
        port = parts.port
        httpx.URL(text)
    except (ValueError, httpx.InvalidURL) as error:
        raise BadEndpoint(f"{given!r} is not the URL of a server: {cause_of(error)}.") from error
    is_plain = text.isascii() and text.isprintable() and " " not in text
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or parts.fragment or not is_plain:
        raise BadEndpoint(f"{given!r} is not the URL of a server.")
    return parts


def _find_key(api_key: str | None, is_baseten: bool, variables: Mapping[str, str]) -> str:
    names = [BASETEN_KEY_VARIABLE] * is_baseten + [KEY_VARIABLE]
    sources = {"--api-key": api_key or "", **{name: variables.get(name, "") for name in names}}
    source, key = next(((name, key.strip()) for name, key in sources.items() if key.strip()), ("", ""))
    if key and not (key.isascii() and key.isprintable() and " " not in key):
        raise BadEndpoint(
            f"The key in {source} has characters that a header cannot have.",
            "Give the key alone: printable ASCII without spaces.",
        )
    return key
