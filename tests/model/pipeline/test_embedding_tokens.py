"""Tokens of textual inversion in prompts: how they are found, and that chunks never divide an embedding."""

import pytest

from engine_builder.checkpoints.tokenizers import export_tokenizer
from model.errors import MissingComponent
from model.prompts.tokenizer import ClipTokenizer
from model.prompts.weighted_prompt import Chunks, plain_chunks, weighted_chunks
from model.validation import MAX_EMBEDDING_ROWS
from tests.support.repository import MODEL_FOLDER

FIRST = 960  # the tiny model's vocabulary has the ids below
EMBEDDINGS = {
    "easynegative": (960, 961),
    "easynegativev2": (962, 963, 964),
    "<E>": (970, 971, 972),
    "caf\u00e9-style": (980,),
    "cat": (985, 986),
    "cat_1": (987,),
    "\u732b": (988,),
    "[sky]": (989, 990),
}


@pytest.fixture(scope="module", params=["tokenizer", "tokenizer_2"])
def plain(request: pytest.FixtureRequest) -> ClipTokenizer:
    """One of SDXL's tokenizers. They differ in padding."""
    return ClipTokenizer(*export_tokenizer(MODEL_FOLDER / request.param))


@pytest.fixture(scope="module")
def tokenizer(plain: ClipTokenizer) -> ClipTokenizer:
    return plain.with_embeddings(EMBEDDINGS)


def ids_of(tokenizer: ClipTokenizer, text: str) -> list[int]:
    return [id for piece in tokenizer.pieces(text) for id in piece.ids]


def rows_of(tokenizer: ClipTokenizer, text: str) -> list[int]:
    """Return the ids that are no token of the vocabulary."""
    return [id for id in ids_of(tokenizer, text) if id >= FIRST]


FOUND: list[tuple[str, list[str]]] = [
    ("a photo easynegative circle", ["easynegative"]),
    ("EASYNEGATIVE", ["easynegative"]),
    ("EasyNegative <e> <E>", ["easynegative", "<E>", "<E>"]),
    ("easynegative, easynegativev2", ["easynegative", "easynegativev2"]),
    ("easynegativev2, easynegative", ["easynegativev2", "easynegative"]),
    ("EasyNegativeV2", ["easynegativev2"]),
    ("cafe\u0301-style", ["caf\u00e9-style"]),
    ("a<e>b<e>", ["<E>", "<E>"]),
    ("concatenate", ["cat"]),
    ("easynegative_1", ["easynegative"]),
    ("cat_1 cat", ["cat_1", "cat"]),
    ("a\n<e>\ta", ["<E>"]),
    ("easy negative, < e >, ca t", []),
]


@pytest.mark.parametrize(("text", "tokens"), FOUND)
def test_finds_whole_tokens_as_the_tokenizer_reads(text: str, tokens: list[str], tokenizer: ClipTokenizer) -> None:
    """In any order of the embeddings."""
    assert rows_of(tokenizer, text) == [id for token in tokens for id in EMBEDDINGS[token]]
    reverse = tokenizer.with_embeddings(dict(reversed(EMBEDDINGS.items())))
    assert ids_of(reverse, text) == ids_of(tokenizer, text)


def test_other_text_keeps_its_ids(plain: ClipTokenizer, tokenizer: ClipTokenizer) -> None:
    text = "a large red circle, 4K! caf\u00e9 \u6f22"
    assert ids_of(tokenizer, text) == ids_of(plain, text)
    around = ids_of(plain, "red") + [*EMBEDDINGS["<E>"]] + ids_of(plain, "blue")
    assert ids_of(tokenizer, "red <e> blue") == around


@pytest.mark.parametrize("token", ["EasyNegative", "EASYNEGATIVE", "cafe\u0301-style", "<|endoftext|>", "A</w>"])
def test_refuses_tokens_that_are_known(token: str, tokenizer: ClipTokenizer) -> None:
    assert tokenizer.equal_token(token) is not None
    with pytest.raises(MissingComponent, match="The embedding's token .* is the tokenizer's"):
        tokenizer.with_embeddings(EMBEDDINGS | {token: (999,)})


def test_as_many_embeddings_as_rows(plain: ClipTokenizer) -> None:
    many = plain.with_embeddings({f"<E{number}>": (FIRST + number,) for number in range(MAX_EMBEDDING_ROWS)})
    assert rows_of(many, "<e4095><E0> <e409>5 <E40>") == [FIRST + number for number in (4095, 0, 409, 40)]
    assert many.largest_id == FIRST + MAX_EMBEDDING_ROWS - 1 and plain.largest_id == FIRST - 1


