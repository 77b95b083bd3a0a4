"""tokenizer.json is read by a library that panics, recurses, and believes what ids it is told."""

import json
from typing import Any

import pytest

from model.errors import MissingComponent
from tests.attacks.conftest import Victim
from tests.stand_ins import releases


def template(single: list[Any], special: dict[str, Any]) -> dict[str, Any]:
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special}


SEQUENCE = {"Sequence": {"id": "A", "type_id": 0}}
BOMBS: dict[str, dict[str, Any]] = {
    "a token that is not there": {
        "post_processor": template([{"SpecialToken": {"id": "<q>", "type_id": 0}}, SEQUENCE], {})
    },
    "a normalizer that panics": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}},
    "pieces of no length": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "a model without a vocabulary": {"model": {"type": "WordLevel", "unk_token": "", "vocab": {}}},
    "a pattern without end": {
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(" * 5000}, "behavior": "Isolated"}
    },
    "no model": {"model": None},
}


@pytest.mark.parametrize("change", BOMBS.values(), ids=BOMBS)
def test_it_is_refused(victim: Victim, change: dict[str, Any]) -> None:
    whole = json.loads(releases.tokenizer_json()) | change
    victim.entries["tokenizers"]["tokenizer"]["blob"] = victim.keep(json.dumps(whole).encode())
    victim.refused(MissingComponent, "tokenizer.json cannot be read or used")


@pytest.mark.parametrize(
    "data", [b"[" * 100_000, b'{"normalizer":' + b'{"type":"Sequence","normalizers":[' * 50_000, b"\xff" * 100, b""]
)
def test_what_is_no_tokenizer_is_refused(victim: Victim, data: bytes) -> None:
    victim.entries["tokenizers"]["tokenizer_2"]["blob"] = victim.keep(data)
    victim.refused(MissingComponent, "tokenizer.json cannot be read or used")


def test_ids_that_no_network_has_a_row_for_are_refused(victim: Victim) -> None:
    """Where they are used they are indices into a table of weights."""
    victim.entries["tokenizers"]["tokenizer"]["pad_token_id"] = 2**31 - 1
    victim.refused(MissingComponent, f"has no token {2**31 - 1}")
    victim.entries["tokenizers"]["tokenizer"] |= {"pad_token_id": 1, "eos_token_id": 2**31 - 1}
    victim.refused(MissingComponent, "encodes an empty prompt as [0, 1]")
