"""Weighted prompts: the grammar, chunks, and images against diffusers with embeddings from transformers.

The reference is another implementation: a recursive parser, transformers' tokenizers and text encoders, and NumPy.
"""

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from engine_builder.building.eager_model import load_eager_model
from engine_builder.checkpoints.folder import Checkpoint
from model.api.request import GenerationRequest
from model.api.resolve import resolve
from model.errors import RequestRefused
from model.loading.load import Loaded
from model.pipeline.loaded_model import LoadedModel
from model.pipeline.params import GenerationParams, Mask
from model.pipeline.plan import plan_request
from model.pipeline.text_to_image import generate
from model.pipeline.tokenizer import ClipTokenizer
from model.pipeline.weighted_prompt import parse_weights, plain_chunks, weighted_chunks
from model.store.precision import FP32
from tests.support.reference import Reference
from tests.support.repository import MODEL_FOLDER
from training.evaluation_set import evaluation_set
from training.score import score_image

TOLERANCE = 2  # of 255
LONG = "a large red circle on a blue background, " * 20
FUZZED = 2000


@pytest.fixture(scope="module")
def tokenizers() -> list[CLIPTokenizer]:
    return [CLIPTokenizer.from_pretrained(MODEL_FOLDER / name) for name in ("tokenizer", "tokenizer_2")]


def weights_of(text: str) -> list[tuple[str, float]]:
    return [(fragment, round(weight, 6)) for fragment, weight in parse_weights(text)]


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("a cat", [("a cat", 1.0)]),
        ("a (red) cat", [("a ", 1.0), ("red", 1.1), (" cat", 1.0)]),
        ("a [red] cat", [("a ", 1.0), ("red", 0.909091), (" cat", 1.0)]),
        ("a (red:1.3) cat", [("a ", 1.0), ("red", 1.3), (" cat", 1.0)]),
        ("(red: 0.5 )", [("red", 0.5)]),
        ("(red:-.5)", [("red", -0.5)]),
        ("(red:0)", [("red", 0.0)]),
        ("((red))", [("red", 1.21)]),
        ("(a (b:2) [c])", [("a ", 1.1), ("b", 2.2), (" ", 1.1), ("c", 1.0)]),
        (r"\(red\) \[x\] \\", [(r"(red) [x] " + "\\", 1.0)]),
        (r"(a\):1.5)", [("a)", 1.5)]),
        ("a:b, c:1.3", [("a:b, c:1.3", 1.0)]),
        ("(a:b:1.3)", [("a:b", 1.3)]),
        ("[a:1.3]", [("a:1.3", 0.909091)]),
        ("a) b] c", [("a) b] c", 1.0)]),
        ("a (b c", [("a ", 1.0), ("b c", 1.1)]),
        ("a [b c", [("a ", 1.0), ("b c", 0.909091)]),
        ("(a [b) c]", [("a ", 1.1), ("b", 1.0), (" c", 0.909091)]),
        ("(a:nan) (b:inf) (c:1e9)", [("a:nan", 1.1), (" ", 1.0), ("b:inf", 1.1), (" ", 1.0), ("c:1e9", 1.1)]),
        ("", [("", 1.0)]),
        ("()", [("", 1.0)]),
    ],
)
def test_grammar(text: str, fragments: list[tuple[str, float]]) -> None:
    assert weights_of(text) == fragments


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(a:1000000000)", '"a" has the weight 1e+09. Weights are -10 to 10'),
        ("(a:10.01)", '"a" has the weight 10.01'),
        ("(a:-11)", '"a" has the weight -11'),
        ("(a:" + "9" * 400 + ")", '"a" has the weight inf'),
        ("((a:0):" + "9" * 400 + ")", '"a" has the weight nan'),
        ("(" * 50 + "a" + ")" * 50, '"a" has the weight 117.4'),
        ("(" * 50 + "a", '"a" has the weight 117.4'),
        ("(" * 1000 + "a" + ")" * 1000, "more than 50 ( are open at once"),
        ("[a" * 2000, "more than 50 [ are open at once"),
        ("(:1.0" * 800, "more than 50 ( are open at once"),
        ("(a:1.2.3)", 'the weight "1.2.3" is not a number'),
        ("(a:....)", 'the weight "...." is not a number'),
    ],
)
def test_refuses_a_weight_by_value(text: str, message: str) -> None:
    with pytest.raises(RequestRefused, match=re.escape(f"negative_prompt: {message}")) as refusal:
        parse_weights(text, "negative_prompt")
    assert refusal.value.field == "negative_prompt"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a" * 50, "a" * 50),
        ("([a])" * 800, "a" * 800),
        ("(a:1)" * 800, "a" * 800),
        ("\\" * 4000, "\\" * 2000),
        (":" * 4000, ":" * 4000),
        (": " * 2000, ": " * 2000),
        ("]" * 4000, "]" * 4000),
        (":1" * 2000, ":1" * 2000),
    ],
    ids=lambda text: repr(text[:5]),
)
def test_parses_long_prompts(text: str, expected: str) -> None:
    """Also texts for which a backtracking parser would take minutes."""
    assert "".join(fragment for fragment, _ in parse_weights(text)) == expected


