"""Weighted prompts: parentheses and brackets give parts of a prompt a weight, and long prompts are several chunks.

The grammar is that of AUTOMATIC1111's Stable Diffusion web UI (`modules/prompt_parser.py`, `parse_prompt_attention`):

    (text)      weight times 1.1
    [text]      weight divided by 1.1
    (text:1.3)  weight times 1.3
    \\( \\) \\[ \\]  the character itself

Brackets nest, and their factors are multiplied. A bracket without an end reaches to the end of the prompt. An end
without a beginning is text. Imports no torch.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from model.engines.signatures import TEXT_CHUNK_COUNTS
from model.errors import RequestRefused
from model.prompts.tokenizer import ClipTokenizer, Piece
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
    uncut: the embedding that `dropped` begins with although some of its vectors would fit; "" without one.
    inside: the embeddings that are a part of a longer word, each with that word, as typed.
    embeddings: the text of each embedding, without backslashes, also of those that did not fit.
    """

    ids: list[list[int]]
    weights: list[list[float]] | None = None
    dropped: str = ""
    dropped_tokens: int = 0
    uncut: str = ""
    inside: tuple[tuple[str, str], ...] = ()
    embeddings: tuple[str, ...] = ()


def plain_chunks(tokenizer: ClipTokenizer, text: str) -> Chunks:
    """Return one chunk with the first tokens of a text."""
    return _chunks(tokenizer, [(text, 1.0)], max_chunks=1)


def weighted_chunks(tokenizer: ClipTokenizer, text: str, max_chunks: int, field: str) -> Chunks:
    """Return the chunks of a weighted text: 1, 2 or 4, at most `max_chunks`.

    Three chunks get an empty fourth one, so that the number divides those of all engines. Raises RequestRefused, which
    names `field`, for a weight that is out of range or not a number.
    """
    return _chunks(tokenizer, parse_weights(text, field), max_chunks)


def _chunks(tokenizer: ClipTokenizer, fragments: Sequence[tuple[str, float]], max_chunks: int) -> Chunks:
    """Divide fragments with weights into chunks: begin token, up to max_length - 2 tokens, end token, padding.

    An embedding is not divided: if a chunk has no room for all of its vectors, it begins the next one, as in
    AUTOMATIC1111's web UI. Those of releases before schema 5 may be larger than a chunk; only they are divided. What
    follows the last chunk is dropped.
    """
    settings = tokenizer.settings
    size = settings.max_length - 2
    chunks: list[list[tuple[int, float]]] = [[]]
    dropped, dropped_tokens, uncut = "", 0, ""
    inside: dict[tuple[str, str], None] = {}
    embeddings: dict[str, None] = {}
    for fragment, weight in fragments:
        pieces = [part for piece in tokenizer.pieces(fragment) for part in _fitting(piece, size)]
        embeddings |= {fragment[piece.start : piece.stop]: None for piece in pieces if piece.is_embedding}
        for number, piece in enumerate(pieces):
            room = size - len(chunks[-1])
            if dropped_tokens or (len(piece.ids) > room and len(chunks) == max_chunks):
                if room and not dropped_tokens:
                    uncut = fragment[piece.start : piece.stop]
                dropped += fragment if dropped_tokens else fragment[piece.start :]
                dropped_tokens += sum(len(rest.ids) for rest in pieces[number:])
                break
            if len(piece.ids) > room:
                chunks.append([])
            chunks[-1] += [(token, weight) for token in piece.ids]
            if piece.is_embedding and (word := _longer_word(fragment, piece)):
                inside[fragment[piece.start : piece.stop], word] = None
    chunks += [[]] * (next(count for count in TEXT_CHUNK_COUNTS if count >= len(chunks)) - len(chunks))
    ids, weights = [], []
    for chunk in chunks:
        padding = size - len(chunk)
        begin, end = settings.bos_token_id, settings.eos_token_id
        ids.append([begin, *(token for token, _ in chunk), end, *[settings.pad_token_id] * padding])
        weights.append([1.0, *(weight for _, weight in chunk), 1.0, *[1.0] * padding])
    is_weighted = any(weight != 1 for of_chunk in weights for weight in of_chunk)
    return Chunks(
        ids, weights if is_weighted else None, dropped.strip(), dropped_tokens, uncut, tuple(inside), tuple(embeddings)
    )


def _fitting(piece: Piece, size: int) -> list[Piece]:
    """Return a piece, or one for each of its ids if it has more than `size`."""
    return [piece] if len(piece.ids) <= size else [piece._replace(ids=(token,)) for token in piece.ids]


def _longer_word(text: str, piece: Piece) -> str:
    """Return the word that an embedding's token is a part of: two letters meet at an end of the token. Else "".

    Letters without upper and lower case are not compared: most scripts with them write no spaces between words.
    """
    before, token, after = text[: piece.start], text[piece.start : piece.stop], text[piece.stop :]
    ends = ((before[-1:], token[:1]), (token[-1:], after[:1]))
    if not any(all(letter.lower() != letter.upper() for letter in pair) for pair in ends):
        return ""
    word_before, word_after = re.match(r"\w*", before[::-1]), re.match(r"\w*", after)
    assert word_before is not None and word_after is not None
    return word_before[0][::-1] + token + word_after[0]


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
