"""Make the files of CLIP's tokenizer, which single-file checkpoints lack.

`clip_vocabulary/bpe_simple_vocab_16e6.txt.gz` is the list of merges that OpenAI published with CLIP (MIT licence, see
`clip_vocabulary/LICENSE`; it is part of the packages clip-anytorch and open-clip-torch). The vocabulary follows from
it: the 256 bytes, the same at the end of a word, the first 48,894 merges, and two special tokens.
"""

import gzip
import json
from functools import cache
from pathlib import Path

MERGES = Path(__file__).with_name("clip_vocabulary") / "bpe_simple_vocab_16e6.txt.gz"
BEGIN, END = "<|startoftext|>", "<|endoftext|>"
_MERGES = 48_894
_WORD_END = "</w>"


def tokenizer_files(pad: str) -> dict[str, bytes]:
    """Return the files of a CLIPTokenizer by name. pad: its pad token, END for CLIP ViT-L and "!" for OpenCLIP."""
    vocabulary, merges = _vocabulary()
    special = {"bos_token": BEGIN, "eos_token": END, "pad_token": pad, "unk_token": END}
    config = special | {
        "add_prefix_space": False, "clean_up_tokenization_spaces": True, "do_lower_case": True, "errors": "replace",
        "model_max_length": 77, "tokenizer_class": "CLIPTokenizer",
    }  # fmt: skip
    return {
        "vocab.json": json.dumps({token: number for number, token in enumerate(vocabulary)}).encode(),
        "merges.txt": "\n".join(("#version: 0.2", *merges, "")).encode(),
        "special_tokens_map.json": json.dumps(special).encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }


@cache
def _vocabulary() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the tokens in the order of their ids, and the merges."""
    merges = tuple(gzip.decompress(MERGES.read_bytes()).decode().split("\n")[1 : _MERGES + 1])
    letters = _byte_letters()
    ends = [letter + _WORD_END for letter in letters]
    return (*letters, *ends, *(merge.replace(" ", "") for merge in merges), BEGIN, END), merges


def _byte_letters() -> list[str]:
    """Return a printable letter for each byte, in the order of GPT-2: first the bytes that are printable themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(0xAE, 0x100)]
    return [chr(byte) for byte in printable] + [chr(0x100 + number) for number in range(256 - len(printable))]
