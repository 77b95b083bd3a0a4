"""CLIP's tokenizer from the published list of merges."""

import gzip
import hashlib
import html
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_builder.building.diffusers_pipeline import _WORDS
from engine_builder.checkpoints.clip_tokenizer import BEGIN, END, MERGES, tokenizer_files
from engine_builder.checkpoints.tokenizers import export_tokenizer
from model.prompts.tokenizer import ClipTokenizer
from model.prompts.weighted_prompt import plain_chunks

PADS = {"tokenizer": END, "tokenizer_2": "!"}
# Known ids of CLIP's vocabulary.
KNOWN = {"a photo of a cat": [320, 1125, 539, 320, 2368], "!": [256], "Hello, world!": [3306, 267, 1002, 256]}


class ReferenceTokenizer:
    """The byte pair encoding of CLIP's paper code (openai/CLIP, `clip/simple_tokenizer.py`), written anew."""

    pattern = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d|[^\W\d_]+|\d|(?:[^\s\w]|_)+", re.IGNORECASE)

    def __init__(self) -> None:
        merges = [tuple(line.split()) for line in gzip.open(MERGES, "rt", encoding="utf-8")][1:48895]
        visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
        hidden = [byte for byte in range(256) if byte not in visible]
        self.letters = {byte: chr(byte) for byte in visible} | {b: chr(256 + n) for n, b in enumerate(hidden)}
        tokens = [self.letters[byte] for byte in (*visible, *hidden)]
        tokens += [f"{token}</w>" for token in tokens] + ["".join(pair) for pair in merges]
        self.ids = {token: number for number, token in enumerate(tokens)}
        self.ranks = {pair: number for number, pair in enumerate(merges)}

    def encode(self, text: str) -> list[int]:
        clean = " ".join(html.unescape(html.unescape(text)).split()).lower()
        return [number for word in self.pattern.findall(clean) for number in self._word(word)]

    def _word(self, word: str) -> Iterator[int]:
        parts = [self.letters[byte] for byte in word.encode()]
        parts[-1] += "</w>"
        while len(parts) > 1:
            pairs = list(zip(parts, parts[1:], strict=False))
            best = min(pairs, key=lambda pair: self.ranks.get(pair, len(self.ranks)))
            if best not in self.ranks:
                break
            merged: list[str] = []
            while parts:
                size = 2 if tuple(parts[:2]) == best else 1
                merged.append("".join(parts[:size]))
                parts = parts[size:]
            parts = merged
        return (self.ids[part] for part in parts)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each pad token."""
    root = tmp_path_factory.mktemp("clip")
    for name, pad in PADS.items():
        (root / name).mkdir()
        for file, data in tokenizer_files(pad).items():
            (root / name / file).write_bytes(data)
    return {name: root / name for name in PADS}


def texts() -> list[str]:
    """Return 1,000 texts of words that all tokenizers of CLIP clean alike: without markup and control characters."""
    generator = random.Random(0)
    words = [word for word in _WORDS if word.strip() and "|" not in word and "&" not in word and "\u200b" not in word]
    words = [word for word in words if word.isascii() or word in ("\u6f22\u5b57", "\u043a\u043e\u0442", "\U0001f600")]
    words += [
        "masterpiece",
        "1girl",
        "score_9",
        "score_8_up",
        "hatsune",
        "miku,",
        "(long",
        "hair:1.3)",
        "ultra-detailed",
    ]
    words += ["".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=generator.randint(1, 14))) for _ in range(2000)]
    return [" ".join(generator.choices(words, k=generator.randint(1, 30))) for _ in range(1000)]


def test_merges_are_the_published_file() -> None:
    digest = hashlib.sha256(MERGES.read_bytes()).hexdigest()
    assert digest == "924691ac288e54409236115652ad4aa250f48203de50a9e4722a6ecd48d6804a"
    assert "MIT License" in (MERGES.parent / "LICENSE").read_text()


def test_encodes_a_thousand_texts_as_clip_does(tokenizers: dict[str, Path]) -> None:
    from transformers import CLIPTokenizer

    reference, compared = ReferenceTokenizer(), texts()
    library = CLIPTokenizer.from_pretrained(str(tokenizers["tokenizer"]), local_files_only=True)
    assert library.vocab_size == len(reference.ids) + 2 == 49_408
    begin, end = library.convert_tokens_to_ids([BEGIN, END])
    assert (begin, end) == (49_406, 49_407)
    for text, ids in KNOWN.items():
        assert reference.encode(text) == library(text, add_special_tokens=False).input_ids == ids
    expected = [[begin, *reference.encode(text), end] for text in compared]
    assert library(compared).input_ids == expected
    assert len({number for ids in expected for number in ids}) > 1000


@pytest.mark.parametrize("name, pad", [("tokenizer", 49_407), ("tokenizer_2", 0)])
def test_releases_tokenize_and_pad_as_clip_does(name: str, pad: int, tokenizers: dict[str, Path]) -> None:
    ours = ClipTokenizer(*export_tokenizer(tokenizers[name]))
    [ids] = plain_chunks(ours, "a photo of a cat").ids
    assert ids == [49_406, *KNOWN["a photo of a cat"], 49_407, *[pad] * 70]
