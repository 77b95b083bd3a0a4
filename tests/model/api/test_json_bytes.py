"""JSON of answers and of requests to backends."""

import json
from typing import Any

import pytest

from model.api.json_bytes import json_bytes


@pytest.mark.parametrize(
    "value",
    [
        {"data": "aGk=", "images": [{"seed": 2**32 - 1, "flagged": False}], "time": 1e-7, "warnings": ()},
        {"text": 'café \u2028 \x85 "quoted" \\ \n'},
        {"half of a pair": "\ud83d"},
        {"number": float("inf")},
    ],
)
def test_is_ascii_that_json_reads(value: dict[str, Any]) -> None:
    content = json_bytes(value)
    assert json.loads(content) == json.loads(json.dumps(value))
    assert content.isascii() and len(content.decode().splitlines()) == 1


def test_ascii_never_takes_the_slow_way(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = json.dumps({"data": "aGk="}, separators=(",", ":")).encode()
    monkeypatch.delattr(json, "dumps")
    assert json_bytes({"data": "aGk="}) == expected
