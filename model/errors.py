"""The errors a person can meet. Each message says what is wrong and what mends it, in one sentence or two."""


class PreheatError(Exception):
    """Base of all errors whose message is written for the person who reads the log."""


class StoreError(PreheatError):
    """The store cannot be reached, read or written."""


class ReleaseNotFound(StoreError):
    """No manifest under the release name that was asked for."""


class ReleaseExists(StoreError):
    """A release of that name is published already; releases are written once."""


class CorruptBlob(StoreError):
    """The bytes of a blob are not those its digest names (changed, truncated or oversized)."""


class ManifestError(PreheatError):
    """A manifest cannot be read: not JSON, a newer schema, a missing or unsafe entry."""


class UntrustedRelease(PreheatError):
    """The deployment takes only releases that its key has signed, and this is none."""


class MissingComponent(PreheatError):
    """The release lacks a component, weights or a tokenizer that serving it needs."""


class NoEngineForTarget(PreheatError):
    """The release has no engine that this device can run."""


class EngineError(PreheatError):
    """An engine cannot be opened, or was given inputs or weights that it does not take."""


class RequestRefused(PreheatError):
    """A request asks for what this deployment does not serve. Answered as a 400.

    `field` names the request's field; the message says the value and what would be accepted.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class BrokenImage(PreheatError):
    """A picture came out with values that are not numbers. Answered as a 500, never as a black picture."""


class Overloaded(PreheatError):
    """More is waiting than this server promises to draw in time. Answered as a 429.

    `retry_after`: whole seconds after which there should be room.
    """

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(PreheatError):
    """The device has failed and the process is about to be replaced. Answered as a 503."""


class DeadlineExceeded(PreheatError):
    """A request was not finished within the time that the deployment gives it. Answered as a 504."""


class Cancelled(PreheatError):
    """A request was given up by whoever made it. Answered to no one."""
