"""Token ids against transformers.CLIPTokenizer, on a small vocabulary: every byte, and some merges."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from transformers import CLIPTokenizer

from engine_builder.checkpoints.tokenizers import export_tokenizer
from model.errors import MissingComponent
from model.prompts.tokenizer import ClipTokenizer, TokenizerSettings
from model.prompts.weighted_prompt import plain_chunks
from tests.engine_builder.helpers import edit_json
from tests.support.repository import MODEL_FOLDER

BEGIN, END = 958, 959

PROMPTS = {
    "empty": "",
    "one word": "cat",
    "case": "The CAT in THE hat",
    "spaces": "  the\t\tcat \r\n\n sat\u00a0on\u3000it ",
    "only spaces": " \n\t ",
    "emoji": "a 🐈‍⬛ and 👩‍🚀🚀 flag 🇫🇷",
    "cjk": "一只猫坐在垫子上 高精細 고양이",
    "combining": "cafe\u0301 = café, Z\u0351a\u0300\u0316lgo, \u0130stanbul",
    "digits": "in 1999 at 24fps 3.5 x 1024²",
    "apostrophes": "the cat's he'll I'M they'VE don't 'twas rock'n'roll o’clock",
    "punctuation": "wow!!! (detailed:1.2), [a|b] <lora:x> ... -- __x__",
    "pad token": "! !! hey! !",
    "end token inside": "a cat<|endoftext|>a dog <|ENDOFTEXT|>",
    "begin token inside": "<|startoftext|>a cat",
    "controls": "a\x07b\x1bc\ufffd\u200b\u202e",
    "75 tokens": "z " * 75,
    "76 tokens": "z " * 76,
    "long": "the cat sat on the mat, " * 60,
    "longest": "aé猫🐈 '!1" * 500,  # of requests: 4,000 characters
    "longest in one word": "ab" * 2_000,
}


def write_tokenizer(folder: Path, **config: object) -> Path:
    """Copy the tiny model's tokenizer, with other values of its tokenizer_config.json. Returns `folder`."""
    shutil.copytree(MODEL_FOLDER / "tokenizer", folder)
    # As in SDXL's own folders: tokens spelled out, and matched after the text is lower-cased.
    flags = {"__type": "AddedToken", "normalized": True} | dict.fromkeys(("lstrip", "rstrip", "single_word"), False)
    begin, end = {**flags, "content": "<|startoftext|>"}, {**flags, "content": "<|endoftext|>"}
    edit_json(folder / "tokenizer_config.json", bos_token=begin, eos_token=end, unk_token=end, **config)
    (folder / "special_tokens_map.json").unlink()
    return folder


