"""What commands share: the store of a server's config, and tables of numbers."""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from model.errors import StoreError
from preheat import console
from preheat.console import open_served_store, print_numbers, read_served_settings
from preheat.main import app


def write_config(path: Path, **settings: object) -> Path:
    path.write_text(yaml.safe_dump({"model_metadata": {"preheat": settings}}))
    return path


def test_store_of_a_server_is_the_given_one_or_the_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREHEAT_STORE", raising=False)
    monkeypatch.setattr(console, "DEFAULT_STORE", str(tmp_path))
    for folder in ("own", "given"):
        (tmp_path / folder).mkdir()
    config = write_config(tmp_path / "c.yaml", store=str(tmp_path / "own"))
    assert open_served_store(None, read_served_settings(config)).url == (tmp_path / "own").as_uri()
    assert open_served_store(str(tmp_path / "given"), read_served_settings(config)).url == (tmp_path / "given").as_uri()
    for store in ("s3://preheat-releases", ""):
        assert open_served_store(None, read_served_settings(write_config(config, store=store))).url == tmp_path.as_uri()


def test_bucket_of_a_config_is_opened_at_its_endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PREHEAT_STORE", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_MAX_ATTEMPTS": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PREHEAT_CACHE_DIR", str(tmp_path / "cache"))
    config = write_config(tmp_path / "c.yaml", store="s3://models/own", endpoint="http://127.0.0.1:9", region="x-1")
    with pytest.raises(StoreError, match=r"127\.0\.0\.1:9"):
        open_served_store(None, read_served_settings(config)).releases()


@pytest.mark.parametrize("variable, named", [({}, "own/*"), ({"PREHEAT_RELEASES": "a/1,b/2"}, "a/1")])
def test_serve_takes_the_releases_of_the_config(
    variable: dict[str, str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PREHEAT_STORE", "PREHEAT_RELEASE", "PREHEAT_RELEASES"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "own").mkdir()
    config = write_config(tmp_path / "c.yaml", store=str(tmp_path / "own"), releases=["own/*"])
    result = CliRunner().invoke(app, ["serve", "--config", str(config)], env=variable)
    assert f"Release {named} was not found in {(tmp_path / 'own').as_uri()}" in str(result.exception)


def test_numbers_are_whole_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console.console, "width", 30)
    numbers = ["12345.67", "1234", "0.00%", "98765.43"]
    print_numbers("load", ["images/s", "p50 s", "refused", "GPU memory"], [["a long label of a row", *numbers]], "text")
    words = capsys.readouterr().out.split()
    assert {*numbers, "images/s", "refused"} <= {*words}
