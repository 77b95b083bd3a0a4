"""The two CLIP tokenizers: a small byte-level BPE vocabulary that encodes any text.

Words of the captions and common English words are single tokens. Other words become letters or bytes. `tokenizer` pads
with <|endoftext|> and `tokenizer_2` with "!" (id 0), as in SDXL.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path

MAX_LENGTH = 77  # tokens
START_TOKEN, END_TOKEN = "<|startoftext|>", "<|endoftext|>"

CAPTION_WORDS = """
a an the and of on in at to is are with against two three 2 3 pair one both
red green blue yellow purple orange black white small large big little tiny huge
circle circles square squares triangle triangles star stars shape shapes
background left right top bottom centre center middle above below under over beneath side corner upper lower
picture image drawing draw painting photo show make me please there it its that
"""
COMMON_WORDS = """
all also an any as back be because big book but by can cat come day do dog down eye face first for from get give go
good great grey pink brown hand have he head her here him his house how i if into just know life light like line
look made man many more most my new next no not now old or other our out part people person place plain put round
said see she sky so some sun take than their them then these they thing this those time tree up use very wall was
water way we well were what when where which who will woman word work world would year you your four five six
without small dark bright beautiful style high quality low detailed simple flat color colour colored coloured solid
inside outside near next behind front between touching standing sitting lying beside alone single empty blurry sharp
"""


def _byte_alphabet() -> list[str]:
    """Return the 256 characters that represent bytes, in CLIP's order ("!" first)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(byte) for byte in printable] + [chr(256 + i) for i in range(256 - len(printable))]


def learn_merges() -> list[tuple[str, str]]:
    """Return merges, in order, that make each listed word one token."""
    counts = Counter(COMMON_WORDS.split())
    for word in CAPTION_WORDS.split():
        counts[word] += 20
    words = {word: [*word[:-1], word[-1] + "</w>"] for word in counts}
    merges: list[tuple[str, str]] = []
    while True:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, parts in words.items():
            for pair in zip(parts, parts[1:], strict=False):
                pairs[pair] += counts[word]
        if not pairs:
            return merges
        best = max(sorted(pairs), key=lambda pair: pairs[pair])
        merges.append(best)
        for word, parts in words.items():
            words[word] = merge_pair(parts, best)


def merge_pair(parts: list[str], pair: tuple[str, str]) -> list[str]:
    """Return `parts` with every occurrence of `pair` joined."""
    merged: list[str] = []
    for part in parts:
        if merged and (merged[-1], part) == pair:
            merged[-1] += part
        else:
            merged.append(part)
    return merged


@cache
def vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return token -> id, and the merges. <|endoftext|> has the highest id, as in CLIP. Do not change the result."""
    alphabet = _byte_alphabet()
    merges = learn_merges()
    letters = [*alphabet, *(letter + "</w>" for letter in alphabet)]
    tokens = [*letters, *("".join(pair) for pair in merges), START_TOKEN, END_TOKEN]
    vocab = {token: index for index, token in enumerate(tokens)}
    assert len(vocab) == len(tokens), "two merges gave the same token"
    return vocab, merges


def write_tokenizer(folder: Path, pad_token: str) -> None:
    """Write the four files of a CLIP tokenizer that pads with `pad_token`."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab, merges = vocabulary()
    special = {"bos_token": START_TOKEN, "eos_token": END_TOKEN, "pad_token": pad_token, "unk_token": END_TOKEN}
    config = {
        "add_prefix_space": False,
        **special,
        "clean_up_tokenization_spaces": True,
        "do_lower_case": True,
        "errors": "replace",
        "model_max_length": MAX_LENGTH,
        "tokenizer_class": "CLIPTokenizer",
    }
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    _write_text(folder / "vocab.json", json.dumps(vocab, ensure_ascii=False))
    _write_text(folder / "merges.txt", "\n".join(lines) + "\n")
    _write_text(folder / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")
    _write_text(folder / "special_tokens_map.json", json.dumps(special, indent=2) + "\n")


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
