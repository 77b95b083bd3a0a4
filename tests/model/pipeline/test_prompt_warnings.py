"""Warnings that name what a prompt has and this deployment does not follow."""

from typing import Literal

import pytest

from model.prompts.prompt_warnings import prompt_warnings
from model.prompts.weighted_prompt import Chunks

Syntax = Literal["plain", "weighted"]
SYNTAXES: tuple[Syntax, ...] = ("plain", "weighted")
LORA, HYPERNETWORK = "not as an adapter: {}. Name adapters in the field `loras`", "not as a hypernetwork: {}. Remove it"
CHUNK, SUM = "not as the end of a chunk: {}. Remove it", "not as a sum of prompts: {}. Write one prompt"
STEPS = "not as a change of the prompt between steps: {}. Write one of its texts"
EMBEDDING = "not as an embedding in ComfyUI: {}. Write the embedding's token alone"
WEIGHT = "not as a weight: {}. Set `prompt_syntax` to weighted"
ESCAPE = "not as a plain bracket: {}. Leave out the backslash"

# Prompt, what the warning says, what it names.
IN_BOTH = [
    ("a red circle <lora:style:0.8>", LORA, '"<lora:style:0.8>"'),
    ("< LoRA : a:1:0.5:lbw=OUTALL >", LORA, '"< LoRA : a:1:0.5:lbw=OUTALL >"'),
    ("<lyco:style:0.8>", LORA, '"<lyco:style:0.8>"'),
    ("<lora:a:1> <lora:b:1> <lora:a:1>", LORA, '"<lora:a:1>", "<lora:b:1>"'),
    ("".join(f"<lora:{n}:1>" for n in "abcde"), LORA, '"<lora:a:1>", "<lora:b:1>", "<lora:c:1>" and 2 more'),
    ("<hypernet:style:0.5>", HYPERNETWORK, '"<hypernet:style:0.5>"'),
    ("a red circle BREAK a white background", CHUNK, '"BREAK"'),
    ("a red circle AND a blue square :1.2", SUM, '"AND"'),
    ("a [red:blue:0.5] circle", STEPS, '"[red:blue:0.5]"'),
    ("a [red::0.5] circle", STEPS, '"[red::0.5]"'),
    ("a [:red:5] circle", STEPS, '"[:red:5]"'),
    ("a [dog 2:cat 3:.5]", STEPS, '"[dog 2:cat 3:.5]"'),
    ("[[a::1]:b:0.5]", STEPS, '"[a::1]", ":0.5]"'),
    ("a [red|blue] circle", STEPS, '"[red|blue]"'),
    ("a [red|[blue]|green] circle", STEPS, '"[red|[blue]|green]"'),
    ("a [hat:10], [red:blue: 23]", STEPS, '"[hat:10]", "[red:blue: 23]"'),
    ("STOP, BREAK AND GO", CHUNK, '"BREAK"'),
    ("HDR\nBREAK\nRAW photo", CHUNK, '"BREAK"'),
    ("BLACK hat AND Red shoes", SUM, '"AND"'),
    ("embedding:easynegative, x", EMBEDDING, '"embedding:easynegative"'),
    ("Embedding:folder/bad-hands.pt", EMBEDDING, '"Embedding:folder/bad-hands.pt"'),
]
IN_PLAIN = [
    ("a (red:1.5) circle", WEIGHT, '"(red:1.5)"'),
    ("a (figure 8:1.3)", WEIGHT, '"(figure 8:1.3)"'),
    ("a (red: 1.3), (red:2.5), (red:-1)", WEIGHT, '"(red: 1.3)", "(red:2.5)", "(red:-1)"'),
    ("a ((red)) circle", WEIGHT, '"((red))"'),
    (r"ciloranko \(artist\)", ESCAPE, r'"\\(", "\\)"'),
    (r"\[x\], \(a:1.3\), \[a:b:0.5\], \[a|b\]", ESCAPE, r'"\\[", "\\]", "\\(" and 1 more'),
    ("((a)), (b:0.5), [c]", WEIGHT, '"(b:0.5)", "((a))", "[c]"'),
]
IN_NONE = [
    "a red circle",
    "salt and pepper, and a break, breaks, AND1, BREAKFAST, R-AND-D, BAND",
    r"\<lora\:x\>, a \\ b",
    "a (large) circle (at 10:30), (16:9), (Genesis 1:3): one | two",
    "<cat> and <ink> :) a:b",
    "word embedding: a picture of vectors",
    "BLACK AND WHITE PHOTO OF A CAT",
    "a sign saying TAKE A BREAK",
    'a poster with the text "BREAK A LEG, SALT AND Pepper, ÉTÉ  AND hiver"',
    "(ISO: 100), (circa: 1950), (f: 2.8), (age:5), (16 : 9), (4:3.0), (scale 1: 2.5), (page:12), (2026:1)",
    "[10:30] [00:12.5] [12:30:45] [2:0.5] [Psalm: 23]",
    "text: [one two, then later | other",
]


