"""tokenizer.json is parsed by a library that may panic, recurse, and accept any id."""

import json
from typing import Any

import pytest

from model.errors import MissingComponent
from tests.attacks.conftest import Victim
from tests.support import releases


def template(single: list[Any], special: dict[str, Any]) -> dict[str, Any]:
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special}


SEQUENCE = {"Sequence": {"id": "A", "type_id": 0}}
BOMBS: dict[str, dict[str, Any]] = {
    "missing token": {"post_processor": template([{"SpecialToken": {"id": "<q>", "type_id": 0}}, SEQUENCE], {})},
    "panicking normalizer": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}},
    "empty pieces": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "empty vocabulary": {"model": {"type": "WordLevel", "unk_token": "", "vocab": {}}},
    "endless pattern": {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(" * 5000}, "behavior": "Isolated"}},
    "no model": {"model": None},
}


@pytest.mark.parametrize("change", BOMBS.values(), ids=BOMBS)
def test_refuses_hostile_tokenizer(victim: Victim, change: dict[str, Any]) -> None:
    whole = json.loads(releases.tokenizer_json()) | change
    victim.entries["tokenizers"]["tokenizer"]["blob"] = victim.keep(json.dumps(whole).encode())
    victim.refused(MissingComponent, "tokenizer.json cannot be read or used")


@pytest.mark.parametrize(
    "data", [b"[" * 100_000, b'{"normalizer":' + b'{"type":"Sequence","normalizers":[' * 50_000, b"\xff" * 100, b""]
)
def test_refuses_invalid_tokenizer(victim: Victim, data: bytes) -> None:
    victim.entries["tokenizers"]["tokenizer_2"]["blob"] = victim.keep(data)
    victim.refused(MissingComponent, "tokenizer.json cannot be read or used")


def test_refuses_ids_outside_the_vocabulary(victim: Victim) -> None:
    """Ids are used as indices into the embedding table."""
    victim.entries["tokenizers"]["tokenizer"]["pad_token_id"] = 2**31 - 1
    victim.refused(MissingComponent, f"has no token {2**31 - 1}")
    victim.entries["tokenizers"]["tokenizer"] |= {"pad_token_id": 1, "eos_token_id": 2**31 - 1}
    victim.refused(MissingComponent, "encodes an empty prompt as [0, 1]")
