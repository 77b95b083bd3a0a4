"""Our tokenizer files in transformers' own CLIPTokenizer, and the training's fast path against it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from training import tokenizer, world
from training.captions import describe
from training.data import token_ids

MODEL = Path(__file__).parents[2] / "data" / "tiny-sdxl"
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def first():  # type: ignore[no-untyped-def]
    return transformers.CLIPTokenizer.from_pretrained(MODEL / "tokenizer")


@pytest.fixture(scope="module")
def second():  # type: ignore[no-untyped-def]
    return transformers.CLIPTokenizer.from_pretrained(MODEL / "tokenizer_2")


def padded(tokenizer_, text: str) -> list[int]:  # type: ignore[no-untyped-def]
    ids: list[int] = tokenizer_(text, padding="max_length", max_length=77, truncation=True).input_ids
    return ids


def test_the_committed_files_are_what_the_code_writes(tmp_path: Path) -> None:
    for folder, pad in (("tokenizer", tokenizer.END), ("tokenizer_2", "!")):
        tokenizer.write(tmp_path / folder, pad)
        for file in (tmp_path / folder).iterdir():
            assert file.read_bytes() == (MODEL / folder / file.name).read_bytes(), file.name


def test_lengths_and_padding(first, second) -> None:  # type: ignore[no-untyped-def]
    vocab, _ = tokenizer.vocabulary()
    assert first.model_max_length == second.model_max_length == 77
    one, two = padded(first, "a red circle"), padded(second, "a red circle")
    assert len(one) == len(two) == 77
    assert one[:5] == two[:5] and one[0] == vocab[tokenizer.START] and one[4] == vocab[tokenizer.END]
    assert set(one[5:]) == {vocab[tokenizer.END]} and set(two[5:]) == {0}
    assert max(vocab.values()) == vocab[tokenizer.END]


def test_world_words_are_one_token_each(first) -> None:  # type: ignore[no-untyped-def]
    for word in tokenizer.WORLD_WORDS.split():
        assert len(first(word).input_ids) == 3, word


@pytest.mark.parametrize("text", ["zebra xylophone", "naïve façade", "日本語", "🙂 smile", "it's 42!?", "ＡＢＣ"])
def test_unknown_words_survive_the_round_trip(first, text: str) -> None:  # type: ignore[no-untyped-def]
    ids = first(text).input_ids
    back = first.decode(ids, skip_special_tokens=True)
    assert back.replace(" ", "") == text.lower().replace(" ", "")


def test_long_text_is_cut_at_77(first) -> None:  # type: ignore[no-untyped-def]
    ids = padded(first, "red " * 200)
    assert len(ids) == 77 and ids[-1] == first.eos_token_id


def test_case_does_not_matter(first) -> None:  # type: ignore[no-untyped-def]
    assert first("A Red CIRCLE").input_ids == first("a red circle").input_ids


def test_the_fast_path_agrees(first) -> None:  # type: ignore[no-untyped-def]
    rng = random.Random(6)
    texts = [describe(world.sample(rng), rng)[0] for _ in range(300)]
    for text in [*texts, "Unknown words, 17 zebras!", ""]:
        assert token_ids(text) == padded(first, text), text
