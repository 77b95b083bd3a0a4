"""Fixtures of the tests of the server's HTTP interface."""

from collections.abc import Iterator

import httpx
import pytest

from preheat.local_server.server import Server
from tests.support.predictions import http_client


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    """A client of the session's server."""
    with http_client(server) as client:
        yield client
