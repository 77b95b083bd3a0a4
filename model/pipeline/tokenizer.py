"""CLIP tokenization with the `tokenizers` library alone: importing transformers takes seconds of a cold start.

The ids equal those of `transformers.CLIPTokenizer` for the same folder, for unusual prompts too. The rules
(lower-casing, byte pairs, special tokens) are data in the release's tokenizer.json. This module only truncates and pads
ids, and reports the text that did not fit. The tokens of textual inversion are in the same file.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from tokenizers import Encoding, Tokenizer

from model.errors import MissingComponent

_TEST_PROMPT = "A photo, caf\u00e9 \u6f22 \U0001f600 in 4K!?"


@contextmanager
def _as_missing_component() -> Iterator[None]:
    """Raise MissingComponent in place of the library's errors. Its Rust panics do not derive from Exception."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:200]
        raise MissingComponent(f"The release's tokenizer.json cannot be read or used ({reason}).") from error


@dataclass(frozen=True)
class TokenizerSettings:
    """Facts that tokenizer.json lacks. SDXL's first tokenizer pads with its end token, its second with `!`."""

    max_length: int  # ids of an encoded prompt, begin and end tokens included: 77
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int


class Dropped(NamedTuple):
    """The end of a text that did not fit, as typed, and the number of its tokens."""

    text: str
    tokens: int


class ClipTokenizer:
    """One tokenizer of a release. Thread-safe: encoding changes no state.

    `tokenizer_json`: the bytes that `engine_builder.checkpoints.tokenizers.export_tokenizer` writes. Raises
    MissingComponent if they cannot be read or disagree with `settings`.
    """

    def __init__(self, tokenizer_json: bytes, settings: TokenizerSettings) -> None:
        with _as_missing_component():
            self._tokenizer: Tokenizer = Tokenizer.from_buffer(tokenizer_json)
        # The file may have padding and truncation switched on.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.settings = settings
        expected = [settings.bos_token_id, settings.eos_token_id]
        with _as_missing_component():
            ids = self._tokenizer.encode("").ids
            self._tokenizer.encode(_TEST_PROMPT)
        if ids != expected:
            raise MissingComponent(
                f"The release's tokenizer encodes an empty prompt as {str(ids):.80}. Its settings state {expected} "
                "(begin and end token)."
            )
        if self._tokenizer.id_to_token(settings.pad_token_id) is None:
            raise MissingComponent(
                f"The release's tokenizer has no token {settings.pad_token_id}, which its settings state for padding."
            )
        with _as_missing_component():
            self._expansions = _expansions(self._tokenizer)

    def encode(self, text: str) -> tuple[list[int], int]:
        """Return the prompt's ids, exactly `max_length` of them, and the number of dropped tokens.

        A prompt that is too long loses its last tokens, except the end token.
        """
        with _as_missing_component():
            ids = self._tokenizer.encode(self._expand(text)).ids
        limit = self.settings.max_length
        dropped = max(0, len(ids) - limit)
        if dropped:
            ids = ids[: limit - 1] + [self.settings.eos_token_id]
        return ids + [self.settings.pad_token_id] * (limit - len(ids)), dropped

    def encode_fragment(self, text: str, limit: int) -> tuple[list[int], Dropped]:
        """Return the first `limit` ids of a part of a prompt, without begin and end tokens, and what was dropped."""
        text = self._expand(text)
        with _as_missing_component():
            encoding: Encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ids = encoding.ids
        if len(ids) <= limit:
            return ids, Dropped("", 0)
        first_dropped, _ = encoding.offsets[limit]
        return ids[:limit], Dropped(text[first_dropped:], len(ids) - limit)

    def dropped_text(self, text: str) -> str:
        """Return the end of `text`, as typed, from the first dropped token on; "" if all tokens fit."""
        text = self._expand(text)
        encoding: Encoding = self._tokenizer.encode(text)
        limit = self.settings.max_length
        if len(encoding.ids) <= limit:
            return ""
        first_dropped, _ = encoding.offsets[limit - 1]
        return text[first_dropped:].strip()

    def _expand(self, text: str) -> str:
        """Return a text in which each token of several vectors is followed by its further tokens.

        As diffusers' `maybe_convert_prompt`.
        """
        if self._expansions:
            found = set(self._tokenizer.encode(text, add_special_tokens=False).tokens)
            for token in sorted(found & self._expansions.keys()):
                text = text.replace(token, self._expansions[token])
        return text


def _expansions(tokenizer: Tokenizer) -> Mapping[str, str]:
    """Return for each added token of several vectors the tokens of all of them: "token token_1 token_2"."""
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values() if not token.special}
    expansions = {}
    for token in added:
        tokens = [token]
        while (further := f"{token}_{len(tokens)}") in added:
            tokens.append(further)
        if len(tokens) > 1:
            expansions[token] = " ".join(tokens)
    return expansions
