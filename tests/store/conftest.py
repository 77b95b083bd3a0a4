"""The object store of the tests: Ceph's gateway, started once a run, with a bucket of its own for each test.

Where Ceph is not installed those tests are skipped; with PREHEAT_REQUIRE_OBJECT_STORE set they fail instead.
"""

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from model.store import StoreOptions
from model.store.s3 import S3Store
from tests.stand_ins import object_store as ceph
from tests.stand_ins.faulty_proxy import FaultyProxy
from tests.stand_ins.object_store import ObjectStore

Opener = Callable[..., S3Store]


@pytest.fixture(scope="session")
def object_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """A running S3-compatible store."""
    if missing := ceph.missing_programs():
        reason = f"no object store ({', '.join(missing)} not installed): {ceph.INSTALL}"
        if os.environ.get("PREHEAT_REQUIRE_OBJECT_STORE"):
            pytest.fail(reason)
        pytest.skip(reason)
    with ObjectStore(tmp_path_factory.mktemp("ceph")) as running:
        yield running


@pytest.fixture(scope="session")
def s3(object_store: ObjectStore) -> Iterator[Any]:
    """A boto3 client of the store, to look at it from outside, and to damage it."""
    client = boto3.client(
        "s3",
        endpoint_url=object_store.url,
        aws_access_key_id=ceph.ACCESS_KEY,
        aws_secret_access_key=ceph.SECRET_KEY,
        region_name="us-east-1",
    )
    yield client
    client.close()


@pytest.fixture
def bucket(s3: Any) -> str:
    """A new bucket's name."""
    name = f"preheat-{uuid.uuid4().hex[:12]}"
    s3.create_bucket(Bucket=name)
    return name


@pytest.fixture
def proxy(object_store: ObjectStore) -> Iterator[FaultyProxy]:
    """What stands between a client and the store and does as it is told."""
    with FaultyProxy(object_store.url) as running:
        yield running


@pytest.fixture
def open_bucket(object_store: ObjectStore, bucket: str, tmp_path: Path) -> Iterator[Opener]:
    """Opens `bucket` as a store; keywords are StoreOptions'. Closes what it opened."""
    opened: list[S3Store] = []

    def open_it(prefix: str = "", name: str = bucket, **keywords: Any) -> S3Store:
        given = {
            "cache_dir": tmp_path / "cache",
            "endpoint": object_store.url,
            "access_key_id": ceph.ACCESS_KEY,
            "secret_access_key": ceph.SECRET_KEY,
            "timeout": 20.0,
        }
        opened.append(S3Store(f"s3://{name}/{prefix}", StoreOptions(**given | keywords)))
        return opened[-1]

    yield open_it
    for store in opened:
        store.close()
