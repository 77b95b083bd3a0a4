"""Options of a store: from Truss secrets, the environment and the deployment's config."""

import os
import pwd
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest

from model.errors import ConfigError, StoreError
from model.settings import plain_secrets, read_settings
from model.store.options import StoreOptions
from model.store.store import open_store
from preheat.console import open_cli_store


class SecretNotFound(Exception):
    """Has the name of Truss's class."""


class Secrets(Mapping[str, str]):
    """Like Truss's secrets: a missing one raises SecretNotFound, and they cannot be listed."""

    def __init__(self, **secrets: str) -> None:
        self._secrets = secrets

    def __getitem__(self, key: str) -> str:
        if not self._secrets.get(key):
            raise SecretNotFound(key)
        return self._secrets[key]

    def __iter__(self) -> Any:
        raise NotImplementedError

    def __len__(self) -> int:
        return 2


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without settings."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "PREHEAT_", "XDG_")):
            monkeypatch.delenv(name)


def options_of(section: dict[str, Any], secrets: Mapping[str, str] | None = None) -> StoreOptions:
    return read_settings(section).store_options(secrets)


def test_secrets_for_another_process_are_those_that_are_set() -> None:
    secrets = Secrets(aws_access_key_id="id\n", aws_secret_access_key="", other="private")
    assert plain_secrets(secrets) == {"aws_access_key_id": "id"} and plain_secrets(None) == {}


def test_environment_credentials_replace_secrets(bare: None, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = Secrets(aws_access_key_id="id\n", aws_secret_access_key="key\n")
    options = options_of({"profile": "p"}, secrets)
    assert (options.access_key_id, options.secret_access_key, options.session_token) == ("id", "key", None)
    assert options.profile is None
    for incomplete in (None, {}, Secrets(aws_access_key_id="id"), Secrets()):
        options = options_of({"profile": "p"}, incomplete)
        assert (options.access_key_id, options.secret_access_key, options.profile) == (None, None, "p")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "other")
    assert options_of({}, secrets).access_key_id is None
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_PROFILE", "other")
    assert options_of({}, secrets).access_key_id is None


def test_failing_secret_is_not_a_missing_one(bare: None) -> None:
    class Broken(Secrets):
        def __getitem__(self, key: str) -> str:
            raise PermissionError(key)

    with pytest.raises(PermissionError):
        options_of({}, Broken())


def test_refuses_invalid_cache_size(bare: None) -> None:
    for size in ("many", "-1", "0", 1.5, True, "1 GB", "2GiBGiB"):
        with pytest.raises(ConfigError, match="cache_bytes: got .* expected a whole number of bytes or a size like"):
            options_of({"cache_bytes": size})


@pytest.mark.parametrize("folder, cause", [("~nobody-here/c", "could not determine home"), ("a\0b", "a NUL character")])
def test_refuses_impossible_cache_folder(bare: None, folder: str, cause: str) -> None:
    if "\0" not in folder:
        with pytest.raises(StoreError, match=f"{cause}.*PREHEAT_CACHE_DIR"):
            read_settings({"cache_dir": folder}).store_options()
    with pytest.raises(StoreError, match=f"{cause}.*PREHEAT_CACHE_DIR.*--cache-dir"):
        open_store("s3://bucket", StoreOptions(cache_dir=Path(folder)))
    with pytest.raises(StoreError, match=f"{cause}.*PREHEAT_CACHE_DIR.*--cache-dir"):
        open_cli_store("s3://bucket", Path(folder))


def test_default_cache_folder_needs_a_home(bare: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_user(uid: int) -> NoReturn:
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_user)
    with pytest.raises(StoreError, match="could not determine home directory.*PREHEAT_CACHE_DIR.*--cache-dir"):
        open_store("s3://bucket")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert StoreOptions().cache_folder == Path("/cache/preheat")