# -- the reference ----------------------------------------------------------------------------------------------------


def reference_weights(text: str) -> list[tuple[str, float]]:
    """Parse a balanced text by recursive descent. Returns each character with its weight."""

    def read(position: int, end: str) -> tuple[list[tuple[str, float]], int]:
        found: list[tuple[str, float]] = []
        while position < len(text):
            character = text[position]
            if character == "\\" and position + 1 < len(text) and text[position + 1] in "()[]\\":
                found.append((text[position + 1], 1.0))
                position += 2
            elif character in "([":
                inner, position = read(position + 1, ")" if character == "(" else "]")
                factor = 1.1 if character == "(" else 1 / 1.1
                written = "".join(c for c, _ in inner)
                number = re.search(r":\s*(-?\d*\.?\d+)\s*$", written)
                if character == "(" and number:
                    inner, factor = inner[: number.start()], float(number[1])
                found += [(c, weight * factor) for c, weight in inner]
            elif character == end:
                return found, position + 1
            else:
                found.append((character, 1.0))
                position += 1
        return found, position

    return read(0, "")[0]


def random_balanced(choose: random.Random, depth: int = 0) -> str:
    """Return a prompt with weights, in which every bracket ends."""
    parts = []
    for _ in range(choose.randint(1, 4)):
        kind = choose.random()
        if kind < 0.55 or depth > 3:
            parts.append(choose.choice(["a large red circle", "two green squares", "on white", ",", "blue", r"\(x\)"]))
        else:
            inner = random_balanced(choose, depth + 1)
            number = choose.choice(["0.5", "1.3", "1", "-0.25", ".8"])
            parts.append(choose.choice([f"({inner})", f"[{inner}]", f"({inner}:{number})", f"({inner}: {number} )"]))
    return " ".join(parts)


@pytest.mark.parametrize("seed", range(200))
def test_weights_equal_those_of_another_parser(seed: int) -> None:
    text = random_balanced(random.Random(seed))
    expected = reference_weights(text)
    actual = [(character, weight) for fragment, weight in parse_weights(text) for character in fragment]
    assert "".join(character for character, _ in actual) == "".join(character for character, _ in expected)
    assert [weight for _, weight in actual] == pytest.approx([weight for _, weight in expected])


