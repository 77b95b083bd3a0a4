"""The HTTP status of each error of a request, and its kind: the name under which it is counted and answered."""

from model.errors import (
    AdapterError,
    AdapterNotReady,
    BodyTooLarge,
    BodyTooSlow,
    BrokenImage,
    Cancelled,
    DeadlineExceeded,
    OverflowingRequest,
    Overloaded,
    PreheatError,
    ReleaseNotLoaded,
    RequestRefused,
    Unavailable,
)

_STATUS: dict[type[PreheatError], tuple[int, str]] = {
    OverflowingRequest: (422, "overflow"),
    RequestRefused: (400, "refused"),
    BodyTooSlow: (408, "too_slow"),
    BodyTooLarge: (413, "too_large"),
    Overloaded: (429, "overloaded"),
    Cancelled: (499, "cancelled"),  # the client has left
    BrokenImage: (500, "broken_image"),
    AdapterError: (500, "adapter"),
    AdapterNotReady: (503, "adapter_not_ready"),
    ReleaseNotLoaded: (503, "release"),
    Unavailable: (503, "unavailable"),
    DeadlineExceeded: (504, "deadline"),
}
_OTHER = (500, "failed")
_RETRY_SECONDS = 5  # after which a request with status 503 is repeated
STATUSES = (*_STATUS.values(), _OTHER)
"""Each status and kind."""
OF_REQUEST_KINDS = frozenset(_STATUS[error][1] for error in (AdapterNotReady, ReleaseNotLoaded))
"""Kinds of status 503 that say nothing about other requests."""


def status_of(error: BaseException) -> tuple[int, str]:
    """Return the HTTP status and the kind of an error that ends a request."""
    return next((answer for known, answer in _STATUS.items() if isinstance(error, known)), _OTHER)


def retry_after(error: BaseException) -> int | None:
    """Return the seconds after which a request that ended with this error is repeated, or None."""
    if isinstance(error, Overloaded):
        return error.retry_after
    return _RETRY_SECONDS if isinstance(error, (Unavailable, AdapterNotReady, ReleaseNotLoaded)) else None
