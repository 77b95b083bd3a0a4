"""CLIP tokenization with the `tokenizers` library alone: importing transformers costs a cold start seconds.

Promises the ids that `transformers.CLIPTokenizer` gives for the same folder, odd prompts included, and says
what did not fit. The rules themselves (lower-casing, byte pairs, special tokens) are data, in the release's
tokenizer.json; this module knows only how ids are cut and padded, and nothing of text encoders.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tokenizers import Encoding, Tokenizer

from model.errors import MissingComponent

_PROBE = "A photo, caf\u00e9 \u6f22 \U0001f600 in 4K!?"


@contextmanager
def _refusing() -> Iterator[None]:
    """What a strange tokenizer.json makes the library raise -> one sentence. Its panics are no `Exception`s."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        why = " ".join(str(error).split())[:200]
        raise MissingComponent(
            f"the release's tokenizer.json cannot be read or used ({why}); build and publish the release again"
        ) from error


@dataclass(frozen=True)
class TokenizerSettings:
    """What tokenizer.json does not say. SDXL's first pads with its end token, its second with `!`."""

    max_length: int  # ids in an encoded prompt, begin and end tokens included: 77
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int


class ClipTokenizer:
    """One tokenizer of a release. Holds no state that encoding changes, so threads may share it.

    `tokenizer_json` is the file's bytes, as `engine_builder.checkpoints.tokenizers.export_tokenizer` writes it.
    Raises MissingComponent if they cannot be read or disagree with `settings`.
    """

    def __init__(self, tokenizer_json: bytes, settings: TokenizerSettings) -> None:
        with _refusing():
            self._tokenizer: Tokenizer = Tokenizer.from_buffer(tokenizer_json)
        # The file may carry whatever padding and truncation its last user left switched on.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.settings = settings
        frame = [settings.bos_token_id, settings.eos_token_id]
        with _refusing():
            found = self._tokenizer.encode("").ids
            self._tokenizer.encode(_PROBE)
        if found != frame:
            raise MissingComponent(
                f"the release's tokenizer encodes an empty prompt as {str(found):.80}, and its settings say {frame} "
                "(begin and end token); build and publish the release again"
            )
        if self._tokenizer.id_to_token(settings.pad_token_id) is None:
            raise MissingComponent(
                f"the release's tokenizer has no token {settings.pad_token_id}, with which prompts are to be padded; "
                "build and publish the release again"
            )

    def encode(self, text: str) -> tuple[list[int], int]:
        """The prompt's ids, exactly `max_length` of them, and how many tokens of the prompt did not fit.

        Too long a prompt loses its end, never its end token.
        """
        with _refusing():
            ids = self._tokenizer.encode(text).ids
        limit = self.settings.max_length
        lost = max(0, len(ids) - limit)
        if lost:
            ids = ids[: limit - 1] + [self.settings.eos_token_id]
        return ids + [self.settings.pad_token_id] * (limit - len(ids)), lost

    def dropped_text(self, text: str) -> str:
        """The end of `text`, as it was typed, from the first token that did not fit; "" if all of it fits."""
        encoding: Encoding = self._tokenizer.encode(text)
        limit = self.settings.max_length
        if len(encoding.ids) <= limit:
            return ""
        first_lost, _ = encoding.offsets[limit - 1]
        return text[first_lost:].strip()
