"""CLIP tokenization with the `tokenizers` library alone: importing transformers takes seconds of a cold start.

The ids equal those of `transformers.CLIPTokenizer` for the same folder, for unusual prompts too. The rules
(lower-casing, byte pairs, special tokens) are data in the release's tokenizer.json. The tokens of textual inversion are
a value of their own, token -> ids. Releases of older versions have them in tokenizer.json.
`model.prompts.weighted_prompt` divides the ids into chunks.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from tokenizers import AddedToken, Encoding, Tokenizer

from model.errors import MissingComponent
from model.store.manifest import TokenizerRecord

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


class Piece(NamedTuple):
    """Ids that stay together: one token's, or those of all vectors of an embedding. It is `text[start:stop]`."""

    ids: tuple[int, ...]
    start: int
    stop: int
    is_embedding: bool


class ClipTokenizer:
    """One tokenizer of a release. Thread-safe: encoding changes no state.

    `tokenizer_json`: the bytes that `engine_builder.checkpoints.tokenizers.export_tokenizer` writes. `embeddings`: the
    ids of the vectors of each token of textual inversion. Raises MissingComponent if the file cannot be read or
    disagrees with `settings`, or has a token of `embeddings`.

    The library finds the tokens of embeddings after its own normalization, in a word too. Where several begin at one
    character, the longest is taken, as in transformers.
    """

    def __init__(
        self, tokenizer_json: bytes, settings: TokenizerSettings, embeddings: Mapping[str, Sequence[int]] | None = None
    ) -> None:
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
        self._json = tokenizer_json
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True).values()
        of_embeddings = (row for rows in (embeddings or {}).values() for row in rows)
        self.largest_id = max(*vocabulary, *of_embeddings, *expected, settings.pad_token_id)
        """The largest id that `pieces`, begin, end and padding have."""
        with _as_missing_component():
            # The library's id of each embedding's token -> the ids of its vectors.
            self._embeddings = _embeddings_in(self._tokenizer)
            added = (token.content for token in self._tokenizer.get_added_tokens_decoder().values())
            self._added = {self.normalize(token): token for token in added}
            for token in embeddings or {}:
                if (known := self.equal_token(token)) is not None:
                    raise MissingComponent(f"The embedding's token {token!r:.80} is the tokenizer's {known!r:.80}.")
                self._added[self.normalize(token)] = token
            # In one call: each call builds the library's search for all added tokens again.
            self._tokenizer.add_tokens(
                [AddedToken(token, normalized=True, special=False) for token in embeddings or ()]
            )
            for token, of_token in (embeddings or {}).items():
                added_id = self._tokenizer.token_to_id(token)
                assert added_id is not None
                self._embeddings[added_id] = tuple(of_token)

    def with_embeddings(self, embeddings: Mapping[str, Sequence[int]]) -> "ClipTokenizer":
        """Return this tokenizer with other embeddings than those that were given to it. Raises MissingComponent."""
        return ClipTokenizer(self._json, self.settings, embeddings)

    def pieces(self, text: str) -> list[Piece]:
        """Encode a text, without begin token, end token and padding."""
        with _as_missing_component():
            encoding: Encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return [
            Piece(self._embeddings.get(token, (token,)), start, stop, token in self._embeddings)
            for token, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True)
        ]

    def equal_token(self, token: str) -> str | None:
        """Return the token that a prompt with `token` means already: its equal after normalization, else None."""
        normalized = self.normalize(token)
        in_vocabulary = (known for known in (token, normalized) if self._tokenizer.token_to_id(known) is not None)
        return self._added.get(normalized) or next(in_vocabulary, None)

    def normalize(self, text: str) -> str:
        """Return a text as the tokenizer reads it: NFC, one space for whitespace, lower case."""
        normalizer = self._tokenizer.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))


def open_tokenizer(tokenizer_json: bytes, record: TokenizerRecord) -> ClipTokenizer:
    """Return the tokenizer of a release, from its blob. Raises MissingComponent."""
    settings = TokenizerSettings(record.max_length, record.bos_token_id, record.eos_token_id, record.pad_token_id)
    return ClipTokenizer(tokenizer_json, settings, record.embeddings)


def _embeddings_in(tokenizer: Tokenizer) -> dict[int, tuple[int, ...]]:
    """Return the embeddings in tokenizer.json: added tokens, of which "token_1", "token_2" are further vectors."""
    added = {token.content: id for id, token in tokenizer.get_added_tokens_decoder().items() if not token.special}
    embeddings = {}
    for token in added:
        tokens = [token]
        while (further := f"{token}_{len(tokens)}") in added:
            tokens.append(further)
        embeddings[added[token]] = tuple(added[name] for name in tokens)
    return embeddings