def of(prompt: str, syntax: Syntax) -> list[str]:
    return prompt_warnings("masks.1.negative_prompt", prompt, syntax, Chunks([]), 77)


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_names_constructs_without_a_meaning(syntax: Syntax) -> None:
    for prompt, message, named in IN_BOTH + (IN_PLAIN if syntax == "plain" else []):
        [warning] = of(prompt, syntax)
        assert warning.startswith(f"masks.1.negative_prompt: read as text, {message.format(named)}"), prompt


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_ordinary_text_has_no_warning(syntax: Syntax) -> None:
    prompts = IN_NONE + ([prompt for prompt, *_ in IN_PLAIN] if syntax == "weighted" else [])
    assert {prompt: of(prompt, syntax) for prompt in prompts} == {prompt: [] for prompt in prompts}


# Prompt, its embeddings, and what the warning names in the plain and the weighted syntax; "" without a warning.
WITH_EMBEDDINGS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "a [cat] circle": (("[cat]",), "", ""),
    "a [cat], [dog]": (("[cat]",), '"[dog]"', ""),
    "[[cat]]": (("[cat]",), '"[[cat]]"', ""),
    "[CAT] [cat]": (("[CAT]", "[cat]"), "", ""),
    "<lora:a:1>": (("<lora:a:1>",), "", ""),
    "BREAK BREAKS BREAK": (("BREAK",), "", ""),
    "embedding:easynegative": (("easynegative",), "", ""),
    "(Embedding:EasyNegative:1.2)": (("EasyNegative",), '"(Embedding:EasyNegative:1.2)"', ""),
    "embedding:easynegative, embedding:other": (("easynegative",), '"embedding:other"', '"embedding:other"'),
    "embedding:<e>, embedding:<f>": (("<e>", "<f>"), "", ""),
    r"[a|b] \[a|b\]": (("[a|b]",), r'"\\[", "\\]"', '"[a|b]"'),
    "[cat:dog:0.5]": (("cat", "dog"), '"[cat:dog:0.5]"', '"[cat:dog:0.5]"'),
    "<lora:cat:1>": (("cat",), '"<lora:cat:1>"', '"<lora:cat:1>"'),
    "[easynegativev2] [easynegative]": (("easynegative", "[easynegativev2]"), '"[easynegative]"', ""),
}


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_embeddings_are_no_constructs(syntax: Syntax) -> None:
    for prompt, (embeddings, *named) in WITH_EMBEDDINGS.items():
        warnings = prompt_warnings("prompt", prompt, syntax, Chunks([], embeddings=embeddings), 77)
        expected = named[SYNTAXES.index(syntax)]
        assert len(warnings) == bool(expected), prompt
        assert all(f": {expected}. " in warning for warning in warnings), prompt
    chunks = Chunks([], embeddings=("[cat]", "a\\b"))
    assert prompt_warnings("prompt", r"embedding:\[cat\] embedding:a\\b", "weighted", chunks, 77) == []


def test_each_construct_has_its_warning() -> None:
    warnings = of("<lora:a:1> BREAK [a:b:3] AND ((c)) embedding:d [e|f]", "plain")
    expected = (LORA, EMBEDDING, CHUNK, SUM, STEPS, WEIGHT)
    assert len(warnings) == len(expected)
    for warning, message in zip(warnings, expected, strict=True):
        assert message.partition(":")[0] in warning


def test_names_embeddings_within_words() -> None:
    chunks = Chunks([], inside=(("cat", "cats"), ("a", "ab"), ("c", "cd"), ("e", "ef")))
    warnings = prompt_warnings("prompt", "", "weighted", chunks, 77)
    assert warnings[0].startswith('prompt: the embedding "cat" was used within the word "cats". Put a space')
    assert len(warnings) == 3