@pytest.fixture(scope="module", params=["<|endoftext|>", "!"], ids=["pads-with-end", "pads-with-!"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[CLIPTokenizer, ClipTokenizer]:
    """The tokenizers of transformers and of Preheat, with the padding of SDXL's `tokenizer` or `tokenizer_2`."""
    folder = write_tokenizer(tmp_path_factory.mktemp("clip") / "tokenizer", pad_token=request.param)
    return CLIPTokenizer.from_pretrained(str(folder)), ClipTokenizer(*export_tokenizer(folder))


def encode(tokenizer: ClipTokenizer, prompt: str) -> tuple[list[int], int]:
    """Return the ids of a plain prompt, and the number of dropped tokens."""
    chunks = plain_chunks(tokenizer, prompt)
    return chunks.ids[0], chunks.dropped_tokens


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_ids_equal_those_of_transformers(pair: tuple[CLIPTokenizer, ClipTokenizer], prompt: str) -> None:
    reference, tokenizer = pair
    expected = reference(prompt, padding="max_length", max_length=77, truncation=True).input_ids
    whole = reference(prompt).input_ids
    assert encode(tokenizer, prompt) == (expected, max(0, len(whole) - 77))


def test_vocabulary_and_merges_are_used(pair: tuple[CLIPTokenizer, ClipTokenizer]) -> None:
    """Without them the ids above could be equal and wrong."""
    _, tokenizer = pair
    vocabulary = json.loads((MODEL_FOLDER / "tokenizer" / "vocab.json").read_text())
    assert encode(tokenizer, "a cat")[0][:4] == [BEGIN, vocabulary["a</w>"], vocabulary["cat</w>"], END]


def test_dropped_text_is_the_end_of_the_prompt_as_typed(pair: tuple[CLIPTokenizer, ClipTokenizer]) -> None:
    reference, tokenizer = pair
    kept, dropped = "z " * 72 + "a cat ! ", "NEXT  to\ta Café, 猫 <|endoftext|> é"  # 72 + 3 tokens fit
    assert plain_chunks(tokenizer, kept + dropped).dropped == dropped
    assert encode(tokenizer, kept + dropped)[1] == len(reference(dropped).input_ids) - 2
    assert plain_chunks(tokenizer, kept).dropped == plain_chunks(tokenizer, "").dropped == ""
    assert encode(tokenizer, "z " * 74 + "猫")[1] == 2  # three bytes, of which one fits
    assert plain_chunks(tokenizer, "z " * 74 + "猫 b").dropped == "猫 b"


def test_ignores_truncation_and_padding_saved_after_use(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer", pad_token="!")
    reference = CLIPTokenizer.from_pretrained(str(folder))
    reference("a", padding="max_length", max_length=20, truncation=True)
    used = reference.backend_tokenizer.to_str().encode()
    assert json.loads(used)["truncation"] is not None
    _, settings = export_tokenizer(folder)
    ids, lost = encode(ClipTokenizer(used, settings), "z " * 90)
    assert (len(ids), lost) == (77, 15)


def test_reads_the_settings_of_the_folder(tmp_path: Path) -> None:
    _, first = export_tokenizer(write_tokenizer(tmp_path / "tokenizer", pad_token="<|endoftext|>"))
    _, second = export_tokenizer(write_tokenizer(tmp_path / "tokenizer_2", pad_token="!", model_max_length=64))
    assert first == TokenizerSettings(max_length=77, bos_token_id=BEGIN, eos_token_id=END, pad_token_id=END)
    assert second == TokenizerSettings(max_length=64, bos_token_id=BEGIN, eos_token_id=END, pad_token_id=0)


def test_uses_another_length_than_77(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer", model_max_length=8)
    ids, lost = encode(ClipTokenizer(*export_tokenizer(folder)), "z " * 10)
    assert ids == CLIPTokenizer.from_pretrained(str(folder))("z " * 10, truncation=True).input_ids
    assert (len(ids), lost) == (8, 4)


def refuses(folder: Path, message: str) -> None:
    with pytest.raises(MissingComponent, match=message):
        export_tokenizer(folder)


def test_refuses_a_tokenizer_without_padding(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer")
    (folder / "special_tokens_map.json").write_text(json.dumps({"pad_token": None}))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"pad_token": None}))
    refuses(folder, "has no pad_token")


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt", "tokenizer_config.json"])
def test_refuses_an_incomplete_folder(tmp_path: Path, name: str) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer")
    (folder / name).write_bytes((folder / name).read_bytes()[:-9])
    refuses(folder, "CLIP tokenizer in .* cannot be read")
    (folder / name).unlink()
    if name != "tokenizer_config.json":
        refuses(folder, f"it lacks {name}. Download")
    refuses(tmp_path / "nowhere", "has no CLIP tokenizer")
    refuses(write_tokenizer(tmp_path / "other", model_max_length=None), 'Set "model_max_length"')


def test_reads_a_folder_with_tokenizer_json_only(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer", pad_token="!")
    data, settings = export_tokenizer(folder)
    (folder / "tokenizer.json").write_bytes(data)
    (folder / "vocab.json").unlink()
    (folder / "merges.txt").unlink()
    again, same_settings = export_tokenizer(folder)
    assert same_settings == settings
    for prompt in PROMPTS.values():
        assert encode(ClipTokenizer(again, settings), prompt) == encode(ClipTokenizer(data, settings), prompt)


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff\xfe", b'{"version": "1.0"}'])
def test_refuses_invalid_bytes(data: bytes) -> None:
    with pytest.raises(MissingComponent, match="tokenizer.json cannot be read"):
        ClipTokenizer(data, TokenizerSettings(77, 0, 1, 1))


@pytest.mark.parametrize("field", ["bos_token_id", "eos_token_id"])
def test_refuses_the_settings_of_another_tokenizer(tmp_path: Path, field: str) -> None:
    data, settings = export_tokenizer(write_tokenizer(tmp_path / "tokenizer"))
    with pytest.raises(MissingComponent, match=rf"encodes an empty prompt as \[{BEGIN}, {END}\]"):
        ClipTokenizer(data, dataclasses.replace(settings, **{field: 5}))
