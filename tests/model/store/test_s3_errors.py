"""Errors of S3 services and of their connections, as users see them."""

import os
from datetime import UTC, datetime

import pytest

from model.errors import StoreError
from model.store.s3 import S3Store
from tests.conftest import Opener
from tests.model.store.test_s3 import sha256
from tests.support import object_store as ceph
from tests.support.faulty_proxy import Fault, FaultyProxy


def refusal(store: S3Store) -> str:
    """Return the error of reading a release, which must fail."""
    with pytest.raises(StoreError) as caught:
        store.read_release("toy/1")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_reports_wrong_credentials(open_bucket: Opener) -> None:
    assert "does not accept the credentials" in refusal(open_bucket(secret_access_key="wrong"))
    assert "(InvalidAccessKeyId). Set AWS_ACCESS_KEY_ID" in refusal(open_bucket(access_key_id="unknown"))


def test_reports_missing_credentials(open_bucket: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    for name in ("AWS_EC2_METADATA_DISABLED", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, ceph.credentials()[name])
    message = refusal(open_bucket(access_key_id=None, secret_access_key=None))
    assert message.startswith("No credentials were found for s3://") and "aws_access_key_id" in message
    message = refusal(open_bucket(access_key_id=None, secret_access_key=None, profile="unknown"))
    assert message.startswith("No profile was found for s3://")


def test_reports_missing_bucket(open_bucket: Opener) -> None:
    store = open_bucket(name="preheat-no-such-bucket")
    assert refusal(store).startswith("The bucket of s3://preheat-no-such-bucket does not exist at http://127.0.0.1:")
    for request in (store.releases, lambda: store.has(sha256(b"")), lambda: store.put_bytes(b"x")):
        with pytest.raises(StoreError, match="The bucket of .* does not exist"):
            request()


def test_reports_wrong_endpoint(open_bucket: Opener) -> None:
    message = refusal(open_bucket(endpoint="http://127.0.0.1:1", attempts=1))
    assert "at http://127.0.0.1:1 cannot be reached (EndpointConnectionError). Check the endpoint" in message
    for wrong in ("127.0.0.1:1", "http://"):
        assert "is not a valid endpoint. Give a URL" in refusal(open_bucket(endpoint=wrong))


def test_reports_wrong_clock(open_bucket: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    import botocore.auth

    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda *_: datetime(2020, 1, 1, tzinfo=UTC))
    assert "refuses this machine's clock (RequestTimeTooSkewed). Set the clock" in refusal(open_bucket())


@pytest.mark.parametrize(
    "status, code, words",
    [
        (503, "SlowDown", "is too busy, also after several tries (SlowDown)"),
        (500, "InternalError", "fails, also after several tries (500 InternalError)"),
        (403, "AccessDenied", "Release toy/1 cannot be accessed in s3://"),
        (400, "ExpiredToken", "have expired (ExpiredToken). Get new ones"),
        (400, "AuthorizationHeaderMalformed", "is in another region"),
        (501, "NotImplemented", "Use a service with conditional PutObject"),
        (418, "Teapot", "Release toy/1 was refused by s3://"),
    ],
)
def test_reports_service_error(open_bucket: Opener, proxy: FaultyProxy, status: int, code: str, words: str) -> None:
    proxy.inject(Fault("status", times=99, status=status, code=code))
    assert words in refusal(open_bucket(endpoint=proxy.url, attempts=2))
