"""The deployment's settings: a name that is none is never passed over."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from model.errors import ManifestError
from model.model import Model
from model.settings import read_section

ROOT = Path(__file__).resolve().parents[1]


def test_every_config_of_this_repository_is_read_as_it_is() -> None:
    configs = [ROOT / "config.yaml", *sorted((ROOT / "truss" / "configs").glob("*.yaml"))]
    for path in configs:
        section = yaml.safe_load(path.read_text())["model_metadata"]["preheat"]
        assert read_section(section) == section and len(section) > 5
    assert read_section(None) == {} and read_section({"public_key": None}) == {"public_key": None}


@pytest.mark.parametrize(
    "section, says",
    [
        ({"public_keys": "ed25519:x"}, "'public_keys' is no setting; .* public_key"),
        ("s3://bucket", "model_metadata.preheat is 's3://bucket', not settings"),
        ({"limits": 3}, "limits is 3, not a dict"),
        ({"buckets": 3}, "buckets is 3, not a list"),
        ({"store": ["s3://bucket"]}, "store is .* not a str"),
        ({"log_prompts": "no"}, "log_prompts is 'no', not a bool"),
        ({1: 2}, "1 is no setting"),
    ],
)
def test_what_is_no_setting_is_refused_before_anything_is_fetched(section: Any, says: str) -> None:
    with pytest.raises(ManifestError, match=says):
        Model(config={"model_metadata": {"preheat": section}})
