"""Tiny SDXL's tokenizer files in transformers' CLIPTokenizer, and the encoder of the training."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.repository import MODEL_FOLDER
from training import tokenizer
from training.pictures import scenes
from training.pictures.captions import describe_scene
from training.pictures.dataset import encode_caption

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def clip() -> Any:
    return transformers.CLIPTokenizer.from_pretrained(MODEL_FOLDER / "tokenizer")


@pytest.fixture(scope="module")
def clip_2() -> Any:
    return transformers.CLIPTokenizer.from_pretrained(MODEL_FOLDER / "tokenizer_2")


def padded_ids(clip_tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = clip_tokenizer(text, padding="max_length", max_length=77, truncation=True).input_ids
    return ids


@pytest.mark.parametrize(("folder", "pad_token"), [("tokenizer", tokenizer.END_TOKEN), ("tokenizer_2", "!")])
def test_committed_files_are_what_the_code_writes(folder: str, pad_token: str, tmp_path: Path) -> None:
    tokenizer.write_tokenizer(tmp_path, pad_token)
    files = list(tmp_path.iterdir())
    assert len(files) == 4
    for file in files:
        assert file.read_bytes() == (MODEL_FOLDER / folder / file.name).read_bytes(), file.name


def test_lengths_and_padding(clip: Any, clip_2: Any) -> None:
    vocab, _ = tokenizer.vocabulary()
    start, end = vocab[tokenizer.START_TOKEN], vocab[tokenizer.END_TOKEN]
    assert clip.model_max_length == clip_2.model_max_length == 77
    ids, ids_2 = padded_ids(clip, "a red circle"), padded_ids(clip_2, "a red circle")
    assert len(ids) == len(ids_2) == 77
    assert ids[:5] == ids_2[:5] and ids[0] == start and ids[4] == end
    assert set(ids[5:]) == {end} and set(ids_2[5:]) == {0}
    assert max(vocab.values()) == end


@pytest.mark.parametrize("text", ["zebra xylophone", "naïve façade", "日本語", "🙂 smile", "it's 42!?", "ＡＢＣ"])
def test_decodes_unknown_words(clip: Any, text: str) -> None:
    decoded = clip.decode(clip(text).input_ids, skip_special_tokens=True)
    assert decoded.replace(" ", "") == text.lower().replace(" ", "")


def test_training_encoder_equals_transformers(clip: Any) -> None:
    rng = random.Random(6)
    captions = [describe_scene(scenes.sample_scene(rng), rng)[0] for _ in range(300)]
    for text in [*captions, "Unknown words, 17 ZEBRAS!", "red " * 200, ""]:
        assert encode_caption(text) == padded_ids(clip, text), text