def content(chunks: Chunks, tokenizer: ClipTokenizer) -> list[list[int]]:
    """Return the ids of each chunk before its end token and padding. The rest must be as of an empty text."""
    settings, found = tokenizer.settings, []
    for ids in chunks.ids:
        end = ids.index(settings.eos_token_id)
        assert len(ids) == 77 and ids[0] == settings.bos_token_id
        assert ids[end + 1 :] == [settings.pad_token_id] * (76 - end)
        found.append(ids[1:end])
    return found


# Words before an embedding of three vectors and a word -> the number of tokens in each chunk.
DIVIDED = {70: [74], 71: [75], 72: [75, 1], 73: [73, 4], 74: [74, 4], 75: [75, 4], 146: [75, 75], 148: [75, 73, 4, 0]}


def test_an_embedding_moves_to_the_next_chunk(tokenizer: ClipTokenizer) -> None:
    red, blue, rows = ids_of(tokenizer, "red"), ids_of(tokenizer, "blue"), [*EMBEDDINGS["<E>"]]
    for before, lengths in DIVIDED.items():
        chunks = weighted_chunks(tokenizer, "red " * before + "<e> blue", 4, "prompt")
        parts = content(chunks, tokenizer)
        assert [len(part) for part in parts] == lengths and sum(parts, []) == red * before + rows + blue
        assert not chunks.dropped and not chunks.uncut
    weights = weighted_chunks(tokenizer, "red " * 74 + "(<e>:1.5)", 4, "prompt").weights
    assert weights == [[1.0] * 77, [1.0, 1.5, 1.5, 1.5, *[1.0] * 73]]
    for text, lengths in {"<e> " * 26: [75, 3], "red " + "<e> " * 50: [73, 75, 3, 0]}.items():
        parts = content(weighted_chunks(tokenizer, text, 4, "prompt"), tokenizer)
        assert [len(part) for part in parts] == lengths


# Text -> the number of tokens kept, the embedding that is cut, the dropped text and its number of tokens.
CUT: dict[str, tuple[int, str, str, int]] = {
    "red " * 72 + "<e>": (75, "", "", 0),
    "red " * 73 + "<E>": (73, "<E>", "<E>", 3),
    "red " * 74 + "<e>, red": (74, "<e>", "<e>, red", 5),
    "red " * 75 + "<e> red": (75, "", "<e> red", 4),
    "red " * 76 + "<e>": (75, "", "red <e>", 4),
}


def test_truncation_leaves_an_embedding_out_whole(tokenizer: ClipTokenizer) -> None:
    for text, (kept, *expected) in CUT.items():
        for chunks in (plain_chunks(tokenizer, text), weighted_chunks(tokenizer, text, 1, "prompt")):
            [part] = content(chunks, tokenizer)
            assert len(part) == kept and part == ids_of(tokenizer, text)[:kept]
            assert [chunks.uncut, chunks.dropped, chunks.dropped_tokens] == expected
    chunks = weighted_chunks(tokenizer, "red " * 74 + "(<e>:1.2) red", 1, "prompt")
    assert (chunks.uncut, chunks.dropped, chunks.dropped_tokens) == ("<e>", "<e> red", 4)


WORDS = {
    "easynegativev3 a": (("easynegative", "easynegativev3"),),
    "my concatenate, CATS": (("cat", "concatenate"), ("CAT", "CATS")),
    "easynegative2, cat's <e>s (cat) cat-cat 3cat_x": (),
    "(cats:1.2)": (("cat", "cats"),),
    "Cat\u00e9s \u044fcat": (("Cat", "Cat\u00e9s"), ("cat", "\u044fcat")),
    "\u767dcat\u304c, \u767d\u732b\u304c\u597d\u304d, \u732bcat, \u5b50\u732b": (),
}


def test_names_words_with_an_embedding_inside(tokenizer: ClipTokenizer) -> None:
    assert {text: weighted_chunks(tokenizer, text, 1, "prompt").inside for text in WORDS} == WORDS


def test_names_the_texts_of_all_embeddings(tokenizer: ClipTokenizer) -> None:
    text = r"[sky] \[Sky\] a <e>, <E> " + "red " * 75 + "(cat:1.2) <e>"
    assert plain_chunks(tokenizer, text).embeddings == ("[sky]", "<e>", "<E>", "cat")
    assert weighted_chunks(tokenizer, text, 1, "prompt").embeddings == ("[Sky]", "<e>", "<E>", "cat")