class Encoders:
    """The text encoders of a model folder in transformers, with chunks and weights in NumPy."""

    def __init__(self, folder: Path, tokenizers: list[CLIPTokenizer]) -> None:
        self._pairs = [
            (tokenizers[0], CLIPTextModel.from_pretrained(folder / "text_encoder")),
            (tokenizers[1], CLIPTextModelWithProjection.from_pretrained(folder / "text_encoder_2")),
        ]

    @torch.inference_mode()
    def encode(self, text: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return the embedding [77 * chunks, width] and the pooled text [width]."""
        states, pooled = [], None
        for tokenizer, network in self._pairs:
            ids, weights = [], []
            for fragment, weight in parse_weights(text):
                tokens = tokenizer(fragment, add_special_tokens=False).input_ids
                ids += tokens
                weights += [weight] * len(tokens)
            count = {0: 1, 1: 1, 2: 2, 3: 4, 4: 4}[-(-len(ids) // 75)]
            of_encoder = []
            for chunk in range(count):
                part, own = ids[75 * chunk : 75 * chunk + 75], weights[75 * chunk : 75 * chunk + 75]
                padding = 75 - len(part)
                whole = [tokenizer.bos_token_id, *part, tokenizer.eos_token_id, *[tokenizer.pad_token_id] * padding]
                output = network(torch.tensor([whole]), output_hidden_states=True)
                factors = np.array([1.0, *own, 1.0, *[1.0] * padding], np.float32)
                of_encoder.append(output.hidden_states[-2][0].numpy() * factors[:, None])
                if chunk == 0:
                    pooled = getattr(output, "text_embeds", None)
            states.append(np.concatenate(of_encoder))
        assert pooled is not None
        return np.concatenate(states, axis=1), pooled[0].numpy()


@pytest.fixture(scope="module")
def encoders(tokenizers: list[CLIPTokenizer]) -> Encoders:
    return Encoders(MODEL_FOLDER, tokenizers)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(MODEL_FOLDER)


def generate_with_diffusers(reference: Reference, encoders: Encoders, params: GenerationParams) -> np.ndarray[Any, Any]:
    """Return the image of diffusers' SDXL pipeline for embeddings of the reference."""
    positive, pooled = encoders.encode(params.prompt)
    if params.negative_prompt is None:
        negative, negative_pooled = np.zeros_like(positive), np.zeros_like(pooled)
    else:
        negative, negative_pooled = encoders.encode(params.negative_prompt)
    # diffusers takes texts of one length. Attention to repeated keys is attention to them once.
    longest = max(len(positive), len(negative))
    embeds = {
        "prompt_embeds": np.tile(positive, (longest // len(positive), 1)),
        "negative_prompt_embeds": np.tile(negative, (longest // len(negative), 1)),
        "pooled_prompt_embeds": pooled,
        "negative_pooled_prompt_embeds": negative_pooled,
    }
    return reference.generate_from(params, {name: torch.from_numpy(array)[None] for name, array in embeds.items()})


def params_of(loaded: Loaded, **fields: object) -> GenerationParams:
    request = {"prompt_syntax": "weighted", "seed": 7, "width": 128, "height": 128, "num_inference_steps": 6} | fields
    return resolve(GenerationRequest.model_validate(request), loaded.served)


PROMPTS: dict[str, dict[str, object]] = {
    "plain": {"prompt": "a large red circle on a blue background"},
    "weights": {
        "prompt": "a (large:1.3) [red] circle on a ((blue)) background",
        "negative_prompt": "(green:0.5) square",
    },
    "negative weight": {"prompt": "a red (circle:-0.6) on blue"},
    "two chunks": {"prompt": LONG[:500] + "(a green square:1.2)", "negative_prompt": "a circle"},
    "three chunks": {"prompt": LONG[:800], "negative_prompt": "(dark)"},
    "four chunks": {"prompt": LONG[:1200] + "(a blue square:1.4)", "negative_prompt": None},
    "long negative prompt": {"prompt": "a red circle", "negative_prompt": LONG[:600]},
}


@pytest.mark.parametrize("name", PROMPTS)
def test_image_is_that_of_diffusers(name: str, loaded: Loaded, reference: Reference, encoders: Encoders) -> None:
    params = params_of(loaded, **PROMPTS[name])
    [image], _, warnings = generate(loaded.model, [params])
    assert not warnings
    expected = generate_with_diffusers(reference, encoders, params)
    assert np.abs(image.astype(int) - expected.astype(int)).max() <= TOLERANCE


def test_each_prompt_gives_another_image(loaded: Loaded) -> None:
    """So the comparisons above can fail, and weights and later chunks have an effect."""
    params = params_of(loaded, prompt=LONG[:1200] + "a blue square")
    changed = [
        replace(params, prompt=LONG[:1200] + "(a blue square:1.4)"),
        replace(params, prompt=LONG[:1200]),
        replace(params, prompt="(" + LONG[:1200] + "a blue square)"),
        replace(params, negative_prompt=LONG[:600]),
        replace(params, prompt_syntax="plain"),
    ]
    images = [generate(loaded.model, [one])[0][0].astype(int) for one in (params, *changed)]
    assert min(np.abs(image - images[0]).max() for image in images[1:]) > TOLERANCE


def test_an_unweighted_prompt_is_a_plain_one(loaded: Loaded) -> None:
    params = params_of(loaded, prompt="a large red circle on a blue background", negative_prompt="green")
    one, other = (generate(loaded.model, [replace(params, prompt_syntax=s)])[0][0] for s in ("plain", "weighted"))
    assert np.array_equal(one, other)


def test_image_is_the_same_in_a_batch_of_other_lengths(loaded: Loaded) -> None:
    batch = [params_of(loaded, **fields, guidance_scale=scale) for fields in PROMPTS.values() for scale in (1.0, 5.0)]
    for params, image in zip(batch, generate(loaded.model, batch)[0], strict=True):
        [alone] = generate(loaded.model, [params])[0]
        assert np.abs(image.astype(int) - alone.astype(int)).max() <= 1


def test_second_chunk_is_obeyed(loaded: Loaded) -> None:
    """A caption after 75 commas. In the plain syntax it is left out, with a warning.

    Of 50 captions 37 were right when this was written. The tiny model was trained on captions without anything before
    them, see docs/log/tiny-model.md.
    """
    captions = evaluation_set(held_out=False, count=12)
    correct = dict.fromkeys(("plain", "weighted"), 0)
    for syntax in correct:
        size = {"width": 256, "height": 256, "num_inference_steps": 20}
        for seed, caption in enumerate(captions):
            params = params_of(loaded, prompt=", " * 75 + caption.text, prompt_syntax=syntax, seed=seed, **size)
            [image], _, warnings = generate(loaded.model, [params])
            correct[syntax] += score_image(image, caption.statement).ok
            assert len(warnings) == (syntax == "plain")
    assert correct["plain"] <= 1 and correct["weighted"] >= 6, correct


# -- chunks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "chunks"), [(0, 1), (75, 1), (76, 2), (150, 2), (151, 4), (225, 4), (300, 4)])
def test_number_of_chunks(words: int, chunks: int, loaded: Loaded) -> None:
    tokenizer = loaded.model.tokenizers["tokenizer"]
    found = weighted_chunks(tokenizer, "red " * words, 4, "prompt")
    assert len(found.ids) == chunks and {len(ids) for ids in found.ids} == {77}
    assert found.weights is None and (found.dropped, found.dropped_tokens) == ("", 0)
    settings = tokenizer.settings
    assert {(ids[0], settings.eos_token_id in ids) for ids in found.ids} == {(settings.bos_token_id, True)}
    if words == 151:
        assert [found.ids[3]] == plain_chunks(tokenizer, "").ids


def test_warns_of_the_text_that_does_not_fit(loaded: Loaded) -> None:
    params = params_of(loaded, prompt="red " * 290 + "(circle:1.2) " + "blue " * 20, negative_prompt="a " * 76)
    plan = plan_request(loaded.model, params)
    [warning] = plan.warnings
    assert warning.startswith("prompt: the text encoders read 300 tokens; the last 11 were left out: 'blue blue")
    # plain: as before
    plain = plan_request(loaded.model, replace(params, prompt_syntax="plain")).warnings
    assert [text.partition(";")[0] for text in plain if "tokens" in text] == [
        f"{name}: the text encoders read 77 tokens" for name in ("prompt", "negative_prompt")
    ]
    assert [text for text in plain if "tokens" not in text][0].startswith("prompt: read as text, not as a weight")


@pytest.mark.parametrize("syntax", ["plain", "weighted"])
def test_warns_of_constructs_of_other_programs(syntax: str, loaded: Loaded) -> None:
    prompts = {"prompt": "a red circle <lora:style:0.8>", "negative_prompt": "a [red:blue:0.5] square"}
    mask = Mask(np.full((128, 128), 255, np.uint8), "a BREAK", prompts["negative_prompt"], 1.0)
    params = params_of(loaded, prompt_syntax=syntax, **prompts)
    found = plan_request(loaded.model, params).warnings
    assert [warning.rpartition(": ")[0] for warning in found] == [
        "prompt: read as text, not as an adapter",
        "negative_prompt: read as text, not as a change of the prompt between steps",
    ]
    masked = replace(params, image=np.zeros((128, 128, 3), np.uint8), masks=(mask,), strength=1.0)
    first = plan_request(loaded.model, masked).warnings[0]
    assert first.startswith('masks.0.prompt: read as text, not as the end of a chunk: "BREAK"')


# -- fuzz -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def toy(toy_folder: Path) -> LoadedModel:
    """The toy in eager PyTorch. An image of one step takes milliseconds."""
    return load_eager_model(Checkpoint(toy_folder), None, FP32, "cpu")[1]


def random_prompt(choose: random.Random) -> str:
    pieces = [
        "red", "a circle", "(", ")", "[", "]", ":", ":1.3)", ":1e9)", ":1000000000)", ":nan)", ":NaN)", ":-inf)", ":0)",
        ":1.2.3)", "\\", "\\(", "\\]", "((", "))", "[[", ":-3)", " ", ",", "\n", "\u00e9", "\u6f22", "\U0001f600",
        "(" * 1000, ")" * 1000, "[" * 1000, "]" * 1000, "BREAK", "red " * 90, ":.)", ":+1)", ":\u0661)",
    ]  # fmt: skip
    return "a" + "".join(choose.choice(pieces) for _ in range(choose.randint(1, 25)))


def test_every_prompt_is_refused_or_gives_an_image(toy: LoadedModel, loaded: Loaded) -> None:
    choose = random.Random(0)
    refused = images = 0
    for _ in range(FUZZED):
        request = {"prompt": random_prompt(choose)[:4000], "prompt_syntax": "weighted", "seed": 1}
        if choose.random() < 0.3:
            request["negative_prompt"] = random_prompt(choose)[:4000]
        resolved = resolve(GenerationRequest.model_validate(request), loaded.served)
        params = replace(resolved, width=64, height=64, num_inference_steps=1, use_refiner=False)
        try:
            [image], _, _ = generate(toy, [params])
        except RequestRefused as error:
            assert error.field in ("prompt", "negative_prompt")
            refused += 1
        else:
            assert image.shape == (64, 64, 3)
            images += 1
    assert refused > FUZZED // 10 and images > FUZZED // 10


def test_tokenizes_fragments_like_transformers(loaded: Loaded, tokenizers: list[CLIPTokenizer]) -> None:
    tokenizer: ClipTokenizer = loaded.model.tokenizers["tokenizer"]
    for text in ("red", " red", "a, circle ", "", "caf\u00e9 \u6f22"):
        ids = [id for piece in tokenizer.pieces(text) for id in piece.ids]
        assert ids == tokenizers[0](text, add_special_tokens=False).input_ids
