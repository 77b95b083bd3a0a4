"""The two CLIP tokenizers: a small byte-level BPE vocabulary, so that any text becomes tokens.

Words of the world and common English words are single tokens; the rest falls apart into letters or bytes.
`tokenizer` pads with <|endoftext|> and `tokenizer_2` with "!" (id 0), as SDXL's do.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

LENGTH = 77
START, END = "<|startoftext|>", "<|endoftext|>"

WORLD_WORDS = """
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
    """The 256 characters that stand for bytes, in CLIP's order ("!" first)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) for byte in shown] + [chr(256 + i) for i in range(len(hidden))]


def learn_merges() -> list[tuple[str, str]]:
    """Merges, in order, under which each listed word is one token."""
    counts = Counter(COMMON_WORDS.split())
    for word in WORLD_WORDS.split():
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
            words[word] = merged(parts, best)


def merged(parts: list[str], pair: tuple[str, str]) -> list[str]:
    """`parts` with every occurrence of `pair` joined."""
    out: list[str] = []
    for part in parts:
        if out and (out[-1], part) == pair:
            out[-1] += part
        else:
            out.append(part)
    return out


def vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Token -> id, and the merges. <|endoftext|> has the highest id, as in CLIP."""
    alphabet = _byte_alphabet()
    merges = learn_merges()
    tokens = [*alphabet, *(letter + "</w>" for letter in alphabet), *("".join(pair) for pair in merges), START, END]
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ValueError("two merges made the same token")
    return vocab, merges


def write(folder: Path, pad: str) -> None:
    """The four files of a CLIP tokenizer that pads with `pad`."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab, merges = vocabulary()
    special = {"bos_token": START, "eos_token": END, "pad_token": pad, "unk_token": END}
    config = {
        "add_prefix_space": False,
        **special,
        "clean_up_tokenization_spaces": True,
        "do_lower_case": True,
        "errors": "replace",
        "model_max_length": LENGTH,
        "tokenizer_class": "CLIPTokenizer",
    }
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    _write(folder / "vocab.json", json.dumps(vocab, ensure_ascii=False))
    _write(folder / "merges.txt", "\n".join(lines) + "\n")
    _write(folder / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")
    _write(folder / "special_tokens_map.json", json.dumps(special, indent=2) + "\n")


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
