"""Errors of boto3 and of S3 services -> StoreErrors that state what failed and how to fix it."""

from botocore.exceptions import (  # type: ignore[import-untyped]
    ClientError,
    ConnectionError,
    EndpointConnectionError,
    HTTPClientError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    SSLError,
)

from model.errors import StoreError

_SET_CREDENTIALS = (
    "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the Truss secrets aws_access_key_id and "
    "aws_secret_access_key, or `profile` in the config."
)
_CORRUPTED_BODY = {"BadDigest", "XAmzContentSHA256Mismatch", "InvalidDigest", "IncompleteBody", "RequestTimeout"}
# S3's error codes and HTTP statuses, what failed, how to fix it.
_SERVICE_ERRORS: tuple[tuple[set[str | int], str, str], ...] = (
    ({"NoSuchBucket"},
     "The bucket of {url} does not exist at {endpoint}.", "Create it, or fix the store's URL."),
    ({"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "InvalidSecurity", "UnrecognizedClientException"},
     "{endpoint} does not accept the credentials for {url} ({code}).", _SET_CREDENTIALS),
    ({"ExpiredToken", "TokenRefreshRequired"},
     "The credentials for {url} have expired ({code}).", "Get new ones and start again."),
    ({"RequestTimeTooSkewed", "RequestExpired"},
     "{endpoint} refuses this machine's clock ({code}).", "Set the clock, then start again."),
    ({"AccessDenied", "403", "Forbidden", "AllAccessDisabled"},
     "{what} cannot be accessed in {url} with these credentials ({code}).",
     "Allow GetObject and ListBucket to serve, PutObject and DeleteObject to publish, or use other credentials."),
    ({"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "301"},
     "The bucket of {url} is in another region ({code}).", "Set AWS_REGION or `region` in the config."),
    ({"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests", 429, 503},
     "{url} is too busy, also after several tries ({code}).", "Start again later, or request a higher rate limit."),
    ({"NotImplemented", 501},
     "{endpoint} does not support what a store needs ({what}: {code}).", "Use a service with conditional PutObject."),
)  # fmt: skip


def code_of(error: ClientError) -> str:
    """Return S3's error code, or the HTTP status if the answer had no body."""
    return str(error.response.get("Error", {}).get("Code", ""))


def status_of(error: ClientError) -> int:
    """Return the HTTP status of the answer."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def is_missing(error: Exception) -> bool:
    """True if the object does not exist. A missing bucket has another code."""
    return isinstance(error, ClientError) and code_of(error) in ("NoSuchKey", "404", "NotFound")


def is_taken(error: Exception) -> bool:
    """True if the condition of a conditional request failed, or a concurrent one is in progress."""
    return isinstance(error, ClientError) and status_of(error) in (409, 412)


def is_corrupted_body(error: Exception) -> bool:
    """True if the service received a body that does not match its checksums. Sending it again may succeed."""
    return isinstance(error, ClientError) and code_of(error) in _CORRUPTED_BODY


def store_error(error: Exception, what: str, url: str, endpoint: str) -> StoreError:
    """Return the StoreError for `error`, which was raised while `what` was requested."""
    if isinstance(error, ClientError):
        return _service_error(error, what, url, endpoint)
    where = f"{url} at {endpoint}"
    match error:
        case NoCredentialsError() | PartialCredentialsError():
            return StoreError(f"No credentials were found for {url}.", _SET_CREDENTIALS)
        case ProfileNotFound():
            fact = f"No profile was found for {url} in boto3's config files: {error}."
            return StoreError(fact, "Fix `profile` or AWS_PROFILE.")
        case SSLError():
            fact = f"{where} cannot be trusted: {error}."
            return StoreError(fact, "Check the endpoint's certificate, and that it supports https.")
        case EndpointConnectionError() | ConnectionError() | HTTPClientError():
            fact = f"{where} cannot be reached ({type(error).__name__})."
            return StoreError(fact, "Check the endpoint (AWS_ENDPOINT_URL, `endpoint` in the config) and the network.")
        case _:
            return StoreError(f"{where} cannot be used: {error}", "Check `endpoint`, `region` and `profile`.")


def _service_error(error: ClientError, what: str, url: str, endpoint: str) -> StoreError:
    code, status = code_of(error), status_of(error)
    for codes, fact, remedy in _SERVICE_ERRORS:
        if code in codes or status in codes:
            return StoreError(fact.format(what=what, url=url, endpoint=endpoint, code=code), remedy)
    if status >= 500:
        fact = f"{url} fails, also after several tries ({status} {code})."
        return StoreError(fact, "Check the service's state and start again.")
    reason = error.response.get("Error", {}).get("Message", "")
    return StoreError(f"{what} was refused by {url} ({status} {code}): {reason}.")
