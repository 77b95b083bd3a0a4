"""What maps an engine's constants to tensors: the loader checks no name, shape or dtype, and would read what lies
behind a tensor."""

import json

import pytest

from model.errors import EngineError
from tests.attacks.conftest import Victim
from tests.stand_ins import releases

CHANGES = {
    "a larger shape": ({"a.weight": {"shape": [8, 400]}}, "do not fit its engine"),
    "another tensor": ({"a.weight": {"tensor": "b.weight"}}, "do not fit its engine"),
    "another dtype": ({"a.weight": {"dtype": "float16"}}, "do not fit its engine"),
    "a tensor that is not there": ({"a.weight": {"tensor": "../../x"}}, "lack ../../x"),
    "a constant too many": (
        {"extra": {"tensor": "a.bias", "dtype": "float32", "shape": [8]}},
        "its constant map disagree",
    ),
    "a shape below zero": ({"a.weight": {"shape": [-8, 4]}}, "map of constants is damaged"),
}


@pytest.mark.parametrize("change, words", CHANGES.values(), ids=CHANGES)
def test_it_is_refused(victim: Victim, change: dict, words: str) -> None:
    victim.entries["engines"][2]["constants"] = victim.keep(releases.toy_map(change))
    victim.refused(EngineError, words)


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"a":' * 100_000, json.dumps({"a": 1}).encode(), b"\x80\x04pickle"])
def test_what_is_no_map_is_refused(victim: Victim, data: bytes) -> None:
    victim.entries["engines"][2]["constants"] = victim.keep(data)
    victim.refused(EngineError, "map of constants is damaged")
