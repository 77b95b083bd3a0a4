"""Fixtures of the gateway's tests."""

from tests.support.playground import browser  # noqa: F401  a fixture
