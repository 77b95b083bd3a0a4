"""Warnings about a prompt: text that did not fit, embeddings in unexpected places, constructs of other programs.

The table has constructs of AUTOMATIC1111's web UI (`modules/prompt_parser.py`, `modules/extra_networks.py`) and of
ComfyUI that have no meaning here, and the weights that only the syntax `weighted` has. Imports no torch.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from model.prompts.weighted_prompt import Chunks
from model.validation import PromptSyntax, format_value

_MAX_NAMED = 3  # of one kind in a text
_NUMBER = r"\s*[+-]?(?:\d+(?:\.\d*)?|\.\d+)\s*"
# When one text ends a bracket: a step, or a share of the steps. "[Psalm: 23]" is text.
_WHEN = r"(?:(?<!\d):[+-]?\d+\s*|:\s*[+-]?(?:0?\.\d+|0\.|1\.0*)\s*)"
# Weights are seldom above 2, except as decimals after a colon without a space. "(age:5)" and "(f: 2.8)" are text.
_FACTOR = r"(?:(?<!\d):\s*[+-]?[0-2]\s*|:[+-]?(?:\d?\.\d+|\d\.)\s*|:\s*[+-]?(?:[01]?\.\d+|[01]\.|2\.0*)\s*)"
_KEYWORD, _CAPITAL = r"(?:AND|BREAK)", "[A-ZÀ-ÖØ-Þ'’]"
_OTHER_WORD, _GAP = rf"(?!{_KEYWORD}\b){_CAPITAL}{{2,}}", rf" +(?:{_CAPITAL} +)?"
_WEIGHT = ("a weight", "Set `prompt_syntax` to weighted to give a part of the prompt a weight.")
_SCHEDULE = ("a change of the prompt between steps", "Write one of its texts.")


@dataclass(frozen=True)
class _Construct:
    """One row: what it looks like, what it means elsewhere, what to do here, and the syntaxes without that meaning.

    Without a meaning, it is only hidden from later rows.
    """

    pattern: str
    meaning: str
    remedy: str
    syntaxes: tuple[PromptSyntax, ...] = ("plain", "weighted")


# In this order: what a row has found is hidden from later ones. No pattern reads a text again from each of its places:
# the longest of 1,700 prompts of 4,000 brackets, colons, digits and spaces took 17 ms.
_CONSTRUCTS = (
    _Construct(
        r"\\[()\[\]]",
        "a plain bracket",
        "Leave out the backslash, or set `prompt_syntax` to weighted.",
        syntaxes=("plain",),
    ),
    _Construct(r"(?s)\\.", "", ""),  # any other escaped character
    _Construct(r"(?i)<\s*(?:lora|lyco)\s*:[^<>]*>", "an adapter", "Name adapters in the field `loras`."),
    _Construct(r"(?i)<\s*hypernet\s*:[^<>]*>", "a hypernetwork", "Remove it: hypernetworks are not supported."),
    _Construct(
        r"(?i)(?<!\w)embedding:[^\s,()\[\]<>:]+", "an embedding in ComfyUI", "Write the embedding's token alone."
    ),
    _Construct(  # a keyword beside another word in capitals is text: BLACK AND WHITE, TAKE A BREAK
        rf"(?<![\w-])(?:{_OTHER_WORD}{_GAP}{_KEYWORD}|{_KEYWORD}{_GAP}{_OTHER_WORD})(?![\w-])",
        "",
        "",
    ),
    _Construct(
        r"(?<![\w-])BREAK(?![\w-])",
        "the end of a chunk",
        "Remove it. With `prompt_syntax` weighted, a long prompt has chunks of 75 tokens.",
    ),
    _Construct(r"(?<![\w-])AND(?![\w-])", "a sum of prompts", "Write one prompt, with the word in lower case."),
    _Construct(r"[(\[]\s*\d[\d.\s]*:[\d.:\s]*[)\]]", "", ""),  # a ratio or a time
    _Construct(r"\[[^\[\]:|]*:\s+\d+\s*\]", "", ""),  # a label and a number
    _Construct(rf"\[[^\[\]]*(?::[^\[\]:]*:{_NUMBER}|{_WHEN})\]|{_WHEN}\]", *_SCHEDULE),
    _Construct(r"\[[^\[\]|]*\|[^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*\]|\|[^\[\]|]*\]", *_SCHEDULE),
    _Construct(rf"\([^()]*{_FACTOR}\)", *_WEIGHT, syntaxes=("plain",)),
    _Construct(r"\({2,}[^()]*\)*", *_WEIGHT, syntaxes=("plain",)),
    _Construct(r"\[[^\[\]]+\]", *_WEIGHT, syntaxes=("plain",)),
)


def prompt_warnings(field: str, prompt: str, syntax: PromptSyntax, chunks: Chunks, read: int) -> list[str]:
    """Describe what of a prompt was not followed. `field`: of the request. `read`: the tokens that encoders read."""
    warnings = []
    if chunks.dropped_tokens:
        warnings.append(
            f"{field}: the text encoders read {read} tokens; the last {chunks.dropped_tokens} were left out: "
            f"{chunks.dropped[:200]!r}"
        )
    if chunks.uncut:
        warnings.append(
            f"{field}: the embedding {format_value(chunks.uncut)} was left out as a whole, because not all of its "
            "vectors fit. Write it earlier."
        )
    for token, word in chunks.inside[:_MAX_NAMED]:
        warnings.append(
            f"{field}: the embedding {format_value(token)} was used within the word {format_value(word)}. Put a space "
            "between them, or write another word."
        )
    return warnings + _construct_warnings(field, prompt, syntax, chunks.embeddings)


def _construct_warnings(field: str, text: str, syntax: PromptSyntax, embeddings: Sequence[str]) -> list[str]:
    """Describe the constructs of a prompt that have no meaning in this syntax. `field`: of the request.

    `embeddings`: the texts that were read as embeddings.
    """
    found: dict[tuple[str, str], dict[str, None]] = {}
    hidden = _hide_embeddings(text, syntax, embeddings)
    for row in _CONSTRUCTS:
        if syntax in row.syntaxes:
            for match in re.finditer(row.pattern, hidden) if row.meaning else ():
                found.setdefault((row.meaning, row.remedy), {})[text[slice(*match.span())]] = None
            hidden = re.sub(row.pattern, lambda match: "\0" * len(match[0]), hidden)
    warnings = []
    for (meaning, remedy), texts in found.items():
        named = ", ".join(map(format_value, [*texts][:_MAX_NAMED]))
        more = f" and {len(texts) - _MAX_NAMED} more" if len(texts) > _MAX_NAMED else ""
        warnings.append(f"{field}: read as text, not as {meaning}: {named}{more}. {remedy}")
    return warnings


def _hide_embeddings(text: str, syntax: PromptSyntax, embeddings: Sequence[str]) -> str:
    """Replace embeddings by commas. They end a name, so "embedding:" before an embedding has no name to warn of."""
    typed = list(embeddings)
    if syntax == "weighted":
        typed = [re.sub(r"[()\[\]\\]", r"\\\g<0>", token) for token in embeddings]
    longest_first = sorted(typed, key=len, reverse=True)
    pattern = "|".join(map(re.escape, longest_first))
    return re.sub(pattern, lambda match: "," * len(match[0]), text) if pattern else text
