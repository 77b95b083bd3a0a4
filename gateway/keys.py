"""API keys, and how many images a minute each of them may request.

A key file has one key on each line: a name, the key in printable ASCII, and optionally a number of images a minute.
Empty lines and lines that begin with # are skipped.

    website sk-1f0c9a54d2... 60
    batch   sk-88be7713aa...

Only SHA-256 digests of the keys stay in memory.
"""

import hashlib
import hmac
import math
import time
from dataclasses import dataclass, field
from pathlib import Path

from engine_builder.files import read_file
from gateway.errors import ApiError, GatewayConfigError

MIN_KEY_CHARACTERS = 16
MAX_RATE = 1_000_000  # images a minute
_MAX_FILE_BYTES = 2**20
_FORM = "Write one key on each line: NAME KEY [IMAGES_PER_MINUTE]."


@dataclass
class ApiKey:
    """A key and its token bucket. `rate`: images a minute, which is also the largest burst; None: no limit."""

    name: str
    digest: bytes = field(repr=False)
    rate: int | None = None
    _tokens: float = field(default=0.0, repr=False)
    _updated: float | None = field(default=None, repr=False)

    @property
    def client_id(self) -> str:
        """What servers may know of the key's owner: a digest of the name; "" without keys."""
        return hashlib.sha256(self.name.encode()).hexdigest()[:16] if self.name else ""

    def take(self, images: int, now: float) -> None:
        """Count the images of a request at `now` (seconds of a monotonic clock).

        Raises ApiError with status 429 if they exceed the rate, and 400 if they always would.
        """
        if self.rate is None:
            return
        if images > self.rate:
            raise ApiError(
                400,
                f"{images} images exceed this key's {self.rate} images a minute.",
                "num_images",
                "rate_limit_exceeded",
            )
        elapsed = math.inf if self._updated is None else now - self._updated
        self._tokens, self._updated = min(self.rate, self._tokens + elapsed * self.rate / 60), now
        if images > self._tokens:
            seconds = math.ceil((images - self._tokens) * 60 / self.rate)
            raise ApiError(
                429,
                f"This key may request {self.rate} images a minute. Repeat the request in {seconds} s.",
                None,
                "rate_limit_exceeded",
                seconds,
            )
        self._tokens -= images

    def give_back(self, images: int) -> None:
        """Undo `take` for images that were not generated."""
        if self.rate is not None:
            self._tokens = min(self.rate, self._tokens + images)


class Keys:
    """The keys of a gateway. Without keys every request is accepted."""

    def __init__(self, keys: tuple[ApiKey, ...] = ()) -> None:
        self._keys = keys
        self._open = ApiKey("", b"")

    @property
    def required(self) -> bool:
        """True if requests need a key."""
        return bool(self._keys)

    def authenticate(self, authorization: str) -> ApiKey:
        """Return the key of a header `Authorization: Bearer KEY`. Raises ApiError with status 401.

        The time does not depend on which key it is, or on how much of one is right.
        """
        if not self._keys:
            return self._open
        scheme, _, key = authorization.partition(" ")
        digest = _digest(key.strip() if scheme.lower() == "bearer" else "")
        found = None
        for known in self._keys:
            if hmac.compare_digest(known.digest, digest):
                found = known
        if found is None:
            cause = "Incorrect API key provided." if key else "No API key was provided."
            raise ApiError(401, f"{cause} Send the header `Authorization: Bearer KEY`.", None, "invalid_api_key")
        return found

    def take(self, key: ApiKey, images: int) -> None:
        """Count the images of a request. Raises ApiError, see `ApiKey.take`."""
        key.take(images, time.monotonic())


def read_keys(path: Path) -> Keys:
    """Read a key file. Raises GatewayConfigError naming the line; the message has no part of a key."""
    try:
        lines = read_file(path, max_bytes=_MAX_FILE_BYTES).decode().splitlines()
    except OSError as error:
        raise GatewayConfigError(f"The key file {path} cannot be read: {error.strerror or error}.", _FORM) from error
    except ValueError as error:  # not UTF-8, or a NUL in the path
        raise GatewayConfigError(f"The key file {str(path)!r} is not a text file.", _FORM) from error
    keys: list[ApiKey] = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        keys.append(_parse(words, number))
        if keys[-1].name in {key.name for key in keys[:-1]} or keys[-1].digest in {key.digest for key in keys[:-1]}:
            raise GatewayConfigError(f"Line {number} of the key file repeats a name or a key.", "Give each key once.")
    if not keys:
        raise GatewayConfigError(f"The key file {path} has no key.", _FORM)
    return Keys(tuple(keys))


def _parse(words: list[str], number: int) -> ApiKey:
    where = f"Line {number} of the key file"
    if len(words) not in (2, 3):
        raise GatewayConfigError(f"{where} has {len(words)} words.", _FORM)
    if len(words[1]) < MIN_KEY_CHARACTERS:
        raise GatewayConfigError(
            f"{where}: the key has fewer than {MIN_KEY_CHARACTERS} characters.", "Use a longer one."
        )
    if not (words[1].isascii() and words[1].isprintable()):
        raise GatewayConfigError(
            f"{where}: the key is not printable ASCII, so clients cannot send it in a header.",
            "Use letters, digits and punctuation of ASCII.",
        )
    rate = None
    if len(words) == 3:
        if not (words[2].isascii() and words[2].isdecimal() and len(words[2]) < 9 and 1 <= int(words[2]) <= MAX_RATE):
            raise GatewayConfigError(f"{where}: the rate is not a whole number from 1 to {MAX_RATE:,}.", _FORM)
        rate = int(words[2])
    return ApiKey(words[0], _digest(words[1]), rate)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
