"""What a bucket's service, or the way to it, answers -> one sentence that says what to mend."""

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

_KEYS = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the Truss secrets aws_access_key_id and "
    "aws_secret_access_key, or `profile` in the config"
)
_WRONG_KEYS = {
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "InvalidToken",
    "InvalidSecurity",
    "UnrecognizedClientException",
}
_OLD_KEYS = {"ExpiredToken", "TokenRefreshRequired"}
_SKEW = {"RequestTimeTooSkewed", "RequestExpired"}
_REGION = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "301"}
_BUSY = {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests"}
_DAMAGED = {"BadDigest", "XAmzContentSHA256Mismatch", "InvalidDigest", "IncompleteBody", "RequestTimeout"}


def code_of(error: ClientError) -> str:
    """S3's word for what went wrong; the HTTP status where the answer had no body."""
    return str(error.response.get("Error", {}).get("Code", ""))


def status_of(error: ClientError) -> int:
    """The HTTP status of an answer."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def is_missing(error: Exception) -> bool:
    """No such object (a missing bucket is another thing)."""
    return isinstance(error, ClientError) and code_of(error) in ("NoSuchKey", "404", "NotFound")


def is_taken(error: Exception) -> bool:
    """The condition of a conditional request did not hold, or another such request is being served."""
    return isinstance(error, ClientError) and status_of(error) in (409, 412)


def is_damage(error: Exception) -> bool:
    """The service refused a body that is not what its checksums say: sending it again may do."""
    return isinstance(error, ClientError) and code_of(error) in _DAMAGED


def sentence(error: Exception, what: str, url: str, endpoint: str) -> str:
    """What is wrong and what mends it. `what` was asked for."""
    if isinstance(error, ClientError):
        return _answered(error, what, url, endpoint)
    where = f"{url} at {endpoint}"
    match error:
        case NoCredentialsError() | PartialCredentialsError():
            return f"There are no credentials for {url}: {_KEYS}."
        case ProfileNotFound():
            return f"There is no profile for {url} in boto3's config files ({error}): mend `profile` or AWS_PROFILE."
        case SSLError():
            return f"{where} cannot be trusted: {error}. Check the endpoint's certificate and whether it speaks https."
        case EndpointConnectionError() | ConnectionError() | HTTPClientError():
            return (
                f"{where} cannot be reached ({type(error).__name__}): check the endpoint (AWS_ENDPOINT_URL, `endpoint` "
                "in the config) and the network."
            )
        case _:
            return f"{where} cannot be used: {error} Check `endpoint`, `region` and `profile`."


def _answered(error: ClientError, what: str, url: str, endpoint: str) -> str:
    code, status = code_of(error), status_of(error)
    if code == "NoSuchBucket":
        return f"There is no bucket for {url} at {endpoint}: create it, or mend the store's URL."
    if code in _WRONG_KEYS:
        return f"{endpoint} does not accept the credentials for {url} ({code}): {_KEYS}."
    if code in _OLD_KEYS:
        return f"The credentials for {url} have expired ({code}): get new ones and start again."
    if code in _SKEW:
        return f"{endpoint} refuses this machine's clock ({code}): set the clock, then start again."
    if code in ("AccessDenied", "403", "Forbidden", "AllAccessDisabled"):
        return (
            f"{what} may not be touched in {url} with these credentials ({code}): allow GetObject and ListBucket to "
            "serve, PutObject and DeleteObject to publish, or use other credentials."
        )
    if code in _REGION:
        return f"The bucket of {url} lies in another region ({code}): set AWS_REGION or `region` in the config."
    if code in _BUSY or status in (429, 503):
        return f"{url} is too busy, also after several tries ({code}): start again later, or ask for a higher rate."
    if code == "NotImplemented" or status == 501:
        return f"{endpoint} lacks what a store needs ({what}: {code}): use a service with conditional PutObject."
    if status >= 500:
        return f"{url} fails, also after several tries ({status} {code}): look at the service's state and start again."
    return f"{what} was refused by {url} ({status} {code}): {error.response.get('Error', {}).get('Message', '')}."
