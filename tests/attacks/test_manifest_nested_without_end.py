"""Brackets in brackets: a parser that recurses would run out of stack, and the process with it."""

import pytest

from model.errors import ManifestError
from tests.attacks.conftest import Victim


@pytest.mark.parametrize("opening, closing", [(b"[", b"]"), (b'{"a":', b"}")])
def test_it_is_no_json_that_is_read(victim: Victim, opening: bytes, closing: bytes) -> None:
    deep = opening * 200_000 + b"1" + closing * 200_000
    victim.raw = victim.manifest.to_json().replace(b'"num_inference_steps": 4', b'"num_inference_steps": ' + deep)
    victim.refused(ManifestError, "is not JSON")
    victim.raw = deep
    victim.refused(ManifestError, "is not JSON")


def test_what_is_just_shallow_enough_to_be_read_is_refused_by_what_it_says(victim: Victim) -> None:
    victim.raw = victim.manifest.to_json().replace(
        b'"num_inference_steps": 4', b'"num_inference_steps": ' + b"[" * 150 + b"]" * 150
    )
    victim.refused(ManifestError, "num_inference_steps")
