"""Weighted prompts: parentheses and brackets give parts of a prompt a weight, and long prompts are several chunks.

The grammar is that of AUTOMATIC1111's Stable Diffusion web UI (`modules/prompt_parser.py`, `parse_prompt_attention`):

    (text)      weight times 1.1
    [text]      weight divided by 1.1
    (text:1.3)  weight times 1.3
    \\( \\) \\[ \\]  the character itself

Brackets nest, and their factors are multiplied. A bracket without an end reaches to the end of the prompt. An end
without a beginning is text. Imports no torch.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from model.engines.signatures import TEXT_CHUNK_COUNTS
from model.errors import RequestRefused
from model.pipeline.tokenizer import ClipTokenizer
from model.validation import MAX_PROMPT_WEIGHT, format_value

_BRACKET = 1.1
MAX_OPEN_BRACKETS = 50  # of each kind. 25 parentheses around a text exceed MAX_PROMPT_WEIGHT
_TOKEN = re.compile(r"\\[()\[\]\\]|\\|\(|\[|:\s*([+-]?[.\d]+)\s*\)|\)|\]|[^\\()\[\]:]+|:")


@dataclass(frozen=True)
class Chunks:
    """A text as the encoders read it.

    ids: for each chunk the ids of one call of a text encoder, with begin, end and padding.
    weights: for each chunk one weight for each id; None: all are 1.
    dropped: the text that did not fit, "" if all of it did, and the number of its tokens.
    """

    ids: list[list[int]]
    weights: list[list[float]] | None = None
    dropped: str = ""
    dropped_tokens: int = 0


def plain_chunks(tokenizer: ClipTokenizer, text: str) -> Chunks:
    """Return one chunk with the first tokens of a text."""
    ids, dropped = tokenizer.encode(text)
    return Chunks([ids], dropped=tokenizer.dropped_text(text) if dropped else "", dropped_tokens=dropped)


def weighted_chunks(tokenizer: ClipTokenizer, text: str, max_chunks: int, field: str) -> Chunks:
    """Return the chunks of a weighted text: 1, 2 or 4, at most `max_chunks`.

    Each chunk has the begin token, up to max_length - 2 tokens and the end token. Three chunks get an empty fourth one,
    so that the number divides those of all engines. Raises RequestRefused, which names `field`, for a weight that is
    out of range or not a number.
    """
    settings = tokenizer.settings
    size = settings.max_length - 2
    tokens: list[tuple[int, float]] = []
    dropped, dropped_tokens = "", 0
    for fragment, weight in parse_weights(text, field):
        ids, rest = tokenizer.encode_fragment(fragment, max(0, size * max_chunks - len(tokens)))
        tokens += [(token, weight) for token in ids]
        if rest.tokens:
            dropped, dropped_tokens = dropped + rest.text, dropped_tokens + rest.tokens
    needed = max(1, math.ceil(len(tokens) / size))
    count = next(count for count in TEXT_CHUNK_COUNTS if count >= needed)
    chunks, weights = [], []
    for start in range(0, size * count, size):
        chunk = tokens[start : start + size]
        ids = [settings.bos_token_id, *(token for token, _ in chunk), settings.eos_token_id]
        padding = settings.max_length - len(ids)
        chunks.append(ids + [settings.pad_token_id] * padding)
        weights.append([1.0, *(weight for _, weight in chunk), 1.0, *[1.0] * padding])
    is_weighted = any(weight != 1 for _, weight in tokens)
    return Chunks(chunks, weights if is_weighted else None, dropped.strip(), dropped_tokens)


def parse_weights(text: str, field: str = "prompt") -> list[tuple[str, float]]:
    """Return the fragments of a weighted text, each with its weight. Neighbors of equal weight are joined.

    Raises RequestRefused, which names `field`.
    """
    fragments: list[str] = []
    weights: list[float] = []
    opened: dict[str, list[int]] = {"(": [], "[": []}

    def close(bracket: str, factor: float) -> None:
        for index in range(opened[bracket].pop(), len(weights)):
            weights[index] *= factor

    for match in _TOKEN.finditer(text):
        token, number = match[0], match[1]
        if token in opened:
            if len(opened[token]) == MAX_OPEN_BRACKETS:
                raise RequestRefused(
                    field, f"more than {MAX_OPEN_BRACKETS} {token} are open at once. Write a weight: (text:1.3)."
                )
            opened[token].append(len(fragments))
        elif number is not None and opened["("]:
            close("(", _read_weight(number, field))
        elif token == ")" and opened["("]:
            close("(", _BRACKET)
        elif token == "]" and opened["["]:
            close("[", 1 / _BRACKET)
        else:
            fragments.append(token[1:] if token.startswith("\\") and len(token) > 1 else token)
            weights.append(1.0)
    for bracket, factor in (("(", _BRACKET), ("[", 1 / _BRACKET)):
        while opened[bracket]:
            close(bracket, factor)
    return _joined(fragments, weights, field)


def _read_weight(number: str, field: str) -> float:
    try:
        return float(number)
    except ValueError:
        raise RequestRefused(
            field, f"the weight {format_value(number)} is not a number. Write one like 1.3, or \\) for a parenthesis."
        ) from None


def _joined(fragments: Sequence[str], weights: Sequence[float], field: str) -> list[tuple[str, float]]:
    joined: list[tuple[str, float]] = []
    for fragment, weight in zip(fragments, weights, strict=True):
        if not abs(weight) <= MAX_PROMPT_WEIGHT:  # also for NaN
            raise RequestRefused(
                field,
                f"{format_value(fragment)} has the weight {weight:.4g}. Weights are -{MAX_PROMPT_WEIGHT} to "
                f"{MAX_PROMPT_WEIGHT}: use fewer brackets or a smaller number.",
            )
        if joined and joined[-1][1] == weight:
            joined[-1] = (joined[-1][0] + fragment, weight)
        else:
            joined.append((fragment, weight))
    return joined or [("", 1.0)]
